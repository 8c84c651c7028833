"""Variants of the logits kernels, ragged and paged."""

from collections.abc import Collection, Sequence
from typing import Any

from gdn.ops.indexer.problem import LogitsProblem
from gdn.problem import Problem
from tests.compile.expectations import Expectation
from tests.compile.variants.base import HEADS, Row, Variants, problem_of, spread

_LOGITS_AXES: dict[str, Sequence[Any]] = {
    "heads": [(64, 1), (16, 1), (4, 1), (32, 2), (15, 3)],  # query heads, key heads
    "head_dim": [128, 64],
    "kind": [("float8_e4m3fn", True), ("float8_e4m3fn", False), ("bfloat16", False)],  # dtype, with key scales
    "weights_dtype": ["float32", "bfloat16", None],
    "relu": [True, False],
    "clean": [True, False],
    "out_dtype": ["float32", "bfloat16"],
}


_KIND = ("dtype", "has_k_scale")


def _ragged(row: Row) -> Problem:
    return problem_of("mqa_logits", spread(row, heads=HEADS, kind=_KIND))


def _paged(row: Row) -> Problem:
    return problem_of("paged_mqa_logits", spread(row, heads=HEADS, kind=_KIND, drafts=("next_n", "per_draft_lengths")))


def _code(problem: LogitsProblem, backend: str, entries: Collection[str]) -> Expectation:
    matmul, other = ("QGMMA", "HGMMA") if problem.dtype == "float8_e4m3fn" else ("HGMMA", "QGMMA")
    # A maximum without .NAN would make a NaN score 0, which is selected like any other.
    return Expectation({matmul: 1, "UTMALDG|UBLKCP": 2}, none_of=(other, "HMMA", "FMNMX.!NAN"))


mqa_logits = Variants(_LOGITS_AXES | {"packed": [False, True]}, _ragged, _code)
paged_mqa_logits = Variants(
    _LOGITS_AXES | {"page_size": [64, 16, 544], "drafts": [(1, False), (2, True), (4, False)]},  # next_n, per-draft lengths
    _paged,
    _code,
)
