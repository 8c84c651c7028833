"""What a served model asks of the tuner: a shape for each tune key and usual size that its calls reach.

Problems come from `gdn.served`, as those of `gdn compile` do. A table's entry serves every problem of its tune key, so one
problem stands for all of a key: the first of which a case can be made. Sizes are those of the operator's own shapes, as far as
the model's calls have them; the most usual one, of which the operator has most shapes, comes first, and of several the middle.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune import cases
from autotune import shapes as shape_list
from autotune.shapes import Shape
from autotune.tuning import Kernel
from gdn import runtime, served
from gdn.device import DeviceSpec
from gdn.problem import Problem
from gdn.runtime import registry, tuned
from gdn.served.sizes import Group

REFERENCE = "no kernel serves its calls"


@dataclass
class Workload:
    """Shapes of each kernel that calls take, and what is left out: operator and reason, to the number of its tune keys."""

    shapes: dict[Kernel, list[Shape]] = field(default_factory=dict)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)


def of_config(config: Any, num_spec: int, spec: DeviceSpec, backend: str | None = None) -> Workload:
    """The workload of a rank of a model (a `gdn.layers.HybridConfig`). backend: in place of the one that calls take."""
    if backend not in (None, *registry.KERNEL_BACKENDS):
        raise ValueError(f"backend: expected one of {', '.join(registry.KERNEL_BACKENDS)}, got {backend!r}")
    made, by_key = Workload(), dict[tuple[str, str], list[Group]]()
    for group in served.groups(config, num_spec=num_spec):
        by_key.setdefault((group[0].op, group[0].tune_key()), []).append(group)
    found: dict[str, list[Shape]] = {}
    for (op, _), groups in by_key.items():
        if op not in shape_list.operators():
            made.left_out[op, REFERENCE] += 1
            continue
        shapes, why = _shapes(op, groups)
        found.setdefault(op, []).extend(shapes)
        if not shapes:
            made.left_out[op, why] += 1
    for op, shapes in found.items():
        for shape in _named(shapes):
            kernel = _kernel(shape.problem, spec, backend)
            if kernel is None:
                made.left_out[op, REFERENCE] += 1
            else:
                made.shapes.setdefault(kernel, []).append(shape)
    return made


def _kernel(problem: Problem, spec: DeviceSpec, backend: str | None) -> Kernel | None:
    name = runtime.explain_problem(problem, spec).backend if backend is None else backend
    module = registry.operator(problem.op).modules.get(name)
    return None if module is None else Kernel(problem.op, name, module)


def _shapes(op: str, groups: Sequence[Group]) -> tuple[list[Shape], str]:
    """Shapes of one tune key, the most usual size first; and why there is none."""
    own = shape_list.shapes(op, tuned=True)
    count = Counter(_sizes(shape.problem) for shape in own)
    middle = {name: int(statistics.median(shape.problem.sizes()[name] for shape in own)) for name in own[0].problem.sizes()}
    usual = sorted(own, key=lambda one: (-count[_sizes(one.problem)], tuned.distance(one.problem.sizes(), middle)))
    found: dict[tuple[int, ...], Shape] = {}
    reasons: list[str] = []
    for group in groups:
        for shape in _at_usual_sizes(group, usual):
            sizes = _sizes(shape.problem)
            if sizes in found:
                continue
            refusal = cases.refusal(shape)
            if refusal is None:
                found[sizes] = shape
            else:
                reasons.append(refusal)
    order = {_sizes(shape.problem): place for place, shape in enumerate(usual)}
    ordered = sorted(found, key=lambda sizes: order.get(sizes, len(order)))
    return [found[sizes] for sizes in ordered], next(iter(reasons), "")


def _sizes(problem: Problem) -> tuple[int, ...]:
    return tuple(problem.sizes().values())


def _at_usual_sizes(group: Group, usual: Sequence[Shape]) -> Iterator[Shape]:
    """The group's problem at the sizes of the operator's shapes; where it has none of them, at the nearest."""
    known = {_sizes(problem): problem for problem in group}
    exact = [(shape, known.get(_sizes(shape.problem))) for shape in usual]
    if not any(problem for _, problem in exact):
        exact = [(shape, _nearest(group, shape)) for shape in usual]
    for shape, problem in exact:
        if problem is not None:
            is_same = problem.sizes() == shape.problem.sizes()
            yield replace(shape, problem=problem, lengths=shape.lengths if is_same else cases.lengths_of(problem))


def _nearest(group: Group, shape: Shape) -> Problem:
    sizes = shape.problem.sizes()
    return min(group, key=lambda problem: tuned.distance(problem.sizes(), sizes))


def _named(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """The shapes under names of their own: the sizes, and the fields in which the operator's tune keys differ."""
    values: dict[str, set[Any]] = {}
    for shape in shapes:
        for name, value in shape.problem.tune_fields().items():
            values.setdefault(name, set()).add(value)
    differing = [name for name, every in values.items() if len(every) > 1]
    for shape in shapes:
        parts = [f"{name} {value}" for name, value in shape.problem.sizes().items()]
        parts += [f"{name} {getattr(shape.problem, name)}" for name in differing]
        yield replace(shape, name=", ".join(parts))
