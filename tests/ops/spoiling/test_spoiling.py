"""Good calls of every operator, spoilt in one place: what the table accepts gives the good call's results, what it refuses
raises an error that names the argument, and no tensor is changed but what the operator says it writes.

A failure names the row and the seed: `python -m tests.ops.spoiling OPERATOR ARGUMENT SPOILING SEED` makes that call again.
"""

import pytest

import gdn
from tests.ops.spoiling.calls import OPERATORS, cover_from
from tests.ops.spoiling.judge import Wrong, check, draw
from tests.ops.spoiling.spoilings import SPOILINGS
from tests.ops.spoiling.table import TABLE, Row, rows

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS_TO_TRY = 400  # until a row applied to as many calls
CALLS_PER_ROW = 1
MORE_CALLS_PER_ROW = 3  # of the tests that take minutes
CALLS_PER_TEST = 100
ARGUMENTS = list(dict.fromkeys((row.operator, row.argument) for operator in TABLE for row in rows(operator)))
NO_OPERATORS = {"__version__", "explain", "get_paged_mqa_logits_metadata", "ring_shape", "warmup"}


def _report(failures: list[str], calls: int) -> None:
    assert not failures, f"{len(failures)} of {calls}:\n" + "\n".join(failures)


def _failure(row: Row, seed: int) -> str | None:
    try:
        check(row, seed)
    except Wrong as wrong:
        return f"{row} | seed {seed} | {row.verdict.value} | {wrong}"
    return None


def test_every_public_operator_has_calls_and_rows() -> None:
    assert set(OPERATORS) == set(TABLE) == set(gdn.__all__) - NO_OPERATORS


def test_every_spoiling_is_used() -> None:
    assert {row.spoiling for operator in TABLE for row in rows(operator)} == set(SPOILINGS)


@pytest.mark.parametrize("calls", [CALLS_PER_ROW, pytest.param(MORE_CALLS_PER_ROW, marks=pytest.mark.cover)])
@pytest.mark.parametrize(("operator", "argument"), ARGUMENTS)
def test_each_row(operator: str, argument: str, calls: int) -> None:
    table = list(rows(operator, argument))
    _report([failure for row in table if (failure := _first_calls(row, calls))], len(table))


def _first_calls(row: Row, calls: int) -> str | None:
    """Fault of the row at the first seeds that it applies to, as many as `calls`."""
    applied = 0
    for seed in range(SEEDS_TO_TRY):
        try:
            applied += check(row, seed)
        except Wrong as wrong:
            return f"{row} | seed {seed} | {row.verdict.value} | {wrong}"
        if applied == calls:
            return None
    return None if applied else f"{row} | applies to no call of seeds 0 to {SEEDS_TO_TRY - 1}"


@pytest.mark.parametrize("first", cover_from(1_000, range(0, 21_000, CALLS_PER_TEST)))
def test_seeded_calls(first: int) -> None:
    failures = [_failure(draw(seed), seed) for seed in range(first, first + CALLS_PER_TEST)]
    _report([failure for failure in failures if failure], CALLS_PER_TEST)
