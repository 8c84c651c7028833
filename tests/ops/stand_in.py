"""What takes the place of compiled kernels on the CPU, so that the whole host path of an operator runs up to its launch."""

from typing import Any, Self

import pytest
import torch

from gdn import runtime
from gdn.problem import Problem
from gdn.runtime import env


class StandIn:
    """Takes the place of runtime.prepare: remembers problems, counts launches, and hands each launch to `launch`."""

    backend, workspace_bytes = "cute", 0

    def __init__(self) -> None:
        self.problems: list[Any] = []  # of the calls that came as far as prepare
        self.launches = 0

    @property
    def prepared(self) -> int:
        return len(self.problems)

    def put(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Into its place, where it is until the test ends."""
        monkeypatch.setattr(runtime, "prepare", self.prepare)
        env.reload()  # forgets calls seen before
        return self

    def prepare(self, problem: Problem, device: torch.device, backend: str | None = None) -> runtime.Prepared:
        self.problems.append(problem)

        def launch(params: Any) -> None:
            self.launches += 1
            self.launch(problem, params)

        choice = runtime.Choice(problem.op, self.backend)
        return runtime.Prepared(self.backend, None, self.workspace_bytes, launch, choice)

    def launch(self, problem: Any, params: Any) -> None:
        """Holds every argument to the contract of the family's Params, and computes from exactly those."""
        raise NotImplementedError


class Recorder(StandIn):
    """Launches are kept, and compute nothing."""

    workspace_bytes = 1024

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Problem, Any]] = []

    def launch(self, problem: Problem, params: Any) -> None:
        self.launched.append((problem, params))
