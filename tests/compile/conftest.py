"""Gathers what the session's tests compile and starts the pool; the tests that wait for it run last, and those of them that are
not quick run with the cover.

With pytest-xdist one worker gets this folder (`tests/conftest.py`) and has the pool.
"""

from typing import Any

import pytest
import torch

from tests.compile import session
from tests.compile.session import Task

MARK = "compiles"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker(MARK) is not None and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.cover)
    items.sort(key=lambda item: item.get_closest_marker(MARK) is not None)  # stable


def announced(items: list[pytest.Item]) -> list[Task]:
    found: list[Task] = []
    for item in items:
        for mark in item.iter_markers(MARK):
            arguments: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            try:
                found += mark.args[0](**arguments)
            except Exception:
                continue  # the test fails by it, or skips
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")  # of pytest-xdist
    if not session.config.option.collectonly and not in_worker:
        start(announced(getattr(session, "items", [])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts the pool before the first test of this folder, in the worker that has all of them."""
    if getattr(item.config, "workerinput", {}).get("has_folders") and not session.CURRENT.is_started:
        start(announced(item.session.items))


def start(tasks: list[Task]) -> None:
    if tasks:
        torch.set_num_threads(1)  # threads of one sum that wait for each other's turn on a busy core take many times as long
        session.CURRENT.start(tasks)


def pytest_sessionfinish() -> None:
    session.CURRENT.stop()
