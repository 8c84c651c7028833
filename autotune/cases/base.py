"""Shape, Case and Tunable: how the tuner and the benchmark see an operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

import gdn
from gdn.models import QWEN3_NEXT_80B
from gdn.problems import Problem
from gdn.runtime import Prepared, registry

Call = Callable[[], object]


class WrongResult(Exception):
    """A candidate ran and its result is not the reference's."""


@dataclass(frozen=True)
class Shape:
    """A problem under a name, with what the problem's sizes leave open."""

    name: str
    problem: Problem
    lengths: tuple[int, ...] = ()  # tokens of each sequence, for operators on packed sequences
    ranges: str = "causal"  # ranges of keys, as gdn.testing.inputs_logits names them (mqa_logits)

    @property
    def op(self) -> str:
        return self.problem.op


def heads_of(num_k_heads: int, num_v_heads: int) -> dict[str, Any]:
    """Changes to QWEN3_NEXT_80B for `example`."""
    return {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads}


def example(op: str, model: dict[str, Any] | None = None, fp8: bool = True, **changes: Any) -> Any:
    """The operator's problem on QWEN3_NEXT_80B with other model fields, then with other problem fields."""
    problem: Any = registry.operator(op).example(replace(QWEN3_NEXT_80B, **(model or {})), fp8=fp8)
    return replace(problem, **changes)


class Case(Protocol):
    def check(self, prepared: Prepared) -> float:
        """Error of the kernel's result against the exact answer; WrongResult where it is too large."""

    def launches(self, prepared: Prepared) -> list[Call]:
        """Launches of the kernel alone, one per set of inputs."""

    def public_calls(self, backend: str | None) -> list[Call]:
        """Calls of the public operator, one per set of inputs."""


def _same(shape: Shape) -> Shape:
    return shape


def _all_flops(shape: Shape) -> int:
    return shape.problem.flops()


def no_flops(shape: Shape) -> int:
    """For operators without tensor-core work: their floor is the bytes that they move."""
    return 0


@dataclass(frozen=True)
class Tunable:
    """An operator for the tuner and the benchmark."""

    case: Callable[[Shape, torch.device, int], Case]  # makes the case of a shape; int: sets of inputs to time
    shapes: tuple[Shape, ...]  # tuned, and rows of the measured tables
    tuned_only: tuple[Shape, ...] = ()  # measured by name alone: they would make the tables long
    measured_only: tuple[Shape, ...] = ()  # measured by name alone, and never tuned
    useful_flops: Callable[[Shape], int] = _all_flops  # operations that the call asks for
    small: Callable[[Shape], Shape] = _same  # a shape of the same code path at sizes for a CPU
    peer_arguments: Callable[[Shape, torch.device, int], dict[str, Any]] | None = None  # for autotune.peers; int: seed


def launch_of(prepared: Prepared, params: tuple[Any, ...]) -> Call:
    launch = prepared.launch
    if launch is None:
        raise TypeError("prepared: expected a kernel, got the reference")
    return lambda: launch(params)


class Inputs(Protocol):
    """One set of inputs, in the form of a call and in the form of a launch."""

    @property
    def function(self) -> str:
        """Name of the public operator and of its reference."""

    @property
    def arguments(self) -> dict[str, Any]: ...

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The operator's Params."""


Work = TypeVar("Work", bound=Inputs)


class SeededCase(Generic[Work]):
    """Case whose inputs follow from a seed. The inputs of seed 0 are checked, the others are timed."""

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        self._shape, self._device, self._copies = shape, device, copies
        self._problem: Any = shape.problem
        self._lengths: Sequence[int] = shape.lengths

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
