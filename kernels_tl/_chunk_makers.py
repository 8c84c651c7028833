"""The roles of the one-launch chunk kernel that make tiles: what of a chunk does not depend on the state.

A block makes the tiles of the chunks of its parity, for both blocks of its cluster. The maths stands in _chunk_prepare; here it
is split between two warpgroups, so that two chunks are on their way at a time:

    inverse   K K^T, |k|^-1, L, X = |k|^-1 (I + L)^-1 as 16-bit summands
    product   Q K^T, |q|^-1, then with X: R, Z and the row factors, into the block's own half of the ring

`turn` counts the chunks that a block makes. The barriers stand in _chunk_fused.
"""

from typing import Any

import tilelang.language as T

from gdn.problems import ChunkProblem
from kernels_tl._chunk_prepare import BLOCK, HALF_SCALE, LOG2_E, LOWEST_LOG_DECAY, NORM_EPS, SOFTPLUS_THRESHOLD
from kernels_tl._chunk_types import CHUNK, HALF, ROW_LAST, ROW_STATE_KEY, ROW_STATE_QUERY, TILE_R, TILE_Z, TILE_Z_HIGH

KEY_BUFFERS = 3  # of K for the makers: one each for inverse and product, one on its way
WARPGROUP = 128
INVERSE_SYNC = 5  # named barriers
PRODUCT_SYNC = 6


def gate_role(problem: ChunkProblem) -> Any:
    """A macro for one warp: cumulative log2 decays and beta of the chunks that the block makes."""
    has_gate, has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
    raw_gate = has_gate and problem.use_gate
    raw_beta = has_beta and problem.use_beta_sigmoid

    @T.macro
    def gates(
        lane, turns, rank, sequence_begin, length, head, g, beta, a_log, dt_bias, sum_shared, beta_shared, gates_full, gates_free
    ):
        decays = T.alloc_local((2,), "float32")
        strengths = T.alloc_local((2,), "float32")
        log_decay = T.alloc_var("float32", init=0.0)
        gate_input = T.alloc_var("float32", init=0.0)
        strength = T.alloc_var("float32", init=0.0)
        running = T.alloc_var("float32", init=0.0)
        for turn in T.serial(turns):
            step = 2 * turn + rank
            begin = sequence_begin + step * CHUNK
            valid = T.min(length - step * CHUNK, CHUNK)
            # Two tokens a lane; all loads first, of some token where there is none: their latencies do not add up.
            for half in T.unroll(2):
                token = T.cast(begin + T.min(2 * lane + half, valid - 1), "int64")
                if has_gate:
                    decays[half] = T.cast(g[token, head], "float32")
                if has_beta:
                    strengths[half] = T.cast(beta[token, head], "float32")
            for half in T.unroll(2):
                log_decay = 0.0
                strength = 0.0
                if 2 * lane + half < valid:
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
                strengths[half] = strength
                decays[half] = log_decay
            running = decays[0] + decays[1]
            for level in T.unroll(5):
                gate_input = T.shfl_up(running, 1 << level)
                if lane >= (1 << level):
                    running = running + gate_input
            T.barrier_wait(gates_free[turn % 2], ((turn // 2) & 1) ^ 1)
            for half in T.unroll(2):
                beta_shared[turn % 2, 2 * lane + half] = strengths[half]
            sum_shared[turn % 2, 2 * lane] = (running - decays[1]) * LOG2_E
            sum_shared[turn % 2, 2 * lane + 1] = running * LOG2_E
            T.barrier_arrive(gates_full[turn % 2])

    return gates


def inverse_role(problem: ChunkProblem, parts: int) -> Any:
    """A macro for one warpgroup: X and its rest."""
    dtype, normalize = problem.dtype, problem.use_qk_l2norm
    # With normalised keys L is at most beta: float16 holds it, with three bits more than bfloat16.
    inverse_dtype = "float16" if normalize else dtype
    x_scale = HALF_SCALE if normalize and dtype == "float16" else 1.0

    @T.macro
    def inverse(
        thread,
        turns,
        rank,
        length,
        k_shared,
        k_high_shared,
        below_shared,
        inverse_shared,
        x_shared,
        rest_shared,
        diagonal_shared,
        beta_shared,
        k_factor_shared,
        k_full,
        gates_full,
        x_full,
        x_free,
    ):
        kk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        row_factor = T.alloc_fragment((CHUNK,), "float32")
        column_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        inverse_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product_operand = T.alloc_fragment((CHUNK, CHUNK), inverse_dtype)
        below_fragment = T.alloc_fragment((CHUNK, CHUNK), inverse_dtype)
        column = T.alloc_local((BLOCK,), "float32")
        for turn in T.serial(turns):
            buffer = turn % KEY_BUFFERS
            half = turn % 2
            valid = T.min(length - (2 * turn + rank) * CHUNK, CHUNK)
            T.barrier_wait(k_full[buffer], (turn // KEY_BUFFERS) & 1)
            if valid < CHUNK:
                # The next sequence's keys, NaN perhaps, would reach Z.
                for i, j in T.Parallel(CHUNK, HALF):
                    if i >= valid:
                        k_shared[buffer, i, j] = 0
                        k_high_shared[buffer, i, j] = 0
                T.fence_proxy_async()
                T.sync_threads(INVERSE_SYNC, WARPGROUP)
            T.wgmma_gemm(k_shared[buffer, :, :], k_shared[buffer, :, :], kk_fragment, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(k_high_shared[buffer, :, :], k_high_shared[buffer, :, :], kk_fragment, transpose_B=True)
            T.barrier_wait(gates_full[half], (turn // 2) & 1)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(kk_fragment, num_regs=32)
            if normalize:
                # The sums alone: the roots of all 32 elements that a thread holds would be 31 too many.
                for i, j in T.Parallel(CHUNK, CHUNK):
                    if i == j:
                        k_factor_shared[half, i] = kk_fragment[i, j]
                T.sync_threads(INVERSE_SYNC, WARPGROUP)
                if thread < CHUNK:
                    k_factor_shared[half, thread] = T.rsqrt(k_factor_shared[half, thread] + NORM_EPS)
            else:
                if thread < CHUNK:
                    k_factor_shared[half, thread] = 1.0
            T.barrier_wait(x_free, (turn & 1) ^ 1)
            T.clear(inverse_shared)
            T.sync_threads(INVERSE_SYNC, WARPGROUP)

            # L goes apart: its diagonal blocks, transposed, for the substitution, and what lies below them; both negated.
            for i in T.Parallel(CHUNK):
                row_factor[i] = -k_factor_shared[half, i] * beta_shared[half, i]
            for i, j in T.Parallel(CHUNK, CHUNK):
                column_fragment[i, j] = k_factor_shared[half, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                kk_fragment[i, j] *= row_factor[i] * column_fragment[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i // BLOCK == j // BLOCK:
                    diagonal_shared[j, i % BLOCK] = kk_fragment[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                below_fragment[i, j] = T.Select(i // BLOCK > j // BLOCK, kk_fragment[i, j], 0.0)
            T.copy(below_fragment, below_shared)
            T.sync_threads(INVERSE_SYNC, WARPGROUP)
            if thread < CHUNK:
                for i in T.unroll(BLOCK):
                    column[i] = T.if_then_else(thread % BLOCK == i, 1.0, 0.0)
                for pivot in T.unroll(BLOCK - 1):
                    for i in T.unroll(BLOCK):
                        if i > pivot:
                            column[i] = column[i] + diagonal_shared[thread // BLOCK * BLOCK + pivot, i] * column[pivot]
            T.sync_threads(INVERSE_SYNC, WARPGROUP)
            if thread < CHUNK:
                for i in T.unroll(BLOCK):
                    diagonal_shared[thread // BLOCK * BLOCK + i, thread % BLOCK] = column[i]
                    inverse_shared[thread // BLOCK * BLOCK + i, thread] = column[i]
            T.fence_proxy_async()
            T.sync_threads(INVERSE_SYNC, WARPGROUP)

            # X = (I + L)^-1 by blocks of rows: X <- B + (-B L_below) X from X = B, the inverse of the diagonal blocks.
            T.wgmma_gemm(inverse_shared, below_shared, product_fragment, clear_accum=True)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(product_fragment, num_regs=32)
            T.copy(product_fragment, product_operand)
            for round in T.unroll(CHUNK // BLOCK - 1):
                for i, j in T.Parallel(CHUNK, CHUNK):
                    inverse_fragment[i, j] = 0.0
                    if i // BLOCK == j // BLOCK:
                        inverse_fragment[i, j] = diagonal_shared[i, j % BLOCK]
                T.wgmma_gemm(product_operand, inverse_shared, inverse_fragment)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(inverse_fragment, num_regs=32)
                T.sync_threads(INVERSE_SYNC, WARPGROUP)  # every warp is done with what X takes the place of
                if round < CHUNK // BLOCK - 2:
                    T.copy(inverse_fragment, inverse_shared)
                    T.fence_proxy_async()
                    T.sync_threads(INVERSE_SYNC, WARPGROUP)

            for i in T.Parallel(CHUNK):
                row_factor[i] = k_factor_shared[half, i] * x_scale
            for i, j in T.Parallel(CHUNK, CHUNK):
                inverse_fragment[i, j] *= row_factor[i]
            T.copy(inverse_fragment, x_shared)
            if parts == 2:
                for i, j in T.Parallel(CHUNK, CHUNK):
                    inverse_fragment[i, j] -= T.cast(T.cast(inverse_fragment[i, j], dtype), "float32")
                T.copy(inverse_fragment, rest_shared)
            T.fence_proxy_async()
            T.barrier_arrive(x_full)

    return inverse


def product_role(problem: ChunkProblem, parts: int) -> Any:
    """A macro for one warpgroup: R, Z and the row factors, from X."""
    dtype, normalize = problem.dtype, problem.use_qk_l2norm
    x_scale = HALF_SCALE if normalize and dtype == "float16" else 1.0

    @T.macro
    def product(
        thread,
        turns,
        rank,
        scale,
        k_shared,
        k_high_shared,
        q_shared,
        q_high_shared,
        x_shared,
        rest_shared,
        sum_shared,
        beta_shared,
        k_factor_shared,
        q_factor_shared,
        ring,
        vector_ring,
        k_full,
        k_empty,
        q_full,
        q_empty,
        gates_full,
        gates_free,
        x_full,
        x_free,
        taken,
        made,
    ):
        qk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        qq_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        query_operand = T.alloc_fragment((CHUNK, CHUNK), dtype)
        z_fragment = T.alloc_fragment((CHUNK, HALF), "float32")
        z_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        z_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        r_fragment = T.alloc_fragment((CHUNK, CHUNK), dtype)
        row_factor = T.alloc_fragment((CHUNK,), "float32")
        column_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        decay_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        # Compared with columns that are the same for all comparisons, which else took 32 registers each.
        row_index = T.alloc_fragment((CHUNK,), "int32")
        for i in T.Parallel(CHUNK):
            row_index[i] = i
        for turn in T.serial(turns):
            buffer = turn % KEY_BUFFERS
            half = turn % 2
            T.barrier_wait(k_full[buffer], (turn // KEY_BUFFERS) & 1)
            T.barrier_wait(q_full[0], turn & 1)
            # Rows of Q and K past the end may be anything: they reach rows of R of tokens past the end, or nothing.
            if normalize:
                T.wgmma_gemm(q_shared[0, :, :], q_shared[0, :, :], qq_fragment, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(q_high_shared[0, :, :], q_high_shared[0, :, :], qq_fragment, transpose_B=True)
            T.wgmma_gemm(q_shared[0, :, :], k_shared[buffer, :, :], qk_fragment, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(q_high_shared[0, :, :], k_high_shared[buffer, :, :], qk_fragment, transpose_B=True)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
            if normalize:
                T.warpgroup_fence_operand(qq_fragment, num_regs=32)
            if thread % 32 == 0:
                T.barrier_arrive(q_empty)
            if normalize:
                for i, j in T.Parallel(CHUNK, CHUNK):
                    if row_index[i] == j:
                        q_factor_shared[half, i] = qq_fragment[i, j]
                T.sync_threads(PRODUCT_SYNC, WARPGROUP)
                if thread < CHUNK:
                    q_factor_shared[half, thread] = T.rsqrt(q_factor_shared[half, thread] + NORM_EPS) * scale
            else:
                if thread < CHUNK:
                    q_factor_shared[half, thread] = scale
            T.sync_threads(PRODUCT_SYNC, WARPGROUP)
            for i in T.Parallel(CHUNK):
                row_factor[i] = q_factor_shared[half, i]
            for i, j in T.Parallel(CHUNK, CHUNK):
                qk_fragment[i, j] *= row_factor[i]
            for i, j in T.Parallel(CHUNK, CHUNK):
                query_operand[i, j] = T.Select(row_index[i] >= j, qk_fragment[i, j], 0.0)
            T.barrier_wait(gates_full[half], (turn // 2) & 1)
            total = sum_shared[half, CHUNK - 1]
            for i in T.Parallel(CHUNK):
                row_factor[i] = sum_shared[half, i]
            # While X is made: all that R is multiplied with. X is to be free again soon after.
            for i, j in T.Parallel(CHUNK, CHUNK):
                decay_fragment[i, j] = sum_shared[half, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                decay_fragment[i, j] = T.exp2(row_factor[i] - decay_fragment[i, j])
            for i, j in T.Parallel(CHUNK, CHUNK):
                column_fragment[i, j] = beta_shared[half, j] * (1.0 / x_scale)
            for i, j in T.Parallel(CHUNK, CHUNK):
                decay_fragment[i, j] = T.Select(row_index[i] >= j, decay_fragment[i, j] * column_fragment[i, j], 0.0)

            T.barrier_wait(x_full, turn & 1)
            T.wgmma_gemm(query_operand, x_shared, qk_fragment, clear_accum=True)
            if parts == 2:
                T.wgmma_gemm(query_operand, rest_shared, qk_fragment)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
            for i, j in T.Parallel(CHUNK, CHUNK):
                r_fragment[i, j] = qk_fragment[i, j] * decay_fragment[i, j]
            T.wgmma_gemm(x_shared, k_shared[buffer, :, :], z_fragment, transpose_A=True, clear_accum=True)
            if parts == 2:
                T.wgmma_gemm(rest_shared, k_shared[buffer, :, :], z_fragment, transpose_A=True)
            T.wgmma_gemm(x_shared, k_high_shared[buffer, :, :], qk_fragment, transpose_A=True, clear_accum=True)
            if parts == 2:
                T.wgmma_gemm(rest_shared, k_high_shared[buffer, :, :], qk_fragment, transpose_A=True)
            T.barrier_wait(taken[rank], (turn & 1) ^ 1)
            for i, j in T.Parallel(CHUNK, CHUNK):
                ring[rank, TILE_R, i, j] = r_fragment[i, j]
            for i in T.Parallel(CHUNK):
                row_factor[i] = T.exp2(total - row_factor[i]) * (beta_shared[half, i] * (1.0 / x_scale))
            if thread < CHUNK:
                vector_ring[rank, ROW_STATE_KEY, thread] = T.exp2(sum_shared[half, thread]) * k_factor_shared[half, thread]
                vector_ring[rank, ROW_STATE_QUERY, thread] = T.exp2(sum_shared[half, thread]) * q_factor_shared[half, thread]
                vector_ring[rank, ROW_LAST, thread] = T.exp2(total)
            T.wait_wgmma(parts)
            T.warpgroup_fence_operand(z_fragment, num_regs=32)
            for i, j in T.Parallel(CHUNK, HALF):
                z_operand[i, j] = z_fragment[i, j] * row_factor[i]
            for i, j in T.Parallel(CHUNK, HALF):
                ring[rank, TILE_Z, i, j] = z_operand[i, j]
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
            T.sync_warp()
            if thread % 32 == 0:
                T.barrier_arrive(x_free)
                T.barrier_arrive(k_empty[buffer])
                T.barrier_arrive(gates_free[half])
            for i, j in T.Parallel(CHUNK, HALF):
                z_high_operand[i, j] = qk_fragment[i, j] * row_factor[i]
            for i, j in T.Parallel(CHUNK, HALF):
                ring[rank, TILE_Z_HIGH, i, j] = z_high_operand[i, j]
            T.fence_proxy_async()
            T.barrier_arrive(made)

    return product
