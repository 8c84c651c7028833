"""Times of the public operators on the tuner's shapes, next to the device's floor in the same run, the error against the exact
answer and, if asked, other libraries' times.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import gdn
from autotune import cases, tuning
from autotune.shapes import Shape
from benchmarks import peers, prefill_peers
from gdn.device import DeviceSpec
from gdn.runtime import prepare, registry
from gdn.testing import timing


@dataclass(frozen=True)
class Row:
    op: str
    shape: str
    backend: str  # what ran
    config: dict[str, Any]
    config_source: str  # table | default
    time_us: float  # sustained
    burst_us: float  # before the power limit lowers the clock
    floor_us: float
    gbps: float  # useful bytes over the time
    tflops: float  # useful operations over the time
    captured: bool  # False: timed without a CUDA graph, host cost included
    error: float  # largest relative error of a head, which the tuner limits too

    @property
    def share_of_floor(self) -> float:
        return self.floor_us / self.time_us


def measure(shape: Shape, limits: timing.Limits, spec: DeviceSpec, backend: str | None = None) -> tuple[Row, timing.Timed] | None:
    """Row of a shape and its calls, to time them again; None where no kernel serves it (the reference is not timed)."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepared = prepare(shape.problem, device, backend)
    if prepared.launch is None:
        return None
    case = cases.make(shape, device, spec)
    error = case.check(prepared)
    timed = timing.Timed(case.public_calls(backend))
    time_us = timed.sustained_us()  # as the limits are measured
    flops, num_bytes = cases.tunable(shape.op).useful_flops(shape), shape.problem.bytes_moved()
    dtype: str = shape.problem.static_fields().get("dtype", "float32")  # gates have one for each input, and no matmul
    row = Row(
        op=shape.op, shape=shape.name, backend=prepared.backend, config=asdict(prepared.config),
        config_source=prepared.choice.config_source, time_us=time_us, burst_us=timed.burst_us(),
        floor_us=limits.floor_us(flops, num_bytes, dtype), gbps=num_bytes / time_us / 1e3, tflops=flops / time_us / 1e6,
        captured=timed.captured, error=error,
    )  # fmt: skip
    return row, timed


def with_time(row: Row, time_us: float) -> Row:
    """The row with another time of the same calls."""
    scale = row.time_us / time_us
    return replace(row, time_us=time_us, gbps=row.gbps * scale, tflops=row.tflops * scale)


def measure_peers(
    shape: Shape, libraries: Sequence[str], spec: DeviceSpec, ours: Sequence[timing.Timed] = ()
) -> tuple[list[peers.PeerRow], list[str], list[str], list[float]]:
    """Times of every way of every library, on inputs that rotate like ours; the failures; the ways that a library refused; times
    of `ours`, which take turns with them, so that the heat of one is nobody's advantage."""
    if cases.tunable(shape.op).peer_arguments is None or not libraries:
        return [], [], [], []
    device = torch.device("cuda", torch.cuda.current_device())
    ways_of = _ways(shape, timing.copies_beyond_l2(shape.problem.bytes_moved(), spec.l2_bytes), device)
    found: list[tuple[str, peers.Peer, Callable[[], float]]] = []
    failures, refused = [], []
    for library in libraries:
        try:
            for same in ways_of(library):
                try:
                    found.append((library, same[0], peers.timed(same)))
                except peers.Refused as why:
                    refused.append(f"{library} {same[0].variant}: {why}")
                    torch.cuda.empty_cache()
        except Exception as failed:  # a library that is not there, or refuses the shape
            failures.append(f"{library}: {type(failed).__name__}: {failed}")
    own, theirs = timing.in_turns([one.sustained_us for one in ours], [sample for _, _, sample in found])
    rows = [
        peers.PeerRow(shape.op, shape.name, library, way.variant, way.norm, time_us, way.step)
        for (library, way, _), time_us in zip(found, theirs, strict=True)
    ]
    return rows, failures, refused, own


def _ways(shape: Shape, copies: int, device: torch.device) -> Callable[[str], list[tuple[peers.Peer, ...]]]:
    """Maps a library to its ways, each on `copies` sets of inputs."""
    arguments = cases.tunable(shape.op).peer_arguments
    assert arguments is not None
    sets = [arguments(shape, device, 1 + copy) for copy in range(copies)]
    # Some libraries cache what they derive on the host from a few tensors of lengths, and derive nothing while capturing.
    shared = {name: value.int() for name, value in sets[0].items() if name in ("cu_seqlens", "query_start_loc")}
    sets = [one | shared for one in sets]
    ways = prefill_peers.ways if shape.op == prefill_peers.OP else peers.ways
    return lambda library: list(zip(*(ways(library, shape.problem, one) for one in sets), strict=True))


def about_run(limits: timing.Limits) -> dict[str, Any]:
    """Day, device and its measured limits, versions: the first fields of all figures."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__), "gdn": gdn.__version__, "limits": asdict(limits),
    }  # fmt: skip


def backends(op: str, backend: str | None, every: bool) -> list[str | None]:
    """Backends to time: the given one, every kernel's, or None for the one that a user's call takes."""
    if every:
        return list(registry.operator(op).modules)
    if backend is not None:
        tuning.kernels(op, backend)  # raises where the operator has no such kernel
    return [backend]


class Bench:
    """A run over shapes. The device's limits are measured first; `measure` adds a shape; `found` has the figures so far."""

    def __init__(self, spec: DeviceSpec, backend: str | None, every: bool, libraries: Sequence[str]) -> None:
        self._spec, self._backend, self._every, self._libraries = spec, backend, every, libraries
        self._limits = timing.measure_limits()
        self._rows: list[Row] = []
        self._peers: list[peers.PeerRow] = []
        self._failures: list[dict[str, str]] = []
        self._left_out: list[dict[str, str]] = []

    def measure(self, shape: Shape) -> list[str]:
        """Times a shape; returns the failures, and the peers' ways that are left out, with their reasons."""
        failures, rows, ours = [], [], []
        for one in backends(shape.op, self._backend, self._every):
            try:
                measured = measure(shape, self._limits, self._spec, one)
            except Exception as failed:  # a broken kernel must not hide the others
                failures.append((one or "auto", f"{type(failed).__name__}: {failed}"))
                continue
            finally:
                torch.cuda.empty_cache()
            if measured is None:
                failures.append((one or "auto", "no kernel serves it"))
                continue
            rows.append(measured[0])
            ours += [measured[1]] if self._libraries else []  # else their graphs are held in vain
        timed, failed_peers, refused, times = measure_peers(shape, self._libraries, self._spec, ours)
        self._rows += [with_time(row, time_us) for row, time_us in zip(rows, times, strict=True)] if times else rows
        self._peers += timed
        failures += [("peer", why) for why in failed_peers]
        self._left_out += [{"op": shape.op, "shape": shape.name, "why": why} for why in refused]
        torch.cuda.empty_cache()
        self._failures += [{"op": shape.op, "shape": shape.name, "backend": who, "why": why} for who, why in failures]
        told = [*failures, *(("peer left out", why) for why in refused)]
        return [f"{shape.op} {shape.name} ({who}): {why}" for who, why in told]

    @property
    def found(self) -> dict[str, Any]:
        """Figures of the run, ready for JSON."""
        return about_run(self._limits) | {
            "rows": [{**asdict(row), "share_of_floor": row.share_of_floor} for row in self._rows],
            "peers": [asdict(row) for row in self._peers], "failures": self._failures,
            "left_out": self._left_out,
        }  # fmt: skip
