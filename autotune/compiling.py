"""Compilation of candidates in processes, while others are timed."""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from autotune import tuning, workers
from autotune.tuning import Candidate, Kernel


class Compiler:
    """Fills the disk cache from a thread, in the order of the tasks; candidates say when they are done, and how they failed.

    on_done: called with each candidate, from that thread. As a context, it ends the processes when it is left.
    """

    def __init__(
        self, wanted: Sequence[tuple[Kernel, Candidate]], num_workers: int, timeout_s: float,
        on_done: Callable[[Candidate], None] = lambda candidate: None,
    ) -> None:  # fmt: skip
        groups: dict[Any, list[tuple[Kernel, Candidate]]] = {}
        for kernel, candidate in wanted:
            groups.setdefault((kernel, tuning.code_key(candidate)), []).append((kernel, candidate))
        self._groups, self._on_done = list(groups.values()), on_done
        self._options: dict[str, Any] = {"workers": num_workers, "timeout_s": timeout_s}
        self._stopped, self._changed = threading.Event(), threading.Condition()
        self._is_over = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Compiler":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Waits for another candidate, a moment, and at most so long; whether more are to come."""
        with self._changed:
            if not self._is_over:
                self._changed.wait(min(max(0.0, seconds), workers.LOOK_S))  # what is done by now may have been said already
            if self._fault is not None:
                raise self._fault
            return not self._is_over

    def wait_for_all(self, deadline: float) -> None:
        """deadline: on the clock of time.monotonic()."""
        while time.monotonic() < deadline and self.wait(deadline - time.monotonic()):
            pass

    def _run(self) -> None:
        tasks = [(group[0][0], group[0][1].problem, group[0][1].config) for group in self._groups]
        try:
            for outcome in workers.run(tuning.compile_one, tasks, stopped=self._stopped, **self._options):
                for _, candidate in self._groups[outcome.index]:
                    candidate.failure, candidate.spills, candidate.is_done = outcome.failure, outcome.value, outcome.started
                    self._on_done(candidate)
                with self._changed:
                    self._changed.notify_all()
        except BaseException as fault:
            self._fault = fault
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
