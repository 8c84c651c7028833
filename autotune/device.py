"""Candidates on the GPU: checked, timed and compared in a process of their own, which a crash or a hang ends alone."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autotune import cases, workers
from autotune.shapes import Shape
from autotune.tuning import Kernel
from autotune.workers import Outcome
from gdn import runtime
from gdn.device import DeviceSpec
from gdn.testing import timing

HANG_S = 300.0  # limit of a candidate's check or timing, which includes the exact answer of its shape
_SAMPLES = 7


class DeviceLost(workers.Broken):
    """A launch broke the CUDA context, so that nothing runs in this process any more."""


class GpuTimer:
    """Runs candidates on the current CUDA device, in the process of `Device`. Keeps the inputs of the last shape."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec
        self._last: tuple[Shape, Any] | None = None

    def measure(self, kernel: Kernel, shape: Shape, config: Any) -> tuple[float, float]:
        """Relative error and time in us; raises where the result is wrong or the launch fails."""
        with _whole_device():
            prepared = self._prepared(kernel, shape, config)
            error: float = self._case(shape).check(prepared)
            timed = timing.Timed(self._case(shape).launches(prepared))
            return error, statistics.median(timed.sample_us() for _ in range(_SAMPLES))

    def compare(self, kernel: Kernel, shape: Shape, configs: Sequence[Any], rounds: int) -> list[list[float]]:
        """Times in us of each configuration, one a round, taken in turns."""
        with _whole_device():
            case = self._case(shape)
            return timing.rotation_us([case.launches(self._prepared(kernel, shape, one)) for one in configs], rounds)

    def _case(self, shape: Shape) -> Any:
        if self._last is None or self._last[0] != shape:
            self._last = None  # frees the inputs before the next are made
            self._last = (shape, cases.make(shape, torch.device("cuda", torch.cuda.current_device()), self._spec))
        return self._last[1]

    def _prepared(self, kernel: Kernel, shape: Shape, config: Any) -> Any:
        return runtime.prepare(shape.problem, torch.device("cuda"), kernel.backend, config=config)


@contextmanager
def _whole_device() -> Iterator[None]:
    """DeviceLost where a candidate's failure broke the CUDA context."""
    try:
        yield
        torch.cuda.synchronize()
    except Exception as failed:
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(f"the launch broke the CUDA context: {str(lost).splitlines()[0]}") from failed
        raise


class Device:
    """The GPU as the tuner asks it. timer: a class as GpuTimer, importable by name; the process makes one."""

    def __init__(self, spec: DeviceSpec, timer: type[Any] = GpuTimer, hang_s: float = HANG_S) -> None:
        self._made = (timer, spec)
        self._process = workers.Alone(hang_s)

    def measure(self, kernel: Kernel, shape: Shape, config: Any) -> Outcome:
        return self._ask("measure", kernel, shape, config)

    def compare(self, kernel: Kernel, shape: Shape, configs: Sequence[Any], rounds: int) -> Outcome:
        return self._ask("compare", kernel, shape, configs, rounds)

    def _ask(self, what: str, *arguments: Any) -> Outcome:
        outcome = self._process.call(_answer, *self._made, what, *arguments)
        if not outcome.started:
            raise OSError(f"The process that times candidates did not come up: {outcome.failure}")
        return outcome

    def close(self) -> None:
        self._process.close()


_timers: dict[type, Any] = {}  # of this process


def _answer(timer: Any, spec: DeviceSpec, what: str, *arguments: Any) -> Any:
    made = _timers.get(timer) or _timers.setdefault(timer, timer(spec))
    return getattr(made, what)(*arguments)
