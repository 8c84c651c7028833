"""The list of calls that stand for what people run: each is served, has a case, and is timed under its name."""

import importlib
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autotune import cases, shapes
from benchmarks import cli
from benchmarks.points import POINTS
from gdn.device import H100, H200
from gdn.runtime import registry

RUNNER = CliRunner()


def test_names_are_unique_and_operators_many() -> None:
    assert len({(point.op, point.name) for point in POINTS}) == len(POINTS) > 40
    assert {"gdn_decode", "gdn_prefill", "chunk", "sparse_attention_decode", "paged_mqa_logits", "topk"} <= {
        one.op for one in POINTS
    }


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.op} {point.name}")
def test_a_kernel_serves_each(point: shapes.Shape) -> None:
    module = importlib.import_module(registry.operator(point.op).modules["cute"])
    assert module.refusal(point.problem) is None
    for device in (H100, H200):
        assert module.fits(point.problem, module.default_config(point.problem, device), device)


@pytest.mark.parametrize("op", dict.fromkeys(point.op for point in POINTS))
def test_a_case_can_be_made_of_each_operators_points(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At small sizes, on the CPU: the public call of the case runs on the reference."""
    point = next(one for one in POINTS if one.op == op)
    found: Any = cases.tunable(op)
    call, *_ = found.case(found.small(point), torch.device("cpu"), 1).public_calls("reference")
    call()


class _Bench:
    timed: list[str] = []

    def __init__(self, *_: object) -> None:
        self.found = {"rows": [], "peers": [], "failures": [], "device": "some GPU", "torch": "2", "limits": LIMITS}

    def measure(self, shape: shapes.Shape) -> list[str]:
        self.timed.append(shape.name)
        return []


LIMITS = {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1200.0}


@pytest.mark.parametrize(("words", "count"), [([], len(POINTS)), (["chunk"], 4), (["--shapes", "batch 64"], 15)])
def test_the_command_times_the_points(words: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr(cli.benchmark, "Bench", _Bench)
    _Bench.timed = []
    RUNNER.invoke(cli.app, ["ops", *words, "--points"])
    assert len(_Bench.timed) == count


@pytest.mark.parametrize("words", [["--write"], ["norm"], ["--shapes", "nothing"]])
def test_what_has_no_points_is_refused(words: list[str]) -> None:
    done = RUNNER.invoke(cli.app, ["ops", *words, "--points"])
    assert done.exit_code == 2 and "points: expected" in " ".join(done.output.split())
