"""Public operators `topk_indices` (exact top-k over rows of logits) and `expand_topk_groups` (groups to token positions)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.core import check
from gdn.core.call import always, choose, launch, new, operator, prepare, record, run_reference
from gdn.core.check import FLOAT_DTYPES, INDEX_DTYPES, dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import dtypes_of
from gdn.ops.indexer import reference
from gdn.ops.indexer.problem import ExpandTopkGroupsParams, ExpandTopkGroupsProblem, TopkParams, TopkProblem
from gdn.ops.indexer.reference import column_range, list_short_rows
from gdn.runtime.registry import Backend


@operator(reference.topk_indices, writes={"out": always}, varies=("logits", "row_ends"), contiguous=("logits",))
def topk_indices(
    logits: Tensor,
    k: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    *,
    sorted_by: str = "index",
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Indices of the k largest logits of each row's range.

    Exact: the selected scores are the multiset that torch.topk selects. Deterministic: of equal scores (-0.0 equals 0.0) the
    smaller index is taken. NaN and -inf are never selected.

    Parameters
    ----------
    logits : Tensor [rows, n]
        Scores, any float dtype and row stride. A last dimension that is not contiguous is copied, logged once.
    k : int
        Columns of the result, >= 0; a row with fewer selectable values ends in -1.
    row_starts, row_ends : Tensor [rows], optional
        Each row's range of columns, int32 or int64, clamped to [0, n]; None = 0 and n. Only columns [start, end) are read.
    sorted_by : {"index", "score"}
        Order of the result: ascending indices, or descending scores with ties by ascending index. -1 is always last.
    out : Tensor [rows, k] of int32, optional
        Tensor to write the indices into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [rows, k] of int32
        Indices relative to the range's start, -1 last; `out` itself where it is given, else a new tensor.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention", report, 2025.

    Examples
    --------
    >>> import torch, gdn
    >>> logits = torch.tensor([[0.1, 0.9, 0.5, 0.9], [3.0, 2.0, 1.0, 0.0]])
    >>> gdn.topk_indices(logits, 2, sorted_by="score").tolist()
    [[1, 3], [0, 1]]
    >>> gdn.topk_indices(logits, 3, torch.tensor([0, 2]), torch.tensor([4, 4])).tolist()
    [[1, 2, 3], [0, 1, -1]]
    """
    check.tensor("logits", logits, shape=["rows", "n"], dtypes=FLOAT_DTYPES)
    rows, device = logits.shape[0], logits.device
    check.at_least("k", k)
    for name, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        check.optional(name, bound, shape=[rows], dtypes=INDEX_DTYPES, device=device)
    check.one_of("sorted_by", sorted_by, ("index", "score"))
    check.out(out, [rows, k], torch.int32, device)
    out = select_rows(logits, k, Rows(row_starts, row_ends), sorted_by, out, backend)
    if not is_empty(rows, k):
        record((out,))
    return out


class Rows(NamedTuple):
    """Ranges of rows of scores, and what the result lists of each."""

    starts: Tensor | None
    ends: Tensor | None
    list_short: bool = False  # rows of at most k columns list all of them, and are not read
    num_keys: int | None = None  # keys that starts and ends refer to; column 0 of a row is then its first key
    drafts: int = 1  # rows per entry of ends [rows / drafts], the end of the last of them; each row before has one column less
    # Above 1 columns are groups of `ratio` tokens, and their tokens are listed, as by `expand_topk_groups`.
    ratio: int = 1
    positions: Tensor | None = None  # [rows] with a ratio above 1


def select_rows(logits: Tensor, k: int, ranges: Rows, sorted_by: str, out: Tensor | None, backend: Backend | None) -> Tensor:
    """`topk_indices` of checked arguments, as a part of the call that is running."""
    starts, ends, list_short, num_keys, drafts, ratio, positions = ranges
    rows, device = logits.shape[0], logits.device
    fields: dict[str, Any] = dtypes_of(starts=starts, ends=ends, position=positions) | {"sorted_by": sorted_by, "ratio": ratio}
    sizes: dict[str, Any] = {"k": k, "num_rows": rows, "num_columns": logits.shape[1]}
    prepared = choose(TopkProblem(dtype=dtype_name(logits.dtype), **fields, **sizes), device, backend)
    if prepared.launch is None:
        starts, ends = _own_bounds(starts, ends, num_keys, drafts)
        picked = reference.topk_indices(logits, k, starts, ends, sorted_by=sorted_by, out=out if positions is None else None)
        if list_short:
            start, end = column_range(logits, starts, ends)
            picked.copy_(list_short_rows(picked, end - start))
        return picked if positions is None else reference.expand_topk_groups(picked, positions, ratio=ratio, out=out)
    if out is None:
        out = new(torch.int32, device, rows, k * ratio + ratio - 1)
    if not is_empty(rows, k):
        keys = -1 if num_keys is None else num_keys
        launch(prepared, TopkParams(logits, starts, ends, positions, out, int(list_short), keys, drafts))
    return out


def _own_bounds(starts: Tensor | None, ends: Tensor | None, num_keys: int | None, drafts: int) -> tuple[Tensor | None, ...]:
    """Bounds in columns of each row, from bounds that are keys or that several rows share."""
    if num_keys is not None and starts is not None and ends is not None:
        return None, ends.clamp(0, num_keys) - starts.clamp(0, num_keys)
    if drafts != 1 and ends is not None:
        before_last = torch.arange(1 - drafts, 1, dtype=ends.dtype, device=ends.device)
        return starts, (ends.clamp(min=0)[:, None] + before_last).reshape(-1)
    return starts, ends


@operator(reference.expand_topk_groups, writes={"out": always}, varies=("group_indices", "positions"))
def expand_topk_groups(
    group_indices: Tensor, positions: Tensor, *, ratio: int = 4, out: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """Token positions of selected groups of `ratio` tokens, with the causal tail.

    The tail is the query's own unfinished group: positions (pos + 1) // ratio * ratio up to and including pos. Groups keep
    their order, the tail follows, -1 is last.

    Parameters
    ----------
    group_indices : Tensor [tokens, k]
        Selected groups, int32 or int64; negative, or larger than int32 holds, = none.
    positions : Tensor [tokens]
        Position of each query token, int32 or int64; negative, or larger than int32 holds, = no tail.
    ratio, out : int, Tensor [tokens, k * ratio + ratio - 1] of int32 or None
        Tokens per group, >= 1; tensor to write the positions into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [tokens, k * ratio + ratio - 1] of int32
        Positions; `out` itself where it is given, else a new tensor.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written.

    References
    ----------
    .. [1] ``Qwen4ExpTextQSAIndexer`` of ``qwen4_exp`` in Hugging Face Transformers, 5.23 or newer.

    Examples
    --------
    >>> import torch, gdn
    >>> gdn.expand_topk_groups(torch.tensor([[1, -1]]), torch.tensor([9])).tolist()  # groups of 4: 4..7, and the tail 8..9
    [[4, 5, 6, 7, 8, 9, -1, -1, -1, -1, -1]]
    """
    check.tensor("group_indices", group_indices, shape=["tokens", "k"], dtypes=INDEX_DTYPES)
    tokens, k = group_indices.shape
    check.tensor("positions", positions, shape=[tokens], dtypes=INDEX_DTYPES, device=group_indices.device)
    check.at_least("ratio", ratio, 1)
    check.out(out, [tokens, k * ratio + ratio - 1], torch.int32, group_indices.device)
    dtypes = dtypes_of(group=group_indices, position=positions)
    problem = ExpandTopkGroupsProblem(ratio=ratio, **dtypes, num_tokens=tokens, k=k)
    prepared = prepare(problem, group_indices.device, backend)
    if is_empty(tokens, k):
        run_reference("nothing to list")
    if out is None:
        out = new(torch.int32, group_indices.device, tokens, k * ratio + ratio - 1)
    launch(prepared, ExpandTopkGroupsParams(group_indices, positions, out), (out,))
    return out
