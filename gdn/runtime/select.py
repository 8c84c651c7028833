"""Which backend runs a problem, with which tiles, and why. Pure: no device, no environment, no file, no import.

Precedence: argument > GDN_BACKEND_<OP> > the serving stack's switch > GDN_BACKEND > tuned table > built-in order. The
first two are orders: they run or raise. The next two are preferences: where the preferred backend refuses, the next
wish is tried. `reference` refuses nothing.

A tuned table decides only where every kernel that could run was timed on one and the same problem near this one. An entry that
the other kernels lack says nothing of them: the built-in order, which is measured too (`gdn.runtime.order`), decides then, and
the entry is good for tiles alone.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gdn.device import DeviceSpec
from gdn.problems import Problem
from gdn.runtime import order, registry
from gdn.runtime.env import Switches

# With GDN_BATCH_INVARIANT a configuration is chosen for these sizes, whatever the batch holds.
INVARIANT_SIZES = {
    "num_tokens": 8192,
    "num_sequences": 64,
    "num_queries": 4096,
    "num_keys": 32768,
    "num_columns": 32768,
    "batch": 64,
    "max_context_len": 32768,
    "num_rows": 4096,
    "k": 2048,
}
# An operator whose configuration says how a long sequence is split is asked about one, so that it is split at all.
_INVARIANT_SIZES_OF = {"chunk": {"num_tokens": 32768, "num_sequences": 1}}


# How far (`gdn.runtime.tuned.distance`) a problem may be from the one on which the tables compare kernels: 1.4 times as large,
# or as small, in all sizes together. Farther away another kernel may be the faster one.
DECIDES_WITHIN = 0.5


# Why the reference runs where nobody asked for it.
_NO_GPU, _REFUSED, _NOT_YET = "no SM90 (Hopper) GPU", "no kernel serves this", "no kernel yet"
NO_KERNEL = (_REFUSED, _NOT_YET)  # of these on a Hopper GPU


class MissingTunedEntry(LookupError):
    """GDN_TUNED=strict, and no table entry serves the problem."""


@dataclass(frozen=True)
class Tuned:
    """One entry of a tuned table that serves a problem."""

    config: Any  # the kernel module's Config
    sizes: tuple[tuple[str, int], ...]
    time_us: float
    source: str  # the table that holds it
    distance: float = 0.0  # of its sizes from the problem's
    static: str = ""  # the static fields that it was measured on, as text
    others: tuple[str, ...] = ()  # the names of those that are not the problem's
    is_stale: bool = False  # another version of the kernel was timed


class Candidate(Protocol):
    """A kernel backend of one operator, as far as the choice needs it."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it does not serve the problem; None = it does."""

    def tuned(self, problem: Problem, device: DeviceSpec) -> Sequence[Tuned]:
        """Table entries that serve the problem, nearest sizes first."""

    def default_config(self, problem: Problem, device: DeviceSpec) -> Any:
        """The analytic choice."""

    def note(self, problem: Problem) -> str | None:
        """What a user should know of how it serves the problem."""


@dataclass(frozen=True)
class Choice:
    """What runs and why."""

    op: str
    backend: str  # tilelang | cute | reference
    config: Any = None  # None for the reference
    config_source: str = "none"  # argument | table | default; none for the reference
    decided_by: str = "built-in order"
    refusals: tuple[tuple[str, str], ...] = ()  # (backend, reason) of every backend that was asked and refused
    notes: tuple[str, ...] = ()  # conflicts, preferences that fell through, which table entry
    switches: tuple[str, ...] = ()  # the switches that had a say, as NAME=value
    conflicts: tuple[str, ...] = ()  # of the notes: a switch that a stronger one contradicts
    unmet: tuple[str, ...] = ()  # of the notes: a preference that fell through

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend}, by {self.decided_by}"]
        if self.config is not None:
            lines.append(f"  tiles ({self.config_source}): {self.config}")
        lines += [f"  {backend} refused: {reason}" for backend, reason in self.refusals]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Wish:
    backend: str
    source: str  # "argument" or a switch's name
    order: bool = False
    text: str = ""  # NAME=value of a switch


def _wishes(
    op: registry.Operator, switches: Switches, backend: str | None, phase: str | None, ordered_by: str | None = None
) -> list[_Wish]:
    """Everything that was asked for, in order of precedence."""
    found: list[_Wish] = []
    if backend is not None:
        if backend not in registry.BACKENDS:
            raise ValueError(f"backend: expected {', '.join(map(repr, registry.BACKENDS))} or None, got {backend!r}")
        text = f"{ordered_by}={backend}" if ordered_by is not None else ""
        found.append(_Wish(backend, ordered_by or "the argument", order=True, text=text))
    own = switches.backend_of.get(op.name, "auto")
    if own != "auto":
        found.append(_Wish(own, op.switch, order=True, text=f"{op.switch}={own}"))
    for preference in op.preferences:
        value = switches.value(preference.switch)
        wanted = preference.backends.get(str(value).lower())
        if wanted is not None and preference.phase in (None, phase):
            shown = int(value) if isinstance(value, bool) else value
            found.append(_Wish(wanted, preference.switch, text=f"{preference.switch}={shown}"))
    if switches.backend != "auto":
        found.append(_Wish(switches.backend, "GDN_BACKEND", text=f"GDN_BACKEND={switches.backend}"))
    return found


def _conflicts(wishes: Sequence[_Wish]) -> list[str]:
    """One note per switch that a stronger switch contradicts."""
    asked = [wish for wish in wishes if wish.text]
    return [
        f"{asked[0].text} ({asked[0].backend}) overrides {wish.text} ({wish.backend})"
        for wish in asked[1:]
        if wish.backend != asked[0].backend
    ]


def _general_refusal(problem: Problem, spec: DeviceSpec | None, device_name: str) -> list[str]:
    """Reasons that hold for every kernel of ours."""
    reasons = []
    if spec is None:
        reasons.append(f"requires an SM90 (Hopper) GPU, got {device_name}")
    dtype = getattr(problem, "dtype", None)
    if dtype in ("float32", "float64") and problem.op != "topk":  # logits are float32
        reasons.append(f"requires 16-bit or FP8 inputs, got {dtype}")
    return reasons


def _invariant(problem: Problem) -> Problem:
    known = INVARIANT_SIZES | _INVARIANT_SIZES_OF.get(problem.op, {})
    sizes = {name: known.get(name, 4096) for name in problem.sizes()}
    return dataclasses.replace(problem, **sizes)  # type: ignore[type-var]


def _fastest(entries: Mapping[str, Sequence[Tuned]]) -> str | None:
    """The backend whose table entry is fastest, or None where the tables cannot say.

    Times are compared on one and the same problem only: of those near enough that every backend was timed on with the kernel as
    it is, the nearest. Its flags are those of the call: a kernel that is ahead where states are written may be behind where they
    are only read (recurrent, 128 sequences: 94 us against 89).
    """
    times = {
        backend: {(one.static, one.sizes): one.time_us for one in found if not one.is_stale} for backend, found in entries.items()
    }
    for one in next(iter(entries.values())):
        measured = (one.static, one.sizes)
        if one.distance <= DECIDES_WITHIN and not one.others and all(measured in of_backend for of_backend in times.values()):
            return min(times, key=lambda backend: times[backend][measured])
    return None


class _Asked:
    """Asks each candidate at most once, and remembers who refused."""

    def __init__(self, problem: Problem, spec: DeviceSpec | None, available: Mapping[str, Candidate], device_name: str) -> None:
        self.problem, self.available = problem, available
        self.general = _general_refusal(problem, spec, device_name)
        self.refusals: dict[str, str] = {}
        self._accepted: set[str] = set()

    def accepts(self, backend: str, every_reason: bool = False) -> bool:
        if backend == "reference" or backend in self._accepted:
            return True
        if backend in self.refusals and not every_reason:
            return False
        if backend not in self.available:
            kernels = ", ".join(self.available) or "none"
            self.refusals[backend] = f"has no kernel of {self.problem.op} (kernels: {kernels})"
            return False
        reasons = list(self.general)
        if not reasons or every_reason:  # else the kernel's module need not even be imported
            own = self.available[backend].refusal(self.problem)
            reasons += [own] if own is not None else []
        if reasons:
            self.refusals[backend] = "; ".join(reasons)
            return False
        self._accepted.add(backend)
        return True


def choose(
    problem: Problem,
    spec: DeviceSpec | None,
    available: Mapping[str, Candidate],
    switches: Switches,
    backend: str | None = None,
    *,
    config: Any = None,
    device_name: str = "no SM90 device",
    ordered_by: str | None = None,
) -> Choice:
    """What runs `problem` on `spec` (None = no Hopper GPU).

    available: the operator's kernel backends. backend: the argument of the public function, or the order of the switch
    `ordered_by` of a combined operator for this part of it. config: tiles given by the caller, taken as they are; they are
    some kernel's, so backend must name it.
    """
    if config is not None and backend not in registry.KERNEL_BACKENDS:
        raise ValueError(f"backend: expected {' or '.join(registry.KERNEL_BACKENDS)} beside a config, got {backend!r}")
    op = registry.operator(problem.op)
    wishes = _wishes(op, switches, backend, getattr(problem, "phase", None), ordered_by)
    conflicts, unmet = _conflicts(wishes), []
    asked = _Asked(problem, spec, available, device_name)
    tune_problem = _invariant(problem) if switches.batch_invariant else problem

    @functools.cache
    def entries(name: str) -> Sequence[Tuned]:
        return () if switches.tuned == "off" or spec is None else available[name].tuned(tune_problem, spec)

    chosen, decided_by = "", ""
    for wish in wishes:
        if asked.accepts(wish.backend, every_reason=wish.order):
            chosen, decided_by = wish.backend, wish.text or wish.source
            break
        reason = asked.refusals[wish.backend]
        if wish.order:
            source = wish.text or wish.source
            raise ValueError(f"backend: {wish.backend!r} was ordered for {op.name} (by {source}), but it {reason}")
        unmet.append(f"{wish.text} prefers {wish.backend}, which {reason}")
    if not chosen:
        # A choice that must not depend on the batch is made for the sizes that stand for all.
        able = [name for name in order.fastest_first(tune_problem, available) if asked.accepts(name)]
        if not able:
            chosen, decided_by = "reference", _REFUSED if spec is not None else _NO_GPU
        elif len(able) == 1:
            chosen = able[0]
            decided_by = "the only kernel" if len(available) == 1 else "the only kernel that serves this"
        else:
            fastest = _fastest({name: entries(name) for name in able})
            chosen, decided_by = (fastest, "tuned table") if fastest is not None else (able[0], "built-in order")

    notes, source = [*conflicts, *unmet], "none"
    if chosen != "reference":
        assert spec is not None
        if config is not None:
            source, note = "argument", None
        else:
            config, source, note = _configure(chosen, entries(chosen), available[chosen], tune_problem, spec, switches)
        notes += [found for found in (note, available[chosen].note(problem)) if found]
    return Choice(
        op=op.name,
        backend=chosen,
        config=config,
        config_source=source,
        decided_by=decided_by,
        refusals=tuple(asked.refusals.items()),
        notes=tuple(notes),
        switches=tuple(wish.text for wish in wishes if wish.text),
        conflicts=tuple(conflicts),
        unmet=tuple(unmet),
    )


def _configure(
    backend: str, entries: Sequence[Tuned], candidate: Candidate, problem: Problem, spec: DeviceSpec, switches: Switches
) -> tuple[Any, str, str | None]:
    """The tiles, where they came from, and a note."""
    if entries:
        found = entries[0]
        sizes = ", ".join(f"{name}={value}" for name, value in found.sizes)
        others = f" with another {', '.join(found.others)}" if found.others else ""
        version = ", of another version of the kernel" if found.is_stale else ""
        return found.config, "table", f"tiles tuned at {sizes}{others} ({found.time_us:g} us{version}), from {found.source}"
    if switches.tuned == "strict":
        raise MissingTunedEntry(
            f"{problem.op}: GDN_TUNED=strict, and no tuned entry of {backend} on {spec.key} serves {problem.static_key()} "
            f"at {', '.join(f'{name}={value}' for name, value in problem.sizes().items())}"
        )
    return candidate.default_config(problem, spec), "default", None


@dataclass(frozen=True)
class _NoKernel(Problem):
    """Stands for a call of an operator that only the reference serves."""

    name: str
    phase: str | None = None

    @property
    def op(self) -> str:  # type: ignore[override]
        return self.name


def choose_reference(op: str, switches: Switches, backend: str | None = None, *, phase: str | None = None) -> Choice:
    """The choice of an operator that has no kernel: the reference, or ValueError where something else was ordered."""
    choice = choose(_NoKernel(registry.operator(op).name, phase), None, {}, switches, backend)
    if choice.decided_by == _NO_GPU:
        return dataclasses.replace(choice, decided_by=_NOT_YET)
    return choice
