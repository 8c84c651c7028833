"""Hash of a kernel's sources, independent of comments, docstrings and formatting.

It covers the kernel module, every module of its DSL's package that it imports (also inside functions), and the leaves that these
import: the problems and tiles of families, each as a whole. An edit elsewhere changes no hash, so tuned tables stay current and
compiled kernels stay in the cache.

Sources are parsed, nothing is imported. The largest kernel takes 0.2 s, once per process.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

# Patterns of the modules outside of the kernel's package that decide what it compiles to. gdn.device does not: its limits and
# peaks choose a configuration, and the configuration is part of every key.
LEAVES = ("gdn.problem", "gdn.ops.*.problem", "gdn.ops.*.tiles")
ROOT = Path(__file__).resolve().parents[2]  # root of the leaves: the folder with gdn/


@functools.cache
def source_hash(file: str) -> str:
    """SHA-256 over all sources that decide a kernel's machine code."""
    modules = _closure(*_place(Path(file).resolve()))
    lines = (f"{name} {modules[name].normal}\n" for name in sorted(modules))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def files(file: str) -> list[Path]:
    """The files that `source_hash` reads for a kernel, sorted: where they hold the same bytes, the hash is the same."""
    return sorted(module.path for module in _closure(*_place(Path(file).resolve())).values())


def content_hash(paths: Iterable[Path]) -> str:
    """SHA-256 over the bytes of files; OSError where one cannot be read."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            content = file.readall()
        digest.update(f"{len(content)}\n".encode() + content)
    return digest.hexdigest()


def forget() -> None:
    """Drops all results, so that files are read again."""
    for cached in (source_hash, _module):
        cached.cache_clear()


@dataclass(frozen=True)
class _Module:
    """Facts about one file that the hash needs; its syntax tree is large and not kept."""

    path: Path
    normal: str
    imports: tuple[str, ...]  # all imports, including names from modules, which may be modules themselves


@functools.cache
def _module(name: str, path: Path) -> _Module:
    tree = ast.parse(path.read_bytes())
    parts = name.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    return _Module(path, _normal(tree.body), tuple(_imported(tree, package)))


def _place(path: Path) -> tuple[str, Path]:
    """Dotted name of a module, and the folder of its top-level package."""
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _path(name: str, base: Path) -> Path | None:
    """File of a module; None where there is none below the base."""
    stem = base.joinpath(*name.split("."))
    return next((path for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if path.is_file()), None)


def _closure(kernel: str, base: Path) -> dict[str, _Module]:
    """The kernel's module, all modules of its package that it imports, and the leaves, by name."""
    package, _, inside = kernel.partition(".")
    found: dict[str, _Module] = {}
    waiting = [kernel]
    while waiting:
        name = waiting.pop()
        is_leaf = any(fnmatchcase(name, pattern) for pattern in LEAVES)
        # Without a package, modules next to the kernel's belong to it.
        is_own = not is_leaf and (not inside or name.partition(".")[0] == package)
        if name in found or not (is_leaf or is_own) or (path := _path(name, base if is_own else ROOT)) is None:
            continue
        module = found[name] = _module(name, path)
        parts = name.split(".") if is_own else []
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]  # importing a module runs its packages
        waiting += module.imports
    return found


def _imported(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """All imports, also inside functions: modules, and what is taken from them, which may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


# Fields about the spelling of a program, or that follow from a node's position.
_ASIDE = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


def _normal(statements: Iterable[ast.stmt]) -> str:
    """SHA-256 of statements without comments, docstrings and formatting; the same for every version of Python."""
    words: list[str] = []
    for statement in statements:
        _spell(statement, words)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _spell(node: ast.AST, words: list[str]) -> None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return  # a docstring
    words.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _ASIDE or (value in (None, []) and not isinstance(node, ast.Constant)):
            continue  # empty; a newer Python has fields that an older one lacks
        words.append(name)
        words += ["["] if isinstance(value, list) else []
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                _spell(one, words)
            else:
                words.append(repr(one))
        words += ["]"] if isinstance(value, list) else []
