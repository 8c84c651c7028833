"""Public operators `indexer_topk` and `paged_indexer_topk`: logits and top-k in bounded memory.

The scores of some rows at a time go through one workspace. A step is two launches: the logits, and the selection, which writes
its rows of the result. The logits leave out rows with at most topk visible keys, and the selection lists these without reading
scores. Both take the ranges unchanged; no value is read back to the host.
"""

import contextlib
from collections.abc import Iterator

import torch

from gdn import runtime
from gdn.ops import _values
from gdn.ops._call import always, check_memory, operator, validates
from gdn.ops._indexer import QUERY_DTYPES, check_block_tables, check_cache, check_context_lens, check_weights
from gdn.ops._modes import is_empty, is_tracing
from gdn.ops._tensors import bad_value, check_at_least, check_out, check_tensor, contiguous, contiguous_int32
from gdn.ops.mqa_logits import check_operands, mqa_logits
from gdn.ops.paged_mqa_logits import check_values, paged_mqa_logits
from gdn.ops.topk import select_rows
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
    """Indexer logits and top-k of ragged prefill in bounded memory.

    The result is that of ``topk_indices(mqa_logits(...))`` without the whole score matrix, except that a row with at most
    `topk` visible keys lists all of them, whatever their scores.

    Parameters
    ----------
    q : Tensor [M, H, D]
        Queries, as for `mqa_logits`.
    k : Tensor [Nk, D] or [Nk, kv_heads, D]
        Keys, as for `mqa_logits`.
    weights : Tensor [M, H] or None
        Weight of each head, any float dtype and row stride. None = 1.
    cu_seqlen_ks, cu_seqlen_ke : Tensor [M]
        Range of key rows of each query row, int32 (int64 is converted), as for `mqa_logits`.
    topk : int
        Columns of the result, >= 0.
    k_scale : Tensor [Nk] or [Nk, kv_heads] of float32, optional
        Scale of each key row, for FP8 keys only. None = 1.
    scale : float
        Factor of the scores. D**-0.5 goes here or into `weights`, never both.
    relu : bool
        False leaves the products as they are.
    workspace_bytes : int, optional
        Bytes of float32 scores held at a time; at least one row. None = ``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``.
    max_seqlen_k : int, optional
        Bound on the length of all ranges; a row of scores then has that many columns instead of Nk.
    out : Tensor [M, topk] of int32, optional
        Tensor to write the indices into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.
        A kernel backend applies to the logits; the selection runs on whatever backend has a kernel. "reference" applies to
        both.

    Returns
    -------
    Tensor [M, topk] of int32
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
    check_at_least("topk", topk)
    if max_seqlen_k is not None:
        check_at_least("max_seqlen_k", max_seqlen_k)
    width = num_keys if max_seqlen_k is None else max_seqlen_k
    check_out(out, [num_rows, topk], torch.int32, device)
    check_memory()
    if is_tracing():
        return torch.empty(num_rows, topk, dtype=torch.int32, device=device) if out is None else out
    step = _units_per_block(_budget(workspace_bytes, 4 * width, num_rows), 4 * width, num_rows)
    if validates(device):  # all rows, before the first step writes
        _values.check_ranges(cu_seqlen_ks, cu_seqlen_ke, num_keys, max_seqlen_k)
    with _ordered(backend, "indexer_topk") as backend:
        q, k = contiguous("q", q), contiguous("k", k)  # once, not for each block of rows
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
    """Indexer logits and top-k of paged decode in bounded memory, some sequences at a time.

    The result is that of ``topk_indices(paged_mqa_logits(...))``, except that a row with at most `topk` visible keys lists all
    of them, whatever their scores. No value is read back to the host: the call can be captured in a CUDA graph, and lengths may
    change between replays.

    Parameters
    ----------
    q : Tensor [B, next_n, H, D]
        Queries, as for `paged_mqa_logits`.
    cache : Tensor [pages, page_size, kv_heads, D + 4 or D]
        Pages of keys, as for `paged_mqa_logits`.
    weights : Tensor [B * next_n, H] or None
        Weight of each head, any float dtype and row stride. None = 1.
    context_lens : Tensor [B, next_n] or [B]
        Number of visible keys, as for `paged_mqa_logits`.
    block_tables : Tensor [B, max_pages] of int32
        Page of each page_size keys of a sequence.
    topk : int
        Columns of the result, >= 0.
    scale : float
        Factor of the scores. D**-0.5 goes here or into `weights`, never both.
    relu : bool
        False leaves the products as they are.
    workspace_bytes : int, optional
        Bytes of float32 scores held at a time; at least one sequence's next_n rows. None =
        ``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``.
    max_context_len : int, optional
        Bound on the lengths. None = what `block_tables` can address (max_pages * page_size).
    out : Tensor [B * next_n, topk] of int32, optional
        Tensor to write the indices into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.
        A kernel backend applies to the logits; the selection runs on whatever backend has a kernel. "reference" applies to
        both.

    Returns
    -------
    Tensor [B * next_n, topk] of int32
        Positions in the sequence, ascending, -1 last; `out` itself where it is given, else a new tensor.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention", report, 2025.
    """
    check_tensor("q", q, shape=["B", "next_n", "H", "D"], dtypes=QUERY_DTYPES)
    batch, next_n, num_heads, head_dim = q.shape
    device = q.device
    page_size, _ = check_cache(cache, head_dim, device, q.dtype)
    check_weights(weights, batch * next_n, num_heads, device)
    check_context_lens(context_lens, batch, next_n, device)
    check_block_tables(block_tables, batch, device)
    check_at_least("topk", topk)
    if max_context_len is not None:
        check_at_least("max_context_len", max_context_len)
    width = block_tables.shape[1] * page_size
    width = width if max_context_len is None else min(width, max_context_len)
    sequence_bytes = 4 * width * next_n
    check_out(out, [batch * next_n, topk], torch.int32, device)
    check_memory()
    if is_tracing():
        return torch.empty(batch * next_n, topk, dtype=torch.int32, device=device) if out is None else out
    step = _units_per_block(_budget(workspace_bytes, sequence_bytes, batch), sequence_bytes, batch)
    check_values(block_tables, context_lens, page_size, cache.shape[0], width)  # all sequences, before the first step writes
    with _ordered(backend, "paged_indexer_topk") as backend:
        q, context_lens = contiguous("q", q), contiguous_int32(context_lens)
        drafts = 1 if context_lens.dim() == 2 else next_n  # rows that share one length

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
    """Result for rows of at most topk columns: all of them are listed, without scores."""
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
    """Number of rows (or sequences) whose scores fit the workspace; above 128 a multiple of 128, so that blocks are aligned."""
    step = budget // max(1, unit_bytes)
    step = step // 128 * 128 if step > 128 else step
    return max(1, min(step, units))


def _budget(workspace_bytes: int | None, unit_bytes: int, units: int) -> int:
    """Bytes of the workspace, at least one unit (a row, or a sequence) if there is any."""
    if workspace_bytes is None:
        return max(unit_bytes, env.current().sparse_indexer_max_logits_mb * 2**20)
    check_at_least("workspace_bytes", workspace_bytes)
    if workspace_bytes < unit_bytes and units:
        bad_value("workspace_bytes", f"at least {unit_bytes}, the scores of one row (paged: one sequence)", workspace_bytes)
    return workspace_bytes


@contextlib.contextmanager
def _ordered(backend: str | None, op: str) -> Iterator[str | None]:
    """Yields the backend for the parts: the argument, or GDN_BACKEND_<OP> of the combined operator, which the parts report."""
    own = env.current().backend_of.get(op, "auto")
    is_switch = backend is None and own != "auto"
    with runtime.ordering(registry.operator(op).switch if is_switch else None):
        yield own if is_switch else backend


def _selection(backend: str | None) -> str | None:
    """Backend of the selection: a kernel backend is requested for the logits only."""
    return "reference" if backend == "reference" else None
