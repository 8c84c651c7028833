"""Second launch of the chunk kernel: the chain of chunks of a sequence, the state transposed and in registers.

One block per (V slice, sequence, state head). Its math warpgroups own 64 rows (V columns) of S^T each, and per chunk compute

    U^T  = S^T K^T              O^T = S^T Q^T                     S^T rounded to 16 bits, A operand from registers
    W^T  = V^T - exp(c) U^T     columns of tokens past the end set to zero here
    S^T  = exp(c_last) S^T + W^T Z
    O^T  = exp(c) O^T + W^T R^T

(factors of norms and scale are in the vectors, in Z and in R, see _chunk_prepare). The layout of a float32 accumulator, rounded,
is the layout of a register operand, so nothing of the chain passes through shared memory. K, Q, Z and S^T are kept as halves of
64 key columns. The tensor cores take products in the order Q S, W Z, W R^T, and U of the next chunk: W is made while Q S runs,
S rounded while W R^T does, the output while U does. Iterations end with all products done, or the assembler serialises them.

The last warpgroup copies: warp 0 brings K, Q, V, tiles and vectors, warp 1 takes the output of full chunks away. A tail's
output is stored from registers. No barrier is left to the compiler (`tl.disable_thread_storage_sync`).

| barrier | waits | arrives (count) |
|---|---|---|
| full[stage] | math | warp 0 (32) + the bytes of the stage's bulk copies |
| empty[stage] | warp 0 | one lane of every math warp (64 columns = 4 warps) |
| out_full[step % 2] | warp 1 | every math thread (64 columns = 128 threads) |
| out_empty[step % 2] | math | warp 1 (32), when the copy has read the staged rows |
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl.chunk.types import (
    CHUNK,
    HALF,
    MOST_RANKED,
    NUM_VECTORS,
    ROW_LAST,
    ROW_STATE_KEY,
    ROW_STATE_QUERY,
    TILE_R,
    TILE_Z,
    TILE_Z_HIGH,
    bounds_tensor,
    checkpoint_tensor,
    find_ranked,
    find_segment,
    row_tensor,
    starts_tensor,
    state_loader,
    state_storer,
    state_tensor,
    tiles_tensor,
    token_tensor,
    turn,
)

PANEL = 64  # V columns of a math warpgroup: the rows of its wgmmas
ACCUMULATOR = 32  # registers a thread of a [64, 64] float32 accumulator
ROWS = T.GemmWarpPolicy.FullRow  # each math warpgroup owns 64 rows of every product
PRODUCER_THREADS = 128  # one warpgroup: register counts change by whole warpgroups
PRODUCER_REGISTERS = 24
MATH_REGISTERS = 240
STAGES = 3  # chunks in shared memory at once
MATH_THREADS = 128
BLOCK_REGISTERS = MATH_THREADS * MATH_REGISTERS + PRODUCER_THREADS * PRODUCER_REGISTERS


def transposed_accumulator(columns: int) -> Any:
    """The layout of [columns / 64 panels * 64 tokens, 64] whose panels lie, transposed, as a float32 accumulator [columns, 64].

    Copies between it and row-major shared memory become matrix loads and stores with transposition.
    """

    def thread(row: Any, column: Any) -> Any:
        return row // CHUNK * 128 + column // 16 * 32 + column % 8 * 4 + row % 8 // 2

    def register(row: Any, column: Any) -> Any:
        return row % CHUNK // 8 * 4 + column % 16 // 8 * 2 + row % 2

    return T.Fragment([columns // PANEL * CHUNK, PANEL], forward_thread_fn=thread, forward_index_fn=register)


def chain(problem: ChunkProblem, split: bool = False, decides: bool = False) -> Any:
    """The prim_func `chunk_chain`.

    split: a block works on a segment of a sequence. Without, `segment_starts` and `segment` are not read.
    decides: as of `prepare`.
    """
    head_k, head_v, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    heads_per_q = heads // problem.num_q_heads
    heads_per_k = heads // problem.num_k_heads
    heads_per_v = heads // problem.num_v_heads
    dtype = problem.dtype
    pooled = problem.pooled
    has_initial, has_final, has_mask = problem.has_initial_state, problem.has_final_state, problem.has_mask
    has_final_indices, has_checkpoints = problem.has_final_indices, problem.has_checkpoints
    columns, stages, math_threads = PANEL, STAGES, MATH_THREADS
    wide = head_k > HALF
    halves = head_k // HALF
    panels = columns // PANEL
    rows = panels * CHUNK
    slices = head_v // columns
    final_dtype = problem.state_dtype if pooled else "float32"

    num_tokens, bounds, slots = T.dynamic("num_tokens"), T.dynamic("num_bounds"), T.dynamic("num_slots")
    q_type = token_tensor("q", num_tokens, problem.num_q_heads, head_k, dtype)
    k_type = token_tensor("k", num_tokens, problem.num_k_heads, head_k, dtype)
    v_type = token_tensor("v", num_tokens, problem.num_v_heads, head_v, dtype)
    initial_type = state_tensor("initial", bounds, problem, problem.state_dtype if has_initial else None)
    index_type = row_tensor("indices", bounds, problem, problem.index_dtype)
    mask_type = row_tensor("mask", bounds, problem, "bool" if has_mask else None)
    final_type = state_tensor("final", bounds, problem, final_dtype if has_final else None)
    final_index_type = row_tensor("final_indices", bounds, problem, problem.index_dtype if has_final_indices else None)
    bounds_type = bounds_tensor(bounds, problem)
    out_type = token_tensor("out", num_tokens, heads, head_v, dtype)
    segment_slots = T.dynamic("num_segment_slots")
    segment_start_type = starts_tensor(segment_slots, problem) if split else bounds_tensor(bounds, problem)
    pieces = segment_slots if split else bounds - 1

    checkpoints = T.dynamic("num_checkpoints")
    checkpoint_offset_type = checkpoint_tensor(checkpoints, bounds, problem, "int32")
    checkpoint_slot_type = checkpoint_tensor(checkpoints, bounds, problem, problem.index_dtype)

    take_turn = turn(decides, cuts=True)
    load_state = state_loader(problem, columns)
    store_state = state_storer(problem, columns, final_dtype)

    @T.macro
    def load_v(source, target, barriers, stage, token, head, column_begin):
        for panel in T.unroll(panels):
            T.tma_copy(
                source[
                    token : token + CHUNK, head // heads_per_v, column_begin + panel * PANEL : column_begin + (panel + 1) * PANEL
                ],
                target[panel * CHUNK : (panel + 1) * CHUNK, :],
                barrier=barriers[stage],
                leader_scope_threads=32,
            )

    @T.macro
    def read_ahead(stage, v_first_stage, v_second_stage, v_third_stage, vectors, v_fragment, factor_fragment, last):
        if stage == 0:
            T.copy(v_first_stage, v_fragment)
        elif stage == 1:
            T.copy(v_second_stage, v_fragment)
        else:
            T.copy(v_third_stage, v_fragment)
        for i, j in T.Parallel(columns, CHUNK):
            factor_fragment[i, j] = vectors[stage, ROW_STATE_KEY, j]
        last[0] = vectors[stage, ROW_LAST, 0]

    @T.macro
    def store(staging, target, token, head, column_begin):
        for panel in T.unroll(panels):
            T.tma_copy(
                staging[panel * CHUNK : (panel + 1) * CHUNK, :],
                target[token : token + CHUNK, head, column_begin + panel * PANEL : column_begin + (panel + 1) * PANEL],
                leader_scope_threads=32,
            )

    @T.prim_func
    def chunk_chain(
        q: q_type,
        k: k_type,
        v: v_type,
        initial_state: initial_type,
        indices: index_type,
        mask: mask_type,
        final_state: final_type,
        final_indices: final_index_type,
        cu_seqlens: bounds_type,
        out: out_type,
        tiles: tiles_tensor(slots, problem),
        vectors: T.Tensor((slots, heads, NUM_VECTORS, CHUNK), "float32"),
        segment_starts: segment_start_type,
        checkpoint_offsets: checkpoint_offset_type,
        checkpoint_slots: checkpoint_slot_type,
        null_slot: T.int32,
        segment: T.int32,
        cut_above: T.int32,
    ):
        # The pieces slowest: blocks start in this order, those of the longest sequence first.
        with T.Kernel(slices, heads, pieces, threads=math_threads + PRODUCER_THREADS) as (v_slice, head, piece):
            k_shared = T.alloc_shared((stages, CHUNK, HALF), dtype)
            q_shared = T.alloc_shared((stages, CHUNK, HALF), dtype)
            k_high_shared = T.alloc_shared((stages, CHUNK, HALF), dtype)
            q_high_shared = T.alloc_shared((stages, CHUNK, HALF), dtype)
            # One buffer a stage: matrix loads ignore the offset of a region.
            v_shared = T.alloc_shared((rows, PANEL), dtype)
            v_second_shared = T.alloc_shared((rows, PANEL), dtype)
            v_third_shared = T.alloc_shared((rows, PANEL), dtype)
            z_shared = T.alloc_shared((stages, CHUNK, HALF), dtype)
            z_high_shared = T.alloc_shared((stages, CHUNK, HALF), dtype)
            r_shared = T.alloc_shared((stages, CHUNK, CHUNK), dtype)
            vector_shared = T.alloc_shared((stages, NUM_VECTORS, CHUNK), "float32")
            out_shared = T.alloc_shared((rows, PANEL), dtype)
            out_odd_shared = T.alloc_shared((rows, PANEL), dtype)
            full = T.alloc_barrier([32] * stages)
            empty = T.alloc_barrier([math_threads // 32] * stages)
            out_full = T.alloc_barrier([math_threads] * 2)
            out_empty = T.alloc_barrier([32] * 2)
            state_fragment = T.alloc_fragment((columns, HALF), "float32")
            state_high_fragment = T.alloc_fragment((columns, HALF), "float32")
            state_operand = T.alloc_fragment((columns, HALF), dtype)
            state_high_operand = T.alloc_fragment((columns, HALF), dtype)
            u_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            v_fragment = T.alloc_fragment((rows, PANEL), dtype)
            w_operand = T.alloc_fragment((columns, CHUNK), dtype)
            out_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            factor_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            out_factor_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            out_rows = T.alloc_fragment((rows, PANEL), dtype)
            last = T.alloc_local((1,), "float32")
            lengths = T.alloc_shared((MOST_RANKED,), "int32")
            chosen = T.alloc_shared((2,), "int32")
            place = T.alloc_local((2,), "int32")
            read_slot = T.alloc_var("int64", init=0)
            write_slot = T.alloc_var("int64", init=0)
            live = T.alloc_var("bool", init=True)
            starts = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout(
                {
                    v_shared: make_swizzled_layout(v_shared),
                    v_second_shared: make_swizzled_layout(v_second_shared),
                    v_third_shared: make_swizzled_layout(v_third_shared),
                    out_shared: make_swizzled_layout(out_shared),
                    out_odd_shared: make_swizzled_layout(out_odd_shared),
                    v_fragment: transposed_accumulator(columns),
                    out_rows: transposed_accumulator(columns),
                }
            )

            take_turn(cu_seqlens, bounds, cut_above)
            if split:
                find_segment(cu_seqlens, bounds, piece, segment, place)
                if has_checkpoints:
                    # The sequence, and its tokens before this segment: in registers, they spill.
                    if tx == 0:
                        chosen[0] = place[0]
                        chosen[1] = place[1] * segment * CHUNK
                    T.sync_threads()
            else:
                find_ranked(cu_seqlens, bounds, piece, lengths, chosen)
            sequence = place[0] if split else chosen[0]
            index = place[1] if split else 0
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            rest = whole_length - index * segment * CHUNK if split else whole_length
            sequence_begin = whole_begin + index * segment * CHUNK if split else whole_begin
            length = T.min(rest, segment * CHUNK) if split else whole_length
            first_slot = whole_begin // CHUNK + sequence + index * segment if split else whole_begin // CHUNK + sequence
            only = whole_length <= segment * CHUNK if split else True  # the sequence is one segment
            column_begin = v_slice * columns
            read_slot = T.cast(sequence, "int64")
            if pooled:
                read_slot = T.cast(indices[sequence], "int64")
                live = length > 0 and read_slot > T.cast(null_slot, "int64")
            elif split:
                live = index == 0 or length > 0  # else nobody's slot
            num_chunks = T.if_then_else(live, T.ceildiv(length, CHUNK), 0)

            if tx >= math_threads:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < math_threads + 32:
                    for step in T.serial(num_chunks):
                        stage = step % stages
                        T.barrier_wait(empty[stage], ((step // stages) & 1) ^ 1)
                        token = sequence_begin + step * CHUNK
                        slot = first_slot + step
                        T.tma_copy(
                            k[token : token + CHUNK, head // heads_per_k, 0:HALF],
                            k_shared[stage, :, :],
                            barrier=full[stage],
                            leader_scope_threads=32,
                        )
                        if wide:
                            T.tma_copy(
                                k[token : token + CHUNK, head // heads_per_k, HALF:head_k],
                                k_high_shared[stage, :, :],
                                barrier=full[stage],
                                leader_scope_threads=32,
                            )
                        T.tma_copy(
                            q[token : token + CHUNK, head // heads_per_q, 0:HALF],
                            q_shared[stage, :, :],
                            barrier=full[stage],
                            leader_scope_threads=32,
                        )
                        if wide:
                            T.tma_copy(
                                q[token : token + CHUNK, head // heads_per_q, HALF:head_k],
                                q_high_shared[stage, :, :],
                                barrier=full[stage],
                                leader_scope_threads=32,
                            )
                        if stage == 0:
                            load_v(v, v_shared, full, 0, token, head, column_begin)
                        elif stage == 1:
                            load_v(v, v_second_shared, full, 1, token, head, column_begin)
                        else:
                            load_v(v, v_third_shared, full, 2, token, head, column_begin)
                        T.tma_copy(
                            vectors[slot, head, :, :], vector_shared[stage, :, :], barrier=full[stage], leader_scope_threads=32
                        )
                        T.tma_copy(
                            tiles[slot, head, TILE_Z, :, :], z_shared[stage, :, :], barrier=full[stage], leader_scope_threads=32
                        )
                        if wide:
                            T.tma_copy(
                                tiles[slot, head, TILE_Z_HIGH, :, :],
                                z_high_shared[stage, :, :],
                                barrier=full[stage],
                                leader_scope_threads=32,
                            )
                        T.tma_copy(
                            tiles[slot, head, TILE_R, :, :], r_shared[stage, :, :], barrier=full[stage], leader_scope_threads=32
                        )
                        # By all lanes: whichever lane was elected for the copies announced their bytes before its own arrival.
                        T.barrier_arrive(full[stage])
                elif tx < math_threads + 64:
                    for step in T.serial(T.if_then_else(live, length // CHUNK, 0)):
                        token = sequence_begin + step * CHUNK
                        T.barrier_wait(out_full[step % 2], (step // 2) & 1)
                        if step % 2 == 0:
                            store(out_shared, out, token, head, column_begin)
                        else:
                            store(out_odd_shared, out, token, head, column_begin)
                        T.tma_store_wait(0)
                        T.barrier_arrive(out_empty[step % 2])
            else:
                T.set_max_nreg(MATH_REGISTERS, 1)
                T.clear(state_fragment)
                if wide:
                    T.clear(state_high_fragment)
                if split:
                    if live and not only:
                        for i, j in T.Parallel(columns, HALF):
                            state_fragment[i, j] = segment_starts[piece, head, column_begin + i, j]
                        if wide:
                            for i, j in T.Parallel(columns, HALF):
                                state_high_fragment[i, j] = segment_starts[piece, head, column_begin + i, HALF + j]
                if has_initial:
                    starts = (live and only) if split else live
                    if has_mask:
                        if (live and only) if split else live:
                            starts = mask[sequence]
                    if starts:
                        load_state(initial_state, read_slot, head, column_begin, state_fragment, state_high_fragment)

                T.copy(state_fragment, state_operand)
                if wide:
                    T.copy(state_high_fragment, state_high_operand)
                if num_chunks > 0:
                    T.barrier_wait(full[0], 0)
                read_ahead(0, v_shared, v_second_shared, v_third_shared, vector_shared, v_fragment, factor_fragment, last)
                T.wgmma_gemm(state_operand, k_shared[0, :, :], u_fragment, transpose_B=True, clear_accum=True, policy=ROWS)
                if wide:
                    T.wgmma_gemm(state_high_operand, k_high_shared[0, :, :], u_fragment, transpose_B=True, policy=ROWS)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(u_fragment, num_regs=ACCUMULATOR)
                for step in T.serial(num_chunks):
                    stage = step % stages
                    following = (step + 1) % stages
                    valid = T.min(length - step * CHUNK, CHUNK)
                    T.wgmma_gemm(
                        state_operand, q_shared[stage, :, :], out_fragment, transpose_B=True, clear_accum=True, policy=ROWS
                    )
                    if wide:
                        T.wgmma_gemm(state_high_operand, q_high_shared[stage, :, :], out_fragment, transpose_B=True, policy=ROWS)
                    for i, j in T.Parallel(columns, CHUNK):
                        out_factor_fragment[i, j] = vector_shared[stage, ROW_STATE_QUERY, j]
                    # Nothing to wait for. It tells so to the assembler, which would wait for Q S where U and S are read.
                    T.wait_wgmma(halves)
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
                    for i, j in T.Parallel(columns, HALF):
                        state_fragment[i, j] *= last[0]
                    if wide:
                        for i, j in T.Parallel(columns, HALF):
                            state_high_fragment[i, j] *= last[0]
                    T.wgmma_gemm(w_operand, z_shared[stage, :, :], state_fragment, policy=ROWS)
                    if wide:
                        T.wgmma_gemm(w_operand, z_high_shared[stage, :, :], state_high_fragment, policy=ROWS)
                    T.wait_wgmma(halves)  # Q S
                    T.warpgroup_fence_operand(out_fragment, num_regs=ACCUMULATOR)
                    for i, j in T.Parallel(columns, CHUNK):
                        out_fragment[i, j] *= out_factor_fragment[i, j]
                    T.wgmma_gemm(w_operand, r_shared[stage, :, :], out_fragment, transpose_B=True, policy=ROWS)
                    # What the next chunk reads from shared memory before its first product.
                    if step + 1 < num_chunks:
                        T.barrier_wait(full[following], ((step + 1) // stages) & 1)
                    read_ahead(
                        following, v_shared, v_second_shared, v_third_shared, vector_shared, v_fragment, factor_fragment, last
                    )
                    # U of the next chunk; behind the last one, of whatever lies there, for nobody.
                    T.wait_wgmma(halves)  # the lower half of the state
                    T.warpgroup_fence_operand(state_fragment, num_regs=ACCUMULATOR)
                    T.copy(state_fragment, state_operand)
                    T.wgmma_gemm(
                        state_operand, k_shared[following, :, :], u_fragment, transpose_B=True, clear_accum=True, policy=ROWS
                    )
                    if wide:
                        T.wait_wgmma(2)  # the upper half
                        T.warpgroup_fence_operand(state_high_fragment, num_regs=ACCUMULATOR)
                        T.copy(state_high_fragment, state_high_operand)
                        T.wgmma_gemm(
                            state_high_operand, k_high_shared[following, :, :], u_fragment, transpose_B=True, policy=ROWS
                        )
                    T.wait_wgmma(halves)  # W R^T
                    T.warpgroup_fence_operand(out_fragment, num_regs=ACCUMULATOR)
                    for i, j in T.Parallel(columns, CHUNK):
                        out_rows[i // PANEL * CHUNK + j, i % PANEL] = out_fragment[i, j]
                    if valid == CHUNK:
                        T.barrier_wait(out_empty[step % 2], ((step // 2) & 1) ^ 1)
                        if step % 2 == 0:
                            T.copy(out_rows, out_shared)
                        else:
                            T.copy(out_rows, out_odd_shared)
                        T.fence_proxy_async()
                        T.barrier_arrive(out_full[step % 2])
                    if tx % 32 == 0:
                        T.barrier_arrive(empty[stage])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(u_fragment, num_regs=ACCUMULATOR)
                    if has_checkpoints:
                        if valid == CHUNK:
                            row = chosen[0]
                            done = chosen[1] + (step + 1) * CHUNK if split else (step + 1) * CHUNK
                            for column in T.serial(checkpoints):
                                if checkpoint_offsets[row, column] == done:
                                    write_slot = T.cast(checkpoint_slots[row, column], "int64")
                                    if write_slot > T.cast(null_slot, "int64"):
                                        store_state(
                                            final_state, write_slot, head, column_begin, state_fragment, state_high_fragment
                                        )

                if num_chunks > 0:
                    begin = sequence_begin + (num_chunks - 1) * CHUNK
                    valid_rows = length - (num_chunks - 1) * CHUNK
                    if valid_rows < CHUNK:
                        for i, j in T.Parallel(columns, CHUNK):
                            if j < valid_rows:
                                row = T.cast(begin + j, "int64")
                                out[row, head, column_begin + i] = out_rows[i // PANEL * CHUNK + j, i % PANEL]

                if split:
                    live = live and rest <= segment * CHUNK  # the last segment
                if has_final:
                    # Once more from memory: the loop has no register to keep them in.
                    ending = place[0] if split and not has_checkpoints else chosen[0]
                    write_slot = T.cast(ending, "int64")
                    if pooled and not has_final_indices:
                        write_slot = T.cast(indices[ending], "int64")
                    if has_final_indices:
                        if live:
                            write_slot = T.cast(final_indices[ending], "int64")
                            live = write_slot > T.cast(null_slot, "int64")
                    if live:
                        store_state(final_state, write_slot, head, column_begin, state_fragment, state_high_fragment)

    return chunk_chain
