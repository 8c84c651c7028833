"""The tuner's device without a GPU: times by a rule, with a little noise, and what goes wrong where a test says so."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune import shapes
from autotune.shapes import Shape
from autotune.tuning import Kernel
from autotune.workers import Outcome
from tests.autotune import fake_kernel

KERNEL = Kernel("chunk", "tilelang", fake_kernel.__name__)
SHAPE, OTHER = shapes.shapes("chunk", "16/32 4096")[0], shapes.shapes("chunk", "4/8 8192")[0]
NOISE = 0.003  # of a time, as its standard deviation

US = {fake_kernel.DEFAULT: 90.0, fake_kernel.FAST: 50.0, fake_kernel.FASTEST: 49.0}  # by tile


def by_tile(shape: Shape, config: Any) -> float:
    return US.get(config.tile, 120.0)


class FakeGpu:
    """Answers as autotune.device.Device does.

    asked: what ran, in order: ("measure" or "compare", shape, configuration). happens: called before each; what it raises reaches
    the tuner, and what it returns is the failure.
    """

    def __init__(
        self, time_us: Callable[[Shape, Any], float] = by_tile,
        happens: Callable[[str, Shape, Any], str | None] = lambda what, shape, config: None,
    ) -> None:  # fmt: skip
        self.asked: list[tuple[str, str, Any]] = []
        self.is_closed = False
        self._time_us, self._happens, self._random = time_us, happens, random.Random(0)

    def _ask(self, what: str, shape: Shape, config: Any) -> str | None:
        self.asked.append((what, shape.name, config))
        return self._happens(what, shape, config)

    def _drawn(self, shape: Shape, config: Any) -> float:
        return self._time_us(shape, config) * self._random.gauss(1.0, NOISE)

    def measure(self, kernel: Kernel, shape: Shape, config: Any) -> Outcome:
        failure = self._ask("measure", shape, config)
        return Outcome(0, (0.004, self._drawn(shape, config)), failure, 0.0)

    def compare(self, kernel: Kernel, shape: Shape, configs: Sequence[Any], rounds: int) -> Outcome:
        failure = self._ask("compare", shape, configs[-1])
        return Outcome(0, [[self._drawn(shape, config) for _ in range(rounds)] for config in configs], failure, 0.0)

    def close(self) -> None:
        self.is_closed = True

    def measured(self) -> list[Any]:
        return [config for what, _, config in self.asked if what == "measure"]


def compile_at_once(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
    """In place of workers.run: everything compiles."""
    for index in range(len(tasks)):
        yield Outcome(index, None, None, 0.0)
