"""Points of a host that an adapter replaces, and the common one: an attribute of a module or class."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn.integrations._calls import Calls, asking, serve_or_leave

Undo = Callable[[], str | None]


@dataclass(frozen=True)
class Point:
    """One point.

    path: what the report calls it. guards: dotted names, each recorded, whose signatures must be the recorded ones. install:
    replaces it, and returns the function that takes the replacement back, whose result says what was left alone and why. It may
    raise Unreplaced instead.
    """

    path: str
    guards: tuple[str, ...]
    install: Callable[[Calls], Undo]


class Missing(LookupError):
    """The host has nothing of this name."""


class Unreplaced(Exception):
    """`install` of a point found why it must be left alone, although its signatures are the recorded ones."""


def resolve(path: str, imports: bool = True) -> tuple[Any, str, Any]:
    """Owner (a module or class), last name and value of a dotted name; raises Missing.

    The longest prefix that is a module holds it. imports: whether modules are imported for it.
    """
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        if not imports and module_name not in sys.modules:
            continue
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise
        for name in parts[length:-1]:
            owner = getattr(owner, name, None)
        if owner is not None and hasattr(owner, parts[-1]):
            return owner, parts[-1], getattr(owner, parts[-1])
        break
    raise Missing(path)


def attribute(
    path: str, refusal: Callable[..., str | None], serve: Callable[..., Any], also: tuple[str, ...] = (), guard: str = ""
) -> Point:
    """A function that is replaced where it stands.

    Parameters
    ----------
    path : str
        Dotted name of the function.
    refusal : callable
        Takes what it reads of the arguments of `serve` and `allow_reference`; returns why the call is left to the host, or None.
        Pure.
    serve : callable
        Takes the host's arguments; returns what the host's function would.
    also : tuple of str
        Other names under which the host may hold the same function. Modules that are not imported yet stay so (they will take
        what stands at `path`), and names that hold another object stay.
    guard : str
        Recorded name, where the function is defined elsewhere than at `path`.
    """

    def install(calls: Calls) -> Undo:
        original = resolve(path)[2]
        replacement = serve_or_leave(calls, original, asking(refusal, serve), serve)
        return replace(original, replacement, (path, *also))

    return Point(path, (guard or path,), install)


def replace(original: Any, replacement: Any, paths: tuple[str, ...]) -> Undo:
    """Puts `replacement` where `original` stands, under each of the names that hold it in what is imported."""
    places: list[tuple[Any, str, str]] = []
    for path in paths:
        try:
            owner, name, value = resolve(path, imports=False)
        except Missing:
            continue
        if value is original:
            setattr(owner, name, replacement)
            places.append((owner, name, path))

    def undo() -> str | None:
        foreign = []
        for owner, name, path in places:
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, original)
            else:
                foreign.append(path)
        for path in paths:
            with contextlib.suppress(Missing):
                owner, name, value = resolve(path, imports=False)
                if value is replacement:  # a module took it when it was imported, since
                    setattr(owner, name, original)
        return f"patched since by someone else, left alone: {', '.join(foreign)}" if foreign else None

    return undo
