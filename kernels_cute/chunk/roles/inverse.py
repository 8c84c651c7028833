"""The inverse role: M of a chunk, which does not depend on the state.

The formulas, the barriers and who waits for whom: fused.py. The maker blocks of the four-SM form use the parts of this role.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.operands import multiply, row_values, select, smem_operand_b, tiled_mma
from kernels_cute.chunk.rings import half_of, key_stage_of
from kernels_cute.chunk.roles.tile_blocks import (
    block_decay,
    diagonal_block,
    half_words,
    keep_block,
    load_rows,
    row_decays,
    store_block,
    store_blocks,
    zero_keys,
)
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    BLOCK,
    CHUNK,
    COLUMN_PITCH,
    CUM,
    HALF,
    INVERSE_BARRIER,
    KEY_BETA,
    KEY_FACTOR,
    NORM_EPS,
    ROW_PITCH,
    SCRATCH_BYTES,
    TILE_BYTES,
    WARPGROUP,
)
from kernels_cute.common import ptx


@cute.jit
def inverse_warpgroup(spec, storage, length, first, warp, base=0):
    """M of an item's chunks first, first + spec.aux_step, ...; before the item the block had `base` chunks. Rows 16 warp ..
    of a tile are this warp's; of the lower triangle it computes the 16 x 16 blocks left of the diagonal and the diagonal
    one, the rest stays zero."""
    lane = cute.arch.lane_idx()
    thread = warp * 32 + lane
    row, pair = lane // 4, lane % 4
    mma = tiled_mma(spec, CHUNK, True)
    keys = smem_operand_b(mma, storage.k, layouts.by_rows(spec.dtype, CHUNK, spec.dim, spec.key_stages))
    left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, spec.dim)), spec.dtype)
    left_words = cute.recast_tensor(left_operand, Int32)
    kk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    inverse = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
    m_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # blocks of M, to be stored when there is room
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    k_base, m_base = storage.k.data_ptr().toint(), storage.m.data_ptr().toint()
    lower = storage.lower.data_ptr().toint()
    scratch = storage.scratch.data_ptr().toint() + warp * SCRATCH_BYTES
    # Where this lane points when its warp's 16 rows of a tile are moved as matrices, and when a block is an operand B.
    tile_row = warp * 16 + lane % 16
    matrix_row = lane % 16
    unit = lane // 16
    lane_column = Float32(lane % HALF)
    keeps_below = (row > 2 * pair, row > 2 * pair + 1)
    row0 = warp * 16 + row

    num_chunks = (length + (CHUNK - 1)) // CHUNK
    for step in cutlass.range(first, num_chunks, spec.aux_step, unroll=1):
        count = base + step
        stage, parity = key_stage_of(spec, count)
        buffer, turn = count & 1, count >> 1 & 1
        half, half_turn = half_of(spec, count)
        rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
        columns = rows + pair * 8
        valid = length - step * CHUNK
        cute.arch.mbarrier_wait(storage.keys_full.data_ptr() + stage, parity)
        if valid < CHUNK:
            # The tile ends with the next sequence's keys, NaN perhaps, and 0 * NaN in the state update is NaN.
            zero_keys(spec, k_base + stage * spec.key_bytes, valid, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            sync_inverse()
        # The left operand in registers: both from shared memory would take all of its bandwidth.
        load_rows(spec, k_base + stage * spec.key_bytes, left_words, tile_row, unit)
        warpgroup.fence()
        multiply(mma, kk, left_operand, keys[None, None, None, stage], True)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
        warpgroup.wait_group(0)
        diagonal_block(kk, diagonal, warp)
        key_factors(spec, diagonal, rows, row, pair, row0)
        cute.arch.mbarrier_arrive(storage.factors_full.data_ptr() + half)
        sync_inverse()

        # L, negated: the diagonal block in float32, what lies left of it in float16 for the products.
        row_cum = row_values(rows, CUM, row0)
        row_key = row_values(rows, KEY_FACTOR, row0)
        row_scale = (-row_key[0], -row_key[1])
        store_lower(kk, lower, columns, row_scale, tile_row, unit, warp)
        invert_block(diagonal, inverse, row_scale, columns + warp * 64, lower, scratch, tile_row, unit, warp,
                          lane_column, lane, row, pair)  # fmt: skip

        # M: the diagonal block first, then, with every warp's L and inverted blocks in place, leftwards:
        # A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu.
        left.fill(0)
        words = half_words([inverse[i] for i in range(8)])
        for w in cutlass.range_constexpr(1, 4):
            if warp == w:
                for i in cutlass.range_constexpr(4):
                    left[4 * w + i] = words[i]
        sync_inverse()
        values = decayed_diagonal(inverse, columns, row_cum, keeps_below, warp)
        keep_block(spec, m_words, 3, values)
        reference, row_decay = row_decays(rows, row_cum, warp)
        for back in cutlass.range_constexpr(3):
            u = 2 - back
            if u < warp:
                values = next_block(left, lower, columns, reference, row_decay, matrix_row, unit, u)
                keep_block(spec, m_words, u, values)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
        cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
        store_blocks(m_base + buffer * TILE_BYTES, tile_row, unit, warp, m_words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ready + buffer)


def sync_inverse() -> None:
    cute.arch.barrier(barrier_id=INVERSE_BARRIER, number_of_threads=WARPGROUP)


@cute.jit
def key_factors(spec, diagonal, rows, row, pair, row0):
    """1 / |k| from the diagonal of K K^T, by the lanes that hold it; and that times beta, where beta was."""
    first, second = Float32(1.0), Float32(1.0)
    if cutlass.const_expr(spec.normalize):
        first = cute.math.rsqrt(select(row % 2 == 1, diagonal[1], diagonal[0]) + NORM_EPS)
        second = cute.math.rsqrt(select(row % 2 == 1, diagonal[7], diagonal[6]) + NORM_EPS)
    if pair == row // 2:
        place = rows + KEY_FACTOR * CHUNK * 4 + row0 * 4
        ptx.store_one(place, first)
        ptx.store_one(place + 32, second)
        betas = row_values(rows, KEY_BETA, row0)
        place = rows + KEY_BETA * CHUNK * 4 + row0 * 4
        ptx.store_one(place, first * betas[0])
        ptx.store_one(place + 32, second * betas[1])


@cute.jit
def store_lower(kk, lower, columns, row_scale, tile_row, unit, warp):
    """The warp's blocks of L left of the diagonal, negated, from those of K K^T."""
    for u in cutlass.range_constexpr(3):
        if u < warp:
            values = [None] * 8
            for m in cutlass.range_constexpr(2):
                keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + (2 * u + m) * 32)
                for i in cutlass.range_constexpr(4):
                    values[4 * m + i] = kk[8 * u + 4 * m + i] * (row_scale[i // 2] * keys_of[i % 2])
            store_block(lower, tile_row, 2 * u + unit, cutlass.Float16, values)


@cute.jit
def invert_block(diagonal, inverse, row_scale, columns, lower, scratch, tile_row, unit, warp, lane_column, lane, row, pair):
    """The warp's diagonal block of (I + L)^-1; to `inverse` and, in float16, to `lower`. diagonal: of K K^T; columns: of the
    block's rows of factors. With the block as [[B, 0], [N, C]], both halves by forward substitution in float32, a lane per
    column, side by side; then -C^-1 N B^-1 as two products of float16."""
    below = [None] * 2
    for m in cutlass.range_constexpr(2):
        keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + m * 32)
        for odd in cutlass.range_constexpr(2):
            # What lies above the diagonal is stored with the rest, and never read.
            place = scratch + (8 * m + 2 * pair + odd) * COLUMN_PITCH + (row + 8 * m) * 4
            ptx.store_one(place, diagonal[6 * m + odd] * (row_scale[m] * keys_of[odd]))
            if cutlass.const_expr(m == 0):
                below[odd] = diagonal[2 + odd] * (row_scale[1] * keys_of[odd])
    cute.arch.sync_warp()
    half = lane // HALF % 2
    x = cute.make_rmem_tensor(cute.make_layout(HALF), Float32)
    for i in cutlass.range_constexpr(HALF):
        x[i] = ptx.is_equal(lane_column, Float32(i))
    first_column = scratch + half * (HALF * COLUMN_PITCH + HALF * 4)
    for step in cutlass.range_constexpr(HALF - 1):
        for part in cutlass.range_constexpr((step + 1) // 4, HALF // 4):
            factors = ptx.load_four(first_column + step * COLUMN_PITCH + part * 16)
            for i in cutlass.range_constexpr(4):
                if cutlass.const_expr(4 * part + i > step):
                    x[4 * part + i] = x[4 * part + i] + factors[i] * x[step]
    cute.arch.sync_warp()
    if lane < BLOCK:
        for i in cutlass.range_constexpr(HALF):
            ptx.store_one(scratch + (HALF * half + i) * ROW_PITCH + lane * 4, x[i])
    cute.arch.sync_warp()
    upper = ptx.load_pair(scratch + row * ROW_PITCH + 2 * pair * 4)
    last = ptx.load_pair(scratch + (row + HALF) * ROW_PITCH + (HALF + 2 * pair) * 4)
    upper_words, below_words = half_words(upper), half_words(below)
    none, zero = Int32(0), (Float32(0.0),) * 4
    operand = [upper_words[0], none, none, half_words(last)[0]]
    product = ptx.multiply_small(cutlass.Float16, zero, operand, none, ptx.transpose(below_words[0]))
    operand = [none, half_words(product)[1], none, none]
    product = ptx.multiply_small(cutlass.Float16, zero, operand, ptx.transpose(upper_words[0]), none)
    values = [upper[0], upper[1], product[2], product[3], Float32(0.0), Float32(0.0), last[0], last[1]]
    for i in cutlass.range_constexpr(8):
        inverse[i] = values[i]
    store_block(lower, tile_row, 2 * warp + unit, cutlass.Float16, inverse)
    cute.arch.sync_warp()  # the next chunk's stores into scratch come after these loads


@cute.jit
def next_block(left, lower, columns, reference, row_decay, matrix_row, unit, u: cutlass.Constexpr):
    """Block u of the warp's row of A, to `left`, from those right of it; returns it with decays, as M has it."""
    sums = [(Float32(0.0),) * 4, (Float32(0.0),) * 4]
    for x in cutlass.range_constexpr(u + 1, 4):
        b = ptx.load_matrices(layouts.address(lower, x * BLOCK + matrix_row, 2 * u + unit), True)
        operand = [left[4 * x + i] for i in range(4)]
        sums[0] = ptx.multiply_small(cutlass.Float16, sums[0], operand, b[0], b[1])
        sums[1] = ptx.multiply_small(cutlass.Float16, sums[1], operand, b[2], b[3])
    operand = half_words([*sums[0], *sums[1]])
    d = ptx.load_matrices(layouts.address(lower, u * BLOCK + matrix_row, 2 * u + unit), True)
    zero = (Float32(0.0),) * 4
    product0 = ptx.multiply_small(cutlass.Float16, zero, operand, d[0], d[1])
    product1 = ptx.multiply_small(cutlass.Float16, zero, operand, d[2], d[3])
    products = [*product0, *product1]
    words = half_words(products)
    for i in cutlass.range_constexpr(4):
        left[4 * u + i] = words[i]
    values = [None] * 8
    for m in cutlass.range_constexpr(2):
        cums = ptx.load_pair(columns + CUM * CHUNK * 4 + (2 * u + m) * 32)
        for odd in cutlass.range_constexpr(2):
            column_part = ptx.exp2(reference - cums[odd])
            for side in cutlass.range_constexpr(2):
                place = 4 * m + 2 * side + odd
                values[place] = products[place] * (column_part * row_decay[side])
    return values


def decayed_diagonal(inverse: Any, columns: Any, row_cum: Any, keeps: Any, warp: Any) -> list[Any]:
    """The warp's diagonal block of A with decays; keeps: of a square on the diagonal, what is not zeroed."""
    values = [None] * 8
    for m in range(2):
        cums = ptx.load_pair(columns + CUM * CHUNK * 4 + warp * 64 + m * 32)
        for i in range(4):
            gap = block_decay(row_cum, cums, keeps, m, i)
            values[4 * m + i] = inverse[4 * m + i] * gap
    return values
