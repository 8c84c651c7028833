"""What the logits operators check alike, and how they bring arguments into the form that kernels take."""

import math

import torch

from gdn.ops._checks import bad_type, bad_value, check_at_least, check_tensor
from gdn.ops._modes import address

FP8 = torch.float8_e4m3fn
WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # what prepare_indexer takes
QUERY_DTYPES = (FP8, *WIDE_DTYPES)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUT_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        bad_value("q", f"a number of heads that is a multiple of the {num_kv_heads} key heads", f"{num_heads} heads")


def check_out(out: torch.Tensor | None, shape: list[int], dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in OUT_DTYPES:
        bad_type("out_dtype", "torch.float32 or torch.bfloat16", dtype)
    if out is not None:
        check_tensor("out", out, shape=shape, dtypes=(dtype,), device=device, last_contiguous=True)


def check_skipping(skip_rows_up_to: int, clean_logits: bool) -> None:
    check_at_least("skip_rows_up_to", skip_rows_up_to)
    if skip_rows_up_to and clean_logits:
        bad_value("skip_rows_up_to", "0 with clean_logits=True", skip_rows_up_to)


def check_weights(weights: torch.Tensor | None, rows: int, heads: int, device: torch.device) -> None:
    if weights is not None:
        check_tensor("weights", weights, shape=[rows, heads], dtypes=WEIGHT_DTYPES, device=device)


def product_dtype(q: torch.dtype, keys: torch.dtype) -> torch.dtype:
    """The dtype that queries and keys have in common: kernels serve FP8 and bfloat16."""
    return q if q == FP8 else torch.promote_types(q, keys)


def kernel_weights_dtype(weights: torch.Tensor | None) -> str | None:
    """Kernels take float32 and bfloat16 weights as they are, others as float32."""
    if weights is None:
        return None
    return "bfloat16" if weights.dtype == torch.bfloat16 else "float32"


def kernel_weights(weights: torch.Tensor) -> torch.Tensor:
    return weights if weights.dtype == torch.bfloat16 else weights.float()


def check_cache(cache: object, head_dim: int, device: torch.device, q_dtype: torch.dtype | None) -> tuple[int, int]:
    """Checks an indexer cache against head_dim (and the query's dtype, if given): its page_size and kv_heads."""
    check_tensor("cache", cache, dtypes=(torch.uint8, FP8, torch.bfloat16), device=device)
    assert isinstance(cache, torch.Tensor)
    row = head_dim + 4 if cache.dtype == torch.uint8 else head_dim
    if cache.dim() not in (3, 4) or cache.shape[-1] != row:
        bad_value(
            "cache",
            f"shape [pages, page_size, kv_heads, {row}] or [pages, page_size, {row}] ({cache.dtype} with head_dim {head_dim})",
            f"shape {list(cache.shape)}",
        )
    if q_dtype is not None and (cache.dtype == torch.bfloat16) == (q_dtype == FP8):
        wanted = "uint8 or float8_e4m3fn" if q_dtype == FP8 else "bfloat16"
        bad_type("cache", f"{wanted} for q of {q_dtype}", cache.dtype)
    page_size = cache.shape[1]
    kv_heads = cache.shape[2] if cache.dim() == 4 else 1
    if page_size < 4 or page_size % 4:
        bad_value("cache", "a page size that is a positive multiple of 4", page_size)
    expected = 1
    for dim in range(cache.dim() - 1, 0, -1):
        if cache.shape[dim] > 1 and cache.stride(dim) != expected:
            bad_value("cache", "pages that are contiguous inside", f"shape {list(cache.shape)}, strides {cache.stride()}")
        expected *= cache.shape[dim]
    if cache.shape[0] > 1:
        stride_bytes = cache.stride(0) * cache.element_size()
        if stride_bytes % 16 or cache.stride(0) < expected:
            bad_value(
                "cache",
                f"a page stride of at least {expected * cache.element_size()} bytes that is a multiple of 16 bytes",
                f"{stride_bytes} bytes",
            )
    if address(cache) % 16:
        bad_value("cache", "a 16-byte aligned base address", hex(address(cache)))
    return page_size, kv_heads


def flat_pages(cache: torch.Tensor) -> torch.Tensor:
    """A checked cache as [pages, elements of a page]: the form that kernels take. A view."""
    elements = math.prod(cache.shape[1:])
    stride = cache.stride(0) if cache.shape[0] > 1 else elements
    return cache.as_strided((cache.shape[0], elements), (stride, 1))
