"""The machine code of the CuTe kernels does not depend on `quack`, which vLLM imports into its processes: it patches the tensor
classes of the DSL for the whole process.

Two variants of every operator, of its smaller cover, are compiled in a process that has imported quack first, and compared with
what the session's pool compiles without it. QUACK names the folder where quack and what it imports lie (constraints-quack.txt),
as `.ci/run` does; without it they may be installed, or the tests skip.
"""

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import registry
from tests.compile import checks, session
from tests.compile.inspection import Unread, inspect
from tests.compile.test_low_end import smaller_cover

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = 2
MODULES = [(op.name, op.modules["cute"]) for op in registry.every() if "cute" in op.modules]


def _tasks(op: str, module_name: str) -> list[session.Task]:
    return checks.tasks_of(module_name, smaller_cover(op, importlib.import_module(module_name))[:VARIANTS])


def _code(report: Unread) -> dict[str, Any]:
    """What a launch runs, without the kernels' names."""
    return {
        entry: (report.dynamic_shared_bytes[entry], [(one.kernel.registers, one.kernel.max_threads, one.code) for one in kernels])
        for entry, kernels in report.kernels.items()
    }


def main(place: str, *ops: str) -> None:
    """Compiles the variants of these operators with quack imported first, and writes their code. Runs in a process of its own."""
    assert "cutlass" not in sys.modules
    importlib.import_module("quack")
    assert vars(importlib.import_module("cutlass.cute.tensor").TensorSSA)["_quack_extended_indexing"], "it patched nothing"
    codes = {op: [_code(inspect(*task)) for task in _tasks(op, module_name)] for op, module_name in MODULES if op in ops}
    Path(place).write_bytes(pickle.dumps(codes))


@pytest.fixture(scope="module")
def with_quack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Code of the selected operators' variants, in the order of their tasks."""
    folder = os.environ.get("QUACK")
    if folder is None and importlib.util.find_spec("quack") is None:
        pytest.skip("quack is not installed, and QUACK names no folder that has it")
    ops = [item.callspec.params["op"] for item in request.session.items if item.nodeid.startswith(request.node.nodeid)]
    place = tmp_path_factory.mktemp("quack") / "codes"
    code = f"from tests.compile import test_quack; test_quack.main(*{[str(place), *ops]!r})"
    environment = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH"}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    if folder is None and done.returncode and "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"quack cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = pickle.loads(place.read_bytes())
    return found


@checks.compiles(_tasks)
@pytest.mark.parametrize(("op", "module_name"), [pytest.param(*one, id=one[0]) for one in MODULES])
def test_the_same_machine_code_with_quack(op: str, module_name: str, with_quack: dict[str, list[dict[str, Any]]]) -> None:
    tasks = _tasks(op, module_name)
    outcomes = session.CURRENT.outcomes(tasks)
    assert [outcome.failure for outcome in outcomes] == [None] * len(tasks)
    assert len(with_quack[op]) == len(tasks) > 0
    for (_, problem, config), outcome, found in zip(tasks, outcomes, with_quack[op], strict=True):
        assert outcome.value is not None
        assert found == _code(outcome.value), (problem, config)
