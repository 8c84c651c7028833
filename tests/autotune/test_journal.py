"""The journal: what it remembers, and what it says of a file that is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.journal import DROPPED, INTERRUPTED, JUDGED, STARTED, TIMED, Journal, Record, claimed

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


def test_a_journal_of_an_earlier_version_is_read(path: Path) -> None:
    """Its lines had no verdicts."""
    fields = {"source": "s", "static": FIRST[0], "sizes": FIRST[1], "config": FIRST[2]}
    told = ({"state": "started", "why": "", "time_us": None, "error": None}, {"state": "timed", "time_us": 1.0, "error": 0.0})
    path.parent.mkdir()
    path.write_text("".join(f"{json.dumps(fields | one)}\n" for one in told))
    assert Journal(path, "s").find(*FIRST) == DONE


def test_a_journal_of_another_kernel_source_is_passed_over(path: Path) -> None:
    Journal(path, "old").add(*FIRST, DONE)
    assert Journal(path, "new").find(*FIRST) is None
    assert Journal(path, "old").find(*FIRST) == DONE


def test_a_candidate_during_which_the_tuner_ended_is_tried_again_once(path: Path) -> None:
    """The tuner may have been killed, or the candidate may have taken the machine down."""
    Journal(path, "s").add(*FIRST, Record(STARTED))
    assert Journal(path, "s").find(*FIRST) is None
    Journal(path, "s").add(*FIRST, Record(STARTED))
    assert Journal(path, "s").find(*FIRST) == Record(DROPPED, why="the tuner ended 2 times while it was timed")


def test_starts_that_ended_do_not_count(path: Path) -> None:
    for state in (STARTED, INTERRUPTED, STARTED, INTERRUPTED, STARTED):
        Journal(path, "s").add(*FIRST, Record(state))
        assert Journal(path, "s").find(*FIRST) is None


def test_a_verdict_is_remembered(path: Path) -> None:
    verdict = Record(JUDGED, time_us=49.0, error=0.004, default_us=60.0, gain=0.18, timed=7)
    Journal(path, "s").add(*OTHER, Record(JUDGED, time_us=60.0, error=0.004, default_us=60.0, timed=3))
    Journal(path, "s").add(*FIRST, verdict)
    assert Journal(path, "s").find_judged(*FIRST[:2]) == ({"tile": 1, "split": True}, verdict)
    assert Journal(path, "s").find_judged("heads=4", FIRST[1]) is None and Journal(path, "t").find_judged(*FIRST[:2]) is None
    assert Journal(path, "s").find(*FIRST) is None  # it is no record of a candidate


def test_a_journal_has_one_tuner_at_a_time(path: Path) -> None:
    with claimed(path):
        with pytest.raises(ValueError) as raised, claimed(path):
            pass
        assert str(raised.value) == f"journals: another tuner is at work on {path}; wait for it, or name another folder"
    with claimed(path):  # which has ended
        pass


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
        (b'{"step": 3, "loss": 0.1}', "state: Field required"),
        (b'{"source": "s", "static": "", "sizes": {"n": "many"}, "config": {}, "state": "timed"}', "sizes.n: Input should be"),
        (b'{"source": "s", "static": "", "sizes": {}, "config": {}, "state": "lost"}', "state: Input should be 'started'"),
        (b'{"source": "s", "static": "", "sizes": {}, "config": {}, "state": "timed"}', "Value error, a line that is timed has"),
    ],
    ids=["torn", "empty", "bytes", "list", "foreign", "size", "state", "time"],
)
def test_any_other_damage_is_refused_by_name(path: Path, line: bytes, what: str) -> None:
    Journal(path, "s").add(*FIRST, DONE)
    content = path.read_bytes() + line + b"\n" + json.dumps({}).encode() + b"\n"
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        Journal(path, "s")
    assert str(raised.value).startswith(f"{path}:2: expected a line of a journal of the tuner: {what}")
    assert path.read_bytes() == content  # nothing of it is lost
