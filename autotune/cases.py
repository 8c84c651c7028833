"""A shape as work on a device: inputs, the exact answer, a verdict on a kernel's result, and calls to time.

Each family of operators has a module `cases`, with a `gdn.core.tunable.Tunable` per operator under the operator's name.

Inputs rotate: there are enough sets of them that none is found in the L2 cache. The set that is checked is never timed, so
that timing, which updates states in place, cannot change what is checked.
"""

import functools

import torch

from gdn.core.tunable import Case, Shape, Tunable
from gdn.core.tunable import WrongResult as WrongResult
from gdn.device import DeviceSpec
from gdn.ops.delta_rule import inputs
from gdn.problem import Problem
from gdn.runtime import explaining, registry
from gdn.testing import timing


def tunable(op: str) -> Tunable:
    """The tuner's description of an operator."""
    found: Tunable = registry.operator(op).described("cases")
    return found


def lengths_of(problem: Problem) -> tuple[int, ...]:
    """Tokens of each sequence of a problem; none where it has no sequences."""
    own = tunable(problem.op).lengths
    if own is not None:
        return own(problem)
    sizes = problem.sizes()
    return inputs.even_lengths(sizes.get("num_tokens", sizes.get("num_rows", 0)), sizes.get("num_sequences", 0))


def refusal(shape: Shape) -> str | None:
    """Why no case can be made of a shape, None where one can: its small form is made here, and its call named by the runtime."""
    return _refusal(tunable(shape.op).small(shape))


@functools.cache
def _refusal(small: Shape) -> str | None:
    try:
        (call, *_) = tunable(small.op).case(small, torch.device("cpu"), 1).public_calls(None)
        with explaining() as asked:
            call()
    except ValueError as error:
        return str(error).partition(", got ")[0]
    made = [problem.static_fields() for _, problem in asked.answers if problem is not None]
    wanted = small.problem.static_fields()
    others = [name for name, value in wanted.items() if not made or made[0][name] != value]
    return f"its inputs are those of calls with another {', '.join(others)}" if others else None


def make(shape: Shape, device: torch.device, spec: DeviceSpec) -> Case:
    """The case of a shape, with as many sets of inputs as exceed the device's L2 cache."""
    copies = timing.copies_beyond_l2(shape.problem.bytes_moved(), spec.l2_bytes)
    return tunable(shape.op).case(shape, device, copies)
