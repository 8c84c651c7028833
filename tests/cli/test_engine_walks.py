"""An engine with full caches and failures at any place never goes on wrongly: random walks next to fresh passes."""

import pytest

from tests.cli import engine_walks

FEW, MANY = 30, 270


def test_no_stream_goes_on_wrongly() -> None:
    _, hit = engine_walks.run(range(FEW))
    assert len(hit) >= 20  # kinds of places that failed


@pytest.mark.cover
def test_every_place_fails_and_no_stream_goes_on_wrongly() -> None:
    known, hit = engine_walks.run(range(FEW, FEW + MANY))
    assert known == set(hit), f"places that no walk let fail: {known - set(hit)}"
