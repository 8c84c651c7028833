"""`tune`: the options, and what they ask of the search and of the tables."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from autotune import budget as budgets
from autotune import engine, maintenance, summary, tables, tuning
from autotune import shapes as shape_list
from autotune import workload as workloads
from autotune.compiling import Compiler
from autotune.console import ALL_BUT_ONE, AsJson, Backend, ShapePattern, TimeoutS, Workers, console, device_spec, progress_bar
from autotune.device import Device
from autotune.journal import DROPPED, Journal, Record, claimed
from gdn.cli.compile import config_of
from gdn.cli.plain import print_json
from gdn.device import H100, DeviceSpec
from gdn.layers.named import NAMED
from gdn.runtime import compiled, env, registry, tuned

_JOURNALS = Path(".gdn-results") / "autotune"


@dataclass(frozen=True)
class _Options:
    """What all of a run's compilations and timings share."""

    spec: DeviceSpec
    budget: str
    deadline: float  # of time.monotonic()
    workers: int
    timeout_s: float


def tune(
    op: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(shape_list.operators())}; all with --restamp, --prune or --stale.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help=f"Tune all that a model reaches: {', '.join(NAMED)}, or a checkpoint's config.json."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --workload: tensor parallel ranks; one rank's calls are tuned.")] = 1,
    num_spec: Annotated[int, typer.Option(min=0, help="With --workload: most drafts of a sequence.")] = 0,
    backend: Backend = None,
    shapes: ShapePattern = "",
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s, 8m or 1h30m; the same command goes on.")] = "30m",
    limit: Annotated[int | None, typer.Option(min=1, help="Most configurations of a shape, a sample.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of tables to write; without it GDN_TUNED_DIR, or the shipped ones.")
    ] = None,
    workers: Workers = ALL_BUT_ONE,
    timeout_s: TimeoutS = 300,
    journals: Annotated[Path, typer.Option(help="Folder of the journals from which the same command goes on.")] = _JOURNALS,
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
    """Compile, check and time the configurations of kernels, and write those that are faster than the default into their tables.

    Without --workload: one operator, at its own shapes. With it: all operators that a model reaches, at its most usual sizes.

    A configuration is kept where it saves at least 1 % of the default's time, and the interval of their ratio excludes 1.

    Exit code 1 where shapes are left without a verdict: the same command goes on with them.

    An entry is stale once its kernel's source has changed; comments and formatting do not count.
    """
    console.stderr = as_json  # progress and remarks leave stdout to JSON
    start, budget_s = time.monotonic(), budgets.seconds(budget)
    maintains = restamp or prune or stale
    if search and not stale:
        raise ValueError("search: expected with --stale (without it, every shape is searched anyway)")
    if workload is not None and (op is not None or maintains):
        raise ValueError(f"workload: expected without an operator, --restamp, --prune and --stale, got {workload!r} with one")
    if workload is None and (tp != 1 or num_spec):
        raise ValueError("tp, num_spec: expected with --workload")
    if op is None and workload is None and not maintains:
        raise ValueError(f"op: expected one of {', '.join(shape_list.operators())}, or --workload MODEL")
    folder = out or env.current().tuned_dir or tuned.SHIPPED
    if restamp or prune:
        is_current = maintenance.run(_kernels(op, backend), folder, workers if restamp else 0, timeout_s, prune)
        if not stale:
            raise typer.Exit(0 if is_current else 1)
    config = None if workload is None else config_of(workload, "workload").per_rank(tp)
    known = [] if op is None else shape_list.shapes(op, "" if stale else shapes, tuned=True)
    spec = H100 if compile_only else device_spec()
    options = _Options(spec, budget, start + budget_s, workers, timeout_s)
    left_out: list[dict[str, Any]] = []
    if config is not None:
        found = workloads.of_config(config, num_spec, spec, backend)
        left_out = [{"op": name, "why": why, "tune_keys": count} for (name, why), count in found.left_out.items()]
        chosen = {kernel: _matching(every, shapes) for kernel, every in found.shapes.items()}
        if not any(chosen.values()):
            raise ValueError(f"shapes: expected part of the name of one of this model's shapes, got {shapes!r}")
        for one in left_out:
            console.print(f"{one['op']}: not tuned ({one['tune_keys']} tune keys): {one['why']}", markup=False)
        plans = _plans(chosen, spec, limit)
    elif stale:
        paths = {kernel: tuned.table_path(folder, spec.key, kernel.op, kernel.backend) for kernel in _kernels(op, backend)}
        every = {kernel: _matching(tables.stale_shapes(path, kernel), shapes) for kernel, path in paths.items()}
        plans = _plans(every, spec, limit, stored_only=not search)
    else:
        plans = _plans({kernel: known for kernel in _kernels(op, backend)}, spec, limit)
    reports, was_interrupted = (_compile(plans, options), False) if compile_only else _search(plans, folder, journals, options)
    is_complete = not was_interrupted and all(report["complete"] for report in reports)
    if as_json:
        about = {"op": op, "workload": workload, "device": spec.key, "complete": is_complete}
        print_json({**about, "left_out": left_out, "kernels": reports})
    raise typer.Exit(130 if was_interrupted else 0 if is_complete else 1)


def _kernels(op: str | None, backend: str | None) -> list[tuning.Kernel]:
    """The kernels of an operator, or of all; of one backend where it is named."""
    if op is not None:
        return list(tuning.kernels(op, backend))
    having = [one.name for one in registry.with_kernels() if backend in (None, *one.modules)]
    if not having:
        raise ValueError(f"backend: expected one of {', '.join(registry.KERNEL_BACKENDS)}, got {backend!r}")
    return [kernel for name in having for kernel in tuning.kernels(name, backend)]


def _matching(shapes: Sequence[shape_list.Shape], pattern: str) -> list[shape_list.Shape]:
    return [shape for shape in shapes if pattern in shape.name]


def _plans(
    shapes: dict[tuning.Kernel, list[shape_list.Shape]], spec: DeviceSpec, limit: int | None, stored_only: bool = False
) -> list[tuning.Plan]:
    made = [tuning.plan(kernel, every, spec, limit, stored_only=stored_only) for kernel, every in shapes.items() if every]
    for plan in made:
        for shape, why in plan.refusals.items():
            console.print(f"{plan.kernel.op}.{plan.kernel.backend} {shape}: not served: {why}", markup=False)
    return made


def _compile(plans: Sequence[tuning.Plan], options: _Options) -> list[dict[str, Any]]:
    """Compiles all candidates of the plans."""
    tasks = [(plan.kernel, candidate) for plan in plans for candidate in plan.candidates.values()]
    with progress_bar(options.deadline) as progress:
        bar = progress.add_task("compiling", total=len(tasks))
        done = partial(progress.advance, bar)
        with Compiler(tasks, options.workers, options.timeout_s, lambda _: done()) as compiler:
            compiler.wait_for_all(options.deadline)
    reports = []
    for plan in plans:
        for candidate in plan.candidates.values():
            if not candidate.is_done:
                candidate.failure = candidate.failure or f"not compiled: the budget of {options.budget} has ended"
        reports.append(summary.report(plan, []))
        name, dropped = f"{plan.kernel.op}.{plan.kernel.backend}", reports[-1]["dropped"]
        console.print(f"{name}: {len(plan.candidates) - len(dropped)} of {len(plan.candidates)} compiled")
        for one in dropped:
            console.print(f"  dropped {one['config']}: {one['why']}", markup=False)
    return reports


def _search(plans: Sequence[tuning.Plan], folder: Path, journals: Path, options: _Options) -> tuple[list[dict[str, Any]], bool]:
    """Searches, writes the tables, and prints the summary, also where it ends early; returns whether the user interrupted it."""
    with ExitStack() as held:
        opened = []
        for plan in plans:
            path = journals / f"{options.spec.key}.{plan.kernel.op}.{plan.kernel.backend}.jsonl"
            held.enter_context(claimed(path))
            opened.append((plan, Journal(path, plan.kernel.source, warn=partial(console.print, markup=False))))
        every = engine.jobs(opened)
        was_interrupted = _work(every, options)
        reports = []
        for plan in plans:
            mine = [job for job in every if job.plan is plan]
            reports.append(summary.report(plan, mine) | {"table": _write(mine, folder, options.spec)})
    if every:
        console.print(summary.table_of(every))
    ended = "interrupted" if was_interrupted else f"the budget of {options.budget} has ended"
    if not was_interrupted and time.monotonic() < options.deadline:
        ended = "no process that compiles came up"
    console.print(summary.line(every, ended), markup=False)
    return reports, was_interrupted


def _work(every: Sequence[engine.Job], options: _Options) -> bool:
    """Runs the search with a progress bar; returns whether the user interrupted it."""
    plan, device = engine.visits(every), Device(options.spec)
    total = sum(len(job.configs) for job in every)
    with progress_bar(options.deadline) as progress:
        bar = progress.add_task("", total=total, completed=total - sum(len(visit.left) for visit in plan))

        def step(job: engine.Job, config: Any, record: Record) -> None:
            progress.update(bar, advance=1, description=job.label)
            if record.state == DROPPED:
                progress.console.print(f"{job.label}: dropped {config}: {record.why}", markup=False)

        try:
            with _ending_as_interrupt(), Compiler(engine.wanted(plan), options.workers, options.timeout_s) as compiler:
                engine.run(plan, compiler, device, options.deadline, step)
        except KeyboardInterrupt:
            return True
        finally:
            device.close()
    return False


@contextmanager
def _ending_as_interrupt() -> Iterator[None]:
    """SIGTERM, with which a job's time limit ends a process, counts as Ctrl-C: what was found is written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(mine: Sequence[engine.Job], folder: Path, spec: DeviceSpec) -> Path | None:
    """Writes the winners of one kernel; None where it has none yet."""
    winners = [winner for job in mine if (winner := job.winner()) is not None]
    if not winners:
        return None
    kernel = mine[0].plan.kernel
    path = tables.write_winners(folder, spec, kernel, winners, _versions(kernel.backend))
    console.print(f"wrote {path}" if path.is_file() else f"{path}: no entry, the default is the fastest", markup=False)
    return path


def _versions(backend: str) -> dict[str, str]:
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), **compiled.versions(backend)}
    return found | {"device": torch.cuda.get_device_name()}
