"""Processes that share one cache while some of them are killed: nothing is lost or corrupt, and nobody waits for the dead."""

import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import compiled
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import Config, FakeProblem

PROCESSES, KILLS = 8, 24
DTYPES = ("bfloat16", "float16", "float32", "float64")
SECONDS = 0.1  # of a compilation: there is work left when the last process is killed
CONFIGS = [Config(tile, wide) for tile in (1, 2, 4, 8, 16, 32) for wide in (False, True)]


def _work(problems: list[FakeProblem], seed: int) -> None:
    """Gets all kernels in an order of its own and checks them."""
    kernels = [(problem, config) for problem in problems for config in CONFIGS]
    for problem, config in random.Random(seed).sample(kernels, len(kernels)):
        kernel = compiled.get("recurrent", "tilelang", fake_kernel, problem, config)
        assert [kernel.functions[name](3) for name in ("first", "second")] == [3 * config.tile, 30 * config.tile]


@pytest.mark.cover  # eight processes on all cores, for many seconds
@pytest.mark.usefixtures("plain_library")
def test_processes_that_are_killed_lose_and_corrupt_nothing(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    problems = [FakeProblem(dtype, 128, journal, SECONDS, 1) for dtype in DTYPES]
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    running: list[Any] = []
    killed = 0
    for number in range(PROCESSES + KILLS):  # a killed process is replaced by the next one
        if len(running) == PROCESSES:
            time.sleep(rng.uniform(0.0, 0.03))
            victim = running.pop(rng.randrange(PROCESSES))
            victim.kill()  # it may have ended before
            victim.join(30)
            assert victim.exitcode in (0, -signal.SIGKILL)
            killed += victim.exitcode == -signal.SIGKILL
        running.append(context.Process(target=_work, args=(problems, number)))
        running[-1].start()
    assert killed >= PROCESSES  # at work, most of them
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * PROCESSES

    compiled.forget()
    before = compiled.compilations()
    for problem in problems:
        for config in CONFIGS:
            place = compiled.ensure("recurrent", "tilelang", fake_kernel, problem, config)
            assert compiled.is_whole(place)
    assert compiled.compilations() == before  # every kernel is in the cache
    lines = Path(journal).read_text().splitlines()
    assert len(lines) <= len(problems) * len(CONFIGS) + KILLS  # nothing is compiled twice but what a dead process held
