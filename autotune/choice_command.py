"""`python -m autotune choice`: options, progress, and the table of verdicts."""

import time
from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from autotune import budget as budgets
from autotune import choice as choices
from autotune.calls import calls as drawn_calls
from autotune.console import ALL_BUT_ONE, JsonFile, TimeoutS, Workers, console, device_spec, keep, progress_bar
from gdn.cli.plain import section, table
from gdn.device import SPECS
from gdn.runtime import registry


def choice(
    calls: Annotated[int, typer.Option(min=1, help="How many calls, of the operators in turn.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the calls: the same seed draws the same calls.")] = 0,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s or 15m; what is done by then is printed.")] = "15m",
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Fill the disk cache for --device; needs no GPU.")] = False,
    device: Annotated[str, typer.Option(help="With --compile-only: h100 or h200.")] = "h100",
    workers: Workers = ALL_BUT_ONE,
    timeout_s: TimeoutS = 300,
    json_file: JsonFile = None,
) -> None:
    """Time seeded calls of the operators of two kernels on both, and say whether the runtime takes the faster one.

    Each kernel runs with the tiles that the runtime would give it. Exit code 1 where the chosen one takes more than 1.05 times
    the fastest one's time and over 0.5 us more, or where one did not run.
    """
    start, budget_s = time.monotonic(), budgets.seconds(budget)
    if compile_only and device not in SPECS:
        raise ValueError(f"device: expected {' or '.join(SPECS)}, got {device!r}")
    spec = SPECS[device] if compile_only else device_spec()
    questions = [choices.ask(shape, spec) for shape in drawn_calls(calls, seed)]
    with progress_bar(start + budget_s) as progress:
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
    with progress_bar(start + budget_s) as progress:
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
