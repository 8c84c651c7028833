"""A smaller cover of the kernels, which `.ci/run` compiles at both ends of the DSLs' ranges: `-m low_end` in an environment with
the versions of constraints-low.txt. At the high end the cover compiles the same variants anyway."""

import importlib
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import compiled
from tests.compile import checks, session, variants
from tests.compile.test_variants import KERNELS
from tests.compile.variants import Variant
from tests.compile.variants.delta_rule import key_head_cover, wide_cover

ROOT = Path(__file__).resolve().parents[2]
# What tells apart the forms of a module's kernels, where it has several.
_FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "kernels_tl.chunk": lambda problem, config: (problem.head_k_dim, config.split_chunks > 0),
    "kernels_cute.chunk": lambda problem, config: (problem.dtype, config.split_chunks > 0),
    # Scales of three key heads are copied by rows of another width than a power of two.
    "kernels_tl.mqa_logits.paged": lambda problem, config: (problem.dtype, problem.has_k_scale and problem.num_kv_heads == 3),
}


def _dtype_and_ring(problem: Any, config: Any) -> Any:
    return getattr(problem, "dtype", None), getattr(problem, "ring_rows", None) is not None


def smaller_cover(op: str, module: Any) -> list[Variant]:
    """The first variant of each dtype, with a ring and without, and of each form."""
    form = _FORMS.get(module.__name__, _dtype_and_ring)
    found: dict[Any, Variant] = {}
    for problem, config in variants.cover(op, module):
        found.setdefault(form(problem, config), (problem, config))
    others = [cover(module)[0] for cover in (wide_cover, key_head_cover)] if module.__name__ == "kernels_cute.chunk" else []
    return [*found.values(), *others]


def _tasks(op: str, backend: str, module_name: str) -> list[session.Task]:
    return checks.tasks_of(module_name, smaller_cover(op, importlib.import_module(module_name)))


@pytest.mark.low_end
@checks.compiles(_tasks)
@pytest.mark.parametrize(("op", "backend", "module_name"), KERNELS)
def test_smaller_cover(op: str, backend: str, module_name: str) -> None:
    checks.check(module_name, backend, smaller_cover(op, importlib.import_module(module_name)))


@pytest.mark.low_end
@pytest.mark.skipif("CONSTRAINTS" not in os.environ, reason="CONSTRAINTS names no file of versions")
def test_the_versions_are_those_that_are_meant() -> None:
    """`.ci/run` says which file of versions it installed."""
    lines = (ROOT / os.environ["CONSTRAINTS"]).read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {name: version(name).partition("+")[0] for name in pins} == pins
    of_kernels = compiled.versions("tilelang") | compiled.versions("cute")
    assert of_kernels == {name: pins[name] for name in of_kernels}
