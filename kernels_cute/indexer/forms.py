"""Rows of `dim` 16-bit values as the indexer's kernels take them: sizes, encoded forms, and what is served."""

from gdn.ops.indexer.problem import GatherIndexerCacheProblem
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, INDEX_DTYPES, unserved

CHUNK = 8  # values per 16-byte load
ELEMENTS = 2 * CHUNK  # values of a row in one lane
WORDS = ELEMENTS // 2
HEAD_DIMS = (32, 64, 128, 256)
CACHE_DTYPES = ("uint8", "float8_e4m3fn", "bfloat16")
FP8_MAX = 448.0
LEAST_PEAK = 1e-4  # amax that gives the smallest scale

# Encoded form of a row: the name of a 16-bit dtype, or one of these.
SCALED = "scaled"  # e4m3 of value / scale
CAST = "cast"  # e4m3 of the value


def lanes_of(dim: int) -> int:
    """Lanes that own a row together."""
    return dim // ELEMENTS


def form_of(cache_dtype: str | None) -> str:
    """Encoded form of a key in a cache of this dtype."""
    return {"uint8": SCALED, "float8_e4m3fn": CAST}.get(str(cache_dtype), str(cache_dtype))


Dtypes = dict[str, str | None]  # of tensors; None = absent


def refusal(dim: int, rows: Dtypes, cache_dtype: str | None, indices: Dtypes, others: Dtypes | None = None) -> str | None:
    """None if a kernel can work on such rows, else the reason. others: floating-point tensors."""
    if dim not in HEAD_DIMS:
        return f"requires a head dim of {', '.join(map(str, HEAD_DIMS))}, got {dim}"
    halves, floats, integers = HALF_DTYPES, FLOAT_DTYPES, INDEX_DTYPES
    return unserved({halves: rows, CACHE_DTYPES: {"a cache": cache_dtype}, integers: indices, floats: others or {}})


def rotation_refusal(rotary_dim: int, dim: int) -> str | None:
    if rotary_dim % ELEMENTS or not ELEMENTS <= rotary_dim <= dim:
        return f"requires a rotary_dim that is a multiple of {ELEMENTS} from {ELEMENTS} to the head dim, got {rotary_dim}"
    return None


def row_bytes(problem: GatherIndexerCacheProblem) -> int:
    """Bytes of a cached row's values, all key heads together."""
    return problem.num_kv_heads * problem.head_dim * (2 if problem.cache_dtype == "bfloat16" else 1)
