"""Every kernel under compute-sanitizer, which comes with the CUDA toolkit: out-of-bounds accesses, misused barriers, races.

racecheck follows accesses to shared memory between ordinary barriers. Top-k, the expansion of groups and the fused decode with a
head in one block work so, and run under it, with TileLang's recurrent kernel, whose compiler may put a sum there. It does not
know who waits for what in the others: the chunk and the logits kernels hand tiles over by mbarriers, which copies of the copy
engine complete (and between the SMs of a cluster), the kernels that compose states copy asynchronously, and the fused decode of a
head in several blocks writes into another block's shared memory and tells by an mbarrier. The CuTe kernels of the recurrence, the
convolutions, the split, the gates, the norm and the indexer's other steps use no shared memory, so it has nothing to see there
(tests/compile/expectations.py holds that of every variant).
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.sanitized import GROUPS

pytestmark = pytest.mark.gpu

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180  # of a process: a kernel may wait for ever
# Kernels of these take so long to compile that every call has a process of its own.
SLOW = [group for group in GROUPS if group.startswith(("chunk-", "context"))]
# The oracle runs on the CPU. With all cores for each of several processes a group took 285 s; with one it takes 10 to 35.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# So that every tensor ends where its memory does. racecheck looks at shared memory alone.
EXACT_ENDS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def tools_of(group: str) -> tuple[str, ...]:
    return ("racecheck",) if group == "shared" else ("memcheck", "synccheck")


def start(command: list[str], **environment: str) -> "subprocess.Popen[str]":
    """Starts a session of its own: a kill has to reach what the tool starts."""
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ONE_THREAD | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def said_by(processes: "list[subprocess.Popen[str]]") -> list[str]:
    """Output of each; none is left running, whatever happens."""
    try:
        return [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.skipif(not Path(TOOL).exists(), reason="needs compute-sanitizer, which comes with the CUDA toolkit")
@pytest.mark.parametrize("group", GROUPS)
def test_group(group: str, device: torch.device) -> None:
    call = [sys.executable, "-m", "tests.gpu.sanitized", group]
    calls = [[*call, name] for name in GROUPS[group]] if group in SLOW else [call]
    plain = [start(command) for command in calls]  # compiles outside the tool
    for process, said in zip(plain, said_by(plain), strict=True):
        assert process.returncode == 0, said[-3000:]
    tools = tools_of(group)
    checked = [
        start([TOOL, "--tool", tool, "--error-exitcode", "9", *call], **({} if tool == "racecheck" else EXACT_ENDS))
        for tool in tools
    ]
    for tool, process, said in zip(tools, checked, said_by(checked), strict=True):
        assert process.returncode == 0, f"{tool}: {said[-3000:]}"
        summary = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
        assert summary in said, f"{tool}: {said[-3000:]}"
