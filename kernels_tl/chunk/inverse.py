"""The inverse role of the one launch: X of the block's chunks, by one warpgroup.

Rows 16 w to 16 w + 15 of every tile belong to warp w. L is kept in blocks of 16 x 16. While the warpgroup's K K^T runs, each warp
makes its diagonal block of K K^T by products of its own, and from it norms, L's diagonal block and that block's inverse: two
halves of 8 x 8 by substitution, the part below them by products. With the L and the inverted blocks of all warps in shared
memory, a warp then makes its row of blocks of (I + L)^-1 leftwards, out of registers:

    A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu

A block is stored while the next one's products run.
"""

from typing import Any

import tilelang.language as T

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, HALF
from kernels_tl.chunk.makers import WARPGROUP
from kernels_tl.chunk.sizes import KEY_BUFFERS
from kernels_tl.chunk.tile_math import BLOCK, inverse_dtype, mma, read_squares, scales_of
from kernels_tl.common import build

INVERSE_SYNC = 5  # a named barrier
QUARTER = BLOCK // 2  # rows of the smallest blocks
BLOCKS = CHUNK // BLOCK  # of a row


def _allocate(problem: ChunkProblem) -> Any:
    """Registers of the inverse's warpgroup; a warp's operands are as its lanes hold them."""
    keys, lower = problem.dtype, inverse_dtype(problem)
    steps = problem.head_k_dim // 16  # of a product of single warps
    unit, x_scale = scales_of(problem)
    return build.named(
        unit=unit,
        x_scale=x_scale,
        kk=T.alloc_fragment((CHUNK, CHUNK), "float32"),  # K K^T
        column_factor=T.alloc_fragment((CHUNK, CHUNK), "float32"),
        row_factor=T.alloc_fragment((CHUNK,), "float32"),
        keys=T.alloc_local((8 * steps,), keys),  # the warp's 16 rows of K as left operands
        transposed=T.alloc_local((8 * steps,), keys),  # and as right operands, 8 rows each
        diagonal=T.alloc_local((8,), "float32"),  # the warp's diagonal block of K K^T
        factors=T.alloc_local((2,), "float32"),  # |k|^-1 of the lane's two rows
        strengths=T.alloc_local((2,), "float32"),  # beta of the same
        betas=T.alloc_local((2,), "float32"),  # their product
        columns=T.alloc_local((4,), "float32"),  # |k|^-1 of the lane's columns in the diagonal block
        norms=T.alloc_local((4,), "float32"),  # |k| of the lane's columns in a block
        column=T.alloc_local((QUARTER,), "float32"),  # of the inverse of half a diagonal block
        values=T.alloc_local((8 * BLOCKS,), "float32"),  # the row of blocks of (I + L)^-1
        scaled=T.alloc_local((8,), "float32"),  # a block of X
        sums=T.alloc_local((8,), "float32"),
        left=T.alloc_local((8 * BLOCKS,), lower),  # the row of blocks so far, as left operands
        middle=T.alloc_local((8,), lower),
        right=T.alloc_local((4,), lower),
        below=T.alloc_local((8 * BLOCKS * (BLOCKS - 1) // 2,), lower),  # L_xu at x (x - 1) / 2 + u, as right operands
        inverted=T.alloc_local((8 * (BLOCKS - 1),), lower),  # A_uu, as right operands
    )


@T.macro
def load_block(lower_shared, lane, row, column, blocks_loaded, place):
    """A block of lower_shared [64, 64] as a right operand."""
    source = (BLOCK * row + lane % 16, BLOCK * column + lane // 16 * 8)
    T.ptx_ldmatrix(
        T.bool(True), 4, T.access_ptr(lower_shared[source], "r", extent=8), T.access_ptr(blocks_loaded[8 * place], "w", extent=8)
    )


@T.macro
def load_rows(tile, buffer, warp, lane, keys, first):
    """The warp's 16 rows of tile[buffer] [64, 64] as left operands, [16, 16] each."""
    for step in T.unroll(HALF // 16):
        source = (buffer, BLOCK * warp + lane % 16, 16 * step + lane // 16 * 8)
        T.ptx_ldmatrix(
            T.bool(False), 4, T.access_ptr(tile[source], "r", extent=8), T.access_ptr(keys[8 * (first + step)], "w", extent=8)
        )


@T.macro
def load_column(lower_shared, lane, column, registers):
    # By all warps: what only some warps load is kept in registers from chunk to chunk.
    for back in T.unroll(BLOCKS):
        row = BLOCKS - 1 - back
        if row > column:
            load_block(lower_shared, lane, row, column, registers.below, row * (row - 1) // 2 + column)
    load_block(lower_shared, lane, column, column, registers.inverted, column)


@T.macro
def load_norms(k_norm_shared, half, lane, block, registers):
    if registers.unit:
        for m in T.unroll(2):
            for odd in T.vectorized(2):
                registers.norms[2 * m + odd] = k_norm_shared[half, BLOCK * block + 8 * m + lane % 4 * 2 + odd]


@T.macro
def store(x_shared, half, warp, lane, block, registers):
    """A block of X from the block of (I + L)^-1."""
    scaled = registers.scaled
    for i in T.unroll(8):
        scaled[i] = registers.values[8 * block + i] * registers.factors[i // 2 % 2]
        if registers.unit:
            scaled[i] = scaled[i] * registers.norms[i // 4 * 2 + i % 2]
    for m in T.unroll(2):
        for side in T.unroll(2):
            for odd in T.vectorized(2):
                place = (half, BLOCK * warp + lane // 4 + 8 * side, BLOCK * block + 8 * m + lane % 4 * 2 + odd)
                x_shared[place] = T.cast(scaled[4 * m + 2 * side + odd], x_shared.dtype)


@T.macro
def zero_keys_past_end(shared, buffer, valid):
    # The next sequence's keys, NaN perhaps, would reach Z.
    for i, j in T.Parallel(CHUNK, HALF):
        if i >= valid:
            for k in shared.k:
                k[buffer, i, j] = 0
    T.fence_proxy_async()
    T.sync_threads(INVERSE_SYNC, WARPGROUP)


@T.macro
def multiply_keys(shared, buffer, warp, lane, registers):
    """K K^T, issued, and meanwhile the warp's diagonal block of it."""
    for half, k in enumerate(shared.k):
        T.wgmma_gemm(k[buffer, :, :], k[buffer, :, :], registers.kk, transpose_B=True, clear_accum=half == 0)
    keys, transposed, diagonal = registers.keys, registers.transposed, registers.diagonal
    for half, tile in enumerate(shared.k):
        load_rows(tile, buffer, warp, lane, keys, HALF // 16 * half)
    T.clear(diagonal)
    for step in T.unroll(HALF // 16 * len(shared.k)):
        for n in T.unroll(2):
            for m in T.unroll(2):
                for odd in T.vectorized(2):
                    transposed[8 * step + 4 * n + 2 * m + odd] = keys[8 * step + 4 * m + 2 * n + odd]
            mma(keys.dtype, diagonal, 4 * n, keys, 8 * step, transposed, 8 * step + 4 * n)


@T.macro
def make_factors(normalize, shared, half, warp, lane, registers):
    """Norms from the diagonal block; beta in shared memory becomes the factor of Z and R."""
    factors, norms, strengths, betas = registers.factors, registers.norms, registers.strengths, registers.betas
    if normalize:
        read_squares(registers.diagonal, lane, norms)
        for side in T.unroll(2):
            factors[side] = T.rsqrt(norms[side])
    else:
        for side in T.unroll(2):
            factors[side] = 1.0
    for side in T.unroll(2):
        strengths[side] = shared.beta[half, BLOCK * warp + lane // 4 + 8 * side]
        betas[side] = strengths[side] * factors[side]
    T.sync_warp()
    for side in T.unroll(2):
        place = (half, BLOCK * warp + lane // 4 + 8 * side)
        shared.k_factor[place] = factors[side]
        if registers.unit:
            shared.k_norm[place] = norms[side] * factors[side]
            shared.beta[place] = betas[side]
        else:
            shared.beta[place] = strengths[side] * (1.0 / registers.x_scale)
    T.barrier_arrive(shared.factors_full[half])  # by all lanes: a branch would serialise the products under way
    T.sync_warp()


@T.macro
def store_diagonal(shared, half, warp, lane, registers):
    """The warp's diagonal block of -L, transposed."""
    columns = registers.columns
    for m in T.unroll(2):
        for odd in T.vectorized(2):
            columns[2 * m + odd] = shared.k_factor[half, BLOCK * warp + 8 * m + lane % 4 * 2 + odd]
    for m in T.unroll(2):
        for side in T.unroll(2):
            for odd in T.unroll(2):
                place = (BLOCK * warp + 8 * m + lane % 4 * 2 + odd, lane // 4 + 8 * side)
                shared.diagonal[place] = registers.diagonal[4 * m + 2 * side + odd] * (
                    -registers.betas[side] * columns[2 * m + odd]
                )
    T.sync_warp()


@T.macro
def substitute(diagonal_shared, warp, own, column):
    """The inverses of the two 8 x 8 halves on the diagonal: a lane makes one column, `own` of 16."""
    # By all lanes, two of them for each column: a branch would serialise the products under way.
    for i in T.unroll(QUARTER):
        column[i] = T.if_then_else(own % QUARTER == i, 1.0, 0.0)
    for pivot in T.unroll(QUARTER - 1):
        for i in T.unroll(QUARTER):
            if i > pivot:
                place = (BLOCK * warp + own // QUARTER * QUARTER + pivot, own // QUARTER * QUARTER + i)
                column[i] = column[i] + diagonal_shared[place] * column[pivot]
    T.sync_warp()
    for part in T.unroll(2):
        for i in T.vectorized(4):
            diagonal_shared[BLOCK * warp + own, own // QUARTER * QUARTER + 4 * part + i] = column[4 * part + i]
    T.sync_warp()


@T.macro
def invert_diagonal(shared, warp, lane, own, registers):
    """The inverse of the diagonal block, into `values` and `left`: below the two halves it is -A_22 L_21 A_11."""
    values, sums, diagonal_shared = registers.values, registers.sums, shared.diagonal
    left, middle, right = registers.left, registers.middle, registers.right
    for odd in T.vectorized(2):
        right[odd] = 0
    for odd in T.vectorized(2):
        right[2 + odd] = T.cast(diagonal_shared[BLOCK * warp + lane // 4, QUARTER + lane % 4 * 2 + odd], left.dtype)
    substitute(diagonal_shared, warp, own, registers.column)
    T.clear(values)
    for m in T.unroll(2):
        for odd in T.unroll(2):
            values[6 * m + odd] = diagonal_shared[BLOCK * warp + QUARTER * m + lane % 4 * 2 + odd, QUARTER * m + lane // 4]
    for i in T.unroll(8):
        left[i] = T.cast(values[i], left.dtype)
    T.clear(sums)
    mma(left.dtype, sums, 0, left, 0, right, 0)
    for i in T.unroll(8):
        middle[i] = 0
    for odd in T.unroll(2):
        middle[2 + odd] = T.cast(sums[2 + odd], left.dtype)
    for odd in T.vectorized(2):
        right[odd] = T.cast(diagonal_shared[BLOCK * warp + lane // 4, lane % 4 * 2 + odd], left.dtype)
    for odd in T.vectorized(2):
        right[2 + odd] = 0
    mma(left.dtype, values, 0, middle, 0, right, 0)
    for block in T.unroll(BLOCKS):
        for i in T.unroll(8):
            values[8 * block + i] = values[i]
            left[8 * block + i] = T.cast(values[i], left.dtype)
    T.sync_threads(INVERSE_SYNC, WARPGROUP)  # the factors of all rows; also: every warp has read the previous L


@T.macro
def store_lower(shared, half, warp, lane, registers):
    """-L left of the diagonal blocks, and the inverted diagonal"""
    row_factor, column_factor, kk = registers.row_factor, registers.column_factor, registers.kk
    for i in T.Parallel(CHUNK):
        if registers.unit:
            row_factor[i] = -shared.beta[half, i]
        else:
            row_factor[i] = -shared.k_factor[half, i] * (shared.beta[half, i] * registers.x_scale)
    # All factors are read before anything is stored: the compiler keeps the order of loads and stores.
    for i, j in T.Parallel(CHUNK, CHUNK):
        column_factor[i, j] = shared.k_factor[half, j]
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(kk, num_regs=32)
    for i, j in T.Parallel(CHUNK, CHUNK):
        kk[i, j] *= row_factor[i] * column_factor[i, j]
    for block in T.unroll(BLOCKS - 1):
        if warp > block:
            for i, j in T.Parallel(CHUNK, BLOCK):
                shared.lower[i, BLOCK * block + j] = T.cast(kk[i, BLOCK * block + j], shared.lower.dtype)
    for m in T.unroll(2):
        for side in T.unroll(2):
            for odd in T.vectorized(2):
                place = (BLOCK * warp + lane // 4 + 8 * side, BLOCK * warp + 8 * m + lane % 4 * 2 + odd)
                shared.lower[place] = registers.left[4 * m + 2 * side + odd]
    T.sync_threads(INVERSE_SYNC, WARPGROUP)


@T.macro
def merge(shared, half, warp, lane, registers):
    """The warp's row of blocks of X, leftwards; the first column of L is loaded already."""
    values, sums, left, middle = registers.values, registers.sums, registers.left, registers.middle
    for back in T.unroll(BLOCKS - 1):
        load_norms(shared.k_norm, half, lane, BLOCKS - 1 - back, registers)
        if back < BLOCKS - 2:  # for the next round, before this one's stores, which it would wait for
            load_column(shared.lower, lane, BLOCKS - 3 - back, registers)
        if warp > BLOCKS - 2 - back:
            T.clear(sums)
            for backwards in T.unroll(BLOCKS):  # the block that was made last comes last
                if backwards <= back:
                    if BLOCKS - 1 - backwards <= warp:
                        for n in T.unroll(2):
                            row = BLOCKS - 1 - backwards
                            lower = 8 * (BLOCKS - 2 - back) + 4 * row * (row - 1) + 4 * n
                            mma(left.dtype, sums, 4 * n, left, 8 * row, registers.below, lower)
            # While the products run.
            store(shared.x, half, warp, lane, BLOCKS - 1 - back, registers)
            for i in T.unroll(8):
                middle[i] = T.cast(sums[i], left.dtype)
                values[8 * (BLOCKS - 2 - back) + i] = 0.0
            for n in T.unroll(2):
                place = 8 * (BLOCKS - 2 - back) + 4 * n
                mma(left.dtype, values, place, middle, 0, registers.inverted, place)
            for i in T.unroll(8):
                left[8 * (BLOCKS - 2 - back) + i] = T.cast(values[8 * (BLOCKS - 2 - back) + i], left.dtype)
    load_norms(shared.k_norm, half, lane, 0, registers)
    store(shared.x, half, warp, lane, 0, registers)
    T.fence_proxy_async()
    T.barrier_arrive(shared.x_full[half])


@T.macro
def inverse_role(problem, makers, thread, work, shared):
    """One warpgroup: X of the chunks that the block makes."""
    registers = _allocate(problem)
    warp = thread // 32
    lane = thread % 32
    own = thread % BLOCK  # the lane's column of the diagonal block
    # Above the diagonal they stay zero.
    for half, i, j in T.Parallel(2, CHUNK, CHUNK):
        shared.x[half, i, j] = 0
    for turn in T.serial(work.turns):
        buffer = turn % KEY_BUFFERS
        half = turn % 2
        valid = T.min(work.length - (makers * turn + work.rank) * CHUNK, CHUNK)
        T.barrier_wait(shared.k_full[buffer], (turn // KEY_BUFFERS) & 1)
        if valid < CHUNK:
            zero_keys_past_end(shared, buffer, valid)
        multiply_keys(shared, buffer, warp, lane, registers)
        T.barrier_wait(shared.gates_full[half], (turn // 2) & 1)
        make_factors(problem.use_qk_l2norm, shared, half, warp, lane, registers)
        store_diagonal(shared, half, warp, lane, registers)
        invert_diagonal(shared, warp, lane, own, registers)
        store_lower(shared, half, warp, lane, registers)
        load_column(shared.lower, lane, BLOCKS - 2, registers)
        for side in T.unroll(2):
            registers.factors[side] = registers.factors[side] * registers.x_scale
        T.barrier_wait(shared.x_free[half], ((turn // 2) & 1) ^ 1)
        merge(shared, half, warp, lane, registers)
