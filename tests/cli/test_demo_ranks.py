"""`gdn demo` under torchrun: who runs, who prints, and what is refused."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from benchmarks import context, ranks, spread
from gdn.cli.demo import ranks as demo_ranks


def torchrun(size: int, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m", "gdn", "demo"]
    options = ("--model", "tiny", "--device", "cpu", "--steps", "2", *options)
    return subprocess.run([*line, *options], capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_groups_leave_multicast_off(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set before the group is made, and not against the environment."""
    seen = []

    def init(backend: str, **options: Any) -> None:
        seen.append((backend, os.environ.get("NCCL_NVLS_ENABLE"), options["timeout"], options.get("rank")))

    made = SimpleNamespace(init_process_group=init, group=SimpleNamespace(WORLD="all"))
    monkeypatch.setattr(demo_ranks, "dist", made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", before or "")
    if before is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    assert demo_ranks.join(torch.device("cuda", 1), spread.TIMEOUT, rank=1) == "all"
    demo_ranks.join(torch.device("cpu"), demo_ranks.TIMEOUT)
    assert seen[0] == ("nccl", after, spread.TIMEOUT, 1) and seen[1][0] == "gloo"
    assert spread.TIMEOUT.total_seconds() <= 180
    for module in (ranks, context, spread):  # every timing makes its group there
        assert "init_process_group" not in inspect.getsource(module)


def test_the_threads_of_a_group_end_with_it(tmp_path: Path) -> None:
    """Those of gloo that are alive when the interpreter ends may abort the process."""
    program = f"""
import importlib
from pathlib import Path
import torch.distributed as dist
from gdn.cli.demo.ranks import TIMEOUT, join, torch

def threads():
    return sorted(task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())

before = threads()
group = join(torch.device("cpu"), TIMEOUT, init_method="file://{tmp_path}/store", rank=0, world_size=1)
importlib.import_module("torch.distributed._shard")  # the steps of a model import it
assert len(threads()) > len(before)
del group
dist.destroy_process_group()
assert threads() == before, threads()
"""
    subprocess.run([sys.executable, "-c", program], timeout=100, check=True)


@pytest.mark.cover
def test_two_ranks_print_once() -> None:
    done = torchrun(2, "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # one report
    assert data["passed"] and (data["ranks"], data["tensor_parallel"], data["wrong_on_other_ranks"]) == (2, 2, 0)


@pytest.mark.cover
@pytest.mark.parametrize("tp", [1, 2])
def test_context_parallel_ranks_generate_the_same(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the demo are longer than the threshold: the rows of both kinds of layers are parted."""
    alone = json.loads(torchrun(1, "--json").stdout)
    monkeypatch.setenv("VLLM_QSA_PREFILL_USE_CP", "1")
    monkeypatch.setenv("VLLM_DSA_USE_CONTEXT_PARALLEL_THRESHOLD", "30")
    done = torchrun(2 * tp, "--tp", str(tp), "--cp", "2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["passed"] and (data["ranks"], data["context_parallel"], data["wrong_on_other_ranks"]) == (2 * tp, 2, 0)
    assert data["tokens"] == alone["tokens"]


def test_context_parallel_needs_torchrun() -> None:
    line = [sys.executable, "-m", "gdn", "demo", "--cp", "2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and "--cp: expected 1 without torchrun, got 2" in done.stderr


@pytest.mark.cover
def test_another_number_of_ranks_is_refused() -> None:
    done = torchrun(2)
    assert done.returncode != 0 and done.stdout == ""
    assert "--tp, --cp: expected 2 ranks, the number of processes that torchrun started, got 1" in done.stderr


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
