"""Tensor-parallel ranks on 2 and 4 GPUs of one host: the 80B shapes give what one GPU gives, within the error of bfloat16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdn.cli.demo.reference import RowErrors, levelled
from gdn.cli.demo.routes import reroutings

pytestmark = pytest.mark.gpu

RATIO = 2.0  # largest accepted error, as a multiple of one GPU's, both against float32


def torchrun(size: int, *command: str, may_fail: bool = False) -> str:
    """Standard output of a command on this number of ranks. may_fail: the caller reads why."""
    count = torch.cuda.device_count()
    if count < size:
        pytest.skip(f"needs {size} GPUs: torch sees {count}")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    line += ["--nproc-per-node", str(size), "-m", *command]
    # NVLink multicast is off: other programs of the host may not survive it.
    without = {"NCCL_NVLS_ENABLE": "0"} | dict(os.environ)
    done = subprocess.run(line, capture_output=True, text=True, timeout=560, check=False, env=without)
    assert done.returncode == 0 or (may_fail and done.stdout), done.stdout[-3000:] + done.stderr[-6000:]
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
    exact = torch.load(alone / "exact.pt")
    wide = exact["logits"].double()

    def errors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row, and whether a rounding selected another expert."""
        found = torch.load(folder / "0.pt")
        assert found["repeats"] and found["logits"].shape == wide.shape
        is_rerouted = reroutings(found["experts"], exact["experts"]) > 0
        return (found["logits"].double() - wide).norm(dim=1) / wide.norm(dim=1), is_rerouted

    found, one = errors(tmp_path), errors(alone)
    medians = [float(levelled(*rows, *one).median()) for rows in (found, one)]
    assert float(found[0].max()) <= RATIO * float(one[0].max()) and medians[0] <= RATIO * medians[1], (medians, found, one)
    first = torch.load(tmp_path / "0.pt")["logits"]
    assert all(torch.equal(torch.load(tmp_path / f"{rank}.pt")["logits"], first) for rank in range(1, size))


def described(rows: tuple[RowErrors, ...]) -> str:
    """Medians of both kinds of rows, of the run and of the reference."""
    lines = []
    for name, pairs in (
        ("run", [(row.error, row.rerouted) for row in rows]),
        ("reference", [(row.same_dtype, row.same_rerouted) for row in rows]),
    ):
        kinds = [torch.tensor([error for error, layers in pairs if (layers > 0) == is_other]) for is_other in (False, True)]
        medians = [f"{float(kind.median()):.4f}" if kind.numel() else "none" for kind in kinds]
        counts = f"{kinds[0].numel()} rows with float32's experts: {medians[0]}; {kinds[1].numel()} with others: {medians[1]}"
        errors = torch.cat(kinds)
        lines.append(
            f"    {name:9} median {float(errors.median()):.4f}, mean {float(errors.mean()):.4f}, "
            f"largest {float(errors.max()):.4f}; {counts}"
        )
    return "\n".join(lines)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("size", [2, 4])
def test_the_demo(device: torch.device, size: int) -> None:
    """Every call and the logits of every rank are right; steps are captured with the sums over ranks in them."""
    data = json.loads(torchrun(size, "gdn", "demo", "--tp", str(size), "--steps", "8", "--json", may_fail=True))
    rows = {one["phase"]: described(tuple(RowErrors(*row) for row in one["rows"])) for one in data["deviations"]}
    told = "\n".join(f"{phase}\n{lines}" for phase, lines in rows.items())
    print(told)
    assert data["passed"] and data["captured"] and data["wrong_on_other_ranks"] == 0, told
    assert (data["ranks"], data["tensor_parallel"], data["model"]) == (size, size, "qwen3-next-80b")
