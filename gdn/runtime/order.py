"""Built-in order of an operator's kernels, by the measured statements of its record."""

from collections.abc import Iterable

from gdn.problem import Problem
from gdn.runtime import registry
from gdn.runtime.registry import Statement


def statement(problem: Problem) -> Statement | None:
    """Statement that holds for the problem; None where only one kernel exists."""
    return next((one for one in registry.operator(problem.op).measured if one.holds(problem)), None)


def fastest_first(problem: Problem, backends: Iterable[str]) -> list[str]:
    """Backends in built-in order; unmeasured ones last, in the given order."""
    found = statement(problem)
    order = found.order if found is not None else ()
    return sorted(backends, key=lambda backend: order.index(backend) if backend in order else len(order))
