"""Every test starts without switches, whatever the caller's environment holds; the kernel cache alone is kept. Workers of
pytest-xdist (`-n 2`) are dealt single tests, but the parts of `PARTS` as a whole."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from gdn.runtime import env

PARTS = ("tests/compile/", "tests/test_typing.py")  # what shares a pool of compilers, and a cache of mypy's

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("suite")


def part_of(test: str) -> str:
    """Name of the part that a test belongs to: the tests of a part go to one worker."""
    return next((part for part in PARTS if test.startswith(part)), test)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    if config.option.dist != "load":  # asked for
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Parts(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return part_of(nodeid)

    return Parts(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["has_folders"] = node.config.option.dist == "load"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # each core has its worker, and threads of one sum would wait for each other's turn
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start


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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of small products: more threads only wait for each other, on a busy machine ten times as long as a call takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., env.Switches]:
    """switch(NAME="value", ...) sets variables and reads them."""

    def set_and_read(**values: str) -> env.Switches:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return env.reload()

    return set_and_read
