"""Index arithmetic of the composing kernels, emulated thread by thread with the kernels' own tiles: what is copied, shared,
multiplied and stored is X <- P X + h, and every part of the chain lands where it belongs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn.models import QWEN3_NEXT_80B
from gdn.ops.context import examples
from kernels_cute.context.tiles import BLOCK_COLUMNS, FLOAT_BYTES, PIECE, ROWS, STAGES, UNIT_BYTES, Tiles, place_of

Array = Any


def tiles_of(K: int, V: int, v_first: bool) -> Tiles:
    problem = examples.context_total(QWEN3_NEXT_80B)
    return Tiles(replace(problem, head_k_dim=K, head_v_dim=V, state_v_first=v_first, num_state_heads=2))


def places(tiles: Tiles) -> list[Any]:
    found = []
    for thread in range(tiles.threads):
        place = place_of(tiles, thread)
        found.append(place._replace(thread=thread))
    return found


def take(tiles: Tiles, matrix: Array, block: int, width: int) -> Array:
    """Registers of every thread, as `chain.take` fills them. matrix: a head's, flat."""
    registers = np.full((tiles.threads, tiles.values), np.nan)
    for place in places(tiles):
        first = tiles.first_element(place, block, width)
        for step, register in tiles.accesses(width):
            assert (first + step) % 4 == 0, "16 bytes are aligned"
            registers[place.thread, register : register + 4] = matrix[first + step : first + step + 4]
    assert not np.isnan(registers).any()
    return registers


def put(tiles: Tiles, matrix: Array, block: int, width: int, registers: Array) -> None:
    for place in places(tiles):
        first = tiles.first_element(place, block, width)
        for step, register in tiles.accesses(width):
            assert np.isnan(matrix[first + step : first + step + 4]).all(), "no element twice"
            matrix[first + step : first + step + 4] = registers[place.thread, register : register + 4]


def copy_piece(tiles: Tiles, P: Array, piece: int) -> Array:
    """A stage after `chain.ask`."""
    stage = np.full(tiles.stage_bytes // FLOAT_BYTES, np.nan)
    for thread in range(tiles.threads):
        for u in range(tiles.units):
            unit = thread + u * tiles.threads
            if tiles.v_first:
                source, target = piece * tiles.stage_bytes + unit * UNIT_BYTES, unit * UNIT_BYTES
            else:
                row, part = unit // (PIECE // 4), unit % (PIECE // 4)
                source = row * tiles.K * FLOAT_BYTES + piece * PIECE * FLOAT_BYTES + part * UNIT_BYTES
                target = row * tiles.P_pitch + part * UNIT_BYTES
            assert source % 16 == target % 16 == 0
            stage[target // 4 : target // 4 + 4] = P[source // 4 : source // 4 + 4]
    return stage


def share(tiles: Tiles, registers: Array) -> Array:
    """Shared columns after `chain.share`."""
    shared = np.full(BLOCK_COLUMNS * tiles.x_pitch // FLOAT_BYTES, np.nan)
    for place in places(tiles):
        for c in range(tiles.columns):
            column = (place.column + c) * tiles.x_pitch
            for r in range(ROWS):
                row = place.row_lane * ROWS + r if tiles.v_first else place.row_lane + r * tiles.row_lanes
                shared[column // 4 + row] = registers[place.thread, tiles.register(r, c)]
    return shared


def multiply(tiles: Tiles, stage: Array, shared: Array, piece: int, sums: Array) -> None:
    for place in places(tiles):
        at_P = place.row_lane * (ROWS * FLOAT_BYTES if tiles.v_first else tiles.P_pitch)
        at_x = place.column * tiles.x_pitch + piece * PIECE * FLOAT_BYTES
        for j in range(0, PIECE, 4):
            x_at = [(at_x + c * tiles.x_pitch + j * FLOAT_BYTES) // 4 for c in range(tiles.columns)]
            steps = [(j + e) * tiles.P_pitch for e in range(4)] if tiles.v_first else [
                r * tiles.row_lanes * tiles.P_pitch + j * FLOAT_BYTES for r in range(ROWS)
            ]  # fmt: skip
            p_of = [stage[(at_P + step) // 4 :][:4] for step in steps]
            for e in range(4):
                for r in range(ROWS):
                    for c in range(tiles.columns):
                        factor = p_of[e][r] if tiles.v_first else p_of[r][e]
                        sums[place.thread, tiles.register(r, c)] += factor * shared[x_at[c] + e]


@pytest.mark.cover
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (64, 128), (128, 64)])
def test_a_link(K: int, V: int, v_first: bool) -> None:
    tiles, random = tiles_of(K, V, v_first), np.random.default_rng(1)
    P, X, h = (random.standard_normal(shape) for shape in ((K, K), (K, V), (K, V)))
    flat = [matrix.T.ravel() if v_first else matrix.ravel() for matrix in (P, X, h)]
    found = np.full(K * V, np.nan)
    for block in range(V // BLOCK_COLUMNS):
        registers = take(tiles, flat[1], block, V)
        shared, sums = share(tiles, registers), np.zeros_like(registers)
        for piece in range(tiles.pieces):
            multiply(tiles, copy_piece(tiles, flat[0], piece), shared, piece, sums)
        put(tiles, found, block, V, sums + take(tiles, flat[2], block, V))
    wanted = P @ X + h
    np.testing.assert_allclose(found, (wanted.T if v_first else wanted).ravel(), rtol=1e-9, atol=1e-9)


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
