"""Shapes worth tuning and measuring, by operator: problems as serving engines call them.

Each operator's shapes are in the `cases.py` of its family. A tuned entry also serves calls with other gates, index dtypes and
flags than the shape's (`Problem.tune_fields`).
"""

from autotune import cases
from gdn.core.tunable import Shape as Shape
from gdn.runtime import registry


def operators() -> list[str]:
    """The operators that have kernels, and therefore shapes."""
    return [operator.name for operator in registry.with_kernels()]


def shapes(op: str, pattern: str = "", measured: bool = False, tuned: bool = False) -> list[Shape]:
    """The operator's shapes whose name contains `pattern`, by default those of the measured tables.

    measured: also those that are measured by name alone. tuned: also those that are tuned and in no table; without `measured`
    only shapes that are tuned. ValueError where there is no such operator or shape.
    """
    if op not in operators():
        raise ValueError(f"op: expected one of {', '.join(operators())}, got {op!r}")
    found = cases.tunable(op)
    known = [*found.shapes, *(found.tuned_only if tuned else ())]
    known += [*(found.shown if measured or not tuned else ()), *(found.measured_only if measured else ())]
    matching = [shape for shape in known if pattern in shape.name]
    if not matching:
        raise ValueError(f"shapes: expected part of one of {[shape.name for shape in known]}, got {pattern!r}")
    return matching
