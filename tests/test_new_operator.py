"""A new operator takes at most ten files, and everything that goes by operator then finds it.

Shown in a copy of the project, with the sample operator: a public function with its reference, a CuTe kernel, a case of the
tuner, an example, tests and documentation. One thing cannot be shown without a GPU: the rows of MEASURED.md, which a benchmark
writes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sample_operator

OP = "sample_scale"
MOST_FILES = 10
# Files with tests of the operator by its name.
BY_NAME = (
    "tests/autotune/test_cases.py", "tests/cli/test_explain_arguments.py", "tests/compile/test_pairwise.py",
    "tests/compile/test_variants.py", "tests/ops/spoiling/test_spoiling.py", "tests/ops/test_defaults.py",
    "tests/ops/test_docstrings.py", "tests/ops/test_empty.py", "tests/ops/test_gradients.py", "tests/ops/test_kinds.py",
    "tests/ops/test_library_dynamic.py", "tests/ops/test_library_opcheck.py", "tests/ops/test_library_shapes.py",
    "tests/ops/test_sample_scale.py", "tests/ops/test_strides.py", "tests/reference/test_every_reference.py",
    "tests/runtime/test_empty_problems.py", "tests/runtime/test_explain.py", "tests/runtime/test_registry.py",
    "tests/test_architecture.py",
)  # fmt: skip
# Tests that would name an operator as missing, or as one too many.
OF_ALL = {
    "tests/fuzz/test_fuzz.py": ("test_every_operator_with_kernels_is_drawn",),
    "tests/ops/spoiling/test_spoiling.py": ("test_every_public_operator_has_calls_and_rows", "test_every_spoiling_is_used"),
    "tests/reference/test_every_reference.py": ("test_the_table_holds_every_reference",),
    "tests/runtime/test_explain.py": ("test_every_operator_is_called_here",),
    "tests/runtime/test_registry.py": ("test_every_record_is_one_entry_of_the_registry",),
    "tests/runtime/test_select.py": ("test_every_public_function_belongs_to_one_operator",),
    "tests/test_architecture.py": ("test_kernels_import_the_leaves_of_gdn_alone", "test_references_lean_on_the_ground"),
    "tests/test_readme.py": ("test_the_table_of_functions_is_complete",),
    "tests/test_structure.py": ("test_families_of_operators_are_independent", "test_no_import_cycle"),
}  # fmt: skip
ON_A_GPU = ("test_defaults.py", "test_empty.py", "test_first_call.py", "test_inference_only.py", "test_strides.py")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is, and the sample operator."""
    place = tmp_path_factory.mktemp("project")
    sample_operator.copied(place)
    sample_operator.add(place)
    return place


def _run(project: Path, *command: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1", "GDN_CACHE_DIR": str(project / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=project, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pytest(project: Path, *options: str) -> str:
    return _run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options)


def test_it_takes_ten_files(project: Path) -> None:
    """Counted: what the copy has that the project has not, or has otherwise."""
    before, after = sample_operator.contents(sample_operator.ROOT), sample_operator.contents(project)
    assert before.keys() <= after.keys()
    assert len([name for name in after if after[name] != before.get(name)]) <= MOST_FILES


def test_the_commands_find_it(project: Path) -> None:
    assert "GDN_BACKEND_SAMPLE_SCALE" in _run(project, "-m", "gdn", "env", "--json")
    explained = json.loads(_run(project, "-m", "gdn", "explain", OP, "dim=64", "--device", "h100", "--json"))
    assert (explained["function"], explained["backend"], explained["problem"]["dim"]) == (OP, "cute", 64)
    told = _run(project, "-m", "autotune", "tune", OP, "--compile-only", "--workers", "1")
    assert "sample_scale.cute: 3 of 3 compiled" in told


def test_the_tuner_the_benchmarks_and_the_makers_of_calls_find_it(project: Path, tmp_path: Path) -> None:
    _run(project, "-m", "tests.sample_operator.check", str(tmp_path))


@pytest.mark.cover
def test_the_tests_of_every_operator_find_it(project: Path) -> None:
    """Each of these files has tests of the operator, which pass, and so do those of all operators."""
    whole = [name for names in OF_ALL.values() for name in names]
    told = _pytest(project, "-rA", "-k", " or ".join(["sample", *whole]), *dict.fromkeys((*BY_NAME, *OF_ALL)))
    assert set(BY_NAME) <= _passed(told, "sample")
    for file, names in OF_ALL.items():
        assert all(file in _passed(told, name) for name in names), file


def _passed(told: str, name: str) -> set[str]:
    """Files with a test that passed and has this in its name or the file's."""
    lines = re.findall(r"^PASSED ((\S+?\.py)::.*)$", told, re.MULTILINE)
    return {file for test, file in lines if name in test}


@pytest.mark.cover
def test_the_tests_that_take_minutes_find_it(project: Path) -> None:
    """Its kernel's variants compile, and more calls hold its rows."""
    told = _pytest(project, "-rA", "-m", "cover", "-k", "sample", *BY_NAME)
    assert {"tests/compile/test_variants.py", "tests/ops/spoiling/test_spoiling.py"} <= _passed(told, "sample")


@pytest.mark.cover
def test_the_gpu_tests_find_it(project: Path) -> None:
    """They can only be listed here."""
    listed = _pytest(project, "--collect-only", "-m", "gpu", "-k", OP, "tests/gpu")
    assert {f"tests/gpu/{name}" for name in ON_A_GPU} <= {line.partition("::")[0] for line in listed.splitlines()}
