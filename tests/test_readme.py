"""What the README promises: its first two blocks are the commands, and its example runs."""

import re
from pathlib import Path
from typing import Any

import torch

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_blocks_are_the_demo_and_the_tests() -> None:
    (first_language, demo), (second_language, tests) = BLOCKS[:2]
    assert first_language == second_language == "bash"
    assert demo.rstrip().endswith("python3 -m gdn demo")
    assert tests.rstrip().endswith("python3 -m pytest -q")


def test_the_example_updates_the_slots_of_its_sequences() -> None:
    (example,) = [text for language, text in BLOCKS if language == "python"]
    scope: dict[str, Any] = {}
    exec(example.replace('"cuda"', '"cpu"'), scope)
    assert scope["out"].shape == (1, 8, 32, 128)
    changed = (scope["pool"] != 0).flatten(1).any(dim=1).nonzero()[:, 0]
    assert torch.equal(changed, scope["slots"].long().sort().values)
