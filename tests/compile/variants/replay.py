"""Variants of the operators around replay decode."""

from collections.abc import Collection

from gdn.ops.delta_rule.problem import FoldStatesProblem
from gdn.problem import Problem
from tests.compile.expectations import NO_REUSE, TENSOR_CORES, Expectation
from tests.compile.variants.base import CONVOLUTION_POOLS, HEAD_DIMS, Axes, Row, Variants, always, problem_of, spread

RINGS = [(16, 15), (22, 15), (12, 11), (39, 24), (8, 7)]  # rows, tokens from one fold to the next

_FOLD_AXES: Axes = {
    "heads": [(16, 32), (4, 4), (2, 6)],
    "head_dims": [(128, 128), (64, 64), (256, 256), (60, 100)],
    "state_dtype": ["float32", "bfloat16"],
    "state_v_first": [True, False],
    "ring": RINGS,
    "index_dtype": ["int32", "int64"],
    "has_accepted": [False, True],
    "has_final_indices": [False, True],
    "has_rounding": [False, True],
}
_ACCEPT_AXES: Axes = {
    "ring_rows": [22, 39, 8],
    "ring_width": [6176, 1548],
    "windows": [None, *((dim, *pool) for dim in (8192, 2568) for pool in CONVOLUTION_POOLS)],
    "conv_width": [4, 3, 2],
    "index_dtype": ["int32", "int64"],
    "cu_seqlens_dtype": ["int32", "int64"],
}


def _fold_problem(row: Row) -> Problem | None:
    if row["has_rounding"] and row["state_dtype"] != "bfloat16":
        return None
    heads, ring = ("num_k_heads", "num_state_heads"), ("ring_rows", "fold_every")
    return problem_of("fold_states", spread(row, heads=heads, head_dims=HEAD_DIMS, ring=ring))


def _fold_code(problem: FoldStatesProblem, backend: str, entries: Collection[str]) -> Expectation:
    # A state in wide loads and stores, entries copied to shared memory in 16 bytes.
    wide = "{0}.128" if problem.state_dtype == "float32" else "{0}.64|{0}.128"
    patterns: dict[str, int] = {wide.format(name): 1 for name in ("LDG", "STG")}
    return Expectation(patterns, none_of=TENSOR_CORES)


def _accept_problem(row: Row) -> Problem:
    windows = row["windows"] or (None, None, False)
    parts = ("conv_dim", "conv_dtype", "conv_channels_contiguous")
    return problem_of("accept_draft_tree", spread(row | {"windows": windows}, windows=parts))


fold_states = Variants(_FOLD_AXES, _fold_problem, _fold_code)
accept_draft_tree = Variants(_ACCEPT_AXES, _accept_problem, always(Expectation({"LDG.128": 1, "STG.128": 1}, none_of=NO_REUSE)))
