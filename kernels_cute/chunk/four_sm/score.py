"""The score role of a maker block of the four-SM form: Z, P M and the row vectors of the chunks of one set.

The formulas, the barriers and who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.four_sm.inverse import sync_set
from kernels_cute.chunk.four_sm.shape import KEY_BYTES, MAKERS, ROUND, SET_KEY_STAGES, SET_SCORE_BARRIER, SETS
from kernels_cute.chunk.operands import multiply, smem_operand_b, tiled_mma
from kernels_cute.chunk.roles.score import make_p, publish_vectors, query_factors
from kernels_cute.chunk.roles.tile_blocks import load_rows, store_block
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, QUERY_FACTOR, TILE_BYTES, VECTOR_BYTES
from kernels_cute.common import ptx


@cute.jit
def maker_score_warpgroup(spec, storage, scale, length, number, group, warp):
    """P of the same chunks, rows and blocks as the set's inverse warpgroup's; then P M, Z and the vectors."""
    lane = cute.arch.lane_idx()
    thread = warp * 32 + lane
    row, pair = lane // 4, lane % 4
    mma = tiled_mma(spec, CHUNK, True)
    keys = smem_operand_b(mma, storage.k, layouts.by_rows(spec.dtype, CHUNK, spec.dim, SETS * SET_KEY_STAGES))
    left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, spec.dim)), spec.dtype)
    left_words = cute.recast_tensor(left_operand, Int32)
    qk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    p_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
    q_base = storage.q.data_ptr().toint() + group * KEY_BYTES
    tile_row = warp * 16 + lane % 16
    unit = lane // 16
    keeps_diagonal = (row >= 2 * pair, row >= 2 * pair + 1)
    row0 = warp * 16 + row
    first = number + group * MAKERS

    num_chunks = (length + (CHUNK - 1)) // CHUNK
    for step in cutlass.range(first, num_chunks, ROUND, unroll=1):
        turn = step // ROUND
        stage, parity = group * SET_KEY_STAGES + turn % SET_KEY_STAGES, turn // SET_KEY_STAGES & 1
        half, half_turn = group * 2 + turn % 2, turn // 2 & 1
        rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
        columns = rows + pair * 8
        cute.arch.mbarrier_wait(storage.q_full.data_ptr() + group, turn & 1)
        load_rows(spec, q_base, left_words, tile_row, unit)
        cute.arch.mbarrier_wait(storage.k_full.data_ptr() + stage, parity)
        warpgroup.fence()
        # Rows of K past the end may be anything here: right of the diagonal, or in rows past the end.
        multiply(mma, qk, left_operand, keys[None, None, None, stage], True)
        warpgroup.commit_group()
        row_query = query_factors(spec, left_words, scale, query_squares_by_elements)
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
        if pair == 0:
            ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4, row_query[0])
            ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4 + 32, row_query[1])
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + group)
        sync_set(SET_SCORE_BARRIER, group)
        cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)

        make_p(spec, qk, diagonal, p_words, rows, columns, row_query, keeps_diagonal, row0, warp)
        fold_tiles(spec, storage, p_words, stage, group, turn & 1, tile_row, unit, warp, lane)
        if thread < CHUNK:
            publish_vectors(storage.vectors.data_ptr().toint() + group * VECTOR_BYTES, rows, thread)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.mbarrier_arrive(storage.k_empty.data_ptr() + stage)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(storage.made.data_ptr() + group)


def query_squares_by_elements(spec: Any, words: Any) -> list[Any]:
    """|q|^2 of this lane's two rows by single elements: this warpgroup has no registers for more products."""
    squares = []
    for side in range(2):
        sums = [Float32(0.0)] * 2
        for step in range(spec.dim // 16):
            for part in range(2):
                low, high = ptx.unpack(spec.dtype, words[4 * step + side + 2 * part])
                sums[part] = sums[part] + low * low
                sums[part] = sums[part] + high * high
        total = sums[0] + sums[1]
        total = total + cute.arch.shuffle_sync_bfly(total, 1)
        squares.append(total + cute.arch.shuffle_sync_bfly(total, 2))
    return squares


@cute.jit
def fold_tiles(spec, storage, p_words, stage, group, parity, tile_row, unit, warp, lane):
    """Z = (M exp(c_last - c) f beta)^T K and P M, with M from the inverse warpgroup: what the state is multiplied with."""
    pieces = spec.dim // 64
    mma = tiled_mma(spec, 64, True, True)
    keys = smem_operand_b(mma, storage.k, layouts.by_columns(spec.dtype, CHUNK, 64, pieces * SETS * SET_KEY_STAGES))
    plain = smem_operand_b(mma, storage.plain, layouts.by_columns(spec.dtype, CHUNK, CHUNK, SETS))
    left = cute.make_rmem_tensor(mma.partition_shape_A((64, CHUNK * spec.parts)), spec.dtype)
    p_left = cute.make_rmem_tensor(mma.partition_shape_A((64, CHUNK)), spec.dtype)
    sums = cute.make_rmem_tensor(mma.partition_shape_C((64, 64)), Float32)
    words, p_left_words = cute.recast_tensor(left, Int32), cute.recast_tensor(p_left, Int32)
    for x in cutlass.range_constexpr(4):
        for i in cutlass.range_constexpr(4):
            p_left_words[4 * x + i] = Int32(0)
            if warp == x:
                p_left_words[4 * x + i] = p_words[12 + i]
            if cutlass.const_expr(x < 3):
                if warp > x:
                    p_left_words[4 * x + i] = p_words[4 * x + i]
    cute.arch.mbarrier_wait(storage.m_full.data_ptr() + group, parity)
    warpgroup.fence()
    multiply(mma, sums, p_left, plain[None, None, None, group], True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    m_base = storage.m.data_ptr().toint() + group * (spec.parts * TILE_BYTES)
    m_lane = layouts.address(m_base, lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2)
    for part in cutlass.range_constexpr(spec.parts):
        for x in cutlass.range_constexpr(4):
            loaded = ptx.load_matrices(m_lane + (part * TILE_BYTES + x * 16 * layouts.ROW_BYTES), True)
            for i in cutlass.range_constexpr(4):
                words[16 * part + 4 * x + i] = loaded[i]
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.m_free.data_ptr() + group)
    cute.arch.mbarrier_wait(storage.taken.data_ptr() + group, parity ^ 1)
    store_tile_rows(spec, storage.p.data_ptr().toint() + group * TILE_BYTES, tile_row, unit, sums)
    for piece in cutlass.range_constexpr(pieces):
        warpgroup.fence()
        for part in cutlass.range_constexpr(spec.parts):
            for step in cutlass.range_constexpr(4):
                mma.set(warpgroup.Field.ACCUMULATE, step + part > 0)
                right = keys[None, None, step, stage * pieces + piece]
                cute.gemm(mma, sums, left[None, None, 4 * part + step], right, sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        place = storage.z.data_ptr().toint() + group * KEY_BYTES + piece * TILE_BYTES
        store_tile_rows(spec, place, tile_row, unit, sums)


def store_tile_rows(spec: Any, tile: Any, tile_row: Any, unit: Any, sums: Any) -> None:
    """The warp's 16 rows of a tile, rounded."""
    for x in range(4):
        store_block(tile, tile_row, 2 * x + unit, spec.dtype, [sums[8 * x + i] for i in range(8)])
