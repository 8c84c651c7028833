"""Exact top-k over rows of logits, and groups of compressed keys back to token positions."""

import torch

from gdn import reference
from gdn.ops._call import always, launch, new, operator, prepare, run_reference
from gdn.ops._checks import bad_value, check_at_least, check_tensor, dtype_name
from gdn.ops._logits_checks import INDEX_DTYPES
from gdn.ops._modes import is_empty
from gdn.problems import ExpandTopkGroupsParams, ExpandTopkGroupsProblem, TopkParams, TopkProblem
from gdn.reference.logits import key_range
from gdn.reference.topk import list_short_rows

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_indices_out(out: torch.Tensor | None, rows: int, columns: int, device: torch.device) -> None:
    if out is not None:
        check_tensor("out", out, shape=[rows, columns], dtypes=(torch.int32,), device=device, last_contiguous=True)


@operator(writes={"out": always}, contiguous=("logits",))
def topk_indices(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    sorted_by: str = "index",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The k largest logits of each row's range: int32 indices [rows, k] relative to the range's start, -1 last.

    logits [rows, n] float32, bfloat16, float16 or float64, any row stride, last dim contiguous.
    k: any count; a row with fewer selectable values ends in -1.
    row_starts, row_ends [rows] int32 or int64: only columns [start, end) are read, clamped to [0, n]; None = 0 and n.
    sorted_by: 'index' = ascending indices, 'score' = descending scores, ties by ascending index.
    out: [rows, k] int32; None = a new tensor.

    Exact: the selected scores are the multiset that torch.topk selects. Deterministic: of equal scores (-0.0 equals 0.0)
    the smaller index is taken. NaN and -inf are never selected. ValueError or TypeError before anything is written.
    """
    check_tensor("logits", logits, shape=["rows", "n"], dtypes=LOGIT_DTYPES)
    rows, device = logits.shape[0], logits.device
    check_at_least("k", k)
    for name, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        if bound is not None:
            check_tensor(name, bound, shape=[rows], dtypes=INDEX_DTYPES, device=device)
    if sorted_by not in ("index", "score"):
        bad_value("sorted_by", "'index' or 'score'", repr(sorted_by))
    check_indices_out(out, rows, k, device)
    return select_rows(logits, k, row_starts, row_ends, sorted_by, out, backend)


def select_rows(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sorted_by: str,
    out: torch.Tensor | None,
    backend: str | None,
    list_short: bool = False,
    num_keys: int | None = None,
    drafts: int = 1,
) -> torch.Tensor:
    """`topk_indices` of checked arguments. list_short: rows of at most k columns list them all, and are not read.

    num_keys: row_starts and row_ends are ranges of num_keys keys, and column 0 is the first key of each.
    drafts: row_ends [rows / drafts] belong to the last of `drafts` rows; each row before it has one column less.
    """
    rows, device = logits.shape[0], logits.device
    problem = TopkProblem(
        dtype=dtype_name(logits.dtype),
        starts_dtype=dtype_name(row_starts.dtype) if row_starts is not None else None,
        ends_dtype=dtype_name(row_ends.dtype) if row_ends is not None else None,
        sorted_by=sorted_by,
        k=k,
        num_rows=rows,
        num_columns=logits.shape[1],
    )
    prepared = prepare(problem, device, backend)
    if prepared.launch is None:
        row_starts, row_ends = _own_bounds(row_starts, row_ends, num_keys, drafts)
        picked = reference.topk_indices(logits, k, row_starts, row_ends, sorted_by=sorted_by, out=out)
        return picked.copy_(list_short_rows(picked, _lengths(logits, row_starts, row_ends))) if list_short else picked
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=device)
    if not is_empty(rows, k):
        params = TopkParams(
            logits=logits,
            row_starts=row_starts,
            row_ends=row_ends,
            out=out,
            list_short=int(list_short),
            num_keys=-1 if num_keys is None else num_keys,
            drafts=drafts,
        )
        prepared.launch(params)
    return out


def _own_bounds(
    starts: torch.Tensor | None, ends: torch.Tensor | None, num_keys: int | None, drafts: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The columns of each row, where bounds are given as keys or for several rows at a time."""
    if num_keys is not None and starts is not None and ends is not None:
        return None, ends.clamp(0, num_keys) - starts.clamp(0, num_keys)
    if drafts != 1 and ends is not None:
        before_last = torch.arange(1 - drafts, 1, dtype=ends.dtype, device=ends.device)
        return starts, (ends.clamp(min=0)[:, None] + before_last).reshape(-1)
    return starts, ends


def _lengths(logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None) -> torch.Tensor:
    """Columns of each row's range, which is clamped as the selection clamps it."""
    rows, columns = logits.shape
    zeros = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    start, end = key_range(
        zeros if row_starts is None else row_starts, zeros + columns if row_ends is None else row_ends, columns
    )
    return end - start


@operator(reference=reference.expand_topk_groups, writes={"out": always}, memo=True, varies=("group_indices", "positions"))
def expand_topk_groups(
    group_indices: torch.Tensor,
    positions: torch.Tensor,
    *,
    ratio: int = 4,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Selected groups of `ratio` tokens as token positions, with the causal tail: int32 [tokens, k * ratio + ratio - 1].

    group_indices [tokens, k] int32 or int64: negative, or larger than int32 holds, = no group. positions [tokens] int32 or
    int64 of the query tokens: negative, or larger than int32 holds, = no tail. The tail is the query's own unfinished group:
    (pos + 1) // ratio * ratio up to and including pos. Groups keep their order, the tail follows, -1 is last.
    backend: as in chunk_gated_delta_rule. ValueError or TypeError before anything is written.
    """
    check_tensor("group_indices", group_indices, shape=["tokens", "k"], dtypes=INDEX_DTYPES)
    tokens, k = group_indices.shape
    check_tensor("positions", positions, shape=[tokens], dtypes=INDEX_DTYPES, device=group_indices.device)
    check_at_least("ratio", ratio, 1)
    check_indices_out(out, tokens, k * ratio + ratio - 1, group_indices.device)
    problem = ExpandTopkGroupsProblem(
        ratio=ratio,
        group_dtype=dtype_name(group_indices.dtype),
        position_dtype=dtype_name(positions.dtype),
        num_tokens=tokens,
        k=k,
    )
    prepared = prepare(problem, group_indices.device, backend)
    if prepared.launch is None or is_empty(tokens, k):
        run_reference()
    if out is None:
        out = new(torch.int32, group_indices.device, tokens, k * ratio + ratio - 1)
    params = ExpandTopkGroupsParams(group_indices=group_indices, positions=positions, out=out)
    launch(prepared, params, (out,))
    return out
