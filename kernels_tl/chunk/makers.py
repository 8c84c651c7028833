"""The roles of the one-launch chunk kernel that make tiles: what of a chunk does not depend on the state.

A block of a cluster of `makers` makes the tiles of every makers-th chunk, for both chains. The maths stands in _chunk_prepare;
here it is split between two warpgroups, so that two chunks are on their way at a time:

    inverse   K K^T, |k|^-1, L, X, which is (I + L)^-1 but for factors
    product   Q K^T, |q|^-1, then with X: R, Z and the row factors, into a slot of the block's own ring

`turn` counts the chunks that a block makes: turn t is chunk makers * t + rank. The barriers stand in _chunk_fused.
"""

from typing import Any

import tilelang.language as T

from gdn.problems import ChunkProblem
from kernels_tl.chunk.prepare import (
    BLOCK,
    LOG2_E,
    LOWEST_LOG_DECAY,
    NORM_EPS,
    SHORT,
    SOFTPLUS_THRESHOLD,
    right_operands,
    scales_of,
    square_rows,
)
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

CHAINS = 2  # blocks of a cluster that run the chain, 64 V columns each; those behind them only make tiles
MOST_MAKERS = 4  # of a cluster: slots of the ring in turns, see ring_slot
KEY_BUFFERS = 2  # of K for the makers: one each for inverse and product
WARPGROUP = 128
INVERSE_SYNC = 5  # a named barrier
QUARTER = BLOCK // 2  # rows of the smallest blocks
LOWER_PITCH = CHUNK + 8  # of L, in 16-bit numbers: rows that start in different banks


def ring_slot(makers: int, rank: Any, turn: Any) -> Any:
    """Where a block puts what it makes: a chain's block where its chain reads it, another in turns, while the last is sent."""
    if makers == CHAINS:
        return rank
    return (turn * (1 if makers % 2 else rank // CHAINS) + rank) & 1


def gate_role(problem: ChunkProblem, makers: int) -> Any:
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
            step = makers * turn + rank
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


def inverse_role(problem: ChunkProblem, makers: int) -> Any:
    """A macro for one warpgroup: X. Rows 16 w .. of every tile are warp w's.

    L in blocks of 16 x 16: a warp inverts its diagonal block by itself, two halves by substitution and what lies below them by
    products. Then, with every warp's L and inverted blocks in place, it makes its row of blocks of (I + L)^-1 leftwards,
    A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu, out of registers; a block is stored while the next one's products run.
    """
    dtype, normalize = problem.dtype, problem.use_qk_l2norm
    # With normalised keys L is at most beta: float16 holds it, with three bits more than bfloat16.
    inverse_dtype = "float16" if normalize else dtype
    short = SHORT[inverse_dtype]
    unit, x_scale = scales_of(problem)
    blocks = CHUNK // BLOCK
    steps = problem.head_k_dim // 16  # of a product of single warps

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
    def load_column(lower_shared, lane, column, below, inverted):
        # By all warps: what only some load is kept in registers from chunk to chunk.
        for back in T.unroll(blocks):
            if blocks - 1 - back > column:
                load(
                    lower_shared, lane, blocks - 1 - back, column, below, (blocks - 1 - back) * (blocks - 2 - back) // 2 + column
                )
        load(lower_shared, lane, column, column, inverted, column)

    @T.macro
    def load_norms(k_norm_shared, half, lane, block, norms):
        if unit:
            for m in T.unroll(2):
                for odd in T.vectorized(2):
                    norms[2 * m + odd] = k_norm_shared[half, BLOCK * block + 8 * m + lane % 4 * 2 + odd]

    @T.macro
    def store(x_shared, half, warp, lane, block, values, scaled, factors, norms):
        for i in T.unroll(8):
            scaled[i] = values[8 * block + i] * factors[i // 2 % 2]
            if unit:
                scaled[i] = scaled[i] * norms[i // 4 * 2 + i % 2]
        for m in T.unroll(2):
            for side in T.unroll(2):
                for odd in T.vectorized(2):
                    x_shared[half, BLOCK * warp + lane // 4 + 8 * side, BLOCK * block + 8 * m + lane % 4 * 2 + odd] = T.cast(
                        scaled[4 * m + 2 * side + odd], dtype
                    )

    @T.macro
    def inverse(
        thread,
        turns,
        rank,
        length,
        k_shared,
        k_high_shared,
        lower_shared,
        x_shared,
        diagonal_shared,
        beta_shared,
        k_factor_shared,
        k_norm_shared,
        k_full,
        gates_full,
        factors_full,
        x_full,
        x_free,
    ):
        kk_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        column_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
        row_factor = T.alloc_fragment((CHUNK,), "float32")
        keys = T.alloc_local((8 * steps,), dtype)  # the warp's 16 rows of K as left operands
        transposed = T.alloc_local((8 * steps,), dtype)  # and as right ones, 8 rows each
        diagonal = T.alloc_local((8,), "float32")  # the warp's diagonal block
        factors = T.alloc_local((2,), "float32")
        strengths = T.alloc_local((2,), "float32")
        betas = T.alloc_local((2,), "float32")
        columns = T.alloc_local((4,), "float32")
        norms = T.alloc_local((4,), "float32")  # of this lane's columns in a block
        column = T.alloc_local((QUARTER,), "float32")
        values = T.alloc_local((8 * blocks,), "float32")  # the row of blocks
        scaled = T.alloc_local((8,), "float32")
        sums = T.alloc_local((8,), "float32")
        left = T.alloc_local((8 * blocks,), inverse_dtype)  # the row of blocks so far, as left operands
        middle = T.alloc_local((8,), inverse_dtype)
        right = T.alloc_local((4,), inverse_dtype)
        below = T.alloc_local((8 * blocks * (blocks - 1) // 2,), inverse_dtype)  # L_xu at x (x - 1) / 2 + u, as right operands
        inverted = T.alloc_local((8 * (blocks - 1),), inverse_dtype)  # A_uu
        warp = thread // 32
        lane = thread % 32
        # Of the diagonal block's 16 columns, by all lanes: a branch would serialise the products under way.
        own = thread % BLOCK
        # Above the diagonal they stay zero.
        for half, i, j in T.Parallel(2, CHUNK, CHUNK):
            x_shared[half, i, j] = 0
        for turn in T.serial(turns):
            buffer = turn % KEY_BUFFERS
            half = turn % 2
            valid = T.min(length - (makers * turn + rank) * CHUNK, CHUNK)
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
            # Meanwhile each warp makes its diagonal block by itself, and with it the norms of its rows.
            load_rows(k_shared, buffer, warp, lane, keys, 0)
            load_rows(k_high_shared, buffer, warp, lane, keys, HALF // 16)
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
            T.barrier_wait(gates_full[half], (turn // 2) & 1)
            if normalize:
                # Row lane // 4 of each half of 8 rows: of its four lanes one holds the diagonal.
                factors[0] = T.Select(lane // 4 % 2 == 0, diagonal[0], diagonal[1])
                factors[1] = T.Select(lane // 4 % 2 == 0, diagonal[6], diagonal[7])
                for side in T.unroll(2):
                    norms[side] = T.shfl_sync(factors[side], lane // 4 * 4 + lane // 8) + NORM_EPS
                    factors[side] = T.rsqrt(norms[side])
            else:
                for side in T.unroll(2):
                    factors[side] = 1.0
            for side in T.unroll(2):
                strengths[side] = beta_shared[half, BLOCK * warp + lane // 4 + 8 * side]
                betas[side] = strengths[side] * factors[side]
            T.sync_warp()
            for side in T.unroll(2):
                k_factor_shared[half, BLOCK * warp + lane // 4 + 8 * side] = factors[side]
                if unit:
                    k_norm_shared[half, BLOCK * warp + lane // 4 + 8 * side] = norms[side] * factors[side]
                    beta_shared[half, BLOCK * warp + lane // 4 + 8 * side] = betas[side]
                else:
                    beta_shared[half, BLOCK * warp + lane // 4 + 8 * side] = strengths[side] * (1.0 / x_scale)
            T.barrier_arrive(factors_full[half])  # by all lanes: a branch would serialise the products under way
            T.sync_warp()
            # L's diagonal block, negated and transposed.
            for m in T.unroll(2):
                for odd in T.vectorized(2):
                    columns[2 * m + odd] = k_factor_shared[half, BLOCK * warp + 8 * m + lane % 4 * 2 + odd]
            for m in T.unroll(2):
                for side in T.unroll(2):
                    for odd in T.unroll(2):
                        diagonal_shared[BLOCK * warp + 8 * m + lane % 4 * 2 + odd, lane // 4 + 8 * side] = diagonal[
                            4 * m + 2 * side + odd
                        ] * (-betas[side] * columns[2 * m + odd])
            T.sync_warp()
            # The diagonal block's two 8 x 8 halves by substitution, a lane a column; below them -A_22 L_21 A_11 by products.
            for odd in T.vectorized(2):
                right[odd] = 0
            for odd in T.vectorized(2):
                right[2 + odd] = T.cast(diagonal_shared[BLOCK * warp + lane // 4, QUARTER + lane % 4 * 2 + odd], inverse_dtype)
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
            T.clear(values)
            for m in T.unroll(2):
                for odd in T.unroll(2):
                    values[6 * m + odd] = diagonal_shared[
                        BLOCK * warp + QUARTER * m + lane % 4 * 2 + odd, QUARTER * m + lane // 4
                    ]
            for i in T.unroll(8):
                left[i] = T.cast(values[i], inverse_dtype)
            T.clear(sums)
            multiply(sums, 0, left, 0, right, 0)
            for i in T.unroll(8):
                middle[i] = 0
            for odd in T.unroll(2):
                middle[2 + odd] = T.cast(sums[2 + odd], inverse_dtype)
            for odd in T.vectorized(2):
                right[odd] = T.cast(diagonal_shared[BLOCK * warp + lane // 4, lane % 4 * 2 + odd], inverse_dtype)
            for odd in T.vectorized(2):
                right[2 + odd] = 0
            multiply(values, 0, middle, 0, right, 0)
            for block in T.unroll(blocks):
                for i in T.unroll(8):
                    values[8 * block + i] = values[i]
                    left[8 * block + i] = T.cast(values[i], inverse_dtype)
            T.sync_threads(INVERSE_SYNC, WARPGROUP)  # the factors of all rows; also: every warp is done with the L before

            # L, negated, left of the diagonal blocks.
            for i in T.Parallel(CHUNK):
                if unit:
                    row_factor[i] = -beta_shared[half, i]
                else:
                    row_factor[i] = -k_factor_shared[half, i] * (beta_shared[half, i] * x_scale)
            # All factors are read before anything is stored: the compiler keeps their order.
            for i, j in T.Parallel(CHUNK, CHUNK):
                column_fragment[i, j] = k_factor_shared[half, j]
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(kk_fragment, num_regs=32)
            for i, j in T.Parallel(CHUNK, CHUNK):
                kk_fragment[i, j] *= row_factor[i] * column_fragment[i, j]
            for block in T.unroll(blocks - 1):
                if warp > block:
                    for i, j in T.Parallel(CHUNK, BLOCK):
                        lower_shared[i, BLOCK * block + j] = T.cast(kk_fragment[i, BLOCK * block + j], inverse_dtype)
            for m in T.unroll(2):
                for side in T.unroll(2):
                    for odd in T.vectorized(2):
                        lower_shared[BLOCK * warp + lane // 4 + 8 * side, BLOCK * warp + 8 * m + lane % 4 * 2 + odd] = left[
                            4 * m + 2 * side + odd
                        ]
            T.sync_threads(INVERSE_SYNC, WARPGROUP)

            load_column(lower_shared, lane, blocks - 2, below, inverted)
            for side in T.unroll(2):
                factors[side] = factors[side] * x_scale
            T.barrier_wait(x_free[half], ((turn // 2) & 1) ^ 1)
            for back in T.unroll(blocks - 1):
                load_norms(k_norm_shared, half, lane, blocks - 1 - back, norms)
                if back < blocks - 2:  # of the next round, before this one's stores, behind which it would wait
                    load_column(lower_shared, lane, blocks - 3 - back, below, inverted)
                if warp > blocks - 2 - back:
                    T.clear(sums)
                    for backwards in T.unroll(blocks):  # what was made last comes last
                        if backwards <= back:
                            if blocks - 1 - backwards <= warp:
                                for n in T.unroll(2):
                                    multiply(
                                        sums, 4 * n, left, 8 * (blocks - 1 - backwards), below,
                                        8 * (blocks - 2 - back)
                                        + 4 * (blocks - 1 - backwards) * (blocks - 2 - backwards) + 4 * n,
                                    )  # fmt: skip
                    # While the products run.
                    store(x_shared, half, warp, lane, blocks - 1 - back, values, scaled, factors, norms)
                    for i in T.unroll(8):
                        middle[i] = T.cast(sums[i], inverse_dtype)
                        values[8 * (blocks - 2 - back) + i] = 0.0
                    for n in T.unroll(2):
                        multiply(values, 8 * (blocks - 2 - back) + 4 * n, middle, 0, inverted, 8 * (blocks - 2 - back) + 4 * n)
                    for i in T.unroll(8):
                        left[8 * (blocks - 2 - back) + i] = T.cast(values[8 * (blocks - 2 - back) + i], inverse_dtype)
            load_norms(k_norm_shared, half, lane, 0, norms)
            store(x_shared, half, warp, lane, 0, values, scaled, factors, norms)
            T.fence_proxy_async()
            T.barrier_arrive(x_full[half])

    return inverse


def product_role(problem: ChunkProblem, makers: int) -> Any:
    """A macro for one warpgroup: R, Z and the row factors, from X."""
    dtype, normalize = problem.dtype, problem.use_qk_l2norm

    square = square_rows(dtype)

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
        factors_full,
        x_full,
        x_free,
        taken,
        room,
        made,
    ):
        q_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        q_high_operand = T.alloc_fragment((CHUNK, HALF), dtype)
        q_right = T.alloc_fragment((CHUNK, HALF), dtype)  # the same registers as right operands of a warp
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
        # Compared with columns that are the same for all comparisons, which else took 32 registers each.
        row_index = T.alloc_fragment((CHUNK,), "int32")
        warp = thread // 32
        lane = thread % 32
        for i in T.Parallel(CHUNK):
            row_index[i] = i
        for turn in T.serial(turns):
            buffer = turn % KEY_BUFFERS
            half = turn % 2
            T.barrier_wait(q_full[0], turn & 1)
            T.copy(q_shared, q_operand)
            T.copy(q_high_shared, q_high_operand)
            if normalize:
                # Norms are what the diagonals of the warp's two blocks of 8 rows of Q Q^T hold: by its own products, out of the
                # registers that Q K^T takes too. Of each product one half is of other rows, and nobody's.
                for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                    q_right[i, j] = q_operand[i, j]
                for i, j in T.Parallel(CHUNK, HALF, loop_layout=right_operands()):
                    q_high_right[i, j] = q_high_operand[i, j]
                T.clear(sums)
                square(sums, q_operand, q_right)
                square(sums, q_high_operand, q_high_right)
            T.sync_warp()
            if thread % 32 == 0:
                T.barrier_arrive(q_empty)
            T.barrier_wait(k_full[buffer], (turn // KEY_BUFFERS) & 1)
            # Rows of Q and K past the end may be anything: they reach rows of R of tokens past the end, or nothing.
            T.wgmma_gemm(q_operand, k_shared[buffer, :, :], qk_fragment, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(q_high_operand, k_high_shared[buffer, :, :], qk_fragment, transpose_B=True)
            if normalize:
                # Row lane // 4 of each block: of its four lanes one holds the diagonal.
                factors[0] = T.Select(lane // 4 % 2 == 0, sums[0], sums[1])
                factors[1] = T.Select(lane // 4 % 2 == 0, sums[6], sums[7])
                for side in T.unroll(2):
                    factors[side] = T.rsqrt(T.shfl_sync(factors[side], lane // 4 * 4 + lane // 8) + NORM_EPS) * scale
            else:
                for side in T.unroll(2):
                    factors[side] = scale
            for side in T.unroll(2):
                q_factor_shared[BLOCK * warp + lane // 4 + QUARTER * side] = factors[side]
            T.sync_warp()  # a warp reads the factors of its own rows only
            for i in T.Parallel(CHUNK):
                row_factor[i] = q_factor_shared[i]
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
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
                # Above the diagonal R is zero as its factors are, times whatever is finite.
                decay_fragment[i, j] = T.exp2(T.min(row_factor[i] - decay_fragment[i, j], 0.0))
            # What stands in beta's place behind the inverse: before, it is beta. Early in the inverse's turn, long before X.
            T.barrier_wait(factors_full[half], (turn // 2) & 1)
            for i, j in T.Parallel(CHUNK, CHUNK):
                column_fragment[i, j] = beta_shared[half, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                decay_fragment[i, j] *= column_fragment[i, j]

            T.barrier_wait(x_full[half], (turn // 2) & 1)
            T.wgmma_gemm(query_operand, x_shared[half, :, :], qk_fragment, clear_accum=True)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
            for i, j in T.Parallel(CHUNK, CHUNK):
                r_fragment[i, j] = qk_fragment[i, j] * decay_fragment[i, j]
            T.wgmma_gemm(x_shared[half, :, :], k_shared[buffer, :, :], z_fragment, transpose_A=True, clear_accum=True)
            T.wgmma_gemm(x_shared[half, :, :], k_high_shared[buffer, :, :], qk_fragment, transpose_A=True, clear_accum=True)
            for i in T.Parallel(CHUNK):
                row_factor[i] = T.exp2(total - row_factor[i]) * beta_shared[half, i]
            # Of the warp's own rows, as the factors are; twice each.
            vectors[ROW_LAST] = T.exp2(sum_shared[half, BLOCK * warp + lane % BLOCK])
            vectors[ROW_STATE_KEY] = vectors[ROW_LAST] * k_factor_shared[half, BLOCK * warp + lane % BLOCK]
            vectors[ROW_STATE_QUERY] = vectors[ROW_LAST] * q_factor_shared[BLOCK * warp + lane % BLOCK]
            vectors[ROW_LAST] = T.exp2(total)
            T.wait_wgmma(1)
            T.warpgroup_fence_operand(z_fragment, num_regs=32)
            for i, j in T.Parallel(CHUNK, HALF):
                z_operand[i, j] = z_fragment[i, j] * row_factor[i]
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(qk_fragment, num_regs=32)
            for i, j in T.Parallel(CHUNK, HALF):
                z_high_operand[i, j] = qk_fragment[i, j] * row_factor[i]
            T.sync_warp()
            if thread % 32 == 0:
                T.barrier_arrive(x_free[half])
                T.barrier_arrive(k_empty[buffer])
                T.barrier_arrive(gates_free[half])
            # All is in registers by now: the chains, which wait for it, have the tiles soon after they make room for them.
            if makers == CHAINS:
                T.barrier_wait(taken[0], (turn & 1) ^ 1)
            elif rank < CHAINS:
                T.barrier_wait(taken[0], (turn & 1) ^ 1)
            else:
                T.barrier_wait(room, (turn & 1) ^ 1)
            slot = ring_slot(makers, rank, turn)
            for i, j in T.Parallel(CHUNK, CHUNK):
                ring[slot, TILE_R, i, j] = r_fragment[i, j]
            for i, j in T.Parallel(CHUNK, HALF):
                ring[slot, TILE_Z, i, j] = z_operand[i, j]
            for i, j in T.Parallel(CHUNK, HALF):
                ring[slot, TILE_Z_HIGH, i, j] = z_high_operand[i, j]
            if lane < BLOCK:
                for row in T.unroll(NUM_VECTORS):
                    vector_ring[slot, row, BLOCK * warp + lane] = vectors[row]
            T.fence_proxy_async()
            T.barrier_arrive(made)

    return product
