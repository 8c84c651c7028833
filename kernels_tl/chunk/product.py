"""The product role of the one launch: R, Z and the row factors of the block's chunks from X, by one warpgroup."""

from typing import Any

import tilelang.language as T

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, HALF, NUM_VECTORS, ROW_LAST, ROW_STATE_KEY, ROW_STATE_QUERY, TILE_R, TILE_Z
from kernels_tl.chunk.inverse import QUARTER
from kernels_tl.chunk.makers import ring_slot
from kernels_tl.chunk.sizes import CHAINS, KEY_BUFFERS
from kernels_tl.chunk.state_chain import halves_of
from kernels_tl.chunk.tile_math import BLOCK, read_squares, right_operands, square_rows
from kernels_tl.common import build
from kernels_tl.common.versions import select


def _allocate(problem: ChunkProblem) -> Any:
    """Registers of the product's warpgroup."""
    halves, dtype = halves_of(problem), problem.dtype
    return build.named(
        q_operand=tuple(T.alloc_fragment((CHUNK, HALF), dtype) for _ in halves),  # [64 tokens, 64 key columns], left operands
        q_right=tuple(T.alloc_fragment((CHUNK, HALF), dtype) for _ in halves),  # the same registers as right operands of a warp
        squares=T.alloc_local((8,), "float32"),  # of the warp's rows of Q
        factors=T.alloc_local((2,), "float32"),  # |q|^-1 of the lane's two rows
        qk=T.alloc_fragment((CHUNK, CHUNK), "float32"),  # Q K^T, then R, then Z's high half
        query_operand=T.alloc_fragment((CHUNK, CHUNK), dtype),  # the lower triangle of scaled Q K^T
        z=T.alloc_fragment((CHUNK, HALF), "float32"),
        z_operand=tuple(T.alloc_fragment((CHUNK, HALF), dtype) for _ in halves),
        r=T.alloc_fragment((CHUNK, CHUNK), dtype),
        vectors=T.alloc_local((NUM_VECTORS,), "float32"),  # the row factors of the lane's row
        row_factor=T.alloc_fragment((CHUNK,), "float32"),
        column_factor=T.alloc_fragment((CHUNK, CHUNK), "float32"),
        decay=T.alloc_fragment((CHUNK, CHUNK), "float32"),  # what R is multiplied with
        # Compared with columns that are equal for all comparisons: else these take 32 registers each.
        row_index=T.alloc_fragment((CHUNK,), "int32"),
    )


@T.macro
def make_query(problem, thread, turn, scale, shared, registers):
    warp = thread // 32
    lane = thread % 32
    buffer = turn % KEY_BUFFERS
    factors, squares, row_factor, qk = registers.factors, registers.squares, registers.row_factor, registers.qk
    T.barrier_wait(shared.q_full[0], turn & 1)
    for half, operand in enumerate(registers.q_operand):
        T.copy(shared.q[half], operand)
    if problem.use_qk_l2norm:
        # The diagonals of the warp's two blocks of 8 rows of Q Q^T are the squared norms: by products of the warp's own, out
        # of the registers that Q K^T reads too. One half of each product is of other rows and is not used.
        for half, right in enumerate(registers.q_right):
            for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                right[i, j] = registers.q_operand[half][i, j]
        T.clear(squares)
        for half, right in enumerate(registers.q_right):
            square_rows(problem.dtype, squares, registers.q_operand[half], right)
    T.sync_warp()
    if thread % 32 == 0:
        T.barrier_arrive(shared.q_empty)
    T.barrier_wait(shared.k_full[buffer], (turn // KEY_BUFFERS) & 1)
    # Rows of Q and K past the end may be anything: they reach rows of R of tokens past the end, or nothing.
    for half, k in enumerate(shared.k):
        T.wgmma_gemm(registers.q_operand[half], k[buffer, :, :], qk, transpose_B=True, clear_accum=half == 0)
    if problem.use_qk_l2norm:
        read_squares(squares, lane, factors)
        for side in T.unroll(2):
            factors[side] = T.rsqrt(factors[side]) * scale
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
        registers.query_operand[i, j] = select(registers.row_index[i] >= j, qk[i, j], 0.0)


@T.macro
def make_decays(turn, shared, registers):
    """Makes everything that R is multiplied with, while X is made: X is to be free again soon."""
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
    for k, accumulator in zip(shared.k, (z, qk), strict=True):
        T.wgmma_gemm(shared.x[half, :, :], k[buffer, :, :], accumulator, transpose_A=True, clear_accum=True)
    for i in T.Parallel(CHUNK):
        row_factor[i] = T.exp2(total - row_factor[i]) * shared.beta[half, i]
    # For the warp's own rows, as the factors are; two lanes hold each row.
    vectors[ROW_LAST] = T.exp2(shared.sums[half, BLOCK * warp + lane % BLOCK])
    vectors[ROW_STATE_KEY] = vectors[ROW_LAST] * shared.k_factor[half, BLOCK * warp + lane % BLOCK]
    vectors[ROW_STATE_QUERY] = vectors[ROW_LAST] * shared.q_factor[BLOCK * warp + lane % BLOCK]
    vectors[ROW_LAST] = T.exp2(total)
    for high, accumulator in enumerate((z, qk)):
        T.wait_wgmma(1 - high)
        T.warpgroup_fence_operand(accumulator, num_regs=32)
        for i, j in T.Parallel(CHUNK, HALF):
            registers.z_operand[high][i, j] = accumulator[i, j] * row_factor[i]
    T.sync_warp()
    if thread % 32 == 0:
        T.barrier_arrive(shared.x_free[half])
        T.barrier_arrive(shared.k_empty[buffer])
        T.barrier_arrive(shared.gates_free[half])


@T.macro
def fill_slot(makers, thread, turn, rank, ring, registers):
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
    for half, z in enumerate(registers.z_operand):
        for i, j in T.Parallel(CHUNK, HALF):
            ring.tiles[slot, TILE_Z + half, i, j] = z[i, j]
    if thread % 32 < BLOCK:
        for row in T.unroll(NUM_VECTORS):
            ring.vectors[slot, row, BLOCK * (thread // 32) + thread % 32] = registers.vectors[row]
    T.fence_proxy_async()
    T.barrier_arrive(ring.made)


@T.macro
def product_role(problem, makers, thread, work, scale, shared, ring):
    """One warpgroup: R, Z and the row factors of the chunks that the block makes, from X."""
    registers = _allocate(problem)
    for i in T.Parallel(CHUNK):
        registers.row_index[i] = i
    for turn in T.serial(work.turns):
        half = turn % 2
        make_query(problem, thread, turn, scale, shared, registers)
        T.barrier_wait(shared.gates_full[half], (turn // 2) & 1)
        total = shared.sums[half, CHUNK - 1]
        make_decays(turn, shared, registers)
        make_tiles(thread, turn, total, shared, registers)
        fill_slot(makers, thread, turn, work.rank, ring, registers)
