"""`python -m benchmarks report`: a page of a run's tables with its roofline, and next to an earlier run what has changed.

Every picture comes twice, for pages in light and in dark colours, and the page shows the one that its reader's colours want.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, ValidationError

from autotune.console import console
from benchmarks import plot, report

_PICTURE_INCHES = (9.0, 5.2)
_MARKERS = "osD^vP*Xhp<>d"
_GAIN = 0.02  # a smaller change of a time is taken for none


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    name: Literal["light", "dark"]
    text: str
    grid: str
    faster: str
    slower: str
    same: str


# Contrast of text and marks with the page's usual background is at least 4.5 to 1.
THEMES = (
    Theme("light", "#24292f", "#d0d7de", "#0969da", "#bc4c00", "#57606a"),
    Theme("dark", "#e6edf3", "#30363d", "#58a6ff", "#f0883e", "#8b949e"),
)


class Limits(BaseModel):
    """What the device reached in the run."""

    copy_gbps: float
    bf16_tflops: float
    fp8_tflops: float


class Row(BaseModel):
    """A call of the run, as `python -m benchmarks ops --json-file` writes it."""

    op: str
    shape: str
    backend: str
    time_us: float
    burst_us: float
    floor_us: float
    share_of_floor: float
    gbps: float
    tflops: float
    error: float

    @property
    def intensity(self) -> float:
        """Useful operations for each useful byte."""
        return self.tflops * 1e3 / self.gbps if self.gbps else math.inf


class Run(BaseModel):
    """A file of a run."""

    device: str
    date: str
    torch: str
    limits: Limits
    rows: list[Row]
    peers: list[dict[str, Any]] = []

    @property
    def heading(self) -> str:
        return f"{self.device}, {self.date}"


def read(path: Path) -> Run:
    """Reads a run; ValueError that names the file where it holds none."""
    try:
        run = Run.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: expected a file of `python -m benchmarks ops --json-file`, got {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path}: expected a file of `python -m benchmarks ops --json-file`, got {place}: {first['msg']}"
        ) from None
    if not run.rows:
        raise ValueError(f"{path}: expected at least one row, got none")
    return run


@contextmanager
def _figure(theme: Theme, path: Path) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes in a page's colours, which is saved at the end."""
    plt = plot.pyplot()
    colours = {
        "text.color": theme.text, "axes.labelcolor": theme.text, "axes.edgecolor": theme.text, "xtick.color": theme.text,
        "ytick.color": theme.text, "grid.color": theme.grid, "svg.hashsalt": "gdn", "font.size": 9,
    }  # fmt: skip
    with plt.rc_context(colours):
        figure, axes = plt.subplots(figsize=_PICTURE_INCHES)
        try:
            yield figure, axes
            # Without the date: the same run gives the same file.
            figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
        finally:
            plt.close(figure)


def draw_roofline(run: Run, theme: Theme, path: Path) -> None:
    """Draws each call's share of its roof over its operations for a byte.

    The roof is what memory or, from a dashed line on, the tensor cores reached in the run. Shares are shown, not rates: those of
    one run lie over five powers of ten.

    The number next to a point is that of its row in the page's list.
    """
    with _figure(theme, path) as (_, axes):
        shown = [(number, row) for number, row in enumerate(run.rows, 1) if row.tflops > 0 and math.isfinite(row.intensity)]
        axes.axhline(100, color=theme.same, linewidth=1.0)
        for name, tflops in (("bf16", run.limits.bf16_tflops), ("fp8", run.limits.fp8_tflops)):
            ridge = tflops * 1e3 / run.limits.copy_gbps
            axes.axvline(ridge, color=theme.same, linewidth=0.8, linestyle="--")
            axes.annotate(
                f"{name}: {tflops:.0f} TFLOP/s from here on", (ridge, 2), xytext=(-3, 0), textcoords="offset points", ha="right",
                va="bottom", rotation=90, fontsize=7, color=theme.same,
            )  # fmt: skip
        axes.annotate(
            f"memory: {run.limits.copy_gbps / 1e3:.2f} TB/s", (0.01, 101), xycoords=("axes fraction", "data"), va="bottom",
            fontsize=7, color=theme.same,
        )  # fmt: skip
        for place, op in enumerate(dict.fromkeys(row.op for _, row in shown)):
            own = [(number, row) for number, row in shown if row.op == op]
            points = [row.intensity for _, row in own], [100 * row.share_of_floor for _, row in own]
            marker, colour = _MARKERS[place % len(_MARKERS)], (theme.faster, theme.slower)[place % 2]
            axes.plot(*points, marker, color=colour, label=op, markersize=6, fillstyle="none", markeredgewidth=1.3)
            for (number, _), *point in zip(own, *points, strict=True):
                axes.annotate(str(number), point, xytext=(5, 2), textcoords="offset points", fontsize=7)
        axes.set(xscale="log", xlabel="operations for each byte", ylabel="share of the roof, %", title=run.heading)
        axes.set_ylim(0, max(110, *(100 * row.share_of_floor + 5 for row in run.rows)))
        axes.grid(True, which="major", linewidth=0.5)
        if shown:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelcolor=theme.text)


@dataclass(frozen=True)
class Change:
    """A call that both runs have."""

    row: Row
    before_us: float

    @property
    def ratio(self) -> float:
        """How many times as fast the call has become."""
        return self.before_us / self.row.time_us

    @property
    def word(self) -> Literal["faster", "slower", "same"]:
        if abs(self.ratio - 1) <= _GAIN:
            return "same"
        return "faster" if self.ratio > 1 else "slower"


def changes(run: Run, before: Run) -> list[Change]:
    """Calls that both runs have, by the operator, the shape and the backend."""
    times = {(row.op, row.shape, row.backend): row.time_us for row in before.rows}
    found = [(row, times.get((row.op, row.shape, row.backend))) for row in run.rows]
    return [Change(row, time_us) for row, time_us in found if time_us is not None]


def draw_changes(found: Sequence[Change], title: str, theme: Theme, path: Path) -> None:
    """Draws how many times as fast each call has become, on a scale where twice and half are as far from 1."""
    with _figure(theme, path) as (figure, axes):
        figure.set_size_inches(_PICTURE_INCHES[0], 1.2 + 0.26 * len(found))
        places = range(len(found))
        values = [math.log2(one.ratio) for one in found]
        axes.barh(places, values, height=0.6, color=[getattr(theme, one.word) for one in found])
        for place, one, value in zip(places, found, values, strict=True):
            text = f"{one.ratio:.2f}x  ({report.time_text(one.before_us)} to {report.time_text(one.row.time_us)} us)"
            axes.annotate(text, (max(value, 0), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(places, [f"{one.row.op}, {one.row.shape}" for one in found])
        axes.invert_yaxis()
        axes.axvline(0, color=theme.text, linewidth=0.8)
        most = max([abs(value) for value in values], default=0.0)
        axes.set_xlim(-most - 0.2, most + 0.2 + max(1.0, most))  # room for the numbers
        ticks = [exponent for exponent in range(-6, 7) if abs(exponent) <= most + 0.2]
        axes.set_xticks(ticks, [f"{2.0**tick:g}x" for tick in ticks])
        axes.set_title(title)


def write(run: Run, before: Run | None, out: Path) -> Path:
    """Writes the page and its pictures into a folder; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        draw_roofline(run, theme, out / f"roofline-{theme.name}.svg")
    lines = [
        f"# {run.heading}",
        "",
        _shown("roofline", "Share of the roof, over operations for each byte"),
        "",
    ]
    lines += [f"{number}. {row.op}, {row.shape}: {row.tflops:.1f} TFLOP/s" for number, row in enumerate(run.rows, 1)]
    if before is not None and (found := changes(run, before)):
        title = f"{before.heading} to {run.heading}"
        for theme in THEMES:
            draw_changes(found, title, theme, out / f"changes-{theme.name}.svg")
        lines += ["", f"## {title}", "", _shown("changes", "How many times as fast each call has become"), ""]
        lines += ["| operator | shape | before, us | after, us | times as fast |", "|---|---|---|---|---|"]
        for one in found:
            times = f"{report.time_text(one.before_us)} | {report.time_text(one.row.time_us)}"
            lines.append(f"| {one.row.op} | {one.row.shape} | {times} | {one.ratio:.2f} |")
    lines += ["", "## Times", ""]
    for table in report.markdown(run.model_dump()).values():
        lines += [table]
    page = out / "report.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _shown(name: str, what: str) -> str:
    dark, light = (f"{name}-{theme}.svg" for theme in ("dark", "light"))
    return f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}"><img src="{light}" alt="{what}"></picture>'


def command(
    run: Annotated[Path, typer.Argument(help="File of `python -m benchmarks ops --json-file`.")],
    before: Annotated[Path | None, typer.Option(help="An earlier run, to compare with.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the page and its pictures.")] = Path("report"),
) -> None:
    """Write a page of a run: its tables, a roofline, and next to an earlier run what has changed."""
    found, earlier = read(run), None if before is None else read(before)
    if earlier is not None and not changes(found, earlier):
        console.print(f"{before} has no call of {run}: nothing is compared", markup=False)
    console.print(f"wrote {write(found, earlier, out)}", markup=False)
