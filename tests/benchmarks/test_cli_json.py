"""`python -m benchmarks ... --json`: one JSON document on stdout; and errors that are one line on stderr."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import accuracy, cli, selection
from gdn.device import H100

RUNNER = CliRunner()


def run(*command: str, status: int = 0) -> Any:
    done = RUNNER.invoke(cli.app, [*command, "--json"])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)  # nothing else is there


def test_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> Iterator[accuracy.Error]:
        yield accuracy.Error("a case", "cute", False, 1e-3, 2.5e-3)
        yield accuracy.Error("a case", "a library", True, math.inf, 2.0e-3)

    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(accuracy, "measure", measure)
    data = run("accuracy", status=1)
    assert data["errors"][0] == {"case": "a case", "who": "cute", "is_peer": False, "out": 1e-3, "state": 2.5e-3}
    assert data["errors"][1]["out"] is None  # JSON has no infinity
    assert data["ratios"] == [{"case": "a case", "who": "cute", "what": "state", "ratio": 1.25}]
    assert (data["limit"], data["failures"], data["complete"]) == (accuracy.LIMIT, [], True)


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {selection.BF16: 0.999, selection.BF16_OUT: 0.5, selection.FP8: 0.9, selection.FP8_EXACT: 0.98}
    monkeypatch.setattr(selection, "measure", lambda keys, *_: selection.Agreement(keys, shares))
    data = run("selection", "--keys", "64", "--rows", "3", status=1)
    assert data["contexts"] == [{"keys": 64, "shares": shares, "passed": False}]
    assert (data["rows"], data["passed"], data["demanded"]) == (3, False, selection.DEMANDED)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["ops", "chunky"], "expected one of chunk"),
        (["ops", "--out", "/nowhere"], "out: expected with --write"),
        (["ops", "topk", "--shapes", "64", "--write"], "write: expected without --shapes"),
        (["ops", "--json", "/nowhere/figures.json"], "json: expected a file in a folder that exists"),
        (["accuracy", "--backend", "cuda"], "backend: expected one of cute, tilelang, got 'cuda'"),
        (["selection", "--backend", "cuda", "--keys", "64", "--rows", "2"], "backend: expected 'tilelang', 'cute', 'reference'"),
    ],
)
def test_an_error_is_one_line_on_stderr(command: list[str], expected: str) -> None:
    done = RUNNER.invoke(cli.app, command)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and expected in line
