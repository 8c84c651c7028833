"""Times of whole layers in decode: captured without their MLPs, next to their kernels; and on the host, eager.

    captured   wall time of a layer, less that of its projections alone, over the time that its kernels need
    on the host   from the call of `GatedDeltaNet.forward` until its return; next to torch's time for its two projections alone

A captured layer is one of a stack of layers with weights and caches of their own, more than the L2 cache holds, in one graph.
Its projections are a second graph, each of its kernels another; all are sampled in rotation.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import host_cost, report
from benchmarks.launches import Launch, record
from benchmarks.stacks import Stack, make_stack, shaped
from gdn.layers import HybridConfig
from gdn.layers.named import NAMED
from gdn.runtime import devices
from gdn.testing import timing

Call = Callable[[], object]

LAYERS = 8  # of a stack
BATCH, CONTEXT = 32, 32768
TABLE = "whole layers"  # in MEASURED.md: no operator's
SIZES = f"Qwen3-Next-80B, batch {BATCH}, context {CONTEXT}, per layer of a graph of {LAYERS}"
SAMPLES = 21
HOST_LOOPS, HOST_CALLS = 60, 50
HOST_WARM_S = 1.0  # a CPU that was idle takes 1.6 times as long for the first half second


@dataclass(frozen=True)
class Part:
    """One kernel of a layer: least time, and time in a graph of its own."""

    name: str
    backend: str
    floor_us: float
    alone_us: float


@dataclass(frozen=True)
class Captured:
    """A captured layer, per layer of the stack."""

    name: str
    wall_us: float
    projections_us: float
    parts: list[Part]
    against: str  # "kernels": its kernels' times alone; "floors"
    must: float
    aim: float

    @property
    def rest_us(self) -> float:
        return self.wall_us - self.projections_us

    @property
    def floors_us(self) -> float:
        return sum(part.floor_us for part in self.parts)

    @property
    def alone_us(self) -> float:
        return sum(part.alone_us for part in self.parts)

    @property
    def found(self) -> float:
        """Ratio that the limits are about."""
        return self.rest_us / (self.alone_us if self.against == "kernels" else self.floors_us)


@dataclass(frozen=True)
class OnHost:
    """Microseconds of an eager call on the host."""

    name: str
    median_us: float  # of the medians of the loops
    least_us: float  # least median of a loop
    projections_us: float  # as median_us, of the two projections by themselves
    cpu: str
    must: float
    aim: float

    @property
    def found(self) -> float:
        """Time that the limits are about."""
        return self.median_us

    def __str__(self) -> str:
        figures = f"{self.median_us:.1f} us, least {self.least_us:.1f} (at most {self.must:.0f}, aim {self.aim:.0f})"
        alone = f"the projections alone {self.projections_us:.1f}"
        return f"{self.name}, decode, with its projections: {figures}; {alone}; on {self.cpu}"


@dataclass(frozen=True)
class Form:
    """A row of the captured table."""

    name: str
    kind: str  # of the layer
    against: str
    must: float
    aim: float
    changes: dict[str, Any]  # to the configuration
    use_fp8: bool = False


_COMPRESSED = {"index_n_heads": 4, "index_ratio": 4}
_ATTENTION = "full_attention"
FORMS = (
    Form("Gated DeltaNet", "linear_attention", "kernels", 1.1, 1.03, {}),
    Form("attention, bf16 indexer", _ATTENTION, "floors", 1.4, 1.25, {}),
    Form("attention, FP8 indexer", _ATTENTION, "floors", 1.6, 1.4, {}, use_fp8=True),
    Form("attention, compressed indexer", _ATTENTION, "floors", 1.7, 1.45, _COMPRESSED),
    Form("attention, compressed FP8 indexer", _ATTENTION, "floors", 1.7, 1.45, _COMPRESSED, use_fp8=True),
)
HOST = "GatedDeltaNet.forward on the host"
NAMES = (*(form.name for form in FORMS), HOST)


def captured(form: Form, stack: Stack, limits: timing.Limits) -> Captured:
    """Times a stack's layers and everything they launch.

    Raises
    ------
    RuntimeError
        Where the layers of the stack launch different things, or something cannot be captured.
    """
    layers = [record(partial(stack.run_layer, place)) for place in range(len(stack.layers))]
    for place, launches in enumerate(layers):
        if _names(launches) != _names(layers[0]):
            raise RuntimeError(f"{form.name}: layer {place} launches {_names(launches)}, the first one {_names(layers[0])}")
    columns = list(zip(*layers, strict=True))  # the same launch in every layer
    kernels = [column for column in columns if not column[0].is_projection]
    # In the order of the layers, as in the stack: the weights of one layer, then those of the next.
    products = [launch.call for launches in layers for launch in launches if launch.is_projection]
    candidates: list[list[Call]] = [[stack.run], [partial(_in_turn, products)]]
    candidates += [[launch.call for launch in column] for column in kernels]
    wall_us, projections_us, *alone_us = _interleaved_us(form.name, candidates)
    parts = [
        Part(column[0].name, column[0].backend, column[0].floor_us(limits), time_us)
        for column, time_us in zip(kernels, alone_us, strict=True)
    ]
    count = len(layers)
    return Captured(form.name, wall_us / count, projections_us / count, parts, form.against, form.must, form.aim)


def _names(launches: Sequence[Launch]) -> list[str]:
    return [launch.name for launch in launches]


@torch.inference_mode()
def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _interleaved_us(name: str, candidates: Sequence[Sequence[Call]]) -> list[float]:
    """Median time of a call of each candidate, in graphs, sampled in rotation."""
    timed = [timing.Timed([partial(_in_turn, [call]) for call in calls]) for calls in candidates]
    if not all(one.captured for one in timed):
        raise RuntimeError(f"{name}: a call cannot be captured")
    rows = [[one.sample_us() for one in timed] for _ in range(SAMPLES)]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@torch.inference_mode()
def on_host(stack: Stack, loops: int = HOST_LOOPS, calls: int = HOST_CALLS, warm_s: float = HOST_WARM_S) -> OnHost:
    """Times `forward` of a stack's first Gated DeltaNet layer on the host, with its projections and without `nn.Module.__call__`,
    and alternately with it the two projections alone."""
    layer, states, device = stack.layers[0].linear_attn, stack.caches.gdn, stack.hidden_states.device
    arguments = (stack.hidden_states, stack.step.gdn, states.conv_states[0], states.ssm_states[0])
    weights = layer.in_proj, layer.out_proj
    inputs = stack.hidden_states, stack.hidden_states.new_zeros(len(stack.hidden_states), layer.out_proj.shape[1])

    def project() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            torch.nn.functional.linear(x, weight)

    candidates = (partial(layer.forward, *arguments), project)
    rows: list[list[float]] = []
    begin = time.perf_counter()
    while len(rows) < loops:
        row = [statistics.median(host_cost.times_us([call] * calls, device)) for call in candidates]
        if time.perf_counter() - begin > warm_s:
            rows.append(row)
    layer_us, projections_us = zip(*rows, strict=True)
    found = statistics.median(layer_us), min(layer_us), statistics.median(projections_us)
    return OnHost(HOST, *found, cpu_name(), must=60.0, aim=40.0)


def cpu_name() -> str:
    """Name of this machine's CPU, with its family, model and stepping, which tell apart what has the same name."""
    fields = devices.cpu_fields()
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = [f"{name.removeprefix('cpu ')} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields]
    return f"{fields['model name']} ({', '.join(numbers)})"


def measure(
    name: str,
    limits: timing.Limits,
    device: torch.device,
    *,
    config: HybridConfig = NAMED["qwen3-next-80b"],
    layers: int = LAYERS,
    batch: int = BATCH,
    context: int = CONTEXT,
) -> Captured | OnHost:
    """The row of a name (`NAMES`)."""
    form = next((one for one in FORMS if one.name == name), FORMS[0])
    layers = 1 if name == HOST else layers
    stack = make_stack(shaped(config, form.kind, layers, **form.changes), batch, context, device, use_fp8=form.use_fp8)
    return on_host(stack) if name == HOST else captured(form, stack, limits)


def as_dict(row: Captured | OnHost) -> dict[str, Any]:
    """A row as JSON shows it."""
    return {**asdict(row), "found": row.found, "passed": row.found <= row.must}


def markdown(rows: Sequence[Captured | OnHost], about: Mapping[str, Any]) -> str:
    """Table of whole layers in decode. about: the run, for `report.heading`."""
    us = report.time_text
    lines = [
        f"**{TABLE}** in decode ({SIZES}): {report.heading(about)}", "",
        "| layer | wall, us | projections | rest | its kernels: floors | alone | rest over | is | at most | aim |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    parts = []
    for row in (row for row in rows if isinstance(row, Captured)):
        times = (row.wall_us, row.projections_us, row.rest_us, row.floors_us, row.alone_us)
        over = {"kernels": "alone", "floors": "floors"}[row.against]
        limits = [f"{number:.2f}" for number in (row.found, row.must, row.aim)]
        lines.append("| " + " | ".join([row.name, *map(us, times), over, *limits]) + " |")
        kernels = [f"{one.name} ({report.KERNEL[one.backend]}) {us(one.floor_us)} {us(one.alone_us)}" for one in row.parts]
        parts.append(f"- {row.name}: {', '.join(kernels)}")
    lines += ["", "Their kernels, floor and time alone:", "", *parts]
    lines += [f"\n{row}." for row in rows if isinstance(row, OnHost)]
    return "\n".join(lines) + "\n"
