"""Times the public operators on the tuner's shapes and sets each beside what the device can do in this run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import gdn
from autotune import cases, tuning
from autotune.shapes import Shape
from gdn.device import DeviceSpec
from gdn.problems import ChunkProblem, ConvolutionProblem, DeltaRuleProblem, MqaLogitsProblem
from gdn.runtime import prepare, registry
from gdn.testing import timing


@dataclass(frozen=True)
class Row:
    op: str
    shape: str
    backend: str  # what ran
    config: dict[str, Any]
    config_source: str  # table | default
    time_us: float
    floor_us: float
    gbps: float  # useful bytes over the time
    tflops: float  # useful operations over the time
    captured: bool  # False: timed without a CUDA graph, host cost included

    @property
    def share_of_floor(self) -> float:
        return self.floor_us / self.time_us


def useful_flops(shape: Shape) -> int:
    """Operations of the pairs that are asked for: a causal prefill scores fewer than every (query, key)."""
    problem = shape.problem
    if isinstance(problem, MqaLogitsProblem) and shape.ranges == "causal":
        queries, keys = problem.num_queries, problem.num_keys
        pairs = sum(min(max(keys - queries + row + 1, 0), keys) for row in range(queries))
        return 2 * pairs * problem.num_heads * problem.head_dim
    if isinstance(problem, DeltaRuleProblem | ConvolutionProblem) and not isinstance(problem, ChunkProblem):
        return 0  # no tensor-core work: bytes are the floor
    return problem.flops()


def measure(shape: Shape, limits: timing.Limits, spec: DeviceSpec, backend: str | None = None, samples: int = 11) -> Row | None:
    """None where no kernel of ours runs the shape (the reference is not timed)."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepared = prepare(shape.problem, device, backend)
    if prepared.launch is None:
        return None
    timed = timing.Timed(cases.make(shape, device, spec).public_calls(backend))
    time_us = sorted(timed.sample_us() for _ in range(samples))[samples // 2]
    flops, num_bytes = useful_flops(shape), shape.problem.bytes_moved()
    dtype: str = shape.problem.static_fields().get("dtype", "float32")  # gates have one for each input, and no matmul
    return Row(
        op=shape.op,
        shape=shape.name,
        backend=prepared.backend,
        config=asdict(prepared.config),
        config_source=prepared.choice.config_source,
        time_us=time_us,
        floor_us=limits.floor_us(flops, num_bytes, dtype),
        gbps=num_bytes / time_us / 1e3,
        tflops=flops / time_us / 1e6,
        captured=timed.captured,
    )


def backends(op: str, backend: str | None, every: bool) -> list[str | None]:
    """What to time: the one asked for, every kernel, or (None) what a user's call would run."""
    if every:
        return list(registry.operator(op).modules)
    if backend is not None:
        tuning.kernels(op, backend)  # raises where there is none
    return [backend]


def run(
    shapes: Sequence[Shape],
    spec: DeviceSpec,
    backend: str | None,
    every: bool,
    on_row: Callable[[Shape, str | None, Row | str], None],
) -> dict[str, Any]:
    """The whole measurement as JSON-ready data; on_row hears each row, or why there is none."""
    limits = timing.measure_limits()
    rows: list[Row] = []
    failures: list[dict[str, str]] = []
    for shape in shapes:
        for one in backends(shape.op, backend, every):
            try:
                row = measure(shape, limits, spec, one)
            except Exception as failed:  # one broken kernel must not hide the others
                row = None
                why = f"{type(failed).__name__}: {failed}"
            else:
                why = "no kernel serves it"
            if row is not None:
                rows.append(row)
            else:
                failures.append({"op": shape.op, "shape": shape.name, "backend": one or "auto", "why": why})
            on_row(shape, one, row if row is not None else why)
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "gdn": gdn.__version__,
        "limits": asdict(limits),
        "rows": [{**asdict(row), "share_of_floor": row.share_of_floor} for row in rows],
        "failures": failures,
    }
