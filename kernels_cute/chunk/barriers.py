"""Barriers and shared memory of a block of the fused kernel, as tables, and the parts that the tables of other forms have too.

The choice of a form depends on the sizes. What each barrier protects: fused.py."""

from typing import NamedTuple

from gdn.problem import DTYPE_BYTES
from kernels_cute.chunk.deal import RECORD_BYTES, RECORDS, SORTED
from kernels_cute.chunk.shape import AUX_BYTES, BUFFERS, CHUNK, SCRATCH_BYTES, START_BUFFERS, SUM_BUFFERS, VECTOR_BYTES, Z_BUFFERS
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable


class Field(NamedTuple):
    """An array in a block's shared memory."""

    dtype: str
    count: int
    align: int  # bytes

    @property
    def num_bytes(self) -> int:
        return self.count * _BYTES[self.dtype]


Fields = dict[str, Field]
_BYTES = DTYPE_BYTES | {"uint8": 1, "int64": 8}


def shared_bytes(fields: Fields) -> int:
    """Return the bytes of shared memory. Fields follow one another, each at a multiple of its alignment; the size is a multiple
    of the largest alignment."""
    end = 0
    for one in fields.values():
        end = _aligned(end, one.align) + one.num_bytes
    return _aligned(end, max(one.align for one in fields.values()))


def _aligned(num_bytes: int, align: int) -> int:
    return -(-num_bytes // align) * align


def one_arrival(role: str, what: str = "") -> tuple[Arrivals]:
    return (Arrivals(role, "role", what=what),)


def each_warp(role: str, what: str = "", blocks: int = 1) -> tuple[Arrivals]:
    return (Arrivals(role, "warp", blocks, what),)


def peer_arrivals(spec: ChunkSpec) -> tuple[Arrivals, ...]:
    """Arrivals on `ready` of a buffer that the other block of a pair fills: block b fills buffer b of both."""
    return one_arrival("hand_over", "of the other block, with the bytes") if spec.paired else ()


KEY_FACTORS_WRITTEN = (Arrivals("inverse", "thread", what="key factors written"),)


def block_barriers(spec: ChunkSpec, is_complete: bool = False) -> BarrierTable:
    """Barriers of a block of the fused kernel; is_complete: with those that only other forms of it have."""
    warps = {"state": 4, "inverse": 4, "score": 4, "load": 1, "gates": 1, "store": 1} | ({"hand_over": 1} if spec.paired else {})
    both = (Arrivals("inverse", "thread"), Arrivals("score", "thread"))
    barriers = [
        Barrier("k_full", spec.key_stages, one_arrival("load", "with the bytes of K"), ("state", "inverse", "score")),
        Barrier("k_empty", spec.key_stages, each_warp("state", "S done"), ("load",)),
        Barrier("full", spec.stages, one_arrival("load", "with those of Q and V"), ("state", "score")),
        Barrier("empty", spec.stages, one_arrival("store", "O read"), ("load",)),
        Barrier("stored", spec.stages, each_warp("state", "O where V was"), ("store",)),
        Barrier("ready", BUFFERS, both, ("state", "hand_over") if spec.paired else ("state",), peer_arrivals(spec)),
        Barrier("tile_released", BUFFERS, each_warp("state", blocks=spec.sharers), ("inverse", "score")),
        Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("inverse", "score")),
        Barrier("factors_full", 2, KEY_FACTORS_WRITTEN, ("score",)),
        Barrier("gates_free", 2, each_warp("inverse") + each_warp("score"), ("gates",)),
    ]
    if spec.has_norm:
        barriers = [one for one in barriers if one.name not in ("full", "stored")] + _norm_barriers(spec)
    if spec.is_split or is_complete:  # the start of a segment
        barriers += [
            Barrier("brought", START_BUFFERS, one_arrival("load", "with the bytes of P"), ("state",)),
            Barrier("used", START_BUFFERS, each_warp("state", "P read"), ("load",)),
            Barrier("composed", 1, each_warp("state", "all P read"), ("load",)),
        ]
    if spec.is_persistent or is_complete:
        barriers += record_barriers(warps)
    return BarrierTable(warps, barriers)


def record_barriers(warps: dict[str, int]) -> list[Barrier]:
    """Barriers of the records of work tiles. A warp arrives on `work_empty` when it needs the record no longer."""
    return [
        Barrier("work_full", RECORDS, one_arrival("gates"), tuple(warps)),
        Barrier("work_empty", RECORDS, tuple(Arrivals(role, "warp") for role in warps), ("gates",)),
    ]


def _norm_barriers(spec: ChunkSpec) -> list[Barrier]:
    """Barriers that differ where score norms the outputs, and Q has a ring of its own."""
    sums = (Arrivals("score", "role", what="with the bytes of the other block"),)
    return [
        Barrier("full", spec.stages, one_arrival("load", "with the bytes of V"), ("state",)),
        Barrier("q_full", spec.query_stages, one_arrival("load", "with those of Q"), ("state", "score")),
        Barrier("q_empty", spec.query_stages, each_warp("state", "Q S done"), ("load",)),
        Barrier("stored", spec.stages, each_warp("state", "O where V was"), ("score",)),
        Barrier("z_full", Z_BUFFERS, one_arrival("store", "with the bytes of z"), ("score",)),
        Barrier("sums_full", SUM_BUFFERS, sums, ("score",)),
        Barrier("normed", spec.stages, each_warp("score", "the result where O was, z read"), ("store",)),
    ]


def block_fields(spec: ChunkSpec) -> Fields:
    """Shared memory of a block of the fused kernel."""
    pieces, stages = spec.dim // 64, spec.stages
    norm = {"z": Z_BUFFERS} if spec.has_norm else {}
    tiles = tile_fields(
        spec, k=pieces * spec.key_stages, q=pieces * spec.query_stages, v=stages, **norm, m=BUFFERS, p=BUFFERS, lower=1
    )
    # With the norm there is no room for barriers that nobody waits for.
    table = block_barriers(spec, is_complete=not spec.has_norm)
    return barrier_fields(table) | work_fields() | row_fields(BUFFERS, 1) | tiles


def barrier_fields(table: BarrierTable) -> Fields:
    return {name: Field("int64", barrier.stages, 8) for name, barrier in table.barriers.items()}


def work_fields() -> Fields:
    return {"records": Field("int32", RECORDS * RECORD_BYTES // 4, 16), "order": Field("uint8", SORTED, 16)}


def row_fields(buffers: int, sets: int) -> Fields:
    """Return the row vectors of `buffers` chunks and, for each set of an inverse and a score warpgroup, the rows that the two
    share and their scratch."""
    sizes = {"vectors": buffers * VECTOR_BYTES, "rows": sets * 2 * AUX_BYTES, "scratch": sets * 4 * SCRATCH_BYTES}
    return {name: Field("float32", size // 4, 128) for name, size in sizes.items() if size}


def tile_fields(spec: ChunkSpec, **counts: int) -> Fields:
    """64 x 64 tiles of 16-bit elements."""
    dtypes = {"lower": "float16"}
    return {name: Field(dtypes.get(name, spec.dtype_name), CHUNK * 64 * count, 1024) for name, count in counts.items()}
