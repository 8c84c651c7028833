"""`python -m benchmarks.replay_decode`: decode with a ring next to decode that writes every state, on this GPU.

Microseconds of a call on the same states, both forms in turns. Without a ring a call writes a state a token, with drafts each
to a slot of its own. With a ring the time is the mean over `fold_every` calls in one graph, each with its own counts: positions
are spread evenly over a period of folds, and a call continues from the tokens that were accepted of the one before.

    floor   the bytes that the form with a ring moves, at the rate of a copy in the same run
    must    1.15 (floor + 3 us), at most 1.1 times the form without a ring
    aim     1.02 floor + 3 us

Parts (`--part`): step, the fused decode step; rule, the recurrent operator with each backend and FlashInfer's kernels next to it;
folds, calls in which every sequence folds; states, `fold_states` and `accept_draft_tree` over all layers of a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gdn
from autotune import cases
from autotune.console import JsonFile, device_spec, keep
from autotune.shapes import Shape
from benchmarks import replay_peers
from gdn.cli.plain import run_alone
from gdn.core import tunable as base
from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import mean_accepted, ring_choice
from gdn.runtime import devices, registry
from gdn.testing import timing

Call = Callable[[], object]

BATCHES = (1, 8, 32, 128, 512)
HEADS = ((16, 32), (8, 16), (4, 8), (2, 4))
PARTS = ("step", "rule", "folds", "states")
LAYERS, SEQUENCES = 36, 64  # of `states`: the layers of Qwen3-Next-80B; all states and their copies take 20 GB
_FIXED_US = 3.0  # time of a call that does not depend on its bytes
_PERIODS_BEFORE = 64  # periods of folds before the first call


@dataclass(frozen=True)
class Row:
    part: str
    name: str
    backend: str
    plain_us: float | None  # without a ring; None where there is no such form
    ring_us: float
    floor_us: float

    @property
    def must_us(self) -> float:
        must = 1.15 * (self.floor_us + _FIXED_US)
        return must if self.plain_us is None else min(must, 1.1 * self.plain_us)

    @property
    def aim_us(self) -> float:
        return 1.02 * self.floor_us + _FIXED_US


@dataclass(frozen=True)
class Counts:
    """Committed tokens before a call, and tokens accepted of the call before: int32 [batch]."""

    computed: Tensor
    accepted: Tensor


def period(batch: int, tokens: int, fold_every: int, device: torch.device, *, spread: bool = True) -> list[Counts]:
    """Counts of `fold_every` calls, one after the other. Without `spread` all sequences have the same, and fold in the first."""
    offset = torch.arange(batch) if spread else torch.zeros(batch, dtype=torch.int64)
    mean = round(10 * mean_accepted(tokens))  # in tenths: no rounding

    def committed(calls: int) -> Tensor:
        return _PERIODS_BEFORE * fold_every + (offset + calls) * mean // 10

    counts = [(committed(call), committed(call) - committed(call - 1)) for call in range(fold_every)]
    return [Counts(computed.int().to(device), accepted.int().to(device)) for computed, accepted in counts]


@dataclass(frozen=True)
class Form:
    """A shape without a ring and the ring that it would have."""

    shape: Shape
    rows: int
    fold_every: int

    @property
    def tokens(self) -> int:
        return max(self.shape.lengths)

    @property
    def problem(self) -> Any:
        """The problem with a ring."""
        columns = {"has_columns": False} if self.shape.op == "gdn_decode" else {"write_every_token": False}
        problem: Any = self.shape.problem
        return replace(problem, ring_rows=self.rows, fold_every=self.fold_every, **columns)


def form_of(op: str, heads: tuple[int, int], batch: int, state_dtype: str, drafts: int) -> Form:
    """The shape of `python -m benchmarks ops` for these sizes, and the ring that `gdn.ring_shape` chooses."""
    flags: dict[str, Any] = {"has_accepted": drafts > 0, "state_dtype": state_dtype}
    if op == "gdn_decode":
        flags |= {"cu_seqlens_dtype": "int32" if drafts else None, "has_columns": drafts > 0}
    else:
        flags |= {"write_every_token": drafts > 0}
    return Form(base.decode_steps(op, heads, batch, drafts, **flags), *ring_choice(1 + drafts, state_dtype))


def with_ring(form: Form, arguments: dict[str, Any], counts: Counts) -> dict[str, Any]:
    """Arguments of the public call with a ring, from those without: the same pools, of which drafts use fewer slots."""
    shape, problem = form.shape, form.problem
    pool, slots = ("ssm_state", "state_indices") if shape.op == "gdn_decode" else ("initial_state", "ssm_state_indices")
    given = arguments[slots]
    replaced = {
        slots: _read_slots(given, arguments.get("num_accepted_tokens")), "num_computed_tokens": counts.computed,
        "fold_every": form.fold_every, "fold_phase": 0,
    }  # fmt: skip
    if problem.has_accepted:
        replaced["num_accepted_tokens"] = counts.accepted
    if "ring" not in arguments:
        states = arguments[pool]
        heads = problem.num_v_heads
        width = gdn.ring_shape(problem.num_k_heads, heads, problem.head_k_dim, problem.head_v_dim)[1]
        replaced["ring"] = states.new_zeros(len(states), form.rows, width, dtype=torch.float32)
        replaced["state_tokens"] = torch.zeros(len(states), dtype=torch.int32, device=states.device)
    return arguments | replaced


def _read_slots(indices: Tensor, accepted: Tensor | None) -> Tensor:
    """The slot of each sequence that a call without a ring reads: the others may hold anything."""
    if indices.dim() == 1:
        return indices
    columns = torch.zeros(len(indices), 1, device=indices.device) if accepted is None else accepted[: len(indices), None] - 1
    return indices.gather(1, columns.long())[:, 0]


def calls_of(
    form: Form, backend: str | None, device: torch.device, spec: DeviceSpec, *, spread: bool = True
) -> tuple[list[Call], list[Call]]:
    """Calls without and with a ring, on as many sets of inputs as exceed the L2 cache. The calls with a ring are whole periods;
    without spread, the call of each set in which all sequences fold."""
    copies = timing.copies_beyond_l2(form.problem.bytes_moved(), spec.l2_bytes)
    case = cases.tunable(form.shape.op).case(form.shape, device, copies)
    plain: Any = case.public_calls(backend)
    counts = period(len(form.shape.lengths), form.tokens, form.fold_every, device, spread=spread)
    first = [with_ring(form, call.keywords, counts[0]) for call in plain]
    steps = counts if spread else counts[:1]
    ring: list[Call] = [partial(plain[0].func, **with_ring(form, one, step)) for step in steps for one in first]
    return plain, ring


def measure(form: Form, part: str, backend: str, device: torch.device, spec: DeviceSpec, gbps: float) -> Row:
    plain, ring = (timing.Timed(calls) for calls in calls_of(form, backend, device, spec, spread=part != "folds"))
    for timed in (plain, ring):
        if not timed.captured:
            raise RuntimeError(f"{form.shape.name}: the calls cannot be captured")
    ((plain_us, ring_us),) = timing.in_turns([plain.sustained_us, ring.sustained_us])
    return Row(part, form.shape.name, backend, plain_us, ring_us, form.problem.bytes_moved() / gbps / 1e3)


def forms(part: str, most: int = max(BATCHES)) -> Iterator[tuple[Form, str]]:
    """The forms of a part, and the backend of each."""
    if part == "step":
        kinds = [((16, 32), dtype, drafts) for dtype in ("float32", "bfloat16") for drafts in (0, 3)]
        for heads, dtype, drafts in [*kinds, *((heads, "float32", 0) for heads in HEADS[1:])]:
            for batch in (batch for batch in BATCHES if batch <= most):
                yield form_of("gdn_decode", heads, batch, dtype, drafts), "cute"
    elif part == "rule":
        for dtype, drafts in (("float32", 0), ("float32", 3), ("bfloat16", 0), ("bfloat16", 3)):
            for backend in registry.operator("recurrent").modules:
                yield form_of("recurrent", (16, 32), min(128, most), dtype, drafts), backend
    elif part == "folds":
        for batch in (batch for batch in (8, 32, 128) if batch <= most):
            yield form_of("gdn_decode", (16, 32), batch, "float32", 0), "cute"


def state_calls(sequences: int, layers: int, device: torch.device) -> dict[str, tuple[Call, int]]:
    """Calls over all layers of a model of 16/32 heads, with 3 drafts, and the bytes that each has to move."""
    heads, dim, tokens = (16, 32), 128, 4
    rows, width, fold_every = gdn.ring_shape(*heads, dim, dim, num_spec=tokens - 1)
    make = torch.Generator(device).manual_seed(0)
    states = torch.empty(layers, 2 * sequences + 1, heads[1], dim, dim, device=device).normal_(generator=make)
    ring = torch.empty(layers, sequences + 1, rows, width, device=device).normal_(generator=make)
    ring[..., -heads[1] :].abs_().neg_()  # log decays
    slots = 1 + torch.randperm(sequences, device=device, dtype=torch.int32)
    tokens_of = torch.zeros(len(states[0]), dtype=torch.int32, device=device)
    counts = period(sequences, tokens, fold_every, device)[0]
    options: dict[str, Any] = {"num_k_heads": heads[0], "fold_every": fold_every, "state_v_first": True}
    # To another slot, so that the ring stays as it is and the next call has as much to do.
    folded = partial(
        gdn.fold_states, states, slots, ring, tokens_of, counts.computed, num_accepted_tokens=counts.accepted,
        final_state_indices=slots + sequences, **options,
    )  # fmt: skip
    empty = partial(
        gdn.fold_states,
        states,
        slots,
        ring,
        torch.full_like(tokens_of, 1 << 20),
        torch.full_like(counts.computed, 1 << 20),
        **options,
    )
    # As in a cache: a token's channels are next to each other.
    channels = (2 * heads[0] + heads[1]) * dim
    windows = torch.zeros(layers, sequences + 1, 2 + tokens, channels, dtype=torch.bfloat16, device=device).mT
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32, device=device).repeat(sequences)  # the last node's path: 0, 2, 3
    offsets = tokens * torch.arange(sequences + 1, dtype=torch.int32, device=device)
    accept = partial(
        gdn.accept_draft_tree, ring, windows, slots, parents, torch.full_like(slots, 3), counts.computed, counts.accepted.clone(),
        query_start_loc=offsets, conv_width=4,
    )  # fmt: skip
    live = counts.computed - (counts.computed - counts.accepted) // fold_every * fold_every
    entries = int(live.sum()) * width * 4
    moved = 2 * sequences * 2 * (width * 4 + windows.shape[2] * 2)  # two of a path's nodes move
    return {
        "fold_states": (folded, layers * (2 * sequences * states[0, 0].nbytes + entries)),
        "fold_states, empty rings": (empty, 0), "accept_draft_tree": (accept, layers * moved),
    }  # fmt: skip


def measure_states(device: torch.device, gbps: float) -> list[Row]:
    calls = state_calls(SEQUENCES, LAYERS, device)
    name = f"{LAYERS} layers, batch {SEQUENCES}"
    return [
        Row("states", f"{what}, {name}", "cute", None, timing.time_us(call), num_bytes / gbps / 1e3)
        for what, (call, num_bytes) in calls.items()
    ]


def table_of(rows: list[Row], device: str) -> Table:
    table = Table("", "backend", "plain, us", "ring, us", "plain / ring", "floor", "must", "aim", "", title=device)
    for row in rows:
        plain = ("-", "-") if row.plain_us is None else (f"{row.plain_us:.1f}", f"{row.plain_us / row.ring_us:.2f}")
        reached = "aim" if row.ring_us <= row.aim_us else "must" if row.ring_us <= row.must_us else "-"
        limits = [f"{limit:.1f}" for limit in (row.floor_us, row.must_us, row.aim_us)]
        table.add_row(f"{row.part}: {row.name}", row.backend, plain[0], f"{row.ring_us:.1f}", plain[1], *limits, reached)
    return table


@torch.inference_mode()
def main(
    part: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}; may be repeated; all if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Largest batch.")] = max(BATCHES),
    with_peers: Annotated[bool, typer.Option("--peers", help="FlashInfer's kernels too, where it is installed.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time decode with a ring and without."""
    chosen = part or list(PARTS)
    if unknown := sorted(set(chosen) - set(PARTS)):
        raise ValueError(f"part: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    spec = device_spec()
    device = torch.device("cuda", torch.cuda.current_device())
    console, gbps = Console(width=160), timing.measure_limits().copy_gbps
    rows: list[Row] = []
    for one in chosen:
        for form, backend in forms(one, batch):
            try:
                rows.append(measure(form, one, backend, device, spec, gbps))
            except Exception as failed:  # one form must not hide the others
                console.print(f"{one}: {form.shape.name} ({backend}): {type(failed).__name__}: {failed}", markup=False)
            torch.cuda.empty_cache()
            keep(json_file, [asdict(row) for row in rows])
    if "states" in chosen:
        rows += measure_states(device, gbps)
        keep(json_file, [asdict(row) for row in rows])
    console.print(table_of(rows, f"{devices.describe(device)[1]}, copy {gbps / 1e3:.2f} TB/s"))
    if with_peers:
        for line in replay_peers.measure(min(128, batch), device):
            console.print(line, markup=False)


if __name__ == "__main__":
    run_alone(main, "python -m benchmarks.replay_decode")
