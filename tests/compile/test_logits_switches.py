"""Machine code of the ragged logits kernel in the CuTe DSL where its switches are not what they are by default."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100
from gdn.ops.indexer.problem import MqaLogitsProblem
from tests.compile import checks

mqa_logits = pytest.importorskip("kernels_cute.mqa_logits.ragged", reason="needs the CuTe DSL")


def problem_of(num_heads: int, num_kv_heads: int = 1, dtype: str = "float8_e4m3fn", packed: bool = False) -> MqaLogitsProblem:
    weights = "float32" if num_heads > 4 else None
    scaled = dtype == "float8_e4m3fn" and weights is not None
    return MqaLogitsProblem(
        num_heads, num_kv_heads, 128, dtype, scaled, weights, True, True, "float32", packed, 4096, 32768, 32768
    )  # fmt: skip


CHANGED = [
    (
        problem_of(64),
        {
            "accumulator_sets": 1,
            "pass_turn_at_issue": False,
            "relu_as_add_abs": False,
            "balanced_fraction": 0,
            "tiles_per_item": 1,
        },
    ),
    (problem_of(64), {"balanced_fraction": 8, "tiles_per_item": 1, "store_width": 32, "key_stages": 6}),
    (
        problem_of(32, packed=True),
        {"accumulator_sets": 2, "pass_turn_at_issue": False, "balanced_fraction": 1, "store_width": 32, "key_stages": 6},
    ),
    (problem_of(4), {"balanced_fraction": 8, "store_width": 32, "key_stages": 6, "relu_as_add_abs": True}),
    (problem_of(16, dtype="bfloat16"), {"accumulator_sets": 1, "pass_turn_at_issue": False, "balanced_fraction": 0}),
    (problem_of(64, 4), {"balanced_fraction": 0, "store_width": 32, "key_stages": 3}),
]


def _changed() -> list[tuple[MqaLogitsProblem, Any]]:
    return [(problem, replace(mqa_logits.default_config(problem, H100), **fields)) for problem, fields in CHANGED]


@checks.compiles(lambda: checks.tasks_of("kernels_cute.mqa_logits.ragged", _changed()))
def test_changed_configurations_compile_without_spills() -> None:
    cases = _changed()
    assert all(mqa_logits.fits(problem, config, H100) for problem, config in cases)
    checks.check("kernels_cute.mqa_logits.ragged", "cute", cases)


@pytest.mark.parametrize(
    ("problem", "fields"),
    [
        (problem_of(64, 2), {"accumulator_sets": 2, "steps_in_flight_at_turn": 0}),  # several key heads
        (problem_of(63), {"accumulator_sets": 2, "steps_in_flight_at_turn": 0}),  # an odd number of heads
        (problem_of(16, dtype="bfloat16"), {"relu_as_add_abs": True}),  # a product may be infinite
        (problem_of(64), {"balanced_fraction": 2}),
        (problem_of(64), {"steps_in_flight_at_turn": 1}),  # of one set
        (problem_of(64), {"accumulator_sets": 1, "pass_turn_at_issue": True}),  # of two sets
        (problem_of(16, dtype="bfloat16"), {"accumulator_sets": 1, "pass_turn_at_issue": False, "steps_in_flight_at_turn": 2}),
        (problem_of(64), {"store_width": 16}),
    ],
)
def test_what_does_not_fit(problem: MqaLogitsProblem, fields: dict[str, int]) -> None:
    config = mqa_logits.default_config(problem, H100)
    assert mqa_logits.fits(problem, config, H100)
    assert not mqa_logits.fits(problem, replace(config, **fields), H100)
