"""Barriers and shared memory of a block of the form with several state heads a cluster."""

from kernels_cute.chunk.barriers import (
    Field,
    Fields,
    barrier_fields,
    each_warp,
    one_arrival,
    peer_arrivals,
    record_barriers,
    tile_fields,
    work_fields,
)
from kernels_cute.chunk.deal import RECORDS
from kernels_cute.chunk.key_head.shape import SCRATCH_BYTES, TRIANGLE_BYTES
from kernels_cute.chunk.shape import AUX_BYTES, BUFFERS, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable


def key_head_barriers(spec: ChunkSpec) -> BarrierTable:
    """Barriers of a block of the form with several state heads a cluster; `state` is the warpgroup of one of them. V of the heads
    takes turns in one ring."""
    heads, stages = spec.state_heads, spec.stages
    warps = {"state": 4, "maker": 4, "load": 1, "gates": 1, "store": 1, "hand_over": 1}
    records = record_barriers(warps)
    done = (*each_warp("state", blocks=heads), *(Arrivals(role, "warp") for role in warps if role != "state"))
    records[1] = Barrier("work_empty", RECORDS, done, ("gates",))
    # A stage of Q has chunks of one parity, as a buffer of M and P has: the maker reads those of its own.
    assert stages == BUFFERS
    queries_read = each_warp("state", "Q S done", heads)
    return BarrierTable(
        warps,
        [
            Barrier("k_full", spec.key_stages, one_arrival("load", "with the bytes of K"), ("state", "maker")),
            Barrier("k_empty", spec.key_stages, each_warp("state", "S done", heads), ("load",)),
            Barrier("q_full", stages, one_arrival("load", "with the bytes of Q"), ("state", "maker")),
            Barrier("q_empty", stages, queries_read + each_warp("maker"), ("load",), queries_read),
            Barrier("v_full", spec.value_stages, one_arrival("load", "with the bytes of V"), ("state",)),
            Barrier("v_empty", spec.value_stages, one_arrival("store", "O read"), ("load",)),
            Barrier("stored", spec.value_stages, each_warp("state", "O where V was"), ("store",)),
            Barrier("ready", BUFFERS, (Arrivals("maker", "thread"),), ("state", "hand_over"), peer_arrivals(spec)),
            Barrier("m_tile_released", BUFFERS, each_warp("state", "M done", heads * spec.sharers), ("maker",)),
            Barrier("tile_released", BUFFERS, each_warp("state", "P done", heads * spec.sharers), ("maker",)),
            Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("maker",)),
            Barrier("gates_free", 2, each_warp("maker"), ("gates",)),
            *records,
        ],
    )


def key_head_fields(spec: ChunkSpec) -> Fields:
    """Shared memory of a block of the form with several state heads a cluster; heads side by side."""
    pieces, heads = spec.dim // 64, spec.state_heads
    tiles = BUFFERS * heads
    rings = tile_fields(spec, k=pieces * spec.key_stages, q=pieces * spec.stages, v=spec.value_stages, m=tiles, p=tiles)
    lower = {"lower": Field("float16", heads * TRIANGLE_BYTES // 2, 1024)}
    sizes = {"vectors": BUFFERS * heads * VECTOR_BYTES, "rows": 2 * heads * AUX_BYTES, "scratch": 4 * heads * SCRATCH_BYTES}
    rows = {name: Field("float32", size // 4, 128) for name, size in sizes.items()}
    return barrier_fields(key_head_barriers(spec)) | work_fields() | rows | lower | rings
