"""Variants of attention of prefill, sparse and dense."""

import dataclasses
from collections.abc import Collection

from gdn.ops.attention.problem import AttentionPrefillProblem, SparsePrefillProblem
from gdn.problem import Problem
from tests.compile.expectations import Expectation
from tests.compile.variants.base import HEADS, Axes, Row, Variants, problem_of, spread, without

_AXES: Axes = {
    # Groups of 8 and more have masks of 16 bits; 3, 5 and 12 leave rows of a tile empty.
    "heads": [(16, 2), (24, 2), (8, 1), (6, 2), (5, 5), (16, 1), (10, 2)],
    "head_dim": [256, 128],
    "dtype": ["bfloat16", "float16"],
    "block_size": [16, 272, 20],
    "index_dtype": ["int32", "int64"],
    "has_topk_length": [False, True],
    "has_gate": [False, True],
}


def _problem(row: Row) -> Problem | None:
    return problem_of("sparse_attention_prefill", spread(row, heads=HEADS))


def _code(problem: SparsePrefillProblem, backend: str, entries: Collection[str]) -> Expectation:
    """Scores of a step are dim / 16 wgmma, outputs 4, each before the loop's first or after its last step too; rows come in
    copies of 16 bytes that no register holds."""
    scores = 2 * problem.head_dim // 16
    patterns = {"HGMMA.64x64x16": scores, f"HGMMA.64x{problem.head_dim}x16": 8, "LDGSTS.128": 1, "ATOMS": 1}
    return Expectation(patterns, none_of=("HMMA", "LDL", "STL"))


sparse_attention_prefill = Variants(_AXES, _problem, _code)


def _dense_problem(row: Row) -> Problem | None:
    return problem_of("attention_prefill", spread(without(row, "splits"), heads=HEADS))


def _dense_code(problem: AttentionPrefillProblem, backend: str, entries: Collection[str]) -> Expectation:
    """Scores of a step are dim / 16 wgmma, before the loops and in both; outputs follow in both, and after them. The copy engine
    reads queries, keys and values."""
    step = 80 if problem.head_dim == 256 else 128
    pieces = problem.head_dim // 64
    patterns = {
        f"HGMMA.64x{step}x16": 3 * problem.head_dim // 16, f"HGMMA.64x{problem.head_dim}x16": 3 * step // 16,
        "UTMALDG": 3 * pieces,
    }  # fmt: skip
    return Expectation(patterns, none_of=("HMMA", "LDL", "STL"))


attention_prefill = Variants(
    {
        "heads": [(16, 2), (24, 2), (5, 5), (12, 1), (64, 4), (128, 1)],
        "head_dim": [256, 128],
        "dtype": ["bfloat16", "float16"],
        "block_size": [16, 272, 1344],
        "has_gate": [False, True],
    },
    _dense_problem,
    _dense_code,
    config_axes={"kernels_cute.attention.dense": {"splits": [1, 2, 4, 8]}},
    config=lambda default, changes: dataclasses.replace(default, **changes),
)
