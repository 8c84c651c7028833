"""What the logits operators check alike, and how they bring arguments into the form that kernels take."""

import math

import torch

from gdn.ops._checks import bad_type, bad_value, check_tensor

FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (FP8, torch.bfloat16)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUT_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1


def check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        bad_type(argument, "a bool", type(value).__name__)


def check_count(argument: str, value: object, minimum: int = 0) -> int:
    """A python int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        bad_type(argument, "an int", type(value).__name__)
    if value < minimum:
        bad_value(argument, f"an int >= {minimum}", value)
    return value


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        bad_value("q", f"a number of heads that is a multiple of the {num_kv_heads} key heads", f"{num_heads} heads")


def check_out(out: torch.Tensor | None, shape: list[int], dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in OUT_DTYPES:
        bad_type("out_dtype", "torch.float32 or torch.bfloat16", dtype)
    if out is not None:
        check_tensor("out", out, shape=shape, dtypes=(dtype,), device=device, last_contiguous=True)
        if shape[0] > 1 and shape[1] and out.stride(0) < shape[1]:
            bad_value("out", f"rows that do not overlap (a row stride of at least {shape[1]})", f"row stride {out.stride(0)}")


def check_weights(weights: torch.Tensor | None, rows: int, heads: int, device: torch.device) -> None:
    if weights is not None:
        check_tensor("weights", weights, shape=[rows, heads], dtypes=WEIGHT_DTYPES, device=device, last_contiguous=True)


def kernel_weights_dtype(weights: torch.Tensor | None) -> str | None:
    """Kernels take float32 and bfloat16 weights as they are, others as float32."""
    if weights is None:
        return None
    return "bfloat16" if weights.dtype == torch.bfloat16 else "float32"


def kernel_weights(weights: torch.Tensor) -> torch.Tensor:
    return weights if weights.dtype == torch.bfloat16 else weights.float()


def as_int32(values: torch.Tensor) -> torch.Tensor:
    """int32, saturated, contiguous; the tensor itself where it is that already."""
    if values.dtype != torch.int32:
        values = values.clamp(-_INT32_MAX, _INT32_MAX).to(torch.int32)
    return values.contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and 16-byte aligned: the tensor itself where it is, else a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


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
    if q_dtype is not None and (cache.dtype == torch.bfloat16) != (q_dtype == torch.bfloat16):
        wanted = "bfloat16" if q_dtype == torch.bfloat16 else "uint8 or float8_e4m3fn"
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
    if cache.data_ptr() % 16:
        bad_value("cache", "a 16-byte aligned base address", hex(cache.data_ptr()))
    return page_size, kv_heads


def flat_pages(cache: torch.Tensor) -> torch.Tensor:
    """A checked cache as [pages, elements of a page]: the form that kernels take. A view."""
    elements = math.prod(cache.shape[1:])
    stride = cache.stride(0) if cache.shape[0] > 1 else elements
    return cache.as_strided((cache.shape[0], elements), (stride, 1))


def reading_allowed(device: torch.device) -> bool:
    """Whether device values may be read back to the host now (not while a CUDA graph is being captured)."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
