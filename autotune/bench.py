"""Times of the public operators on the tuner's shapes, next to the device's floor in the same run, the error against the exact
answer and, if asked, other libraries' times.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import gdn
from autotune import cases, peers, tuning
from autotune.shapes import Shape
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


def measure(shape: Shape, limits: timing.Limits, spec: DeviceSpec, backend: str | None = None) -> Row | None:
    """Row of a shape; None where no kernel serves it (the reference is not timed)."""
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
    return Row(
        op=shape.op, shape=shape.name, backend=prepared.backend, config=asdict(prepared.config),
        config_source=prepared.choice.config_source, time_us=time_us, burst_us=timed.burst_us(),
        floor_us=limits.floor_us(flops, num_bytes, dtype), gbps=num_bytes / time_us / 1e3, tflops=flops / time_us / 1e6,
        captured=timed.captured, error=error,
    )  # fmt: skip


def measure_peers(shape: Shape, libraries: Sequence[str], spec: DeviceSpec) -> tuple[list[peers.PeerRow], list[str], list[str]]:
    """Times of every way of every library, on inputs that rotate like ours; the failures; the ways that a library refused."""
    if cases.tunable(shape.op).peer_arguments is None:
        return [], [], []
    device = torch.device("cuda", torch.cuda.current_device())
    ways_of = _ways(shape, timing.copies_beyond_l2(shape.problem.bytes_moved(), spec.l2_bytes), device)
    rows, failures, refused = [], [], []
    for library in libraries:
        try:
            for same in ways_of(library):
                way = same[0]
                try:
                    rows.append(peers.PeerRow(shape.op, shape.name, library, way.variant, way.norm, peers.time_us(same)))
                except peers.Refused as why:
                    refused.append(f"{library} {way.variant}: {why}")
                    torch.cuda.empty_cache()
        except Exception as failed:  # a library that is not there, or refuses the shape
            failures.append(f"{library}: {type(failed).__name__}: {failed}")
    return rows, failures, refused


def _ways(shape: Shape, copies: int, device: torch.device) -> Callable[[str], list[tuple[peers.Peer, ...]]]:
    """Maps a library to its ways, each on `copies` sets of inputs."""
    arguments = cases.tunable(shape.op).peer_arguments
    assert arguments is not None
    sets = [arguments(shape, device, 1 + copy) for copy in range(copies)]
    # Some libraries cache what they derive on the host from a few tensors of lengths, and derive nothing while capturing.
    shared = {name: value.int() for name, value in sets[0].items() if name == "cu_seqlens"}
    sets = [one | shared for one in sets]
    return lambda library: list(zip(*(peers.ways(library, shape.problem, one) for one in sets), strict=True))


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
        failures = []
        for one in backends(shape.op, self._backend, self._every):
            try:
                row = measure(shape, self._limits, self._spec, one)
            except Exception as failed:  # a broken kernel must not hide the others
                failures.append((one or "auto", f"{type(failed).__name__}: {failed}"))
                continue
            finally:
                torch.cuda.empty_cache()
            self._rows += [] if row is None else [row]
            failures += [(one or "auto", "no kernel serves it")] if row is None else []
        timed, failed_peers, refused = measure_peers(shape, self._libraries, self._spec)
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
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": torch.cuda.get_device_name(),
            "torch": str(torch.__version__), "gdn": gdn.__version__, "limits": asdict(self._limits),
            "rows": [{**asdict(row), "share_of_floor": row.share_of_floor} for row in self._rows],
            "peers": [asdict(row) for row in self._peers], "failures": self._failures,
            "left_out": self._left_out,
        }  # fmt: skip
