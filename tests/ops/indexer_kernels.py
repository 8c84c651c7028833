"""Stand-ins for the kernels of the indexer's steps: they check the contract of the operator's Params, then compute with the
reference from exactly the arguments of the launch."""

from typing import Any

import torch

from gdn.problem import Problem
from tests.ops.stand_in import StandIn
from tests.references import reference

FP8 = torch.float8_e4m3fn
Tensor = torch.Tensor


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def rows(x: Tensor, shape: tuple[int, ...], dtype: str, align: int = 16) -> None:
    assert tuple(x.shape) == shape and x.dtype == _dtype(dtype), (x.shape, x.dtype, shape, dtype)
    assert x.stride(-1) == 1 and x.data_ptr() % align == 0
    assert all(x.shape[i] <= 1 or x.stride(i) * x.element_size() % align == 0 for i in range(x.dim() - 1))


def new(x: Tensor, shape: tuple[int, ...], dtype: str) -> None:
    assert tuple(x.shape) == shape and x.dtype == _dtype(dtype) and x.is_contiguous() and x.data_ptr() % 16 == 0


def vector(x: Tensor, length: int, dtype: str) -> None:
    assert tuple(x.shape) == (length,) and x.dtype == _dtype(dtype)


def pages(cache: Tensor, p: Any) -> Tensor:
    """The flat pages of a launch as the public operators have them."""
    row = p.head_dim + (4 if p.scaled else 0)
    assert cache.dim() == 2 and cache.dtype == _dtype(p.cache_dtype) and cache.stride(1) == 1
    assert cache.shape[1] % (p.num_kv_heads * row) == 0 and cache.shape[0] > 0
    assert cache.stride(0) * cache.element_size() % 16 == 0 and cache.data_ptr() % 16 == 0
    page_size = cache.shape[1] // (p.num_kv_heads * row)
    return torch.as_strided(
        cache, (cache.shape[0], page_size, p.num_kv_heads, row), (cache.stride(0), p.num_kv_heads * row, row, 1),
        cache.storage_offset(),
    )  # fmt: skip


def quantize_fp8(p: Any, x: Any, x_fp8: Any, scale: Any) -> None:
    shape = (p.num_tokens, p.num_groups, p.group_dim)
    rows(x, shape, p.dtype)
    new(x_fp8, shape, "float8_e4m3fn")
    new(scale, shape[:2], "float32")
    values, scales = reference.quantize_fp8(x, p.group_dim)
    x_fp8.copy_(values)
    scale.copy_(scales[..., 0])


def write_indexer_cache(p: Any, k: Any, cache: Any, slot_mapping: Any) -> None:
    rows(k, (p.num_tokens, p.num_kv_heads, p.head_dim), p.dtype)
    vector(slot_mapping, p.num_tokens, p.slot_dtype)
    reference.write_indexer_cache(k, pages(cache, p), slot_mapping)


def prepare_indexer(
    p: Any, q: Any, k: Any, weights: Any, positions: Any, cos_sin: Any, q_norm: Any, k_norm: Any, cache: Any,
    slot_mapping: Any, q_out: Any, weights_out: Any, v: Any, v_cache: Any, eps: Any,
) -> None:  # fmt: skip
    rows(q, (p.num_tokens, p.num_heads, p.head_dim), p.dtype)
    vector(positions, p.num_tokens, p.position_dtype)
    rows(cos_sin, (cos_sin.shape[0], p.rotary_dim), p.cos_sin_dtype)
    rows(q_norm, (p.head_dim,), p.q_norm_dtype)
    new(q_out, (p.num_tokens, p.num_heads, p.head_dim), p.q_out_dtype)
    assert isinstance(eps, float)
    assert (weights is not None) == (p.weights_dtype is not None) and (weights_out is not None) == p.folds_weights
    if weights is not None:
        assert tuple(weights.shape) == (p.num_tokens, p.num_heads) and weights.dtype == _dtype(p.weights_dtype)
    if p.num_kv_heads:
        rows(k, (p.num_tokens, p.num_kv_heads, p.head_dim), p.k_dtype)
        rows(k_norm, (p.head_dim,), p.k_norm_dtype)
        vector(slot_mapping, p.num_tokens, p.slot_dtype)
        cache = pages(cache, p)
    else:
        assert k is None and k_norm is None and cache is None and slot_mapping is None
        assert p.k_dtype is None and p.k_norm_dtype is None and p.cache_dtype is None and p.slot_dtype is None
    assert (v is not None) == (v_cache is not None) == p.has_values
    if p.has_values:
        rows(v, (p.num_tokens, p.num_kv_heads, p.head_dim), p.k_dtype)
        v_cache = pages(v_cache, p)
    made, folded = reference.prepare_indexer(
        q, k, weights, positions, cos_sin, q_norm, k_norm, cache, slot_mapping, rotary_dim=p.rotary_dim, eps=eps,
        zero_centred=p.zero_centred, fp8=p.q_out_dtype == "float8_e4m3fn", v=v, v_cache=v_cache,
    )  # fmt: skip
    q_out.copy_(made)
    if p.folds_weights:
        weights_out.copy_(folded)


def compress_indexer_keys(
    p: Any, raw_k: Any, ring: Any, cache: Any, positions: Any, cos_sin: Any, k_norm: Any, ring_slots: Any, slot_mapping: Any,
    eps: Any, null_slot: Any,
) -> None:  # fmt: skip
    rows(raw_k, (p.num_tokens, p.num_kv_heads, p.head_dim), p.dtype)
    assert p.ring_aligned
    rows(ring, (*ring.shape[:2], p.num_kv_heads, p.head_dim), p.dtype)
    vector(positions, p.num_tokens, p.position_dtype)
    vector(ring_slots, p.num_tokens, p.ring_slot_dtype)
    vector(slot_mapping, p.num_tokens, p.slot_dtype)
    rows(cos_sin, (cos_sin.shape[0], p.rotary_dim), p.cos_sin_dtype)
    rows(k_norm, (p.head_dim,), p.k_norm_dtype)
    assert isinstance(eps, float) and isinstance(null_slot, int)
    reference.compress_indexer_keys(
        raw_k, ring, pages(cache, p), positions, cos_sin, k_norm, ring_slots, slot_mapping, ratio=p.ratio,
        rotary_dim=p.rotary_dim, eps=eps, zero_centred=p.zero_centred, null_slot=null_slot,
    )  # fmt: skip


def gather_indexer_cache(p: Any, cache: Any, block_tables: Any, cu_seqlens: Any, k: Any, k_scale: Any) -> None:
    assert tuple(block_tables.shape) == (p.num_sequences, block_tables.shape[1]) and block_tables.numel()
    assert block_tables.dtype == torch.int32 and p.num_rows > 0
    vector(cu_seqlens, p.num_sequences + 1, p.cu_seqlens_dtype)
    new(k, (p.num_rows, p.num_kv_heads * p.head_dim), "float8_e4m3fn" if p.scaled else p.cache_dtype)
    assert (k_scale is not None) == p.scaled
    values, scales = reference.gather_indexer_cache(pages(cache, p), block_tables, cu_seqlens, num_rows=p.num_rows)
    k.copy_(values.flatten(1))
    if k_scale is not None:
        new(k_scale, (p.num_rows, p.num_kv_heads), "float32")
        k_scale.copy_(scales)


def expand_topk_groups(p: Any, group_indices: Any, positions: Any, out: Any) -> None:
    assert tuple(group_indices.shape) == (p.num_tokens, p.k) and group_indices.dtype == _dtype(p.group_dtype)
    vector(positions, p.num_tokens, p.position_dtype)
    assert tuple(out.shape) == (p.num_tokens, p.k * p.ratio + p.ratio - 1)
    assert out.dtype == torch.int32 and (out.shape[1] < 2 or out.stride(1) == 1)
    reference.expand_topk_groups(group_indices, positions, ratio=p.ratio, out=out)


KERNELS = (
    quantize_fp8, write_indexer_cache, prepare_indexer, compress_indexer_keys, gather_indexer_cache, expand_topk_groups,
)  # fmt: skip


class IndexerKernels(StandIn):
    def launch(self, problem: Problem, params: Any) -> None:
        assert type(params).__name__ == type(problem).__name__.replace("Problem", "Params")
        next(kernel for kernel in KERNELS if kernel.__name__ == problem.op)(problem, *params)
