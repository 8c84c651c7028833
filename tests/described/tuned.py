"""The tuner's calls of an operator: those of the smallest shape that is tuned, which every kernel of the operator serves."""

from typing import Any

import torch

from autotune import cases
from gdn.core.call import operator_named
from gdn.runtime import registry


def function(op: str) -> str:
    """The public function that the tuner calls."""
    return registry.operator(op).functions[0]


def pools(op: str) -> tuple[str, ...]:
    """The arguments that a call may write, but `out`."""
    return tuple(name for name in operator_named(function(op)).writes if name != "out")


def arguments(op: str, device: torch.device, count: int = 1) -> list[dict[str, Any]]:
    """Arguments of `count` calls, without a backend: the same shapes, other values."""
    tunable = cases.tunable(op)
    shape = min(tunable.shapes, key=lambda one: one.problem.bytes_moved())
    calls: list[Any] = tunable.case(shape, device, count).public_calls(None)
    return [{name: value for name, value in call.keywords.items() if name != "backend"} for call in calls]
