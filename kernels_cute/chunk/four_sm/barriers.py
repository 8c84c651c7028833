"""Barriers and shared memory of the blocks of the four-SM form. What each barrier protects: kernel.py."""

from typing import Any

from kernels_cute.chunk.barriers import (
    KEY_FACTORS_WRITTEN,
    Field,
    Fields,
    barrier_fields,
    each_warp,
    one_arrival,
    row_fields,
    tile_fields,
)
from kernels_cute.chunk.four_sm.shape import CHAINS, SET_KEY_STAGES, SETS, SLOTS
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable

_TICKET = {"ticket": Field("int32", 4, 4)}  # of a pair of the L2 ring, in the same place in either kind of block


def chain_barriers(spec: ChunkSpec) -> BarrierTable:
    """Barriers of a chain block of the four-SM form. `tiles` is the warp that arms `ready`: in a cluster of four a maker's.
    `load` and `tiles` wait for `full` and `ready` where the other chain loads for both."""
    stages, read = spec.stages, each_warp("state", "read, of either chain", CHAINS)
    return BarrierTable(
        {"state": 4, "load": 1, "values": 1, "tiles": 1},
        [
            Barrier("k_full", stages, one_arrival("load", "with K"), ("state", "load")),
            Barrier("k_empty", stages, read, ("load",)),
            Barrier("q_full", stages, one_arrival("load", "with Q"), ("state", "load")),
            Barrier("q_empty", stages, read, ("load",)),
            Barrier("v_full", stages, one_arrival("values", "with V"), ("state",)),
            Barrier("stored", stages, each_warp("state", "O where V was"), ("values",)),
            Barrier("ready", SLOTS, one_arrival("tiles", "with Z, P M and vectors"), ("state", "tiles")),
            Barrier("free", SLOTS, read, ("tiles",)),
        ],
    )


def maker_barriers(form: Any) -> BarrierTable:
    """Barriers of a maker block of the four-SM form; inverse, score and hand_over are those of one set."""
    read = each_warp("state", "read, of either chain", CHAINS)
    released = read if form.released_arrivals > 1 else one_arrival("hand_over", "Z and the rest read")
    table = BarrierTable(
        {"inverse": 4, "score": 4, "load": 1, "gates": 1, "hand_over": 1, "state": 4},
        [
            Barrier("k_full", SETS * SET_KEY_STAGES, one_arrival("load", "with K"), ("inverse", "score")),
            Barrier("k_empty", SETS * SET_KEY_STAGES, each_warp("score", "Z done"), ("load",)),
            Barrier("q_full", SETS, one_arrival("load", "with Q"), ("score",)),
            Barrier("q_empty", SETS, each_warp("score", "Q in registers"), ("load",)),
            Barrier("m_full", SETS, (Arrivals("inverse", "thread"),), ("score",)),
            Barrier("m_free", SETS, each_warp("score", "M in registers"), ("inverse",)),
            Barrier("made", SETS, (Arrivals("score", "thread"),), ("hand_over",)),
            Barrier("tile_released", SETS, released, ("score",)),
            Barrier("gates_full", SETS * 2, (Arrivals("gates", "thread"),), ("inverse", "score")),
            Barrier("factors_full", SETS * 2, KEY_FACTORS_WRITTEN, ("score",)),
            Barrier("gates_free", SETS * 2, each_warp("inverse") + each_warp("score"), ("gates",)),
        ],
    )
    assert table.count("tile_released") == form.released_arrivals
    return table


def chain_fields(spec: ChunkSpec) -> Fields:
    pieces, stages = spec.dim // 64, spec.stages
    tiles = tile_fields(spec, k=pieces * stages, q=pieces * stages, z=pieces * SLOTS, p=SLOTS, v=stages)
    return _TICKET | barrier_fields(chain_barriers(spec)) | row_fields(SLOTS, 0) | tiles


def maker_fields(spec: ChunkSpec, form: Any) -> Fields:
    pieces = spec.dim // 64
    keys = pieces * SETS * SET_KEY_STAGES
    tiles = tile_fields(spec, k=keys, q=pieces * SETS, z=pieces * SETS, p=SETS, plain=SETS, m=spec.parts * SETS, lower=SETS)
    return _TICKET | barrier_fields(maker_barriers(form)) | row_fields(SETS, SETS) | tiles
