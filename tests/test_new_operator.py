"""A new operator takes its own files, its family's record and, for a new family, a line of `gdn/__init__.py`.

Shown in a copy of the project with a family of one operator, the sample operator. The export of a public function and its
reference are not part of this: the sample operator has none.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = '''\
"""The sample operator."""

from gdn.runtime.registry import Family, Operator

_SAMPLE = Family("tests.sample_operator.cases", "tests.sample_operator.variants", "tests.sample_operator.examples")
OPERATORS = (Operator("sample_scale", _SAMPLE, ("sample_scale",), {"cute": "tests.sample_operator.kernel"}),)
'''
LINES = """\
from gdn.ops.sample import OPERATORS as _SAMPLE

_register(_SAMPLE)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is, and a family."""
    copy = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "gdn", copy / "gdn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("autotune", "benchmarks", "kernels_tl", "kernels_cute", "tests", "pyproject.toml"):
        (copy / name).symlink_to(ROOT / name)
    (copy / "gdn" / "ops" / "sample").mkdir()
    (copy / "gdn" / "ops" / "sample" / "__init__.py").write_text(RECORD, encoding="utf-8")
    with (copy / "gdn" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(LINES)
    return copy


def _run(project: Path, *command: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1", "GDN_CACHE_DIR": str(project / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=project, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_switch_tuner_table_bench_and_compile_tests_find_it(project: Path, tmp_path: Path) -> None:
    _run(project, "-m", "tests.sample_operator.check", str(tmp_path))


def test_the_commands_find_it(project: Path) -> None:
    assert "GDN_BACKEND_SAMPLE_SCALE" in _run(project, "-m", "gdn", "env", "--json")
    explained = json.loads(_run(project, "-m", "gdn", "explain", "sample_scale", "dim=64", "--device", "h100", "--json"))
    assert (explained["backend"], explained["problem"]["dim"]) == ("cute", 64)
    told = _run(project, "-m", "autotune", "tune", "sample_scale", "--compile-only", "--workers", "1")
    assert "sample_scale.cute: 3 of 3 compiled" in told
