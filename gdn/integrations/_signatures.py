"""Signatures and sources of functions, of an imported object and of a file that nobody imports, described alike.

A parameter is [name, kind] or [name, kind, default]. Kinds: positional, any, *, keyword, **. A default is its `repr` where it is
a plain literal, else "?": the sources alone do not tell what the expression is.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Parameters = list[list[str]]
UNKNOWN = "?"

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "any",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _literal(value: object) -> str:
    plain = value is None or isinstance(value, bool | int | float | str)
    if plain or (isinstance(value, tuple) and all(_literal(one) != UNKNOWN for one in value)):
        return repr(value)
    return UNKNOWN


def of_object(function: Callable[..., Any]) -> Parameters:
    """Parameters of an imported function, through decorators that say what they wrap.

    A function that pybind11 made shows none: they are read from the first line of its docstring.
    """
    if inspect.isbuiltin(function) and (told := of_docstring(function.__doc__ or "")) is not None:
        return told
    found = []
    function = getattr(function, "__func__", function)  # of a bound class method, with its first parameter
    for one in inspect.signature(function).parameters.values():
        default = [] if one.default is inspect.Parameter.empty else [_literal(one.default)]
        found.append([one.name, _KINDS[one.kind], *default])
    return found


def of_node(node: _Function) -> Parameters:
    """Parameters of a function in a parsed file; equal to `of_object` of the same function once imported."""
    given = node.args
    found = [[one.arg, "positional"] for one in given.posonlyargs] + [[one.arg, "any"] for one in given.args]
    if given.defaults:
        for parameter, default in zip(found[-len(given.defaults) :], given.defaults, strict=True):
            parameter.append(_default(default))
    if given.vararg is not None:
        found.append([given.vararg.arg, "*"])
    for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append([one.arg, "keyword", *([] if value is None else [_default(value)])])
    if given.kwarg is not None:
        found.append([given.kwarg.arg, "**"])
    return found


def of_docstring(text: str) -> Parameters | None:
    """Parameters of a function as the first line of its docstring writes them; None where it does not."""
    try:
        return of_node(_function(f"def {text.partition(chr(10))[0]}: ..."))
    except SyntaxError:
        return None


def _function(text: str) -> _Function:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _default(node: ast.expr) -> str:
    try:
        return _literal(ast.literal_eval(node))
    except ValueError:
        return UNKNOWN


def difference(recorded: Parameters, found: Parameters) -> str | None:
    """The first difference of two signatures in words; None where they are equal."""
    for was, now in zip(recorded, found, strict=False):
        if was[:2] != now[:2] or len(was) != len(now):
            return f"expected parameter {_shown(was)}, got {_shown(now)}"
        if len(was) == 3 and was[2] != now[2] and UNKNOWN not in (was[2], now[2]):
            return f"expected parameter {_shown(was)}, got {_shown(now)}"
    if len(recorded) != len(found):
        longer = max(recorded, found, key=len)
        extra = _shown(longer[min(len(recorded), len(found))])
        return f"parameter {extra} is {'gone' if longer is recorded else 'new'}"
    return None


def _shown(parameter: list[str]) -> str:
    name, kind, *default = parameter
    kind = "" if kind == "any" else f" ({kind})"
    return f"{name}{'=' + default[0] if default else ''}{kind}"


def _parsed(path: Path) -> tuple[ast.Module, tuple[str, ...]]:
    return _parse(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _parse(path: Path, written: int) -> tuple[ast.Module, tuple[str, ...]]:
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), tuple(text.splitlines())


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Functions and classes that a module or class defines, under `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _definitions(child)


def find(path: Path, qualified_name: str) -> _Definition | None:
    """The first definition of this name ("function" or "Class.method") in a file; None where there is none."""
    node: ast.AST = _parsed(path)[0]
    for name in qualified_name.split("."):
        found = next((one for one in _definitions(node) if one.name == name), None)
        if found is None:
            return None
        node = found
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return node


def source_of_node(path: Path, node: _Definition) -> str:
    """Hash of a definition's lines, decorators included, without their indentation."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    lines = _parsed(path)[1][first - 1 : node.end_lineno]
    text = textwrap.dedent("\n".join(line.rstrip() for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_of_object(function: Callable[..., Any]) -> str | None:
    """Hash of an imported function's source; None where it has none (compiled, or made from text)."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    path = Path(code.co_filename) if code is not None else None
    if code is None or path is None or not path.is_file():
        return None
    for node in ast.walk(_parsed(path)[0]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if min([node.lineno, *(one.lineno for one in node.decorator_list)]) == code.co_firstlineno:
                return source_of_node(path, node)
    return None


def attributes_of_node(node: ast.ClassDef) -> set[str]:
    """Names that a class defines, and those that its methods assign to `self`."""
    found = {one.name for one in _definitions(node)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            if isinstance(one.value, ast.Name) and one.value.id == "self":
                found.add(one.attr)
    for one in node.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def attributes_of_object(cls: type) -> set[str]:
    """The same of an imported class, those of its bases included."""
    found = set(dir(cls))
    for base in cls.__mro__:
        try:
            path = Path(inspect.getsourcefile(base) or "")
        except TypeError:  # built in
            continue
        node = find(path, base.__qualname__) if path.is_file() and "<locals>" not in base.__qualname__ else None
        if isinstance(node, ast.ClassDef):
            found |= attributes_of_node(node)
    return found
