"""What a search found: the table of all shapes, the line under it, and the same for JSON."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from autotune.engine import Job
from autotune.journal import DROPPED
from autotune.tuning import Plan
from gdn.cli.plain import section, table


def table_of(jobs: Sequence[Job]) -> Table:
    """A row for each shape, by operator: time of the default, the winner's time and gain, its tiles where they differ."""
    made = table("shape", "default, us", "winner, us", "gain", "tiles", left=("tiles",))
    made.columns[-1].no_wrap = False  # may be long, and must not take the shapes' room
    for plan in {id(job.plan): job.plan for job in jobs}.values():
        section(made, f"{plan.kernel.op}.{plan.kernel.backend}")
        for job in (job for job in jobs if job.plan is plan):
            made.add_row(f"  {escape(job.shape.name)}", *_cells(job))
    return made


def _cells(job: Job) -> list[str]:
    winner = job.winner()
    if winner is None:
        left = len(job.left())
        return ["-", "-", "-", f"no verdict yet: {left} to try" if left else "[red]none was both correct and timed[/]"]
    default = "-" if winner.default_us is None else f"{winner.default_us:.1f}"
    if winner.config == job.configs[0]:
        return [default, "-", "-", "the default"]
    usual, tiles = vars(job.configs[0]), vars(winner.config).items()
    others = ", ".join(f"{name} {value} (not {usual[name]})" for name, value in tiles if value != usual[name])
    gain = "-" if winner.gain is None else f"{winner.gain:.1%}"
    return [default, f"{winner.time_us:.1f}", gain, escape(others)]


def line(jobs: Sequence[Job], ended: str) -> str:
    """How much was done. ended: why it may be less than all."""
    total, left = sum(len(job.configs) for job in jobs), sum(len(job.left()) for job in jobs)
    judged = sum(job.winner() is not None for job in jobs)
    found = f"{total - left} of {total} candidates tried, {judged} of {len(jobs)} shapes judged"
    is_over = not left and not any(job.is_due() for job in jobs)
    return f"{found}." if is_over else f"{ended}: {found}. Run the same command again: it goes on from here."


def report(plan: Plan, jobs: Sequence[Job]) -> dict[str, Any]:
    """Figures of one kernel. jobs: none where it was only compiled. complete: all is compiled, or every shape has a verdict."""
    defaults = {(shape.problem.static_key(), plan.configs[name][0]) for name, shape in plan.shapes.items()}
    whys = {key: one.failure or (None if key in defaults else one.spills) for key, one in plan.candidates.items()}
    dropped = [{"config": config, "why": why} for (_, config), why in whys.items() if why is not None]
    winners = [(job, winner) for job in jobs if (winner := job.winner()) is not None]
    for job in jobs:
        static = job.shape.problem.static_key()
        records = ((config, job.record(config)) for config in job.configs if whys[static, config] is None)
        dropped += [
            {"config": config, "why": record.why} for config, record in records if record is not None and record.state == DROPPED
        ]
    return {
        "op": plan.kernel.op, "backend": plan.kernel.backend, "candidates": len(plan.candidates), "not_served": plan.refusals,
        "winners": [vars(winner) | {"shape": job.shape.name} for job, winner in winners], "dropped": dropped, "table": None,
        "left": sum(len(job.left()) for job in jobs), "complete": len(winners) == len(jobs) if jobs else not dropped,
    }  # fmt: skip
