"""The inverse role: M of a chunk, which does not depend on the state.

The formulas and who waits for whom: fused.py, four_sm/kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.rings import PreparedChunks, chunks_in, gate_place, key_place
from kernels_cute.chunk.roles import tile_blocks as blocks
from kernels_cute.chunk.roles.maker_tiles import store_scaled
from kernels_cute.chunk.roles.tile_blocks import Lane
from kernels_cute.chunk.shape import CHUNK, CUM, KEY_BETA, KEY_FACTOR, TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx

_BLOCK = 16  # diagonal blocks of the inverse
_HALF = 8  # and the part of them that is inverted by substitution
_COLUMN_PITCH = 80  # bytes of a row of a diagonal block of L, by columns


@cute.jit
def inverse_warpgroup(spec: ChunkSpec, storage: Any, prepared: PreparedChunks, length: Int32, warp: Int32):
    """Compute M of the chunks that this block prepares. A warp has rows 16 warp to 16 warp + 15; of the lower triangle it
    computes the 16 x 16 blocks left of the diagonal and the diagonal one, and the rest stays zero.

    In a maker block a set leaves M with its diagonal in `plain`, and in `m` M with its rows decayed to the last token and scaled
    by norms and beta, in parts.
    """
    in_maker_block = prepared.group is not None
    group = prepared.group if cutlass.const_expr(in_maker_block) else 0
    at = blocks.lane_of(warp)
    mma = operands.tiled_mma(spec.dtype, CHUNK)
    keys = operands.smem_operand_b(mma, storage.k, operands.by_rows(spec.dtype, CHUNK, spec.dim, spec.key_stages))
    left_operand, left_words = operands.register_operand(spec.dtype, mma, spec.dim)
    kk = operands.accumulators(mma, CHUNK)
    diagonal, inverse = (cute.make_rmem_tensor(cute.make_layout(8), Float32) for _ in range(2))
    left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
    m_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # blocks of M, to be stored when there is room
    k_base = storage.k.data_ptr().toint()
    m_tile = storage.m.data_ptr().toint() + group * (spec.parts * TILE_BYTES)
    lower = storage.lower.data_ptr().toint() + group * TILE_BYTES
    scratch = storage.scratch.data_ptr().toint() + (group * 4 + warp) * shape.SCRATCH_BYTES
    barrier = shape.NamedBarrier.INVERSE + group
    lane_column = Float32(at.lane % _HALF)
    if cutlass.const_expr(in_maker_block):
        plain = storage.plain.data_ptr().toint() + group * TILE_BYTES
        keeps = (at.row >= 2 * at.pair, at.row >= 2 * at.pair + 1)
    else:
        keeps = (at.row > 2 * at.pair, at.row > 2 * at.pair + 1)

    for step in cutlass.range(prepared.first, chunks_in(length), prepared.stride, unroll=1):
        stage, parity = key_place(spec, prepared, step)
        gate_buffer, gate_turn = gate_place(prepared, step)
        rows = storage.rows.data_ptr().toint() + gate_buffer * shape.AUX_BYTES
        columns = rows + at.pair * 8
        valid = length - step * CHUNK
        cute.arch.mbarrier_wait(storage.k_full.data_ptr() + stage, parity)
        if valid < CHUNK:
            # The tile ends with the next sequence's keys, NaN perhaps, and 0 * NaN in the state update is NaN.
            blocks.zero_keys(spec, k_base + stage * spec.key_bytes, valid, at.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            operands.sync_warpgroup(barrier)
        # The left operand in registers: both from shared memory would take all of its bandwidth.
        blocks.load_rows(spec, at, k_base + stage * spec.key_bytes, left_words)
        warpgroup.fence()
        operands.multiply(mma, kk, left_operand, keys[None, None, None, stage], True)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + gate_buffer, gate_turn)
        warpgroup.wait_group(0)
        blocks.diagonal_block(kk, diagonal, warp)
        key_factors(spec, at, diagonal, rows)
        cute.arch.mbarrier_arrive(storage.factors_full.data_ptr() + gate_buffer)
        operands.sync_warpgroup(barrier)

        # L, negated: the diagonal block in float32, the blocks left of it in float16 for the products.
        row_cum = blocks.row_values(rows + CUM, at.row0)
        start_row(at, kk, diagonal, inverse, left, rows, lower, scratch, lane_column)

        # M: the diagonal block first, then, with every warp's L and inverted blocks in place, leftwards:
        # A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu.
        operands.sync_warpgroup(barrier)
        if cutlass.const_expr(in_maker_block):  # score took the last M long ago
            cute.arch.mbarrier_wait(storage.m_free.data_ptr() + group, step // prepared.sets.round & 1 ^ 1)
        values = decayed_diagonal(inverse, columns, row_cum, keeps, warp)
        if cutlass.const_expr(in_maker_block):
            total, row_key_beta = ptx.load_one(rows + shape.LAST_CUM), blocks.row_values(rows + KEY_BETA, at.row0)
            to_last = [operands.exp2_clamped(total - row_cum[side]) * row_key_beta[side] for side in range(2)]
            store_scaled(spec, at, plain, m_tile, warp, values, to_last)
        else:
            blocks.set_words(m_words, 3, blocks.packed(spec.dtype, values))
        reference, row_decay = blocks.row_decays(rows, row_cum, warp)
        for back in cutlass.range_constexpr(3):
            u = 2 - back
            if u < warp:
                values = next_block(at, left, lower, columns, reference, row_decay, u)
                if cutlass.const_expr(in_maker_block):
                    store_scaled(spec, at, plain, m_tile, u, values, to_last)
                else:
                    blocks.set_words(m_words, u, blocks.packed(spec.dtype, values))
        cute.arch.sync_warp()
        if at.lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + gate_buffer)
        if cutlass.const_expr(not in_maker_block):
            buffer, turn = (prepared.base + step) & 1, (prepared.base + step) >> 1 & 1
            cute.arch.mbarrier_wait(storage.tile_released.data_ptr() + buffer, turn ^ 1)
            blocks.store_blocks(m_tile + buffer * TILE_BYTES, at, m_words)
        cute.arch.fence_proxy("async.shared", space="cta")
        done = storage.m_full.data_ptr() + group if cutlass.const_expr(in_maker_block) else storage.ready.data_ptr() + buffer
        cute.arch.mbarrier_arrive(done)


@cute.jit
def key_factors(spec: ChunkSpec, at: Lane, diagonal: cute.Tensor, rows: Any):
    """Store 1 / |k|, from the diagonal of K K^T, and that times beta in the place of beta; the lanes that hold the diagonal do
    it. rows: of a head; in a list of several the first head's has 1 / |k|."""
    heads = rows if isinstance(rows, list) else [rows]
    first, second = Float32(1.0), Float32(1.0)
    if cutlass.const_expr(spec.normalize):
        first = cute.math.rsqrt(operands.select(at.row % 2 == 1, diagonal[1], diagonal[0]) + shape.NORM_EPS)
        second = cute.math.rsqrt(operands.select(at.row % 2 == 1, diagonal[7], diagonal[6]) + shape.NORM_EPS)
    if at.pair == at.row // 2:
        blocks.store_row_values(heads[0] + KEY_FACTOR, at.row0, first, second)
        for i in cutlass.range_constexpr(len(heads)):
            betas = blocks.row_values(heads[i] + KEY_BETA, at.row0)
            blocks.store_row_values(heads[i] + KEY_BETA, at.row0, first * betas[0], second * betas[1])


@cute.jit
def start_row(
    at: Lane, kk: cute.Tensor, diagonal: cute.Tensor, inverse: cute.Tensor, left: cute.Tensor, rows: Int32, lower: Int32,
    scratch: Int32, lane_column: Float32,
):  # fmt: skip
    """Store the warp's row of L, negated, and invert its diagonal block, to `inverse` and into `left`, the row of A so far."""
    columns = rows + at.pair * 8
    row_key = blocks.row_values(rows + KEY_FACTOR, at.row0)
    row_scale = (-row_key[0], -row_key[1])
    store_lower(at, kk, lower, columns, row_scale)
    invert_block(at, diagonal, inverse, row_scale, columns + at.warp * 64, lower, scratch, lane_column)
    left.fill(0)
    words = blocks.half_words([inverse[i] for i in range(8)])
    for w in cutlass.range_constexpr(1, 4):
        if at.warp == w:
            blocks.set_words(left, w, words)


@cute.jit
def store_lower(at: Lane, kk: cute.Tensor, lower: Int32, columns: Int32, row_scale: Any):
    """Store the warp's blocks of L left of the diagonal, negated, from those of K K^T."""
    for u in cutlass.range_constexpr(3):
        if u < at.warp:
            values = [None] * 8
            for m in cutlass.range_constexpr(2):
                keys_of = ptx.load_pair(columns + KEY_BETA + (2 * u + m) * 32)
                for i in cutlass.range_constexpr(4):
                    values[4 * m + i] = kk[8 * u + 4 * m + i] * (row_scale[i // 2] * keys_of[i % 2])
            blocks.store_block(lower, at, u, blocks.half_words(values))


@cute.jit
def invert_block(
    at: Lane, diagonal: cute.Tensor, inverse: cute.Tensor, row_scale: Any, columns: Int32, lower: Int32, scratch: Int32,
    lane_column: Float32,
):  # fmt: skip
    """Invert the warp's diagonal block of I + L, to `inverse` and, in float16, to `lower`. With the block as [[B, 0], [N, C]],
    both halves are inverted by forward substitution in float32, side by side, a lane a column; -C^-1 N B^-1 is two products of
    float16. diagonal: of K K^T; columns: the block's rows of factors."""
    lane, row, pair = at.lane, at.row, at.pair
    below = [None] * 2
    for m in cutlass.range_constexpr(2):
        keys_of = ptx.load_pair(columns + KEY_BETA + m * 32)
        for odd in cutlass.range_constexpr(2):
            # The part above the diagonal is stored with the rest, and never read.
            address = scratch + (8 * m + 2 * pair + odd) * _COLUMN_PITCH + (row + 8 * m) * 4
            ptx.store_one(address, diagonal[6 * m + odd] * (row_scale[m] * keys_of[odd]))
            if cutlass.const_expr(m == 0):
                below[odd] = diagonal[2 + odd] * (row_scale[1] * keys_of[odd])
    cute.arch.sync_warp()
    half = lane // _HALF % 2
    x = substitute(scratch + half * (_HALF * _COLUMN_PITCH + _HALF * 4), _COLUMN_PITCH, lane_column)
    cute.arch.sync_warp()
    if lane < _BLOCK:
        for i in cutlass.range_constexpr(_HALF):
            ptx.store_one(scratch + (_HALF * half + i) * shape.ROW_PITCH + lane * 4, x[i])
    cute.arch.sync_warp()
    upper = ptx.load_pair(scratch + row * shape.ROW_PITCH + 2 * pair * 4)
    last = ptx.load_pair(scratch + (row + _HALF) * shape.ROW_PITCH + (_HALF + 2 * pair) * 4)
    values = join_halves(upper, last, below)
    for i in cutlass.range_constexpr(8):
        inverse[i] = values[i]
    blocks.store_block(lower, at, at.warp, blocks.half_words(values))
    cute.arch.sync_warp()  # the next chunk's stores into scratch come after these loads


def substitute(first_column: Any, pitch: int, lane_column: Any) -> Any:
    """A column of the inverse of a unit lower triangular 8 x 8 matrix, by forward substitution. first_column: address of the
    negated matrix by columns, `pitch` bytes apart; lane_column: which column, as float32."""
    x = [ptx.is_equal(lane_column, Float32(i)) for i in range(_HALF)]
    for step in range(_HALF - 1):
        for part in range((step + 1) // 4, _HALF // 4):
            factors = ptx.load_four(first_column + step * pitch + part * 16)
            for i in range(4):
                if 4 * part + i > step:
                    x[4 * part + i] = x[4 * part + i] + factors[i] * x[step]
    return x


def join_halves(upper: Any, last: Any, below: Any) -> list[Any]:
    """[[B, 0], [-C^-1 N B^-1, C]]^-1's entries of this lane from those of B^-1, C^-1 and N, negated."""
    upper_words, below_words = blocks.half_words(upper), blocks.half_words(below)
    none, zero = Int32(0), (Float32(0.0),) * 4
    operand = [upper_words[0], none, none, blocks.half_words(last)[0]]
    product = ptx.multiply_small(cutlass.Float16, zero, operand, none, ptx.transpose(below_words[0]))
    operand = [none, blocks.half_words(product)[1], none, none]
    product = ptx.multiply_small(cutlass.Float16, zero, operand, ptx.transpose(upper_words[0]), none)
    return [upper[0], upper[1], product[2], product[3], Float32(0.0), Float32(0.0), last[0], last[1]]


@cute.jit
def next_block(
    at: Lane, left: cute.Tensor, lower: Int32, columns: Int32, reference: Float32, row_decay: Any, u: cutlass.Constexpr
):
    """Compute block u of the warp's row of A from the blocks right of it, and put it into `left`. Return it with decays, as M has
    it."""
    matrix_row, zero = at.lane % 16, (Float32(0.0),) * 4
    sums = [zero, zero]
    for x in cutlass.range_constexpr(u + 1, 4):
        b = ptx.load_matrices(operands.address(lower, x * _BLOCK + matrix_row, 2 * u + at.unit), True)
        operand = [left[4 * x + i] for i in range(4)]
        for side in cutlass.range_constexpr(2):
            sums[side] = ptx.multiply_small(cutlass.Float16, sums[side], operand, b[2 * side], b[2 * side + 1])
    operand = blocks.half_words([*sums[0], *sums[1]])
    d = ptx.load_matrices(operands.address(lower, u * _BLOCK + matrix_row, 2 * u + at.unit), True)
    products = [
        *ptx.multiply_small(cutlass.Float16, zero, operand, d[0], d[1]),
        *ptx.multiply_small(cutlass.Float16, zero, operand, d[2], d[3]),
    ]
    blocks.set_words(left, u, blocks.half_words(products))
    values = [None] * 8
    for m in cutlass.range_constexpr(2):
        cums = ptx.load_pair(columns + CUM + (2 * u + m) * 32)
        for odd in cutlass.range_constexpr(2):
            column_part = ptx.exp2(reference - cums[odd])
            for side in cutlass.range_constexpr(2):
                index = 4 * m + 2 * side + odd
                values[index] = products[index] * (column_part * row_decay[side])
    return values


def decayed_diagonal(inverse: Any, columns: Any, row_cum: Any, keeps: Any, warp: Any) -> list[Any]:
    """The warp's diagonal block of A with decays; keeps: of a square on the diagonal, what is not zeroed."""
    cums = [ptx.load_pair(columns + CUM + warp * 64 + m * 32) for m in range(2)]
    return [inverse[4 * m + i] * blocks.block_decay(row_cum, cums[m], keeps, m, i) for m in range(2) for i in range(4)]
