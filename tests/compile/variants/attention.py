"""Variants of the sparse attention kernels."""

from collections.abc import Collection, Sequence
from typing import Any

from gdn.ops.attention.problem import AttentionProblem
from gdn.problem import Problem
from tests.compile.expectations import Expectation
from tests.compile.variants.attention_prefill import attention_prefill, sparse_attention_prefill
from tests.compile.variants.base import HEADS, Row, Variants, problem_of, spread

__all__ = ["attention_prefill", "sparse_attention_decode", "sparse_attention_prefill"]

_AXES: dict[str, Sequence[Any]] = {
    "heads": [(16, 2), (24, 2), (1, 1), (64, 4)],  # query heads, key heads
    "head_dim": [256, 128],
    "dtype": ["bfloat16", "float16"],
    "block_size": [16, 272],
    "heads_adjacent": [True, False],
    "has_gate": [False, True],
}


def _decode(row: Row) -> Problem | None:
    if not row["heads_adjacent"] and row["heads"][1] == 1:
        return None
    fields = spread(row, heads=HEADS, indices=("index_dtype", "has_topk_length"), sizes=("num_sequences", "k"))
    fields |= {"dense": fields["index_dtype"] is None, "num_tokens": fields["num_sequences"]}
    return problem_of("sparse_attention_decode", fields)


def _code(problem: AttentionProblem, backend: str, entries: Collection[str]) -> Expectation:
    """CuTe: products of 16 positions and 8 heads; keys and values by bulk copies, operands by wide loads of matrices.

    TileLang: products of 16 heads and 8 positions; keys and values by asynchronous copies of 16 bytes, before the loop and in it.
    """
    products = problem.head_dim // 16
    if backend == "tilelang":
        copies = 64 * problem.head_dim * 2 // (16 * 128)  # of a thread for the keys or the values of a tile
        return Expectation({"HMMA": 2 * products, "LDGSTS": 4 * copies, "LDSM": products}, none_of=("HGMMA",))
    return Expectation({"HMMA": 2 * products, "UBLKCP": 1, "LDSM": 2 * products}, none_of=("HGMMA",))


sparse_attention_decode = Variants(
    _AXES
    | {
        "indices": [("int32", False), ("int64", True), (None, False)],  # dtype, topk_length
        "sizes": [(64, 2048), (1, 2048)],  # sequences, k: they choose the split
    },
    _decode,
    _code,
)
