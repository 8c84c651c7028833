"""Indexer logits and top-k in bounded memory: the scores of some rows at a time go through one workspace.

A step is two launches, the logits' and the selection's, which writes its rows of the result. A row that sees at most topk
keys is left out by the logits, and the selection lists it without reading. Both take the ranges as they are given; no value
comes back to the host.
"""

import contextlib
from collections.abc import Iterator

import torch

from gdn import runtime
from gdn.ops import _rows, _values
from gdn.ops._call import always, check_memory, operator, validates
from gdn.ops._checks import bad_value, check_at_least, check_tensor
from gdn.ops._delta_rule import contiguous_int32
from gdn.ops._logits_checks import QUERY_DTYPES, check_cache, check_weights
from gdn.ops._modes import is_empty, is_tracing
from gdn.ops.mqa_logits import check_operands, mqa_logits
from gdn.ops.paged_mqa_logits import check_block_tables, check_lengths, check_values, paged_mqa_logits
from gdn.ops.topk import check_indices_out, select_rows
from gdn.runtime import env, registry


@operator(writes={"out": always}, contiguous=("q", "k", "weights"))
def indexer_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    *,
    k_scale: torch.Tensor | None = None,
    scale: float = 1.0,
    relu: bool = True,
    workspace_bytes: int | None = None,
    max_seqlen_k: int | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`topk_indices(mqa_logits(...))` without the whole score matrix: int32 [M, topk], ascending, -1 last.

    q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale, scale, relu: as `gdn.mqa_logits`. Indices are relative to
    cu_seqlen_ks. A row with at most topk visible keys lists all of them, whatever their scores.
    workspace_bytes: float32 scores held at a time; None = VLLM_SPARSE_INDEXER_MAX_LOGITS_MB. It must hold one row.
    max_seqlen_k: a bound on the length of all ranges; a row of scores then has that many columns instead of Nk.
    backend: of the logits; "reference" is of the selection too, which else runs on whatever backend has a kernel.

    ValueError or TypeError names the argument, before anything is written.
    """
    check_operands(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    num_rows, num_keys, device = q.shape[0], k.shape[0], q.device
    check_at_least("topk", topk)
    if max_seqlen_k is not None:
        check_at_least("max_seqlen_k", max_seqlen_k)
    width = num_keys if max_seqlen_k is None else max_seqlen_k
    check_indices_out(out, num_rows, topk, device)
    check_memory()
    if is_tracing():
        return torch.empty(num_rows, topk, dtype=torch.int32, device=device) if out is None else out
    step = _units_per_block(_budget(workspace_bytes, 4 * width, num_rows), 4 * width, num_rows)
    if validates(device):  # of all rows, before the first step writes
        _values.check_ranges(cu_seqlen_ks, cu_seqlen_ke, num_keys, max_seqlen_k)
    with _ordered(backend, "indexer_topk") as backend:
        q, k = _rows.contiguous("q", q), _rows.contiguous("k", k)  # once, not for every block of rows
        starts, ends = contiguous_int32(cu_seqlen_ks), contiguous_int32(cu_seqlen_ke)
        packed_keys = None if max_seqlen_k is None else num_keys  # the scores of a row start with its first key

        def logits(first: int, last: int, buffer: torch.Tensor | None) -> torch.Tensor:
            return mqa_logits(
                q[first:last],
                k,
                weights[first:last] if weights is not None else None,
                starts[first:last],
                ends[first:last],
                k_scale=k_scale,
                scale=scale,
                relu=relu,
                max_seqlen_k=max_seqlen_k,
                clean_logits=False,  # the selection reads ranges only
                skip_rows_up_to=topk,
                out=buffer,
                backend=backend,
            )

        if is_empty(num_rows) or width <= topk:
            logits(0, 0, None)  # for its checks: nothing is scored
            return _listed(num_rows, width, topk, starts, ends, out, backend, device, num_keys=packed_keys)
        buffer: torch.Tensor | None = None
        for low in range(0, num_rows, step):
            high = min(low + step, num_rows)
            scores = logits(low, high, buffer[: high - low] if buffer is not None else None)
            buffer = scores if buffer is None else buffer
            if out is None:
                out = torch.empty(num_rows, topk, dtype=torch.int32, device=device)
            select_rows(
                scores,
                topk,
                starts[low:high],
                ends[low:high],
                "index",
                out[low:high],
                _selection(backend),
                list_short=True,
                num_keys=packed_keys,
            )
        assert out is not None
        return out


@operator(writes={"out": always}, contiguous=("q", "weights", "block_tables"))
def paged_indexer_topk(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor | None,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    topk: int,
    *,
    scale: float = 1.0,
    relu: bool = True,
    workspace_bytes: int | None = None,
    max_context_len: int | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`topk_indices(paged_mqa_logits(...))`, some sequences at a time: int32 [B * next_n, topk], ascending, -1 last.

    q, cache, weights, context_lens, block_tables, scale, relu: as `gdn.paged_mqa_logits`. A row with at most topk visible
    keys lists all of them, whatever their scores.
    workspace_bytes: float32 scores held at a time; None = VLLM_SPARSE_INDEXER_MAX_LOGITS_MB. It must hold one sequence's
        next_n rows.
    max_context_len: a bound on the lengths; None = what block_tables can address (max_pages * page_size).
    backend: of the logits; "reference" is of the selection too, which else runs on whatever backend has a kernel.

    ValueError or TypeError names the argument, before anything is written. No host read: it can be captured in a CUDA
    graph, and lengths may change between replays.
    """
    check_tensor("q", q, shape=["B", "next_n", "H", "D"], dtypes=QUERY_DTYPES)
    batch, next_n, num_heads, head_dim = q.shape
    device = q.device
    page_size, _ = check_cache(cache, head_dim, device, q.dtype)
    check_weights(weights, batch * next_n, num_heads, device)
    check_lengths(context_lens, batch, next_n, device)
    check_block_tables(block_tables, batch, device)
    check_at_least("topk", topk)
    if max_context_len is not None:
        check_at_least("max_context_len", max_context_len)
    width = block_tables.shape[1] * page_size
    width = width if max_context_len is None else min(width, max_context_len)
    sequence_bytes = 4 * width * next_n
    check_indices_out(out, batch * next_n, topk, device)
    check_memory()
    if is_tracing():
        return torch.empty(batch * next_n, topk, dtype=torch.int32, device=device) if out is None else out
    step = _units_per_block(_budget(workspace_bytes, sequence_bytes, batch), sequence_bytes, batch)
    check_values(block_tables, context_lens, page_size, cache.shape[0], width)  # of all sequences, before the first step writes
    with _ordered(backend, "paged_indexer_topk") as backend:
        q, context_lens = _rows.contiguous("q", q), contiguous_int32(context_lens)
        drafts = 1 if context_lens.dim() == 2 else next_n  # rows that one length is for

        def logits(first: int, last: int, buffer: torch.Tensor | None) -> torch.Tensor:
            rows = slice(first * next_n, last * next_n)
            return paged_mqa_logits(
                q[first:last],
                cache,
                weights[rows] if weights is not None else None,
                context_lens[first:last],
                block_tables[first:last],
                width,
                scale=scale,
                relu=relu,
                clean_logits=False,  # the selection reads ranges only
                skip_rows_up_to=topk,
                out=buffer,
                backend=backend,
            )

        if is_empty(batch, next_n) or width <= topk:
            logits(0, 0, None)  # for its checks: nothing is scored
            return _listed(batch * next_n, width, topk, None, context_lens.reshape(-1), out, backend, device, drafts=drafts)
        buffer: torch.Tensor | None = None
        for low in range(0, batch, step):
            high = min(low + step, batch)
            rows = slice(low * next_n, high * next_n)
            scores = logits(low, high, buffer[: rows.stop - rows.start] if buffer is not None else None)
            buffer = scores if buffer is None else buffer
            if out is None:
                out = torch.empty(batch * next_n, topk, dtype=torch.int32, device=device)
            select_rows(
                scores,
                topk,
                None,
                context_lens[low:high].reshape(-1),
                "index",
                out[rows],
                _selection(backend),
                list_short=True,
                drafts=drafts,
            )
        assert out is not None
        return out


def _listed(
    num_rows: int,
    width: int,
    topk: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    out: torch.Tensor | None,
    backend: str | None,
    device: torch.device,
    *,
    num_keys: int | None = None,
    drafts: int = 1,
) -> torch.Tensor:
    """Rows of at most topk columns, all of which are in the result: there is nothing to score or to read."""
    unread = torch.empty(1, width, device=device).expand(num_rows, width)
    return select_rows(
        unread,
        topk,
        row_starts,
        row_ends,
        "index",
        out,
        _selection(backend),
        list_short=True,
        num_keys=num_keys,
        drafts=drafts,
    )


def _units_per_block(budget: int, unit_bytes: int, units: int) -> int:
    """Rows (or sequences) whose scores fit the workspace; beyond 128 a multiple of 128, so that blocks start aligned."""
    step = budget // max(1, unit_bytes)
    step = step // 128 * 128 if step > 128 else step
    return max(1, min(step, units))


def _budget(workspace_bytes: int | None, unit_bytes: int, units: int) -> int:
    """Bytes of the workspace, which must hold a unit if there is any."""
    if workspace_bytes is None:
        return max(unit_bytes, env.current().sparse_indexer_max_logits_mb * 2**20)
    check_at_least("workspace_bytes", workspace_bytes)
    if workspace_bytes < unit_bytes and units:
        bad_value("workspace_bytes", f"at least {unit_bytes}, the scores of one row (paged: one sequence)", workspace_bytes)
    return workspace_bytes


@contextlib.contextmanager
def _ordered(backend: str | None, op: str) -> Iterator[str | None]:
    """The argument, or the order that GDN_BACKEND_<OP> gives for the combined operator, which its parts then report."""
    own = env.current().backend_of.get(op, "auto")
    is_switch = backend is None and own != "auto"
    with runtime.ordering(registry.operator(op).switch if is_switch else None):
        yield own if is_switch else backend


def _selection(backend: str | None) -> str | None:
    """An order for a kernel backend is about the logits."""
    return "reference" if backend == "reference" else None
