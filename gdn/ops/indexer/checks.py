"""Operators of the indexer: checks of their queries, weights, keys and caches, and the forms that kernels take."""

import math
from typing import Any

import torch
from torch import Tensor

from gdn.core import check
from gdn.core.check import FP8, INDEX_DTYPES, INPUT_DTYPES, bad_type, bad_value, dtype_name
from gdn.core.modes import address, is_empty
from gdn.core.tensors import ALIGNMENT

QUERY_DTYPES = (FP8, *INPUT_DTYPES)
OUT_DTYPES = (torch.float32, torch.bfloat16)
CACHE_DTYPES = (torch.uint8, FP8, *INPUT_DTYPES)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        bad_value("q", f"a number of heads that is a multiple of the {num_kv_heads} key heads", f"{num_heads} heads")


def check_logits_out(out: Tensor | None, shape: list[int], dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in OUT_DTYPES:
        bad_type("out_dtype", "torch.float32 or torch.bfloat16", dtype)
    check.out(out, shape, dtype, device)


def check_skipping(skip_rows_up_to: int, clean_logits: bool) -> None:
    check.at_least("skip_rows_up_to", skip_rows_up_to)
    if skip_rows_up_to and clean_logits:
        bad_value("skip_rows_up_to", "0 with clean_logits=True", skip_rows_up_to)


def shared_fields(
    q: Tensor, key_dtype: torch.dtype, kv_heads: int, weights: Tensor | None, relu: bool, clean: bool, out_dtype: torch.dtype
) -> dict[str, Any]:
    """Fields of LogitsProblem except has_k_scale. Kernels serve products of FP8 and of bfloat16."""
    weights_dtype = None
    if weights is not None:
        weights_dtype = "bfloat16" if weights.dtype == torch.bfloat16 else "float32"
    return {
        "num_heads": q.shape[-2],
        "num_kv_heads": kv_heads,
        "head_dim": q.shape[-1],
        "dtype": dtype_name(q.dtype if q.dtype == FP8 else torch.promote_types(q.dtype, key_dtype)),
        "weights_dtype": weights_dtype,
        "relu": relu,
        "clean": clean,
        "out_dtype": dtype_name(out_dtype),
    }


def kernel_weights(weights: Tensor) -> Tensor:
    """Weights as a kernel takes them: bfloat16 unchanged, everything else in float32."""
    return weights if weights.dtype == torch.bfloat16 else weights.float()


def check_keys(name: str, k: Tensor, tokens: int | None, device: torch.device) -> int:
    """Checks k [tokens, D] or [tokens, kv_heads, D] and returns its kv_heads. tokens None = any number."""
    check.tensor(name, k, dtypes=INPUT_DTYPES, device=device)
    if k.dim() not in (2, 3) or (isinstance(tokens, int) and isinstance(k.shape[0], int) and k.shape[0] != tokens):
        wanted = "tokens" if tokens is None else tokens
        bad_value(name, f"shape [{wanted}, D] or [{wanted}, kv_heads, D]", f"shape {list(k.shape)}")
    return k.shape[1] if k.dim() == 3 else 1


def with_kv_heads(k: Tensor) -> Tensor:
    """Keys [tokens, D] or [tokens, kv_heads, D] as [tokens, kv_heads, D]."""
    return k[:, None] if k.dim() == 2 else k


def check_rope(positions: Tensor, cos_sin: Tensor, rotary_dim: int, tokens: int, head_dim: int, device: torch.device) -> None:
    check.tensor("positions", positions, shape=[tokens], dtypes=INDEX_DTYPES, device=device)
    check.at_least("rotary_dim", rotary_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        bad_value("rotary_dim", f"an even number up to head_dim {head_dim}", rotary_dim)
    check.tensor("cos_sin", cos_sin, shape=["max_positions", rotary_dim], dtypes=INPUT_DTYPES, device=device)
    if is_empty(cos_sin.shape[0]) and not is_empty(tokens):  # positions are clamped to its rows
        bad_value("cos_sin", f"shape [max_positions >= 1, {rotary_dim}]", f"shape {list(cos_sin.shape)}")


def check_cache(
    cache: object, head_dim: int, device: torch.device, q_dtype: torch.dtype | None, name: str = "cache"
) -> tuple[int, int]:
    """Checks an indexer cache against head_dim and, if given, the query's dtype; returns its page_size and kv_heads."""
    check.tensor(name, cache, dtypes=CACHE_DTYPES, device=device)
    assert isinstance(cache, Tensor)
    if q_dtype is not None and (cache.dtype in INPUT_DTYPES) == (q_dtype == FP8):
        wanted = "uint8 or float8_e4m3fn" if q_dtype == FP8 else "bfloat16, float16 or float32"
        bad_type(name, f"{wanted} for q of {q_dtype}", cache.dtype)
    row = head_dim + 4 if cache.dtype == torch.uint8 else head_dim
    if cache.dim() not in (3, 4) or cache.shape[-1] != row:
        shapes = f"[pages, page_size, kv_heads, {row}] or [pages, page_size, {row}]"
        bad_value(name, f"shape {shapes} ({cache.dtype} with head_dim {head_dim})", f"shape {list(cache.shape)}")
    page_size = cache.shape[1]
    kv_heads = cache.shape[2] if cache.dim() == 4 else 1
    if page_size < 4 or page_size % 4:
        bad_value(name, "a page size that is a positive multiple of 4", page_size)
    expected = 1
    for dim in range(cache.dim() - 1, 0, -1):
        if cache.shape[dim] > 1 and cache.stride(dim) != expected:
            bad_value(name, "pages that are contiguous inside", f"shape {list(cache.shape)}, strides {cache.stride()}")
        expected *= cache.shape[dim]
    if cache.shape[0] > 1:
        stride_bytes = cache.stride(0) * cache.element_size()
        if stride_bytes % ALIGNMENT or cache.stride(0) < expected:
            least = f"a page stride of at least {expected * cache.element_size()} bytes"
            bad_value(name, f"{least} that is a multiple of {ALIGNMENT} bytes", f"{stride_bytes} bytes")
    if address(cache) % ALIGNMENT:
        bad_value(name, f"a {ALIGNMENT}-byte aligned base address", hex(address(cache)))
    return page_size, kv_heads


def check_written(name: str, k: Tensor, kv_heads: int, cache: Tensor, slot_mapping: Tensor | None) -> int:
    """Checks the cache and the slots that checked keys `k` (argument `name`) go to; returns the number of cache rows."""
    page_size, cache_heads = check_cache(cache, k.shape[-1], k.device, None)
    if kv_heads != cache_heads:
        bad_value(name, f"{cache_heads} key heads, as the cache", f"{kv_heads}")
    check.tensor("slot_mapping", slot_mapping, shape=[k.shape[0]], dtypes=INDEX_DTYPES, device=k.device)
    num_rows: int = cache.shape[0] * page_size
    return num_rows


def flat_pages(cache: Tensor) -> Tensor:
    """A checked cache as [pages, elements of a page], the form that kernels take: a view."""
    elements = math.prod(cache.shape[1:])
    stride = cache.stride(0) if cache.shape[0] > 1 else elements
    return cache.as_strided((cache.shape[0], elements), (stride, 1))
