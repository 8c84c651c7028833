"""A small, deterministic pairwise generator: few rows that between them hold every possible pair of axis values."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Choice = tuple[str, int]  # an axis and the position of a value on it: values need not hash

_CANDIDATES = 60  # allowed completions of a pair that compete for the most new pairs
_ATTEMPTS = 3000  # completions after which a pair counts as impossible


def full(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> Iterator[Row]:
    """The whole product, less the rows that are not allowed."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return (row for row in rows if allowed(row))


def pairwise(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Allowed rows that hold every pair of values which an allowed row can hold.

    The product is too large to list, so each missing pair is completed at random (from a fixed seed) and the completion
    with the most new pairs is taken.
    """
    source = random.Random(0)
    choices = [(name, i) for name, values in axes.items() for i in range(len(values))]
    missing = dict.fromkeys(pair for pair in combinations(choices, 2) if pair[0][0] != pair[1][0])  # a dict keeps the order
    chosen: list[Row] = []
    while missing:
        pair = next(iter(missing))
        best: dict[str, int] | None = None
        most = found = 0
        for _ in range(_ATTEMPTS):
            indices = {name: source.randrange(len(values)) for name, values in axes.items()}
            indices.update(pair)
            if not allowed({name: axes[name][i] for name, i in indices.items()}):
                continue
            gain = sum(new in missing for new in combinations(indices.items(), 2))
            if gain > most:
                best, most = indices, gain
            found += 1
            if found == _CANDIDATES:
                break
        if best is None:
            del missing[pair]
            continue
        for held in combinations(best.items(), 2):
            missing.pop(held, None)
        chosen.append({name: axes[name][i] for name, i in best.items()})
    return chosen
