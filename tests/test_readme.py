"""README: its first two blocks are the commands, its examples run, and what it names exists."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from tests.layers import hf

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = ROOT / "gdn" / "tuned" / "h100" / "MEASURED.md"
SHORT_NAMES = {"sparse decode": "sparse_attention_decode", "sparse prefill": "sparse_attention_prefill"}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

EXAMPLES = [text for language, text in BLOCKS if language == "python"]


def test_the_first_blocks_are_the_demo_and_the_tests() -> None:
    (first_language, demo), (second_language, tests) = BLOCKS[:2]
    assert first_language == second_language == "bash"
    assert demo.rstrip().endswith("python3 -m gdn demo")
    assert tests.rstrip().endswith("python3 -m pytest -q -n 2")
    assert all("pip install -q -c constraints.txt -e " in block for block in (demo, tests))


def test_the_examples_run() -> None:
    """Examples run in order, in one scope, on the CPU: prefill and decode write their sequences' slots, the indexer selects."""
    prefill, decode, indexer = [text.replace('"cuda"', '"cpu"') for text in EXAMPLES if "integrations" not in text]
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


def test_the_example_of_a_host_runs() -> None:
    """Without a Hopper GPU it leaves the host alone, and says so."""
    (example,) = [text for text in EXAMPLES if "integrations" in text]
    scope: dict[str, Any] = {"model": hf.build("qwen3_next", 0)}
    exec(example, scope)
    handle = scope["handle"]
    handle.disable()
    assert handle.report().host == "transformers"


def test_the_example_of_replay_runs() -> None:
    """On the CPU, where bad counts are refused; the states contain all tokens in the end."""
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    (example,) = [block for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    scope: dict[str, Any] = {}
    exec(example, scope)
    assert scope["state_tokens"].tolist() == [0, 40, 0, 40, 0, 0, 0, 0] and scope["fold_every"] == 15
    assert (scope["pool"] != 0).flatten(1).any(dim=1).tolist() == [False, True, False, True] + [False] * 4


def test_the_files_that_it_names_exist() -> None:
    """The functions that it names in them exist too."""
    named = set(re.findall(r"`((?:gdn|autotune|benchmarks|tests|kernels_\w+)/[\w./]*)`", README)) | set(
        re.findall(r"\]\((gdn/[^)]+)\)", README)
    )
    assert len(named) >= 10
    assert not [name for name in named if not (ROOT / name).exists()]
    made_in = re.findall(r"`(\w+)`\s+in\s+`(kernels_\w+/[\w/]+\.py)`", README)
    assert {path.partition("/")[0] for _, path in made_in} == {"kernels_cute", "kernels_tl"}
    assert all(f"def {function}(" in (ROOT / path).read_text(encoding="utf-8") for function, path in made_in)


def test_its_numbers_are_measured_ones() -> None:
    """Each row of the table of times repeats a row of MEASURED.md, of the same operator and with the numbers of its name."""
    section = README.partition("## Measured")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")][1:]
    rows = [row[begin : begin + 4] for row in cells for begin in (0, 4)]
    measured = report.read(MEASURED)
    assert len(rows) >= 10
    for call, *times in rows:
        name = call.partition(",")[0]
        found = [float(time) if time else None for time in times]
        same = [
            row
            for row in measured[SHORT_NAMES.get(name, name)]
            if [row.time_us, row.floor_us, found[2] and row.peer_us] == found and _numbers(call) <= _numbers(row.shape)
        ]
        assert len(same) == 1, call


def _numbers(name: str) -> Counter[str]:
    return Counter(re.findall(r"\d+", name))
