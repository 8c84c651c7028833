"""Turns a problem into a kernel that can be launched: `prepare`.

Switches (env) -> backend (registry, select) -> tiles (tuned tables, or the kernel's default) -> compiled kernel.
"""

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gdn.device import DeviceSpec
from gdn.problem import Problem
from gdn.runtime import compiled, devices, env, log, packages, registry, select, toolchain, tuned
from gdn.runtime.select import Choice
from gdn.runtime.tuned import Entry, Found

__all__ = [
    "Asked",
    "Choice",
    "Prepared",
    "can_run",
    "explain_problem",
    "explaining",
    "is_explaining",
    "ordering",
    "prepare",
    "register",
]

_MEMO_LIMIT = 4096
_ANY_CUDA = torch.device("cuda")  # without an index: the current device


@dataclass(frozen=True, slots=True)
class Prepared:
    """A problem with the kernel that runs it."""

    backend: str  # tilelang | cute | reference
    config: Any  # None for the reference
    workspace_bytes: int
    launch: Callable[..., None] | None  # positional tensors of the problem's launch order; None for the reference
    choice: Choice


class KernelCandidate:
    """One kernel backend of one operator: its module, imported when first needed, and its tuned tables."""

    def __init__(self, op: str, backend: str, module_name: str) -> None:
        self.op, self.backend, self.module_name = op, backend, module_name
        self._import_error: str | None = None
        self._unserved = packages.unserved(packages.DSLS[backend])
        self._lacking = toolchain.missing(backend)
        self._usable: dict[tuple[Any, ...], list[list[Found]]] = {}  # (device, static fields) -> entries per folder

    @functools.cached_property
    def module(self) -> Any:
        return importlib.import_module(self.module_name)

    def refusal(self, problem: Problem) -> str | None:
        if self._unserved is not None:  # its module may not even be importable
            return self._unserved
        if self._import_error is None:
            try:
                _ = self.module
            except (ImportError, OSError, RuntimeError) as error:  # not installed, or no home folder
                self._import_error = f"requires {self.module_name} to be importable, got {type(error).__name__}: {error}"
                log.once(f"{self.op}: {self.backend} {self._import_error}", logging.WARNING)
        if self._import_error is not None:
            return self._import_error
        reason: str | None = self.module.refusal(problem)
        if reason is not None or self._lacking is None or compiled.has_entries(self.op, self.backend):
            return reason
        return self._lacking

    def tuned(self, problem: Problem, device: DeviceSpec) -> Sequence[select.Tuned]:
        """Entries that serve the problem, nearest first, from the first folder with one that is near enough."""
        key = (device.key, *problem.static_fields().values())  # not their text, which costs several times as much
        tables = self._usable.get(key)
        if tables is None:
            own = env.current().tuned_dir
            folders = (tuned.SHIPPED,) if own is None else (own, tuned.SHIPPED)
            tables = self._usable[key] = [self._usable_in(folder, problem, device) for folder in folders]
        near = next(filter(None, (near_enough(self.module, problem, usable, device) for usable in tables)), [])
        return [
            select.Tuned(
                found.config, found.sizes, found.entry.time_us, str(found.path), distance, found.static, found.others,
                is_stale=self._is_stale(found.entry),
            )
            for distance, found in near
        ]  # fmt: skip

    def _usable_in(self, folder: Path, problem: Problem, device: DeviceSpec) -> list[Found]:
        """Entries of a table that the kernel accepts for the problem's static fields; sizes play no role in this."""
        path = tuned.table_path(folder, device.key, self.op, self.backend)
        usable = tuned.usable(path, problem, self.module.Config, lambda config: bool(self.module.fits(problem, config, device)))
        if any(self._is_stale(found.entry) for found in usable):
            log.once(f"{path}: tuned with another version of {self.module_name}")
        return usable

    def _is_stale(self, entry: Entry) -> bool:
        return entry.kernel_source != compiled.source_of(self.module)

    def default_config(self, problem: Problem, device: DeviceSpec) -> Any:
        return self.module.default_config(problem, device)

    def note(self, problem: Problem) -> str | None:
        of_module = getattr(self.module, "note", None)
        return None if of_module is None else of_module(problem)


def near_enough(module: Any, problem: Problem, usable: Sequence[Found], device: DeviceSpec) -> list[tuple[float, Found]]:
    """Usable entries that a kernel accepts for the problem's sizes, with their distances, nearest first."""
    suits = getattr(module, "suits", None)
    suitable = usable if suits is None else [found for found in usable if suits(problem, found.config, device)]
    return tuned.nearest_first(suitable, problem.sizes(), getattr(module, "TUNED_WITHIN", tuned.WITHIN))


def register(*families: Iterable[registry.Operator]) -> None:
    """Takes the records of all operators, in the order in which commands list them."""
    for records in families:
        registry.add(records)
    env.declare(registry.OPERATORS.values())


@functools.cache
def candidates(op: str) -> dict[str, KernelCandidate]:
    """Kernel backends of an operator, by name."""
    modules = registry.operator(op).modules
    return {backend: KernelCandidate(op, backend, name) for backend, name in modules.items()}


@dataclass
class Asked:
    """Record of the choices inside `explaining()`, in order: what would run, and for which problem."""

    answers: list[tuple[Choice, Problem | None]] = field(default_factory=list)


_ordered_by: ContextVar[str | None] = ContextVar("gdn_ordered_by", default=None)
_explaining: ContextVar[Asked | None] = ContextVar("gdn_explaining", default=None)
is_explaining = _explaining.get  # not a Python function, since every eager call calls it


@contextlib.contextmanager
def _within(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    """Gives the variable this value in this context and thread."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def explaining() -> contextlib.AbstractContextManager[Asked]:
    """Makes `prepare` record its choice and return a launch that does nothing."""
    return _within(_explaining, Asked())


def record(choice: Choice) -> None:
    """Records a part that no kernel of this package runs, inside `explaining()`."""
    if (asked := _explaining.get()) is not None:
        asked.answers.append((choice, None))


def record_reference(reason: str) -> None:
    """Replaces the last choice by the reference, inside `explaining()`: the operator leaves its kernel to it."""
    if (asked := _explaining.get()) is not None:
        choice, problem = asked.answers.pop()
        own = Choice(choice.op, "reference", decided_by=reason, refusals=choice.refusals, switches=choice.switches)
        asked.answers.append((own, problem))


def ordering(switch: str | None) -> contextlib.AbstractContextManager[None]:
    """Takes the `backend` of `prepare` from this switch; None = from the argument."""
    return _within(_ordered_by, switch)


def explain_problem(
    problem: Problem, spec: DeviceSpec | None, backend: str | None = None, *, ordered_by: str | None = None
) -> Choice:
    """Choice for a problem on a device (None: no Hopper GPU), whether or not this machine has it.

    ordered_by: the switch of a composed operator that `backend` comes from; None = the argument.
    """
    return select.choose(problem, spec, candidates(problem.op), env.current(), backend, device_name="none", ordered_by=ordered_by)


def can_run(problem: Problem, device: torch.device, backend: str) -> bool:
    """Whether a backend serves a problem on a device."""
    spec, name = devices.describe(device)
    return select.CandidateFilter(problem, spec, candidates(problem.op), name).accepts(backend)


_memo: dict[tuple[Problem, torch.device, str | None, Any], Prepared] = {}
_memo_switches: env.Switches | None = None
_memo_lock = threading.Lock()  # for writers; the fast path reads without it


def prepare(problem: Problem, device: torch.device, backend: str | None = None, *, config: Any = None) -> Prepared:
    """Chooses, compiles and loads the kernel of a problem, or chooses the reference; memoised.

    backend: the public function's argument. config: tiles to use unchanged (autotuner, tests).
    """
    global _memo_switches
    if (asked := _explaining.get()) is not None:
        choice = _choose(problem, device, backend, config)
        asked.answers.append((choice, problem))
        return Prepared(choice.backend, choice.config, 0, lambda *_: None, choice)
    switches = env.current()
    if switches is not _memo_switches:
        with _memo_lock:
            _memo.clear()
            tuned.forget()
            candidates.cache_clear()  # with their usable entries
            _memo_switches = switches
    if device == _ANY_CUDA:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (problem, device, backend, config)
    found = _memo.get(key)
    if found is None:
        found = _prepare(problem, device, backend, config)
        with _memo_lock:
            while len(_memo) >= _MEMO_LIMIT:
                del _memo[next(iter(_memo))]  # the oldest
            _memo[key] = found
    return found


def _prepare(problem: Problem, device: torch.device, backend: str | None, config: Any) -> Prepared:
    choice = _choose(problem, device, backend, config)
    _tell(choice, problem)
    _warn(choice, *devices.describe(device))
    if choice.backend == "reference":
        return Prepared("reference", None, 0, None, choice)
    module = candidates(problem.op)[choice.backend].module
    try:
        kernel = compiled.get(problem.op, choice.backend, module, problem, choice.config)
    except compiled.MissingKernel:
        if config is not None or not any(problem.hints().values()):
            raise
        # What the host happens to know is no reason to fail: the kernel that serves without it may be there.
        told = f"{problem.op}: a kernel chosen by max_seqlen is in no cache, and GDN_COMPILE=off; one chosen without it serves"
        log.once(told, logging.WARNING, key=("hint", problem.op, problem.static_key()))
        return _prepare(replace(problem, **dict.fromkeys(problem.hints(), 0)), device, backend, None)  # type: ignore[type-var]
    launch = functools.partial(module.launch, kernel)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        launch = functools.partial(_launch_on, device.index, launch)
    return Prepared(choice.backend, choice.config, module.workspace_bytes(problem, choice.config), launch, choice)


def _launch_on(index: int, launch: Callable[..., None], *tensors: Any) -> None:
    """Launches on a device that may not be the current one: kernels run in the current device's context."""
    with contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
        launch(*tensors)


def _choose(problem: Problem, device: torch.device, backend: str | None, config: Any) -> Choice:
    spec, name = devices.describe(device)
    return select.choose(
        problem, spec, candidates(problem.op), env.current(), backend, config=config, device_name=name,
        ordered_by=_ordered_by.get(),
    )  # fmt: skip


def _tell(choice: Choice, problem: Problem) -> None:
    """Logs a decision once per operator, static fields and outcome, not per size; a conflict of switches once in total."""
    if not log.LOGGER.isEnabledFor(logging.INFO):
        return
    for conflict in choice.conflicts:
        log.once(conflict)
    static = problem.static_key()
    key = (choice.op, static, choice.backend, choice.config, choice.decided_by)
    told_apart = {*choice.conflicts, *choice.unmet}
    rest = replace(choice, notes=tuple(note for note in choice.notes if note not in told_apart))
    log.once(str(rest) + (f"\n  problem: {static}" if static else ""), key=key)


def _warn(choice: Choice, spec: DeviceSpec | None, device_name: str) -> None:
    """Warns once of an unmet preference, and of the reference running on a Hopper GPU; independent of GDN_LOG."""
    for note in choice.unmet:
        log.once(f"{choice.op}: {note}; {choice.backend} runs instead", logging.WARNING, key=("unmet", choice.op, note))
    if spec is not None and choice.backend == "reference" and choice.decided_by == select.NO_KERNEL:
        reasons = "".join(f"; {backend} {reason}" for backend, reason in choice.refusals)
        message = f"{choice.op}: the reference runs on {device_name}, which is slow: {choice.decided_by}{reasons}"
        log.once(message, logging.WARNING, key=("reference", choice.op, choice.decided_by, choice.refusals))
