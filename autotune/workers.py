"""A pool of worker processes in which a crashing or hanging task loses only itself.

concurrent.futures gives up the whole pool when one process dies, and cannot end a task that hangs inside a compiler; here
each worker is one spawned process with a pipe and a deadline, killed with all its children (nvcc, ptxas) and replaced.

`run` works through tasks that are known beforehand. `Alone` runs one task after the other as they come, in a process that keeps
what earlier ones made.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

START_S = 120.0  # time for a process to start and import, in addition to its first task's own limit
LOOK_S = 0.5  # interval at which a run checks whether it is to stop


class Broken(Exception):
    """Raised by a task that leaves its process unfit for others: its process is replaced."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one task: a value, or the reason of its failure."""

    index: int  # the task's place in the given sequence
    value: Any
    failure: str | None  # None = value is valid
    seconds: float
    started: bool = True  # False: its process did not start, which is not the task's doing


def _serve(function: Callable[..., Any], connection: Connection) -> None:
    """Main loop of a worker: sends "ready", then for each (arguments) received sends (value, failure, whether it is
    the last), until the pipe closes."""
    os.setsid()  # a group of its own, so that a kill reaches the compilers it started
    connection.send("ready")
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        answer: tuple[Any, str | None, bool]
        try:
            answer = (function(*arguments), None, False)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"
            answer = (None, failure, isinstance(error, Broken))
        connection.send(answer)


class _Worker:
    def __init__(self, function: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit CUDA and the DSLs' threads
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ready, self.started = False, 0.0
        self.is_lost = False  # died, hangs, or is unfit for another task
        self.task: int | None = None

    def give(self, index: int, arguments: tuple[Any, ...]) -> None:
        self.task, self.started = index, time.monotonic()
        with suppress(BrokenPipeError):  # it died between two tasks: `_collect` finds that
            self.connection.send(arguments)

    def deadline(self, timeout_s: float) -> float:
        return self.started + (timeout_s if self.ready else START_S)

    def stop(self) -> None:
        if self.process.pid is not None and self.ready:  # before that it has no group of its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, workers: int, timeout_s: float,
    stopped: threading.Event | None = None,
) -> Iterator[Outcome]:  # fmt: skip
    """function(*task) for every task, in spawned processes; outcomes in the order in which they finish.

    function is importable by name, tasks and values pickle. timeout_s bounds one task, not the start of its process. stopped:
    once set, by another thread, every process is ended and no more outcomes come.
    """
    waiting = deque(range(len(tasks)))
    pool: list[_Worker] = []
    try:
        while waiting or any(worker.task is not None for worker in pool):
            while waiting and len(pool) < workers:
                pool.append(_Worker(function))
            for worker in pool:
                if worker.task is None and waiting:
                    index = waiting.popleft()
                    worker.give(index, tasks[index])
            busy = [worker for worker in pool if worker.task is not None]
            rest_s = min(worker.deadline(timeout_s) for worker in busy) - time.monotonic()
            if stopped is not None:
                rest_s = min(rest_s, LOOK_S)
            wait([worker.connection for worker in busy], timeout=max(0.0, rest_s))
            if stopped is not None and stopped.is_set():
                return
            for worker in busy:
                outcome = _collect(worker, timeout_s)
                if outcome is None:
                    continue
                if worker.is_lost:
                    worker.stop()
                    pool.remove(worker)
                yield outcome
    finally:
        for worker in pool:
            worker.stop()


class Alone:
    """One process that runs functions as they are called; it is replaced where one of them crashes or hangs.

    Functions are importable by name, arguments and values pickle. A process starts with the first call.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._worker: _Worker | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        if self._worker is None:
            self._worker = _Worker(_apply)
        self._worker.give(0, (function, *arguments))
        outcome = None
        while outcome is None:
            rest_s = self._worker.deadline(self._timeout_s) - time.monotonic()
            wait([self._worker.connection], timeout=max(0.0, rest_s))
            outcome = _collect(self._worker, self._timeout_s)
        if self._worker.is_lost:
            self.close()
        return outcome

    def close(self) -> None:
        """Ends the process; a later call starts another one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _apply(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _collect(worker: _Worker, timeout_s: float) -> Outcome | None:
    """The outcome of a busy worker, or None while it works on. Afterwards the worker is free, or lost."""
    assert worker.task is not None
    index, seconds = worker.task, time.monotonic() - worker.started
    if worker.connection.poll():
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.is_lost = True
            worker.process.join()
            code = worker.process.exitcode
            cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return Outcome(index, None, f"worker process died ({cause})", seconds, started=worker.ready)
        if not worker.ready:
            worker.ready, worker.started = True, time.monotonic()
            return None
        value, failure, worker.is_lost = message
        worker.task = None
        return Outcome(index, value, failure, seconds)
    if time.monotonic() >= worker.deadline(timeout_s):
        worker.is_lost = True
        limit = f"took longer than {timeout_s:g} s" if worker.ready else f"its process did not start within {START_S:g} s"
        return Outcome(index, None, limit, seconds, started=worker.ready)
    return None
