"""The fuzz's own logic, on the CPU: draws repeat, wrong results and lost processes are found and named."""

import json
from typing import Any

import pytest
import torch

import gdn
from gdn.runtime import registry
from tests.fuzz import __main__ as fuzz
from tests.fuzz import worker as module
from tests.fuzz.families import FAMILIES
from tests.fuzz.judging import differ
from tests.fuzz.worker import Options, Worker, command

QUICK = Options(device="cpu", only=("gating", "split", "topk"), cases=3)


def test_every_operator_with_kernels_is_drawn() -> None:
    assert {family.op for family in FAMILIES.values() if family.op} == {
        one.name for one in registry.OPERATORS.values() if one.modules and one.functions
    }
    assert {family.function for family in FAMILIES.values() if family.op} <= set(gdn.__all__)


def test_a_run_without_faults(capsys: pytest.CaptureFixture[str]) -> None:
    Worker(QUICK).run(0, 100)
    batches = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["batch"] for one in batches[:-1]] == [[0, 64], [64, 100]]
    report = batches[-1]
    assert report["is_done"]
    assert report["wrong"] == [] and sum(report["calls"].values()) == 100 and len(report["calls"]) == 3


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A call whose result changes after the first time, and one that is wrong from the start."""
    true, calls = gdn.fused_gdn_gating, []

    def gating(*args: Any, **options: Any) -> Any:
        g, beta = true(*args, **options)
        calls.append(options["backend"])
        return (g + 1e-3, beta) if len(calls) > 30 else (g, beta)

    monkeypatch.setattr(gdn, "fused_gdn_gating", gating)
    only = Options(device="cpu", only=("gating",), cases=2)
    Worker(only).run(0, 64)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["wrong"] and all("other bits than the first time" in line for line in report["wrong"])
    assert report["wrong"][0].startswith("call ")
    monkeypatch.setattr(module, "fault", lambda *_: "planted")
    Worker(only).run(0, 8)
    assert "planted" in capsys.readouterr().out


def test_a_lost_process_is_named() -> None:
    batch, told, fault = fuzz._run(command(Options(device="nonsense", only=("gating",)), 128, 300))
    assert told["calls"] == {} and batch == [128, 192]
    assert "exit status 1: RuntimeError: " in fault and "worker.py" in fault


def test_bits() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert not differ([nan], [nan.clone()]) and differ([nan], [torch.tensor([1.0, 2.0])])
    assert differ([torch.tensor([0.0])], [torch.tensor([-0.0])])
    assert differ([nan], [nan, nan]) and differ([nan], [nan[:1]])
