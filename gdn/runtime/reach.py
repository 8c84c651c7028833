"""Kernels that problems reach on a device, and their compilation into a folder by several processes at once."""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdn.device import DeviceSpec
from gdn.problems import Problem
from gdn.runtime import bundle, cache_folder, compiled, registry
from gdn.runtime import explain_problem as choose


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile: a problem, of which only the static fields count, and its configuration."""

    op: str
    backend: str
    module: str
    problem: Problem
    config: Any

    @property
    def key(self) -> str:
        """The kernel in the index of a folder."""
        static, config = self.problem.static_fields(), compiled.compiled_fields(self.config)
        return bundle.kernel_key(self.op, self.backend, static, config)


def kernels(problems: Iterable[Problem], device: DeviceSpec) -> list[Kernel]:
    """The kernels that calls of these problems run under the present switches, each once.

    Two neighbours of the list that differ in their sizes alone, none of which shrinks, stand for all sizes between: where they
    run different kernels, the sizes where these change are searched for, and with them kernels that only sizes between run.
    """
    found: dict[str, Kernel] = {}

    def ask(problem: Problem) -> Any:
        choice = choose(problem, device)
        if choice.backend == "reference":
            return None
        kernel = Kernel(problem.op, choice.backend, registry.operator(problem.op).modules[choice.backend], problem, choice.config)
        found.setdefault(kernel.key, kernel)
        return kernel.backend, compiled.compiled_fields(kernel.config)

    def between(first: Problem, last: Problem, of_first: Any, of_last: Any) -> None:
        if of_first == of_last:
            return
        ends = [problem.sizes() for problem in (first, last)]
        middle: Any = replace(last, **{name: (count + ends[1][name]) // 2 for name, count in ends[0].items()})  # type: ignore[type-var]
        if middle.sizes() in ends:
            return
        of_middle = ask(middle)
        between(first, middle, of_first, of_middle)
        between(middle, last, of_middle, of_last)

    before: tuple[Problem, Any] | None = None
    for problem in problems:
        asked = ask(problem)
        if before is not None and _grows(before[0], problem):
            between(before[0], problem, before[1], asked)
        before = problem, asked
    return list(found.values())


def _grows(first: Problem, last: Problem) -> bool:
    """Whether the second problem is the first at larger sizes."""
    if type(first) is not type(last) or any(last.sizes()[name] < count for name, count in first.sizes().items()):
        return False
    return first.static_fields() == last.static_fields()


def build(
    root: Path, wanted: Sequence[Kernel], command: str, workers: int, done: Callable[[Kernel], None] = lambda kernel: None
) -> None:
    """Compiles kernels into a folder and writes its index; what is there already is kept. Needs no GPU.

    done: called after each kernel. CompileError where one does not compile: the folder then has no index of these kernels.
    """
    cache_folder.make_private(root)
    if (reason := cache_folder.distrust(root, root)) is not None:
        raise cache_folder.Distrusted(f"{reason}; a folder of kernels is loaded only where nobody else may write it")
    entries = {}
    # Processes of their own: a DSL compiles one kernel at a time, and this process need not import one.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        waiting = {pool.submit(_build_one, root, kernel): kernel for kernel in wanted}
        try:
            for future in as_completed(waiting):
                entries[waiting[future].key] = future.result()
                done(waiting[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    sources = {kernel.module: str(importlib.import_module(kernel.module).__file__) for kernel in wanted}
    bundle.write(root, compiled.bundle_versions(), entries, sources, command)


def _end_with_parent() -> None:
    """Ends this worker when the process that started it dies: its queue stays open, so it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _build_one(root: Path, kernel: Kernel) -> str:
    import_module: Any = importlib.import_module
    return compiled.build(root, kernel.op, kernel.backend, import_module(kernel.module), kernel.problem, kernel.config)


def load(wanted: Sequence[Kernel]) -> int:
    """Loads kernels into this process, from the cache or compiled now; returns how many were compiled."""
    before = compiled.compilations()
    for kernel in wanted:
        module: Any = importlib.import_module(kernel.module)
        compiled.get(kernel.op, kernel.backend, module, kernel.problem, kernel.config)
    return compiled.compilations() - before
