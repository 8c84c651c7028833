"""Every test starts without switches, whatever the caller's environment holds; the kernel cache alone is kept."""

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from gdn.runtime import env

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def clean_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        ours = name.startswith(env.PREFIXES) or name == "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
        if ours and name != "GDN_CACHE_DIR":
            monkeypatch.delenv(name)
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
