"""Barriers and shared memory of a block of the first launch of a split call."""

from kernels_cute.chunk.barriers import (
    KEY_FACTORS_WRITTEN,
    Fields,
    barrier_fields,
    each_warp,
    one_arrival,
    peer_arrivals,
    row_fields,
    tile_fields,
)
from kernels_cute.chunk.shape import BUFFERS
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable


def summary_barriers(spec: ChunkSpec) -> BarrierTable:
    """Barriers of a block that makes summaries. `state` is both of its state warpgroups."""
    ready = (Arrivals("inverse", "thread"), Arrivals("vectors", "thread"))
    return BarrierTable(
        {"state": 8, "inverse": 4, "load": 1, "gates": 1, "vectors": 1} | ({"hand_over": 1} if spec.paired else {}),
        [
            Barrier("k_full", spec.stages, one_arrival("load", "with the bytes of K and V"), ("state", "inverse")),
            Barrier("empty", spec.stages, each_warp("state", "K and V read"), ("load",)),
            Barrier("ready", BUFFERS, ready, ("state", "hand_over") if spec.paired else ("state",), peer_arrivals(spec)),
            Barrier("tile_released", BUFFERS, each_warp("state", blocks=spec.sharers), ("inverse", "vectors")),
            Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("inverse", "vectors")),
            Barrier("factors_full", 2, KEY_FACTORS_WRITTEN, ("vectors",)),
            Barrier("gates_free", 2, each_warp("inverse") + each_warp("vectors"), ("gates",)),
        ],
    )


def summary_fields(spec: ChunkSpec) -> Fields:
    keys = spec.dim // 64 * spec.stages
    tiles = tile_fields(spec, k=keys, v=keys, zeros=1, m=BUFFERS, lower=1)
    return barrier_fields(summary_barriers(spec)) | row_fields(BUFFERS, 1) | tiles
