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
from gdn.problem import Problem
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
    """The kernels that calls of these problems run under the present switches, each once, with a problem that takes it.

    Of problems that differ in sizes alone, one after the other, the second no smaller: where they take different kernels, the
    sizes between them are asked too, by halves, since a narrow range of sizes may take a kernel of its own. A problem with hints
    stands for itself.
    """
    reached = _Reached(device)
    before: dict[tuple[str, str], Problem] = {}  # the last problem of the same static fields
    for problem in problems:
        if any(problem.hints().values()):
            reached.taken(problem)
            continue
        place = (problem.op, problem.static_key())
        if (last := before.get(place)) is not None:
            reached.between(last, problem)
        else:
            reached.taken(problem)
        before[place] = problem
    return list(reached.found.values())


class _Reached:
    """What the problems asked so far take on a device."""

    def __init__(self, device: DeviceSpec) -> None:
        self.found: dict[str, Kernel] = {}
        self._device = device
        self._taken: dict[Problem, Any] = {}
        self._seen: set[tuple[Problem, Any]] = set()

    def taken(self, problem: Problem) -> Any:
        """What a problem takes: equal for two problems of the same static fields that take the same kernel."""
        known = self._taken.get(problem)
        if known is not None:
            return known
        choice = choose(problem, self._device)
        is_compiled = choice.backend != "reference"
        taken = (choice.backend, *compiled.compiled_fields(choice.config).items()) if is_compiled else ("reference",)
        self._taken[problem] = taken
        of_static = (replace(problem, **dict.fromkeys((*problem.sizes(), *problem.hints()), 0)), taken)  # type: ignore[type-var]
        if is_compiled and of_static not in self._seen:
            self._seen.add(of_static)
            module = registry.operator(problem.op).modules[choice.backend]
            kernel = Kernel(problem.op, choice.backend, module, problem, choice.config)
            self.found.setdefault(kernel.key, kernel)
        return taken

    def between(self, first: Problem, last: Problem) -> None:
        """Asks both, and where they differ the sizes half way between them, and so on."""
        parts = [(first, last)]
        while parts:
            low, high = parts.pop()
            sizes, ends = low.sizes(), high.sizes()
            if self.taken(low) == self.taken(high) or any(value > ends[name] for name, value in sizes.items()):
                continue
            half = {name: (value + ends[name]) // 2 for name, value in sizes.items()}
            middle: Any = replace(low, **half)  # type: ignore[type-var]
            if middle not in (low, high):
                parts += [(low, middle), (middle, high)]


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
