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

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl.chunk.gates import LOG2_E, gate_macros
from kernels_tl.chunk.tile_math import BLOCK, DIAGONAL_PITCH, NORM_EPS, right_operands, scales_of, square_rows
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
    Tensors,
    cu_seqlens_tensor,
    exit_macro,
    gate_tensor,
    row_tensor,
    tiles_tensor,
    token_tensor,
)

PREPARE_THREADS = 128


@dataclass(frozen=True)
class PrepareShared:
    """Shared memory of a block. X takes the place of what it is made of, Z that of X and of L, R that of Q."""

    k: Any  # [64 tokens, 64 key columns]
    k_high: Any
    q: Any
    q_high: Any
    below: Any  # [64, 64]: -L below its diagonal blocks
    inverse: Any  # [64, 64]
    x: Any  # a view of `inverse`
    z_high: Any  # a view of `below`
    query: Any  # the lower triangle of Q K^T, in the place of q_high
    diagonal: Any  # the diagonal blocks of -L, transposed, then their inverses; float32
    sums: Any  # [64] float32: c in units of log 2
    beta: Any  # [64] float32: beta, then the factor of Z and R
    k_norm: Any
    k_factor: Any
    q_factor: Any


@dataclass(frozen=True)
class PrepareRegisters:
    """Registers of a block of one warpgroup."""

    kk: Any
    qk: Any
    q_operand: Any
    q_high_operand: Any
    q_right: Any  # the same registers as right operands of a warp
    q_high_right: Any
    sums: Any
    norms: Any
    query_operand: Any
    z: Any
    z_operand: Any
    z_high_operand: Any
    row_factor: Any
    column_factor: Any
    r: Any
    inverse: Any
    product: Any
    product_operand: Any
    below: Any
    column: Any  # a column of a diagonal block's inverse
    decays: Any
    strengths: Any


class PrepareMacros(NamedTuple):
    """The steps of a block, in order."""

    allocate_shared: Any
    allocate_registers: Any
    zero_rows: Any
    make_gates: Any
    zero_rows_past_end: Any
    multiply: Any
    make_factors: Any
    make_query: Any
    invert: Any
    make_x: Any
    make_tiles: Any
    store: Any


def _allocations(problem: ChunkProblem) -> tuple[Any, Any]:
    dtype = problem.dtype
    # With normalised keys L is at most beta: float16 holds it, with three bits more than bfloat16.
    inverse_dtype = "float16" if problem.use_qk_l2norm else dtype

    @T.macro
    def allocate_shared():
        k_shared = T.alloc_shared((CHUNK, HALF), dtype)
        k_high_shared = T.alloc_shared((CHUNK, HALF), dtype)
        q_shared = T.alloc_shared((CHUNK, HALF), dtype)
        q_high_shared = T.alloc_shared((CHUNK, HALF), dtype)
        below_shared = T.alloc_shared((CHUNK, CHUNK), inverse_dtype)
        inverse_shared = T.alloc_shared((CHUNK, CHUNK), inverse_dtype)
        x_shared = T.view(inverse_shared, (CHUNK, CHUNK), dtype)
        z_high_shared = T.view(below_shared, (CHUNK, CHUNK), dtype)
        query_shared = q_high_shared
        diagonal_shared = T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32")
        sum_shared = T.alloc_shared((CHUNK,), "float32")
        beta_shared = T.alloc_shared((CHUNK,), "float32")
        k_norm_shared = T.alloc_shared((CHUNK,), "float32")
        k_factor_shared = T.alloc_shared((CHUNK,), "float32")
        q_factor_shared = T.alloc_shared((CHUNK,), "float32")
        return PrepareShared(
            k_shared, k_high_shared, q_shared, q_high_shared, below_shared, inverse_shared, x_shared, z_high_shared,
            query_shared, diagonal_shared, sum_shared, beta_shared, k_norm_shared, k_factor_shared, q_factor_shared,
        )  # fmt: skip

    @T.macro
    def allocate_registers():
        kk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        qk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        q_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        q_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        q_right = T.alloc_fragment((CHUNK, HALF), dtype)
        q_high_right = T.alloc_fragment((CHUNK, HALF), dtype)
        sums = T.alloc_local((8,), "float32")
        norms = T.alloc_local((2,), "float32")
        query_operand = T.alloc_fragment((CHUNK, CHUNK), dtype)
        z_fragment = T.alloc_fragment((CHUNK, HALF), "float32")
        z_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        z_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        row_factor = T.alloc_fragment((CHUNK,), "float32")
        column_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        r_fragment = T.alloc_fragment((CHUNK, CHUNK), dtype)
        inverse_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product_operand = T.alloc_fragment((CHUNK, CHUNK), inverse_dtype)
        below_fragment = T.alloc_fragment((CHUNK, CHUNK), inverse_dtype)
        column = T.alloc_local((BLOCK,), "float32")
        decays = T.alloc_local((2,), "float32")
        strengths = T.alloc_local((2,), "float32")
        return PrepareRegisters(
            kk_fragment, qk_fragment, q_operand, q_high_operand, q_right, q_high_right, sums, norms, query_operand,
            z_fragment, z_operand, z_high_operand, row_factor, column_fragment, r_fragment, inverse_fragment,
            product_fragment, product_operand, below_fragment, column, decays, strengths,
        )  # fmt: skip

    return allocate_shared, allocate_registers


def _input_macros(problem: ChunkProblem) -> tuple[Any, Any, Any]:
    """Macros that zero output rows, that evaluate the gates and that zero the rows of K and Q past the end."""
    head_v, wide = problem.head_v_dim, problem.head_k_dim > HALF
    gates = gate_macros(problem)

    @T.macro
    def zero_rows(out, row_begin, row_end, head):
        tx = T.get_thread_binding()
        for row in T.serial(T.max(row_end - row_begin, 0)):
            if tx < head_v:
                out[T.cast(row_begin + row, "int64"), head, tx] = 0

    @T.macro
    def make_gates(tensors, begin, valid, head, shared, registers):
        """One warp, two tokens per lane: the cumulative sum needs no barrier."""
        log_decay = T.alloc_var("float32", init=0.0)
        gate_input = T.alloc_var("float32", init=0.0)
        strength = T.alloc_var("float32", init=0.0)
        running = T.alloc_var("float32", init=0.0)
        tx = T.get_thread_binding()
        gates.load(tensors, begin, valid, tx, head, registers.decays, registers.strengths)
        for half in T.unroll(2):
            row = 2 * tx + half
            gates.evaluate(
                tensors, row < valid, half, head, registers.decays, registers.strengths, log_decay, gate_input, strength
            )
            shared.beta[row] = strength
            registers.decays[half] = log_decay
        gates.sum_decays(tx, registers.decays, running, gate_input)
        shared.sums[2 * tx] = (running - registers.decays[1]) * LOG2_E
        shared.sums[2 * tx + 1] = running * LOG2_E

    @T.macro
    def zero_rows_past_end(shared, valid):
        for i, j in T.Parallel(CHUNK, HALF):
            if i >= valid:
                shared.k[i, j] = 0
                shared.q[i, j] = 0
                if wide:
                    shared.k_high[i, j] = 0
                    shared.q_high[i, j] = 0
        T.fence_proxy_async()

    return zero_rows, make_gates, zero_rows_past_end


def _factor_macros(problem: ChunkProblem) -> tuple[Any, Any, Any]:
    """Macros for K K^T, Q K^T and what they are scaled with."""
    wide, normalize = problem.head_k_dim > HALF, problem.use_qk_l2norm
    unit, x_scale = scales_of(problem)
    square = square_rows(problem.dtype)

    @T.macro
    def multiply(shared, registers):
        """K K^T and Q K^T, issued."""
        T.wgmma_gemm(shared.k, shared.k, registers.kk, transpose_B=True, clear_accum=True)
        if wide:
            T.wgmma_gemm(shared.k_high, shared.k_high, registers.kk, transpose_B=True)
        # Q is read once from shared memory, for both its products.
        T.copy(shared.q, registers.q_operand)
        if wide:
            T.copy(shared.q_high, registers.q_high_operand)
        T.wgmma_gemm(registers.q_operand, shared.k, registers.qk, transpose_B=True, clear_accum=True)
        if wide:
            T.wgmma_gemm(registers.q_high_operand, shared.k_high, registers.qk, transpose_B=True)

    @T.macro
    def make_factors(shared, registers, scale):
        """The row factors of Q and of K; beta becomes the factor of Z and R. Waits for K K^T and Q K^T."""
        square_norm = T.alloc_var("float32", init=0.0)
        factor = T.alloc_var("float32", init=0.0)
        tx = T.get_thread_binding()
        if normalize:
            T.clear(registers.sums)
            for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                registers.q_right[i, j] = registers.q_operand[i, j]
            square(registers.sums, registers.q_operand, registers.q_right)
            if wide:
                for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                    registers.q_high_right[i, j] = registers.q_high_operand[i, j]
                square(registers.sums, registers.q_high_operand, registers.q_high_right)
            # Row lane // 4 of each block: one of its four lanes holds the diagonal.
            norms = registers.norms
            norms[0] = T.Select(tx // 4 % 2 == 0, registers.sums[0], registers.sums[1])
            norms[1] = T.Select(tx // 4 % 2 == 0, registers.sums[6], registers.sums[7])
            for side in T.unroll(2):
                norms[side] = T.rsqrt(T.shfl_sync(norms[side], tx % 32 // 4 * 4 + tx % 32 // 8) + NORM_EPS) * scale
            for side in T.unroll(2):
                shared.q_factor[tx // 32 * 16 + tx % 32 // 4 + 8 * side] = norms[side]
        else:
            for i in T.Parallel(CHUNK):
                shared.k_factor[i] = 1.0
                shared.q_factor[i] = scale
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.kk, num_regs=32)
        T.warpgroup_fence_operand(registers.qk, num_regs=32)
        if normalize:
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
            registers.query_operand[i, j] = T.Select(i >= j, registers.qk[i, j], 0.0)
        # It takes the place of a half of Q: its registers are needed. The barriers before its product are enough.
        T.copy(registers.query_operand, shared.query)

    return multiply, make_factors, make_query


def _inverse_macros(problem: ChunkProblem) -> tuple[Any, Any]:
    """Macros for (I + L)^-1 and X."""
    unit, x_scale = scales_of(problem)

    @T.macro
    def split_lower(shared, registers):
        """-L in two parts: its diagonal blocks, transposed, for the substitution, and what is below them."""
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
            registers.below[i, j] = T.Select(i // BLOCK > j // BLOCK, registers.kk[i, j], 0.0)
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
    def invert(shared, registers):
        """(I + L)^-1 by blocks of rows: X <- B + (-B L_below) X from X = B, the inverse of the diagonal blocks."""
        split_lower(shared, registers)
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
    def make_x(shared, registers):
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

    return invert, make_x


def _tile_macros(problem: ChunkProblem) -> tuple[Any, Any]:
    """Macros for R and Z, and for the stores."""
    wide = problem.head_k_dim > HALF

    @T.macro
    def make_tiles(shared, registers, total):
        """R in the place of Q, Z in the places of X and L. total: c of the last token."""
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(registers.qk, num_regs=32)
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.column_factor[i, j] = shared.sums[j]
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.qk[i, j] *= T.exp2(registers.row_factor[i] - registers.column_factor[i, j])
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.column_factor[i, j] = shared.beta[j]
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.r[i, j] = T.Select(i >= j, registers.qk[i, j] * registers.column_factor[i, j], 0.0)
        T.copy(registers.r, shared.q)
        if wide:
            T.wgmma_gemm(shared.x, shared.k_high, registers.qk, transpose_A=True, clear_accum=True)
        for i in T.Parallel(CHUNK):
            registers.row_factor[i] = T.exp2(total - registers.row_factor[i]) * shared.beta[i]
        T.wait_wgmma(1 if wide else 0)
        T.warpgroup_fence_operand(registers.z, num_regs=32)
        for i, j in T.Parallel(CHUNK, HALF):
            registers.z_operand[i, j] = registers.z[i, j] * registers.row_factor[i]
        T.wait_wgmma(0)
        if wide:
            T.warpgroup_fence_operand(registers.qk, num_regs=32)
            for i, j in T.Parallel(CHUNK, HALF):
                registers.z_high_operand[i, j] = registers.qk[i, j] * registers.row_factor[i]
        T.sync_threads()  # every warp has read X
        T.copy(registers.z_operand, shared.x)
        if wide:
            T.copy(registers.z_high_operand, shared.z_high)
        T.fence_proxy_async()
        T.sync_threads()

    @T.macro
    def store(tensors, slot, head, shared, total):
        tx = T.get_thread_binding()
        if tx < 32:
            T.tma_copy(shared.q, tensors.tiles[slot, head, TILE_R, :, :], leader_scope_threads=32)
            T.tma_copy(shared.x, tensors.tiles[slot, head, TILE_Z, :, :], leader_scope_threads=32)
            if wide:
                T.tma_copy(shared.z_high, tensors.tiles[slot, head, TILE_Z_HIGH, :, :], leader_scope_threads=32)

        if tx < CHUNK:
            tensors.vectors[slot, head, ROW_STATE_KEY, tx] = T.exp2(shared.sums[tx]) * shared.k_factor[tx]
            tensors.vectors[slot, head, ROW_STATE_QUERY, tx] = T.exp2(shared.sums[tx]) * shared.q_factor[tx]
            tensors.vectors[slot, head, ROW_LAST, tx] = T.exp2(total)
        T.tma_store_wait(0)

    return make_tiles, store


def _macros(problem: ChunkProblem) -> PrepareMacros:
    makers = (_allocations, _input_macros, _factor_macros, _inverse_macros, _tile_macros)
    return PrepareMacros(*(macro for make in makers for macro in make(problem)))


def prepare(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_prepare`.

    decides: the launch works only if a sequence has more than `split_if_longest_exceeds` tokens; without, it reads no
    such bound.
    """
    head_k, head_v, heads, dtype = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads, problem.dtype
    heads_per_q, heads_per_k = heads // problem.num_q_heads, heads // problem.num_k_heads
    pooled, raw_gate = problem.pooled, problem.gate_dtype is not None and problem.use_gate
    wide = head_k > HALF

    num_tokens, num_cu_seqlens, slots = T.dynamic("num_tokens"), T.dynamic("num_cu_seqlens"), T.dynamic("num_slots")
    q_type = token_tensor("q", num_tokens, problem.num_q_heads, head_k, dtype)
    k_type = token_tensor("k", num_tokens, problem.num_k_heads, head_k, dtype)
    g_type = gate_tensor("g", num_tokens, num_cu_seqlens, problem, problem.gate_dtype)
    beta_type = gate_tensor("beta", num_tokens, num_cu_seqlens, problem, problem.beta_dtype)
    A_log_type = T.Tensor((heads,), "float32") if raw_gate else cu_seqlens_tensor(num_cu_seqlens, problem)
    dt_bias_type = T.Tensor((heads,), "float32") if raw_gate else cu_seqlens_tensor(num_cu_seqlens, problem)
    state_indices_type = row_tensor("state_indices", num_cu_seqlens, problem, problem.index_dtype)
    cu_seqlens_type = cu_seqlens_tensor(num_cu_seqlens, problem)
    out_type = token_tensor("out", num_tokens, heads, head_v, dtype)

    exit_unless_chosen = exit_macro(decides, cuts=True)
    steps = _macros(problem)

    @T.macro
    def load(tensors, begin, head, shared, loaded):
        q_head, k_head, end = head // heads_per_q, head // heads_per_k, begin + CHUNK
        T.tma_copy(tensors.k[begin:end, k_head, 0:HALF], shared.k, barrier=loaded)
        T.tma_copy(tensors.q[begin:end, q_head, 0:HALF], shared.q, barrier=loaded)
        if wide:
            T.tma_copy(tensors.k[begin:end, k_head, HALF:head_k], shared.k_high, barrier=loaded)
            T.tma_copy(tensors.q[begin:end, q_head, HALF:head_k], shared.q_high, barrier=loaded)
        T.barrier_arrive(loaded)

    @T.prim_func
    def chunk_prepare(
        q: q_type,
        k: k_type,
        g: g_type,
        beta: beta_type,
        A_log: A_log_type,
        dt_bias: dt_bias_type,
        state_indices: state_indices_type,
        cu_seqlens: cu_seqlens_type,
        out: out_type,
        tiles: tiles_tensor(slots, problem),
        vectors: T.Tensor((slots, heads, NUM_VECTORS, CHUNK), "float32"),
        scale: T.float32,
        null_slot: T.int32,
        split_if_longest_exceeds: T.int32,
    ):
        with T.Kernel(slots, heads, threads=PREPARE_THREADS) as (slot, head):
            T.annotate_min_blocks_per_sm(4)  # as many as shared memory holds
            shared = steps.allocate_shared()
            registers = steps.allocate_registers()
            loaded = T.alloc_barrier(PREPARE_THREADS)
            low = T.alloc_var("int32", init=0)
            high = T.alloc_var("int32", init=0)
            live = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout({shared.q: make_swizzled_layout(shared.q), shared.q_high: make_swizzled_layout(shared.q_high)})
            tensors = Tensors(q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, tiles=tiles, vectors=vectors)

            exit_unless_chosen(cu_seqlens, num_cu_seqlens, split_if_longest_exceeds)
            # The sequence of this slot: the last n with cu_seqlens[n] // 64 + n <= slot.
            high = T.max(num_cu_seqlens - 2, 0)
            while low < high:
                middle = (low + high + 1) // 2
                if T.cast(cu_seqlens[middle], "int32") // CHUNK + middle <= slot:
                    low = middle
                else:
                    high = middle - 1
            sequence_begin = T.cast(cu_seqlens[low], "int32")
            sequence_end = T.cast(cu_seqlens[T.min(low + 1, num_cu_seqlens - 1)], "int32")
            begin = sequence_begin + (slot - sequence_begin // CHUNK - low) * CHUNK
            valid = T.min(sequence_end - begin, CHUNK)
            if pooled:
                if valid > 0:
                    live = state_indices[low] > null_slot

            # Serial loops: they rarely run, and unrolled they cost the others registers.
            used = T.cast(cu_seqlens[num_cu_seqlens - 1], "int32")
            if slot * CHUNK + CHUNK > used:
                steps.zero_rows(out, T.max(used, slot * CHUNK), T.min(slot * CHUNK + CHUNK, num_tokens), head)
            if pooled:
                if valid > 0 and not live:
                    steps.zero_rows(out, begin, begin + valid, head)

            # A loop of at most one iteration: in an `if` the compiler would split the body at every barrier.
            for _ in T.serial(T.if_then_else(valid > 0 and live, 1, 0)):
                load(tensors, begin, head, shared, loaded)
                if tx < 32:
                    steps.make_gates(tensors, begin, valid, head, shared, registers)
                T.barrier_wait(loaded, 0)
                if valid < CHUNK:
                    steps.zero_rows_past_end(shared, valid)
                T.sync_threads()
                steps.multiply(shared, registers)
                steps.make_factors(shared, registers, scale)
                steps.make_query(shared, registers)
                steps.invert(shared, registers)
                steps.make_x(shared, registers)
                T.wgmma_gemm(shared.query, shared.x, registers.qk, clear_accum=True)
                T.wgmma_gemm(shared.x, shared.k, registers.z, transpose_A=True, clear_accum=True)
                total = shared.sums[CHUNK - 1]
                for i in T.Parallel(CHUNK):
                    registers.row_factor[i] = shared.sums[i]
                steps.make_tiles(shared, registers, total)
                steps.store(tensors, slot, head, shared, total)

    return chunk_prepare
