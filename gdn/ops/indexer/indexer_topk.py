"""Public operators `indexer_topk` and `paged_indexer_topk`: logits and top-k in bounded memory.

The scores of some rows at a time go through one workspace. A step is two launches: the logits, and the selection, which writes
its rows of the result. The logits leave out rows with at most topk visible keys, and the selection lists these without reading
scores. Both take the ranges unchanged; no value is read back to the host.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gdn import runtime
from gdn.core import check, values
from gdn.core.call import always, check_memory, choose, make, new, operator, part, record, validates
from gdn.core.check import bad_value
from gdn.core.modes import is_empty, is_tracing
from gdn.core.ordered import ordered
from gdn.core.tensors import contiguous, contiguous_int32
from gdn.ops.indexer import reference
from gdn.ops.indexer.mqa_logits import check_operands, problem_of, score
from gdn.ops.indexer.paged_mqa_logits import check_paged_operands, check_values
from gdn.ops.indexer.paged_mqa_logits import problem_of as paged_problem_of
from gdn.ops.indexer.paged_mqa_logits import score as paged_score
from gdn.ops.indexer.topk import Rows, select_rows
from gdn.runtime import Choice, env
from gdn.runtime.registry import Backend


@operator(reference.indexer_topk, writes={"out": always}, varies=("q", "k"), contiguous=("q", "k", "weights"))
def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    *,
    k_scale: Tensor | None = None,
    scale: float = 1.0,
    relu: bool = True,
    workspace_bytes: int | None = None,
    max_seqlen_k: int | None = None,
    ratio: int = 1,
    positions: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Indexer logits and top-k of ragged prefill in bounded memory.

    The result is that of ``topk_indices(mqa_logits(...))`` without the whole score matrix, except that a row with at most
    `topk` visible keys lists all of them, whatever their scores. In longer rows a key is not selected whose score is NaN, as
    that of a NaN in the key or the query is.

    Parameters
    ----------
    q, k, weights, cu_seqlen_ks, cu_seqlen_ke : Tensor
        Queries [M, H, D], keys [Nk, D] or [Nk, kv_heads, D], weights and ranges of key rows [M], as for `mqa_logits`.
    topk, k_scale, scale, relu : int, Tensor or None, float, bool
        Columns of the result, >= 0; the others as for `mqa_logits`.
    workspace_bytes : int, optional
        Bytes of float32 scores held at a time; at least one row. None = ``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``.
    max_seqlen_k : int, optional
        Bound on the length of all ranges; a row of scores then has that many columns instead of Nk.
    ratio, positions : int, Tensor [M] of int32 or int64, optional
        With a ratio above 1 each key is that of a group of `ratio` tokens, `topk` is at least 1, and the result lists tokens as
        `expand_topk_groups` does: those of the selected groups, then the query's own unfinished group up to its position.
    out : Tensor [M, columns] of int32, optional
        Tensor to write the indices into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.
        A kernel backend applies to the logits, and the selection runs on any that has a kernel; "reference" applies to both.
        With `topk` 0 nothing runs, and the backend is not checked.

    Returns
    -------
    Tensor [M, topk] of int32, with a ratio [M, topk * ratio + ratio - 1]
        Indices relative to `cu_seqlen_ks`, ascending, -1 last; `out` itself where it is given, else a new tensor.

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
    >>> q, k, weights = torch.randn(3, 16, 128), torch.randn(10, 128), torch.rand(3, 16)
    >>> indices = gdn.indexer_topk(q, k, weights, torch.tensor([0, 0, 4]), torch.tensor([8, 9, 6]), 4, scale=128**-0.5)
    >>> indices.shape, indices[2].tolist()  # the last row sees two keys
    (torch.Size([3, 4]), [0, 1, -1, -1])
    """
    check_operands(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    num_rows, num_keys, device = q.shape[0], k.shape[0], q.device
    check.at_least("max_seqlen_k", max_seqlen_k)
    width = num_keys if max_seqlen_k is None else max_seqlen_k
    columns = _columns(topk, ratio, positions, num_rows, device)
    check.out(out, [num_rows, columns], torch.int32, device)
    check_memory()
    if out is None:
        out = new(torch.int32, device, num_rows, columns)
    if is_tracing():
        return out
    if validates(device):  # all rows, before the first step writes
        values.check_ranges(cu_seqlen_ks, cu_seqlen_ke, num_keys, max_seqlen_k)
    if _selects_nothing(columns):
        return out
    step = units_per_block(workspace_bytes, 4 * width, num_rows)
    with ordered(backend, "indexer_topk") as backend:
        q, k = contiguous("q", q), contiguous("k", k)  # once, not for each block of rows
        starts, ends = make(contiguous_int32, cu_seqlen_ks), make(contiguous_int32, cu_seqlen_ke)
        chosen: Backend | None = "reference" if backend == "reference" else None  # a kernel backend is for the logits only
        packed_keys = None if max_seqlen_k is None else num_keys  # the scores of a row start with its first key

        def logits(some: slice, buffer: Tensor) -> None:
            rows, own_weights = part(q, some), None if weights is None else part(weights, some)
            ranges = part(starts, some), part(ends, some)
            problem = problem_of(rows, k, own_weights, k_scale, relu, max_seqlen_k, False, torch.float32)
            prepared = choose(problem, device, backend)
            if prepared.launch is None:
                reference.mqa_logits(
                    rows, k, own_weights, *ranges, k_scale=k_scale, scale=scale, relu=relu, max_seqlen_k=max_seqlen_k,
                    clean_logits=False, out=buffer,
                )  # fmt: skip
            elif not is_empty(*buffer.shape, num_keys):
                score(prepared, rows, k, own_weights, *ranges, k_scale, scale, topk, buffer)

        def select(scores: Tensor, some: slice, rows: Tensor) -> None:
            own = None if positions is None else part(positions, some)
            ranges = Rows(part(starts, some), part(ends, some), True, num_keys=packed_keys, ratio=ratio, positions=own)
            select_rows(scores, topk, ranges, "index", rows, chosen)

        _in_blocks(logits, select, out, num_rows, step, width, topk)
        record((out,), aligned=(q, k, k_scale))
    return out


@operator(
    reference.paged_indexer_topk, writes={"out": always}, varies=("q", "block_tables"),
    contiguous=("q", "weights", "block_tables"),
)  # fmt: skip
def paged_indexer_topk(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    topk: int,
    *,
    scale: float = 1.0,
    relu: bool = True,
    workspace_bytes: int | None = None,
    max_context_len: int | None = None,
    ratio: int = 1,
    positions: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Indexer logits and top-k of paged decode in bounded memory, some sequences at a time.

    The result is that of ``topk_indices(paged_mqa_logits(...))``, except that a row with at most `topk` visible keys lists all
    of them, whatever their scores. No value is read back to the host: the call can be captured in a CUDA graph, and lengths may
    change between replays.

    Parameters
    ----------
    q, cache, weights, context_lens, block_tables : Tensor
        Queries [B, next_n, H, D], pages of keys, weights, numbers of visible keys and page numbers, as for `paged_mqa_logits`.
    topk, scale, relu, workspace_bytes : int, float, bool, int or None
        See `indexer_topk`. The workspace always has room for the next_n rows of one sequence.
    max_context_len : int, optional
        Bound on the lengths. None = what `block_tables` can address (max_pages * page_size).
    ratio, positions : int, Tensor [B * next_n] of int32 or int64, optional
        With a ratio above 1 each key is that of a group of `ratio` tokens, `topk` is at least 1, and the result lists tokens as
        `expand_topk_groups` does: those of the selected groups, then the query's own unfinished group up to its position.
    out : Tensor [B * next_n, columns] of int32, optional
        Tensor to write the indices into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        As for `indexer_topk`, with the switches of ``GDN_BACKEND``.

    Returns
    -------
    Tensor [B * next_n, topk] of int32, with a ratio [B * next_n, topk * ratio + ratio - 1]
        Positions in the sequence, ascending, -1 last; `out` itself where it is given, else a new tensor.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention", report, 2025.
    """
    pages = check_paged_operands(q, cache, weights, context_lens, block_tables)
    (batch, next_n), device = q.shape[:2], q.device
    check.at_least("max_context_len", max_context_len)
    width = block_tables.shape[1] * pages[0]
    width = width if max_context_len is None else min(width, max_context_len)
    columns = _columns(topk, ratio, positions, batch * next_n, device)
    check.out(out, [batch * next_n, columns], torch.int32, device)
    check_memory()
    if out is None:
        out = new(torch.int32, device, batch * next_n, columns)
    if is_tracing():
        return out
    check_values(block_tables, context_lens, pages[0], cache.shape[0], width)  # all sequences, before the first step writes
    if _selects_nothing(columns):
        return out
    step = units_per_block(workspace_bytes, 4 * width * next_n, batch)
    with ordered(backend, "paged_indexer_topk") as backend:
        q, lengths = contiguous("q", q), make(contiguous_int32, context_lens)
        chosen: Backend | None = "reference" if backend == "reference" else None  # as in `indexer_topk`
        drafts = 1 if lengths.dim() == 2 else next_n  # rows that share one length

        def rows_of(some: slice) -> slice:
            return slice(some.start * next_n, some.stop * next_n)

        def logits(some: slice, buffer: Tensor) -> None:
            queries, own_weights = part(q, some), None if weights is None else part(weights, rows_of(some))
            own_lengths, tables = part(lengths, some), part(block_tables, some)
            problem = paged_problem_of(queries, cache, pages, own_weights, own_lengths, width, relu, False, torch.float32)
            prepared = choose(problem, device, backend)
            if prepared.launch is None:
                reference.paged_mqa_logits(
                    queries, cache, own_weights, own_lengths, tables, width, scale=scale, relu=relu, clean_logits=False,
                    out=buffer,
                )  # fmt: skip
            elif not is_empty(cache.shape[0], tables.shape[1], *buffer.shape):
                paged_score(prepared, queries, cache, own_weights, own_lengths, tables, scale, topk, buffer)

        def select(scores: Tensor, some: slice, rows: Tensor) -> None:
            own = None if positions is None else part(positions, rows_of(some))
            ranges = Rows(None, part(lengths, some).reshape(-1), True, drafts=drafts, ratio=ratio, positions=own)
            select_rows(scores, topk, ranges, "index", rows, chosen)

        _in_blocks(logits, select, out, batch, step, width, topk)
        record((out,), aligned=(q, cache))
    return out


Logits = Callable[[slice, Tensor], None]
Select = Callable[[Tensor, slice, Tensor], None]


def _columns(topk: int, ratio: int, positions: Tensor | None, num_rows: int, device: torch.device) -> int:
    """Columns of the result; checks what they follow from."""
    check.at_least("ratio", ratio, 1)
    has_groups = bool(ratio > 1)  # the ratio may be a symbol
    check.at_least("topk", topk, int(has_groups))
    if has_groups == (positions is None):
        bad_value("positions", "a tensor with a ratio above 1, else None", "None" if positions is None else "a tensor")
    check.optional("positions", positions, shape=[num_rows], dtypes=check.INDEX_DTYPES, device=device)
    return topk * ratio + ratio - 1


def _selects_nothing(columns: int) -> bool:
    """Whether the result has no columns: then no score is computed, and any workspace will do."""
    if not is_empty(columns):
        return False
    runtime.record(Choice("topk", "reference", decided_by="topk 0: nothing to select"))
    return True


def _in_blocks(logits: Logits, select: Select, out: Tensor, units: int, step: int, width: int, topk: int) -> None:
    """Scores and selects `step` rows or sequences at a time, of `units`.

    logits(some, buffer): writes the scores of some of them, outside of their ranges anything, since the selection reads ranges
    only. select(scores, some, rows): their selection, written to rows of `out`.
    """
    num_rows, device = out.shape[0], out.device
    if is_empty(num_rows) or width <= topk:  # all columns are listed, without scores
        logits(slice(0, 0), new(torch.float32, device, 0, width))  # refuses a backend that cannot run
        row = new(torch.float32, device, 1, width)
        select(make(functools.partial(_repeated, num_rows), row), slice(0, units), out)
        return
    each = num_rows // units
    buffer = new(torch.float32, device, min(step, units) * each, width)
    for low in range(0, units, step):
        some = slice(low, min(low + step, units))
        scores = part(buffer, slice(0, (some.stop - some.start) * each))
        logits(some, scores)
        select(scores, some, part(out, slice(some.start * each, some.stop * each)))


def _repeated(count: int, row: Tensor) -> Tensor:
    return row.expand(count, -1)


def units_per_block(workspace_bytes: int | None, unit_bytes: int, units: int) -> int:
    """Number of rows (or sequences) whose scores fit the workspace; above 128 a multiple of 128, so that blocks are aligned."""
    if workspace_bytes is None:
        workspace_bytes = max(unit_bytes, env.current().sparse_indexer_max_logits_mb * 2**20)
    check.at_least("workspace_bytes", workspace_bytes)
    if workspace_bytes < unit_bytes and units:
        bad_value("workspace_bytes", f"at least {unit_bytes}, the scores of one row (paged: one sequence)", workspace_bytes)
    step = workspace_bytes // max(1, unit_bytes)
    step = step // 128 * 128 if step > 128 else step
    return max(1, min(step, units))
