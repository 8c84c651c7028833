"""The chunk kernel in one launch: a block runs the chain of a sequence, a state head and 64 V columns, and makes its tiles itself.

| warpgroup | role |
|---|---|
| 0 | the chain, as in _chunk_chain: S^T in registers |
| 1, 2 | tiles of the even and of the odd chunks, as in _chunk_prepare: M, P, the row factors; up to two chunks ahead |
| 3 | warp 0: copies of K, Q, V; warp 1: copies of the output; warps 2, 3: rows of the output that are padding |

| barrier | waits | arrives (count) |
|---|---|---|
| keys_full[3] | chain, tiles | copy warp (32) + bytes of K, Q |
| keys_empty[3] | copy warp | warps of the chain (4) and of the chunk's tile group (4) |
| values_full[2] | chain | copy warp (32) + bytes of V |
| values_empty[2] | copy warp | warps of the chain (4) |
| tiles_full[2] | chain | threads of the tile group (128) |
| tiles_empty[2] | tile group | warps of the chain (4) |
| out_full[2] | store warp | threads of the chain (128) |
| out_empty[2] | chain | store warp (32) |
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl._chunk_chain import ACCUMULATOR, PANEL, ROWS, transposed_accumulator
from kernels_tl._chunk_prepare import BLOCK, DIAGONAL_PITCH, LOG2_E, LOWEST_LOG_DECAY, NORM_EPS, SOFTPLUS_THRESHOLD
from kernels_tl._chunk_types import (
    CHUNK,
    HALF,
    NUM_VECTORS,
    ROW_KEY_TO_LAST,
    ROW_LAST,
    ROW_STATE_KEY,
    ROW_STATE_QUERY,
    bounds_tensor,
    gate_tensor,
    row_tensor,
    state_tensor,
    token_tensor,
)

STAGES = 3  # of K and Q: the chunk of the chain, the one whose tiles are made, the one on its way
THREADS = 512
CHAIN_REGISTERS = 216
TILE_REGISTERS = 136
COPY_REGISTERS = 24
_CHAIN, _EVEN, _ODD = 128, 256, 384  # first threads after warpgroups 0, 1, 2


def fused(problem: ChunkProblem, parts: int) -> Any:
    """The prim_func `chunk_fused`."""
    head_k, head_v, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    heads_per_q = heads // problem.num_q_heads
    heads_per_k = heads // problem.num_k_heads
    heads_per_v = heads // problem.num_v_heads
    dtype = problem.dtype
    has_gate, has_beta, pooled = problem.gate_dtype is not None, problem.beta_dtype is not None, problem.pooled
    raw_gate = has_gate and problem.use_gate
    raw_beta = has_beta and problem.use_beta_sigmoid
    normalize = problem.use_qk_l2norm
    v_first = problem.state_v_first
    has_initial, has_final, has_mask = problem.has_initial_state, problem.has_final_state, problem.has_mask
    has_final_indices = problem.has_final_indices
    wide = head_k > HALF
    halves = head_k // HALF
    slices = head_v // PANEL
    columns = PANEL
    final_dtype = problem.state_dtype if pooled else "float32"
    # With normalised keys L is at most beta: float16 holds it, with three bits more than bfloat16.
    inverse_dtype = "float16" if normalize else dtype

    num_tokens, bounds = T.dynamic("num_tokens"), T.dynamic("num_bounds")
    q_type = token_tensor("q", num_tokens, problem.num_q_heads, head_k, dtype)
    k_type = token_tensor("k", num_tokens, problem.num_k_heads, head_k, dtype)
    v_type = token_tensor("v", num_tokens, problem.num_v_heads, head_v, dtype)
    g_type = gate_tensor("g", num_tokens, bounds, problem, problem.gate_dtype)
    beta_type = gate_tensor("beta", num_tokens, bounds, problem, problem.beta_dtype)
    a_log_type = T.Tensor((heads,), "float32") if raw_gate else bounds_tensor(bounds, problem)
    dt_bias_type = T.Tensor((heads,), "float32") if raw_gate else bounds_tensor(bounds, problem)
    initial_type = state_tensor("initial", bounds, problem, problem.state_dtype if has_initial else None)
    index_type = row_tensor("indices", bounds, problem, problem.index_dtype)
    mask_type = row_tensor("mask", bounds, problem, "bool" if has_mask else None)
    final_type = state_tensor("final", bounds, problem, final_dtype if has_final else None)
    final_index_type = row_tensor("final_indices", bounds, problem, problem.index_dtype if has_final_indices else None)
    bounds_type = bounds_tensor(bounds, problem)
    out_type = token_tensor("out", num_tokens, heads, head_v, dtype)

    @T.macro
    def make_tiles(
        parity,
        barrier_id,
        thread,
        num_chunks,
        sequence_begin,
        length,
        head,
        scale,
        g,
        beta,
        a_log,
        dt_bias,
        k_shared,
        k_high_shared,
        q_shared,
        q_high_shared,
        below_shared,
        inverse_shared,
        diagonal_shared,
        sum_shared,
        beta_shared,
        k_factor_shared,
        q_factor_shared,
        m_shared,
        rest_shared,
        p_shared,
        vector_shared,
        keys_full,
        keys_empty,
        tiles_full,
        tiles_empty,
    ):
        """Every other chunk's tiles, by one warpgroup."""
        kk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        qk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        decay_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        inverse_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product_operand = T.alloc_fragment((CHUNK, CHUNK), inverse_dtype)
        below_fragment = T.alloc_fragment((CHUNK, CHUNK), inverse_dtype)
        column = T.alloc_local((BLOCK,), "float32")
        decays = T.alloc_local((2,), "float32")
        log_decay = T.alloc_var("float32", init=0.0)
        gate_input = T.alloc_var("float32", init=0.0)
        strength = T.alloc_var("float32", init=0.0)
        running = T.alloc_var("float32", init=0.0)
        for pair in T.serial((num_chunks - parity + 1) // 2):
            step = 2 * pair + parity
            stage = step % STAGES
            begin = sequence_begin + step * CHUNK
            valid = T.min(length - step * CHUNK, CHUNK)
            if thread < 32:  # two tokens a lane: the cumulative sum needs no barrier
                for half in T.unroll(2):
                    row = 2 * thread + half
                    log_decay = 0.0
                    strength = 0.0
                    if row < valid:
                        token = T.cast(begin + row, "int64")
                        if has_gate:
                            gate_input = T.cast(g[token, head], "float32")
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
                            strength = T.cast(beta[token, head], "float32")
                            if raw_beta:
                                strength = 1.0 / (1.0 + T.exp(-strength))
                    beta_shared[row] = strength
                    decays[half] = log_decay
                running = decays[0] + decays[1]
                for level in T.unroll(5):
                    gate_input = T.shfl_up(running, 1 << level)
                    if thread >= (1 << level):
                        running = running + gate_input
                sum_shared[2 * thread] = (running - decays[1]) * LOG2_E
                sum_shared[2 * thread + 1] = running * LOG2_E

            T.barrier_wait(keys_full[stage], (step // STAGES) & 1)
            if valid < CHUNK:
                for i, j in T.Parallel(CHUNK, HALF):
                    if i >= valid:
                        k_shared[stage, i, j] = 0
                        q_shared[stage, i, j] = 0
                        if wide:
                            k_high_shared[stage, i, j] = 0
                            q_high_shared[stage, i, j] = 0
                T.fence_proxy_async()
            T.sync_threads(barrier_id, 128)

            T.wgmma_gemm(k_shared[stage, :, :], k_shared[stage, :, :], kk_fragment, transpose_B=True, clear_accum=True)
            if wide:
                T.wgmma_gemm(k_high_shared[stage, :, :], k_high_shared[stage, :, :], kk_fragment, transpose_B=True)
            T.clear(inverse_shared)
            if normalize:
                # For the norms alone; the tensor cores have little else to do here.
                T.wgmma_gemm(q_shared[stage, :, :], q_shared[stage, :, :], product_fragment, transpose_B=True, clear_accum=True)
                if wide:
                    T.wgmma_gemm(q_high_shared[stage, :, :], q_high_shared[stage, :, :], product_fragment, transpose_B=True)
            else:
                for i in T.Parallel(CHUNK):
                    k_factor_shared[i] = 1.0
                    q_factor_shared[i] = scale
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(kk_fragment, num_regs=32)
            if normalize:
                T.warpgroup_fence_operand(product_fragment, num_regs=32)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    if i == j:
                        k_factor_shared[i] = T.rsqrt(kk_fragment[i, j] + NORM_EPS)
                        q_factor_shared[i] = T.rsqrt(product_fragment[i, j] + NORM_EPS) * scale
            T.sync_threads(barrier_id, 128)

            # L goes apart: its diagonal blocks, transposed, for the substitution, and what lies below them, negated.
            for i, j in T.Parallel(CHUNK, CHUNK):
                kk_fragment[i, j] *= (k_factor_shared[i] * beta_shared[i]) * k_factor_shared[j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i // BLOCK == j // BLOCK:
                    diagonal_shared[j, i % BLOCK] = kk_fragment[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                below_fragment[i, j] = T.if_then_else(i // BLOCK > j // BLOCK, -kk_fragment[i, j], 0.0)
            T.copy(below_fragment, below_shared)
            T.sync_threads(barrier_id, 128)
            T.wgmma_gemm(q_shared[stage, :, :], k_shared[stage, :, :], qk_fragment, transpose_B=True, clear_accum=True)
            if wide:
                T.wgmma_gemm(q_high_shared[stage, :, :], k_high_shared[stage, :, :], qk_fragment, transpose_B=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                decay_fragment[i, j] = T.Select(i >= j, T.exp2(sum_shared[i] - sum_shared[j]), 0.0)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
            if thread % 32 == 0:
                T.barrier_arrive(keys_empty[stage])
            for i, j in T.Parallel(CHUNK, CHUNK):
                qk_fragment[i, j] *= (q_factor_shared[i] * k_factor_shared[j]) * decay_fragment[i, j]
            T.barrier_wait(tiles_empty[parity], (pair & 1) ^ 1)
            T.copy(qk_fragment, p_shared[parity, :, :])
            if thread < CHUNK:
                for i in T.unroll(BLOCK):
                    column[i] = T.if_then_else(thread % BLOCK == i, 1.0, 0.0)
                for pivot in T.unroll(BLOCK - 1):
                    for i in T.unroll(BLOCK):
                        if i > pivot:
                            column[i] = column[i] - diagonal_shared[thread // BLOCK * BLOCK + pivot, i] * column[pivot]
            T.sync_threads(barrier_id, 128)
            if thread < CHUNK:
                for i in T.unroll(BLOCK):
                    diagonal_shared[thread // BLOCK * BLOCK + i, thread % BLOCK] = column[i]
                    inverse_shared[thread // BLOCK * BLOCK + i, thread] = column[i]
            T.fence_proxy_async()
            T.sync_threads(barrier_id, 128)

            # X = (I + L)^-1 by blocks of rows: X <- B + (-B L_below) X from X = B, the inverse of the diagonal blocks.
            T.wgmma_gemm(inverse_shared, below_shared, product_fragment, clear_accum=True)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(product_fragment, num_regs=32)
            T.copy(product_fragment, product_operand)
            for turn in T.unroll(CHUNK // BLOCK - 1):
                if turn > 0:
                    T.sync_threads(barrier_id, 128)
                    T.copy(inverse_fragment, inverse_shared)
                    T.fence_proxy_async()
                    T.sync_threads(barrier_id, 128)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    inverse_fragment[i, j] = 0.0
                    if i // BLOCK == j // BLOCK:
                        inverse_fragment[i, j] = diagonal_shared[i, j % BLOCK]
                T.wgmma_gemm(product_operand, inverse_shared, inverse_fragment)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(inverse_fragment, num_regs=32)

            for i, j in T.Parallel(CHUNK, CHUNK):
                inverse_fragment[i, j] *= beta_shared[j] * decay_fragment[i, j]
            T.copy(inverse_fragment, m_shared[parity, :, :])
            if parts == 2:
                for i, j in T.Parallel(CHUNK, CHUNK):
                    product_fragment[i, j] = inverse_fragment[i, j] - T.cast(T.cast(inverse_fragment[i, j], dtype), "float32")
                T.copy(product_fragment, rest_shared[parity, :, :])
            if thread < CHUNK:
                total = sum_shared[CHUNK - 1]
                vector_shared[parity, ROW_STATE_KEY, thread] = T.exp2(sum_shared[thread]) * k_factor_shared[thread]
                vector_shared[parity, ROW_KEY_TO_LAST, thread] = T.exp2(total - sum_shared[thread]) * k_factor_shared[thread]
                vector_shared[parity, ROW_STATE_QUERY, thread] = T.exp2(sum_shared[thread]) * q_factor_shared[thread]
                vector_shared[parity, ROW_LAST, thread] = T.exp2(total)
            T.fence_proxy_async()
            T.barrier_arrive(tiles_full[parity])
            T.sync_threads(barrier_id, 128)  # before the next round writes what this one has read

    @T.prim_func
    def chunk_fused(
        q: q_type,
        k: k_type,
        v: v_type,
        g: g_type,
        beta: beta_type,
        a_log: a_log_type,
        dt_bias: dt_bias_type,
        initial_state: initial_type,
        indices: index_type,
        mask: mask_type,
        final_state: final_type,
        final_indices: final_index_type,
        cu_seqlens: bounds_type,
        out: out_type,
        scale: T.float32,
        null_slot: T.int32,
    ):
        with T.Kernel(slices, bounds - 1, heads, threads=THREADS) as (v_slice, sequence, head):
            k_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
            q_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
            k_high_shared = T.alloc_shared((STAGES if wide else 1, CHUNK, HALF), dtype)
            q_high_shared = T.alloc_shared((STAGES if wide else 1, CHUNK, HALF), dtype)
            v_shared = T.alloc_shared((CHUNK, PANEL), dtype)  # of even chunks; matrix loads ignore the offset of a region
            v_odd_shared = T.alloc_shared((CHUNK, PANEL), dtype)
            m_shared = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            rest_shared = T.alloc_shared((2 if parts == 2 else 1, CHUNK, CHUNK), dtype)
            p_shared = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            vector_shared = T.alloc_shared((2, NUM_VECTORS, CHUNK), "float32")
            out_shared = T.alloc_shared((CHUNK, PANEL), dtype)
            out_odd_shared = T.alloc_shared((CHUNK, PANEL), dtype)
            below_shared = T.alloc_shared((CHUNK, CHUNK), inverse_dtype)
            below_odd_shared = T.alloc_shared((CHUNK, CHUNK), inverse_dtype)
            inverse_shared = T.alloc_shared((CHUNK, CHUNK), inverse_dtype)
            inverse_odd_shared = T.alloc_shared((CHUNK, CHUNK), inverse_dtype)
            diagonal_shared = T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32")
            diagonal_odd_shared = T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32")
            sum_shared = T.alloc_shared((CHUNK,), "float32")
            sum_odd_shared = T.alloc_shared((CHUNK,), "float32")
            beta_shared = T.alloc_shared((CHUNK,), "float32")
            beta_odd_shared = T.alloc_shared((CHUNK,), "float32")
            k_factor_shared = T.alloc_shared((CHUNK,), "float32")
            k_factor_odd_shared = T.alloc_shared((CHUNK,), "float32")
            q_factor_shared = T.alloc_shared((CHUNK,), "float32")
            q_factor_odd_shared = T.alloc_shared((CHUNK,), "float32")
            keys_full = T.alloc_barrier([32] * STAGES)
            keys_empty = T.alloc_barrier([8] * STAGES)
            values_full = T.alloc_barrier([32] * 2)
            values_empty = T.alloc_barrier([4] * 2)
            tiles_full = T.alloc_barrier([128] * 2)
            tiles_empty = T.alloc_barrier([4] * 2)
            out_full = T.alloc_barrier([128] * 2)
            out_empty = T.alloc_barrier([32] * 2)
            state_fragment = T.alloc_fragment((columns, HALF), "float32")
            state_high_fragment = T.alloc_fragment((columns, HALF), "float32")
            state_operand = T.alloc_fragment((columns, HALF), dtype)
            state_high_operand = T.alloc_fragment((columns, HALF), dtype)
            u_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            v_fragment = T.alloc_fragment((CHUNK, PANEL), dtype)
            w_operand = T.alloc_fragment((columns, CHUNK), dtype)
            new_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            new_operand = T.alloc_fragment((columns, CHUNK), dtype)
            decayed_operand = T.alloc_fragment((columns, CHUNK), dtype)
            out_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            factor_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            out_factor_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            out_rows = T.alloc_fragment((CHUNK, PANEL), dtype)
            last = T.alloc_local((1,), "float32")
            read_slot = T.alloc_var("int64", init=0)
            write_slot = T.alloc_var("int64", init=0)
            live = T.alloc_var("bool", init=True)
            starts = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout(
                {
                    v_shared: make_swizzled_layout(v_shared),
                    v_odd_shared: make_swizzled_layout(v_odd_shared),
                    out_shared: make_swizzled_layout(out_shared),
                    out_odd_shared: make_swizzled_layout(out_odd_shared),
                    v_fragment: transposed_accumulator(columns),
                    out_rows: transposed_accumulator(columns),
                }
            )

            sequence_begin = T.cast(cu_seqlens[sequence], "int32")
            length = T.cast(cu_seqlens[sequence + 1], "int32") - sequence_begin
            column_begin = v_slice * PANEL
            read_slot = T.cast(sequence, "int64")
            if pooled:
                read_slot = T.cast(indices[sequence], "int64")
                live = length > 0 and read_slot > T.cast(null_slot, "int64")
            num_chunks = T.if_then_else(live, T.ceildiv(length, CHUNK), 0)

            if tx < _CHAIN:
                T.set_max_nreg(CHAIN_REGISTERS, 1)
                T.clear(state_fragment)
                if wide:
                    T.clear(state_high_fragment)
                if has_initial:
                    starts = live
                    if has_mask:
                        if live:
                            starts = mask[sequence]
                    if starts:
                        for i, j in T.Parallel(columns, HALF):
                            if v_first:
                                state_fragment[i, j] = T.cast(initial_state[read_slot, head, column_begin + i, j], "float32")
                            else:
                                state_fragment[i, j] = T.cast(initial_state[read_slot, head, j, column_begin + i], "float32")
                        if wide:
                            for i, j in T.Parallel(columns, HALF):
                                if v_first:
                                    state_high_fragment[i, j] = T.cast(
                                        initial_state[read_slot, head, column_begin + i, HALF + j], "float32"
                                    )
                                else:
                                    state_high_fragment[i, j] = T.cast(
                                        initial_state[read_slot, head, HALF + j, column_begin + i], "float32"
                                    )

                T.copy(state_fragment, state_operand)
                if wide:
                    T.copy(state_high_fragment, state_high_operand)
                for step in T.serial(num_chunks):
                    stage = step % STAGES
                    parity = step % 2
                    valid = T.min(length - step * CHUNK, CHUNK)
                    T.barrier_wait(keys_full[stage], (step // STAGES) & 1)
                    T.barrier_wait(values_full[parity], (step // 2) & 1)
                    T.barrier_wait(tiles_full[parity], (step // 2) & 1)
                    # Shared memory is read before each batch of products: a load queues behind products that were issued first.
                    if parity == 0:
                        T.copy(v_shared, v_fragment)
                    else:
                        T.copy(v_odd_shared, v_fragment)
                    for i, j in T.Parallel(columns, CHUNK):
                        factor_fragment[i, j] = vector_shared[parity, ROW_STATE_KEY, j]
                    last[0] = vector_shared[parity, ROW_LAST, 0]
                    # The tensor cores take products in order. Half of Q S runs while W is made, the other half while Vn is
                    # rounded, P Vn while the state is; whatever else there is to do is done behind U or behind W M^T.
                    T.wgmma_gemm(state_operand, k_shared[stage, :, :], u_fragment, transpose_B=True, clear_accum=True, policy=ROWS)
                    if wide:
                        T.wgmma_gemm(state_high_operand, k_high_shared[stage, :, :], u_fragment, transpose_B=True, policy=ROWS)
                    T.wgmma_gemm(
                        state_operand, q_shared[stage, :, :], out_fragment, transpose_B=True, clear_accum=True, policy=ROWS
                    )
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(u_fragment, num_regs=ACCUMULATOR)
                    if valid == CHUNK:
                        for i, j in T.Parallel(columns, CHUNK):
                            w_operand[i, j] = (
                                T.cast(v_fragment[i // PANEL * CHUNK + j, i % PANEL], "float32")
                                - factor_fragment[i, j] * u_fragment[i, j]
                            )
                    else:
                        for i, j in T.Parallel(columns, CHUNK):
                            w_operand[i, j] = T.if_then_else(
                                j < valid,
                                T.cast(v_fragment[i // PANEL * CHUNK + j, i % PANEL], "float32")
                                - factor_fragment[i, j] * u_fragment[i, j],
                                0.0,
                            )
                    for i, j in T.Parallel(columns, CHUNK):
                        factor_fragment[i, j] = vector_shared[parity, ROW_KEY_TO_LAST, j]
                    for i, j in T.Parallel(columns, CHUNK):
                        out_factor_fragment[i, j] = vector_shared[parity, ROW_STATE_QUERY, j]
                    T.wgmma_gemm(w_operand, m_shared[parity, :, :], new_fragment, transpose_B=True, clear_accum=True, policy=ROWS)
                    if parts == 2:
                        T.wgmma_gemm(w_operand, rest_shared[parity, :, :], new_fragment, transpose_B=True, policy=ROWS)
                    if wide:
                        T.wgmma_gemm(
                            state_high_operand, q_high_shared[stage, :, :], out_fragment, transpose_B=True, policy=ROWS
                        )
                    for i, j in T.Parallel(columns, HALF):
                        state_fragment[i, j] *= last[0]
                    if wide:
                        for i, j in T.Parallel(columns, HALF):
                            state_high_fragment[i, j] *= last[0]
                    T.wait_wgmma(halves - 1)
                    T.warpgroup_fence_operand(new_fragment, num_regs=ACCUMULATOR)
                    for i, j in T.Parallel(columns, CHUNK):
                        decayed_operand[i, j] = new_fragment[i, j] * factor_fragment[i, j]
                    T.wgmma_gemm(decayed_operand, k_shared[stage, :, :], state_fragment, policy=ROWS)
                    if wide:
                        T.wgmma_gemm(decayed_operand, k_high_shared[stage, :, :], state_high_fragment, policy=ROWS)
                    T.copy(new_fragment, new_operand)
                    T.wait_wgmma(halves)  # Q S
                    T.warpgroup_fence_operand(out_fragment, num_regs=ACCUMULATOR)
                    for i, j in T.Parallel(columns, CHUNK):
                        out_fragment[i, j] *= out_factor_fragment[i, j]
                    T.wgmma_gemm(new_operand, p_shared[parity, :, :], out_fragment, transpose_B=True, policy=ROWS)
                    T.wait_wgmma(1)  # the state; the output goes on
                    T.warpgroup_fence_operand(state_fragment, num_regs=ACCUMULATOR)
                    if wide:
                        T.warpgroup_fence_operand(state_high_fragment, num_regs=ACCUMULATOR)
                    T.copy(state_fragment, state_operand)
                    if wide:
                        T.copy(state_high_fragment, state_high_operand)
                    T.warpgroup_fence_operand(state_operand, num_regs=ACCUMULATOR // 2)
                    if wide:
                        T.warpgroup_fence_operand(state_high_operand, num_regs=ACCUMULATOR // 2)
                    # The loop inside also keeps the assembler from moving the rounding above behind the wait below.
                    T.barrier_wait(out_empty[parity], ((step // 2) & 1) ^ 1)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(out_fragment, num_regs=ACCUMULATOR)
                    for i, j in T.Parallel(columns, CHUNK):
                        out_rows[i // PANEL * CHUNK + j, i % PANEL] = out_fragment[i, j]
                    if valid == CHUNK:
                        if parity == 0:
                            T.copy(out_rows, out_shared)
                        else:
                            T.copy(out_rows, out_odd_shared)
                        T.fence_proxy_async()
                        T.barrier_arrive(out_full[parity])
                    if tx % 32 == 0:
                        T.barrier_arrive(keys_empty[stage])
                        T.barrier_arrive(values_empty[parity])
                        T.barrier_arrive(tiles_empty[parity])

                if num_chunks > 0:
                    begin = sequence_begin + (num_chunks - 1) * CHUNK
                    rest = length - (num_chunks - 1) * CHUNK
                    if rest < CHUNK:
                        for i, j in T.Parallel(columns, CHUNK):
                            if j < rest:
                                out[T.cast(begin + j, "int64"), head, column_begin + i] = out_rows[i // PANEL * CHUNK + j, i % PANEL]

                if has_final:
                    write_slot = read_slot
                    if has_final_indices:
                        if live:
                            write_slot = T.cast(final_indices[sequence], "int64")
                            live = write_slot > T.cast(null_slot, "int64")
                    if live:
                        for i, j in T.Parallel(columns, HALF):
                            if v_first:
                                final_state[write_slot, head, column_begin + i, j] = T.cast(state_fragment[i, j], final_dtype)
                            else:
                                final_state[write_slot, head, j, column_begin + i] = T.cast(state_fragment[i, j], final_dtype)
                        if wide:
                            for i, j in T.Parallel(columns, HALF):
                                if v_first:
                                    final_state[write_slot, head, column_begin + i, HALF + j] = T.cast(
                                        state_high_fragment[i, j], final_dtype
                                    )
                                else:
                                    final_state[write_slot, head, HALF + j, column_begin + i] = T.cast(
                                        state_high_fragment[i, j], final_dtype
                                    )

            elif tx < _EVEN:
                T.set_max_nreg(TILE_REGISTERS, 1)
                make_tiles(
                    0, 5, tx - _CHAIN, num_chunks, sequence_begin, length, head, scale, g, beta, a_log, dt_bias,
                    k_shared, k_high_shared, q_shared, q_high_shared, below_shared, inverse_shared, diagonal_shared,
                    sum_shared, beta_shared, k_factor_shared, q_factor_shared, m_shared, rest_shared, p_shared,
                    vector_shared, keys_full, keys_empty, tiles_full, tiles_empty,
                )  # fmt: skip
            elif tx < _ODD:
                T.set_max_nreg(TILE_REGISTERS, 1)
                make_tiles(
                    1, 6, tx - _EVEN, num_chunks, sequence_begin, length, head, scale, g, beta, a_log, dt_bias,
                    k_shared, k_high_shared, q_shared, q_high_shared, below_odd_shared, inverse_odd_shared, diagonal_odd_shared,
                    sum_odd_shared, beta_odd_shared, k_factor_odd_shared, q_factor_odd_shared, m_shared, rest_shared, p_shared,
                    vector_shared, keys_full, keys_empty, tiles_full, tiles_empty,
                )  # fmt: skip
            else:
                T.set_max_nreg(COPY_REGISTERS, 0)
                if tx < _ODD + 32:
                    for step in T.serial(num_chunks):
                        stage = step % STAGES
                        token = sequence_begin + step * CHUNK
                        T.barrier_wait(keys_empty[stage], ((step // STAGES) & 1) ^ 1)
                        T.tma_copy(
                            k[token : token + CHUNK, head // heads_per_k, 0:HALF],
                            k_shared[stage, :, :],
                            barrier=keys_full[stage],
                            leader_scope_threads=32,
                        )
                        T.tma_copy(
                            q[token : token + CHUNK, head // heads_per_q, 0:HALF],
                            q_shared[stage, :, :],
                            barrier=keys_full[stage],
                            leader_scope_threads=32,
                        )
                        if wide:
                            T.tma_copy(
                                k[token : token + CHUNK, head // heads_per_k, HALF:head_k],
                                k_high_shared[stage, :, :],
                                barrier=keys_full[stage],
                                leader_scope_threads=32,
                            )
                            T.tma_copy(
                                q[token : token + CHUNK, head // heads_per_q, HALF:head_k],
                                q_high_shared[stage, :, :],
                                barrier=keys_full[stage],
                                leader_scope_threads=32,
                            )
                        # By all lanes: whichever lane was elected for the copies announced their bytes before its own arrival.
                        T.barrier_arrive(keys_full[stage])
                        T.barrier_wait(values_empty[step % 2], ((step // 2) & 1) ^ 1)
                        if step % 2 == 0:
                            T.tma_copy(
                                v[token : token + CHUNK, head // heads_per_v, column_begin : column_begin + PANEL],
                                v_shared,
                                barrier=values_full[0],
                                leader_scope_threads=32,
                            )
                        else:
                            T.tma_copy(
                                v[token : token + CHUNK, head // heads_per_v, column_begin : column_begin + PANEL],
                                v_odd_shared,
                                barrier=values_full[1],
                                leader_scope_threads=32,
                            )
                        T.barrier_arrive(values_full[step % 2])
                elif tx < _ODD + 64:
                    for step in T.serial(T.if_then_else(live, length // CHUNK, 0)):
                        token = sequence_begin + step * CHUNK
                        T.barrier_wait(out_full[step % 2], (step // 2) & 1)
                        if step % 2 == 0:
                            T.tma_copy(
                                out_shared,
                                out[token : token + CHUNK, head, column_begin : column_begin + PANEL],
                                leader_scope_threads=32,
                            )
                        else:
                            T.tma_copy(
                                out_odd_shared,
                                out[token : token + CHUNK, head, column_begin : column_begin + PANEL],
                                leader_scope_threads=32,
                            )
                        T.tma_store_wait(0)
                        T.barrier_arrive(out_empty[step % 2])
                else:
                    column = column_begin + tx - (_ODD + 64)
                    if not live:
                        for row in T.serial(length):
                            out[T.cast(sequence_begin + row, "int64"), head, column] = 0
                    used = T.cast(cu_seqlens[bounds - 1], "int32")
                    for turn in T.serial(T.ceildiv(T.max(num_tokens - used - sequence, 0), bounds - 1)):
                        row = used + sequence + turn * (bounds - 1)
                        out[T.cast(row, "int64"), head, column] = 0

    return chunk_fused
