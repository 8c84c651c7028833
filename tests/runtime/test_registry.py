"""Records of operators: every operator with kernels is described, and an incomplete record names what it lacks."""

from pathlib import Path

import pytest

import gdn
from autotune.cases import Tunable
from gdn import runtime
from gdn.device import H100
from gdn.models import MODELS
from gdn.runtime import env, registry, select, tuned
from gdn.runtime.registry import Family, Operator
from tests.compile.variants import Variants

WITH_KERNELS = [operator.name for operator in registry.with_kernels()]


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_an_operator_with_kernels_is_described(name: str) -> None:
    operator = registry.operator(name)
    kinds = {type(operator.example(model, fp8=fp8)) for model in MODELS.values() for fp8 in (False, True)}
    (kind,) = kinds
    assert kind.op == name
    assert isinstance(operator.described("cases"), Tunable) and isinstance(operator.described("variants"), Variants)
    assert all(shape.op == name for shape in operator.described("cases").shapes)
    assert type(operator.described("cases").shapes[0].problem) is kind


def test_every_shipped_table_is_an_operators() -> None:
    tables = {path.name.split(".")[0] for path in tuned.SHIPPED.glob("*/*.json")}
    assert tables and tables <= set(WITH_KERNELS)


@pytest.mark.parametrize("name", [name for name, operator in registry.OPERATORS.items() if operator.family is None])
def test_an_operator_without_kernels_has_no_example(name: str) -> None:
    operator = registry.operator(name)
    assert operator.example(MODELS["tiny"], fp8=False) is None
    with pytest.raises(LookupError, match=f"{name}: expected an operator with kernels"):
        operator.described("cases")


def test_an_incomplete_record_names_what_it_lacks() -> None:
    family = Family("gdn.ops.layer_step.cases", "tests.compile.variants.steps", "gdn.ops.layer_step.examples")
    operator = Operator("norm_of_nothing", family, ())
    for part in ("cases", "variants", "examples"):
        with pytest.raises(LookupError, match=f"expected {getattr(family, part)}.norm_of_nothing, which describes the operator"):
            operator.described(part)


def test_every_record_is_one_entry_of_the_registry() -> None:
    """All records of all families are handed in, and their names are distinct."""
    folders = Path(gdn.__file__).parent.glob("ops/*/__init__.py")
    assert sum(path.read_text(encoding="utf-8").count("    Operator(") for path in folders) == len(registry.every())
    with pytest.raises(ValueError, match="chunk: expected one record of this name, got two"):
        registry.add([registry.OPERATORS["chunk"]])


def test_internal_operators_are_no_switches() -> None:
    """No switch orders their backend, no function runs them, and nothing tunes them: nobody calls them."""
    assert registry.INTERNAL and not registry.INTERNAL.keys() & registry.OPERATORS.keys()
    for name, operator in registry.INTERNAL.items():
        assert operator.switch not in env.DECLARATIONS and not operator.functions and name not in WITH_KERNELS
        assert registry.operator(name) is operator and isinstance(operator.described("variants"), Variants)
        with pytest.raises(ValueError, match="op: expected one of chunk"):
            registry.operators(name)


def test_internal_operators_need_no_table() -> None:
    for operator in registry.INTERNAL.values():
        problem = operator.example(MODELS["qwen3-next-80b"], fp8=False)
        assert problem is not None and problem.bytes_moved() > 0
        available = {"cute": runtime.KernelCandidate(operator.name, "cute", operator.modules["cute"])}
        choice = select.choose(problem, H100, available, env.parse({"GDN_TUNED": "strict"}), None, device_name="H100")
        assert choice.backend in ("cute", "reference") and choice.config_source in ("default", "none")
