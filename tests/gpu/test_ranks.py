"""Tensor-parallel ranks on 2 and 4 GPUs of one host: the 80B shapes give what one GPU gives, within the error of bfloat16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

RATIO = 2.0  # largest accepted error, as a multiple of one GPU's, both against float32


def torchrun(size: int, *command: str) -> str:
    """Standard output of a command on this number of ranks."""
    count = torch.cuda.device_count()
    if count < size:
        pytest.skip(f"needs {size} GPUs: torch sees {count}")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    line += ["--nproc-per-node", str(size), "-m", *command]
    # NVLink multicast is off: other programs of the host may not survive it.
    without = {"NCCL_NVLS_ENABLE": "0"} | dict(os.environ)
    done = subprocess.run(line, capture_output=True, text=True, timeout=560, check=False, env=without)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def alone(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the logits of one GPU, in bfloat16 and in float32."""
    folder = tmp_path_factory.mktemp("alone")
    torchrun(1, "tests.gpu.rank_decode", "1", str(folder))
    return folder


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("size", [2, 4])
def test_prefill_and_captured_decode(size: int, alone: Path, tmp_path: Path) -> None:
    torchrun(size, "tests.gpu.rank_decode", str(size), str(tmp_path))
    exact = torch.load(alone / "exact.pt").double()

    def errors(folder: Path) -> torch.Tensor:
        found = torch.load(folder / "0.pt")
        assert found["repeats"] and found["logits"].shape == exact.shape
        return (found["logits"].double() - exact).norm(dim=1) / exact.norm(dim=1)

    found, one = errors(tmp_path), errors(alone)
    assert float(found.max()) <= RATIO * float(one.max()) and float(found.median()) <= RATIO * float(one.median()), (found, one)
    first = torch.load(tmp_path / "0.pt")["logits"]
    assert all(torch.equal(torch.load(tmp_path / f"{rank}.pt")["logits"], first) for rank in range(1, size))


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("size", [2, 4])
def test_the_demo(device: torch.device, size: int) -> None:
    """Every call and the logits of every rank are right; steps are captured with the sums over ranks in them."""
    data = json.loads(torchrun(size, "gdn", "demo", "--tp", str(size), "--steps", "8", "--json"))
    assert data["passed"] and data["captured"] and data["wrong_on_other_ranks"] == 0
    assert (data["ranks"], data["tensor_parallel"], data["model"]) == (size, size, "qwen3-next-80b")
