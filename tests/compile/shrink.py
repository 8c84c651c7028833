"""Makes a pairwise cover smaller: drops a row and changes the others until they hold its pairs again, by annealing.

A greedy cover is up to a third larger than it need be, and every row is a compilation. Deterministic, like the greedy cover.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from tests.compile.pairwise import Row

Indices = tuple[int, ...]  # of the values of a row, in the order of the axes
Pair = tuple[int, int, int, int]  # axis, index of its value, a later axis, index of its value

_MOVES = 8000  # changes tried until a cover without a row counts as impossible
_DROPS = 2  # rows that are tried to go, each from the same cover
_TEMPERATURE = 0.4  # in pairs: a change that loses one pair is kept in one case of twelve
_THIRD_VALUE = 0.3  # of the changes that also change a value which is in no missing pair: some pairs allow few others


def _pairs(indices: Indices) -> list[Pair]:
    return [(a, i, b, j) for (a, i), (b, j) in combinations(enumerate(indices), 2)]


class _Cover:
    """Rows, how many of them hold each pair, and the pairs that none holds."""

    def __init__(self, rows: Sequence[Indices], wanted: Mapping[Pair, None]) -> None:
        self.rows = list(rows)
        self.held = Counter(pair for row in rows for pair in _pairs(row))
        self.missing = {pair: None for pair in wanted if not self.held[pair]}  # a dict keeps the order

    def alone(self, row: Indices) -> int:
        """Pairs that no other row holds."""
        return sum(self.held[pair] == 1 for pair in _pairs(row))

    def loss(self, at: int, new: Indices) -> int:
        """Number of pairs more that would be missing with another row in this place."""
        before, after = set(_pairs(self.rows[at])), set(_pairs(new))
        lost = sum(self.held[pair] == 1 for pair in before - after)
        return lost - sum(pair in self.missing for pair in after - before)

    def change(self, at: int, new: Indices) -> None:
        before, after = _pairs(self.rows[at]), _pairs(new)
        self.rows[at] = new
        self.held.subtract(before)
        self.held.update(after)
        for pair in after:
            self.missing.pop(pair, None)
        for pair in before:  # every pair that a row ever holds is a possible, and so a wanted one
            if not self.held[pair]:
                self.missing[pair] = None


def shrink(
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    rows: Sequence[Row],
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[Row]:
    """Few allowed rows that hold every pair of the given ones; those that cost most go first."""
    names = list(axes)
    verdicts: dict[Indices, bool] = {}

    def row_of(indices: Indices) -> Row:
        return {name: axes[name][i] for name, i in zip(names, indices, strict=True)}

    def is_allowed(indices: Indices) -> bool:
        if indices not in verdicts:
            verdicts[indices] = allowed(row_of(indices))
        return verdicts[indices]

    source = random.Random(0)
    found = [tuple(list(axes[name]).index(row[name]) for name in names) for row in rows]
    wanted = dict.fromkeys(pair for indices in found for pair in _pairs(indices))
    # No row holds two pairs of the same two axes.
    least = max(Counter((a, b) for a, _, b, _ in wanted).values(), default=len(found))
    while len(found) > least:
        cover = _Cover(found, wanted)
        order = sorted(range(len(found)), key=lambda at: cover.alone(found[at]) / cost(row_of(found[at])))
        for at in order[:_DROPS]:
            fewer = _anneal(_Cover(found[:at] + found[at + 1 :], wanted), axes, is_allowed, source)
            if fewer is not None:
                found = fewer
                break
        else:
            break
    return [row_of(indices) for indices in found]


def _anneal(
    cover: _Cover, axes: Mapping[str, Sequence[Any]], is_allowed: Callable[[Indices], bool], source: random.Random
) -> list[Indices] | None:
    """The cover's rows, changed until no pair is missing; None where that was not reached."""
    sizes = [len(values) for values in axes.values()]
    for _ in range(_MOVES):
        if not cover.missing:
            return cover.rows
        a, i, b, j = source.choice(list(cover.missing))
        at = source.randrange(len(cover.rows))
        new = list(cover.rows[at])
        if source.random() < _THIRD_VALUE:
            axis = source.randrange(len(sizes))
            new[axis] = source.randrange(sizes[axis])
        new[a], new[b] = i, j
        if not is_allowed(tuple(new)):
            continue
        loss = cover.loss(at, tuple(new))
        if loss <= 0 or source.random() < math.exp(-loss / _TEMPERATURE):
            cover.change(at, tuple(new))
    return None
