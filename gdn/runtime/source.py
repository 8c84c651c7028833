"""Hash of a kernel's sources, independent of comments, docstrings and formatting.

It covers the kernel module, every module of its DSL's package that it imports (also inside functions), and the definitions
that these use from the leaves: the problem class with its bases, but not the problems of other operators. An edit elsewhere
changes no hash, so tuned tables stay current and compiled kernels stay in the cache.

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

_EVERYTHING = "*"  # name for a leaf that is imported as a module

Taken = tuple[str, str]  # a leaf, and the name taken from it


@functools.cache
def source_hash(file: str) -> str:
    """SHA-256 over all sources that decide a kernel's machine code."""
    modules = _closure(*_place(Path(file).resolve()))
    lines = [f"{name} {modules[name].normal}" for name in sorted(modules)]
    lines += _definitions({taken for module in modules.values() for taken in module.taken})
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def files(file: str) -> list[Path]:
    """The files that `source_hash` reads for a kernel, sorted: where they hold the same bytes, the hash is the same."""
    base = _place(Path(file).resolve())[1]
    modules = _closure(*_place(Path(file).resolve()))
    leaves, waiting = set[str](), [leaf for module in modules.values() for leaf, _ in module.taken]
    while waiting:
        leaf = waiting.pop()
        if leaf not in leaves and _path(leaf, ROOT) is not None:
            leaves.add(leaf)
            waiting += [taken for one in _leaf(leaf).values() for taken, _ in one.taken]
            waiting += [f"{leaf}.{name}" for one in _leaf(leaf).values() for _, name in one.taken]
    found = [_path(name, base) for name in modules] + [_path(name, ROOT) for name in leaves]
    return sorted({path for path in found if path is not None})


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
    for cached in (source_hash, _module, _leaf):
        cached.cache_clear()


@dataclass(frozen=True)
class _Module:
    """Facts about one file that the hash needs; its syntax tree is large and not kept."""

    normal: str
    imports: tuple[str, ...]  # all imports, including names from modules, which may be modules themselves
    taken: tuple[Taken, ...]


@functools.cache
def _module(name: str, path: Path) -> _Module:
    tree = ast.parse(path.read_bytes())
    parts = name.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    imported = list(_imported(tree, package))
    imports = [module if one is None else f"{module}.{one}" for module, one in imported] + [module for module, _ in imported]
    return _Module(_normal(tree.body), tuple(imports), tuple(_taken(imported)))


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
    """The kernel's module and all modules of its package that it imports, by name."""
    package, _, inside = kernel.partition(".")
    found: dict[str, _Module] = {}
    waiting = [kernel]
    while waiting:
        name = waiting.pop()
        # Without a package, modules next to the kernel's belong to it.
        if name in found or (inside and name.partition(".")[0] != package):
            continue
        if (path := _path(name, base)) is None:
            continue
        module = found[name] = _module(name, path)
        parts = name.split(".")
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]  # importing a module runs its packages
        waiting += module.imports
    return found


def _imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[str, str | None]]:
    """All imports, also inside functions: a module, and the name taken from it, None for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def _taken(imported: Iterable[tuple[str, str | None]]) -> Iterator[Taken]:
    """The names that are imported from leaves."""
    for module, name in imported:
        if _is_leaf(module):
            yield module, _EVERYTHING if name is None else name
        elif _is_leaf(f"{module}.{name}"):
            yield f"{module}.{name}", _EVERYTHING


def _is_leaf(module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in LEAVES)


@dataclass(frozen=True)
class _Definition:
    """One top-level name of a leaf."""

    normal: str  # "" of an import: what it takes is defined elsewhere
    uses: frozenset[str]  # names; those of the same leaf count
    taken: tuple[Taken, ...] = ()  # of an import


@functools.cache
def _leaf(name: str) -> dict[str, _Definition]:
    """Top-level definitions of a leaf, by name."""
    path = _path(name, ROOT)
    found: dict[str, _Definition] = {}
    for node in ast.parse(path.read_bytes()).body if path is not None else []:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                one = type(node)(**{**vars(node), "names": [alias]})
                found[alias.asname or alias.name] = _Definition("", frozenset(), tuple(_taken(_imported(one, []))))
        else:
            used = frozenset(one.id for one in ast.walk(node) if isinstance(one, ast.Name))
            found |= dict.fromkeys(_names(node), _Definition(_normal([node]), used))
    return found


def _names(node: ast.stmt) -> Iterable[str]:
    """Names that a top-level statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _definitions(taken: Iterable[Taken]) -> list[str]:
    """Definitions taken from leaves and everything that they use there: names with normal forms, sorted."""
    found: dict[Taken, str] = {}
    waiting = list(taken)
    while waiting:
        leaf, name = waiting.pop()
        if (leaf, name) in found:
            continue
        found[leaf, name] = ""
        defined = _leaf(leaf)
        if name == _EVERYTHING:
            waiting += [(leaf, one) for one in defined]
        elif name in defined:
            one = defined[name]
            found[leaf, name] = one.normal
            waiting += one.taken
            waiting += [(leaf, used) for used in one.uses if used in defined]
        else:  # a module of a leaf that is a package
            waiting += [(f"{leaf}.{name}", _EVERYTHING)] if _path(f"{leaf}.{name}", ROOT) is not None else []
    return sorted(f"{leaf}.{name} {normal}" for (leaf, name), normal in found.items() if normal)


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
