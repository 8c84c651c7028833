"""The inverse role of a maker block of the four-SM form: M of the chunks of one set.

The formulas, the barriers and who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.four_sm.shape import KEY_BYTES, MAKERS, ROUND, SET_INVERSE_BARRIER, SET_KEY_STAGES, SETS
from kernels_cute.chunk.operands import exp2_clamped, multiply, row_values, smem_operand_b, tiled_mma
from kernels_cute.chunk.roles.inverse import decayed_diagonal, invert_block, key_factors, next_block, store_lower
from kernels_cute.chunk.roles.tile_blocks import diagonal_block, half_words, load_rows, row_decays, store_block, zero_keys
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    CHUNK,
    CUM,
    HALF,
    KEY_BETA,
    KEY_FACTOR,
    SCRATCH_BYTES,
    TILE_BYTES,
    WARPGROUP,
)
from kernels_cute.common import ptx


@cute.jit
def maker_inverse_warpgroup(spec, storage, length, number, group, warp):
    """M of a set's chunks, as TileRoles.inverse_warpgroup makes it but with the diagonal, to `plain`; and with rows decayed
    to the last token and scaled by norms and beta, in parts, to `m`."""
    lane = cute.arch.lane_idx()
    thread = warp * 32 + lane
    row, pair = lane // 4, lane % 4
    mma = tiled_mma(spec, CHUNK, True)
    keys = smem_operand_b(mma, storage.k, layouts.by_rows(spec.dtype, CHUNK, spec.dim, SETS * SET_KEY_STAGES))
    left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, spec.dim)), spec.dtype)
    left_words = cute.recast_tensor(left_operand, Int32)
    kk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    inverse = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
    k_base = storage.k.data_ptr().toint()
    lower = storage.lower.data_ptr().toint() + group * TILE_BYTES
    plain = storage.plain.data_ptr().toint() + group * TILE_BYTES
    m_tile = storage.m.data_ptr().toint() + group * (spec.parts * TILE_BYTES)
    scratch = storage.scratch.data_ptr().toint() + (group * 4 + warp) * SCRATCH_BYTES
    # Where this lane points when its warp's 16 rows of a tile are moved as matrices, and when a block is an operand B.
    tile_row = warp * 16 + lane % 16
    matrix_row = lane % 16
    unit = lane // 16
    lane_column = Float32(lane % HALF)
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
        valid = length - step * CHUNK
        cute.arch.mbarrier_wait(storage.k_full.data_ptr() + stage, parity)
        if valid < CHUNK:
            # The tile ends with the next sequence's keys, NaN perhaps, and 0 * NaN in Z is NaN.
            zero_keys(spec, k_base + stage * KEY_BYTES, valid, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            sync_set(SET_INVERSE_BARRIER, group)
        # The left operand in registers: both from shared memory would take all of its bandwidth.
        load_rows(spec, k_base + stage * KEY_BYTES, left_words, tile_row, unit)
        warpgroup.fence()
        multiply(mma, kk, left_operand, keys[None, None, None, stage], True)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
        warpgroup.wait_group(0)
        diagonal_block(kk, diagonal, warp)
        key_factors(spec, diagonal, rows, row, pair, row0)
        cute.arch.mbarrier_arrive(storage.factors_full.data_ptr() + half)
        sync_set(SET_INVERSE_BARRIER, group)

        # L, negated: the diagonal block in float32, what lies left of it in float16 for the products.
        row_cum = row_values(rows, CUM, row0)
        row_key = row_values(rows, KEY_FACTOR, row0)
        row_scale = (-row_key[0], -row_key[1])
        store_lower(kk, lower, columns, row_scale, tile_row, unit, warp)
        invert_block(diagonal, inverse, row_scale, columns + warp * 64, lower, scratch, tile_row, unit, warp,
                          lane_column, lane, row, pair)  # fmt: skip

        # M: the diagonal block first, then, with every warp's L and inverted blocks in place, leftwards:
        # A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu. Score took the last M long ago.
        left.fill(0)
        words = half_words([inverse[i] for i in range(8)])
        for w in cutlass.range_constexpr(1, 4):
            if warp == w:
                for i in cutlass.range_constexpr(4):
                    left[4 * w + i] = words[i]
        sync_set(SET_INVERSE_BARRIER, group)
        cute.arch.mbarrier_wait(storage.m_free.data_ptr() + group, turn & 1 ^ 1)
        values = decayed_diagonal(inverse, columns, row_cum, keeps_diagonal, warp)
        total = ptx.load_one(rows + CUM * CHUNK * 4 + (CHUNK - 1) * 4)
        row_key_beta = row_values(rows, KEY_BETA, row0)
        to_last = [exp2_clamped(total - row_cum[side]) * row_key_beta[side] for side in range(2)]
        store_m(spec, plain, m_tile, tile_row, 2 * warp + unit, values, to_last)
        reference, row_decay = row_decays(rows, row_cum, warp)
        for back in cutlass.range_constexpr(3):
            u = 2 - back
            if u < warp:
                values = next_block(left, lower, columns, reference, row_decay, matrix_row, unit, u)
                store_m(spec, plain, m_tile, tile_row, 2 * u + unit, values, to_last)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(storage.m_full.data_ptr() + group)


def store_m(spec: Any, plain: Any, m_tile: Any, tile_row: Any, unit: Any, values: Any, to_last: Any) -> None:
    """A block of M, as it is, and scaled, in parts: the second is what rounding took away from the first."""
    store_block(plain, tile_row, unit, spec.dtype, values)
    scaled = [values[i] * to_last[i // 2 % 2] for i in range(8)]
    place = layouts.address(m_tile, tile_row, unit)
    words = [ptx.pack(spec.dtype, scaled[2 * i], scaled[2 * i + 1]) for i in range(4)]
    ptx.store_matrices(place, words, False)
    if spec.parts == 2:
        rests = []
        for i in range(4):
            low, high = ptx.unpack(spec.dtype, words[i])
            rests.append(ptx.pack(spec.dtype, scaled[2 * i] - low, scaled[2 * i + 1] - high))
        ptx.store_matrices(place + TILE_BYTES, rests, False)


def sync_set(barrier: int, group: Any) -> None:
    cute.arch.barrier(barrier_id=barrier + group, number_of_threads=WARPGROUP)
