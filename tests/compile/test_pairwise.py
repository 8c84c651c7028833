"""The cover really covers."""

from itertools import combinations, product

import pytest

from gdn.runtime import registry
from tests.compile import pairwise, shrink, variants


def _pairs(rows: list[pairwise.Row]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}


def test_every_possible_pair_is_held_and_no_row_is_forbidden() -> None:
    axes = {"a": [1, 2, 3], "b": [1, 2, 3, 4], "c": [True, False], "d": [True, False], "e": [0, 1, 2]}

    def allowed(row: pairwise.Row) -> bool:
        return not (row["a"] == 3 and row["c"]) and row["b"] != row["e"]

    everything = list(pairwise.full(axes, allowed))
    assert all(allowed(row) for row in everything) and len(everything) < len(list(product(*axes.values())))
    rows = pairwise.pairwise(axes, allowed)
    assert all(allowed(row) for row in rows)
    assert _pairs(rows) == _pairs(everything)
    assert len(rows) < len(everything) / 3
    assert rows == pairwise.pairwise(axes, allowed)
    fewer = shrink.shrink(axes, allowed, [*rows, *rows])
    assert len(fewer) <= len(rows) and all(allowed(row) for row in fewer)
    assert _pairs(fewer) == _pairs(everything)
    assert fewer == shrink.shrink(axes, allowed, [*rows, *rows])


@pytest.mark.parametrize("op", [operator.name for operator in registry.with_kernels()])
def test_cover_of_an_operator_holds_every_value(op: str) -> None:
    described = variants.of(op)
    rows = pairwise.pairwise(described.axes, lambda row: described.problem(row) is not None)
    assert len(rows) <= 45
    for name, values in described.axes.items():
        for value in values:
            assert any(row[name] == value for row in rows), (name, value)
