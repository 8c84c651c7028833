"""One bad candidate loses only itself."""

import threading
import time

from autotune import workers
from tests.autotune import fakes


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
