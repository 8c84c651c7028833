"""The product role of the one launch: R, Z and the row factors of the block's chunks from X, by one warpgroup."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from gdn.problems import ChunkProblem
from kernels_tl.chunk.inverse import QUARTER
from kernels_tl.chunk.makers import CHAINS, KEY_BUFFERS, ring_slot
from kernels_tl.chunk.tile_math import BLOCK, NORM_EPS, right_operands, square_rows
from kernels_tl.chunk.types import (
    CHUNK,
    HALF,
    NUM_VECTORS,
    ROW_LAST,
    ROW_STATE_KEY,
    ROW_STATE_QUERY,
    TILE_R,
    TILE_Z,
    TILE_Z_HIGH,
)


@dataclass(frozen=True)
class ProductRegisters:
    """Registers of the product's warpgroup."""

    q_operand: Any  # [64 tokens, 64 key columns], as left operands
    q_high_operand: Any
    q_right: Any  # the same registers as right operands of a warp
    q_high_right: Any
    sums: Any  # [8] float32: squares of the warp's rows of Q
    factors: Any  # |q|^-1 of the lane's two rows
    qk: Any  # [64, 64] float32: Q K^T, then R, then Z's high half
    query_operand: Any  # the lower triangle of scaled Q K^T
    z: Any
    z_operand: Any
    z_high_operand: Any
    r: Any
    vectors: Any  # [NUM_VECTORS] float32: the row factors of the lane's row
    row_factor: Any
    column_factor: Any
    decay: Any  # [64, 64] float32: what R is multiplied with
    row_index: Any  # compared with columns that are equal for all comparisons: else these take 32 registers each


def _allocation(problem: ChunkProblem) -> Any:
    dtype = problem.dtype

    @T.macro
    def allocate():
        q_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        q_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        q_right = T.alloc_fragment((CHUNK, HALF), dtype)
        q_high_right = T.alloc_fragment((CHUNK, HALF), dtype)
        sums = T.alloc_local((8,), "float32")
        factors = T.alloc_local((2,), "float32")
        qk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        query_operand = T.alloc_fragment((CHUNK, CHUNK), dtype)
        z_fragment = T.alloc_fragment((CHUNK, HALF), "float32")
        z_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        z_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        r_fragment = T.alloc_fragment((CHUNK, CHUNK), dtype)
        vectors = T.alloc_local((NUM_VECTORS,), "float32")
        row_factor = T.alloc_fragment((CHUNK,), "float32")
        column_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        decay_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        row_index = T.alloc_fragment((CHUNK,), "int32")
        return ProductRegisters(
            q_operand, q_high_operand, q_right, q_high_right, sums, factors, qk_fragment, query_operand, z_fragment,
            z_operand, z_high_operand, r_fragment, vectors, row_factor, column_fragment, decay_fragment, row_index,
        )  # fmt: skip

    return allocate


def _query_macro(problem: ChunkProblem) -> Any:
    """A macro for the lower triangle of scaled Q K^T."""
    normalize = problem.use_qk_l2norm
    square = square_rows(problem.dtype)

    @T.macro
    def make_query(thread, turn, scale, shared, registers):
        warp = thread // 32
        lane = thread % 32
        buffer = turn % KEY_BUFFERS
        factors, sums, row_factor, qk = registers.factors, registers.sums, registers.row_factor, registers.qk
        T.barrier_wait(shared.q_full[0], turn & 1)
        T.copy(shared.q, registers.q_operand)
        T.copy(shared.q_high, registers.q_high_operand)
        if normalize:
            # The diagonals of the warp's two blocks of 8 rows of Q Q^T are the squared norms: by products of the warp's own, out
            # of the registers that Q K^T reads too. One half of each product is of other rows and is not used.
            for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                registers.q_right[i, j] = registers.q_operand[i, j]
            for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                registers.q_high_right[i, j] = registers.q_high_operand[i, j]
            T.clear(sums)
            square(sums, registers.q_operand, registers.q_right)
            square(sums, registers.q_high_operand, registers.q_high_right)
        T.sync_warp()
        if thread % 32 == 0:
            T.barrier_arrive(shared.q_empty)
        T.barrier_wait(shared.k_full[buffer], (turn // KEY_BUFFERS) & 1)
        # Rows of Q and K past the end may be anything: they reach rows of R of tokens past the end, or nothing.
        T.wgmma_gemm(registers.q_operand, shared.k[buffer, :, :], qk, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(registers.q_high_operand, shared.k_high[buffer, :, :], qk, transpose_B=True)
        if normalize:
            # Row lane // 4 of each block: one of its four lanes holds the diagonal.
            factors[0] = T.Select(lane // 4 % 2 == 0, sums[0], sums[1])
            factors[1] = T.Select(lane // 4 % 2 == 0, sums[6], sums[7])
            for side in T.unroll(2):
                factors[side] = T.rsqrt(T.shfl_sync(factors[side], lane // 4 * 4 + lane // 8) + NORM_EPS) * scale
        else:
            for side in T.unroll(2):
                factors[side] = scale
        for side in T.unroll(2):
            shared.q_factor[BLOCK * warp + lane // 4 + QUARTER * side] = factors[side]
        T.sync_warp()  # a warp reads the factors of its own rows only
        for i in T.Parallel(CHUNK):
            row_factor[i] = shared.q_factor[i]
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(qk, num_regs=32)
        for i, j in T.Parallel(CHUNK, CHUNK):
            qk[i, j] *= row_factor[i]
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.query_operand[i, j] = T.Select(registers.row_index[i] >= j, qk[i, j], 0.0)

    return make_query


def _tile_macros(problem: ChunkProblem, makers: int) -> tuple[Any, Any, Any]:
    """Macros for the decays, for R and Z, and for the block's slot of the ring."""

    @T.macro
    def make_decays(turn, shared, registers):
        """Everything that R is multiplied with, while X is made: X is to be free again soon."""
        half = turn % 2
        row_factor, column_factor, decay = registers.row_factor, registers.column_factor, registers.decay
        for i in T.Parallel(CHUNK):
            row_factor[i] = shared.sums[half, i]
        for i, j in T.Parallel(CHUNK, CHUNK):
            decay[i, j] = shared.sums[half, j]
        for i, j in T.Parallel(CHUNK, CHUNK):
            # Above the diagonal R is zero as its factors are, times whatever is finite.
            decay[i, j] = T.exp2(T.min(row_factor[i] - decay[i, j], 0.0))
        # The inverse role overwrites beta with the factor of Z and R; factors_full is early in its turn, long before X.
        T.barrier_wait(shared.factors_full[half], (turn // 2) & 1)
        for i, j in T.Parallel(CHUNK, CHUNK):
            column_factor[i, j] = shared.beta[half, j]
        for i, j in T.Parallel(CHUNK, CHUNK):
            decay[i, j] *= column_factor[i, j]

    @T.macro
    def make_tiles(thread, turn, total, shared, registers):
        """R, Z and the row factors, in registers."""
        warp = thread // 32
        lane = thread % 32
        buffer = turn % KEY_BUFFERS
        half = turn % 2
        qk, z, row_factor, vectors = registers.qk, registers.z, registers.row_factor, registers.vectors
        T.barrier_wait(shared.x_full[half], (turn // 2) & 1)
        T.wgmma_gemm(registers.query_operand, shared.x[half, :, :], qk, clear_accum=True)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(qk, num_regs=32)
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.r[i, j] = qk[i, j] * registers.decay[i, j]
        T.wgmma_gemm(shared.x[half, :, :], shared.k[buffer, :, :], z, transpose_A=True, clear_accum=True)
        T.wgmma_gemm(shared.x[half, :, :], shared.k_high[buffer, :, :], qk, transpose_A=True, clear_accum=True)
        for i in T.Parallel(CHUNK):
            row_factor[i] = T.exp2(total - row_factor[i]) * shared.beta[half, i]
        # Of the warp's own rows, as the factors are; two lanes hold each row.
        vectors[ROW_LAST] = T.exp2(shared.sums[half, BLOCK * warp + lane % BLOCK])
        vectors[ROW_STATE_KEY] = vectors[ROW_LAST] * shared.k_factor[half, BLOCK * warp + lane % BLOCK]
        vectors[ROW_STATE_QUERY] = vectors[ROW_LAST] * shared.q_factor[BLOCK * warp + lane % BLOCK]
        vectors[ROW_LAST] = T.exp2(total)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(z, num_regs=32)
        for i, j in T.Parallel(CHUNK, HALF):
            registers.z_operand[i, j] = z[i, j] * row_factor[i]
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(qk, num_regs=32)
        for i, j in T.Parallel(CHUNK, HALF):
            registers.z_high_operand[i, j] = qk[i, j] * row_factor[i]
        T.sync_warp()
        if thread % 32 == 0:
            T.barrier_arrive(shared.x_free[half])
            T.barrier_arrive(shared.k_empty[buffer])
            T.barrier_arrive(shared.gates_free[half])

    @T.macro
    def fill_slot(thread, turn, rank, ring, registers):
        """Stores the tiles once the slot is free. They are in registers by now: the chains get them soon after they make room."""
        if makers == CHAINS:
            T.barrier_wait(ring.taken[0], (turn & 1) ^ 1)
        elif rank < CHAINS:
            T.barrier_wait(ring.taken[0], (turn & 1) ^ 1)
        else:
            T.barrier_wait(ring.room, (turn & 1) ^ 1)
        slot = ring_slot(makers, rank, turn)
        for i, j in T.Parallel(CHUNK, CHUNK):
            ring.tiles[slot, TILE_R, i, j] = registers.r[i, j]
        for i, j in T.Parallel(CHUNK, HALF):
            ring.tiles[slot, TILE_Z, i, j] = registers.z_operand[i, j]
        for i, j in T.Parallel(CHUNK, HALF):
            ring.tiles[slot, TILE_Z_HIGH, i, j] = registers.z_high_operand[i, j]
        if thread % 32 < BLOCK:
            for row in T.unroll(NUM_VECTORS):
                ring.vectors[slot, row, BLOCK * (thread // 32) + thread % 32] = registers.vectors[row]
        T.fence_proxy_async()
        T.barrier_arrive(ring.made)

    return make_decays, make_tiles, fill_slot


def product_role(problem: ChunkProblem, makers: int) -> Any:
    """A macro for one warpgroup: R, Z and the row factors of the chunks that the block makes, from X."""
    allocate = _allocation(problem)
    make_query = _query_macro(problem)
    make_decays, make_tiles, fill_slot = _tile_macros(problem, makers)

    @T.macro
    def make_products(thread, work, scale, shared, ring):
        registers = allocate()
        for i in T.Parallel(CHUNK):
            registers.row_index[i] = i
        for turn in T.serial(work.turns):
            half = turn % 2
            make_query(thread, turn, scale, shared, registers)
            T.barrier_wait(shared.gates_full[half], (turn // 2) & 1)
            total = shared.sums[half, CHUNK - 1]
            make_decays(turn, shared, registers)
            make_tiles(thread, turn, total, shared, registers)
            fill_slot(thread, turn, work.rank, ring, registers)

    return make_products
