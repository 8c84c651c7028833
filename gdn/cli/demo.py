"""`gdn demo`: prefill a ragged batch and decode from a paged state pool, every result checked against the reference."""

import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gdn.models import MODELS

# Prompt lengths: ragged, with a chunk's edge, a length below the convolution's window, and one long prompt.
GPU_LENGTHS = (37, 4000, 511, 2048, 2, 64, 1530)
CPU_LENGTHS = (37, 129, 64, 2)


def demo(
    model: Annotated[str, typer.Option(help=f"Shapes: {', '.join(MODELS)}.")] = "qwen3-next-80b",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank run.")] = 1,
    device: Annotated[str, typer.Option(help="'cuda', 'cpu', or 'auto': a GPU if there is one.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
) -> None:
    """Run a Qwen3-Next-shaped block (a GDN layer and a QSA indexer) and check every operator."""
    import torch

    from gdn.cli.demo_block import Block
    from gdn.cli.demo_measure import Row, measure
    from gdn.runtime import env

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
        from gdn.testing.timing import measure_limits

        limits = measure_limits()
        console.print(
            f"{torch.cuda.get_device_name()}: copy {limits.copy_gbps / 1e3:.2f} TB/s, bf16 {limits.bf16_tflops:.0f}, "
            f"fp8 {limits.fp8_tflops:.0f} TFLOP/s"
        )
    else:
        console.print("No GPU in use: the plain-torch reference runs and is checked, and nothing is timed against a floor.")
    console.print(
        f"{shape.name}, tensor parallel {tp}: GDN {shape.num_k_heads}/{shape.num_v_heads} heads of {shape.head_v_dim}, "
        f"indexer {shape.index_num_heads} heads in {'FP8' if fp8 else 'bf16'}; prompts of {lengths} tokens, {steps} decode steps"
    )

    block = Block(shape, lengths, steps, fp8_indexer=fp8, device=where, seed=seed)
    started = time.perf_counter()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("prefill", total=9 * (1 + steps) - steps)
        for step in range(1 + steps):
            timed = limits if step in (0, steps) else None  # decode steps are alike: the last one is timed
            for call in block.prefill() if step == 0 else block.decode():
                progress.update(task, description=f"{call.phase} {call.operator}")
                rows.append(measure(call, timed))
                progress.advance(task)
    console.print(_table(rows))
    for note in dict.fromkeys(f"{row.operator}: {note}" for row in rows for note in row.notes):
        console.print(note)
    failed = [row for row in rows if not row.passed]
    console.print(
        f"{len(rows)} results checked, {len(failed)} wrong, {time.perf_counter() - started:.1f} s"
        + ("" if failed else "; every result agrees with the reference")
    )
    sys.exit(1 if failed else 0)


def _table(rows: "list[Row]") -> Table:  # type: ignore[name-defined]  # noqa: F821  (Row is imported with torch, in demo)
    """One line per operator and phase: the timed run's time, the worst error of all runs."""
    table = Table("phase", "operator", "backend", "time, us", "share of floor", "error", "limit", "")
    for key in dict.fromkeys((row.phase, row.operator) for row in rows):
        same = [row for row in rows if (row.phase, row.operator) == key]
        worst = next((row for row in same if not row.passed), max(same, key=lambda row: row.error))
        timed = next((row for row in same if row.time_us is not None), None)
        time_text = share = "-"
        if timed is not None and timed.time_us is not None and timed.floor_us is not None:
            time_text, share = f"{timed.time_us:.1f}", f"{timed.floor_us / timed.time_us:.0%}"
        verdict = "[green]ok[/]" if worst.passed else "[red]WRONG[/]"
        table.add_row(*key, worst.backend, time_text, share, f"{worst.error:.1e}", f"{worst.limit:.0e}", verdict)
    for column in table.columns[3:7]:
        column.justify = "right"
    return table
