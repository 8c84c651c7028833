"""The score role: P and the row vectors of a chunk, which do not depend on the state.

The formulas, the barriers and who waits for whom: fused.py. The maker blocks of the four-SM form use the parts of this role.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.operands import exp2_clamped, multiply, row_values, select, smem_operand_b, tiled_mma
from kernels_cute.chunk.rings import half_of, key_stage_of, stage_of
from kernels_cute.chunk.roles.tile_blocks import block_decay, diagonal_block, keep_block, load_rows, row_decays, store_blocks
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    CHUNK,
    CUM,
    KEY_BETA,
    KEY_FACTOR,
    KEY_TO_LAST,
    NORM_EPS,
    QUERY_FACTOR,
    SCORE_BARRIER,
    STATE_KEY,
    STATE_QUERY,
    TILE_BYTES,
    VECTOR_BYTES,
    VECTORS,
    WARPGROUP,
)
from kernels_cute.common import ptx


@cute.jit
def score_warpgroup(spec, storage, scale, length, first, warp, base=0):
    """P and the vectors of the same chunks, rows and blocks as inverse_warpgroup's."""
    lane = cute.arch.lane_idx()
    thread = warp * 32 + lane
    row, pair = lane // 4, lane % 4
    mma = tiled_mma(spec, CHUNK, True)
    keys = smem_operand_b(mma, storage.k, layouts.by_rows(spec.dtype, CHUNK, spec.dim, spec.key_stages))
    left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, spec.dim)), spec.dtype)
    left_words = cute.recast_tensor(left_operand, Int32)
    qk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    p_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    q_base, p_base = storage.q.data_ptr().toint(), storage.p.data_ptr().toint()
    tile_row = warp * 16 + lane % 16
    unit = lane // 16
    keeps_diagonal = (row >= 2 * pair, row >= 2 * pair + 1)
    row0 = warp * 16 + row

    num_chunks = (length + (CHUNK - 1)) // CHUNK
    for step in cutlass.range(first, num_chunks, spec.aux_step, unroll=1):
        count = base + step
        stage, parity = stage_of(spec, count)
        buffer, turn = count & 1, count >> 1 & 1
        half, half_turn = half_of(spec, count)
        rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
        columns = rows + pair * 8
        key_stage, key_parity = key_stage_of(spec, count)
        cute.arch.mbarrier_wait(storage.keys_full.data_ptr() + key_stage, key_parity)
        cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, parity)
        load_rows(spec, q_base + stage * spec.key_bytes, left_words, tile_row, unit)
        warpgroup.fence()
        # Rows of K past the end may be anything here: right of the diagonal, or in rows past the end.
        multiply(mma, qk, left_operand, keys[None, None, None, key_stage], True)
        warpgroup.commit_group()
        row_query = query_factors(spec, left_words, scale, query_squares)
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
        if pair == 0:
            ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4, row_query[0])
            ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4 + 32, row_query[1])
        warpgroup.wait_group(0)
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
        cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)

        make_p(spec, qk, diagonal, p_words, rows, columns, row_query, keeps_diagonal, row0, warp)
        cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
        store_blocks(p_base + buffer * TILE_BYTES, tile_row, unit, warp, p_words)
        if thread < CHUNK:
            publish_vectors(storage.vectors.data_ptr().toint() + buffer * VECTOR_BYTES, rows, thread)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ready + buffer)


@cute.jit
def make_p(spec, qk, diagonal, p_words, rows, columns, row_query, keeps_diagonal, row0, warp):
    """The warp's blocks of P, as words, from those of Q K^T."""
    row_cum = row_values(rows, CUM, row0)
    reference, row_decay = row_decays(rows, row_cum, warp)
    row_part = (row_query[0] * row_decay[0], row_query[1] * row_decay[1])
    diagonal_block(qk, diagonal, warp)
    for u in cutlass.range_constexpr(3):
        if u < warp:
            values = [None] * 8
            for m in cutlass.range_constexpr(2):
                n = 2 * u + m
                keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + n * 32)
                cums = ptx.load_pair(columns + CUM * CHUNK * 4 + n * 32)
                for odd in cutlass.range_constexpr(2):
                    column_part = keys_of[odd] * ptx.exp2(reference - cums[odd])
                    for side in cutlass.range_constexpr(2):
                        values[4 * m + 2 * side + odd] = qk[4 * n + 2 * side + odd] * (row_part[side] * column_part)
            keep_block(spec, p_words, u, values)
    values = [None] * 8
    for m in cutlass.range_constexpr(2):
        keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + warp * 64 + m * 32)
        cums = ptx.load_pair(columns + CUM * CHUNK * 4 + warp * 64 + m * 32)
        for i in cutlass.range_constexpr(4):
            gap = block_decay(row_cum, cums, keeps_diagonal, m, i)
            value = diagonal[4 * m + i] * (row_query[i // 2] * keys_of[i % 2]) * gap
            # Selected, not multiplied by 0: keys past the end may be NaN, and they stand above the diagonal.
            if cutlass.const_expr(m == 1 and i < 2):
                value = Float32(0.0)
            if cutlass.const_expr(m == i // 2):
                value = select(keeps_diagonal[i % 2], value, Float32(0.0))
            values[4 * m + i] = value
    keep_block(spec, p_words, 3, values)


def query_factors(spec: Any, words: Any, scale: Any, squares: Any) -> tuple[Any, Any]:
    """scale / |q| of this lane's two rows, whose columns four lanes share. squares: makes |q|^2 of them."""
    if not spec.normalize:
        return scale, scale
    first, second = squares(spec, words)
    return cute.math.rsqrt(first + NORM_EPS) * scale, cute.math.rsqrt(second + NORM_EPS) * scale


def query_squares(spec: Any, words: Any) -> list[Any]:
    """|q|^2 of this lane's two rows: from the diagonals of the products of the warp's rows with the first and the last eight
    of them, an eighth of the instructions that single elements take."""
    lane = cute.arch.lane_idx()
    row = lane // 4
    holder = row * 4 + row // 2  # of the four lanes of a row
    squares = []
    for side in range(2):
        sums = (Float32(0.0),) * 4
        for step in range(spec.dim // 16):
            operand = [words[4 * step + i] for i in range(4)]
            sums = ptx.multiply_small(spec.dtype, sums, operand, operand[side], operand[side + 2])
        own = select(row % 2 == 1, sums[2 * side + 1], sums[2 * side])
        squares.append(cute.arch.shuffle_sync(own, holder))
    return squares


@cute.jit
def publish_vectors(vectors, rows, thread):
    cum = ptx.load_one(rows + CUM * CHUNK * 4 + thread * 4)
    total = ptx.load_one(rows + CUM * CHUNK * 4 + (CHUNK - 1) * 4)
    key = ptx.load_one(rows + KEY_FACTOR * CHUNK * 4 + thread * 4)
    key_beta = ptx.load_one(rows + KEY_BETA * CHUNK * 4 + thread * 4)
    query = ptx.load_one(rows + QUERY_FACTOR * CHUNK * 4 + thread * 4)
    grown = cute.math.exp2(cum, fastmath=True)
    ptx.store_one(vectors + STATE_KEY * CHUNK * 4 + thread * 4, grown * key)
    ptx.store_one(vectors + KEY_TO_LAST * CHUNK * 4 + thread * 4, exp2_clamped(total - cum) * key_beta)
    ptx.store_one(vectors + STATE_QUERY * CHUNK * 4 + thread * 4, grown * query)
    if thread == 0:
        ptx.store_one(vectors + VECTORS * CHUNK * 4, cute.math.exp2(total, fastmath=True))
