"""The first call of an operator in a fresh process whose kernels are in a folder of `gdn compile`: under 50 ms, no compiler."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import registry

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PROCESSES, MOST_MS = 5, 50.0

# argv: operators with backends as JSON, processes of each. Every process is forked before CUDA or a kernel's module is loaded, so
# that modules of torch alone are shared. Each prints operator, backend, milliseconds of the first public call, kernels compiled,
# and DSLs that are loaded; or the error.
CALLS = """
import json, os, sys, time, traceback
import torch
import gdn
import tvm_ffi
from gdn.runtime import compiled, registry
from autotune import shapes

assert shapes.operators()

def measure(op, backend):
    assert not torch.cuda.is_initialized() and not {"kernels_cute", "kernels_tl"} & sys.modules.keys()
    tunable, device = registry.operator(op).described("cases"), torch.device("cuda")
    call = tunable.case(tunable.shapes[0], device, 1).public_calls(backend)[0]
    torch.zeros(1, device=device)
    compiled._preload(backend)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - start)
    loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"tilelang", "cutlass", "tvm"})
    return [milliseconds, compiled.compilations(), loaded]

for op, backend in json.loads(sys.argv[1]):
    for _ in range(int(sys.argv[2])):
        child = os.fork()
        if not child:
            try:
                found = measure(op, backend)
            except BaseException:
                found = traceback.format_exc()
            print(json.dumps([op, backend, found]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""

CASES = [(operator.name, backend) for operator in registry.with_kernels() for backend in operator.modules]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of all calls below, with an index."""
    from autotune import shapes  # loads the tuner's cases
    from gdn.runtime import devices, explain_problem, reach

    assert shapes.operators()
    import torch

    spec = devices.spec(torch.device("cuda"))
    assert spec is not None
    wanted = []
    for op, backend in CASES:
        operator = registry.operator(op)
        problem = operator.described("cases").shapes[0].problem
        choice = explain_problem(problem, spec, backend)
        wanted.append(reach.Kernel(op, backend, operator.modules[backend], problem, choice.config))
    root = tmp_path_factory.mktemp("folder")
    root.chmod(0o700)
    reach.build(root, list({kernel.key: kernel for kernel in wanted}.values()), "gdn compile", len(os.sched_getaffinity(0)))
    return root


@pytest.fixture(scope="module")
def calls(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """What the processes of each operator and backend say."""
    environment = {**os.environ, "GDN_CACHE_DIR": str(folder), "GDN_COMPILE": "off"}
    # Importing tvm_ffi makes torch look for a GPU. If it asked the driver, no fork of that process could use CUDA: it asks NVML.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Bytecode is written once, as by pip for an installed package.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("bytecode"))
    command = [sys.executable, "-c", CALLS, json.dumps(CASES), str(PROCESSES)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=560)
    assert ran.returncode == 0, ran.stderr
    found: dict[tuple[str, str], list[Any]] = {}
    for line in ran.stdout.splitlines():
        if line.startswith("["):
            op, backend, one = json.loads(line)
            found.setdefault((op, backend), []).append(one)
    return found


@pytest.mark.parametrize(("op", "backend"), CASES)
def test_timing_of_the_first_call_which_compiles_nothing(op: str, backend: str, calls: dict[tuple[str, str], list[Any]]) -> None:
    of_call = calls[op, backend]
    assert len(of_call) == PROCESSES
    for one in of_call:
        assert isinstance(one, list), one  # else an error
        assert one[1:] == [0, []]
    times = [one[0] for one in of_call]
    print(f"{op} ({backend}): {statistics.median(times):.1f} ms of {[round(time, 1) for time in times]}")
    assert statistics.median(times) < MOST_MS, times
