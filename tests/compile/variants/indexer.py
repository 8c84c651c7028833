"""Variants of the steps around the indexer."""

from collections.abc import Collection, Sequence
from typing import Any

from gdn.ops.indexer.problem import (
    CompressIndexerKeysProblem,
    PrepareIndexerProblem,
    WriteIndexerCacheProblem,
)
from gdn.problem import Problem
from tests.compile.expectations import NO_REUSE, TENSOR_CORES, Expectation
from tests.compile.variants.base import Row, Variants, always, example, problem_of, spread, without

_CACHE_DTYPES = ["uint8", "float8_e4m3fn", "bfloat16"]
_ROTATED_AXES: dict[str, Sequence[Any]] = {
    "dims": [(128, 64), (64, 32), (128, 128), (256, 64), (32, 16)],  # of a head, rotated
    "dtype": ["bfloat16", "float16"],
    "cos_sin_dtype": ["float32", "bfloat16"],
    "norm_dtype": ["bfloat16", "float32"],
    "index_dtype": ["int64", "int32"],
    "zero_centred": [True, False],
    "num_tokens": [8, 8192],
}


def _rotated(row: Row) -> Row:
    """Fields of a row, whose axes of indices and of norms are several fields."""
    fields = spread(without(row, "index_dtype", "norm_dtype"), dims=("head_dim", "rotary_dim"))
    return fields | dict.fromkeys(("position_dtype", "slot_dtype"), row["index_dtype"]) | {"k_norm_dtype": row["norm_dtype"]}


def _compress(row: Row) -> Problem:
    return problem_of("compress_indexer_keys", _rotated(row))


def _prepare(row: Row) -> Problem | None:
    num_kv_heads, cache_dtype, is_fp8, folds = row["keys"]
    if row["weights_dtype"] is not None and not folds:
        return None  # weights that are returned as given are no part of the problem
    fields = _rotated(without(row, "keys")) | {
        "num_kv_heads": num_kv_heads, "cache_dtype": cache_dtype, "folds_weights": folds, "k_dtype": row["dtype"],
        "q_norm_dtype": row["norm_dtype"], "q_out_dtype": "float8_e4m3fn" if is_fp8 else row["dtype"],
    }  # fmt: skip
    if num_kv_heads == 0:
        fields |= dict.fromkeys(("k_norm_dtype", "slot_dtype", "k_dtype")) | {"has_values": False}
    return problem_of("prepare_indexer", fields)


# Rows of the indexer: both chunks of a lane in 16-byte loads, 8 values of e4m3 in 8-byte stores.
_CODES = {"STG.64": 2, "F2FP.E4M3": 8}


def _write_code(problem: WriteIndexerCacheProblem, backend: str, entries: Collection[str]) -> Expectation:
    return Expectation({"LDG.128": 2} | (_CODES if problem.cache_dtype != "bfloat16" else {"STG.128": 2}), none_of=NO_REUSE)


def _prepare_code(problem: PrepareIndexerProblem, backend: str, entries: Collection[str]) -> Expectation:
    stores = _CODES if problem.q_out_dtype == "float8_e4m3fn" else {"STG.128": 2}
    return Expectation({"LDG.128": 6 if problem.has_values else 4} | stores, none_of=NO_REUSE)


def _compress_code(problem: CompressIndexerKeysProblem, backend: str, entries: Collection[str]) -> Expectation:
    keys = _CODES if problem.cache_dtype != "bfloat16" else {}
    return Expectation({"LDG.128": 2 * problem.ratio + 2, "STG.128": 2} | keys, none_of=NO_REUSE)


quantize_fp8 = Variants(
    {
        "num_groups": [1, 6],
        "group_dim": [128, 64, 32, 256],
        "dtype": ["bfloat16", "float16"],
        "num_tokens": [8, 131072],
    },
    lambda row: example("quantize_fp8", **row),
    always(Expectation({"LDG.128": 2} | _CODES, none_of=NO_REUSE)),
)
write_indexer_cache = Variants(
    {
        "num_kv_heads": [1, 2],
        "head_dim": [128, 64, 32, 256],
        "cache_dtype": _CACHE_DTYPES,
        "dtype": ["bfloat16", "float16"],
        "slot_dtype": ["int64", "int32"],
        "num_tokens": [8, 8192],
    },
    lambda row: example("write_indexer_cache", **row),
    _write_code,
)
prepare_indexer = Variants(
    _ROTATED_AXES
    | {
        "num_heads": [16, 6, 64],
        # Key heads, dtype of the cache, whether the query is quantised, whether with scales.
        "keys": [
            (1, "uint8", True, True),
            (2, "uint8", True, True),
            (1, "float8_e4m3fn", True, False),
            (1, "bfloat16", False, False),
            (0, None, True, False),
        ],
        "weights_dtype": ["bfloat16", "float32", None],
        "has_values": [False, True],
    },
    _prepare,
    _prepare_code,
)
compress_indexer_keys = Variants(
    _ROTATED_AXES
    | {"num_kv_heads": [1, 3], "cache_dtype": _CACHE_DTYPES, "ratio": [4, 2, 3], "ring_slot_dtype": ["int32", "int64"]},
    _compress,
    _compress_code,
)
gather_indexer_cache = Variants(
    {
        "num_kv_heads": [1, 2],
        "head_dim": [128, 64],
        "cache_dtype": _CACHE_DTYPES,
        "cu_seqlens_dtype": ["int32", "int64"],
        "num_rows": [8, 8192, 131072],
    },
    lambda row: example("gather_indexer_cache", **row),
    always(Expectation({"LDG.128": 1, "STG.128": 1}, none_of=NO_REUSE)),
)
expand_topk_groups = Variants(
    {
        "ratio": [4, 1, 3, 8],
        "group_dtype": ["int32", "int64"],
        "position_dtype": ["int64", "int32"],
        "num_tokens": [8, 4096],
        "k": [512, 64, 5000],
    },
    lambda row: example("expand_topk_groups", **row),
    # A row of out starts at any multiple of four bytes: neighbouring lanes write neighbouring words.
    always(Expectation({"LDG": 2, "STG": 2, "LDS": 1, "STS": 1}, none_of=TENSOR_CORES)),
)
