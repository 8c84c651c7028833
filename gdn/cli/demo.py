"""`gdn demo`: prefill a ragged batch and decode from a state pool; every result is checked against an independent computation."""

import functools
import time
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import gdn
from gdn.cli.demo_block import DECODE, PREFILL, Block, Call
from gdn.cli.demo_expected import pairs
from gdn.cli.plain import section, table
from gdn.device import H100
from gdn.models import MODELS, ModelShape
from gdn.runtime import env
from gdn.testing.compare import error as compare
from gdn.testing.oracle_logits import calc_diff
from gdn.testing.timing import Limits, copies_beyond_l2, measure_limits, time_us

# Prompt lengths: ragged, with multiples of a chunk, a length below the convolution's window, and a long prompt.
GPU_LENGTHS = (37, 4000, 511, 2048, 2, 64, 1530)
CPU_LENGTHS = (37, 129, 64, 2)


_SCORES = ("mqa_logits", "paged_mqa_logits")


@dataclass(frozen=True)
class Row:
    """One line of the demo's table."""

    phase: str
    operator: str
    backend: str
    notes: tuple[str, ...]  # reasons why a preferred backend did not run
    time_us: float | None
    floor_us: float | None
    error: float  # the largest over all tensors that the call returned or updated
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # NaN fails


def _private(call: Call, dense: bool) -> dict[str, Any]:
    """The call's arguments, with private copies of those that it mutates; dense: of all dense tensors too.

    With the dense ones, calls in turn find no data in the L2 cache.
    """
    return {
        name: value.clone() if name in call.mutated or (dense and torch.is_tensor(value) and value.is_contiguous()) else value
        for name, value in call.arguments.items()
    }


def _error(got: torch.Tensor, expected: torch.Tensor, is_score: bool) -> float:
    """Error of a result: 0 or 1 for indices and bytes, calc_diff for scores with equal masks, else that of the worst row."""
    if got.shape != expected.shape:
        raise RuntimeError(f"shape {list(got.shape)}, expected {list(expected.shape)}")
    if not got.is_floating_point():
        return float(not torch.equal(got, expected))
    if not is_score:
        return compare(got, expected, groups=1).l2
    hidden = torch.isneginf(expected)
    if not torch.equal(torch.isneginf(got), hidden):
        return float("inf")
    return calc_diff(got.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))


def measure(call: Call, limits: Limits | None) -> Row:
    """Runs the call once on its own pools, which change, checks it, and times it on copies where limits are given."""
    function = getattr(gdn, call.operator)
    choice = gdn.explain(call.operator, **call.arguments)
    parts = getattr(choice, "parts", ()) or (choice,)  # a composed operator has parts
    before = _private(call, dense=False)
    call.run()
    errors = [_error(got, expected, call.operator in _SCORES) for got, expected in pairs(call, before)]
    error = max(errors, key=lambda error: error if error == error else float("inf"))  # NaN is the worst
    elapsed = floor = None
    if limits is not None:
        copies = copies_beyond_l2(call.floor_bytes, H100.l2_bytes, most=32)
        sets = [_private(call, dense=copies > 1) for _ in range(copies)]
        elapsed = time_us(*[functools.partial(function, **arguments) for arguments in sets])
        floor = limits.floor_us(call.floor_flops, call.floor_bytes, call.flops_dtype)
    backend = "+".join(dict.fromkeys(part.backend for part in parts))
    notes = tuple(note for part in parts for note in part.notes)
    return Row(call.phase, call.operator, backend, notes, elapsed, floor, error, call.limit)


def demo(
    model: Annotated[str, typer.Option(help=f"Shapes: {', '.join(MODELS)}.")] = "qwen3-next-80b",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank run.")] = 1,
    device: Annotated[str, typer.Option(help="'cuda', 'cpu', or 'auto': a GPU if there is one.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
) -> None:
    """Run a Qwen3-Next-shaped block (a GDN layer and a QSA indexer) and check every operator."""
    console = Console()
    if model not in MODELS:
        raise typer.BadParameter(f"expected one of {', '.join(MODELS)}, got {model!r}", param_hint="--model")
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"expected auto, cpu or cuda, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("cuda was asked for and torch sees no GPU", param_hint="--device")
    try:
        shape = MODELS[model].per_rank(tp)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tp") from error
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    lengths = list(GPU_LENGTHS if where.type == "cuda" else CPU_LENGTHS)
    fp8 = env.current().qsa_use_fp8_indexer

    limits = None
    if where.type == "cuda":
        limits = measure_limits()
        console.print(
            f"{torch.cuda.get_device_name()}: copy {limits.copy_gbps / 1e3:.2f} TB/s, bf16 {limits.bf16_tflops:.0f}, "
            f"fp8 {limits.fp8_tflops:.0f} TFLOP/s"
        )
    else:
        console.print("No GPU in use: the plain-torch reference runs, without timings.")
    console.print("\n".join(_plan(shape, tp, lengths, steps, fp8)), highlight=False)

    block = Block(shape, lengths, steps, fp8_indexer=fp8, device=where, seed=seed)
    started = time.perf_counter()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("prefill", total=len(PREFILL) + len(DECODE) * steps)
        for step in range(1 + steps):
            timed = limits if step in (0, steps) else None  # of the decode steps only the last one is timed
            for call in block.prefill() if step == 0 else block.decode():
                progress.update(task, description=f"{call.phase} {call.operator}")
                rows.append(measure(call, timed))
                progress.advance(task)
    console.print(_table(rows))
    for note in dict.fromkeys(f"{row.operator}: {note}" for row in rows for note in row.notes):
        console.print(note)
    failed = [row for row in rows if not row.passed]
    ran = ", ".join(f"{backend} {count}" for backend, count in Counter(row.backend for row in rows).most_common())
    console.print(
        f"{len(rows)} calls ({ran}), each checked against an independent computation in float64, {len(failed)} wrong, "
        f"{time.perf_counter() - started:.1f} s"
    )
    raise typer.Exit(1 if failed else 0)


def _plan(shape: ModelShape, tp: int, lengths: list[int], steps: int, fp8: bool) -> list[str]:
    """Lines that say what will run: the model's shapes, the batch, and the operators of each phase."""
    heads = f"{shape.num_k_heads} q and k heads of {shape.head_k_dim}, {shape.num_v_heads} v heads of {shape.head_v_dim}"
    rotated = f"{shape.index_num_heads} heads of {shape.index_head_dim}, {shape.index_rotary_dim} of them rotated"
    tokens, kind = ", ".join(map(str, lengths)), "FP8" if fp8 else "bf16"
    return [
        f"{shape.name}, one of {tp} tensor-parallel rank{'s' if tp > 1 else ''}, random weights; hidden size {shape.hidden_size}",
        f"  GDN layer: {heads}, convolution of width {shape.conv_width} over {shape.conv_dim} channels, float32 states",
        f"  indexer: {rotated}, top {shape.index_topk}, cache and logits in {kind} (VLLM_QSA_USE_FP8_INDEXER)",
        f"  prefill: {len(lengths)} prompts of {tokens} tokens in one ragged batch, every second one from a cached state",
        f"    {', '.join(PREFILL)}",
        f"  decode: {steps} step{'s' if steps > 1 else ''} of one token for each sequence",
        f"    {', '.join(DECODE)}",
    ]


def _table(rows: list[Row]) -> Table:
    """One line per operator and phase: the timed run's time, the worst error of all runs."""
    made = table("operator", "backend", "time, us", "of floor", "error", "", left=("backend", ""))
    made.columns[0].no_wrap = True
    for phase in dict.fromkeys(row.phase for row in rows):
        section(made, phase)
        for operator in dict.fromkeys(row.operator for row in rows if row.phase == phase):
            made.add_row(f"  {operator}", *_cells([row for row in rows if (row.phase, row.operator) == (phase, operator)]))
    return made


def _cells(same: list[Row]) -> tuple[str, ...]:
    """Backend, time, share of floor, error and verdict of the calls of one operator."""
    worst = next((row for row in same if not row.passed), max(same, key=lambda row: row.error))
    timed = next((row for row in same if row.time_us is not None), None)
    time_text = share = "-"
    if timed is not None and timed.time_us is not None and timed.floor_us is not None:
        time_text, share = f"{timed.time_us:.1f}", f"{timed.floor_us / timed.time_us:.0%}"
    verdict = "[green]ok[/]" if worst.passed else f"[red]WRONG[/] (limit {worst.limit:.0e})"
    return worst.backend, time_text, share, f"{worst.error:.1e}", verdict
