"""Drawn calls of dense and of sparse attention against a float64 oracle, on a Hopper GPU."""

import pytest
import torch

from tests.gpu.delta_rule import poisoned_memory
from tests.ops.drawn_attention import OPERATORS, check

pytestmark = pytest.mark.gpu

CALLS, PART = 300, 50  # of each operator, and of a test


@pytest.mark.parametrize("first", range(0, CALLS, PART))
@pytest.mark.parametrize("operator", OPERATORS)
def test_drawn_calls(operator: str, first: int, device: torch.device) -> None:
    with poisoned_memory():
        for seed in range(first, first + PART):
            check(seed, device, operator, few_variants=True)


@pytest.mark.parametrize("first", range(0, CALLS, PART))
def test_drawn_calls_of_long_contexts(first: int, device: torch.device) -> None:
    """A tile of the kernel of prefill is dealt to 1, 2, 4 or 8 blocks."""
    with poisoned_memory():
        for seed in range(first, first + PART):
            check(seed, device, "attention", is_long=True)
