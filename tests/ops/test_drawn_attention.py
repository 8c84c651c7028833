"""Drawn calls of dense and of sparse attention against a float64 oracle, on the CPU."""

import pytest

from tests.ops.drawn_attention import OPERATORS, check

CALLS, PART = 150, 50  # of each operator, and of a test


@pytest.mark.parametrize("first", range(0, CALLS, PART))
@pytest.mark.parametrize("operator", OPERATORS)
def test_drawn_calls(operator: str, first: int) -> None:
    for seed in range(first, first + PART):
        check(seed, "cpu", operator)


@pytest.mark.cover
@pytest.mark.parametrize("first", range(CALLS, 1000, PART))
@pytest.mark.parametrize("operator", OPERATORS)
def test_many_drawn_calls(operator: str, first: int) -> None:
    for seed in range(first, first + PART):
        check(seed, "cpu", operator)
