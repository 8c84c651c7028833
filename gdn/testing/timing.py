"""Timing of calls on the current CUDA device, and measurement of the device's own limits in this run.

A call is timed inside a CUDA-graph replay, which excludes the host, cycling through several sets of inputs where one would
stay in the L2 cache. A call that cannot be captured (it reads from the device) is timed between events.

There are three orders of samples:

- `time_us`, `Timed.sustained_us` and the limits: one call, samples back to back for more than a tenth of a second, without the
  first part. Compute-bound kernels run above the power limit for some milliseconds, until the limit lowers the clock: an FP8
  matmul of 8192^3 reaches 1469 TFLOP/s in bursts of 4 ms and 1232 after 0.2 s of nothing else (H100, 700 W). A share of the
  floor is meaningful only where both sides are sustained rates.
- `interleaved_us`: candidates in rotation, waiting for each sample, to compare them with each other.
- `Timed.burst_us`: one call, a few milliseconds of it after a rest: its time before the power limit acts.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

_TARGET_US = 4000.0  # duration of one replay: event resolution is about a microsecond
_MOST_CALLS = 400  # calls in one graph
_WARM_UP_US = 50e3  # until the clock has settled under the call's own load
_SAMPLED_US = 100e3  # after the warm-up
_LEAST_SAMPLES = 5  # samples of a long call
_REST_S = 0.2  # before a burst
_BURST_SAMPLES = 10
_BURST_US = 1000.0  # least duration of a sample
_BURST_CALLS = 5  # least number of calls in a sample


@dataclass(frozen=True)
class Limits:
    """Rates that this device sustained in this run; a kernel's floor is computed from them."""

    copy_gbps: float  # bytes read plus bytes written, 1e9 a second
    bf16_tflops: float  # dense matmul 8192^3
    fp8_tflops: float

    def floor_us(self, flops: int, num_bytes: int, dtype: str) -> float:
        """Least time for this much arithmetic on tensor cores and this many bytes through device memory."""
        tflops = self.fp8_tflops if dtype == "float8_e4m3fn" else self.bf16_tflops
        return max(num_bytes / self.copy_gbps / 1e3, flops / tflops / 1e6)


class Timed:
    """Calls prepared for repeated timing.

    `sample_us` is one replay, `sustained_us` many, `burst_us` a few short ones after a rest; all are times per call.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        """calls: the same work on different inputs, run cyclically."""
        self._calls = list(calls)
        for call in self._calls:  # first calls compile, load and allocate
            call()
        torch.cuda.synchronize()
        self._estimate_us = max(1.0, min(_elapsed_us(call) for call in self._calls for _ in range(2)))
        rounds = max(1, min(_MOST_CALLS, round(_TARGET_US / self._estimate_us)) // len(self._calls))
        self._count = rounds * len(self._calls)
        self._replay, self.captured = self._ready(rounds)
        self.sample_us()

    def _run(self, rounds: int) -> None:
        for _ in range(rounds):
            for call in self._calls:
                call()

    def _ready(self, rounds: int) -> tuple[Call, bool]:
        """Function that runs every call `rounds` times, and whether it replays a graph."""
        graph = self._capture(rounds)
        return (functools.partial(self._run, rounds), False) if graph is None else (graph.replay, True)

    def _capture(self, rounds: int) -> torch.cuda.CUDAGraph | None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                self._run(rounds)
        except RuntimeError:  # the call synchronises; capture is over, the device is as before
            torch.cuda.synchronize()
            return None
        return graph

    def sample_us(self) -> float:
        return _elapsed_us(self._replay) / self._count

    def sustained_us(self) -> float:
        """Median of replays without a pause between them, after a warm-up by the same calls."""
        return _sustained_us(self._replay) / self._count

    def burst_us(self) -> float:
        """Median of ten replays of at least five calls and a millisecond, waiting for each, after a rest."""
        least = max(_BURST_CALLS, math.ceil(_BURST_US / self._estimate_us))
        rounds = -(-least // len(self._calls))
        replay, _ = self._ready(rounds)
        replay()  # a graph's first replay uploads it
        torch.cuda.synchronize()
        time.sleep(_REST_S)
        return statistics.median(_elapsed_us(replay) for _ in range(_BURST_SAMPLES)) / (rounds * len(self._calls))


def _elapsed_us(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _sustained_us(call: Call) -> float:
    """Median time of a call that is enqueued repeatedly. Waits only for the last: a pause would let the clock rise."""
    once = max(_elapsed_us(call), 1.0)
    for _ in range(math.ceil(_WARM_UP_US / once)):
        call()
    samples = max(_LEAST_SAMPLES, math.ceil(_SAMPLED_US / once))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for start, end in events:
        start.record()
        call()
        end.record()
    events[-1][1].synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) * 1e3


def time_us(call: Call, *more: Call) -> float:
    """Median time of one call while the device does nothing else: its sustained time, not that of a short burst.

    more: the same work on other inputs, so that none of them stays in the L2 cache.
    """
    return Timed([call, *more]).sustained_us()


def rotation_us(candidates: Sequence[Sequence[Call]], samples: int) -> list[list[float]]:
    """Times of each candidate's call, one a round: in rotation, so that a drifting clock affects all of them equally."""
    timed = [Timed(calls) for calls in candidates]
    rows = [[one.sample_us() for one in timed] for _ in range(samples)]
    return [list(column) for column in zip(*rows, strict=True)]


def interleaved_us(candidates: Sequence[Sequence[Call]], samples: int = 21) -> list[float]:
    """Median time of each candidate's call, sampled in rotation."""
    return [statistics.median(column) for column in rotation_us(candidates, samples)]


def in_turns(*groups: Sequence[Callable[[], float]], rounds: int = 3) -> list[list[float]]:
    """Medians of measurements that are taken one after the other, round by round; in the groups that they came in."""
    rows = [[sample() for group in groups for sample in group] for _ in range(rounds)]
    medians = iter([statistics.median(column) for column in zip(*rows, strict=True)])
    return [[next(medians) for _ in group] for group in groups]


def copies_beyond_l2(bytes_each: int, l2_bytes: int, most: int = 48) -> int:
    """Number of sets of inputs that exceed three times the L2 cache, so that a call finds none of its own data there."""
    return max(1, min(most, -(-3 * l2_bytes // max(bytes_each, 1))))


def measure_limits() -> Limits:
    """Copy bandwidth and matmul rates that the current device sustains now. Takes 8 GiB of its memory for a moment."""
    matmuls = _matmul_tflops()
    # The copy between events, not in a graph: there it becomes a memcpy node, which ran at 2.4 instead of 3.0 TB/s.
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return Limits(2 * source.numel() / _sustained_us(lambda: target.copy_(source)) / 1e3, *matmuls)


def _matmul_tflops(size: int = 8192) -> tuple[float, float]:
    """(bf16, fp8), on random values: zeros draw less power and run faster."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16, generator=generator)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16, generator=generator)
    product = torch.empty_like(a)
    bf16_us = time_us(lambda: torch.mm(a, b, out=product))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    fp8_us = time_us(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16))
    return 2 * size**3 / bf16_us / 1e6, 2 * size**3 / fp8_us / 1e6
