"""The tiles of the composing kernels: banks of shared memory, lanes of a warp, stages. Which element goes where is held by
tests/compile/test_context_emulated.py, which runs the kernels."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.models import QWEN3_NEXT_80B
from gdn.ops.context import examples
from kernels_cute.context.tiles import BLOCK_COLUMNS, FLOAT_BYTES, ROWS, STAGES, Tiles, place_of


def tiles_of(K: int, V: int, v_first: bool) -> Tiles:
    problem = examples.context_total(QWEN3_NEXT_80B)
    return Tiles(replace(problem, head_k_dim=K, head_v_dim=V, state_v_first=v_first, num_state_heads=2))


def places(tiles: Tiles) -> list[Any]:
    found = []
    for thread in range(tiles.threads):
        place = place_of(tiles, thread)
        found.append(place._replace(thread=thread))
    return found


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", [64, 128])
def test_eight_lanes_of_an_access_hit_all_banks(K: int, v_first: bool) -> None:
    """A lane reads 16 bytes of P at a time, and eight lanes are served at once."""
    tiles = tiles_of(K, K, v_first)
    for start in range(0, tiles.threads, 8):
        lanes = places(tiles)[start : start + 8]
        step = ROWS * FLOAT_BYTES if v_first else tiles.P_pitch
        words = {place.row_lane * step // 4 + i for place in lanes for i in range(4)}
        assert len({word % 32 for word in words}) == 32 == len(words)
        stored = [place.row_lane * (ROWS if v_first else 1) for place in lanes]
        assert len({word % 32 for word in stored}) == 8, "stores of X"


def test_lanes_that_share_columns_are_of_one_warp() -> None:
    """A warp alone reads the columns that it writes, so a barrier of the warp protects them."""
    for K in (64, 128):
        for v_first in (False, True):
            tiles = tiles_of(K, 64, v_first)
            writers: dict[int, set[int]] = {}
            for place in places(tiles):
                for c in range(tiles.columns):
                    writers.setdefault(place.column + c, set()).add(place.thread // 32)
            assert sorted(writers) == list(range(BLOCK_COLUMNS)) and all(len(warps) == 1 for warps in writers.values())


@pytest.mark.parametrize(("links", "pieces"), [(0, 4), (1, 4), (1, 2), (3, 4), (7, 2)])
def test_a_stage_is_read_when_it_holds_its_piece(links: int, pieces: int) -> None:
    """Groups of copies of a thread as `chain.compose` commits and awaits them."""
    stages: dict[int, int] = {}
    groups: list[int | None] = []  # the piece of each group

    def ask(q: int) -> None:
        groups.append(q if q // pieces < links else None)
        if groups[-1] is not None:
            stages[q % STAGES] = q

    for q in range(STAGES - 1):
        ask(q)
    for q in range(links * pieces):
        arrived = groups[: len(groups) - (STAGES - 2)]  # all groups but the last STAGES - 2
        assert q in arrived
        ask(q + STAGES - 1)
        assert stages[q % STAGES] == q, "the copy that was asked for now goes to another stage"
