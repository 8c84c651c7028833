"""Barriers and shared memory of the blocks of the chunk kernels, as tables: what is chosen depends on their size. What each
barrier protects: fused.py, four_sm/kernel.py."""

from typing import Any, NamedTuple

from gdn.problems import DTYPE_BYTES
from kernels_cute.chunk.deal import RECORD_BYTES, RECORDS, SORTED
from kernels_cute.chunk.four_sm.shape import CHAINS, SET_KEY_STAGES, SETS, SLOTS
from kernels_cute.chunk.key_head.shape import SCRATCH_BYTES as HEAD_SCRATCH_BYTES
from kernels_cute.chunk.key_head.shape import TRIANGLE_BYTES
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
    """Bytes of shared memory: one field after the other, each at a multiple of its alignment, and the whole of the largest."""
    end = 0
    for one in fields.values():
        end = _aligned(end, one.align) + one.num_bytes
    return _aligned(end, max(one.align for one in fields.values()))


def _aligned(num_bytes: int, align: int) -> int:
    return -(-num_bytes // align) * align


def _one(role: str, what: str = "") -> tuple[Arrivals]:
    return (Arrivals(role, "role", what=what),)


def _each_warp(role: str, what: str = "", blocks: int = 1) -> tuple[Arrivals]:
    return (Arrivals(role, "warp", blocks, what),)


def _peer(spec: ChunkSpec) -> tuple[Arrivals, ...]:
    """Arrivals on `ready` of a buffer that the other block of a pair fills: block b fills buffer b of both."""
    return _one("hand_over", "of the other block, with the bytes") if spec.paired else ()


_FACTORS = (Arrivals("inverse", "thread", what="key factors written"),)


def block_barriers(spec: ChunkSpec, is_complete: bool = False) -> BarrierTable:
    """Barriers of a block of the fused kernel; is_complete: with those that only other forms of it have."""
    warps = {"state": 4, "inverse": 4, "score": 4, "load": 1, "gates": 1, "store": 1} | ({"hand_over": 1} if spec.paired else {})
    both = (Arrivals("inverse", "thread"), Arrivals("score", "thread"))
    barriers = [
        Barrier("k_full", spec.key_stages, _one("load", "with the bytes of K"), ("state", "inverse", "score")),
        Barrier("k_empty", spec.key_stages, _each_warp("state", "S done"), ("load",)),
        Barrier("full", spec.stages, _one("load", "with those of Q and V"), ("state", "score")),
        Barrier("empty", spec.stages, _one("store", "O read"), ("load",)),
        Barrier("stored", spec.stages, _each_warp("state", "O where V was"), ("store",)),
        Barrier("ready", BUFFERS, both, ("state", "hand_over") if spec.paired else ("state",), _peer(spec)),
        Barrier("tile_released", BUFFERS, _each_warp("state", blocks=spec.sharers), ("inverse", "score")),
        Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("inverse", "score")),
        Barrier("factors_full", 2, _FACTORS, ("score",)),
        Barrier("gates_free", 2, _each_warp("inverse") + _each_warp("score"), ("gates",)),
    ]
    if spec.has_norm:
        barriers = [one for one in barriers if one.name not in ("full", "stored")] + _norm_barriers(spec)
    if spec.is_split or is_complete:  # the start of a segment
        barriers += [
            Barrier("brought", START_BUFFERS, _one("load", "with the bytes of P"), ("state",)),
            Barrier("used", START_BUFFERS, _each_warp("state", "P read"), ("load",)),
            Barrier("composed", 1, _each_warp("state", "all P read"), ("load",)),
        ]
    if spec.is_persistent or is_complete:
        barriers += _records(warps)
    return BarrierTable(warps, barriers)


def _records(warps: dict[str, int]) -> list[Barrier]:
    """Records of work tiles; empty: a warp is done with the record."""
    return [
        Barrier("work_full", RECORDS, _one("gates"), tuple(warps)),
        Barrier("work_empty", RECORDS, tuple(Arrivals(role, "warp") for role in warps), ("gates",)),
    ]


def key_head_barriers(spec: ChunkSpec) -> BarrierTable:
    """Barriers of a block of the form with several state heads a cluster; `state` is the warpgroup of one of them. V of the heads
    takes turns in one ring."""
    heads, stages = spec.state_heads, spec.stages
    warps = {"state": 4, "maker": 4, "load": 1, "gates": 1, "store": 1, "hand_over": 1}
    records = _records(warps)
    done = (*_each_warp("state", blocks=heads), *(Arrivals(role, "warp") for role in warps if role != "state"))
    records[1] = Barrier("work_empty", RECORDS, done, ("gates",))
    # A stage of Q has chunks of one parity, as a buffer of M and P has: the maker reads those of its own.
    assert stages == BUFFERS
    queries_read = _each_warp("state", "Q S done", heads)
    return BarrierTable(
        warps,
        [
            Barrier("k_full", spec.key_stages, _one("load", "with the bytes of K"), ("state", "maker")),
            Barrier("k_empty", spec.key_stages, _each_warp("state", "S done", heads), ("load",)),
            Barrier("q_full", stages, _one("load", "with the bytes of Q"), ("state", "maker")),
            Barrier("q_empty", stages, queries_read + _each_warp("maker"), ("load",), queries_read),
            Barrier("v_full", spec.value_stages, _one("load", "with the bytes of V"), ("state",)),
            Barrier("v_empty", spec.value_stages, _one("store", "O read"), ("load",)),
            Barrier("stored", spec.value_stages, _each_warp("state", "O where V was"), ("store",)),
            Barrier("ready", BUFFERS, (Arrivals("maker", "thread"),), ("state", "hand_over"), _peer(spec)),
            Barrier("m_tile_released", BUFFERS, _each_warp("state", "M done", heads * spec.sharers), ("maker",)),
            Barrier("tile_released", BUFFERS, _each_warp("state", "P done", heads * spec.sharers), ("maker",)),
            Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("maker",)),
            Barrier("gates_free", 2, _each_warp("maker"), ("gates",)),
            *records,
        ],
    )


def _norm_barriers(spec: ChunkSpec) -> list[Barrier]:
    """Barriers that differ where score norms the outputs, and Q has a ring of its own."""
    sums = (Arrivals("score", "role", what="with the bytes of the other block"),)
    return [
        Barrier("full", spec.stages, _one("load", "with the bytes of V"), ("state",)),
        Barrier("q_full", spec.query_stages, _one("load", "with those of Q"), ("state", "score")),
        Barrier("q_empty", spec.query_stages, _each_warp("state", "Q S done"), ("load",)),
        Barrier("stored", spec.stages, _each_warp("state", "O where V was"), ("score",)),
        Barrier("z_full", Z_BUFFERS, _one("store", "with the bytes of z"), ("score",)),
        Barrier("sums_full", SUM_BUFFERS, sums, ("score",)),
        Barrier("normed", spec.stages, _each_warp("score", "the result where O was, z read"), ("store",)),
    ]


def summary_barriers(spec: ChunkSpec) -> BarrierTable:
    """Barriers of a block of the first launch of a split call; `state` is both of its state warpgroups."""
    ready = (Arrivals("inverse", "thread"), Arrivals("vectors", "thread"))
    return BarrierTable(
        {"state": 8, "inverse": 4, "load": 1, "gates": 1, "vectors": 1} | ({"hand_over": 1} if spec.paired else {}),
        [
            Barrier("k_full", spec.stages, _one("load", "with the bytes of K and V"), ("state", "inverse")),
            Barrier("empty", spec.stages, _each_warp("state", "K and V read"), ("load",)),
            Barrier("ready", BUFFERS, ready, ("state", "hand_over") if spec.paired else ("state",), _peer(spec)),
            Barrier("tile_released", BUFFERS, _each_warp("state", blocks=spec.sharers), ("inverse", "vectors")),
            Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("inverse", "vectors")),
            Barrier("factors_full", 2, _FACTORS, ("vectors",)),
            Barrier("gates_free", 2, _each_warp("inverse") + _each_warp("vectors"), ("gates",)),
        ],
    )


def chain_barriers(spec: ChunkSpec) -> BarrierTable:
    """Barriers of a chain block of the four-SM form. `tiles` is the warp that arms `ready`: in a cluster of four a maker's.
    `load` and `tiles` wait for `full` and `ready` where the other chain loads for both."""
    stages, read = spec.stages, _each_warp("state", "read, of either chain", CHAINS)
    return BarrierTable(
        {"state": 4, "load": 1, "values": 1, "tiles": 1},
        [
            Barrier("k_full", stages, _one("load", "with K"), ("state", "load")),
            Barrier("k_empty", stages, read, ("load",)),
            Barrier("q_full", stages, _one("load", "with Q"), ("state", "load")),
            Barrier("q_empty", stages, read, ("load",)),
            Barrier("v_full", stages, _one("values", "with V"), ("state",)),
            Barrier("stored", stages, _each_warp("state", "O where V was"), ("values",)),
            Barrier("ready", SLOTS, _one("tiles", "with Z, P M and vectors"), ("state", "tiles")),
            Barrier("free", SLOTS, read, ("tiles",)),
        ],
    )


def maker_barriers(form: Any) -> BarrierTable:
    """Barriers of a maker block of the four-SM form; inverse, score and hand_over are those of one set."""
    read = _each_warp("state", "read, of either chain", CHAINS)
    released = read if form.released_arrivals > 1 else _one("hand_over", "Z and the rest read")
    table = BarrierTable(
        {"inverse": 4, "score": 4, "load": 1, "gates": 1, "hand_over": 1, "state": 4},
        [
            Barrier("k_full", SETS * SET_KEY_STAGES, _one("load", "with K"), ("inverse", "score")),
            Barrier("k_empty", SETS * SET_KEY_STAGES, _each_warp("score", "Z done"), ("load",)),
            Barrier("q_full", SETS, _one("load", "with Q"), ("score",)),
            Barrier("q_empty", SETS, _each_warp("score", "Q in registers"), ("load",)),
            Barrier("m_full", SETS, (Arrivals("inverse", "thread"),), ("score",)),
            Barrier("m_free", SETS, _each_warp("score", "M in registers"), ("inverse",)),
            Barrier("made", SETS, (Arrivals("score", "thread"),), ("hand_over",)),
            Barrier("tile_released", SETS, released, ("score",)),
            Barrier("gates_full", SETS * 2, (Arrivals("gates", "thread"),), ("inverse", "score")),
            Barrier("factors_full", SETS * 2, _FACTORS, ("score",)),
            Barrier("gates_free", SETS * 2, _each_warp("inverse") + _each_warp("score"), ("gates",)),
        ],
    )
    assert table.count("tile_released") == form.released_arrivals
    return table


def block_fields(spec: ChunkSpec) -> Fields:
    """Shared memory of a block of the fused kernel."""
    pieces, stages = spec.dim // 64, spec.stages
    norm = {"z": Z_BUFFERS} if spec.has_norm else {}
    tiles = _tiles(
        spec, k=pieces * spec.key_stages, q=pieces * spec.query_stages, v=stages, **norm, m=BUFFERS, p=BUFFERS, lower=1
    )
    # With the norm there is no room for barriers that nobody waits for.
    table = block_barriers(spec, is_complete=not spec.has_norm)
    return _barriers(table) | _work() | _rows(BUFFERS, 1) | tiles


def key_head_fields(spec: ChunkSpec) -> Fields:
    """Shared memory of a block of the form with several state heads a cluster; heads side by side."""
    pieces, heads = spec.dim // 64, spec.state_heads
    tiles = BUFFERS * heads
    rings = _tiles(spec, k=pieces * spec.key_stages, q=pieces * spec.stages, v=spec.value_stages, m=tiles, p=tiles)
    lower = {"lower": Field("float16", heads * TRIANGLE_BYTES // 2, 1024)}
    sizes = {"vectors": BUFFERS * heads * VECTOR_BYTES, "rows": 2 * heads * AUX_BYTES, "scratch": 4 * heads * HEAD_SCRATCH_BYTES}
    rows = {name: Field("float32", size // 4, 128) for name, size in sizes.items()}
    return _barriers(key_head_barriers(spec)) | _work() | rows | lower | rings


def summary_fields(spec: ChunkSpec) -> Fields:
    keys = spec.dim // 64 * spec.stages
    tiles = _tiles(spec, k=keys, v=keys, zeros=1, m=BUFFERS, lower=1)
    return _barriers(summary_barriers(spec)) | _rows(BUFFERS, 1) | tiles


def chain_fields(spec: ChunkSpec) -> Fields:
    pieces, stages = spec.dim // 64, spec.stages
    tiles = _tiles(spec, k=pieces * stages, q=pieces * stages, z=pieces * SLOTS, p=SLOTS, v=stages)
    return _TICKET | _barriers(chain_barriers(spec)) | _rows(SLOTS, 0) | tiles


def maker_fields(spec: ChunkSpec, form: Any) -> Fields:
    pieces = spec.dim // 64
    keys = pieces * SETS * SET_KEY_STAGES
    tiles = _tiles(spec, k=keys, q=pieces * SETS, z=pieces * SETS, p=SETS, plain=SETS, m=spec.parts * SETS, lower=SETS)
    return _TICKET | _barriers(maker_barriers(form)) | _rows(SETS, SETS) | tiles


_TICKET = {"ticket": Field("int32", 4, 4)}  # of a pair of the L2 ring, in the same place in either kind of block


def _barriers(table: BarrierTable) -> Fields:
    return {name: Field("int64", barrier.stages, 8) for name, barrier in table.barriers.items()}


def _work() -> Fields:
    return {"records": Field("int32", RECORDS * RECORD_BYTES // 4, 16), "order": Field("uint8", SORTED, 16)}


def _rows(buffers: int, sets: int) -> Fields:
    """Vectors of `buffers` chunks; and for each set of an inverse and a score warpgroup the rows that they share, and scratch."""
    sizes = {"vectors": buffers * VECTOR_BYTES, "rows": sets * 2 * AUX_BYTES, "scratch": sets * 4 * SCRATCH_BYTES}
    return {name: Field("float32", size // 4, 128) for name, size in sizes.items() if size}


def _tiles(spec: ChunkSpec, **counts: int) -> Fields:
    """64 x 64 tiles of 16-bit elements."""
    dtypes = {"lower": "float16"}
    return {name: Field(dtypes.get(name, spec.dtype_name), CHUNK * 64 * count, 1024) for name, count in counts.items()}
