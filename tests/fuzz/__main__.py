"""`python -m tests.fuzz`: drawn calls of every operator on several streams at once, in a process of their own.

A call is drawn from the seed and its number alone. A process that is lost, by an error of the device or by a hang, costs one
batch: it is reported with the command that repeats it, and another process goes on after it.
"""

import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Annotated, Any

import typer

from tests.fuzz.worker import BATCH, Options, command

HANGS_AFTER = 600  # seconds without a new batch: the first ones compile kernels


def fuzz(
    calls: Annotated[int, typer.Option(help="Number of calls.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help="Families or operators; all if left out.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="tilelang, cute; all that an operator has if left out.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the reference alone.")] = "cuda",
    cases: Annotated[int, typer.Option(help="Different inputs of a family and backend.")] = 24,
    seconds: Annotated[float, typer.Option(help="No new batch after so long.")] = 1e9,
    replay: Annotated[str | None, typer.Option(help="FIRST:LAST, the numbers of the calls to repeat.")] = None,
) -> None:
    """Make drawn calls; exit status 1 where one is wrong or a process is lost."""
    options = Options(seed, device, streams, tuple(backend or ()), tuple(only or ()), cases, seconds)
    if not options.rows():
        raise typer.BadParameter(
            "expected a family or operator that exists, with one of its backends", param_hint="only, backend"
        )
    first, last = map(int, replay.split(":")) if replay else (0, calls)
    started, counts, wrong = time.monotonic(), Counter[str](), []
    while first < last and time.monotonic() - started < seconds:
        options.seconds = seconds - (time.monotonic() - started)
        done, told, fault = _run(command(options, first, last))
        counts.update(told["calls"])
        wrong += told["wrong"]
        if not fault:
            break
        again = f"python -m tests.fuzz --seed {seed} --streams {streams} --cases {cases} --replay {done[0]}:{done[1]}"
        wrong.append(f"a process was lost in calls {done[0]} to {done[1] - 1}: {fault}; repeat: {again}")
        first = done[1]
    for name, count in sorted(counts.items()):
        print(f"{count:7} {name}")
    for line in wrong:
        print(f"WRONG {line}")
    print(f"{sum(counts.values())} calls, {len(wrong)} wrong, {time.monotonic() - started:.0f} s, seed {seed}")
    raise typer.Exit(1 if wrong else 0)


def _run(text: str) -> tuple[list[int], dict[str, Any], str]:
    """The last batch that a worker began, what it last told, and why it was lost (empty where it was not)."""
    errors = tempfile.TemporaryFile("w+")  # not a pipe, which may be full while nobody reads
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.worker", text], stdout=subprocess.PIPE, stderr=errors, text=True
    )
    assert process.stdout is not None
    first = json.loads(text)["range"][0]
    batch, told = [first, first + BATCH], {"calls": {}, "wrong": []}
    waiting = selectors.DefaultSelector()
    waiting.register(process.stdout, selectors.EVENT_READ)
    while True:
        if not waiting.select(HANGS_AFTER):
            process.kill()
            process.wait()
            return batch, told, f"no batch for {HANGS_AFTER} s"
        line = process.stdout.readline()
        if not line:
            break
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        if told.get("is_done"):
            process.wait()
            return batch, told, ""
        batch = told["batch"]
    process.wait()
    errors.seek(0)
    said = errors.read().strip().splitlines()
    return batch, told, f"exit status {process.returncode}: {_gist(said)}"


def _gist(said: list[str]) -> str:
    """The exception of a traceback and the last line of this project in it."""
    errors = [line for line in said if "Error: " in line] or said[-1:] or ["nothing said"]
    places = [line.strip() for line in said if line.startswith("  File") and ("/gdn/" in line or "/tests/" in line)]
    return " at ".join([errors[-1], *places[-1:]])


if __name__ == "__main__":
    typer.run(fuzz)
