"""Limits of size and of dependence: what a reader can hold in the head at once.

A limit that something exceeds for a reason has its name in EXCEPTIONS, with the reason.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdn

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn", "kernels_tl", "kernels_cute", "autotune", "benchmarks")

MOST_FILE_LINES = 600
MOST_LINES = 120  # of a function, without signature, docstring and the functions defined in it
MOST_KERNEL_LINES = 200
MOST_PARAMETERS = 10  # but of public operators, their references and registered implementations, and of adapters
MOST_METHODS = 25  # of a class, those of its bases among this project's classes too

# Families of kernels that run another family's.
_RUNS_OTHERS = {("chunk", "recurrent"), *(("gdn_prefill", family) for family in ("chunk", "conv1d", "gdn_decode", "gdn_steps"))}

# Families of operators that run another family's.
_SERVED_BY = {("layer_step", "delta_rule")}

# Qualified name, or path of a file -> why.
EXCEPTIONS: dict[str, str] = {
    "autotune.tune_command.tune": "typer makes the options of a command of its function's parameters, one each",
    "gdn.cli.compile.compile_command": "typer makes the options of a command of its function's parameters, one each",
    "gdn.cli.demo.command.demo": "typer makes the options of a command of its function's parameters, one each",
    "gdn.distributed.chunk.chunk_gated_delta_rule": "the arguments of the operator, and the group",
    "gdn.distributed.conv.causal_conv1d_fn": "the arguments of the operator, and the group",
    "gdn.layers.caches.HybridCaches.__init__": "the options of its three caches, spelled out for type checkers",
}
ORACLES = ("gdn.ops.delta_rule.oracle.oracle_delta_rule",)  # take the arguments of public operators, as the references do

_REFERENCE = re.compile(r"gdn\.ops\.\w+\.(\w+_)?reference(_\w+)?\.[a-z]\w*$")  # a public function of one

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Every function and class in a module, nested ones too, by qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}.{child.name}", child
            yield from _definitions(child, f"{name}.{child.name}")
        else:
            yield from _definitions(child, name)


def _functions() -> Iterator[tuple[str, Function]]:
    for module, path in _modules().items():
        for name, node in _definitions(_tree(path), module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}


def _own_lines(node: Function) -> int:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        return 0
    last = node.end_lineno
    assert last is not None
    return last - body[0].lineno + 1 - sum(_whole_lines(one) for one in _outermost(node))


def _outermost(node: ast.AST) -> Iterator[Function]:
    """The functions defined in a node, without those that are defined in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost(child)


def _whole_lines(node: Function) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def _over(found: dict[str, int], most: int) -> list[str]:
    return [f"{name}: {count}, at most {most}" for name, count in found.items() if count > most and name not in EXCEPTIONS]


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in _modules().values()}
    assert _over(lines, MOST_FILE_LINES) == []


def test_functions_are_short() -> None:
    others, kernels = {}, {}
    for name, node in _functions():
        is_kernel = bool({"cute.kernel", "prim_func"} & _decorators(node))
        (kernels if is_kernel else others)[name] = _own_lines(node)
    assert _over(others, MOST_LINES) + _over(kernels, MOST_KERNEL_LINES) == []


def test_functions_take_few_parameters() -> None:
    found = {}
    for name, node in _functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        short = name.rpartition(".")[2]
        is_operator = "operator" in _decorators(node) or (name.startswith("gdn.ops.") and short in gdn.__all__)
        is_reference = name in ORACLES or _REFERENCE.match(name) is not None
        is_adapter = name.startswith("gdn.integrations.") and "._" not in name.rpartition(".")[0]  # its host's arguments
        if is_operator or is_reference or is_adapter:
            continue
        found[name] = len([one for one in arguments if one.arg not in ("self", "cls")])
    assert _over(found, MOST_PARAMETERS) == []


def test_classes_have_few_methods() -> None:
    classes = {}
    for module, path in _modules().items():
        for name, node in _definitions(_tree(path), module):
            if isinstance(node, ast.ClassDef):
                classes[name] = node
    by_name: dict[str, list[str]] = {}
    for name in classes:
        by_name.setdefault(name.rpartition(".")[2], []).append(name)

    def methods(name: str) -> set[str]:
        node = classes[name]
        own = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        for base in node.bases:
            candidates = by_name.get(ast.unparse(base).rpartition(".")[2], [])
            near = [other for other in candidates if other.partition(".")[0] == name.partition(".")[0]]
            own |= set().union(*(methods(other) for other in near if other != name))
        return own

    assert _over({name: len(methods(name)) for name in classes}, MOST_METHODS) == []


def _imports(module: str) -> set[str]:
    """The modules of this project that a module imports, wherever the statement is."""
    found = set()
    for node in ast.walk(_tree(_modules()[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in _modules() else node.module)
    return (found & _modules().keys()) - {module}


def test_no_import_cycle() -> None:
    """None at all, not even through an import inside a function."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(_imports(module)):
                visit(other, (*path, module))
            done.add(module)

    for module in _modules():
        visit(module, ())


def _edges(package: str) -> set[tuple[str, str]]:
    """Families of a package, and those whose modules theirs import."""
    found, depth = set(), package.count(".") + 1
    for module in _modules():
        if module.startswith(f"{package}."):
            family = module.split(".")[depth]
            others = {other.split(".")[depth] for other in _imports(module) if other.startswith(f"{package}.")}
            found |= {(family, other) for other in others - {family}}
    return found


def test_families_of_operators_are_independent() -> None:
    assert _edges("gdn.ops") == _SERVED_BY


@pytest.mark.parametrize("package", ["kernels_cute", "kernels_tl"])
def test_families_import_common_and_the_families_they_run(package: str) -> None:
    edges = _edges(package)
    assert edges, "no family imports another: the scan finds nothing"
    assert {edge for edge in edges if edge[1] != "common"} <= _RUNS_OTHERS


def test_exceptions_exist_and_say_why() -> None:
    names = {name for module, path in _modules().items() for name, _ in _definitions(_tree(path), module)}
    names |= {str(path.relative_to(ROOT)) for path in _modules().values()}
    assert set(EXCEPTIONS) <= names
    assert all(len(reason.split()) >= 4 for reason in EXCEPTIONS.values())
