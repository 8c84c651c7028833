"""A small good call of every public operator from a seed: forms, dtypes and layouts are drawn."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import described
from tests.ops.spoiling.call import Call, Draw

OPERATORS: dict[str, Callable[[Draw], Call]] = {name: one.make for name, one in described.every().items()}


def good_call(operator: str, seed: int) -> Call:
    call = OPERATORS[operator](Draw(seed))
    call.seed = seed
    return call


def cover_from(seed: int, seeds: range) -> list[Any]:
    """First seeds of the tests of one function, as cases: those from this seed on are cover tests."""
    return [pytest.param(first, marks=pytest.mark.cover) if first >= seed else first for first in seeds]
