"""The session's pool: what is the same kernel, in which order it is compiled, who waits, and what becomes of failures."""

import importlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.workers import Outcome
from gdn.device import H100
from gdn.ops.indexer.problem import ExpandTopkGroupsProblem
from tests import conftest as whole
from tests.compile import checks, conftest, inspection, session
from tests.compile.session import Session, Task, key_of
from tests.compile.variants.base import example
from tests.gpu import conftest as gpu

PROBLEM: ExpandTopkGroupsProblem = example("expand_topk_groups")
EXPAND = "kernels_cute.indexer.expand_topk_groups"


def task_of(ratio: int) -> Task:
    return (EXPAND, replace(PROBLEM, ratio=ratio), None)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[Task]]:
    """Lists of tasks, one for each run of what replaces the pool. Ratio 13 does not compile."""
    runs: list[list[Task]] = []

    def run(tasks: Mapping[Hashable, Task], stopped: threading.Event) -> Iterator[tuple[Hashable, Outcome]]:
        if tasks:
            runs.append(list(tasks.values()))
        for index, (key, task) in enumerate(tasks.items()):
            problem: Any = task[1]
            yield key, Outcome(index, problem.ratio, "does not compile" if problem.ratio == 13 else None, 0.1)

    monkeypatch.setattr(session, "_run", run)
    return runs


def test_the_same_kernel_has_one_key() -> None:
    pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
    module = importlib.import_module(EXPAND)
    default = module.default_config(PROBLEM, H100)
    assert key_of((EXPAND, PROBLEM, None)) == key_of((EXPAND, PROBLEM, default))
    assert key_of((EXPAND, PROBLEM, default)) == key_of((EXPAND, replace(PROBLEM, num_tokens=65), default))
    assert key_of(task_of(4)) != key_of(task_of(2))
    from tests.compile.test_chunk_items import chunk, problem_of

    problem = problem_of(8)
    config = chunk.default_config(problem, H100)
    keys = [key_of(("kernels_cute.chunk", problem, replace(config, num_persistent_clusters=count))) for count in (1, 66, 0)]
    assert keys[0] == keys[1] != keys[2]  # only whether the grid is persistent is compiled


def test_the_longest_go_first_and_a_pool_has_one_dsl() -> None:
    gating = "kernels_cute.gdn_steps.gating"
    names = (gating, "kernels_tl.recurrent", "kernels_cute.chunk", "kernels_tl.chunk", "kernels_cute.topk")
    pools = session.in_order([(name, (name, PROBLEM, None)) for name in names])
    assert [[key for key, _ in pool] for pool in pools] == [
        ["kernels_tl.chunk", "kernels_tl.recurrent"],
        ["kernels_cute.chunk", "kernels_cute.topk", gating],
    ]


def test_what_two_tests_want_is_compiled_once(compiled: list[list[Task]]) -> None:
    pool = Session()
    pool.start([task_of(1), task_of(2), task_of(1)])
    assert [outcome.value for outcome in pool.outcomes([task_of(2), task_of(1), task_of(2)])] == [2, 1, 2]
    assert [outcome.value for outcome in pool.outcomes([task_of(3), task_of(1)])] == [3, 1]  # 3 was not announced
    assert pool.outcomes([task_of(3)])[0].value == 3
    pool.stop()
    assert compiled == [[task_of(1), task_of(2)], [task_of(3)]]


def test_a_test_waits_for_its_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def run(tasks: Mapping[Hashable, Task], stopped: threading.Event) -> Iterator[tuple[Hashable, Outcome]]:
        for index, key in enumerate(tasks):
            assert index == 0 or go_on.wait(60)
            yield key, Outcome(index, index, None, 0.1)

    monkeypatch.setattr(session, "_run", run)
    pool = Session()
    pool.start([task_of(1), task_of(2)])
    assert pool.outcomes([task_of(1)])[0].value == 0
    threading.Timer(0.1, go_on.set).start()
    assert pool.outcomes([task_of(2)])[0].value == 1
    pool.stop()


def test_a_pool_at_work_asks_no_module_that_a_test_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(function: Any, tasks: Sequence[Task], **_: Any) -> Iterator[Outcome]:
        return iter([Outcome(index, task[0], None, 0.1) for index, task in enumerate(tasks)])

    monkeypatch.setattr(session, "run_in_processes", processes)
    tasks = {key_of(task_of(ratio)): task_of(ratio) for ratio in (1, 2)}
    monkeypatch.setattr(session, "key_of", lambda task: pytest.fail("asked for a default while a test may replace it"))
    assert [(key, outcome.value) for key, outcome in session._run(tasks, threading.Event())] == [(key, EXPAND) for key in tasks]


def test_a_pool_that_fails_fails_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tasks: Mapping[Hashable, Task], stopped: threading.Event) -> Iterator[tuple[Hashable, Outcome]]:
        yield next(iter(tasks)), Outcome(0, 0, None, 0.1)
        raise OSError("no processes left")

    monkeypatch.setattr(session, "_run", run)
    pool = Session()
    pool.start([task_of(1), task_of(2)])
    with pytest.raises((RuntimeError, OSError)) as caught:
        pool.outcomes([task_of(2)])
    assert "no processes left" in f"{caught.value} {caught.value.__cause__}"
    pool.stop()


def test_a_variant_that_does_not_compile_is_a_finding(compiled: list[list[Task]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CURRENT", Session())
    monkeypatch.setattr(checks, "violations", lambda *_: [])
    monkeypatch.setattr(inspection, "read", list)
    (failed,) = checks.failures(EXPAND, "cute", [(task_of(ratio)[1], None) for ratio in (12, 13, 14)], H100)
    assert "ratio=13" in failed and "does not compile" in failed


def _item(tasks: Callable[..., list[Task]] | None, **params: Any) -> Any:
    marks = [] if tasks is None else [checks.compiles(tasks).mark]
    return SimpleNamespace(
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda name: marks,
        get_closest_marker=lambda name: marks if marks and name == "compiles" else None,
        added=(added := []),
        add_marker=added.append,
    )


def test_what_tests_announce_is_gathered_and_they_run_last() -> None:
    def broken() -> list[Task]:
        raise ValueError("a bad table")

    items = [_item(lambda ratio: [task_of(ratio)], ratio=7), _item(None), _item(broken), _item(None)]
    assert conftest.announced(items) == [task_of(7)]
    waiting, quick, failing, other = items
    conftest.pytest_collection_modifyitems(items)
    assert [id(item) for item in items] == [id(item) for item in (quick, other, waiting, failing)]
    assert [[mark.name for mark in item.added] for item in items] == [[], [], ["cover"], ["cover"]]


@pytest.mark.parametrize("given", [{"has_folders": True}, {"has_folders": False}, None])
def test_the_worker_that_has_this_folder_starts_the_pool(given: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[Task]] = []
    monkeypatch.setattr(conftest, "start", started.append)
    items = [_item(None), _item(lambda ratio: [task_of(ratio)], ratio=7)]
    for item in items:
        item.config = SimpleNamespace() if given is None else SimpleNamespace(workerinput=given)
        item.session = SimpleNamespace(items=items)
    for is_started in (False, True):
        monkeypatch.setattr(session, "CURRENT", SimpleNamespace(is_started=is_started))
        conftest.pytest_runtest_setup(items[0])
    assert started == ([[task_of(7)]] if given is not None and given["has_folders"] else [])


def test_what_shares_something_is_one_part_of_what_workers_are_dealt() -> None:
    deal = whole.pytest_xdist_make_scheduler
    assert deal(SimpleNamespace(option=SimpleNamespace(dist="worksteal")), None) is None
    split = whole.part_of
    assert split("tests/compile/test_tables.py::test_a[1]") == split("tests/compile/test_items.py::test_b") == "tests/compile/"
    assert split("tests/test_typing.py::test_a") == split("tests/test_typing.py::test_b[1]")
    assert split("tests/ops/test_memo.py::test_a[1]") == "tests/ops/test_memo.py::test_a[1]"


def test_workers_take_the_gpus_in_turn() -> None:
    assert [gpu.gpu_of(worker, 2) for worker in (None, "gw0", "gw1", "gw2", "gw13")] == [0, 0, 1, 0, 1]
