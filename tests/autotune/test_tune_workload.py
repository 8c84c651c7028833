"""`tune --workload` from end to end, on a device that is not there: the real plan, journals, tables and summary."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune import cli, compiling
from autotune.shapes import Shape
from autotune.workers import Outcome
from gdn.runtime import tuned
from tests.autotune.fake_gpu import FakeGpu

MODEL = ("--workload", "tiny", "--num-spec", "1", "--limit", "3")


def _us(shape: Shape, config: Any) -> float:
    """The same for the same tiles, and else somewhere between 80 and 120."""
    return 80 + zlib.crc32(repr(config).encode()) % 40


@pytest.fixture
def tune(gpu: Callable[[FakeGpu], None], tmp_path: Path) -> Callable[..., Any]:
    """Runs the command on a device, with the journals and tables of the commands before."""

    def run(fake: FakeGpu, *options: str, journals: str = "journals") -> Any:
        gpu(fake)
        places = ("--journals", str(tmp_path / journals), "--out", str(tmp_path / "tables"))
        return CliRunner().invoke(cli.app, ["tune", *MODEL, *places, *options], terminal_width=200)

    return run


def _entries(tmp_path: Path) -> int:
    return sum(tuned.read(path).num_entries() for path in (tmp_path / "tables" / "h100").glob("*.json"))


def _measured(*gpus: FakeGpu) -> list[tuple[str, Any]]:
    return [(name, config) for gpu in gpus for what, name, config in gpu.asked if what == "measure"]


def test_a_model_is_tuned(tune: Callable[..., Any], tmp_path: Path) -> None:
    gpu = FakeGpu(_us)
    done = tune(gpu)
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    total = len(gpu.measured())
    shapes = len({(type(config), name) for name, config in _measured(gpu)})
    assert f"{total} of {total} candidates tried, {shapes} of {shapes} shapes judged." in words
    left_out = [line for line in done.output.splitlines() if ": not tuned (" in line]
    assert left_out and len(left_out) == len(set(left_out))  # each reason once
    assert all(heading in words for heading in ("shape", "default, us", "winner, us", "gain", "tiles", "the default"))
    assert "num_tokens 8192, num_sequences 1" in words and "(not " in words
    assert "recurrent.cute" in words and "topk.cute" in words and "%" in words
    entries = _entries(tmp_path)
    assert 0 < entries < shapes
    times = {path.name: path.read_bytes() for path in (tmp_path / "tables" / "h100").glob("*.json")}
    again = FakeGpu(_us)
    assert tune(again).exit_code == 0 and again.asked == []
    assert times == {path.name: path.read_bytes() for path in (tmp_path / "tables" / "h100").glob("*.json")}


def test_an_entry_is_at_least_1_percent_faster(tune: Callable[..., Any], tmp_path: Path) -> None:
    data = json.loads(tune(FakeGpu(_us), "--json").stdout)
    assert (data["workload"], data["op"], data["complete"]) == ("tiny", None, True)
    assert all(one["why"] and one["tune_keys"] for one in data["left_out"])
    winners = [winner for kernel in data["kernels"] for winner in kernel["winners"]]
    gains = [winner["gain"] for winner in winners if winner["gain"] is not None]
    assert min(gains) >= 0.01 and len(gains) == _entries(tmp_path)
    for winner in winners:
        if winner["gain"] is not None:
            assert winner["time_us"] < winner["default_us"]


def test_a_budget_that_ends_is_named_and_the_same_command_goes_on(
    tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(_us)
    tune(gpu, journals="others")
    whole = len(gpu.measured())
    gpus: list[FakeGpu] = []
    monkeypatch.setattr(time, "monotonic", lambda: 10.0 * sum(len(gpu.measured()) for gpu in gpus))
    for number in range(20):
        gpus.append(FakeGpu(_us))
        budget = "60m" if number else "10m"
        done = tune(gpus[-1], "--budget", budget)
        if done.exit_code == 0:
            break
        assert done.exit_code == 1, done.output
        tried = f"{60 + 360 * number} of {whole} candidates tried"
        assert f"the budget of {budget} has ended: {tried}" in " ".join(done.output.split())
        assert "Run the same command again" in " ".join(done.output.split())
    every = _measured(*gpus)
    assert len(every) == len({(name, type(config), config) for name, config in every}) == whole and len(gpus) > 2
    first = {(type(config), name) for name, config in _measured(gpus[0])}
    assert len({kind for kind, _ in first}) > 5  # of so many operators after a budget for a tenth of all


@pytest.mark.parametrize("kind", ["interrupt", "SIGTERM"])
@pytest.mark.parametrize("at", [0, 5, 50])
def test_an_interrupt_is_named_writes_what_was_found_and_the_same_command_goes_on(
    tune: Callable[..., Any], tmp_path: Path, kind: str, at: int
) -> None:
    def happens(what: str, shape: Shape, config: Any) -> None:
        if len(first.asked) == at + 1:
            if kind == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)

    first, second = FakeGpu(_us, happens), FakeGpu(_us)
    done = tune(first)
    assert done.exit_code == 130, done.output
    words = " ".join(done.output.split())
    assert "interrupted: " in words and "Run the same command again: it goes on from here." in words
    assert first.is_closed and (_entries(tmp_path) > 0) == (at > 0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert tune(second).exit_code == 0
    tried = [(name, type(config), config) for name, config in _measured(first, second)]
    assert len(tried) - len(set(tried)) <= 1  # only what was cut off is tried twice


def test_an_interrupted_command_prints_its_json(tune: Callable[..., Any]) -> None:
    def happens(what: str, shape: Shape, config: Any) -> None:
        if len(gpu.asked) == 20:
            raise KeyboardInterrupt

    gpu = FakeGpu(_us, happens)
    done = tune(gpu, "--json")
    assert done.exit_code == 130
    data = json.loads(done.stdout)
    assert not data["complete"] and sum(kernel["left"] for kernel in data["kernels"]) > 0
    assert any(kernel["winners"] for kernel in data["kernels"])


def test_compilers_that_do_not_start_are_named(tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: Any, tasks: Any, **_: Any) -> Iterator[Outcome]:
        yield from (Outcome(index, None, "its process did not start", 0.0, started=False) for index in range(len(tasks)))

    monkeypatch.setattr(compiling.workers, "run", run)
    gpu = FakeGpu(_us)
    done = tune(gpu)
    assert done.exit_code == 1 and gpu.asked == []
    assert "no process that compiles came up: 0 of " in " ".join(done.output.split())


def test_a_device_that_fails_is_named_in_one_line(tune: Callable[..., Any]) -> None:
    def happens(what: str, shape: Shape, config: Any) -> None:
        raise OSError("The process that times candidates did not come up: its process did not start within 120 s")

    done = tune(FakeGpu(_us, happens))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: The process that times candidates did not come up")


def test_two_tuners_of_one_journal_are_refused(tune: Callable[..., Any], tmp_path: Path) -> None:
    """The first process has the journal of one of the model's operators; when it ends, the second command runs."""
    path = tmp_path / "journals" / "h100.topk.cute.jsonl"
    code = f"from pathlib import Path\nfrom autotune.journal import claimed\nwith claimed(Path({str(path)!r})):\n input(print(1))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "1\n"
        gpu = FakeGpu(_us)
        done = tune(gpu)
        assert done.exit_code == 2 and gpu.asked == []
        line = done.stderr.splitlines()[-1]
        assert line == f"error: journals: another tuner is at work on {path}; wait for it, or name another folder"
        other.communicate("\n")
    assert tune(FakeGpu(_us)).exit_code == 0


def test_a_damaged_journal_is_named_before_anything_runs(tune: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "journals").mkdir()
    path = tmp_path / "journals" / "h100.topk.cute.jsonl"
    path.write_text('{"step": 3}\n')
    gpu = FakeGpu(_us)
    done = tune(gpu)
    assert done.exit_code == 2 and gpu.asked == [] and done.stderr.count("error") == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {path}:1: expected a line of a journal of the tuner: state: Field")


def test_without_a_gpu_all_candidates_compile(tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu = FakeGpu(_us)
    data = json.loads(tune(gpu, "--compile-only", "--json").stdout)
    assert data["complete"] and gpu.asked == [] and {"recurrent", "topk"} <= {kernel["op"] for kernel in data["kernels"]}
