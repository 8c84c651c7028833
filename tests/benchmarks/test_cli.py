"""`python -m benchmarks` on a machine without a GPU."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune import shapes
from benchmarks import accuracy, cli, ops
from gdn.device import H100

RUNNER = CliRunner()


def test_help_lists_the_subjects() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(subject in done.stdout for subject in ("ops", "layers", "ranks", "context", "accuracy", "selection"))


@pytest.mark.parametrize("command", [["ops"], ["ops", "recurrent"], ["accuracy"]])
def test_without_a_gpu_says_so(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = RUNNER.invoke(cli.app, command)
    assert done.exit_code == 2
    assert "SM90" in done.output


@pytest.mark.parametrize("command", [["ops", "chunk"], ["accuracy"]])
def test_an_unknown_library_is_refused(command: list[str]) -> None:
    done = RUNNER.invoke(cli.app, [*command, "--peer", "Nobody"])
    assert done.exit_code == 2
    assert "expected some of FlashInfer, FlashQLA, FLA, torch, gdn, got Nobody" in " ".join(done.output.split())


class _Interrupted:
    """A run whose second shape is interrupted."""

    def __init__(self, *_: object) -> None:
        self._names: list[str] = []

    def measure(self, shape: shapes.Shape) -> list[str]:
        if self._names:
            raise KeyboardInterrupt
        self._names.append(shape.name)
        return []

    @property
    def found(self) -> dict[str, object]:
        row = {
            "op": "recurrent", "backend": "cute", "config_source": "table", "time_us": 1.0, "burst_us": 0.9, "captured": True,
            "floor_us": 0.5, "share_of_floor": 0.5, "error": 0.0, "useful_flops": 0,
        }  # fmt: skip
        limits = {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1200.0}
        rows = [row | {"shape": name} for name in self._names]
        return {
            "device": "some device",
            "date": "2026-01-02",
            "torch": "0",
            "limits": limits,
            "rows": rows,
            "peers": [],
            "failures": [],
        }


def test_an_interrupted_bench_prints_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(ops, "Bench", _Interrupted)
    first, second, *_ = shapes.shapes("recurrent")
    done = RUNNER.invoke(cli.app, ["ops", "recurrent", "--write", "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert first.name in done.output and second.name not in done.output
    assert not list(tmp_path.iterdir())


class _Complete(_Interrupted):
    """A run that is not interrupted."""

    def measure(self, shape: shapes.Shape) -> list[str]:
        self._names.append(shape.name)
        return []


def test_a_bench_writes_its_tables_and_the_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables go into the device's file: other operators' stay, and a second run replaces its own."""
    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(ops, "Bench", _Complete)
    folder = tmp_path / "h100"
    folder.mkdir()
    other = "<!-- measured topk -->\nof another run\n<!-- /measured topk -->\n"
    (folder / "MEASURED.md").write_text(other)
    for _ in range(2):
        done = RUNNER.invoke(cli.app, ["ops", "recurrent", "--write", "--out", str(tmp_path)])
        assert done.exit_code == 0, done.output
    text = (folder / "MEASURED.md").read_text()
    assert text.startswith(other)
    assert all(text.count(f"| {shape.name} | CuTe | 1.00 |") == 1 for shape in shapes.shapes("recurrent"))
    assert (folder / "MEASURED.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_accuracy_prints_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> Iterator[accuracy.Error]:
        yield accuracy.Error("some case", "cute", False, 1.5e-3, 2.5e-3)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(accuracy, "measure", measure)
    done = RUNNER.invoke(cli.app, ["accuracy"])
    assert done.exit_code == 130
    assert "some case" in done.output and "1.5e-03 / 2.5e-03" in done.output


@pytest.mark.parametrize(
    ("state", "peers", "exit_code", "told"),
    [
        (2.4e-3, [2.0e-3, math.inf], 0, "largest: a case, cute, state: 1.20 of the best library's"),
        (2.5e-3, [2.0e-3, 9.0e-3], 1, "beyond the limit: a case, cute, state: 1.25"),
        (math.inf, [2.0e-3], 1, "beyond the limit: a case, cute, state: inf"),
        (0.0, [0.0], 0, "largest: a case, cute, state: 1.00"),
        (1e-9, [0.0], 1, "beyond the limit: a case, cute, state: inf"),
        (1.0, [math.inf], 0, "largest: a case, cute, o: 0.50"),
        (1.0, [], 0, "1.0e+00"),
    ],
)
def test_accuracy_fails_where_a_library_is_better(
    state: float, peers: list[float], exit_code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> Iterator[accuracy.Error]:
        yield accuracy.Error("a case", "cute", False, 1e-3, state)
        for number, error in enumerate(peers):
            yield accuracy.Error("a case", f"library {number}", True, 2e-3, error)
        yield accuracy.Error("another case", "library 0", True, 1e-9, 1e-9)

    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(accuracy, "measure", measure)
    done = RUNNER.invoke(cli.app, ["accuracy"])
    assert done.exit_code == exit_code, done.output
    assert told in done.output and "..." not in done.output


def test_accuracy_fails_where_a_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(backend: object, libraries: object, on_error: Callable[[str], None]) -> Iterator[accuracy.Error]:
        yield accuracy.Error("a case", "cute", False, 1e-3, 1e-3)
        on_error("a case, tilelang: it refuses")

    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(accuracy, "measure", measure)
    done = RUNNER.invoke(cli.app, ["accuracy"])
    assert done.exit_code == 1 and "it refuses" in done.output


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(ops, "Bench", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    result = RUNNER.invoke(cli.app, ["ops", "recurrent", "--write", "--out", str(tmp_path)])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and "gdn-kernels[plots]" in line and not list(tmp_path.iterdir())
