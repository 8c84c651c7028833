"""Shared by the commands of the tuner and the benchmarks: console, progress bar, options, the GPU's limits, file of figures."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from autotune import budget
from gdn.device import DeviceSpec
from gdn.runtime import devices

_COLUMNS = 160
# Files and pipes have no width; rich would take 80 columns and cut the tables there.
console = Console(width=None if sys.stdout.isatty() else _COLUMNS)

Backend = Annotated[str | None, typer.Option(help="tilelang or cute.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; everything else goes to stderr.")]
ShapePattern = Annotated[str, typer.Option("--shapes", help="Only shapes whose name contains this text.")]
Workers = Annotated[int, typer.Option(min=1, help="Compiling processes.")]
TimeoutS = Annotated[float, typer.Option(min=1, help="Seconds that one compilation may take.")]
ALL_BUT_ONE = max(1, (os.cpu_count() or 2) - 1)  # processes
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")]


def device_spec() -> DeviceSpec:
    """Limits of this machine's Hopper GPU; ValueError where there is none."""

    if not torch.cuda.is_available():
        raise ValueError("This needs a Hopper (SM90) GPU, and torch sees none.")
    spec, name = devices.describe(torch.device("cuda", torch.cuda.current_device()))
    if spec is None:
        raise ValueError(f"This needs a Hopper (SM90) GPU, got {name}.")
    return spec


class _TimeLeft(ProgressColumn):
    """Time until the work is done, at its pace so far, or until the deadline (time.monotonic()), which ever comes first."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def render(self, task: Task) -> Text:
        rest_s = min(self._deadline - time.monotonic(), math.inf if task.time_remaining is None else task.time_remaining)
        return Text("" if rest_s == math.inf else f"{budget.written(rest_s)} left", style="progress.remaining")


def progress_bar(deadline: float = math.inf) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _TimeLeft(deadline))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def keep(json_file: Path | None, found: Any) -> None:
    """Writes the figures so far: a run that is cut off keeps what it has."""
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
