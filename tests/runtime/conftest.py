"""Every test starts from an environment without switches, with a cache of its own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gdn.runtime import env


@pytest.fixture(autouse=True)
def clean_switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(env.PREFIXES) or name in env.DECLARATIONS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "cache"))
    env.reload()
    yield
    monkeypatch.undo()
    env.reload()


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., env.Switches]:
    """switch(NAME="value", ...) sets variables and reads them."""

    def set_and_read(**values: str) -> env.Switches:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return env.reload()

    return set_and_read
