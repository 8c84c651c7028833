"""The first call of an operator in a fresh process whose kernels are in a folder of `gdn compile`: under 50 ms, no compiler."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from gdn.runtime import registry

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PROCESSES, MOST_MS = 5, 50.0

# argv: operator, backend. Prints milliseconds of the first public call, kernels compiled, and DSLs that are loaded.
CALL = """
import json, sys, time
import torch
import gdn
from gdn.runtime import compiled, env, registry
from autotune import shapes

operator = registry.operator(sys.argv[1])
tunable, device = operator.described("cases"), torch.device("cuda")
call = tunable.case(tunable.shapes[0], device, 1).public_calls(sys.argv[2])[0]
torch.zeros(1, device=device)
compiled._preload(sys.argv[2])
import tvm_ffi
torch.cuda.synchronize()
start = time.perf_counter()
call()
torch.cuda.synchronize()
milliseconds = 1e3 * (time.perf_counter() - start)
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"tilelang", "cutlass", "tvm"})
print(json.dumps([milliseconds, compiled.compilations(), loaded]))
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
    reach.build(root, list({kernel.key: kernel for kernel in wanted}.values()), "gdn compile", 8)
    return root


@pytest.mark.parametrize(("op", "backend"), CASES)
def test_the_first_call_compiles_nothing_and_is_quick(op: str, backend: str, folder: Path) -> None:
    environment = {**os.environ, "GDN_CACHE_DIR": str(folder), "GDN_COMPILE": "off"}
    times = []
    for _ in range(PROCESSES):
        ran = subprocess.run(
            [sys.executable, "-c", CALL, op, backend], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        milliseconds, compilations, loaded = json.loads(ran.stdout.splitlines()[-1])
        assert (compilations, loaded) == (0, [])
        times.append(milliseconds)
    assert statistics.median(times) < MOST_MS, times
