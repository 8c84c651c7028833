"""Search for a kernel's fastest configuration per shape: compile, check, time, then time the best again, interleaved."""

import importlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autotune import cases, workers
from autotune.journal import DROPPED, INTERRUPTED, STARTED, TIMED, Journal, Record
from autotune.shapes import Shape
from gdn import runtime
from gdn.device import DeviceSpec
from gdn.problem import Problem
from gdn.runtime import KernelCandidate, compiled, registry, source
from gdn.testing import machine_code, timing

HANG_S = 300  # limit of a candidate's check or timing, which includes the exact answer of its shape
FINALISTS = 4
FINALIST_MARGIN = 1.15  # times the fastest's time: slower candidates are not timed again
DEFAULT_MARGIN = 0.995  # times the default's time: a smaller gain is noise, and the default stays


class DeviceLost(RuntimeError):
    """A launch broke the CUDA context, so that nothing runs in this process any more. The journal has the candidate."""


@dataclass(frozen=True)
class Kernel:
    """One kernel module, by name, so that it can be pickled for worker processes."""

    op: str
    backend: str
    module_name: str

    @property
    def module(self) -> Any:
        return importlib.import_module(self.module_name)

    @property
    def source(self) -> str:
        return source.source_hash(self.module.__file__)


def kernels(op: str, backend: str | None) -> list[Kernel]:
    """Kernels of an operator, all or a backend's. ValueError where there is no such kernel."""
    modules = registry.operator(op).modules
    found = [Kernel(op, name, module) for name, module in modules.items() if backend in (None, name)]
    if not found:
        raise ValueError(f"backend: expected one of {', '.join(modules) or 'none (no kernel yet)'} for {op}, got {backend!r}")
    return found


def compile_one(kernel: Kernel, problem: Problem, config: Any) -> str:
    """Fills the disk cache; runs in a worker process. RuntimeError for a kernel that spills, which no table may name."""
    place = compiled.ensure(kernel.op, kernel.backend, kernel.module, problem, config)
    for path in compiled.libraries_of(place).values():
        try:
            found = machine_code.kernels(path.read_bytes())
        except machine_code.MachineCodeError:  # no disassembler on this machine: the tests inspect every shipped entry
            continue
        for one in found:
            if one.spills or one.stack_bytes:
                raise RuntimeError(f"{one.name} spills: {one.spills} local loads and stores, {one.stack_bytes} bytes of stack")
    return str(place)


@dataclass
class Candidate:
    """One configuration of one compile key."""

    problem: Problem
    config: Any
    failure: str | None = None  # why it did not compile


@dataclass
class Plan:
    """Candidates of one kernel: the configurations of each shape, and each of them once per compile key."""

    kernel: Kernel
    refusals: dict[str, str] = field(default_factory=dict)  # shape name -> why the kernel does not serve it
    configs: dict[str, list[Any]] = field(default_factory=dict)  # shape name -> configurations, the default first
    candidates: dict[tuple[str, Any], Candidate] = field(default_factory=dict)


def plan(
    kernel: Kernel, shapes: Iterable[Shape], spec: DeviceSpec, limit: int | None = None, *, stored_only: bool = False
) -> Plan:
    """Candidates of a kernel for some shapes.

    limit: most configurations of a shape. From a larger space it takes the default, the table's configuration for exactly these
    sizes, and an even sample of the rest. stored_only: the default and the table's configuration alone.
    """
    made = Plan(kernel)
    problems: dict[str, Problem] = {}
    for shape in shapes:
        refusal = kernel.module.refusal(shape.problem)
        if refusal is not None:
            made.refusals[shape.name] = refusal
            continue
        # The table's configuration for exactly these sizes, which a sample of the space could miss.
        entries = KernelCandidate(kernel.op, kernel.backend, kernel.module_name).tuned(shape.problem, spec)
        shipped = [found.config for found in entries if found.sizes == tuple(sorted(shape.problem.sizes().items()))]
        first = list(dict.fromkeys([kernel.module.default_config(shape.problem, spec), *shipped]))
        space = [] if stored_only else dict.fromkeys(kernel.module.configs(shape.problem, spec))
        others = [config for config in space if config not in first]
        made.configs[shape.name] = first[:limit] + _spread(others, None if limit is None else limit - len(first))
        problems[shape.name] = shape.problem
    # The first of every shape, then the second of every shape: after a budget that ends early every shape has candidates.
    for rank in range(max(map(len, made.configs.values()), default=0)):
        for name, configs in made.configs.items():
            if rank < len(configs):
                key = (problems[name].static_key(), configs[rank])
                made.candidates.setdefault(key, Candidate(problems[name], configs[rank]))
    return made


def _spread(configs: list[Any], wanted: int | None) -> list[Any]:
    """At most `wanted` of the configurations, at even distances."""
    if wanted is None or len(configs) <= wanted:
        return configs
    return [configs[index * len(configs) // wanted] for index in range(wanted)]


def by_code(items: Iterable[Any]) -> list[list[Any]]:
    """Items with a problem and a config, by machine code: configurations may differ in scalars of the launch alone."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        key = (item.problem.static_key(), *compiled.compiled_fields(item.config).items())
        found.setdefault(key, []).append(item)
    return list(found.values())


def compile_all(
    made: Plan, *, num_workers: int, timeout_s: float, on_done: Callable[[Candidate], None] = lambda candidate: None,
    deadline: float | None = None,
) -> None:  # fmt: skip
    """Compiles every candidate into the disk cache and notes failures in it. deadline: on the clock of time.monotonic()."""
    groups = by_code(made.candidates.values())
    tasks = [(made.kernel, group[0].problem, group[0].config) for group in groups]
    reached = set()
    for outcome in workers.run(compile_one, tasks, workers=num_workers, timeout_s=timeout_s):
        reached.add(outcome.index)
        for candidate in groups[outcome.index]:
            candidate.failure = outcome.failure
            on_done(candidate)
        if deadline is not None and time.monotonic() > deadline:
            break
    for index, group in enumerate(groups):
        if index not in reached:
            for candidate in group:
                candidate.failure = "not compiled: the time budget was spent"


@dataclass(frozen=True)
class Winner:
    shape: Shape
    config: Any
    time_us: float
    error: float
    default_us: float | None  # time of the analytic choice, interleaved with the winner; None where it did not run


def search(
    made: Plan, shape: Shape, runner: "GpuRunner", journal: Journal, *, deadline: float | None = None,
    on_done: Callable[[Any, Record], None] = lambda config, record: None,
) -> Winner | None:  # fmt: skip
    """Fastest correct configuration of a shape, None if there is none. Candidates in the journal are not run again."""
    static, sizes = shape.problem.static_key(), shape.problem.sizes()
    timed: list[tuple[Any, Record]] = []
    for config in made.configs[shape.name]:
        fields = asdict(config)
        record = journal.find(static, sizes, fields)
        if record is None:
            if deadline is not None and time.monotonic() > deadline:
                break
            record = _try(made, shape, config, runner, journal)
        on_done(config, record)
        if record.state == TIMED:
            timed.append((config, record))
    if not timed:
        return None

    def first_time(item: tuple[Any, Record]) -> float:
        return item[1].time_us or 0.0

    # The default is always timed again with the finalists: a clock that sank during the search must not decide.
    default = made.configs[shape.name][0]
    timed.sort(key=first_time)
    finalists = [item for item in timed if first_time(item) <= FINALIST_MARGIN * first_time(timed[0])][:FINALISTS]
    finalists += [item for item in timed if item[0] == default and item not in finalists]
    times = [first_time(item) for item in finalists]
    if len(finalists) > 1:
        times = runner.interleaved_us(shape, [config for config, _ in finalists])
    best = min(range(len(finalists)), key=times.__getitem__)
    default_us = next((time for (config, _), time in zip(finalists, times, strict=True) if config == default), None)
    if default_us is not None and times[best] > DEFAULT_MARGIN * default_us:
        best = next(index for index, (config, _) in enumerate(finalists) if config == default)
    config, record = finalists[best]
    assert record.error is not None
    return Winner(shape, config, times[best], record.error, default_us)


def _try(made: Plan, shape: Shape, config: Any, runner: "GpuRunner", journal: Journal) -> Record:
    static, sizes, fields = shape.problem.static_key(), shape.problem.sizes(), asdict(config)
    failure = made.candidates[static, config].failure
    if failure is not None:
        record = Record(DROPPED, why=failure)
        if failure.startswith("not compiled"):  # not the candidate's fault: the next run tries it
            return record
    else:
        journal.add(static, sizes, fields, Record(STARTED))
        try:
            error = runner.check(shape, config)
            record = Record(TIMED, time_us=runner.time_us(shape, config), error=error)
        except DeviceLost as lost:
            journal.add(static, sizes, fields, Record(DROPPED, why=str(lost)))
            raise
        except KeyboardInterrupt:
            journal.add(static, sizes, fields, Record(INTERRUPTED))
            raise
        except Exception as failed:
            record = Record(DROPPED, why=f"{type(failed).__name__}: {failed}")
    journal.add(static, sizes, fields, record)
    return record


class GpuRunner:
    """Runs candidates of one kernel on the current CUDA device; tests have a runner without a GPU.

    Keeps the inputs of the last shape.
    """

    def __init__(self, kernel: Kernel, spec: DeviceSpec) -> None:
        self._kernel, self._spec = kernel, spec
        self._last: tuple[str, Any] | None = None

    def _case(self, shape: Shape) -> Any:
        if self._last is None or self._last[0] != shape.name:
            self._last = None  # frees the inputs before the next are made
            self._last = (shape.name, cases.make(shape, torch.device("cuda", torch.cuda.current_device()), self._spec))
        return self._last[1]

    def _prepared(self, shape: Shape, config: Any) -> Any:
        return runtime.prepare(shape.problem, torch.device("cuda"), self._kernel.backend, config=config)

    def check(self, shape: Shape, config: Any) -> float:
        """Relative error; raises where the result is wrong or the launch fails."""
        with _watched():
            error: float = self._case(shape).check(self._prepared(shape, config))
        return error

    def time_us(self, shape: Shape, config: Any) -> float:
        with _watched():
            timed = timing.Timed(self._case(shape).launches(self._prepared(shape, config)))
            return statistics.median(timed.sample_us() for _ in range(7))

    def interleaved_us(self, shape: Shape, configs: Sequence[Any]) -> list[float]:
        case = self._case(shape)
        return timing.interleaved_us([case.launches(self._prepared(shape, config)) for config in configs])


def _give_up() -> None:
    os.write(2, f"A candidate hung for {HANG_S} s. Run the same command again: it resumes after it.\n".encode())
    os._exit(3)  # a launch that never ends lets no interpreter shut down


@contextmanager
def _watched() -> Iterator[None]:
    """Raises DeviceLost where a candidate's failure broke the CUDA context; ends the process where a candidate hangs."""
    watchdog = threading.Timer(HANG_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
        torch.cuda.synchronize()
    except Exception as failed:
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(f"the launch broke the CUDA context: {str(lost).splitlines()[0]}") from failed
        raise
    finally:
        watchdog.cancel()
