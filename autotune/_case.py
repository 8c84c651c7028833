"""What every case is: how the tuner and the benchmark see a shape."""

from collections.abc import Callable
from typing import Any, Protocol

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
    return lambda: launch(*tensors)
