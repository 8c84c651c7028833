"""`python -m autotune`: tune, choice, show."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from autotune import choice as choices
from autotune import moved, tables, tuning
from autotune import shapes as shape_list
from autotune.calls import calls as drawn_calls
from autotune.console import AsJson, Backend, JsonFile, ShapePattern, console, device_spec, keep, progress_bar
from autotune.journal import Journal
from gdn.cli.plain import PlainErrors, print_json, section, table
from gdn.device import H100, DeviceSpec
from gdn.runtime import compiled, env, registry, tuned

_JOURNALS = Path(".gdn-results") / "autotune"

app = typer.Typer(cls=PlainErrors, help="Find the fastest kernel configurations, and check the choice between kernels.")
moved.add_to(app)
Workers = Annotated[int, typer.Option(min=1, help="Compiling processes.")]
TimeoutS = Annotated[float, typer.Option(min=1, help="Seconds that one compilation may take.")]
_ALL_BUT_ONE = max(1, (os.cpu_count() or 2) - 1)  # processes


@app.command()
def tune(
    op: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(shape_list.operators())}; all with --restamp, --prune or --stale.")
    ] = None,
    backend: Backend = None,
    shapes: ShapePattern = "",
    budget_s: Annotated[float, typer.Option(min=1, help="Wall-clock seconds for each backend.")] = 1800,
    limit: Annotated[int | None, typer.Option(min=1, help="Most configurations of a shape, a sample.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of tables to write; the shipped ones if left out.")] = None,
    workers: Workers = _ALL_BUT_ONE,
    timeout_s: TimeoutS = 300,
    journals: Annotated[Path, typer.Option(help="Folder of the journals that an interrupted run resumes from.")] = _JOURNALS,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Enumerate and compile; needs no GPU.")] = False,
    restamp: Annotated[
        bool,
        typer.Option("--restamp", help="Compile stale entries; those of unchanged machine code count as current. Needs no GPU."),
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Drop entries that repeat the default. Needs no GPU.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Time the tiles of stale entries again, against the default.")] = False,
    search: Annotated[bool, typer.Option("--search", help="With --stale: search the whole space for their problems.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile, check and time the configurations of an operator's kernels, and write the fastest into their tables.

    An entry is stale once its kernel's source has changed; comments and formatting do not count.
    """
    console.stderr = as_json  # progress and remarks leave stdout to JSON
    if search and not stale:
        raise ValueError("search: expected with --stale (without it, every shape is searched anyway)")
    if op is None and not (restamp or prune or stale):
        raise ValueError(f"op: expected one of {', '.join(shape_list.operators())}")
    kernels, folder = _kernels(op, backend), out or tuned.SHIPPED
    if restamp or prune:
        current = [_restamp(kernel, folder, workers, timeout_s) for kernel in kernels] if restamp else []
        for kernel, path in [(one, path) for one in kernels for path in tables.paths(folder, one)] if prune else []:
            count = tables.prune(path, kernel)
            gone = "" if path.is_file() else ", and with them the table"
            console.print(f"{path.parent.name}/{path.name}: {count} entries that repeat the default dropped{gone}", markup=False)
        if not stale:
            raise typer.Exit(0 if all(current) else 1)
    known = [] if op is None else shape_list.shapes(op, "" if stale else shapes, tuned=True)
    spec = H100 if compile_only else device_spec()
    reports: list[dict[str, Any]] = []
    for kernel in kernels:
        chosen = known
        if stale:
            found = tables.stale_shapes(tuned.table_path(folder, spec.key, kernel.op, kernel.backend), kernel)
            chosen = [shape for shape in found if shapes in shape.name]
            if not chosen:
                continue
        made = tuning.plan(kernel, chosen, spec, limit, stored_only=stale and not search)
        options: dict[str, Any] = {"budget_s": budget_s, "num_workers": workers, "timeout_s": timeout_s}
        reports.append(_tune(made, chosen, spec, folder, None if compile_only else journals, **options))
    is_complete = all(report["complete"] for report in reports)
    if as_json:
        print_json({"op": op, "device": spec.key, "complete": is_complete, "kernels": reports})
    raise typer.Exit(0 if is_complete else 1)


def _kernels(op: str | None, backend: str | None) -> list[Any]:
    """The kernels of an operator, or of all; of one backend where it is named."""
    if op is not None:
        return list(tuning.kernels(op, backend))
    having = [one.name for one in registry.with_kernels() if backend in (None, *one.modules)]
    if not having:
        raise ValueError(f"backend: expected one of {', '.join(registry.KERNEL_BACKENDS)}, got {backend!r}")
    return [kernel for name in having for kernel in tuning.kernels(name, backend)]


def _restamp(kernel: Any, folder: Path, num_workers: int, timeout_s: float) -> bool:
    """Restamps the entries of a kernel's tables; returns whether all are current afterwards."""
    current = True
    for path in tables.paths(folder, kernel):
        found = tables.restamp(path, kernel, num_workers=num_workers, timeout_s=timeout_s)
        name = f"{path.parent.name}/{path.name}"
        for why in found.left:
            console.print(f"{name}: stale: {why}", markup=False)
        count = tuned.read(path).num_entries()
        console.print(f"{name}: {found.stamped} of {count} entries restamped, {len(found.left)} stale")
        current = current and not found.left
    return current


def _tune(
    made: Any, chosen: list[shape_list.Shape], spec: DeviceSpec, folder: Path, journals: Path | None, *, budget_s: float,
    num_workers: int, timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Runs the plan of one kernel; without journals, compiles it. complete: every shape has a winner (or all is compiled)."""
    kernel, start = made.kernel, time.monotonic()
    name = f"{kernel.op}.{kernel.backend}"
    for shape, why in made.refusals.items():
        console.print(f"{name} {shape}: not served: {why}", markup=False)
    with progress_bar() as progress:
        task = progress.add_task(f"{name}: compiling", total=len(made.candidates))
        deadline = start + budget_s * (1 if journals is None else 0.5)  # half of the time is for the GPU
        advance = partial(progress.advance, task)
        tuning.compile_all(made, num_workers=num_workers, timeout_s=timeout_s, on_done=lambda _: advance(), deadline=deadline)
    dropped = [one for one in made.candidates.values() if one.failure is not None]
    console.print(f"{name}: {len(made.candidates) - len(dropped)} of {len(made.candidates)} compiled")
    for one in dropped:
        console.print(f"  dropped {one.config}: {one.failure}", markup=False)
    report: dict[str, Any] = {
        "op": kernel.op, "backend": kernel.backend, "candidates": len(made.candidates), "not_served": made.refusals,
        "winners": [], "table": None, "complete": not dropped,
        "dropped": [{"config": one.config, "why": one.failure} for one in dropped],
    }  # fmt: skip
    if journals is None:
        return report
    journal = Journal(journals / f"{spec.key}.{name}.jsonl", kernel.source, warn=partial(console.print, markup=False))
    winners = _search_all(made, chosen, tuning.GpuRunner(kernel, spec), journal, start + budget_s)
    report["winners"] = [vars(one) | {"shape": one.shape.name} for one in winners]
    if winners:
        path = tables.write_winners(folder, spec, kernel, winners, _versions(kernel.backend))
        report["table"] = path
        console.print(f"wrote {path}" if path.is_file() else f"{path}: no entry, the default is the fastest", markup=False)
    report["complete"] = len(winners) == len(made.configs)
    return report


def _search_all(made: Any, chosen: list[shape_list.Shape], runner: Any, journal: Any, deadline: float) -> list[Any]:
    """Winners of the shapes that the kernel serves; after a lost device, those found before."""
    winners: list[tuning.Winner] = []
    for shape in chosen:
        if shape.name not in made.configs:
            continue
        with progress_bar() as progress:
            label = f"{shape.op}.{made.kernel.backend} {shape.name}"
            task = progress.add_task(label, total=len(made.configs[shape.name]))

            def done(config: Any, record: Any, progress: Progress = progress, task: Any = task, label: str = label) -> None:
                progress.advance(task)
                if record.state == "dropped":
                    progress.console.print(f"{label}: dropped {config}: {record.why}", markup=False)

            try:
                winner = tuning.search(made, shape, runner, journal, deadline=deadline, on_done=done)
            except tuning.DeviceLost as lost:
                console.print(f"{label}: {lost}. Run the same command again: it resumes after this candidate.", style="red")
                return winners
        if winner is None:
            console.print(f"{label}: no configuration was both correct and timed", style="red", markup=False)
            continue
        gain = f", default {winner.default_us:.1f} us" if winner.default_us is not None else ""
        console.print(f"{label}: {winner.time_us:.1f} us{gain}, error {winner.error:.1e}, {winner.config}", markup=False)
        winners.append(winner)
    return winners


def _versions(backend: str) -> dict[str, str]:
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), **compiled.versions(backend)}
    return found | {"device": torch.cuda.get_device_name()}


@app.command()
def choice(
    calls: Annotated[int, typer.Option(min=1, help="How many calls, of the operators in turn.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the calls: the same seed draws the same calls.")] = 0,
    budget_s: Annotated[
        float, typer.Option("--budget", min=1, help="Wall-clock seconds; what is done by then is printed.")
    ] = 900,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Fill the disk cache for --device; needs no GPU.")] = False,
    device: Annotated[str, typer.Option(help="With --compile-only: h100 or h200.")] = "h100",
    workers: Workers = _ALL_BUT_ONE,
    timeout_s: TimeoutS = 300,
    json_file: JsonFile = None,
) -> None:
    """Time seeded calls of the operators of two kernels on both, and say whether the runtime takes the faster one.

    Each kernel runs with the tiles that the runtime would give it. Exit code 1 where the chosen one takes more than 1.05 times
    the fastest one's time and over 0.5 us more, or where one did not run.
    """
    start = time.monotonic()
    if compile_only and device not in tables.DEVICES:
        raise ValueError(f"device: expected {' or '.join(tables.DEVICES)}, got {device!r}")
    spec = tables.DEVICES[device] if compile_only else device_spec()
    questions = [choices.ask(shape, spec) for shape in drawn_calls(calls, seed)]
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=sum(len(question.configs) for question in questions))
        compiled = choices.compile_all(
            questions, num_workers=workers, timeout_s=timeout_s, deadline=start + budget_s * (1 if compile_only else 0.5),
            on_done=lambda: progress.advance(task),
        )  # fmt: skip
    if compile_only:
        broken = {call: why for call, why in compiled.items() if why is not None}
        for call, why in broken.items():
            console.print(f"{call}: {why}", markup=False)
        console.print(f"the kernels of {len(compiled) - len(broken)} of {len(questions)} calls are compiled")
        raise typer.Exit(1 if len(compiled) - len(broken) < len(questions) else 0)
    verdicts: list[Any] = []
    timer = partial(choices.gpu_times_us, spec)
    with progress_bar() as progress:
        task = progress.add_task("timing", total=len(questions))
        try:
            for question in (question for question in questions if question.name in compiled):
                if time.monotonic() > start + budget_s:
                    break
                verdicts.append(choices.judge(question, timer, compiled[question.name]))
                progress.advance(task)
                told = [verdict.as_dict() for verdict in verdicts]
                keep(json_file, {"device": spec.key, "seed": seed, "calls": told})
        except KeyboardInterrupt:
            pass
    failed = [verdict for verdict in verdicts if not verdict.passed]
    console.print(_choice_table(verdicts))
    console.print(f"{len(verdicts)} of {len(questions)} calls timed, {len(failed)} failed (seed {seed}, {spec.key})")
    raise typer.Exit(1 if failed or not verdicts else 0)


def _choice_table(verdicts: list[Any]) -> Table:
    times = [f"{backend}, us" for backend in registry.KERNEL_BACKENDS]
    made = table("call", "chosen", "by", "tiles", *times, "of fastest", "", left=("chosen", "by", "tiles", ""))
    for op in dict.fromkeys(verdict.question.shape.op for verdict in verdicts):
        section(made, op)
        for verdict in (verdict for verdict in verdicts if verdict.question.shape.op == op):
            chosen = verdict.question.chosen
            name, cells = f"  {verdict.question.shape.name}", [chosen.backend, chosen.decided_by, chosen.config_source]
            if verdict.failure is not None:
                made.add_row(name, *cells, "", "", "", "[red]failed[/]")
                made.add_row(f"    [red]{escape(verdict.failure)}[/]")
                continue
            known = [verdict.times_us.get(backend) for backend in registry.KERNEL_BACKENDS]
            cells += ["-" if time_us is None else f"{time_us:.1f}" for time_us in known]
            made.add_row(name, *cells, f"{verdict.ratio:.2f}", "ok" if verdict.passed else "[red]slower[/]")
    return made


@app.command()
def show(
    op: Annotated[str | None, typer.Argument(help="An operator; all if left out.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of tables; GDN_TUNED_DIR and the shipped ones if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the tuned tables."""
    console.stderr = as_json  # progress and remarks leave stdout to JSON
    op = registry.operator(op).name if op is not None else None
    if folder is not None and not folder.is_dir():
        raise ValueError(f"folder: expected a folder of tables, got {folder}")
    own = env.current().tuned_dir
    folders = [folder] if folder is not None else [*([own] if own is not None else []), tuned.SHIPPED]
    paths = [path for one in folders for path in sorted(one.glob("*/*.json")) if op in (None, path.name.split(".")[0])]
    if as_json:
        print_json([{"path": path, **tuned.read(path).plain()} for path in paths])
        return
    for path in paths:
        content = tuned.read(path)
        header = content.header
        title = f"{header.op}.{header.backend} on {header.device}, {', '.join(header.runs)}"
        shown = Table("sizes", "configuration", "time, us", "error", title=title, caption=str(path))
        for group in content.groups:
            shown.add_row(_listed(group.static), "", "", "", style="dim")
            for entry in group.entries:
                error = f"{entry.error:.1e}" if entry.error is not None else "-"
                shown.add_row(_listed(entry.sizes), _listed(entry.config), f"{entry.time_us:.1f}", error)
        console.print(shown)
    if not paths:
        console.print(f"No tuned table{f' of {op}' if op else ''} in {', '.join(map(str, folders))}.", markup=False)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def main() -> None:
    app(prog_name="python -m autotune")
