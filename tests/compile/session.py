"""Every kernel variant that the tests of a session look at, compiled once and by one pool.

pytest knows its tests before it runs the first: those that compile say what (`checks.compiles`), and the pool starts with all
of it, so that no worker waits for the end of a test, none is started anew for each, and what two tests want is compiled once.
The tests that compile nothing run meanwhile. What was not announced is compiled when a test asks for it: with pytest-xdist
everything, unless one worker has all tests of this folder.
"""

import dataclasses
import importlib
import os
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from autotune.workers import Outcome
from autotune.workers import run as run_in_processes
from gdn.device import H100
from gdn.problem import Problem
from gdn.runtime import compiled
from tests.compile import inspection

Task = tuple[str, Problem, Any]  # kernel module, problem, configuration: None = the default for an H100

TIMEOUT_S = 600  # one variant, next to tests that run at the same time
_NICENESS = 5  # of workers: tests that measure or wait for something go first
# Seconds of a variant of the modules that take longest: they go first, so that all workers end at about the same time.
_SECONDS = {
    "kernels_tl.chunk": 18, "kernels_tl.mqa_logits.paged": 7, "kernels_tl.mqa_logits.ragged": 6, "kernels_tl.recurrent": 2,
    "kernels_cute.chunk": 5, "kernels_cute.topk": 3,
}  # fmt: skip


def key_of(task: Task) -> Hashable:
    """Equal where the machine code is the same: as gdn.runtime.compiled keys its entries, within one session's sources."""
    module_name, problem, config = task
    if config is None:
        config = importlib.import_module(module_name).default_config(problem, H100)
    fields = compiled.compiled_fields(config).items() if dataclasses.is_dataclass(config) else [repr(config)]
    return (module_name, problem.static_key(), type(config), *fields)


def in_order(tasks: Sequence[tuple[Hashable, Task]]) -> list[list[tuple[Hashable, Task]]]:
    """One list per pool, longest first: a worker process holds one DSL."""
    longest_first = sorted(tasks, key=lambda keyed: -_SECONDS.get(keyed[1][0], 1))
    packages = dict.fromkeys(task[0].partition(".")[0] for _, task in longest_first)
    return [[keyed for keyed in longest_first if keyed[1][0].startswith(f"{package}.")] for package in packages]


def inspect_politely(*task: Any) -> inspection.Unread:
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    return inspection.inspect(*task)


def _run(tasks: Mapping[Hashable, Task], stopped: threading.Event) -> Iterator[tuple[Hashable, Outcome]]:
    """Outcomes as they come. May run next to tests that put other objects in place of modules' own: it asks no kernel module
    anything, and its pool is the function that was imported with this module."""
    for group in in_order(list(tasks.items())):
        count = min(len(group), len(os.sched_getaffinity(0)))
        variants = [task for _, task in group]
        for outcome in run_in_processes(inspect_politely, variants, workers=count, timeout_s=TIMEOUT_S, stopped=stopped):
            yield group[outcome.index][0], outcome


class Session:
    """Outcomes by key. One thread reads the pool; the tests' thread waits for what it needs."""

    def __init__(self) -> None:
        self._done: dict[Hashable, Outcome] = {}
        self._announced: set[Hashable] = set()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self, tasks: Sequence[Task]) -> None:
        """Compiles all of them, from now on. Once a session."""
        assert self._thread is None
        distinct = {key_of(task): task for task in tasks}
        self._announced = set(distinct)
        self._thread = threading.Thread(target=self._read, args=(distinct,), daemon=True)
        self._thread.start()

    def _read(self, tasks: Mapping[Hashable, Task]) -> None:
        try:
            for key, outcome in _run(tasks, self._stopped):
                self._keep(key, outcome)
        except BaseException as error:  # for the tests that wait: a thread's own traceback fails nothing
            self._error = error
        finally:
            with self._changed:
                self._announced.clear()  # nobody waits for what will not come
                self._changed.notify_all()

    def _keep(self, key: Hashable, outcome: Outcome) -> None:
        with self._changed:
            self._done[key] = outcome
            self._changed.notify_all()

    def outcomes(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Outcomes in the order of the tasks; waits for those that were announced, and compiles the others."""
        keys = [key_of(task) for task in tasks]
        with self._changed:
            known = self._announced | self._done.keys()
        others = {key: task for key, task in zip(keys, tasks, strict=True) if key not in known}
        for key, outcome in _run(others, self._stopped):
            self._keep(key, outcome)
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._done or key not in self._announced for key in keys))
            if self._error is not None:
                raise RuntimeError("the pool that compiles kernels failed") from self._error
            return [self._done[key] for key in keys]

    def stop(self) -> None:
        """Ends the pool's processes, finished or not."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


CURRENT = Session()
