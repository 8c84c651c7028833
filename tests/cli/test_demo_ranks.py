"""`gdn demo` under torchrun: who runs, who prints, and what is refused."""

import json
import subprocess
import sys

import pytest
import torch
import typer

from gdn.cli import demo_ranks


def torchrun(size: int, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m", "gdn", "demo"]
    options = ("--model", "tiny", "--device", "cpu", "--steps", "2", *options)
    return subprocess.run([*line, *options], capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.cover
def test_two_ranks_print_once() -> None:
    done = torchrun(2, "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # one report
    assert data["passed"] and (data["ranks"], data["tensor_parallel"], data["wrong_on_other_ranks"]) == (2, 2, 0)


@pytest.mark.cover
def test_another_number_of_ranks_is_refused() -> None:
    done = torchrun(2)
    assert done.returncode != 0 and done.stdout == ""
    assert "--tp: expected 2, the number of processes that torchrun started, got 1" in done.stderr


def test_a_process_without_torchrun_is_alone() -> None:
    device = torch.device("cuda")
    assert demo_ranks.own_device(device) is device
    with demo_ranks.joined(4, device) as group:
        assert group is None
    assert demo_ranks.told_by_all(3, None) == [3]


def test_the_gpu_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_ranks, "are_launched", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert demo_ranks.own_device(torch.device("cuda")) == torch.device("cuda", 2)
    assert demo_ranks.own_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(typer.BadParameter, match="expected a GPU for each process of a host, got 2 for process 3"):
        demo_ranks.own_device(torch.device("cuda"))
