"""First launch of the chunk kernel: everything of a chunk that does not depend on the state.

One block per (chunk slot, state head). With c the inclusive cumulative sum of the log decays g of the chunk, and
K^ = |k|^-1 K, Q^ = |q|^-1 Q where norms are asked for (folded in as factors; K and Q themselves stay as they are):

    A = (I + strict_lower(beta_i K^_i . K^_j))^-1                   16 x 16 diagonal blocks by forward substitution in float32,
                                                                    the rest by matmuls of 16-bit operands, block row by block row
    X = |k_i|^-1 A_ij |k_j|                                         16-bit
    Z = beta_i |k_i|^-1 exp(c_last - c_i) (X^T K)_ij                16-bit, [64, K]
    R = exp(c_i - c_j) beta_j |k_j|^-1 (lower(scale |q_i|^-1 Q K^T) X)_ij    16-bit, [64, 64]
    vectors                                                         float32, see _chunk_types

With M = A_ij exp(c_i - c_j) beta_j the chunk's new values are M W, Z is (diag(exp(c_last - c)) M)^T K^ and R is P M for
P = lower(scale exp(c_i - c_j) Q^ K^^T): in both products the exponentials under the sum cancel to what stands before it.

X's diagonal is 1, which 16 bits hold: only what lies below it is rounded. float16 has no room for |k_j| / |k_i|: there X is
|k_i|^-1 A_ij times HALF_SCALE, and Z and R have beta over HALF_SCALE in the place of beta |k|^-1.

Tokens past the sequence's end have zero rows in K and Q, g = 0 and beta = 0: their rows of Z and R and their columns of R are
zero, and c_last is the sum over the sequence's own tokens. The block also zeroes output rows nobody else writes: those of its
chunk if the sequence is padding, and those of tokens `64 * slot ...` that lie at or beyond cu_seqlens[N].
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
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
    bounds_tensor,
    gate_tensor,
    row_tensor,
    tiles_tensor,
    token_tensor,
    turn,
)

PREPARE_THREADS = 128
NORM_EPS = 1e-6
LOG2_E = 1.4426950408889634
SOFTPLUS_THRESHOLD = 20.0
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0
BLOCK = 16  # rows of a diagonal block of I + L, inverted by forward substitution in float32
# float16 with normalised keys: X times this, so that norms up to 1e4 keep its digits and zero norms (|k|^-1 = 1e3) its range.
HALF_SCALE = 32.0
SHORT = {"float16": "fp16", "bfloat16": "bf16"}  # as products of single warps name them
DIAGONAL_PITCH = 20  # floats: 16-byte rows whose starts fall into different banks


def scales_of(problem: ChunkProblem) -> tuple[bool, float]:
    """Whether X has |k_j| at its columns, so that its diagonal is 1, and the number that it is multiplied with."""
    if not problem.use_qk_l2norm:
        return False, 1.0
    return (True, 1.0) if problem.dtype == "bfloat16" else (False, HALF_SCALE)


def right_operands() -> Any:
    """The layout of [64, 64] whose rows, 8 of a warp at a time, are right operands of m16n8k16.

    The same registers as of a left operand, in another order: transposing 8 rows moves nothing.
    """

    def thread(row: Any, column: Any) -> Any:
        return row // 16 * 32 + row % 8 * 4 + column % 8 // 2

    def register(row: Any, column: Any) -> Any:
        return column // 16 * 8 + row % 16 // 8 * 4 + column % 16 // 8 * 2 + column % 2

    return T.Fragment([CHUNK, HALF], forward_thread_fn=thread, forward_index_fn=register)


def square_rows(dtype: str) -> Any:
    """A macro: sums [2][16, 8] += what each warp's 16 rows [16, 64] make with the upper and with the lower 8 of them.

    Norms are what the diagonals of the two blocks of 8 rows hold; of each product one half is of other rows, and nobody's.
    """

    @T.macro
    def square(sums, left, right):
        for step in T.unroll(HALF // 16):
            for n in T.unroll(2):
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", SHORT[dtype], SHORT[dtype], "fp32",
                    left.data, 8 * step, right.data, 8 * step + 4 * n, sums.data, 4 * n, T.bool(False),
                )  # fmt: skip

    return square


def prepare(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_prepare`.

    decides: works only where a sequence has more than `cut_above` tokens, which else is not read.
    """
    head_k, head_v, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    heads_per_q = heads // problem.num_q_heads
    heads_per_k = heads // problem.num_k_heads
    dtype = problem.dtype
    has_gate, has_beta, pooled = problem.gate_dtype is not None, problem.beta_dtype is not None, problem.pooled
    raw_gate = has_gate and problem.use_gate
    raw_beta = has_beta and problem.use_beta_sigmoid
    normalize = problem.use_qk_l2norm
    wide = head_k > HALF
    # With normalised keys L is at most beta: float16 holds it, with three bits more than bfloat16.
    inverse_dtype = "float16" if normalize else dtype
    unit, x_scale = scales_of(problem)

    num_tokens, bounds, slots = T.dynamic("num_tokens"), T.dynamic("num_bounds"), T.dynamic("num_slots")
    q_type = token_tensor("q", num_tokens, problem.num_q_heads, head_k, dtype)
    k_type = token_tensor("k", num_tokens, problem.num_k_heads, head_k, dtype)
    g_type = gate_tensor("g", num_tokens, bounds, problem, problem.gate_dtype)
    beta_type = gate_tensor("beta", num_tokens, bounds, problem, problem.beta_dtype)
    a_log_type = T.Tensor((heads,), "float32") if raw_gate else bounds_tensor(bounds, problem)
    dt_bias_type = T.Tensor((heads,), "float32") if raw_gate else bounds_tensor(bounds, problem)
    index_type = row_tensor("indices", bounds, problem, problem.index_dtype)
    bounds_type = bounds_tensor(bounds, problem)
    out_type = token_tensor("out", num_tokens, heads, head_v, dtype)

    take_turn = turn(decides, cuts=True)
    square = square_rows(dtype)

    @T.macro
    def zero_rows(out, row_begin, row_end, head):
        tx = T.get_thread_binding()
        for row in T.serial(T.max(row_end - row_begin, 0)):
            if tx < head_v:
                out[T.cast(row_begin + row, "int64"), head, tx] = 0

    @T.prim_func
    def chunk_prepare(
        q: q_type,
        k: k_type,
        g: g_type,
        beta: beta_type,
        a_log: a_log_type,
        dt_bias: dt_bias_type,
        indices: index_type,
        cu_seqlens: bounds_type,
        out: out_type,
        tiles: tiles_tensor(slots, problem),
        vectors: T.Tensor((slots, heads, NUM_VECTORS, CHUNK), "float32"),
        scale: T.float32,
        null_slot: T.int32,
        cut_above: T.int32,
    ):
        with T.Kernel(slots, heads, threads=PREPARE_THREADS) as (slot, head):
            # K and Q as halves of 64 columns. X takes the place of what it is made of, Z that of X and of L, R that of Q.
            T.annotate_min_blocks_per_sm(4)  # as many as shared memory holds
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
            beta_shared = T.alloc_shared((CHUNK,), "float32")  # then the factors of Z and R
            k_norm_shared = T.alloc_shared((CHUNK,), "float32")
            k_factor_shared = T.alloc_shared((CHUNK,), "float32")
            q_factor_shared = T.alloc_shared((CHUNK,), "float32")
            loaded = T.alloc_barrier(PREPARE_THREADS)
            kk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
            qk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
            q_operand = T.alloc_fragment((CHUNK, HALF), dtype)
            q_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
            q_right = T.alloc_fragment((CHUNK, HALF), dtype)  # the same registers as right operands of a warp
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
            low = T.alloc_var("int32", init=0)
            high = T.alloc_var("int32", init=0)
            log_decay = T.alloc_var("float32", init=0.0)
            gate_input = T.alloc_var("float32", init=0.0)
            strength = T.alloc_var("float32", init=0.0)
            running = T.alloc_var("float32", init=0.0)
            live = T.alloc_var("bool", init=True)
            decays = T.alloc_local((2,), "float32")
            strengths = T.alloc_local((2,), "float32")
            tx = T.get_thread_binding()
            T.annotate_layout({q_shared: make_swizzled_layout(q_shared), q_high_shared: make_swizzled_layout(q_high_shared)})

            take_turn(cu_seqlens, bounds, cut_above)
            # The sequence of this slot: the last n with cu_seqlens[n] // 64 + n <= slot.
            high = T.max(bounds - 2, 0)
            while low < high:
                middle = (low + high + 1) // 2
                if T.cast(cu_seqlens[middle], "int32") // CHUNK + middle <= slot:
                    low = middle
                else:
                    high = middle - 1
            sequence_begin = T.cast(cu_seqlens[low], "int32")
            sequence_end = T.cast(cu_seqlens[T.min(low + 1, bounds - 1)], "int32")
            begin = sequence_begin + (slot - sequence_begin // CHUNK - low) * CHUNK
            valid = T.min(sequence_end - begin, CHUNK)
            if pooled:
                if valid > 0:
                    live = indices[low] > null_slot

            # Loops in series: rare, and unrolled they cost the others registers.
            used = T.cast(cu_seqlens[bounds - 1], "int32")
            if slot * CHUNK + CHUNK > used:
                zero_rows(out, T.max(used, slot * CHUNK), T.min(slot * CHUNK + CHUNK, num_tokens), head)
            if pooled:
                if valid > 0 and not live:
                    zero_rows(out, begin, begin + valid, head)

            # A loop of at most one round: inside a plain condition the compiler would split the body at every barrier.
            for _ in T.serial(T.if_then_else(valid > 0 and live, 1, 0)):
                T.tma_copy(k[begin : begin + CHUNK, head // heads_per_k, 0:HALF], k_shared, barrier=loaded)
                T.tma_copy(q[begin : begin + CHUNK, head // heads_per_q, 0:HALF], q_shared, barrier=loaded)
                if wide:
                    T.tma_copy(k[begin : begin + CHUNK, head // heads_per_k, HALF:head_k], k_high_shared, barrier=loaded)
                    T.tma_copy(q[begin : begin + CHUNK, head // heads_per_q, HALF:head_k], q_high_shared, barrier=loaded)
                T.barrier_arrive(loaded)

                if tx < 32:  # two tokens a lane: the cumulative sum needs no barrier
                    # All loads first, of some token where there is none: their latencies do not add up.
                    for half in T.unroll(2):
                        token = T.cast(begin + T.min(2 * tx + half, valid - 1), "int64")
                        if has_gate:
                            decays[half] = T.cast(g[token, head], "float32")
                        if has_beta:
                            strengths[half] = T.cast(beta[token, head], "float32")
                    for half in T.unroll(2):
                        row = 2 * tx + half
                        log_decay = 0.0
                        strength = 0.0
                        if row < valid:
                            if has_gate:
                                gate_input = decays[half]
                                if raw_gate:
                                    gate_input = gate_input + dt_bias[head]
                                    if gate_input <= SOFTPLUS_THRESHOLD:
                                        gate_input = T.log1p(T.exp(gate_input))
                                    log_decay = -T.exp(a_log[head]) * gate_input
                                else:
                                    log_decay = gate_input
                                if log_decay < LOWEST_LOG_DECAY:
                                    log_decay = LOWEST_LOG_DECAY
                            strength = 1.0
                            if has_beta:
                                strength = strengths[half]
                                if raw_beta:
                                    strength = 1.0 / (1.0 + T.exp(-strength))
                        beta_shared[row] = strength
                        decays[half] = log_decay
                    running = decays[0] + decays[1]
                    for level in T.unroll(5):
                        gate_input = T.shfl_up(running, 1 << level)
                        if tx >= (1 << level):
                            running = running + gate_input
                    sum_shared[2 * tx] = (running - decays[1]) * LOG2_E
                    sum_shared[2 * tx + 1] = running * LOG2_E

                T.barrier_wait(loaded, 0)
                if valid < CHUNK:
                    for i, j in T.Parallel(CHUNK, HALF):
                        if i >= valid:
                            k_shared[i, j] = 0
                            q_shared[i, j] = 0
                            if wide:
                                k_high_shared[i, j] = 0
                                q_high_shared[i, j] = 0
                    T.fence_proxy_async()
                T.sync_threads()

                T.wgmma_gemm(k_shared, k_shared, kk_fragment, transpose_B=True, clear_accum=True)
                if wide:
                    T.wgmma_gemm(k_high_shared, k_high_shared, kk_fragment, transpose_B=True)
                # Q once from shared memory, for both its products.
                T.copy(q_shared, q_operand)
                if wide:
                    T.copy(q_high_shared, q_high_operand)
                T.wgmma_gemm(q_operand, k_shared, qk_fragment, transpose_B=True, clear_accum=True)
                if wide:
                    T.wgmma_gemm(q_high_operand, k_high_shared, qk_fragment, transpose_B=True)
                if normalize:
                    T.clear(sums)
                    for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                        q_right[i, j] = q_operand[i, j]
                    square(sums, q_operand, q_right)
                    if wide:
                        for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                            q_high_right[i, j] = q_high_operand[i, j]
                        square(sums, q_high_operand, q_high_right)
                    # Row lane // 4 of each block: of its four lanes one holds the diagonal.
                    norms[0] = T.Select(tx // 4 % 2 == 0, sums[0], sums[1])
                    norms[1] = T.Select(tx // 4 % 2 == 0, sums[6], sums[7])
                    for side in T.unroll(2):
                        norms[side] = T.rsqrt(T.shfl_sync(norms[side], tx % 32 // 4 * 4 + tx % 32 // 8) + NORM_EPS) * scale
                    for side in T.unroll(2):
                        q_factor_shared[tx // 32 * 16 + tx % 32 // 4 + 8 * side] = norms[side]
                else:
                    for i in T.Parallel(CHUNK):
                        k_factor_shared[i] = 1.0
                        q_factor_shared[i] = scale
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(kk_fragment, num_regs=32)
                T.warpgroup_fence_operand(qk_fragment, num_regs=32)
                if normalize:
                    # The sums alone: the roots of all 32 elements that a thread holds would be 31 too many.
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        if i == j:
                            k_factor_shared[i] = kk_fragment[i, j]
                    T.sync_threads()
                    if tx < CHUNK:
                        running = k_factor_shared[tx] + NORM_EPS
                        log_decay = T.rsqrt(running)
                        k_factor_shared[tx] = log_decay
                        if unit:
                            k_norm_shared[tx] = running * log_decay
                            beta_shared[tx] *= log_decay
                        else:
                            beta_shared[tx] *= 1.0 / x_scale
                T.sync_threads()
                T.copy(q_factor_shared, row_factor)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    qk_fragment[i, j] *= row_factor[i]
                for i, j in T.Parallel(CHUNK, CHUNK):
                    query_operand[i, j] = T.Select(i >= j, qk_fragment[i, j], 0.0)
                # In the place of a half of Q: its registers are needed. The barriers before its product are plenty.
                T.copy(query_operand, query_shared)

                # L goes apart: its diagonal blocks, transposed, for the substitution, and what lies below them; both negated.
                T.clear(inverse_shared)
                for i in T.Parallel(CHUNK):
                    if unit:
                        row_factor[i] = -beta_shared[i]
                    else:
                        row_factor[i] = -k_factor_shared[i] * (beta_shared[i] * x_scale)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    column_fragment[i, j] = k_factor_shared[j]
                for i, j in T.Parallel(CHUNK, CHUNK):
                    kk_fragment[i, j] *= row_factor[i] * column_fragment[i, j]
                for i, j in T.Parallel(CHUNK, CHUNK):
                    if i // BLOCK == j // BLOCK:
                        diagonal_shared[j, i % BLOCK] = kk_fragment[i, j]
                for i, j in T.Parallel(CHUNK, CHUNK):
                    below_fragment[i, j] = T.Select(i // BLOCK > j // BLOCK, kk_fragment[i, j], 0.0)
                T.copy(below_fragment, below_shared)
                T.sync_threads()
                if tx < CHUNK:
                    for i in T.unroll(BLOCK):
                        column[i] = T.if_then_else(tx % BLOCK == i, 1.0, 0.0)
                    for pivot in T.unroll(BLOCK - 1):
                        for i in T.unroll(BLOCK):
                            if i > pivot:
                                column[i] = column[i] + diagonal_shared[tx // BLOCK * BLOCK + pivot, i] * column[pivot]
                T.sync_threads()
                if tx < CHUNK:
                    for i in T.unroll(BLOCK):
                        diagonal_shared[tx // BLOCK * BLOCK + i, tx % BLOCK] = column[i]
                        inverse_shared[tx // BLOCK * BLOCK + i, tx] = column[i]
                T.fence_proxy_async()
                T.sync_threads()

                # X = (I + L)^-1 by blocks of rows: X <- B + (-B L_below) X from X = B, the inverse of the diagonal blocks.
                T.wgmma_gemm(inverse_shared, below_shared, product_fragment, clear_accum=True)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(product_fragment, num_regs=32)
                T.copy(product_fragment, product_operand)
                for turn in T.unroll(CHUNK // BLOCK - 1):
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        inverse_fragment[i, j] = 0.0
                        if i // BLOCK == j // BLOCK:
                            inverse_fragment[i, j] = diagonal_shared[i, j % BLOCK]
                    T.wgmma_gemm(product_operand, inverse_shared, inverse_fragment)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(inverse_fragment, num_regs=32)
                    if turn < CHUNK // BLOCK - 2:
                        T.sync_threads()
                        T.copy(inverse_fragment, inverse_shared)
                        T.fence_proxy_async()
                        T.sync_threads()

                T.sync_threads()  # every warp is done with what X is made of
                for i in T.Parallel(CHUNK):
                    row_factor[i] = k_factor_shared[i] * x_scale
                for i, j in T.Parallel(CHUNK, CHUNK):
                    inverse_fragment[i, j] *= row_factor[i]
                if unit:
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        column_fragment[i, j] = k_norm_shared[j]
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        inverse_fragment[i, j] *= column_fragment[i, j]
                T.copy(inverse_fragment, x_shared)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(query_shared, x_shared, qk_fragment, clear_accum=True)
                T.wgmma_gemm(x_shared, k_shared, z_fragment, transpose_A=True, clear_accum=True)
                total = sum_shared[CHUNK - 1]
                for i in T.Parallel(CHUNK):
                    row_factor[i] = sum_shared[i]
                T.wait_wgmma(1)
                T.warpgroup_fence_operand(qk_fragment, num_regs=32)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    column_fragment[i, j] = sum_shared[j]
                for i, j in T.Parallel(CHUNK, CHUNK):
                    qk_fragment[i, j] *= T.exp2(row_factor[i] - column_fragment[i, j])
                for i, j in T.Parallel(CHUNK, CHUNK):
                    column_fragment[i, j] = beta_shared[j]
                for i, j in T.Parallel(CHUNK, CHUNK):
                    r_fragment[i, j] = T.Select(i >= j, qk_fragment[i, j] * column_fragment[i, j], 0.0)
                T.copy(r_fragment, q_shared)
                if wide:
                    T.wgmma_gemm(x_shared, k_high_shared, qk_fragment, transpose_A=True, clear_accum=True)
                for i in T.Parallel(CHUNK):
                    row_factor[i] = T.exp2(total - row_factor[i]) * beta_shared[i]
                T.wait_wgmma(1 if wide else 0)
                T.warpgroup_fence_operand(z_fragment, num_regs=32)
                for i, j in T.Parallel(CHUNK, HALF):
                    z_operand[i, j] = z_fragment[i, j] * row_factor[i]
                T.wait_wgmma(0)
                if wide:
                    T.warpgroup_fence_operand(qk_fragment, num_regs=32)
                    for i, j in T.Parallel(CHUNK, HALF):
                        z_high_operand[i, j] = qk_fragment[i, j] * row_factor[i]
                T.sync_threads()  # every warp is done with X
                T.copy(z_operand, x_shared)
                if wide:
                    T.copy(z_high_operand, z_high_shared)
                T.fence_proxy_async()
                T.sync_threads()
                if tx < 32:
                    T.tma_copy(q_shared, tiles[slot, head, TILE_R, :, :], leader_scope_threads=32)
                    T.tma_copy(x_shared, tiles[slot, head, TILE_Z, :, :], leader_scope_threads=32)
                    if wide:
                        T.tma_copy(z_high_shared, tiles[slot, head, TILE_Z_HIGH, :, :], leader_scope_threads=32)

                if tx < CHUNK:
                    vectors[slot, head, ROW_STATE_KEY, tx] = T.exp2(sum_shared[tx]) * k_factor_shared[tx]
                    vectors[slot, head, ROW_STATE_QUERY, tx] = T.exp2(sum_shared[tx]) * q_factor_shared[tx]
                    vectors[slot, head, ROW_LAST, tx] = T.exp2(total)
                T.tma_store_wait(0)

    return chunk_prepare
