"""Kernels that callers ask for on an H100, recorded on the CPU: the choice is the real one, nothing is launched."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.host_cost import as_an_h100
from gdn import runtime
from gdn.problem import Problem


def _leave(params: Any) -> None:
    """In the place of a launch. Positions are used as indices by callers, so they are made some."""
    for name, tensor in zip(params._fields, params, strict=True):
        if name in ("out", "indices") and not tensor.is_floating_point():
            tensor.zero_()


@contextlib.contextmanager
def recording() -> Iterator[list[Problem]]:
    """Presents the CPU as an H100 whose kernels do nothing, and lists the problem of every kernel that would be launched.

    What kernels should have written is whatever was there: a caller's control flow must not depend on it.
    """
    asked: list[Problem] = []

    def without_launch(problem: Problem, device: torch.device, backend: str | None, config: Any) -> runtime.Prepared:
        choice = runtime._choose(problem, device, backend, config)
        if choice.backend == "reference":
            return runtime.Prepared("reference", None, 0, None, choice)
        asked.append(problem)
        module = runtime.candidates(problem.op)[choice.backend].module
        return runtime.Prepared(choice.backend, choice.config, module.workspace_bytes(problem, choice.config), _leave, choice)

    with as_an_h100(mock.patch.object(runtime, "_prepare", without_launch)):
        yield asked
