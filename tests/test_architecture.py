"""Rules that the import contracts cannot say: that low modules import nothing else of ours, where the environment is read, and
that kernel modules look alike."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import gdn
from gdn.runtime import registry

ROOT = Path(__file__).resolve().parent.parent
KERNEL_PACKAGES = ("kernels_tl", "kernels_cute")
MODULES = sorted({module for op in registry.every() for module in op.modules.values()})
LEAVES = ("gdn.problem", "gdn.device", "gdn.ops.*.problem", "gdn.ops.*.tiles")


def _sources(*packages: str) -> list[Path]:
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert found
    return found


def _imports(path: Path) -> Iterator[str]:
    """Every imported name in full: `from a import b` is "a.b"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, name) or fnmatchcase(module, name + ".*") for name in allowed)


@pytest.mark.parametrize("package", KERNEL_PACKAGES)
def test_kernels_import_the_leaves_of_gdn_alone(package: str) -> None:
    for path in _sources(package):
        for module in _imports(path):
            if _within(module, ("gdn", *KERNEL_PACKAGES, "autotune", "benchmarks")):
                assert _within(module, (*LEAVES, package)), f"{path}: {module}"


GROUND = (
    "gdn.problem",
    "gdn.device",
    "gdn.models",
    "gdn.reference_modes",
    "gdn.ops.*.problem",
)


def _files(*patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted((ROOT / "gdn").glob(pattern))]


@pytest.mark.parametrize(
    ("file", "allowed"),
    [
        ("problem.py", ("gdn.device",)),
        ("device.py", ()),
        ("models.py", ()),
        ("ops/*/examples.py", (*GROUND, "gdn.core.example")),
        ("ops/*/problem.py", GROUND),
        ("ops/*/tiles.py", GROUND),
    ],
)
def test_leaves_import_the_standard_library_and_leaves_below_them(file: str, allowed: tuple[str, ...]) -> None:
    for path in _files(file):
        for module in _imports(path):
            assert _within(module, allowed) or module.split(".")[0] in sys.stdlib_module_names, f"{path}: {module}"


def test_references_lean_on_the_ground_and_on_other_references() -> None:
    references = ("gdn.ops.*.reference", *(f"gdn.ops.delta_rule.{name}" for name in ("reference_replay", "tokens", "crossing")))
    files = _files("ops/*/reference*.py", "ops/delta_rule/tokens.py")
    assert len(files) > 4
    for path in files:
        for module in _imports(path):
            if _within(module, ("gdn", *KERNEL_PACKAGES, "autotune", "benchmarks")):
                assert _within(module, (*GROUND, *references)), f"{path}: {module}"


def test_testing_and_oracles_lean_on_the_ground() -> None:
    """They judge the operators and the references: so they know neither."""
    for path in _files("testing/*.py", "ops/*/oracle.py", "ops/*/inputs.py"):
        for module in _imports(path):
            if _within(module, ("gdn", *KERNEL_PACKAGES, "autotune", "benchmarks")):
                family = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
                own = (f"{family}.inputs", f"{family}.oracle", "gdn.ops.delta_rule.oracle")
                assert _within(module, (*GROUND, *own, "gdn.testing")), f"{path}: {module}"


def test_adapters_import_public_names_alone() -> None:
    """Of the runtime: switches, guards, log, streams. Hosts inside functions only, so that importing an adapter loads none."""
    allowed = (
        "gdn.integrations",
        "gdn.layers",
        "gdn.warmup",
        "gdn.runtime.env",
        "gdn.runtime.guards",
        "gdn.runtime.log",
        "gdn.runtime.streams",
    )
    for path in _sources("gdn/integrations"):
        for module in _imports(path):
            if _within(module, ("gdn", *KERNEL_PACKAGES, "autotune", "benchmarks")):
                public = module.startswith("gdn.") and module.removeprefix("gdn.") in gdn.__all__
                assert module == "gdn" or public or _within(module, allowed), f"{path}: {module}"


def test_nothing_but_the_command_line_imports_adapters() -> None:
    for path in _sources("gdn", "autotune", "benchmarks", *KERNEL_PACKAGES):
        if path.relative_to(ROOT).parts[:2] not in (("gdn", "integrations"), ("gdn", "cli")):
            assert not any(_within(module, ("gdn.integrations",)) for module in _imports(path)), path


def test_one_module_reads_the_environment() -> None:
    """`os` may be used for files and processes; its environment only where the switches are declared."""
    readers = set()
    for path in _sources("gdn", "autotune", "benchmarks", *KERNEL_PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "getenv", "environb"):
                readers.add(str(path.relative_to(ROOT)))
    # kernels_cute sets the DSL's target, which the DSL takes from its environment alone.
    assert readers - {"kernels_cute/common/build.py", "kernels_cute/__init__.py"} == {"gdn/runtime/env.py"}


def test_no_star_imports_no_future_annotations_in_kernels_no_print() -> None:
    for path in _sources("gdn", "autotune", "benchmarks", *KERNEL_PACKAGES):
        text = path.read_text(encoding="utf-8")
        for module in _imports(path):
            assert not module.endswith(".*"), f"{path}: star import of {module}"
            if path.relative_to(ROOT).parts[0] in KERNEL_PACKAGES:
                assert module != "__future__.annotations", f"{path}: breaks struct annotations of the DSLs"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}: print"


@pytest.mark.parametrize("name", MODULES)
def test_kernel_modules_export_the_contract(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ and "[" in module.__doc__, "the docstring states the maths and the shapes"
    assert is_dataclass(module.Config) and module.Config.__dataclass_params__.frozen
    for field in fields(module.Config):
        assert field.type in (int, bool), f"{name}.Config.{field.name}: {field.type}"
    order = ["Config", "refusal", "fits", "default_config", "configs", "compile", "workspace_bytes", "launch"]
    for function in order[1:]:
        assert callable(getattr(module, function)), function
    parameters = {
        "refusal": ["problem"],
        "fits": ["problem", "config", "device"],
        "default_config": ["problem", "device"],
        "configs": ["problem", "device"],
        "compile": ["problem", "config"],
        "workspace_bytes": ["problem", "config"],
    }
    for function, expected in parameters.items():
        assert list(inspect.signature(getattr(module, function)).parameters) == expected, function
    assert list(inspect.signature(module.launch).parameters)[0] == "compiled"
