"""Machine code of the ragged logits kernel in the CuTe DSL where its switches are not what they are by default."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100
from gdn.problems import MqaLogitsProblem
from tests.compile import checks

mqa_logits = pytest.importorskip("kernels_cute.mqa_logits", reason="needs the CuTe DSL")


def problem_of(num_heads: int, num_kv_heads: int = 1, dtype: str = "float8_e4m3fn", packed: bool = False) -> MqaLogitsProblem:
    weights = "float32" if num_heads > 4 else None
    scaled = dtype == "float8_e4m3fn" and weights is not None
    return MqaLogitsProblem(
        num_heads, num_kv_heads, 128, dtype, scaled, weights, True, True, "float32", packed, 4096, 32768, 32768
    )  # fmt: skip


CHANGED = [
    (problem_of(64), {"halves": 1, "relu_sum": False, "even": 0, "tiles_per_item": 1}),
    (problem_of(64), {"even": 8, "tiles_per_item": 1, "segment": 16}),
    (problem_of(32, packed=True), {"halves": 2, "handoff": 0, "even": 2, "segment": 32, "key_stages": 6}),
    (problem_of(4), {"even": 8, "segment": 32, "key_stages": 6, "relu_sum": True, "rows_first": True}),
    (problem_of(16, dtype="bfloat16"), {"halves": 1, "handoff": 2, "even": 3}),
    (problem_of(64, 4), {"even": 1, "segment": 16}),
]


def _changed() -> list[tuple[MqaLogitsProblem, Any]]:
    return [(problem, replace(mqa_logits.default_config(problem, H100), **fields)) for problem, fields in CHANGED]


@checks.compiles(lambda: checks.tasks_of("kernels_cute.mqa_logits", _changed()))
def test_changed_configurations_compile_without_spills() -> None:
    cases = _changed()
    assert all(mqa_logits.fits(problem, config, H100) for problem, config in cases)
    assert checks.failures("kernels_cute.mqa_logits", "cute", cases, H100) == []


@pytest.mark.parametrize(
    ("problem", "fields"),
    [
        (problem_of(64, 2), {"halves": 2}),  # several key heads
        (problem_of(63), {"halves": 2}),  # an odd number of heads
        (problem_of(16, dtype="bfloat16"), {"relu_sum": True}),  # a product may be infinite
        (problem_of(64), {"even": 9}),
        (problem_of(64), {"segment": 64}),
    ],
)
def test_what_does_not_fit(problem: MqaLogitsProblem, fields: dict[str, int]) -> None:
    config = mqa_logits.default_config(problem, H100)
    assert mqa_logits.fits(problem, config, H100)
    assert not mqa_logits.fits(problem, replace(config, **fields), H100)


@pytest.mark.parametrize(
    ("num_heads", "dtype", "halves", "relu_sum", "even"),
    [
        (64, "float8_e4m3fn", 2, True, 1), (16, "float8_e4m3fn", 2, True, 8), (8, "float8_e4m3fn", 2, True, 8),
        (4, "float8_e4m3fn", 1, True, 0), (16, "bfloat16", 2, False, 8), (63, "float8_e4m3fn", 1, True, 1),
    ],
)  # fmt: skip
def test_defaults(num_heads: int, dtype: str, halves: int, relu_sum: bool, even: int) -> None:
    problem = problem_of(num_heads, dtype=dtype)
    config = mqa_logits.default_config(problem, H100)
    assert (config.halves, config.relu_sum, config.even) == (halves, relu_sum, even)
    assert config in mqa_logits.configs(problem, H100)


def test_items_by_rows_serve_keys_that_stay_in_the_cache() -> None:
    """Whatever sizes they were tuned at."""
    problem = problem_of(64)
    rows = replace(mqa_logits.default_config(problem, H100), rows_first=True)
    far = replace(problem, num_keys=2**20, num_columns=2**20)
    assert mqa_logits.suits(problem, rows) and not mqa_logits.suits(far, rows)
    assert mqa_logits.suits(far, replace(rows, rows_first=False))
