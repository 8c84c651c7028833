"""Which kernel of an operator is the faster one: the built-in order, as a measured statement.

It decides wherever no table does: at sizes that were never tuned, and on devices without a table. The first statement that holds
for a problem is the one that counts. `python -m autotune choice` times what it says; whoever changes a kernel's speed runs that
and writes the numbers here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gdn.problems import Problem, RecurrentProblem


@dataclass(frozen=True)
class Statement:
    """One operator, or a region of its problems."""

    op: str
    order: tuple[str, ...]  # backends, the fastest first
    measured: str  # what was timed where, when, and what came out
    where: str = "everywhere"  # the region in words, and
    holds: Callable[[Problem], bool] = lambda problem: True  # whether a problem lies in it


_CUTE_FIRST = ("cute", "tilelang")


def _is_rounded_batch(problem: Problem) -> bool:
    if not isinstance(problem, RecurrentProblem) or not problem.has_rounding:
        return False
    return problem.num_tokens <= problem.num_sequences and problem.num_sequences * problem.num_state_heads >= 1024


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "chunk",
        _CUTE_FIRST,
        "H100, 2026-11-22, tuned medians: TileLang takes 1.11 to 1.47 times as long, on all 12 shapes of the benchmark",
    ),
    Statement(
        "recurrent",
        ("tilelang", "cute"),
        "H100, 2026-11-22, one token each, defaults: CuTe takes 1.05 to 1.09 times as long at 32 to 512 sequences of 32 heads",
        "stochastic rounding, one token a sequence, 1024 states or more",
        _is_rounded_batch,
    ),
    # Where TileLang is ahead: by 0.17 us of 2.6 (one sequence, 8 heads), and by 1 to 3.4 % on float32 pools of 128 sequences or
    # more. Tables that hold both kernels' times decide there; it is too little to say it of other devices.
    Statement(
        "recurrent",
        _CUTE_FIRST,
        "H100, 2026-11-21, tuned medians: TileLang takes 0.94 to 1.21 times as long, over 26 shapes",
    ),
    Statement(
        "mqa_logits",
        _CUTE_FIRST,
        "H100, 2026-11-21, tuned medians: TileLang takes 1.23 to 1.8 times as long, on every shape measured",
    ),
    Statement(
        "paged_mqa_logits",
        _CUTE_FIRST,
        "H100, 2026-11-21, tuned medians: TileLang takes 1.02 to 1.15 times as long, on all 8 shapes",
    ),
)


def statement(problem: Problem) -> Statement | None:
    """What was measured of the problem's operator; None where only one kernel exists."""
    return next((one for one in STATEMENTS if one.op == problem.op and one.holds(problem)), None)


def fastest_first(problem: Problem, backends: Iterable[str]) -> list[str]:
    """The backends in built-in order; those of which nothing was measured last, as they come."""
    found = statement(problem)
    order = found.order if found is not None else ()
    return sorted(backends, key=lambda backend: order.index(backend) if backend in order else len(order))
