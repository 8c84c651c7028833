"""What an adapter adds on the host's CPU to a call of its operator, a layer and step.

usage: python3 -m tests.hosts.adapter_cost [PART OF A PATH'S NAME ...]

An adapter's call is timed, and in turns with it the operators alone, with the very arguments that it gave them, after what the
host itself calls there (`Path.apart`). Both together: beside launches Python takes longer than by itself, and the adapter is not
to pay for that of the host. Without a Hopper GPU kernels are replaced by an empty function, as `benchmarks.host_cost` does: in
both all that Python does is measured.

A layer's step may take 5 us more than its fused operator, besides the views that the host's own form of a tensor asks for
(`Path.views`), each as long as a view takes here beside an operator. Where Python is slower than on the machine
of that limit, it may take longer in proportion (`Pace`). What functions of other libraries add is printed; no fused operator
stands behind them, so they have no limit.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import gdn
from benchmarks.host_cost import without_device
from gdn.runtime import devices, env
from tests.hosts import adapter_paths
from tests.hosts.adapter_paths import Call, Path

MOST_US = 5.0
DOCUMENTED_VIEW_US = 0.6  # a view by itself, on the machine where 5 us were first kept
PASSES = 8
BATCH = 16  # calls between two looks at the clock, few enough that the queue of a GPU is never full
OPERATORS = (
    "fused_gdn_decode", "fused_gdn_prefill", "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule", "causal_conv1d_fn",
    "causal_conv1d_update", "rms_norm_gated", "mqa_logits", "paged_mqa_logits",
)  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """How fast Python runs here, by the microseconds of a view, which none of our code takes part in."""

    alone_us: float
    beside_us: float  # after an operator's launch

    @property
    def most_us(self) -> float:
        """What an adapter may add to an operator."""
        return MOST_US * max(1.0, self.alone_us / DOCUMENTED_VIEW_US)

    def row(self) -> str:
        view = f"a view takes {self.alone_us:.2f} us, {self.beside_us:.2f} beside an operator"
        return f"{view}; an adapter may add {self.most_us:.1f} us to each operator, besides views"


@dataclass(frozen=True)
class Added:
    """What repeated calls take, in microseconds, as (least, median) of batches: the adapter's step, and what it would be without
    the adapter."""

    path: Path
    step: tuple[float, float]
    without: tuple[float, float]
    pace: Pace

    @property
    def views_us(self) -> float:
        return self.path.views * self.pace.beside_us

    @property
    def us(self) -> tuple[float, float]:
        return self.step[0] - self.without[0], self.step[1] - self.without[1]

    @property
    def holds(self) -> bool:
        return not self.path.is_step or self.us[0] - self.views_us <= self.pace.most_us * self.path.operators

    def row(self) -> str:
        figures = "  ".join(f"{least:6.1f} {median:6.1f}" for least, median in (self.step, self.without, self.us))
        return f"{self.path.what:36}  {figures}  {self.views_us:7.1f}  {'' if self.holds else 'more than allowed'}".rstrip()


HEADER = f"{'us a call: least, median':36}  {'adapter':>13}  {'without':>13}  {'added':>13}  {'views':>7}"


def watch(step: Call, begins: Callable[[Any], bool]) -> None:
    """Runs a step. begins: sees the frame of every function outside of operators, and says whether an operator begins there."""
    inside: list[Any] = []  # the operator that runs: operators that call others are one

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and not inside:
            if begins(frame):
                inside.append(frame)
        elif event == "return" and inside and inside[0] is frame:
            inside.clear()

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)


def calls_of(step: Call) -> list[Call]:
    """The operators that a step calls, each as a call of its own with the same arguments, written out as in a program."""
    functions = {f"<gdn.{name}>": getattr(gdn, name) for name in OPERATORS}  # where the code of those that are bound is, too
    found: list[Call] = []

    def begins(frame: Any) -> bool:
        function = functions.get(frame.f_code.co_filename)
        if function is not None:
            found.append(_written_out(function, {**frame.f_globals.get("_given", {}), **frame.f_locals}))
        return function is not None

    watch(step, begins)
    return found


def operators_of(path: Path) -> list[Call]:
    """The operators that a path's step calls, as many as it says."""
    found = calls_of(path.step)
    if len(found) != path.operators:
        raise ValueError(f"{path.what}: expected {path.operators} calls of operators, got {len(found)}")
    return found


def _written_out(function: Any, arguments: dict[str, Any]) -> Call:
    """function(..) with these arguments: by position where it takes them so, by name else, and without those of its defaults."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    defaults = dict(zip(names[: code.co_argcount][::-1], (function.__defaults__ or ())[::-1], strict=False))
    defaults |= function.__kwdefaults__ or {}
    given = [name for name in names if name not in defaults or not _is_default(arguments[name], defaults[name])]
    by_position = [name for at, name in enumerate(given) if at < code.co_argcount and names[at] == name]
    positional = [arguments[name] for name in by_position]
    return adapter_paths.literal(function, *positional, **{name: arguments[name] for name in given[len(by_position) :]})


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) is not torch.Tensor and bool(value == default))


@dataclass(frozen=True)
class Timed:
    """What is timed of a path: its step, and what is apart with the operators; and the microseconds of each in every batch."""

    path: Path
    calls: tuple[Call, ...]
    times: tuple[list[float], ...]

    @staticmethod
    def of(path: Path) -> "Timed":
        path.step()
        return Timed(path, (path.step, _in_turn(path.apart, *operators_of(path))), ([], []))

    def run(self, batches: int, device: torch.device) -> None:
        for round_ in range(-2, batches):  # the first two warm up
            for call, times in zip(self.calls, self.times, strict=True):
                taken = _batch_us(call, device)
                if round_ >= 0:
                    times.append(taken)

    def added(self, pace: Pace) -> Added:
        """What the step costs beyond what is apart and its operators."""
        step, without = ((min(own), statistics.median(own)) for own in self.times)
        return Added(self.path, step, without, pace)


def _in_turn(apart: Call, first: Call, second: Call | None = None) -> Call:
    """One after the other, without a call more than a program has."""
    if apart is adapter_paths.nothing:
        return first if second is None else lambda: (first(), second())
    return (lambda: (apart(), first())) if second is None else lambda: (apart(), first(), second())


def _pace(beside: Timed, view: Call, device: torch.device) -> Pace:
    with_view, without = (min(times) for times in beside.times)
    return Pace(min(_batch_us(view, device) for _ in range(300)), with_view - without)


def _batch_us(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(BATCH):
        call()
    return (time.perf_counter_ns() - start) / BATCH / 1e3


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """`without_device`, also for the prefill step, whose launch picks functions by name."""
    with without_device(), mock.patch("kernels_cute.gdn_prefill.launch", lambda *_: None):
        yield


def measure(device: torch.device, wanted: list[str], batches: int = 1000) -> list[Added]:
    """All adapters' paths, or those whose names hold one of the texts. Several times over: while others use the machine, all of
    a path's calls take longer."""
    env.reload()
    with torch.inference_mode():
        paths = [path for path in adapter_paths.every(device) if not wanted or any(text in path.what for text in wanted)]
        timed = [Timed.of(path) for path in paths]
        rows, operator = torch.zeros(8, 128, device=device), operators_of(paths[0])[0]
        beside = (lambda: (operator(), rows.view(8, 8, 16))), (lambda: (operator(), rows))
        view = Timed(Path("a view", beside[0]), beside, ([], []))
        for _ in range(PASSES):
            for one in (*timed, view):
                one.run(batches // PASSES, device)
        pace = _pace(view, lambda: rows.view(8, 8, 16), device)
        return [one.added(pace) for one in timed]


def main() -> None:
    has_device = torch.cuda.is_available() and devices.spec(torch.device("cuda")) is not None
    device = torch.device("cuda" if has_device else "cpu")
    with contextlib.nullcontext() if has_device else no_kernels():
        found = measure(device, sys.argv[1:])
        print(found[0].pace.row(), HEADER, *(one.row() for one in found), sep="\n")
    sys.exit(not all(one.holds for one in found))


if __name__ == "__main__":
    main()
