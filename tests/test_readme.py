"""README: its first two blocks are the commands, its examples run, and what it names exists."""

import re
from pathlib import Path
from typing import Any

import torch

from autotune import report

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = ROOT / "gdn" / "tuned" / "h100" / "MEASURED.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_blocks_are_the_demo_and_the_tests() -> None:
    (first_language, demo), (second_language, tests) = BLOCKS[:2]
    assert first_language == second_language == "bash"
    assert demo.rstrip().endswith("python3 -m gdn demo")
    assert tests.rstrip().endswith("python3 -m pytest -q")


def test_the_examples_run() -> None:
    """In order, in one scope, on the CPU: prefill and decode write the slots of their sequences, the indexer selects."""
    prefill, decode, indexer = [text.replace('"cuda"', '"cpu"') for language, text in BLOCKS if language == "python"]
    scope: dict[str, Any] = {}
    exec(prefill, scope)
    assert scope["prompt_out"].shape == (1, 128, 32, 128)
    pool, slots = scope["pool"], scope["slots"].long()
    before = pool.clone()
    exec(decode, scope)
    assert scope["token_out"].shape == (1, 2, 32, 128)
    for states in (before, pool):
        assert torch.equal((states != 0).flatten(1).any(dim=1).nonzero()[:, 0], slots.sort().values)
    assert not any(torch.equal(before[slot], pool[slot]) for slot in slots)
    exec(indexer, scope)
    indices = scope["indices"]
    assert indices.shape == (64, 16) and torch.equal((indices >= 0).sum(1), torch.arange(1, 65).clamp(max=16))


def test_it_is_short() -> None:
    assert README.count("\n") <= 170


def test_the_files_that_it_names_exist() -> None:
    """And so do the functions that it names in them."""
    named = set(re.findall(r"`((?:gdn|autotune|tests|kernels_\w+)/[\w./]*)`", README)) | set(
        re.findall(r"\]\((gdn/[^)]+)\)", README)
    )
    assert len(named) >= 10
    assert not [name for name in named if not (ROOT / name).exists()]
    made_in = re.findall(r"`(\w+)`\s+in\s+`(kernels_\w+/[\w/]+\.py)`", README)
    assert {path.partition("/")[0] for _, path in made_in} == {"kernels_cute", "kernels_tl"}
    assert all(f"def {function}(" in (ROOT / path).read_text(encoding="utf-8") for function, path in made_in)


def test_its_numbers_are_measured_ones() -> None:
    """Each row of the table of times repeats a row of MEASURED.md."""
    section = README.partition("## Measured")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")][1:]
    rows = [row[begin : begin + 4] for row in cells for begin in (0, 4)]
    measured = {(row.time_us, row.floor_us, row.peer_us) for op in report.read(MEASURED).values() for row in op}
    known = {(time, floor) for time, floor, _ in measured}
    assert len(rows) >= 10
    for call, time_us, floor_us, other in rows:
        assert (float(time_us), float(floor_us)) in known, call
        assert not other or (float(time_us), float(floor_us), float(other)) in measured, call
