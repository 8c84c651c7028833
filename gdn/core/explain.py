"""`gdn.explain(op, ...)`: the choice that a call would make, and its reasons, without running it."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from gdn.device import H100, DeviceSpec
from gdn.problem import Problem
from gdn.runtime import Choice, devices, explaining, registry


@dataclass(frozen=True)
class Explanation:
    """Choice that a call would make."""

    function: str  # the public function
    op: str  # the operator whose kernel runs; for a composed operator its own name
    backend: str  # tilelang | cute | reference; for a composed operator that of the first part
    config: Any  # the kernel's tiles; None for the reference and for a composed operator
    config_source: str  # origin of the tiles: argument | table | default; none for the reference
    decided_by: str  # reason for the backend: the argument, NAME=value of a switch, the tuned table, ...
    switches: tuple[str, ...]  # every switch that asked for a backend, strongest first
    refusals: tuple[tuple[str, str], ...]  # (backend, reason) of each backend that was asked and refused
    notes: tuple[str, ...]  # conflicts between switches, unmet preferences, the table entry
    problem: Problem | None  # None where the operator has no kernel
    parts: "tuple[Explanation, ...]" = ()  # choices of a composed operator's parts, in order
    lost: tuple[tuple[str, str], ...] = ()  # (backend, reason) of every other kernel that could run, or was not asked

    def __str__(self) -> str:
        if self.parts:
            lines = [f"{self.function}: {', then '.join(part.op for part in self.parts)}"]
            return "\n".join(lines + [f"  {line}" for part in self.parts for line in str(part).splitlines()])
        through = "" if self.function in registry.operator(self.op).functions else f" through {self.op}"
        lines = [f"{self.function}{through}: {self.backend}, decided by: {self.decided_by}"]
        if self.config is not None:
            lines.append(f"  tiles ({self.config_source}): {self.config}")
        if self.switches:
            lines.append(f"  switches: {', '.join(self.switches)}")
        lines += [f"  {backend} {reason}" for backend, reason in self.refusals]
        lines += [f"  {backend} lost: {reason}" for backend, reason in self.lost]
        lines += [f"  note: {note}" for note in self.notes]
        if self.problem is not None:
            lines.append(f"  problem: {self.problem}")
        return "\n".join(lines)


def explain(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain what ``op(*args, **kwargs)`` would run: the backend, the tiles and where they came from, who refused and why.

    The arguments' types, shapes and memory are checked as by a call, which raises the same errors; values in tensors are not
    read. Nothing is launched, written or compiled.

    Parameters
    ----------
    op : str or callable
        A public function of gdn, its name, or the operator's short name ("chunk").
    *args, **kwargs
        The function's own arguments.

    Returns
    -------
    Explanation
        The choice, field by field; ``str()`` of it is a report for people.

    Raises
    ------
    TypeError, ValueError
        As raised by the call itself.

    Examples
    --------
    >>> import torch, gdn
    >>> found = gdn.explain("topk", torch.rand(4, 4096), 512)
    >>> found.function, found.backend
    ('topk_indices', 'reference')
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    operator = registry.operator(name)
    if name not in operator.functions:
        name = operator.functions[0]
    function = getattr(importlib.import_module("gdn"), name)  # by name, since the package imports this module
    with explaining() as asked:
        function(*args, **kwargs)
    answers = list(dict.fromkeys(asked.answers))
    if not answers:
        raise RuntimeError(f"{name} ran without asking the runtime what to run")
    spec = _spec((*args, *kwargs.values()))
    if not operator.composed_of:
        return _explanation(name, *answers[-1], spec)
    parts = tuple(_explanation(registry.operator(choice.op).functions[0], choice, problem, spec) for choice, problem in answers)
    first = parts[0]
    return Explanation(name, operator.name, first.backend, None, "none", first.decided_by, first.switches, (), (), None, parts)


def _spec(values: Iterable[Any]) -> DeviceSpec | None:
    """The device of the first tensor."""
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    return None if device is None else devices.spec(device)


def _explanation(function: str, choice: Choice, problem: Problem | None, spec: DeviceSpec | None) -> Explanation:
    shared = {field.name for field in fields(Explanation)} & vars(choice).keys()
    found = {name: getattr(choice, name) for name in shared}
    found["notes"] = (*choice.notes, *notes_of(problem, spec))
    return Explanation(function=function, problem=problem, **found)


def notes_of(problem: Problem | None, device: DeviceSpec | None) -> tuple[str, ...]:
    """What the problem of a call says of it. Without a device: of an H100."""
    return () if problem is None else problem.notes(device or H100)
