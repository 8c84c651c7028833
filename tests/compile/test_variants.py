"""Every kernel compiles to sm_90a, and the machine code is what was meant: one variant with the test command, a pairwise cover
of the variants with `.ci/run`, their product on demand."""

import importlib

import pytest

from gdn.runtime import registry
from tests.compile import checks, session, variants

KERNELS = [
    pytest.param(op.name, backend, module, id=f"{op.name}-{backend}")
    for op in registry.every()
    for backend, module in op.modules.items()
]


def _cover(op: str, backend: str, module_name: str) -> list[session.Task]:
    return checks.tasks_of(module_name, variants.cover(op, importlib.import_module(module_name)))


def _first(op: str, backend: str, module_name: str) -> list[session.Task]:
    return _cover(op, backend, module_name)[:1]


@checks.quick
@checks.compiles(_first)
@pytest.mark.parametrize(("op", "backend", "module_name"), KERNELS)
def test_one_variant(op: str, backend: str, module_name: str) -> None:
    checks.check(module_name, backend, variants.cover(op, importlib.import_module(module_name))[:1])


@checks.compiles(_cover)
@pytest.mark.parametrize(("op", "backend", "module_name"), KERNELS)
def test_pairwise_cover(op: str, backend: str, module_name: str) -> None:
    cover = variants.cover(op, importlib.import_module(module_name))
    assert len(cover) >= 8, f"{module_name} refuses nearly everything"
    checks.check(module_name, backend, cover)


@pytest.mark.full
@pytest.mark.parametrize(("op", "backend", "module_name"), KERNELS)
def test_full_product(op: str, backend: str, module_name: str) -> None:
    checks.check(module_name, backend, variants.product(op, importlib.import_module(module_name)))
