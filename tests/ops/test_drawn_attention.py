"""Drawn calls of dense and of sparse attention against a float64 oracle, on the CPU."""

from typing import Any

import pytest

import gdn
from gdn.device import H100
from gdn.runtime import devices
from tests.ops.drawn_attention import OPERATORS, check, draw
from tests.ops.spoiling.calls import cover_from

CALLS, PART = 150, 50  # of each operator, and of a test
LONG_CALLS, LONG_DRAWS = 8, 60


@pytest.mark.parametrize("first", cover_from(CALLS, range(0, 1000, PART)))
@pytest.mark.parametrize("operator", OPERATORS)
def test_drawn_calls(operator: str, first: int) -> None:
    for seed in range(first, first + PART):
        check(seed, "cpu", operator)


def test_drawn_calls_of_long_contexts() -> None:
    for seed in range(LONG_CALLS):
        check(seed, "cpu", "attention", is_long=True)


def test_long_contexts_take_each_number_of_blocks_to_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU tests draw: all that a kernel serves, in clusters of every size."""
    monkeypatch.setattr(devices, "describe", lambda device: (H100, "H100"))
    taken: list[Any] = []
    for seed in range(LONG_DRAWS):
        parts = gdn.explain("attention", **draw(seed, "cpu", "attention", is_long=True).arguments).parts
        taken += [part.config.splits for part in parts if part.op == "attention_prefill" and part.config is not None]
    assert all(taken.count(splits) >= 3 for splits in (1, 2, 4, 8)), taken
