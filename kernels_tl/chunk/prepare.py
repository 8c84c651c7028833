"""The launch `chunk_prepare`: everything of a chunk that does not depend on the state.

One block per (chunk slot, state head). With c the inclusive cumulative sum of the log decays g of the chunk, and
K^ = |k|^-1 K, Q^ = |q|^-1 Q with normalised keys and queries (folded in as factors; K and Q themselves stay as they are):

    A = (I + strict_lower(beta_i K^_i . K^_j))^-1                   16 x 16 diagonal blocks by forward substitution in float32,
                                                                    the rest by matmuls of 16-bit operands, block row by block row
    X = |k_i|^-1 A_ij |k_j|                                         16-bit
    Z = beta_i |k_i|^-1 exp(c_last - c_i) (X^T K)_ij                16-bit, [64, K]
    R = exp(c_i - c_j) beta_j |k_j|^-1 (lower(scale |q_i|^-1 Q K^T) X)_ij    16-bit, [64, 64]
    vectors                                                         float32, see types.py

With M = A_ij exp(c_i - c_j) beta_j the chunk's new values are M W, Z is (diag(exp(c_last - c)) M)^T K^ and R is P M for
P = lower(scale exp(c_i - c_j) Q^ K^^T): in both products the exponentials under the sum cancel to the factor before it.

X's diagonal is 1, which 16 bits hold: only what lies below it is rounded. float16 has no room for |k_j| / |k_i|: there X is
|k_i|^-1 A_ij times HALF_SCALE, and Z and R have beta over HALF_SCALE in the place of beta |k|^-1.

Tokens past the sequence's end have zero rows in K and Q, g = 0 and beta = 0: their rows of Z and R and their columns of R are
zero, and c_last is the sum over the sequence's own tokens. The block also zeroes output rows that no other block writes: those of
its chunk if the sequence is padding, and those of tokens `64 * slot ...` at or beyond cu_seqlens[N].
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, DIAGONAL_PITCH, HALF, ROW_LAST, ROW_STATE_KEY, ROW_STATE_QUERY, TILE_R, TILE_Z
from kernels_tl.chunk.state_chain import halves_of
from kernels_tl.chunk.tile_math import (
    BLOCK,
    LOG2_E,
    NORM_EPS,
    allocate_gates,
    inverse_dtype,
    make_gates,
    read_squares,
    right_operands,
    scales_of,
    square_rows,
)
from kernels_tl.chunk.types import declare, exit_unless_chosen
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_store
from kernels_tl.common.versions import prim_func, select

PREPARE_THREADS = 128


def _allocate_shared(problem: ChunkProblem) -> Any:
    """Shared memory of a block. X takes the place of what it is made of, Z that of X and of L, R that of Q."""
    halves, dtype = halves_of(problem), problem.dtype
    inverse, below = (T.alloc_shared((CHUNK, CHUNK), inverse_dtype(problem)) for _ in range(2))
    q = tuple(T.alloc_shared((CHUNK, HALF), dtype) for _ in range(2))
    x, z_high = T.view(inverse, (CHUNK, CHUNK), dtype), T.view(below, (CHUNK, CHUNK), dtype)
    return build.named(
        k=tuple(T.alloc_shared((CHUNK, HALF), dtype) for _ in halves),  # [64 tokens, 64 key columns] by halves
        q=q,
        r=q[0],
        query=q[1],  # the lower triangle of Q K^T
        below=below,  # -L below its diagonal blocks
        inverse=inverse,
        x=x,
        z=(x, z_high)[: len(halves)],
        # The diagonal blocks of -L, transposed, then their inverses.
        diagonal=T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32"),
        sums=T.alloc_shared((CHUNK,), "float32"),  # c in units of log 2
        beta=T.alloc_shared((CHUNK,), "float32"),  # then the factor of Z and R
        k_norm=T.alloc_shared((CHUNK,), "float32"),
        k_factor=T.alloc_shared((CHUNK,), "float32"),
        q_factor=T.alloc_shared((CHUNK,), "float32"),
    )


def _allocate_registers(problem: ChunkProblem) -> Any:
    """Registers of a block of one warpgroup."""
    halves, dtype = halves_of(problem), problem.dtype
    return build.named(
        kk=T.alloc_fragment((CHUNK, CHUNK), "float32"),
        qk=T.alloc_fragment((CHUNK, CHUNK), "float32"),  # then R, then Z's high half
        q_operand=tuple(T.alloc_fragment((CHUNK, HALF), dtype) for _ in halves),
        q_right=tuple(T.alloc_fragment((CHUNK, HALF), dtype) for _ in halves),  # the same registers as right operands of a warp
        squares=T.alloc_local((8,), "float32"),
        norms=T.alloc_local((2,), "float32"),
        query_operand=T.alloc_fragment((CHUNK, CHUNK), dtype),
        z=T.alloc_fragment((CHUNK, HALF), "float32"),
        z_operand=tuple(T.alloc_fragment((CHUNK, HALF), dtype) for _ in halves),
        row_factor=T.alloc_fragment((CHUNK,), "float32"),
        column_factor=T.alloc_fragment((CHUNK, CHUNK), "float32"),
        r=T.alloc_fragment((CHUNK, CHUNK), dtype),
        inverse=T.alloc_fragment((CHUNK, CHUNK), "float32"),
        product=T.alloc_fragment((CHUNK, CHUNK), "float32"),
        product_operand=T.alloc_fragment((CHUNK, CHUNK), inverse_dtype(problem)),
        below=T.alloc_fragment((CHUNK, CHUNK), inverse_dtype(problem)),
        column=T.alloc_local((BLOCK,), "float32"),  # of a diagonal block's inverse
    )


@T.macro
def zero_rows(problem, out, row_begin, row_end, head):
    tx = T.get_thread_binding()
    for row in T.serial(T.max(row_end - row_begin, 0)):
        if tx < problem.head_v_dim:
            out[T.cast(row_begin + row, "int64"), head, tx] = 0


@T.macro
def load(problem, tensors, begin, head, shared, loaded):
    heads, end = problem.num_state_heads, begin + CHUNK
    q_head, k_head = head // (heads // problem.num_q_heads), head // (heads // problem.num_k_heads)
    for half in halves_of(problem):
        columns = slice(half * HALF, (half + 1) * HALF)
        T.tma_copy(tensors.k[begin:end, k_head, columns], shared.k[half], barrier=loaded)
        T.tma_copy(tensors.q[begin:end, q_head, columns], shared.q[half], barrier=loaded)
    T.barrier_arrive(loaded)


@T.macro
def share_gates(problem, tensors, begin, valid, head, shared, gates):
    """One warp, two tokens per lane: the cumulative sum needs no barrier."""
    tx = T.get_thread_binding()
    make_gates(problem, tensors, begin, valid, tx, head, gates)
    for half in T.unroll(2):
        shared.beta[2 * tx + half] = gates.strengths[half]
    shared.sums[2 * tx] = (gates.running[0] - gates.decays[1]) * LOG2_E
    shared.sums[2 * tx + 1] = gates.running[0] * LOG2_E


@T.macro
def zero_rows_past_end(shared, valid):
    for i, j in T.Parallel(CHUNK, HALF):
        if i >= valid:
            for half, k in enumerate(shared.k):
                k[i, j] = 0
                shared.q[half][i, j] = 0
    T.fence_proxy_async()


@T.macro
def multiply(shared, registers):
    """K K^T and Q K^T, issued."""
    for half, k in enumerate(shared.k):
        T.wgmma_gemm(k, k, registers.kk, transpose_B=True, clear_accum=half == 0)
    # Q is read once from shared memory, for both its products.
    for half, operand in enumerate(registers.q_operand):
        T.copy(shared.q[half], operand)
    for half, k in enumerate(shared.k):
        T.wgmma_gemm(registers.q_operand[half], k, registers.qk, transpose_B=True, clear_accum=half == 0)


@T.macro
def make_factors(problem, shared, registers, scale):
    """The row factors of Q and of K; beta becomes the factor of Z and R. Waits for K K^T and Q K^T."""
    square_norm, factor = build.variables(2, "float32", init=0.0)
    tx = T.get_thread_binding()
    unit, x_scale = scales_of(problem)
    if problem.use_qk_l2norm:
        T.clear(registers.squares)
        for half, right in enumerate(registers.q_right):
            for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                right[i, j] = registers.q_operand[half][i, j]
            square_rows(problem.dtype, registers.squares, registers.q_operand[half], right)
        read_squares(registers.squares, tx % 32, registers.norms)
        for side in T.unroll(2):
            shared.q_factor[tx // 32 * 16 + tx % 32 // 4 + 8 * side] = T.rsqrt(registers.norms[side]) * scale
    else:
        for i in T.Parallel(CHUNK):
            shared.k_factor[i] = 1.0
            shared.q_factor[i] = scale
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(registers.kk, num_regs=32)
    T.warpgroup_fence_operand(registers.qk, num_regs=32)
    if problem.use_qk_l2norm:
        # Only the sums: the roots of all 32 elements that a thread holds would be 31 too many.
        for i, j in T.Parallel(CHUNK, CHUNK):
            if i == j:
                shared.k_factor[i] = registers.kk[i, j]
        T.sync_threads()
        if tx < CHUNK:
            square_norm = shared.k_factor[tx] + NORM_EPS
            factor = T.rsqrt(square_norm)
            shared.k_factor[tx] = factor
            if unit:
                shared.k_norm[tx] = square_norm * factor
                shared.beta[tx] *= factor
            else:
                shared.beta[tx] *= 1.0 / x_scale
    T.sync_threads()


@T.macro
def make_query(shared, registers):
    """The lower triangle of scaled Q K^T, as a left operand."""
    T.copy(shared.q_factor, registers.row_factor)
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.qk[i, j] *= registers.row_factor[i]
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.query_operand[i, j] = select(i >= j, registers.qk[i, j], 0.0)
    # It takes the place of a half of Q: its registers are needed. The barriers before its product are enough.
    T.copy(registers.query_operand, shared.query)


@T.macro
def split_lower(problem, shared, registers):
    """-L in two parts: its diagonal blocks, transposed, for the substitution, and what is below them."""
    unit, x_scale = scales_of(problem)
    T.clear(shared.inverse)
    for i in T.Parallel(CHUNK):
        if unit:
            registers.row_factor[i] = -shared.beta[i]
        else:
            registers.row_factor[i] = -shared.k_factor[i] * (shared.beta[i] * x_scale)
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.column_factor[i, j] = shared.k_factor[j]
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.kk[i, j] *= registers.row_factor[i] * registers.column_factor[i, j]
    for i, j in T.Parallel(CHUNK, CHUNK):
        if i // BLOCK == j // BLOCK:
            shared.diagonal[j, i % BLOCK] = registers.kk[i, j]
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.below[i, j] = select(i // BLOCK > j // BLOCK, registers.kk[i, j], 0.0)
    T.copy(registers.below, shared.below)
    T.sync_threads()


@T.macro
def invert_diagonal(shared, registers):
    """The inverses of the diagonal blocks by forward substitution, a thread per column."""
    tx = T.get_thread_binding()
    column = registers.column
    if tx < CHUNK:
        for i in T.unroll(BLOCK):
            column[i] = T.if_then_else(tx % BLOCK == i, 1.0, 0.0)
        for pivot in T.unroll(BLOCK - 1):
            for i in T.unroll(BLOCK):
                if i > pivot:
                    column[i] = column[i] + shared.diagonal[tx // BLOCK * BLOCK + pivot, i] * column[pivot]
    T.sync_threads()
    if tx < CHUNK:
        for i in T.unroll(BLOCK):
            shared.diagonal[tx // BLOCK * BLOCK + i, tx % BLOCK] = column[i]
            shared.inverse[tx // BLOCK * BLOCK + i, tx] = column[i]
    T.fence_proxy_async()
    T.sync_threads()


@T.macro
def invert(problem, shared, registers):
    """(I + L)^-1 by blocks of rows: X <- B + (-B L_below) X from X = B, the inverse of the diagonal blocks."""
    split_lower(problem, shared, registers)
    invert_diagonal(shared, registers)
    T.wgmma_gemm(shared.inverse, shared.below, registers.product, clear_accum=True)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(registers.product, num_regs=32)
    T.copy(registers.product, registers.product_operand)
    for round in T.unroll(CHUNK // BLOCK - 1):
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.inverse[i, j] = 0.0
            if i // BLOCK == j // BLOCK:
                registers.inverse[i, j] = shared.diagonal[i, j % BLOCK]
        T.wgmma_gemm(registers.product_operand, shared.inverse, registers.inverse)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.inverse, num_regs=32)
        if round < CHUNK // BLOCK - 2:
            T.sync_threads()
            T.copy(registers.inverse, shared.inverse)
            T.fence_proxy_async()
            T.sync_threads()


@T.macro
def make_x(problem, shared, registers):
    unit, x_scale = scales_of(problem)
    T.sync_threads()  # every warp has read what X is made of
    for i in T.Parallel(CHUNK):
        registers.row_factor[i] = shared.k_factor[i] * x_scale
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.inverse[i, j] *= registers.row_factor[i]
    if unit:
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.column_factor[i, j] = shared.k_norm[j]
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.inverse[i, j] *= registers.column_factor[i, j]
    T.copy(registers.inverse, shared.x)
    T.fence_proxy_async()
    T.sync_threads()


@T.macro
def make_tiles(shared, registers, total):
    """R in the place of Q, Z in the places of X and L. total: c of the last token."""
    halves = len(shared.k)
    T.wgmma_gemm(shared.query, shared.x, registers.qk, clear_accum=True)
    T.wgmma_gemm(shared.x, shared.k[0], registers.z, transpose_A=True, clear_accum=True)
    for i in T.Parallel(CHUNK):
        registers.row_factor[i] = shared.sums[i]
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(registers.qk, num_regs=32)
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.column_factor[i, j] = shared.sums[j]
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.qk[i, j] *= T.exp2(registers.row_factor[i] - registers.column_factor[i, j])
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.column_factor[i, j] = shared.beta[j]
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.r[i, j] = select(i >= j, registers.qk[i, j] * registers.column_factor[i, j], 0.0)
    T.copy(registers.r, shared.r)
    if halves > 1:
        T.wgmma_gemm(shared.x, shared.k[1], registers.qk, transpose_A=True, clear_accum=True)
    for i in T.Parallel(CHUNK):
        registers.row_factor[i] = T.exp2(total - registers.row_factor[i]) * shared.beta[i]
    for half, z in enumerate((registers.z, registers.qk)[:halves]):
        T.wait_wgmma(halves - 1 - half)
        T.warpgroup_fence_operand(z, num_regs=32)
        for i, j in T.Parallel(CHUNK, HALF):
            registers.z_operand[half][i, j] = z[i, j] * registers.row_factor[i]
    T.sync_threads()  # every warp has read X
    for half, z in enumerate(shared.z):
        T.copy(registers.z_operand[half], z)
    T.fence_proxy_async()
    T.sync_threads()


@T.macro
def store(tensors, slot, head, shared, total):
    tx = T.get_thread_binding()
    if tx < 32:
        bulk_store(shared.r, tensors.tiles[slot, head, TILE_R, :, :])
        for half, z in enumerate(shared.z):
            bulk_store(z, tensors.tiles[slot, head, TILE_Z + half, :, :])

    if tx < CHUNK:
        tensors.vectors[slot, head, ROW_STATE_KEY, tx] = T.exp2(shared.sums[tx]) * shared.k_factor[tx]
        tensors.vectors[slot, head, ROW_STATE_QUERY, tx] = T.exp2(shared.sums[tx]) * shared.q_factor[tx]
        tensors.vectors[slot, head, ROW_LAST, tx] = T.exp2(total)
    T.tma_store_wait(0)


def prepare(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_prepare`.

    decides: the launch works only if a sequence has more than `split_if_longest_exceeds` tokens; without, it reads no
    such bound.
    """
    names = "q k g beta A_log dt_bias state_indices cu_seqlens out tiles vectors scale null_slot split_if_longest_exceeds"

    @prim_func
    def chunk_prepare():
        tensors = declare(problem, names)
        cu_seqlens, out = tensors.cu_seqlens, tensors.out
        with T.Kernel(tensors.tiles.shape[0], problem.num_state_heads, threads=PREPARE_THREADS) as (slot, head):
            T.annotate_min_blocks_per_sm(4)  # as many as shared memory holds
            shared = _allocate_shared(problem)
            registers = _allocate_registers(problem)
            gates = allocate_gates()
            loaded = T.alloc_barrier(PREPARE_THREADS)
            low, high = build.variables(2, init=0)
            live = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout({buffer: make_swizzled_layout(buffer) for buffer in shared.q})

            exit_unless_chosen(decides, True, tensors)
            # The sequence of this slot: the last n with cu_seqlens[n] // 64 + n <= slot.
            last = cu_seqlens.shape[0] - 1
            high = T.max(last - 1, 0)
            while low < high:
                middle = (low + high + 1) // 2
                if T.cast(cu_seqlens[middle], "int32") // CHUNK + middle <= slot:
                    low = middle
                else:
                    high = middle - 1
            sequence_begin = T.cast(cu_seqlens[low], "int32")
            sequence_end = T.cast(cu_seqlens[T.min(low + 1, last)], "int32")
            begin = sequence_begin + (slot - sequence_begin // CHUNK - low) * CHUNK
            valid = T.min(sequence_end - begin, CHUNK)
            if problem.pooled:
                if valid > 0:
                    live = tensors.state_indices[low] > tensors.null_slot

            # Serial loops: they rarely run, and unrolled they cost the others registers.
            used = T.cast(cu_seqlens[last], "int32")
            if slot * CHUNK + CHUNK > used:
                zero_rows(problem, out, T.max(used, slot * CHUNK), T.min(slot * CHUNK + CHUNK, out.shape[0]), head)
            if problem.pooled:
                if valid > 0 and not live:
                    zero_rows(problem, out, begin, begin + valid, head)

            # A loop of at most one iteration: in an `if` the compiler would split the body at every barrier.
            for _ in T.serial(T.if_then_else(valid > 0 and live, 1, 0)):
                load(problem, tensors, begin, head, shared, loaded)
                if tx < 32:
                    share_gates(problem, tensors, begin, valid, head, shared, gates)
                T.barrier_wait(loaded, 0)
                if valid < CHUNK:
                    zero_rows_past_end(shared, valid)
                T.sync_threads()
                multiply(shared, registers)
                make_factors(problem, shared, registers, tensors.scale)
                make_query(shared, registers)
                invert(problem, shared, registers)
                make_x(problem, shared, registers)
                total = shared.sums[CHUNK - 1]
                make_tiles(shared, registers, total)
                store(tensors, slot, head, shared, total)

    return chunk_prepare
