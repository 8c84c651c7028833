"""The chunk kernels under compute-sanitizer, which comes with the CUDA toolkit: out-of-bounds accesses, misused barriers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.delta_rule import backends
from tests.gpu.sanitized import CALLS

pytestmark = pytest.mark.gpu

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
ONLY = {"padded": "cute"}  # the other kernel does not serve it
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path(TOOL).exists(), reason="needs compute-sanitizer, which comes with the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize(("backend", "name"), [(b, n) for b in backends("chunk") for n in CALLS if ONLY.get(n, b) == b])
def test_chunk(backend: str, name: str, tool: str, device: torch.device) -> None:
    call = [sys.executable, "-m", "tests.gpu.sanitized", backend, name]
    subprocess.run(call, check=True, cwd=ROOT)  # compiles outside the tool
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that every tensor ends where its memory does
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", *call]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
