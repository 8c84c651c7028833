"""Sizes of a serving engine's calls, as lines of growing sizes.

The kernel of a problem changes at a few sizes. `gdn.runtime.reach` asks on between two neighbours of a line that differ, so that
lines need few points; `tests/runtime/test_served.py` draws sizes anywhere.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdn.problem import Problem

SEQUENCES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PROMPTS = (1, 2, 4, 8, *(count for power in range(4, 18) for count in (1 << power, 3 << power - 1)))  # tokens of a step
LENGTHS = tuple(1 << power for power in range(4, 19))  # of a context
UNEVEN = (2, 8, 36, 64, 160)  # prompts of a step, one of which is long
# Tokens of such a step. The length of a segment, which decides what is compiled, goes up and down with them.
LONG = tuple(int(256 * 1.2**power) for power in range(36))
# Tokens of one or a few prompts, for rules whose forms take turns as these grow: in steps of a twentieth.
CLOSE = tuple(int(512 * 1.05**power) for power in range(114))
FEW = (1, 2, 3, 4, 8, 11, 22, 33, 36, 66)  # such prompts
ROWS = tuple(1 << power for power in range(16))  # of a step

Group = tuple[Problem, ...]  # a call's problem at all of its sizes


def at(problem: Any, names: tuple[str, ...], sizes: Iterator[tuple[int, ...]]) -> Group:
    """The problem at these sizes, each once; names that it lacks are left out."""
    own = problem.sizes().keys() & set(names)
    every = (dict(zip(names, one, strict=True)) for one in sizes)
    return tuple(dict.fromkeys(replace(problem, **{name: size[name] for name in own}) for size in every))


def steps(problem: Any, most_tokens: int = 1) -> Group:
    """The problem of a decode step: sequences of 1 to `most_tokens` tokens each."""
    counts = ((n * each, n) for each in range(1, 1 + most_tokens) for n in SEQUENCES)
    return at(problem, ("num_tokens", "num_sequences"), counts)


def prompts(problem: Any) -> Group:
    """The problem of a prefill step: lines of growing numbers of tokens, and of sequences."""
    names = ("num_tokens", "num_sequences")
    longer = at(problem, names, ((tokens, n) for n in SEQUENCES for tokens in PROMPTS if n <= tokens))
    more = at(problem, names, ((tokens, n) for tokens in PROMPTS[4::2] for n in SEQUENCES if n <= tokens))
    return longer + more + close(problem) + uneven(problem)


def close(problem: Any) -> Group:
    """The problem of a prefill step of few prompts, at numbers of tokens close to each other: of the rule, alone or in a step."""
    if "longest" not in problem.hints():
        return ()
    return at(problem, ("num_tokens", "num_sequences"), ((tokens, n) for n in FEW for tokens in CLOSE))


def uneven(problem: Any) -> Group:
    """The problem of a prefill step of which the host knows the longest prompt: next to rows of one token, to shorter prompts,
    and to others as long. Nothing where a problem has no such hint."""
    if "longest" not in problem.hints():
        return ()
    found = ((tokens, n, long) for tokens in LONG for n in UNEVEN for long in longs(tokens, n))
    return tuple(replace(problem, num_tokens=tokens, num_sequences=n, longest=long) for tokens, n, long in found)


def longs(num_tokens: int, num_sequences: int) -> list[int]:
    """Tokens of the longest prompt of so many: next to rows of one token, to prompts that share a small part or a quarter, and
    to others as long."""
    found = (num_tokens - num_sequences + 1, num_tokens * 31 // 32, num_tokens * 3 // 4)
    uneven = [long for long in found if num_sequences < long <= num_tokens - num_sequences + 1]
    return [*uneven, -(-num_tokens // num_sequences)]


def rows(problem: Any) -> Group:
    """The problem of an operator of single rows."""
    return at(problem, ("num_tokens",), ((count,) for count in sorted({*SEQUENCES, *PROMPTS})))
