"""What every case is: how the tuner and the benchmark see a shape."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

import gdn
from gdn.runtime import Prepared

Call = Callable[[], object]


class WrongResult(Exception):
    """A candidate ran and its result is not the reference's."""


class Case(Protocol):
    def check(self, prepared: Prepared) -> float:
        """The error of the kernel's result against the exact answer; WrongResult where it is too large."""

    def launches(self, prepared: Prepared) -> list[Call]:
        """The kernel alone, on each set of inputs."""

    def public_calls(self, backend: str | None) -> list[Call]:
        """The public operator, on each set of inputs."""


def launch_of(prepared: Prepared, tensors: tuple[Any, ...]) -> Call:
    launch = prepared.launch
    if launch is None:
        raise TypeError("prepared: expected a kernel, got the reference")
    arguments = [tensors] if hasattr(tensors, "_fields") else tensors
    return lambda: launch(*arguments)


class Inputs(Protocol):
    """One set of inputs, for the public operator and for a launch."""

    @property
    def function(self) -> str:
        """The public operator, and its reference."""

    @property
    def arguments(self) -> dict[str, Any]: ...

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Positional arguments of a launch."""


Work = TypeVar("Work", bound=Inputs)


class SeededCase(Generic[Work]):
    """A case whose inputs follow from a seed. Set 0 is checked, the others are timed."""

    def __init__(self, problem: Any, lengths: Sequence[int], device: torch.device, copies: int) -> None:
        self._problem, self._lengths, self._device, self._copies = problem, tuple(lengths), device, copies

    def _work(self, seed: int) -> Work:
        raise NotImplementedError

    @cached_property
    def _timed(self) -> list[Work]:
        return [self._work(seed=1 + copy) for copy in range(self._copies)]

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, work.tensors) for work in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        def call(work: Work) -> Call:
            function = getattr(gdn, work.function)
            return lambda: function(**work.arguments, backend=backend)

        return [call(work) for work in self._timed]
