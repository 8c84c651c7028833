"""A process that writes entries of a table."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune import tables, tuning
from autotune.shapes import Shape
from gdn.device import H100
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, SHAPE


def write_entries(folder: str, first: int, count: int) -> str:
    """Writes winners of `count` numbers of tokens into a table, each in a call of its own, once another process is here too."""
    Path(folder, f"{first}.here").touch()
    while len(list(Path(folder).glob("*.here"))) < 2:
        time.sleep(0.001)
    for tokens in range(first, first + count):
        problem: Any = replace(SHAPE.problem, num_tokens=tokens)  # type: ignore[call-arg]
        winner = tuning.Winner(Shape(f"{tokens}", problem), fake_kernel.Config(7, True), 49.0, 0.004, None)
        tables.write_winners(Path(folder), H100, KERNEL, [winner], {"torch": "2"})
    return folder
