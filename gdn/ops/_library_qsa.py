"""The QSA operators as torch.library operators `gdn::*`, with fake implementations, for torch.compile.

Public functions come here while a graph is being traced and nowhere else; at run time each operator calls the public
function back, which then validates and dispatches as an eager call does. An operator may not return one of its inputs
or None, so results that could be either are empty tensors here, and the public function puts the input or None back.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@torch.library.custom_op("gdn::mqa_logits", mutates_args=())
def mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None,
    scale: float,
    relu: bool,
    max_seqlen_k: int | None,
    clean_logits: bool,
    out_dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    from gdn.ops.mqa_logits import mqa_logits as run

    return run(
        q,
        k,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        k_scale=k_scale,
        scale=scale,
        relu=relu,
        max_seqlen_k=max_seqlen_k,
        clean_logits=clean_logits,
        out_dtype=out_dtype,
        backend=backend,
    )


@mqa_logits.register_fake
def _(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None,
    scale: float,
    relu: bool,
    max_seqlen_k: int | None,
    clean_logits: bool,
    out_dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    return q.new_empty((q.shape[0], k.shape[0] if max_seqlen_k is None else max_seqlen_k), dtype=out_dtype)


@torch.library.custom_op("gdn::mqa_logits_out", mutates_args=("out",))
def mqa_logits_out(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None,
    scale: float,
    relu: bool,
    max_seqlen_k: int | None,
    clean_logits: bool,
    out: Tensor,
    backend: str | None,
) -> None:
    from gdn.ops.mqa_logits import mqa_logits as run

    run(
        q,
        k,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        k_scale=k_scale,
        scale=scale,
        relu=relu,
        max_seqlen_k=max_seqlen_k,
        clean_logits=clean_logits,
        out_dtype=out.dtype,
        out=out,
        backend=backend,
    )


@mqa_logits_out.register_fake
def _(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None,
    scale: float,
    relu: bool,
    max_seqlen_k: int | None,
    clean_logits: bool,
    out: Tensor,
    backend: str | None,
) -> None:
    return None


@torch.library.custom_op("gdn::paged_mqa_logits", mutates_args=())
def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    max_context_len: int,
    scale: float,
    relu: bool,
    clean_logits: bool,
    out_dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    from gdn.ops.paged_mqa_logits import paged_mqa_logits as run

    return run(
        q,
        cache,
        weights,
        context_lens,
        block_tables,
        max_context_len,
        scale=scale,
        relu=relu,
        clean_logits=clean_logits,
        out_dtype=out_dtype,
        backend=backend,
    )


@paged_mqa_logits.register_fake
def _(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    max_context_len: int,
    scale: float,
    relu: bool,
    clean_logits: bool,
    out_dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    return q.new_empty((q.shape[0] * q.shape[1], max_context_len), dtype=out_dtype)


@torch.library.custom_op("gdn::paged_mqa_logits_out", mutates_args=("out",))
def paged_mqa_logits_out(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    max_context_len: int,
    scale: float,
    relu: bool,
    clean_logits: bool,
    out: Tensor,
    backend: str | None,
) -> None:
    from gdn.ops.paged_mqa_logits import paged_mqa_logits as run

    run(
        q,
        cache,
        weights,
        context_lens,
        block_tables,
        max_context_len,
        scale=scale,
        relu=relu,
        clean_logits=clean_logits,
        out_dtype=out.dtype,
        out=out,
        backend=backend,
    )


@paged_mqa_logits_out.register_fake
def _(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    max_context_len: int,
    scale: float,
    relu: bool,
    clean_logits: bool,
    out: Tensor,
    backend: str | None,
) -> None:
    return None


@torch.library.custom_op("gdn::topk_indices", mutates_args=())
def topk_indices(
    logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, sorted_by: str, backend: str | None
) -> Tensor:
    from gdn.ops.topk import topk_indices as run

    return run(logits, k, row_starts, row_ends, sorted_by=sorted_by, backend=backend)


@topk_indices.register_fake
def _(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, sorted_by: str, backend: str | None) -> Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


@torch.library.custom_op("gdn::expand_topk_groups", mutates_args=())
def expand_topk_groups(group_indices: Tensor, positions: Tensor, ratio: int, backend: str | None) -> Tensor:
    from gdn.ops.topk import expand_topk_groups as run

    return run(group_indices, positions, ratio=ratio, backend=backend)


@expand_topk_groups.register_fake
def _(group_indices: Tensor, positions: Tensor, ratio: int, backend: str | None) -> Tensor:
    columns = group_indices.shape[1] * ratio + ratio - 1
    return group_indices.new_empty((group_indices.shape[0], columns), dtype=torch.int32)


@torch.library.custom_op("gdn::indexer_topk", mutates_args=())
def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    k_scale: Tensor | None,
    scale: float,
    relu: bool,
    workspace_bytes: int | None,
    max_seqlen_k: int | None,
    backend: str | None,
) -> Tensor:
    from gdn.ops.indexer_topk import indexer_topk as run

    return run(
        q,
        k,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        topk,
        k_scale=k_scale,
        scale=scale,
        relu=relu,
        workspace_bytes=workspace_bytes,
        max_seqlen_k=max_seqlen_k,
        backend=backend,
    )


@indexer_topk.register_fake
def _(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    k_scale: Tensor | None,
    scale: float,
    relu: bool,
    workspace_bytes: int | None,
    max_seqlen_k: int | None,
    backend: str | None,
) -> Tensor:
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


@torch.library.custom_op("gdn::paged_indexer_topk", mutates_args=())
def paged_indexer_topk(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    topk: int,
    scale: float,
    relu: bool,
    workspace_bytes: int | None,
    max_context_len: int | None,
    backend: str | None,
) -> Tensor:
    from gdn.ops.indexer_topk import paged_indexer_topk as run

    return run(
        q,
        cache,
        weights,
        context_lens,
        block_tables,
        topk,
        scale=scale,
        relu=relu,
        workspace_bytes=workspace_bytes,
        max_context_len=max_context_len,
        backend=backend,
    )


@paged_indexer_topk.register_fake
def _(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    topk: int,
    scale: float,
    relu: bool,
    workspace_bytes: int | None,
    max_context_len: int | None,
    backend: str | None,
) -> Tensor:
    return q.new_empty((q.shape[0] * q.shape[1], topk), dtype=torch.int32)


@torch.library.custom_op("gdn::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    topk_indices: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    topk_length: Tensor | None,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    from gdn.ops.sparse_attention import sparse_attention as run

    o, lse = run(
        q,
        (k_cache, v_cache),
        topk_indices,
        block_tables,
        query_start_loc,
        seq_lens,
        topk_length=topk_length,
        scale=scale,
        return_lse=True,
        backend=backend,
    )
    return o, lse


@sparse_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    topk_indices: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    topk_length: Tensor | None,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("gdn::quantize_fp8", mutates_args=())
def quantize_fp8(x: Tensor, group_size: int, backend: str | None) -> tuple[Tensor, Tensor]:
    from gdn.ops.indexer import quantize_fp8 as run

    return run(x, group_size, backend=backend)


@quantize_fp8.register_fake
def _(x: Tensor, group_size: int, backend: str | None) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // min(group_size, x.shape[-1])
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


@torch.library.custom_op("gdn::write_indexer_cache", mutates_args=("cache",))
def write_indexer_cache(k: Tensor, cache: Tensor, slot_mapping: Tensor, backend: str | None) -> None:
    from gdn.ops.indexer import write_indexer_cache as run

    run(k, cache, slot_mapping, backend=backend)


@write_indexer_cache.register_fake
def _(k: Tensor, cache: Tensor, slot_mapping: Tensor, backend: str | None) -> None:
    return None


def folds_weights(weights: Tensor | None, cache: Tensor | None, fp8: bool | None) -> bool:
    """Whether prepare_indexer returns new weights (FP8 with scales), rather than the ones it got."""
    if cache is not None:
        return cache.dtype == torch.uint8
    return bool(fp8) and weights is not None


@torch.library.custom_op("gdn::prepare_indexer", mutates_args=("cache",))
def prepare_indexer(
    q: Tensor,
    k: Tensor | None,
    weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    cache: Tensor | None,
    slot_mapping: Tensor | None,
    rotary_dim: int,
    eps: float,
    zero_centred: bool,
    fp8: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    from gdn.ops.indexer import prepare_indexer as run

    q_out, w_out = run(
        q,
        k,
        weights,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        cache,
        slot_mapping,
        rotary_dim=rotary_dim,
        eps=eps,
        zero_centred=zero_centred,
        fp8=fp8,
        backend=backend,
    )
    if not folds_weights(weights, cache, fp8) or w_out is None:
        w_out = q.new_empty(0, dtype=torch.float32)
    return q_out, w_out


@prepare_indexer.register_fake
def _(
    q: Tensor,
    k: Tensor | None,
    weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    cache: Tensor | None,
    slot_mapping: Tensor | None,
    rotary_dim: int,
    eps: float,
    zero_centred: bool,
    fp8: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    is_fp8 = cache.dtype in (torch.uint8, FP8) if cache is not None else bool(fp8)
    folded = q.shape[:2] if folds_weights(weights, cache, fp8) else (0,)
    return q.new_empty(q.shape, dtype=FP8 if is_fp8 else q.dtype), q.new_empty(folded, dtype=torch.float32)


@torch.library.custom_op("gdn::compress_indexer_keys", mutates_args=("ring", "cache"))
def compress_indexer_keys(
    raw_k: Tensor,
    ring: Tensor,
    cache: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_norm: Tensor,
    ring_slots: Tensor,
    slot_mapping: Tensor,
    ratio: int,
    rotary_dim: int,
    eps: float,
    zero_centred: bool,
    null_slot: int,
    backend: str | None,
) -> None:
    from gdn.ops.indexer import compress_indexer_keys as run

    run(
        raw_k,
        ring,
        cache,
        positions,
        cos_sin,
        k_norm,
        ring_slots,
        slot_mapping,
        ratio=ratio,
        rotary_dim=rotary_dim,
        eps=eps,
        zero_centred=zero_centred,
        null_slot=null_slot,
        backend=backend,
    )


@compress_indexer_keys.register_fake
def _(
    raw_k: Tensor,
    ring: Tensor,
    cache: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_norm: Tensor,
    ring_slots: Tensor,
    slot_mapping: Tensor,
    ratio: int,
    rotary_dim: int,
    eps: float,
    zero_centred: bool,
    null_slot: int,
    backend: str | None,
) -> None:
    return None


@torch.library.custom_op("gdn::gather_indexer_cache", mutates_args=())
def gather_indexer_cache(
    cache: Tensor, block_tables: Tensor, cu_seqlens: Tensor, num_rows: int | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    from gdn.ops.indexer import gather_indexer_cache as run

    k, k_scale = run(cache, block_tables, cu_seqlens, num_rows=num_rows, backend=backend)
    return k.contiguous(), k_scale.contiguous() if k_scale is not None else cache.new_empty(0, dtype=torch.float32)


@gather_indexer_cache.register_fake
def _(
    cache: Tensor, block_tables: Tensor, cu_seqlens: Tensor, num_rows: int | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    scaled = cache.dtype == torch.uint8
    dim = cache.shape[-1] - 4 if scaled else cache.shape[-1]
    heads = tuple(cache.shape[2:-1])
    k = cache.new_empty((rows, *heads, dim), dtype=FP8 if scaled else cache.dtype)
    return k, cache.new_empty((rows, *heads) if scaled else (0,), dtype=torch.float32)
