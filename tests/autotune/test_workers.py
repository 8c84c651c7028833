"""One bad candidate loses only itself."""

import os
import signal
import threading
import time

import pytest

from autotune import workers
from tests.autotune import fakes


@pytest.mark.cover
def test_bad_tasks_lose_only_themselves() -> None:
    kinds = ["a", "crash", "b", "raise", "c", "hang", "exit", "d"]
    outcomes = {o.index: o for o in workers.run(fakes.task, [(kind,) for kind in kinds], workers=2, timeout_s=8)}
    assert sorted(outcomes) == list(range(len(kinds)))
    by_kind = {kind: outcomes[i] for i, kind in enumerate(kinds)}
    for kind in "abcd":
        assert by_kind[kind].failure is None
        assert by_kind[kind].value == f"done {kind}"
    assert by_kind["crash"].failure == "worker process died (SIGSEGV)"
    assert by_kind["exit"].failure == "worker process died (exit code 3)"
    assert by_kind["hang"].failure == "took longer than 8 s"
    assert by_kind["raise"].failure is not None and "ValueError: bad tile" in by_kind["raise"].failure


def test_no_tasks() -> None:
    assert list(workers.run(fakes.task, [], workers=2, timeout_s=1)) == []


def test_a_run_that_is_stopped_ends_what_hangs() -> None:
    stopped = threading.Event()
    begin = time.monotonic()
    found = []
    for outcome in workers.run(fakes.task, [("a",), ("hang",), ("b",)], workers=1, timeout_s=600, stopped=stopped):
        found.append(outcome.index)
        threading.Timer(0.2, stopped.set).start()
    assert found == [0] and time.monotonic() - begin < 300


@pytest.mark.cover
def test_one_process_runs_what_comes_and_is_replaced_where_it_is_lost() -> None:
    alone = workers.Alone(timeout_s=8)
    first, second = (alone.call(fakes.task, "pid") for _ in range(2))
    assert first.value == second.value  # which keeps what a task has made
    for kind, failure in (("crash", "worker process died (SIGSEGV)"), ("exit", "worker process died (exit code 3)"),
                          ("hang", "took longer than 8 s"), ("broken", "Broken: unfit (fakes.py")):  # fmt: skip
        assert str(alone.call(fakes.task, kind).failure).startswith(failure)
        third = alone.call(fakes.task, "pid")
        assert third.failure is None and third.value != first.value
        first = third
    assert str(alone.call(fakes.task, "raise").failure).startswith("ValueError: bad tile")
    assert alone.call(fakes.task, "pid").value == first.value  # an error is no reason to start anew
    alone.close()
    alone.close()


def test_a_process_that_died_between_two_tasks_is_named() -> None:
    alone = workers.Alone(timeout_s=30)
    os.kill(int(alone.call(fakes.task, "pid").value.split()[1]), signal.SIGKILL)
    time.sleep(0.1)
    assert alone.call(fakes.task, "a").failure == "worker process died (SIGKILL)"
    assert alone.call(fakes.task, "a").value == "done a"
    alone.close()


def test_a_process_that_dies_as_it_starts_is_not_the_tasks_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_serve", fakes.die_at_start)
    alone = workers.Alone(timeout_s=8)
    for outcome in (*workers.run(fakes.task, [("a",), ("b",)], workers=1, timeout_s=8), alone.call(fakes.task, "a")):
        assert (outcome.started, outcome.failure) == (False, "worker process died (exit code 4)")
