"""The warp that makes the query norms and the row vectors of a block's own chunks, and hands their tiles over."""

import cutlass
import cutlass.cute as cute

from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.rings import chunks_in, half_place, ring_place
from kernels_cute.chunk.roles import score
from kernels_cute.chunk.roles import tile_blocks as blocks
from kernels_cute.chunk.roles.copies import copy_tiles
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, CUM, KEY_BETA, KEY_FACTOR, QUERY_FACTOR, VECTOR_BYTES
from kernels_cute.common import ptx


@cute.jit
def factor_warp(spec, storage, scale, tiles, own, length, rank):
    """tiles: (field, bytes of a buffer), of what the other block gets. Key and query norms are those of the key head: the
    rows of the first head have them."""
    heads = spec.state_heads
    lane = cute.arch.lane_idx()
    ready, vectors = storage.ready.data_ptr() + rank, storage.vectors.data_ptr().toint() + rank * (heads * VECTOR_BYTES)
    for step in cutlass.range(own.first, chunks_in(length), 2, unroll=1):
        stage, parity = ring_place(spec.stages, own.base + step)
        half, half_turn = half_place(own, step)
        turn = (own.base + step) >> 1 & 1
        rows = storage.rows.data_ptr().toint() + half * (heads * AUX_BYTES)
        cute.arch.mbarrier_wait(storage.q_full.data_ptr() + stage, parity)
        tile = storage.q.data_ptr().toint() + stage * spec.key_bytes
        for group in cutlass.range(CHUNK // 16, unroll=1):
            at = blocks.lane_of(group, lane)
            first, second = score.query_factors(spec, (at, tile), scale, score.row_squares)
            if at.pair == 0:
                blocks.store_row_values(rows + QUERY_FACTOR, at.row0, first, second)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.queries_full.data_ptr() + half)
            cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + stage)
        # The gates were there before the key factors.
        cute.arch.mbarrier_wait(storage.keys_full.data_ptr() + half, half_turn)
        cute.arch.mbarrier_wait(storage.taken.data_ptr() + rank, turn ^ 1)
        for i in cutlass.range_constexpr(heads):
            store_vectors(vectors + i * VECTOR_BYTES, vector_values(rows, rows + i * AUX_BYTES, lane), lane)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ready)
        cute.arch.mbarrier_wait(ready, turn)
        copy_tiles(tiles, rank, ptx.in_block(ready.toint(), rank ^ 1))


@cute.jit
def vector_values(shared, rows, lane):
    """The row vectors of a head for this lane's two tokens, and the chunk's whole decay. shared: rows with the norms."""
    cums, total = ptx.load_pair(rows + CUM + lane * 8), ptx.load_one(rows + shape.LAST_CUM)
    keys, betas = ptx.load_pair(shared + KEY_FACTOR + lane * 8), ptx.load_pair(rows + KEY_BETA + lane * 8)
    queries = ptx.load_pair(shared + QUERY_FACTOR + lane * 8)
    grown = [cute.math.exp2(one, fastmath=True) for one in cums]
    return (
        tuple(grown[i] * keys[i] for i in range(2)),
        tuple(operands.exp2_clamped(total - cums[i]) * betas[i] for i in range(2)),
        tuple(grown[i] * queries[i] for i in range(2)),
        cute.math.exp2(total, fastmath=True),
    )


@cute.jit
def store_vectors(vectors, values, lane):
    *pairs, last = values
    for kind, pair in zip((shape.STATE_KEY, shape.KEY_TO_LAST, shape.STATE_QUERY), pairs, strict=True):
        ptx.store_pair(vectors + kind + lane * 8, *pair)
    if lane == 0:
        ptx.store_one(vectors + shape.LAST_DECAY, last)
