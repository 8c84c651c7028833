"""What `gdn demo` prints: a verdict in the last line with the device and the versions, within 80 columns."""

import io
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gdn.cli import app
from gdn.cli.demo import command as demo
from gdn.cli.demo import report as demo_report
from gdn.cli.demo.calls import Row
from gdn.cli.demo.reference import Deviation, Spread
from gdn.cli.demo.run import Memory, Plan, Report, Speed
from gdn.layers.named import NAMED, first_layers
from gdn.runtime import devices, packages

GPU = "NVIDIA H100 80GB HBM3"
OPERATORS = ("fused_gdn_prefill", "paged_indexer_topk", "gather_indexer_cache", "compress_indexer_keys", "sparse_attention")
BACKENDS = ("cute", "tilelang+cute", "cute+reference", "torch+tilelang")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def report(error: float = 1e-3, times: bool = True, others: tuple[int, ...] = ()) -> Report:
    """As a GPU's, with the widest contents."""
    rows = [
        Row(phase, operator, backend, ("a note",), 123456.7 if times else None, 12345.6 if times else None, error, 1e-2)
        for phase in ("prefill", "verify", "decode")
        for operator in OPERATORS
        for backend in BACKENDS
    ]
    spread = Spread(error, error)
    deviations = [Deviation(phase, 12345, spread, spread, Spread(1e-2, 1e-2), 1.0, ()) for phase in ("prefill", "decode")]
    speeds = [Speed(phase, 12345678, 1234, 123.456) for phase in ("prefill", "verify", "decode")]
    return Report(rows, speeds, Memory(2**37, 2**36, 2**14, 2**26, 2**38), deviations, True, [], others)


def printed(found: Report, device: torch.device) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    demo_report.print_report(console, found, "bfloat16", 123.4, device)
    return console.export_text().splitlines()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(packages, "version", lambda package: {"tilelang": "0.1.15", "cutlass": "4.8.1"}[package.module])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("error", [1e-3, 3.0, math.nan])
@pytest.mark.parametrize("times", [True, False])
def test_it_fits_80_columns_and_ends_with_the_verdict(error: float, times: bool) -> None:
    lines = printed(report(error, times), CUDA)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    versions = "torch 2.11.0, TileLang 0.1.15, CuTe DSL 4.8.1"
    assert lines[-1].rstrip() == f"{'PASS' if error == 1e-3 else 'FAIL'} on {GPU}: {versions}"
    text = "\n".join(lines)
    for name in (*OPERATORS, "tokens per second", "ref. med.", "123.4 s"):
        assert name in text, name  # nothing is cut off
    assert ("WRONG" in text) == (error != 1e-3)
    assert error == 1e-3 or "limit 1e-02" in text
    columns = ("calls", "error", "same token", "largest, median", "ref. max, med.")
    for column in (*columns, *(("time, us", "of floor") if times else ())):
        assert sum(line.startswith(f"{column}  ") for line in lines) == 1, column
    assert times or "of floor" not in text


@pytest.mark.usefixtures("gpu")
def test_other_ranks_and_long_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_report.verdict(report(others=(0,) * 7), CUDA).startswith(f"PASS on 8 x {GPU}: torch 2.11.0")
    assert demo_report.verdict(report(others=(0, 1)), CUDA).startswith("FAIL on 3 x")
    monkeypatch.setattr(devices, "cpu_name", lambda: "A Very Long Name of a Processor of Many Cores at Many Hertz")
    line = demo_report.verdict(report(), CPU)
    assert line.startswith("PASS on CPU A Very") and "...: torch" in line and line.endswith("CuTe DSL 4.8.1") and len(line) <= 80


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Intel Xeon Platinum 8481C"),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654"),
        ("Intel(R) Xeon(R) Processor", "Intel Xeon"),
    ],
)
def test_the_name_of_a_cpu(model_name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_fields", lambda: {"model name": model_name})
    assert devices.cpu_name() == expected


def test_a_cpu_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_fields", dict)
    assert devices.cpu_name()


def test_versions_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSLs that are only on the path: the loaded module says its version; one that is missing is a dash."""
    monkeypatch.setattr(packages, "version", lambda package: "files 12ab" if package.module == "tilelang" else None)
    monkeypatch.setitem(sys.modules, "tilelang", type(sys)("tilelang"))
    monkeypatch.setattr(sys.modules["tilelang"], "__version__", "0.1.14", raising=False)
    assert demo_report.versions() == {"torch": torch.__version__.partition("+")[0], "TileLang": "0.1.14", "CuTe DSL": "-"}
    monkeypatch.delitem(sys.modules, "tilelang")
    assert demo_report.versions()["TileLang"] == "?"


def run(*options: str) -> Any:
    fixed = ("demo", "--device", "cpu", "--layers", "1", "--steps", "1")
    return CliRunner().invoke(app.app, [*fixed, *options], env={"COLUMNS": "80"})


def test_the_command_on_a_cpu() -> None:
    result = run("--model", "tiny")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and max(map(len, lines)) <= 80
    assert lines[-1].startswith("PASS on CPU ") and "torch " in lines[-1] and "tensor-parallel" not in result.stdout
    assert "time, us" not in result.stdout and result.stderr == ""
    data = json.loads(run("--model", "tiny", "--json").stdout)
    assert data["passed"] and data["device_name"].startswith("CPU ")
    assert data["versions"].keys() == {"torch", "TileLang", "CuTe DSL"}


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_failure_is_the_last_line_and_the_status(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda *_: report(3.0, times=False))
    result = run("--model", "tiny", *options)
    assert result.exit_code == 1
    if options:
        assert json.loads(result.stdout)["passed"] is False
    else:
        assert result.stdout.splitlines()[-1].startswith("FAIL on CPU ")


@pytest.mark.parametrize(("name", "layers", "warns"), [("tiny", 8, False), ("qwen3-next-80b", 1, True), ("qwen3.5-35b", 4, True)])
def test_many_weights_on_a_cpu_are_announced(name: str, layers: int, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is made, on stderr, also with --json."""

    class Reached(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(demo, "run", stop)
    for options in ((), ("--json",)):
        result = run("--model", name, "--layers", str(layers), *options)
        assert isinstance(result.exception, Reached)
        assert (f"warning: {name}'s weights, " in result.stderr and "GB in float32" in result.stderr) == warns
        assert not options or result.stdout == ""
        assert all(len(line) <= 80 for line in result.stderr.splitlines())


def test_the_announced_bytes_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("tiny", first_layers(NAMED["tiny"], 1), (2,), 1, 1, CPU)
    seen: list[Report] = []
    made: Callable[..., Report] = demo.run
    monkeypatch.setattr(demo, "run", lambda *given: seen.append(made(*given)) or seen[0])
    assert run("--model", "tiny").exit_code == 0
    assert demo.weight_bytes(plan) == seen[0].memory.weights
