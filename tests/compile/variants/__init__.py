"""Covers of the variants of each operator: every pair of axis values that a kernel serves, or the full product."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gdn.device import H100
from gdn.problem import Problem
from tests.compile import pairwise, shrink
from tests.compile.variants.base import Axes, Row, Variant, Variants, of

__all__ = ["Variant", "Variants", "cover", "least", "of", "product"]


def _allowed(made: Variants, refusal: Callable[[Problem], str | None]) -> Callable[[Row], bool]:
    def allowed(row: Row) -> bool:
        if not made.is_config(row):
            return False
        problem = made.problem(row)
        return problem is not None and refusal(problem) is None

    return allowed


def least(axes: Axes, allowed: Callable[[Row], bool], cost: Callable[[Row], float] = lambda row: 1.0) -> list[Row]:
    """Few and cheap rows that hold every allowed pair."""
    return shrink.shrink(axes, allowed, pairwise.pairwise(axes, allowed), cost)


def _variants(made: Variants, rows: Iterable[Row], module: Any) -> Iterator[Variant]:
    in_config = made.config_axes.get(module.__name__, {})
    for row in rows:
        problem = made.problem(row)
        if problem is None:
            continue
        changes = {name: row[name] for name in in_config}
        yield problem, made.config(module.default_config(problem, H100), changes) if changes else None


def _axes(made: Variants, module: Any) -> Axes:
    return {**made.axes, **made.config_axes.get(module.__name__, {})}


@functools.cache
def cover(op: str, module: Any) -> list[Variant]:
    """Variants that a backend's module serves and that hold every pair of axis values it serves."""
    made = of(op)
    return list(_variants(made, least(_axes(made, module), _allowed(made, module.refusal), made.cost), module))


def product(op: str, module: Any) -> list[Variant]:
    """Every variant of the axes that a backend's module serves."""
    made = of(op)
    return list(_variants(made, pairwise.full(_axes(made, module), _allowed(made, module.refusal)), module))
