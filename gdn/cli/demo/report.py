"""What `gdn demo` prints of a run: operators, phases, deviations, memory, and at the end whether it passed, on what."""

from collections import Counter

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gdn.cli.demo.calls import Row
from gdn.cli.demo.run import PHASES, Report
from gdn.cli.plain import section, table
from gdn.runtime import devices, packages

WIDTH = 80  # columns: of the last line at most


def print_report(console: Console, report: Report, dtype: str, seconds: float, device: torch.device) -> None:
    """Prints everything, the verdict last."""
    is_timed = any(row.time_us is not None for row in report.rows)
    console.print(_legend(dtype, is_timed))
    console.print(_operators(report.rows, is_timed))
    for row in report.rows:
        if not row.passed:
            console.print(f"WRONG: {row.phase} {row.operator}: error {row.error:.1e}, limit {row.limit:.0e}", style="red")
    for note in dict.fromkeys(f"{row.operator}: {note}" for row in report.rows for note in row.notes):
        console.print(note, markup=False)
    console.print(_speeds(report))
    console.print(_deviations(report))
    for one in report.deviations:
        if not one.passed:
            limit = f"largest {one.limit.largest:.0e}, median {one.limit.median:.0e}"
            console.print(f"WRONG: {one.phase}: the limit is {limit}", style="red")
            if not one.reroutes_as_often:
                own, same = one.rerouted
                console.print(f"WRONG: {one.phase}: other experts in {own} rows, ref. in {same}", style="red")
    memory = report.memory
    peak = "" if memory.peak is None else f"; {memory.peak / 2**30:.2f} GiB at most"
    console.print(
        f"memory: weights {memory.weights / 2**20:,.1f} MiB, caches {memory.caches / 2**20:,.1f} MiB "
        f"({memory.per_token / 2**10:.2f} KiB a token, {memory.per_sequence / 2**20:.2f} MiB a sequence){peak}",
        highlight=False,
    )
    if report.sequences:
        console.print(_states(report))
    if report.steps:
        console.print(_steps(report))
    ran = ", ".join(f"{backend} {count}" for backend, count in Counter(row.backend for row in report.rows).most_common())
    console.print(
        f"{len(report.rows)} calls ({ran}), each checked against an independent computation in float64, and the logits of "
        f"{sum(one.positions for one in report.deviations)} positions against the reference model, {report.wrong} wrong, "
        f"{seconds:.1f} s"
    )
    if report.others:
        console.print(f"other ranks: {len(report.others)}, checked alike, {sum(report.others)} wrong")
    style = "bold green" if report.passed else "bold red"
    console.print(f"[{style}]{escape(verdict(report, device))}[/]", highlight=False)


def verdict(report: Report, device: torch.device) -> str:
    """PASS or FAIL, the device and the versions, in one line of at most 80 columns: a longer name of the device is cut."""
    word = "PASS" if report.passed else "FAIL"
    count = 1 + len(report.others)
    where = f"{count} x {device_name(device)}" if count > 1 and device.type == "cuda" else device_name(device)
    with_versions = ", ".join(f"{name} {version}" for name, version in versions().items())
    room = WIDTH - len(f"{word} on : {with_versions}")
    return f"{word} on {where if len(where) <= room else where[: room - 3].rstrip() + '...'}: {with_versions}"


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of this machine's CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {devices.cpu_name()}"


def versions() -> dict[str, str]:
    """Versions of torch and the DSLs, "-" where one is not installed."""
    torch_version = str(torch.__version__).partition("+")[0]
    return {
        "torch": torch_version,
        "TileLang": packages.shown(packages.DSLS["tilelang"]) or "-",
        "CuTe DSL": packages.shown(packages.DSLS["cute"]) or "-",
    }


def _legend(dtype: str, is_timed: bool) -> Table:
    """What the columns of the tables mean. Times and floors are there on a GPU only."""
    of_times = [
        ("time, us", "of the phase's first call by itself, its inputs not in the L2 cache"),
        ("of floor", "share of that time that its bytes and arithmetic need at least, at the rates above"),
    ]
    made = Table.grid(padding=(0, 2))
    for name, meaning in [
        ("calls", "calls of the phase that were checked"),
        *(of_times if is_timed else []),
        ("error", "largest relative error of a row of a result, against float64; 0 where integers are equal"),
        ("same token", "positions where the most likely token is that of the reference model in float32"),
        (
            "largest, median",
            "relative errors of the logits of a position, against the same model; in the median "
            "positions where a rounding selects other experts are scaled to the others",
        ),
        ("ref. max, med.", f"these errors of the reference model in {dtype}: what rounding explains"),
    ]:
        made.add_row(name, meaning)
    return made


def _speeds(report: Report) -> Table:
    """One line per phase: its throughput."""
    caption = "verify and decode in CUDA graphs" if report.captured else "no CUDA graphs"
    made = table("phase", "tokens", "steps", "ms a step", "tokens per second", caption=caption)
    for one in report.speeds:
        each, rate = f"{one.seconds / one.steps * 1e3:.2f}", f"{one.tokens_per_second:,.0f}"
        made.add_row(one.phase, str(one.tokens), str(one.steps), each, rate)
    return made


def _states(report: Report) -> Table:
    """One line per number of drafts and dtype: a sequence's states, windows and ring."""
    caption = f"MiB a sequence; decode was {'by replay' if report.has_replay else 'without replay'}"
    made = table("states", "drafts", "with replay", "without", "share", caption=caption)
    for one in report.sequences:
        sizes = (f"{size / 2**20:.3f}" for size in (one.with_replay, one.without))
        made.add_row(one.state_dtype, str(one.drafts), *sizes, f"{one.share:.1%}")
    return made


def _steps(report: Report) -> Table:
    """One line per kind of step: milliseconds with replay and without."""
    made = table("sequences", "tokens each", "ms with replay", "ms without", "ratio", "accepted")
    for one in report.steps:
        times = (f"{time:.3f}" for time in (one.with_replay, one.without))
        made.add_row(str(one.batch), str(one.tokens), *times, f"{one.ratio:.2f}", f"{one.accepted:.2f}")
    return made


def _deviations(report: Report) -> Table:
    """One line per phase: the errors of its logits."""
    made = table("logits", "positions", "same token", "largest", "median", "ref. max", "ref. med.", "", left=("",))
    for one in report.deviations:
        numbers = (one.error.largest, one.error.median, one.same_dtype.largest, one.same_dtype.median)
        cells = [str(one.positions), f"{one.agreeing:.0%}", *(f"{number:.1e}" for number in numbers)]
        made.add_row(one.phase, *cells, _verdict(one.passed))
    return made


def _verdict(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[red]WRONG[/]"


def _operators(rows: list[Row], is_timed: bool) -> Table:
    """One line per operator and phase: calls, the first one's time, the worst error of all."""
    times = ("time, us", "of floor") if is_timed else ()
    made = table("operator", "backend", "calls", *times, "error", "", left=("backend", ""))
    made.columns[0].no_wrap = True
    made.columns[1].no_wrap = False  # several backends may take two lines
    for phase in PHASES:
        section(made, phase)
        for operator in dict.fromkeys(row.operator for row in rows if row.phase == phase):
            same = [row for row in rows if (row.phase, row.operator) == (phase, operator)]
            made.add_row(f"  {operator}", *_cells(same, is_timed))
    return made


def _cells(same: list[Row], is_timed: bool) -> tuple[str, ...]:
    """Backends, calls, time, share of floor, error and verdict of the calls of one operator."""
    worst = next((row for row in same if not row.passed), max(same, key=lambda row: row.error))
    backends = dict.fromkeys(row.backend for row in same)
    timed = next((row for row in same if row.time_us is not None), None)
    times: tuple[str, ...] = ("-", "-") if is_timed else ()
    if timed is not None and timed.time_us is not None and timed.floor_us is not None:
        times = (f"{timed.time_us:.1f}", f"{timed.floor_us / timed.time_us:.0%}")
    return (", ".join(backends), str(len(same)), *times, f"{worst.error:.1e}", _verdict(worst.passed))
