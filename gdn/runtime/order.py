"""Built-in order of an operator's kernels, as measured statements about which is faster.

It decides wherever no table does: at sizes that were never tuned, and on devices without a table. The first statement that holds
for a problem counts. `python -m autotune choice` times the statements: run it after changing a kernel's speed, and write the
numbers here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gdn.problem import Problem


@dataclass(frozen=True)
class Statement:
    """Order of the backends for an operator, or for a region of its problems."""

    op: str
    order: tuple[str, ...]  # backends, the fastest first
    measured: str  # device, date, what was timed and the result
    where: str = "everywhere"  # the region in words
    holds: Callable[[Any], bool] = lambda problem: True  # whether a problem of the operator is in the region


_CUTE_FIRST = ("cute", "tilelang")


def _is_rounded_batch(problem: Any) -> bool:
    if not getattr(problem, "has_rounding", False):
        return False
    return bool(problem.num_tokens <= problem.num_sequences and problem.num_sequences * problem.num_state_heads >= 1024)


def _is_dense_and_few(problem: Any) -> bool:
    """Few query tokens over all positions of long sequences: the CuTe kernel splits a sequence over 16 SMs at most."""
    if not getattr(problem, "dense", False):
        return False
    return bool(problem.num_tokens * problem.num_kv_heads <= 32 and problem.k >= 16384)


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "chunk", _CUTE_FIRST,
        "H100, 2026-11-22, tuned medians: TileLang takes 1.11 to 1.47 times as long, on all 12 shapes of the benchmark",
    ),
    Statement(
        "recurrent", ("tilelang", "cute"),
        "H100, 2026-11-22, one token each, defaults: CuTe takes 1.05 to 1.09 times as long at 32 to 512 sequences of 32 heads",
        "stochastic rounding, one token a sequence, 1024 states or more", _is_rounded_batch,
    ),
    # TileLang is faster by 0.17 us of 2.6 (one sequence, 8 heads), and by 1 to 3.4 % on float32 pools of 128 or more sequences.
    # There the tables decide, with times of both kernels; the difference is too small to generalise to other devices.
    Statement(
        "recurrent", _CUTE_FIRST, "H100, 2026-11-21, tuned medians: TileLang takes 0.94 to 1.21 times as long, over 26 shapes"
    ),
    Statement(
        "mqa_logits", _CUTE_FIRST,
        "H100, 2026-11-21, tuned medians: TileLang takes 1.23 to 1.8 times as long, on every shape measured",
    ),
    Statement(
        "paged_mqa_logits", _CUTE_FIRST,
        "H100, 2026-11-21, tuned medians: TileLang takes 1.02 to 1.15 times as long, on all 8 shapes",
    ),
    Statement(
        "sparse_attention_decode", ("tilelang", "cute"),
        "H100, 2026-11-23, defaults: TileLang takes 0.89 to 0.90 times as long at 1, 4, 16 sequences of 32768 tokens, 16/2 heads",
        "all positions, at most 32 (query, key head) pairs, 16384 positions or more", _is_dense_and_few,
    ),
    Statement(
        "sparse_attention_decode", _CUTE_FIRST,
        "H100, 2026-11-23, defaults: TileLang takes 1.07, 1.16, 1.36 times as long at 64 sequences of 16/2 and of 8/1 heads and "
        "at one, k 2048; with all positions 1.04 at 64 sequences, 1.30 at one of 2048 tokens",
    ),
)  # fmt: skip


def statement(problem: Problem) -> Statement | None:
    """Statement that holds for the problem; None where only one kernel exists."""
    return next((one for one in STATEMENTS if one.op == problem.op and one.holds(problem)), None)


def fastest_first(problem: Problem, backends: Iterable[str]) -> list[str]:
    """Backends in built-in order; unmeasured ones last, in the given order."""
    found = statement(problem)
    order = found.order if found is not None else ()
    return sorted(backends, key=lambda backend: order.index(backend) if backend in order else len(order))
