"""`gdn.explain(op, ...)`: what a call would run, and why, without running it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gdn
from gdn.problems import Problem
from gdn.runtime import Choice, Explained, explaining, registry


@dataclass(frozen=True)
class Explanation:
    """The choice that a call would make."""

    function: str  # the public function
    op: str  # the operator whose kernel it is; for a composed function, the first that would run
    backend: str  # tilelang | cute | reference
    config: Any  # the kernel's tiles; None for the reference
    config_source: str  # where they came from: argument | table | default; none for the reference
    decided_by: str  # what decided the backend: the argument, NAME=value of a switch, the tuned table, ...
    switches: tuple[str, ...]  # every switch that had a say, strongest first
    refusals: tuple[tuple[str, str], ...]  # (backend, reason) of each backend that was asked and refused
    notes: tuple[str, ...]  # conflicts between switches, preferences that were not met, the table entry
    problem: Problem | None  # None where no kernel exists for the operator

    def __str__(self) -> str:
        through = "" if self.function in registry.operator(self.op).functions else f" through {self.op}"
        lines = [f"{self.function}{through}: {self.backend}, decided by {self.decided_by}"]
        if self.config is not None:
            lines.append(f"  tiles ({self.config_source}): {self.config}")
        if self.switches:
            lines.append(f"  switches: {', '.join(self.switches)}")
        lines += [f"  {backend} {reason}" for backend, reason in self.refusals]
        lines += [f"  note: {note}" for note in self.notes]
        if self.problem is not None:
            lines.append(f"  problem: {self.problem}")
        return "\n".join(lines)


def explain(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What `op(*args, **kwargs)` would run: the backend, the tiles and where they came from, who refused and why.

    op: a public function of gdn, its name, or the operator's short name ("chunk"). Arguments are the function's own and
    are validated as by a call: what a call would refuse raises the same error here. Nothing is launched or written, and
    nothing is compiled.
    """
    name, function = _resolve(op)
    try:
        with explaining():
            function(*args, **kwargs)
    except Explained as answer:
        return _explanation(name, answer.choice, answer.problem)
    raise RuntimeError(f"{name} ran without asking the runtime what to run")


def _resolve(op: str | Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """The public function's name, and the function."""
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    operator = registry.operator(name)
    if name not in operator.functions:
        name = operator.functions[0]
    return name, getattr(gdn, name)


def _explanation(function: str, choice: Choice, problem: Problem | None) -> Explanation:
    return Explanation(
        function=function,
        op=choice.op,
        backend=choice.backend,
        config=choice.config,
        config_source=choice.config_source,
        decided_by=choice.decided_by,
        switches=choice.switches,
        refusals=choice.refusals,
        notes=choice.notes,
        problem=problem,
    )
