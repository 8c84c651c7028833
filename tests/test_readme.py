"""README and docs: the first two blocks are the commands, the examples run, and what is named or linked exists."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import gdn.layers
from benchmarks import report
from tests.layers import hf

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = ROOT / "gdn" / "tuned" / "h100" / "MEASURED.md"
SHORT_NAMES = {"sparse decode": "sparse_attention_decode", "sparse prefill": "sparse_attention_prefill"}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

EXAMPLES = [text for language, text in BLOCKS if language == "python"]
DOCUMENTS = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FIRST_SCREEN = 30  # lines before the second heading: what it is, numbers, install and demo, the smallest call
WIDEST_CELL = 120


def test_the_first_blocks_are_the_demo_and_the_tests() -> None:
    (first_language, demo), (second_language, tests) = BLOCKS[:2]
    assert first_language == second_language == "bash"
    assert demo.rstrip().endswith("python3 -m gdn demo")
    assert tests.rstrip().endswith("python3 -m pytest -q -n 2")
    assert all("pip install -q -c constraints.txt -e " in block for block in (demo, tests))


def test_the_first_screen_is_short_and_tables_are_narrow() -> None:
    lines = README.splitlines()
    first_heading = next(number for number, line in enumerate(lines, 1) if line.startswith("## "))
    assert first_heading <= FIRST_SCREEN
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell) > WIDEST_CELL] == []


def test_the_smallest_calls_run() -> None:
    """The indented lines of the first screen, and those of the examples that go on from them, on the CPU."""
    scope: dict[str, Any] = {}
    examples = README.partition("\n## Examples\n")[2].partition("```")[0]
    for part, least in ((README.partition("\n## ")[0], 4), (examples, 3)):
        lines = [line[4:] for line in part.splitlines() if line.startswith("    ")]
        exec("\n".join(lines).replace('"cuda"', '"cpu"'), scope)
        assert len(lines) >= least and scope["out"].shape == scope["v"].shape and scope["out"].isfinite().all()
    pool = scope["pool"]
    assert bool(pool[[5, 2]].any()) and not bool(pool[[0, 1, 3, 4, 6, 7]].any())


def test_the_table_of_functions_is_complete() -> None:
    """The table "Which function do I call?" names every public function, and nothing that does not exist."""
    section = README.partition("## Which function do I call?")[2].partition("\n## ")[0]
    answers = "".join(line.strip("|").rpartition("|")[2] for line in section.splitlines() if line.startswith("| "))
    named = set(re.findall(r"`(\w+)`", answers))
    public = {name for name in gdn.__all__ if callable(getattr(gdn, name))}
    assert public <= named
    assert all(hasattr(gdn.layers, name) for name in named - public)


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    """Links to files and to headings, in the document itself and in others; documents that are named without a link exist."""
    text = (ROOT / document).read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / document).parent / name if name else ROOT / document
        if not file.exists() or (anchor and anchor not in _anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    broken += [name for name in re.findall(r"`(docs/\w+\.md)`", text) if not (ROOT / name).exists()]
    assert broken == []


def _anchors(text: str) -> set[str]:
    """Names of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_document_is_linked_from_the_readme() -> None:
    assert {name for name in DOCUMENTS if name.startswith("docs/")} <= set(re.findall(r"\]\(([^)#]+)", README))


def test_the_files_that_documents_name_exist() -> None:
    """The functions that they name in them exist too."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS if name != "CHANGELOG.md")
    named = set(re.findall(r"`((?:gdn|autotune|benchmarks|tests|kernels_\w+)/[\w./]*)`", text))
    assert len(named) >= 10
    assert not [name for name in named if not (ROOT / name).exists()]
    made_in = re.findall(r"`(\w+)`\s+in\s+`(kernels_\w+/[\w/]+\.py)`", text)
    assert {path.partition("/")[0] for _, path in made_in} == {"kernels_cute", "kernels_tl"}
    assert all(f"def {function}(" in (ROOT / path).read_text(encoding="utf-8") for function, path in made_in)


def test_its_numbers_are_measured_ones() -> None:
    """Each row of the tables of times repeats a row of MEASURED.md, of the same operator and with the numbers of its name."""
    first, few = _cells(README.partition("\n## ")[0]), 4
    section = _cells(README.partition("## Measured")[2].partition("\n## ")[0])
    rows = [row for row in first if len(row) == few] + [row[begin : begin + few] for row in section for begin in (0, few)]
    measured = report.read(MEASURED)
    assert len(first) == 4 and len(rows) >= 14
    for call, *times in rows:
        name = re.sub(r" \(.*?\)", "", call.partition(",")[0])
        found = [float(time.partition(" ")[0]) if time else None for time in times]
        same = [
            row
            for row in measured[SHORT_NAMES.get(name, name)]
            if [row.time_us, row.floor_us, found[2] and row.peer_us] == found and _numbers(call) <= _numbers(row.shape)
        ]
        assert len(same) == 1, call


def _cells(text: str) -> list[list[str]]:
    """Cells of a table's rows, without its heading."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]


def _numbers(name: str) -> Counter[str]:
    return Counter(re.findall(r"\d+", name))
