"""Choice of the backend and the tiles for a problem. Pure: no device, no environment, no file, no import.

Precedence: argument > GDN_BACKEND_<OP> > the serving stack's switch > GDN_BACKEND > tuned table > built-in order. The
first two are required: their backend runs, or the call raises. The next two are preferences: where the preferred backend
refuses, the next request is tried. `reference` refuses nothing.

A tuned table decides only where all kernels that could run were timed on the same problem, near this one. An entry that
exists for one kernel only cannot rank it: then the built-in order decides, which is measured too (`registry.Statement`), and
the entry provides tiles only.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gdn.device import DeviceSpec
from gdn.problem import Problem
from gdn.runtime import registry
from gdn.runtime.env import Switches
from gdn.runtime.registry import Statement

# Sizes for which GDN_BATCH_INVARIANT chooses a configuration, whatever the batch holds.
INVARIANT_SIZES = {
    "num_tokens": 8192, "num_sequences": 64, "num_queries": 4096, "num_keys": 32768, "num_columns": 32768, "batch": 64,
    "max_context_len": 32768, "num_rows": 4096, "k": 2048, "num_segments": 2, "num_ranks": 2, "num_layers": 36,
}  # fmt: skip
# For an operator whose configuration splits sequences: one long sequence, or few tokens, so that they are split at all.
_INVARIANT_SIZES_OF = {
    "chunk": {"num_tokens": 32768, "num_sequences": 1},
    "sparse_attention_decode": {"num_tokens": 64, "num_sequences": 64},
}


# Largest distance (`gdn.runtime.tuned.distance`) of a problem from the one on which the tables compare kernels: a factor of 1.4
# over all sizes together. Farther away another kernel may be faster.
DECIDES_WITHIN = 0.5


_BUILT_IN_ORDER = "built-in order"
# Reasons to run the reference without a request for it.
_NO_GPU, NO_KERNEL = "no SM90 (Hopper) GPU", "no kernel serves this"  # the second can occur on a Hopper GPU


class MissingTunedEntry(LookupError):
    """No table entry serves the problem, with GDN_TUNED=strict."""


@dataclass(frozen=True)
class Tuned:
    """One entry of a tuned table that serves a problem."""

    config: Any  # the kernel module's Config
    sizes: tuple[tuple[str, int], ...]
    time_us: float
    source: str  # the table that holds it
    distance: float = 0.0  # of its sizes from the problem's
    static: str = ""  # static fields of the measured problem, as text
    others: tuple[str, ...] = ()  # names of the static fields in which the measured problem differs
    is_stale: bool = False  # whether another version of the kernel was timed


class Candidate(Protocol):
    """One kernel backend of an operator, with the questions that the choice asks."""

    def refusal(self, problem: Problem) -> str | None:
        """Reason why the kernel does not serve the problem; None = it does."""

    def tuned(self, problem: Problem, device: DeviceSpec) -> Sequence[Tuned]:
        """Table entries that serve the problem, nearest sizes first."""

    def default_config(self, problem: Problem, device: DeviceSpec) -> Any:
        """Analytic choice of the tiles."""

    def note(self, problem: Problem) -> str | None:
        """Remark for the user on how the kernel serves the problem."""


@dataclass(frozen=True)
class Choice:
    """Backend and tiles of a problem, and the reasons."""

    op: str
    backend: str  # tilelang | cute | reference
    config: Any = None  # None for the reference
    config_source: str = "none"  # argument | table | default; none for the reference
    decided_by: str = _BUILT_IN_ORDER
    refusals: tuple[tuple[str, str], ...] = ()  # (backend, reason) of every backend that was asked and refused
    notes: tuple[str, ...] = ()  # conflicts, unmet preferences, the table entry
    switches: tuple[str, ...] = ()  # switches that asked for a backend, as NAME=value
    conflicts: tuple[str, ...] = ()  # notes about a switch that a stronger one contradicts
    unmet: tuple[str, ...] = ()  # notes about a preference whose backend refused
    lost: tuple[tuple[str, str], ...] = ()  # (backend, reason) of every other kernel that did not refuse

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend}, decided by: {self.decided_by}"]
        if self.config is not None:
            lines.append(f"  tiles ({self.config_source}): {self.config}")
        lines += [f"  {backend} refused: {reason}" for backend, reason in self.refusals]
        lines += [f"  {backend} lost: {reason}" for backend, reason in self.lost]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Request:
    """A backend that the argument or a switch asks for."""

    backend: str
    source: str  # "the argument" or a switch's name
    required: bool = False  # raise where the backend refuses, instead of trying the next request
    text: str = ""  # NAME=value of a switch


def _requests(op: registry.Operator, switches: Switches, backend: str | None, ordered_by: str | None = None) -> list[Request]:
    """All requests, in order of precedence."""
    found: list[Request] = []
    if backend is not None:
        if backend not in registry.BACKENDS:
            raise ValueError(f"backend: expected {', '.join(map(repr, registry.BACKENDS))} or None, got {backend!r}")
        text = f"{ordered_by}={backend}" if ordered_by is not None else ""
        found.append(Request(backend, ordered_by or "the argument", required=True, text=text))
    own = switches.backend_of.get(op.name, "auto")
    if own != "auto":
        found.append(Request(own, op.switch, required=True, text=f"{op.switch}={own}"))
    for preference in op.preferences:
        value = switches.value(preference.switch)
        wanted = preference.backends.get(str(value).lower())
        if wanted is not None:
            shown = int(value) if isinstance(value, bool) else value
            found.append(Request(wanted, preference.switch, text=f"{preference.switch}={shown}"))
    if switches.backend != "auto":
        found.append(Request(switches.backend, "GDN_BACKEND", text=f"GDN_BACKEND={switches.backend}"))
    return found


@dataclass(frozen=True)
class _Ranking:
    """Times of all kernels on one problem of the tuned tables."""

    times_us: Mapping[str, float]
    sizes: str  # of that problem

    @property
    def fastest(self) -> str:
        return min(self.times_us, key=lambda backend: self.times_us[backend])


def _ranking(entries: Mapping[str, Sequence[Tuned]]) -> _Ranking | None:
    """Times of all backends by their table entries, or None where the tables cannot rank the backends.

    Times are compared on the same problem only: the nearest of those that are near enough and on which the current version of
    every backend's kernel was timed. Its flags must be those of the call: a kernel that is faster where states are written may
    be slower where they are only read (recurrent, 128 sequences: 94 us against 89).
    """
    times = {
        backend: {(one.static, one.sizes): one.time_us for one in found if not one.is_stale} for backend, found in entries.items()
    }
    for one in next(iter(entries.values())):
        measured = (one.static, one.sizes)
        if one.distance <= DECIDES_WITHIN and not one.others and all(measured in of_backend for of_backend in times.values()):
            sizes = ", ".join(f"{name}={value}" for name, value in one.sizes)
            return _Ranking({backend: of_backend[measured] for backend, of_backend in times.items()}, sizes)
    return None


def _lost(
    chosen: str, others: Sequence[str], decided_by: str, ranking: _Ranking | None, stated: Statement | None
) -> dict[str, str]:
    """Reason why each kernel that did not refuse does not run. ranking, stated: where the tuned tables or the order decided."""
    if decided_by == _BUILT_IN_ORDER:
        measured = "not measured" if stated is None else stated.measured
        where = "" if stated is None or stated.where == Statement.where else f" for {stated.where}"
        return dict.fromkeys(others, f"it comes after {chosen} in the built-in order{where} ({measured})")
    if ranking is not None:
        times, best = ranking.times_us, f"{ranking.times_us[chosen]:g} of {chosen} at {ranking.sizes} (tuned tables)"
        return {one: f"{times[one]:g} us against {best}" for one in others}
    return dict.fromkeys(others, f"{decided_by} asks for {chosen}")


class CandidateFilter:
    """Decides which candidates accept a problem: asks each of them at most once and keeps the reasons of those that refuse."""

    def __init__(self, problem: Problem, spec: DeviceSpec | None, available: Mapping[str, Candidate], device_name: str) -> None:
        self.problem, self.available = problem, available
        self.general = [] if spec is not None else [f"requires an SM90 (Hopper) GPU, got {device_name}"]
        dtype = getattr(problem, "dtype", None)
        if dtype in ("float32", "float64") and problem.op != "topk":  # logits are float32
            self.general.append(f"requires 16-bit or FP8 inputs, got {dtype}")
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
        if not reasons or every_reason:  # otherwise the kernel's module is not even imported
            own = self.available[backend].refusal(self.problem)
            reasons += [own] if own is not None else []
        if reasons:
            self.refusals[backend] = "; ".join(reasons)
        else:
            self._accepted.add(backend)
        return not reasons


def choose(
    problem: Problem, spec: DeviceSpec | None, available: Mapping[str, Candidate], switches: Switches,
    backend: str | None = None, *, config: Any = None, device_name: str = "no SM90 device", ordered_by: str | None = None,
) -> Choice:  # fmt: skip
    """Chooses the backend and the tiles of `problem` on `spec` (None = no Hopper GPU).

    available: the operator's kernel backends. backend: the argument of the public function, or the value of the switch
    `ordered_by` of a combined operator for this part of it. config: tiles given by the caller, used unchanged; they belong to
    one kernel, so `backend` must name it.
    """
    if config is not None and backend not in registry.KERNEL_BACKENDS:
        raise ValueError(f"backend: expected {' or '.join(registry.KERNEL_BACKENDS)} with a config, got {backend!r}")
    op = registry.operator(problem.op)
    requests = _requests(op, switches, backend, ordered_by)
    asking = [request for request in requests if request.text]
    conflicts = [  # one note per switch that a stronger switch contradicts
        f"{asking[0].text} ({asking[0].backend}) overrides {weaker.text} ({weaker.backend})"
        for weaker in asking[1:]
        if weaker.backend != asking[0].backend
    ]
    unmet: list[str] = []
    candidates = CandidateFilter(problem, spec, available, device_name)
    tune_problem: Problem = problem
    if switches.batch_invariant:
        known = INVARIANT_SIZES | _INVARIANT_SIZES_OF.get(op.name, {})
        fixed = {name: known.get(name, 4096) for name in problem.sizes()} | dict.fromkeys(problem.hints(), 0)
        tune_problem = dataclasses.replace(problem, **fixed)  # type: ignore[type-var]

    @functools.cache
    def entries(name: str) -> Sequence[Tuned]:
        return () if switches.tuned == "off" or spec is None else available[name].tuned(tune_problem, spec)

    chosen, decided_by, ranking, stated = "", "", None, None
    for request in requests:
        source = request.text or request.source
        if candidates.accepts(request.backend, every_reason=request.required):
            chosen, decided_by = request.backend, source
            break
        reason = candidates.refusals[request.backend]
        if request.required:
            got = f"{request.backend!r} (by {source}), which {reason}"
            raise ValueError(f"backend: expected a backend that can run {op.name}, got {got}")
        unmet.append(f"{request.text} prefers {request.backend}, which {reason}")
    if not chosen:
        # With GDN_BATCH_INVARIANT the choice is made for the fixed sizes.
        stated = op.statement(tune_problem)
        ordered = dict.fromkeys((*(stated.order if stated is not None else ()), *available))  # unmeasured ones last
        able = [name for name in ordered if name in available and candidates.accepts(name)]
        if not able:
            chosen, decided_by = "reference", NO_KERNEL if spec is not None else _NO_GPU
        elif len(able) == 1:
            chosen = able[0]
            decided_by = "the only kernel" if len(available) == 1 else "the only kernel that serves this"
        else:
            ranking = _ranking({name: entries(name) for name in able})
            chosen, decided_by = (able[0], _BUILT_IN_ORDER) if ranking is None else (ranking.fastest, "tuned table")

    notes, config_source = [*conflicts, *unmet], "none"
    if chosen != "reference":
        assert spec is not None
        if config is not None:
            config_source, note = "argument", None
        else:
            config, config_source, note = _configure(chosen, entries(chosen), available[chosen], tune_problem, spec, switches)
        notes += [found for found in (note, available[chosen].note(problem)) if found]
    others = [name for name in available if name != chosen and name not in candidates.refusals]
    lost = _lost(chosen, others, decided_by, ranking, stated)
    return Choice(
        op=op.name, backend=chosen, config=config, config_source=config_source, decided_by=decided_by,
        refusals=tuple(candidates.refusals.items()), notes=tuple(notes),
        switches=tuple(request.text for request in asking), conflicts=tuple(conflicts), unmet=tuple(unmet),
        lost=tuple(lost.items()),
    )  # fmt: skip


def _configure(
    backend: str, entries: Sequence[Tuned], candidate: Candidate, problem: Problem, spec: DeviceSpec, switches: Switches
) -> tuple[Any, str, str | None]:
    """Returns the tiles, their origin, and a note."""
    if entries:
        found = entries[0]
        sizes = ", ".join(f"{name}={value}" for name, value in found.sizes)
        others = f" with another {', '.join(found.others)}" if found.others else ""
        version = " with another version of the kernel" if found.is_stale else ""
        return found.config, "table", f"tiles tuned at {sizes}{others} ({found.time_us:g} us{version}), from {found.source}"
    if switches.tuned == "strict" and problem.op not in registry.INTERNAL:
        raise MissingTunedEntry(
            f"{problem.op}: GDN_TUNED=strict, and no tuned entry of {backend} on {spec.key} serves {problem.static_key()} "
            f"at {', '.join(f'{name}={value}' for name, value in problem.sizes().items())}"
        )
    return candidate.default_config(problem, spec), "default", None
