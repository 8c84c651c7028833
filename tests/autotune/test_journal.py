"""The journal: what it remembers, and what it says of a file that is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.journal import DROPPED, INTERRUPTED, STARTED, TIMED, Journal, Record

FIRST: Any = ("heads=2", {"num_tokens": 8}, {"tile": 1, "split": True})
OTHER: Any = ("heads=2", {"num_tokens": 8}, {"tile": 2, "split": True})
DONE = Record(TIMED, time_us=1.0, error=0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "journal.jsonl"


def test_a_journal_remembers(path: Path) -> None:
    for record in (Record(DROPPED, why="ValueError: odd"), DONE):
        Journal(path, "s").add(*FIRST, record)
        assert Journal(path, "s").find(*FIRST) == record
    assert Journal(path, "s").find(*OTHER) is None


def test_a_journal_of_another_kernel_source_is_passed_over(path: Path) -> None:
    Journal(path, "old").add(*FIRST, DONE)
    assert Journal(path, "new").find(*FIRST) is None
    assert Journal(path, "old").find(*FIRST) == DONE


def test_a_candidate_that_killed_the_process_is_not_tried_again(path: Path) -> None:
    Journal(path, "s").add(*FIRST, Record(STARTED))
    found = Journal(path, "s").find(*FIRST)
    assert found is not None and found.state == DROPPED


def test_an_interrupted_candidate_is_tried_again(path: Path) -> None:
    journal = Journal(path, "s")
    for state in (STARTED, INTERRUPTED):
        journal.add(*FIRST, Record(state))
    assert Journal(path, "s").find(*FIRST) is None


@pytest.mark.parametrize("torn", ['{"source": "s", "stat', '{"source": "s\udcff', "{"])
def test_a_last_line_that_was_cut_off_is_dropped_and_named(path: Path, torn: str) -> None:
    Journal(path, "s").add(*FIRST, DONE)
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode(errors="surrogateescape"))
    said: list[str] = []
    resumed = Journal(path, "s", warn=said.append)
    assert said == [f"{path}:2: the last line was cut off, and is dropped"]
    assert resumed.find(*FIRST) == DONE and path.read_bytes() == whole
    resumed.add(*OTHER, DONE)
    again = Journal(path, "s", warn=said.append)
    assert again.find(*FIRST) == again.find(*OTHER) == DONE and len(said) == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"source": "s", "stat', "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b'"\xff"', "Invalid JSON"),
        (b"[1, 2]", "Input should be an object"),
        (b'{"step": 3, "loss": 0.1}', "source: Field required"),
        (b'{"source": "s", "static": "", "sizes": {"n": "many"}, "config": {}, "state": "timed"}', "sizes.n: Input should be"),
        (b'{"source": "s", "static": "", "sizes": {}, "config": {}, "state": "lost"}', "state: Input should be 'started'"),
    ],
    ids=["torn", "empty", "bytes", "list", "foreign", "size", "state"],
)
def test_any_other_damage_is_refused_by_name(path: Path, line: bytes, what: str) -> None:
    Journal(path, "s").add(*FIRST, DONE)
    content = path.read_bytes() + line + b"\n" + json.dumps({}).encode() + b"\n"
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        Journal(path, "s")
    assert str(raised.value).startswith(f"{path}:2: expected a line of a journal of the tuner: {what}")
    assert path.read_bytes() == content  # nothing of it is lost
