"""Internal operators of context parallel: what runs between the passes, on a kernel or on the reference."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from gdn import runtime
from gdn.ops.context import reference


class Kernel:
    """Kernel or reference of a problem. Called with the problem's Params, it launches.

    backend: that of the public operator; only the reference is an order to these operators, whose kernels are CuTe's alone.
    """

    __slots__ = ("launch",)

    def __init__(self, problem: Any, device: torch.device, backend: str | None) -> None:
        prepared = runtime.prepare(problem, device, "reference" if backend == "reference" else None)
        self.launch: Callable[[Any], None] = prepared.launch or functools.partial(getattr(reference, problem.op), problem)

    def __call__(self, params: Any) -> None:
        self.launch(params)
