"""A host that exists for the tests alone, with its recorded signatures."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gdn.integrations import _handle, _hosts, _records
from tests.integrations import record

KERNELS = '''
"""Functions of the host."""


def double(x, scale=2, *, bias=None):
    return ("host", x, scale, bias)


class Layer:
    width = 4

    def __init__(self):
        self.weight = 3

    def forward(self, x):
        return ("host", x)
'''


@dataclass
class FakeHost:
    """The host's record, and its package: `rewrite` changes its files and forgets what was imported."""

    host: _hosts.Host
    folder: Path

    def rewrite(self, text: str) -> None:
        (self.folder / "kernels.py").write_text(text)
        self.forget()

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fakehost"]:
            del sys.modules[name]
        sys.path_importer_cache.clear()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    """An installed and recorded host with a function, a class and a re-export of the function."""
    folder = tmp_path / "fakehost"
    folder.mkdir()
    (folder / "__init__.py").write_text("from fakehost.kernels import Layer, double\n")
    (folder / "kernels.py").write_text(KERNELS)
    host = _hosts.Host(
        name="fakehost",
        package="fakehost",
        distributions=("fakehost",),
        tested="1.0",
        functions=("fakehost.kernels.double", "fakehost.kernels.Layer.forward"),
        classes={"fakehost.kernels.Layer": ("weight", "width")},
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file rewritten within a second would be read from its cache
    monkeypatch.setattr(_records, "FOLDER", tmp_path)
    monkeypatch.setitem(_hosts.HOSTS, "fakehost", host)
    _records.load.cache_clear()
    record.write(host, folder, "1.0")
    _records.load.cache_clear()
    made = FakeHost(host, folder)
    yield made
    made.forget()
    _records.load.cache_clear()
    assert "fakehost" not in {name for name, _ in _handle._enabled}, "a test left its handle enabled"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has an H100."""
    monkeypatch.setattr("gdn.integrations._calls._capabilities", lambda: [(9, 0)])


def host_module(name: str = "fakehost") -> Any:
    return __import__(name)
