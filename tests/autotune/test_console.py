"""The progress bar: how much is done, and the time left."""

import io
import math
import time

import pytest
from rich.console import Console

from autotune import console


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal, and a clock on which a step takes 30 s."""
    clock = [1000.0]
    written = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=written, force_terminal=True, width=120, get_time=lambda: clock[0]))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return written


@pytest.mark.parametrize(
    ("deadline", "steps", "left"),
    [(1000.0 + 480, 0, "8m left"), (1000.0 + 480, 3, "3m30s left"), (1000.0 + 200, 3, "1m50s left"), (math.inf, 3, "3m30s left")],
    ids=["before the first step", "at its pace", "until the budget ends", "without a budget"],
)
def test_the_time_left_is_that_of_the_work_or_of_the_budget(screen: io.StringIO, deadline: float, steps: int, left: str) -> None:
    with console.progress_bar(deadline) as progress:
        bar = progress.add_task("topk.cute", total=10)
        for _ in range(steps):
            time.sleep(30)
            progress.advance(bar)
        progress.refresh()
        shown = screen.getvalue()
    assert left in shown and f"{steps}/10" in shown and "topk.cute" in shown


def test_nothing_is_said_of_a_time_that_is_not_known(screen: io.StringIO) -> None:
    with console.progress_bar() as progress:
        progress.add_task("topk.cute", total=10)
        progress.refresh()
    assert "topk.cute" in screen.getvalue() and "left" not in screen.getvalue()
