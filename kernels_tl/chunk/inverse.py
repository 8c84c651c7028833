"""The inverse role of the one launch: X of the block's chunks, by one warpgroup.

Rows 16 w to 16 w + 15 of every tile belong to warp w. L is kept in blocks of 16 x 16. While the warpgroup's K K^T runs, each warp
makes its diagonal block of K K^T by products of its own, and from it norms, L's diagonal block and that block's inverse: two
halves of 8 x 8 by substitution, the part below them by products. With the L and the inverted blocks of all warps in shared
memory, a warp then makes its row of blocks of (I + L)^-1 leftwards, out of registers:

    A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu

A block is stored while the next one's products run.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from gdn.problems import ChunkProblem
from kernels_tl.chunk.makers import KEY_BUFFERS, WARPGROUP
from kernels_tl.chunk.tile_math import BLOCK, NORM_EPS, SHORT, scales_of
from kernels_tl.chunk.types import CHUNK, HALF

INVERSE_SYNC = 5  # a named barrier
QUARTER = BLOCK // 2  # rows of the smallest blocks
BLOCKS = CHUNK // BLOCK  # of a row


@dataclass(frozen=True)
class InverseRegisters:
    """Registers of the inverse's warpgroup; a warp's operands are as its lanes hold them."""

    kk: Any  # [64, 64] float32: K K^T
    column_factor: Any  # [64, 64] float32
    row_factor: Any  # [64] float32
    keys: Any  # the warp's 16 rows of K as left operands
    transposed: Any  # and as right operands, 8 rows each
    diagonal: Any  # the warp's diagonal block of K K^T
    factors: Any  # |k|^-1 of the lane's two rows
    strengths: Any  # beta of the same
    betas: Any  # their product
    columns: Any  # |k|^-1 of the lane's columns in the diagonal block
    norms: Any  # |k| of the lane's columns in a block
    column: Any  # a column of the inverse of half a diagonal block
    values: Any  # the row of blocks of (I + L)^-1
    scaled: Any  # a block of X
    sums: Any
    left: Any  # the row of blocks so far, as left operands
    middle: Any
    right: Any
    below: Any  # L_xu at x (x - 1) / 2 + u, as right operands
    inverted: Any  # A_uu, as right operands


class _BlockMacros(NamedTuple):
    """Products of single warps and the loads and stores of their operands."""

    multiply: Any
    load_rows: Any
    load_column: Any
    load_norms: Any
    store: Any


def _allocation(problem: ChunkProblem) -> Any:
    dtype = problem.dtype
    inverse_dtype = "float16" if problem.use_qk_l2norm else dtype
    steps = problem.head_k_dim // 16  # of a product of single warps

    @T.macro
    def allocate():
        kk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        column_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        row_factor = T.alloc_fragment((CHUNK,), "float32")
        keys = T.alloc_local((8 * steps,), dtype)
        transposed = T.alloc_local((8 * steps,), dtype)
        diagonal = T.alloc_local((8,), "float32")
        factors = T.alloc_local((2,), "float32")
        strengths = T.alloc_local((2,), "float32")
        betas = T.alloc_local((2,), "float32")
        columns = T.alloc_local((4,), "float32")
        norms = T.alloc_local((4,), "float32")
        column = T.alloc_local((QUARTER,), "float32")
        values = T.alloc_local((8 * BLOCKS,), "float32")
        scaled = T.alloc_local((8,), "float32")
        sums = T.alloc_local((8,), "float32")
        left = T.alloc_local((8 * BLOCKS,), inverse_dtype)
        middle = T.alloc_local((8,), inverse_dtype)
        right = T.alloc_local((4,), inverse_dtype)
        below = T.alloc_local((8 * BLOCKS * (BLOCKS - 1) // 2,), inverse_dtype)
        inverted = T.alloc_local((8 * (BLOCKS - 1),), inverse_dtype)
        return InverseRegisters(
            kk_fragment, column_fragment, row_factor, keys, transposed, diagonal, factors, strengths, betas, columns,
            norms, column, values, scaled, sums, left, middle, right, below, inverted,
        )  # fmt: skip

    return allocate


def _block_macros(problem: ChunkProblem) -> _BlockMacros:
    dtype = problem.dtype
    short = SHORT["float16" if problem.use_qk_l2norm else dtype]
    unit, _ = scales_of(problem)

    @T.macro
    def multiply(sums, begin, left, left_begin, right, right_begin):
        """sums[begin ..] [16, 8] += left [16, 16] right [16, 8], each as the lanes of a warp hold it."""
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", short, short, "fp32",
            left.data, left_begin, right.data, right_begin, sums.data, begin, T.bool(False),
        )  # fmt: skip

    @T.macro
    def load(lower_shared, lane, row, column, blocks_loaded, place):
        """A block of lower_shared [64, 64] as a right operand."""
        T.ptx_ldmatrix(
            T.bool(True),
            4,
            T.access_ptr(lower_shared[BLOCK * row + lane % 16, BLOCK * column + lane // 16 * 8], "r", extent=8),
            T.access_ptr(blocks_loaded[8 * place], "w", extent=8),
        )

    @T.macro
    def load_rows(tile, buffer, warp, lane, keys, first):
        """The warp's 16 rows of tile[buffer] [64, 64] as left operands, [16, 16] each."""
        for step in T.unroll(HALF // 16):
            T.ptx_ldmatrix(
                T.bool(False),
                4,
                T.access_ptr(tile[buffer, BLOCK * warp + lane % 16, 16 * step + lane // 16 * 8], "r", extent=8),
                T.access_ptr(keys[8 * (first + step)], "w", extent=8),
            )

    @T.macro
    def load_column(lower_shared, lane, column, registers):
        # By all warps: what only some warps load is kept in registers from chunk to chunk.
        for back in T.unroll(BLOCKS):
            row = BLOCKS - 1 - back
            if row > column:
                load(lower_shared, lane, row, column, registers.below, row * (row - 1) // 2 + column)
        load(lower_shared, lane, column, column, registers.inverted, column)

    @T.macro
    def load_norms(k_norm_shared, half, lane, block, norms):
        if unit:
            for m in T.unroll(2):
                for odd in T.vectorized(2):
                    norms[2 * m + odd] = k_norm_shared[half, BLOCK * block + 8 * m + lane % 4 * 2 + odd]

    @T.macro
    def store(x_shared, half, warp, lane, block, registers):
        """A block of X from the block of (I + L)^-1."""
        scaled = registers.scaled
        for i in T.unroll(8):
            scaled[i] = registers.values[8 * block + i] * registers.factors[i // 2 % 2]
            if unit:
                scaled[i] = scaled[i] * registers.norms[i // 4 * 2 + i % 2]
        for m in T.unroll(2):
            for side in T.unroll(2):
                for odd in T.vectorized(2):
                    x_shared[half, BLOCK * warp + lane // 4 + 8 * side, BLOCK * block + 8 * m + lane % 4 * 2 + odd] = T.cast(
                        scaled[4 * m + 2 * side + odd], dtype
                    )

    return _BlockMacros(multiply, load_rows, load_column, load_norms, store)


def _key_macros(problem: ChunkProblem, blocks: _BlockMacros) -> tuple[Any, Any, Any]:
    """Macros that zero keys past the end, that issue K K^T and make the diagonal blocks, and that make the factors."""
    dtype, normalize = problem.dtype, problem.use_qk_l2norm
    unit, x_scale = scales_of(problem)
    steps = problem.head_k_dim // 16

    @T.macro
    def zero_keys_past_end(shared, buffer, valid):
        # The next sequence's keys, NaN perhaps, would reach Z.
        for i, j in T.Parallel(CHUNK, HALF):
            if i >= valid:
                shared.k[buffer, i, j] = 0
                shared.k_high[buffer, i, j] = 0
        T.fence_proxy_async()
        T.sync_threads(INVERSE_SYNC, WARPGROUP)

    @T.macro
    def multiply_keys(shared, buffer, warp, lane, registers):
        """K K^T, issued, and meanwhile the warp's diagonal block of it."""
        T.wgmma_gemm(shared.k[buffer, :, :], shared.k[buffer, :, :], registers.kk, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(shared.k_high[buffer, :, :], shared.k_high[buffer, :, :], registers.kk, transpose_B=True)
        keys, transposed, diagonal = registers.keys, registers.transposed, registers.diagonal
        blocks.load_rows(shared.k, buffer, warp, lane, keys, 0)
        blocks.load_rows(shared.k_high, buffer, warp, lane, keys, HALF // 16)
        T.clear(diagonal)
        for step in T.unroll(steps):
            for n in T.unroll(2):
                for m in T.unroll(2):
                    for odd in T.vectorized(2):
                        transposed[8 * step + 4 * n + 2 * m + odd] = keys[8 * step + 4 * m + 2 * n + odd]
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", SHORT[dtype], SHORT[dtype], "fp32",
                    keys.data, 8 * step, transposed.data, 8 * step + 4 * n, diagonal.data, 4 * n, T.bool(False),
                )  # fmt: skip

    @T.macro
    def make_factors(shared, half, warp, lane, registers):
        """Norms from the diagonal block; beta in shared memory becomes the factor of Z and R."""
        factors, norms, diagonal = registers.factors, registers.norms, registers.diagonal
        strengths, betas = registers.strengths, registers.betas
        if normalize:
            # Row lane // 4 of each half of 8 rows: one of its four lanes holds the diagonal.
            factors[0] = T.Select(lane // 4 % 2 == 0, diagonal[0], diagonal[1])
            factors[1] = T.Select(lane // 4 % 2 == 0, diagonal[6], diagonal[7])
            for side in T.unroll(2):
                norms[side] = T.shfl_sync(factors[side], lane // 4 * 4 + lane // 8) + NORM_EPS
                factors[side] = T.rsqrt(norms[side])
        else:
            for side in T.unroll(2):
                factors[side] = 1.0
        for side in T.unroll(2):
            strengths[side] = shared.beta[half, BLOCK * warp + lane // 4 + 8 * side]
            betas[side] = strengths[side] * factors[side]
        T.sync_warp()
        for side in T.unroll(2):
            shared.k_factor[half, BLOCK * warp + lane // 4 + 8 * side] = factors[side]
            if unit:
                shared.k_norm[half, BLOCK * warp + lane // 4 + 8 * side] = norms[side] * factors[side]
                shared.beta[half, BLOCK * warp + lane // 4 + 8 * side] = betas[side]
            else:
                shared.beta[half, BLOCK * warp + lane // 4 + 8 * side] = strengths[side] * (1.0 / x_scale)
        T.barrier_arrive(shared.factors_full[half])  # by all lanes: a branch would serialise the products under way
        T.sync_warp()

    return zero_keys_past_end, multiply_keys, make_factors


def _diagonal_macros(problem: ChunkProblem, blocks: _BlockMacros) -> tuple[Any, Any]:
    """Macros that store the warp's diagonal block of -L, transposed, and that invert it."""
    inverse_dtype = "float16" if problem.use_qk_l2norm else problem.dtype

    @T.macro
    def store_diagonal(shared, half, warp, lane, registers):
        columns = registers.columns
        for m in T.unroll(2):
            for odd in T.vectorized(2):
                columns[2 * m + odd] = shared.k_factor[half, BLOCK * warp + 8 * m + lane % 4 * 2 + odd]
        for m in T.unroll(2):
            for side in T.unroll(2):
                for odd in T.unroll(2):
                    shared.diagonal[BLOCK * warp + 8 * m + lane % 4 * 2 + odd, lane // 4 + 8 * side] = registers.diagonal[
                        4 * m + 2 * side + odd
                    ] * (-registers.betas[side] * columns[2 * m + odd])
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
                    column[i] = (
                        column[i]
                        + diagonal_shared[BLOCK * warp + own // QUARTER * QUARTER + pivot, own // QUARTER * QUARTER + i]
                        * column[pivot]
                    )
        T.sync_warp()
        for part in T.unroll(2):
            for i in T.vectorized(4):
                diagonal_shared[BLOCK * warp + own, own // QUARTER * QUARTER + 4 * part + i] = column[4 * part + i]
        T.sync_warp()

    @T.macro
    def invert_diagonal(shared, warp, lane, own, registers):
        """The inverse of the diagonal block, into `values` and `left`: below the two halves it is -A_22 L_21 A_11."""
        values, sums, left, middle, right = (
            registers.values, registers.sums, registers.left, registers.middle, registers.right,
        )  # fmt: skip
        diagonal_shared = shared.diagonal
        for odd in T.vectorized(2):
            right[odd] = 0
        for odd in T.vectorized(2):
            right[2 + odd] = T.cast(diagonal_shared[BLOCK * warp + lane // 4, QUARTER + lane % 4 * 2 + odd], inverse_dtype)
        substitute(diagonal_shared, warp, own, registers.column)
        T.clear(values)
        for m in T.unroll(2):
            for odd in T.unroll(2):
                values[6 * m + odd] = diagonal_shared[BLOCK * warp + QUARTER * m + lane % 4 * 2 + odd, QUARTER * m + lane // 4]
        for i in T.unroll(8):
            left[i] = T.cast(values[i], inverse_dtype)
        T.clear(sums)
        blocks.multiply(sums, 0, left, 0, right, 0)
        for i in T.unroll(8):
            middle[i] = 0
        for odd in T.unroll(2):
            middle[2 + odd] = T.cast(sums[2 + odd], inverse_dtype)
        for odd in T.vectorized(2):
            right[odd] = T.cast(diagonal_shared[BLOCK * warp + lane // 4, lane % 4 * 2 + odd], inverse_dtype)
        for odd in T.vectorized(2):
            right[2 + odd] = 0
        blocks.multiply(values, 0, middle, 0, right, 0)
        for block in T.unroll(BLOCKS):
            for i in T.unroll(8):
                values[8 * block + i] = values[i]
                left[8 * block + i] = T.cast(values[i], inverse_dtype)
        T.sync_threads(INVERSE_SYNC, WARPGROUP)  # the factors of all rows; also: every warp has read the previous L

    return store_diagonal, invert_diagonal


def _merge_macros(problem: ChunkProblem, blocks: _BlockMacros) -> tuple[Any, Any]:
    """Macros that store -L and that make X from it."""
    inverse_dtype = "float16" if problem.use_qk_l2norm else problem.dtype
    unit, x_scale = scales_of(problem)

    @T.macro
    def store_lower(shared, half, warp, lane, registers):
        """-L left of the diagonal blocks, and the inverted diagonal blocks."""
        row_factor, column_factor, kk = registers.row_factor, registers.column_factor, registers.kk
        for i in T.Parallel(CHUNK):
            if unit:
                row_factor[i] = -shared.beta[half, i]
            else:
                row_factor[i] = -shared.k_factor[half, i] * (shared.beta[half, i] * x_scale)
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
                    shared.lower[i, BLOCK * block + j] = T.cast(kk[i, BLOCK * block + j], inverse_dtype)
        for m in T.unroll(2):
            for side in T.unroll(2):
                for odd in T.vectorized(2):
                    shared.lower[
                        BLOCK * warp + lane // 4 + 8 * side, BLOCK * warp + 8 * m + lane % 4 * 2 + odd
                    ] = registers.left[4 * m + 2 * side + odd]  # fmt: skip
        T.sync_threads(INVERSE_SYNC, WARPGROUP)

    @T.macro
    def merge(shared, half, warp, lane, registers):
        """The warp's row of blocks of X, leftwards; the first column of L is loaded already."""
        values, sums, left, middle = registers.values, registers.sums, registers.left, registers.middle
        for back in T.unroll(BLOCKS - 1):
            blocks.load_norms(shared.k_norm, half, lane, BLOCKS - 1 - back, registers.norms)
            if back < BLOCKS - 2:  # for the next round, before this one's stores, which it would wait for
                blocks.load_column(shared.lower, lane, BLOCKS - 3 - back, registers)
            if warp > BLOCKS - 2 - back:
                T.clear(sums)
                for backwards in T.unroll(BLOCKS):  # the block that was made last comes last
                    if backwards <= back:
                        if BLOCKS - 1 - backwards <= warp:
                            for n in T.unroll(2):
                                blocks.multiply(
                                    sums, 4 * n, left, 8 * (BLOCKS - 1 - backwards), registers.below,
                                    8 * (BLOCKS - 2 - back)
                                    + 4 * (BLOCKS - 1 - backwards) * (BLOCKS - 2 - backwards) + 4 * n,
                                )  # fmt: skip
                # While the products run.
                blocks.store(shared.x, half, warp, lane, BLOCKS - 1 - back, registers)
                for i in T.unroll(8):
                    middle[i] = T.cast(sums[i], inverse_dtype)
                    values[8 * (BLOCKS - 2 - back) + i] = 0.0
                for n in T.unroll(2):
                    blocks.multiply(
                        values, 8 * (BLOCKS - 2 - back) + 4 * n, middle, 0, registers.inverted, 8 * (BLOCKS - 2 - back) + 4 * n
                    )
                for i in T.unroll(8):
                    left[8 * (BLOCKS - 2 - back) + i] = T.cast(values[8 * (BLOCKS - 2 - back) + i], inverse_dtype)
        blocks.load_norms(shared.k_norm, half, lane, 0, registers.norms)
        blocks.store(shared.x, half, warp, lane, 0, registers)
        T.fence_proxy_async()
        T.barrier_arrive(shared.x_full[half])

    return store_lower, merge


def inverse_role(problem: ChunkProblem, makers: int) -> Any:
    """A macro for one warpgroup: X of the chunks that the block makes."""
    _, x_scale = scales_of(problem)
    blocks = _block_macros(problem)
    allocate = _allocation(problem)
    zero_keys_past_end, multiply_keys, make_factors = _key_macros(problem, blocks)
    store_diagonal, invert_diagonal = _diagonal_macros(problem, blocks)
    store_lower, merge = _merge_macros(problem, blocks)

    @T.macro
    def make_inverses(thread, work, shared):
        registers = allocate()
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
            make_factors(shared, half, warp, lane, registers)
            store_diagonal(shared, half, warp, lane, registers)
            invert_diagonal(shared, warp, lane, own, registers)
            store_lower(shared, half, warp, lane, registers)
            blocks.load_column(shared.lower, lane, BLOCKS - 2, registers)
            for side in T.unroll(2):
                registers.factors[side] = registers.factors[side] * x_scale
            T.barrier_wait(shared.x_free[half], ((turn // 2) & 1) ^ 1)
            merge(shared, half, warp, lane, registers)

    return make_inverses
