"""A host with the recorded signatures and nothing else: for machines where the host is not installed."""

import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from gdn.integrations import _records
from gdn.integrations._hosts import Host

HOST = "left to the host"  # first part of what every stand-in function returns
_OTHER = object()  # default that the records do not tell


def parameters(host: str, name: str) -> list[list[str]]:
    """The recorded parameters of a function, in the newest version."""
    found: list[list[str]] = list(_records.load(host).values())[-1][name]["parameters"]
    return found


def function(host: str, name: str) -> Any:
    """A function with the recorded signature, which returns (HOST, its name, its arguments)."""
    last, short, parts, has_star = "", name.rpartition(".")[2], [], False
    for parameter, kind, *default in parameters(host, name):
        if last == "positional" and kind != "positional":
            parts.append("/")
        has_star |= kind == "*"
        if kind == "keyword" and not has_star:
            parts.append("*")
            has_star = True
        value = "".join(f"={'_OTHER' if one == '?' else one}" for one in default)
        parts.append(f"{kind if kind in ('*', '**') else ''}{parameter}{value}")
        last = kind
    scope: dict[str, Any] = {"HOST": HOST, "_OTHER": _OTHER}
    exec(f"def {short}({', '.join(parts)}):\n    return HOST, {short!r}, dict(locals())\n", scope)
    return scope[short]


def put(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Puts modules with these contents into `sys.modules`, and their packages where they are not there."""
    for full, content in modules.items():
        parts = full.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name not in sys.modules:
                module = types.ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
            if length > 1:
                setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], sys.modules[name])
        for name, value in content.items():
            setattr(sys.modules[full], name, value)


def install(monkeypatch: pytest.MonkeyPatch, host: Host, *also: str) -> dict[str, Any]:
    """Puts a stand-in of every recorded function into `sys.modules`; returns them by name.

    also: "module.name=recorded name" for each re-export.
    """
    made = {name: function(host.name, name) for name in host.functions if name.split(".")[-2][0].islower()}
    for name in [name for name in sys.modules if name.partition(".")[0] == host.package]:
        monkeypatch.delitem(sys.modules, name)
    places = {name: value for name, value in made.items()}
    places |= {place: made[name] for place, _, name in (one.partition("=") for one in also)}
    for place, value in places.items():
        module, _, name = place.rpartition(".")
        put(monkeypatch, {module: {name: value}})
    return made


class Stream:
    """The current stream as on a GPU, where an adapter keeps what it makes for calls that are alike.

    made: how many of these things were made. number: of the stream. is_capturing: whether it is being captured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, kind: Any) -> None:
        """kind: class of the things, which `of` makes."""
        self.made, self.number, self.is_capturing = 0, 1, False
        of = kind.of

        def on_a_gpu(*given: Any) -> Any:
            self.made += 1
            return replace(of(*given), gpu=0, stream=self.number)

        monkeypatch.setattr(kind, "of", staticmethod(on_a_gpu))
        monkeypatch.setattr(module, "raw_stream", lambda gpu: self.number)
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: self.is_capturing)
