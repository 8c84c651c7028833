"""`python -m benchmarks SUBJECT`: ops, layers, ranks, context, accuracy, selection."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from autotune import shapes as shape_list
from autotune.console import AsJson, Backend, JsonFile, ShapePattern, console, device_spec, keep, progress_bar
from benchmarks import accuracy as error_figures
from benchmarks import attention_prefill, context, peers, pictures, plot, ranks, report
from benchmarks import layers as layer_times
from benchmarks import ops as benchmark
from benchmarks import selection as agreement
from benchmarks.points import POINTS
from gdn.cli.plain import PlainErrors, print_json, section, table
from gdn.device import DeviceSpec
from gdn.runtime import registry, tuned
from gdn.testing import timing

app = typer.Typer(cls=PlainErrors, help="Measure operators, layers and decode and prefill over several GPUs.")
app.command("context")(context.command)
app.command("ranks")(ranks.command)
app.command("attention")(attention_prefill.command)
app.command("report")(pictures.command)

Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="Another library, where installed: FlashInfer, FlashQLA, FLA; torch; gdn: separate operators; may be repeated.",
    ),
]


def _libraries(names: list[str] | None) -> list[str]:
    found = names or []
    if unknown := sorted(set(found) - set(peers.LIBRARIES)):
        raise ValueError(f"peer: expected some of {', '.join(peers.LIBRARIES)}, got {', '.join(unknown)}")
    return found


@app.command()
def ops(
    op: Annotated[str | None, typer.Argument(help="An operator; all if left out.")] = None,
    backend: Backend = None,
    every: Annotated[bool, typer.Option("--every-backend", help="Time each kernel, not only the one that a call takes.")] = False,
    shapes: ShapePattern = "",
    points: Annotated[bool, typer.Option("--points", help="Time the calls of benchmarks/points.py instead.")] = False,
    json_file: JsonFile = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the tables into <device>/MEASURED.md, and the plot of its tables next to it.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="With --write: folder of tables; the shipped ones if left out.")] = None,
    with_peers: Peers = None,
) -> None:
    """Time the public operators; print each one's share of the floor that this run's own limits set, and its error.

    Shapes that are measured but never tuned (short calls, published tables) are named by --shapes short and --shapes published.
    Interrupted, it prints what it has by then, and writes no table.
    """
    _check_files(json_file, write, out, shapes, "shapes")
    if write:
        plot.pyplot()  # missing: said before anything is measured
    chosen = _points(op, shapes, write) if points else _shapes(op, shapes)
    libraries = _libraries(with_peers)
    spec = device_spec()

    if op is not None and backend is not None:
        benchmark.backends(op, backend, every)
    interrupted = False
    with progress_bar() as progress:
        task = progress.add_task("measuring the device's limits", total=len(chosen))
        run = benchmark.Bench(spec, backend, every, libraries)
        try:
            for shape in chosen:
                progress.update(task, description=f"{shape.op} {shape.name}")
                for failure in run.measure(shape):
                    progress.console.print(failure, markup=False)
                progress.advance(task)
                keep(json_file, run.found)
        except KeyboardInterrupt:
            interrupted = True
    found = run.found
    console.print(f"{found['device']}, torch {found['torch']}: {report.limits_in_words(found)}")
    console.print(_ops_table(found))
    if interrupted:
        raise typer.Exit(130)
    if write:
        measured = _write_measured(out, spec, report.markdown(found))
        plot.draw(measured, measured.with_suffix(".png"))
    raise typer.Exit(0 if found["rows"] and not found["failures"] else 1)


def _shapes(op: str | None, pattern: str) -> list[shape_list.Shape]:
    """Shapes of the operators' cases; with a pattern, of all operators that have one of the name."""
    every_shape = partial(shape_list.shapes, measured=bool(pattern), tuned=bool(pattern))
    operators = [op] if op is not None else shape_list.operators()
    if op is None and pattern:
        operators = [name for name in operators if any(pattern in shape.name for shape in every_shape(name))]
    return [shape for name in operators for shape in every_shape(name, pattern)]


def _points(op: str | None, pattern: str, write: bool) -> list[shape_list.Shape]:
    """Points of one operator, or of all, whose names hold the pattern."""
    if write:
        raise ValueError("points: expected without --write, whose tables hold the operators' own shapes")
    found = [shape for shape in POINTS if op in (None, shape.op) and pattern in shape.name]
    if not found:
        known = ", ".join(dict.fromkeys(shape.op for shape in POINTS))
        raise ValueError(f"points: expected an operator of {known} and part of a point's name, got {op or 'all'} and {pattern!r}")
    return found


def _ops_table(found: dict[str, Any]) -> Table:
    """One section per operator; rates, configurations and every way of calling a peer are in the JSON."""
    peers = ("peer",) if found["peers"] else ()
    headings = ("backend", "tiles", "time, us", "in bursts", "floor", "share", "error", *peers)
    made = table("shape", *headings, left=("backend", "tiles"))
    for op, rows in report.by_operator(found).items():
        section(made, op)
        for row in rows:
            time_text = f"{row['time_us']:.1f}" + ("" if row["captured"] else " (no graph)")
            numbers = [time_text, *(f"{row[field]:.1f}" for field in ("burst_us", "floor_us"))]
            numbers += [f"{row['share_of_floor']:.0%}", f"{row['error']:.1e}"]
            best = report.best_peer(found, row, norm=True)
            if best is not None:
                numbers.append(f"{best[1]:.1f} {best[0]}")
            made.add_row(f"  {row['shape']}", row["backend"], row["config_source"], *numbers)
    return made


@app.command()
def layers(
    only: Annotated[str, typer.Option(help="Only rows whose name contains this text.")] = "",
    json_file: JsonFile = None,
    write: Annotated[bool, typer.Option("--write", help="Write the figures into <device>/MEASURED.md.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --write: folder of tables; the shipped ones if left out.")] = None,
) -> None:
    """Time whole layers in decode at the shapes of Qwen3-Next-80B: captured without their MLPs, and the host's part of a call.

    A captured layer less its projections is compared with the time that its kernels need. Exit code 1 where a row misses its
    limit. Interrupted, it prints what it has by then, and writes no table.
    """
    _check_files(json_file, write, out, only, "only")
    names = [name for name in layer_times.NAMES if only in name]
    if not names:
        raise ValueError(f"only: expected part of one of {list(layer_times.NAMES)}, got {only!r}")
    spec = device_spec()
    device = torch.device("cuda", torch.cuda.current_device())
    found: list[Any] = []
    limits = timing.measure_limits()
    shared = benchmark.about_run(limits)
    interrupted = False
    with progress_bar() as progress:
        task = progress.add_task("", total=len(names))
        try:
            for name in names:
                progress.update(task, description=name)
                torch.cuda.empty_cache()
                found.append(layer_times.measure(name, limits, device))
                progress.advance(task)
                keep(json_file, shared | {"rows": [layer_times.as_dict(row) for row in found]})
        except KeyboardInterrupt:
            interrupted = True
    console.print(f"{shared['device']}, torch {shared['torch']}: {report.limits_in_words(shared)}")
    rows = [row for row in found if isinstance(row, layer_times.Captured)]
    if rows:
        console.print(_captured_table(rows))
    for row in found:
        if isinstance(row, layer_times.OnHost):
            console.print(str(row), markup=False)
    if interrupted:
        raise typer.Exit(130)
    if write:
        _write_measured(out, spec, {layer_times.TABLE: layer_times.markdown(found, shared)})
    raise typer.Exit(0 if all(row.found <= row.must for row in found) else 1)


def _check_files(json_file: Path | None, write: bool, out: Path | None, pattern: str, option: str) -> None:
    """Refuses a JSON file in no folder, --out without --write, and --write of a part of a table. option: gives the pattern."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"json: expected a file in a folder that exists, got {json_file}")
    if out is not None and not write:
        raise ValueError("out: expected with --write (without it, no table is written)")
    if write and pattern:
        raise ValueError(f"write: expected without --{option} (a table has all its rows)")


def _write_measured(out: Path | None, spec: DeviceSpec, tables: dict[str, str]) -> Path:
    """Writes tables into the MEASURED.md of a device."""
    measured = (out or tuned.SHIPPED) / spec.key / "MEASURED.md"
    measured.parent.mkdir(parents=True, exist_ok=True)
    report.write_into(measured, tables)
    console.print(f"wrote {measured}", markup=False)
    return measured


def _captured_table(rows: list[Any]) -> Table:
    """A line for each layer, and under it one for each of its kernels."""
    made = table(
        "layer, us", "wall", "projections", "rest", "floor", "alone", "rest over", "", "must", "aim", left=("rest over",)
    )
    for row in rows:
        numbers = [f"{us:.1f}" for us in (row.wall_us, row.projections_us, row.rest_us, row.floors_us, row.alone_us)]
        color = "green" if row.found <= row.must else "red"
        limits = [f"[{color}]{row.found:.2f}[/]", f"{row.must:.2f}", f"{row.aim:.2f}"]
        made.add_section()
        made.add_row(f"[bold]{row.name}[/]", *numbers, row.against, *limits)
        for part in row.parts:
            made.add_row(f"  {part.name}, {part.backend}", "", "", "", f"{part.floor_us:.2f}", f"{part.alone_us:.2f}")
    return made


@app.command()
def accuracy(backend: Backend = None, with_peers: Peers = None, as_json: AsJson = False) -> None:
    """Print the errors of the chunk kernels on easy and hard inputs, against the token recurrence in float64.

    Exit code 1 where one of ours is beyond 1.2 times that of the best library, or a call failed. Interrupted, it prints what it
    has by then.
    """
    console.stderr = as_json  # progress and remarks leave stdout to JSON
    libraries = _libraries(with_peers)
    if backend not in (None, *(known := registry.operator("chunk").modules)):
        raise ValueError(f"backend: expected one of {', '.join(known)}, got {backend!r}")
    device_spec()

    failures: list[str] = []
    found: list[error_figures.Error] = []
    interrupted = False
    try:
        for one in error_figures.measure(backend, libraries, failures.append):
            found.append(one)
    except KeyboardInterrupt:
        interrupted = True
    names = tuple(dict.fromkeys(one.who for one in found))
    made = table("inputs", *names, left=names, caption="largest error of a head: o / final state")
    for case in dict.fromkeys(one.case for one in found):
        errors = {one.who: f"{one.out:.1e} / {one.state:.1e}" for one in found if one.case == case}
        made.add_row(case, *(errors.get(name, "-") for name in names))
    console.print(made)
    ratios = error_figures.ratios(found)
    beyond = [one for one in ratios if one.ratio > error_figures.LIMIT]
    for ratio in beyond or ratios[:1]:
        console.print(f"{'beyond the limit' if beyond else 'largest'}: {ratio}", markup=False)
    for why in failures:
        console.print(why, markup=False)
    if as_json:
        figures = {"errors": found, "ratios": ratios, "limit": error_figures.LIMIT, "failures": failures}
        print_json(figures | {"complete": not interrupted})
    if interrupted:
        raise typer.Exit(130)
    raise typer.Exit(1 if beyond or failures or not found else 0)


@app.command()
def selection(
    keys: Annotated[list[int] | None, typer.Option(min=1, help="Context length; may be repeated. 4096, 32768, 131072.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Queries.")] = 256,
    topk: Annotated[int, typer.Option(min=1, help="Keys that a query selects.")] = 2048,
    backend: Backend = None,
    as_json: AsJson = False,
) -> None:
    """Print the share of the float32 top-k that the indexer's bf16 and FP8 scores find, by context length.

    Without a GPU the reference is measured, which takes long at long contexts; --rows makes it shorter.
    """

    console.stderr = as_json  # progress and remarks leave stdout to JSON
    agreements: list[agreement.Agreement] = []
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    demanded = agreement.DEMANDED
    headings = [agreement.BF16, agreement.BF16_OUT, agreement.FP8, agreement.FP8_EXACT]
    made = table("keys", *headings)
    made.columns[0].justify = "right"
    made.add_row("at least", *(f"{demanded[kind]:.1%}" if kind in demanded else "" for kind in headings))
    made.add_section()
    with progress_bar() as progress:
        lengths = keys or list(agreement.KEYS)
        task = progress.add_task("selecting", total=len(lengths))
        for length in lengths:
            found = agreement.measure(length, rows, topk, device, backend)
            cells = [(found.shares[kind], found.shares[kind] < demanded.get(kind, 0.0)) for kind in headings]
            made.add_row(str(length), *(f"[red]{share:.2%}[/]" if low else f"{share:.2%}" for share, low in cells))
            agreements.append(found)
            progress.advance(task)
    console.print(made)
    failed = not all(one.passed for one in agreements)
    if as_json:
        found_shares = [{"keys": one.keys, "shares": one.shares, "passed": one.passed} for one in agreements]
        print_json({"rows": rows, "topk": topk, "demanded": demanded, "contexts": found_shares, "passed": not failed})
    raise typer.Exit(1 if failed else 0)


def main() -> None:
    app(prog_name="python -m benchmarks")
