"""The chunk kernel in one launch: a cluster of blocks for every sequence and state head of 128 key and 128 value columns.

The first two blocks run the chain of 64 V columns each, as _chunk_chain does. Every block of the cluster (`makers` of them) makes
the tiles R and Z of every makers-th chunk (_chunk_makers) and gives them to both chains: nothing of them passes through global
memory. With many sequences and heads two blocks each fill the device. With few ones a third or fourth block, on an SM that else
idles, leaves the makers of each block more time for a chunk.

| warpgroup | role | registers |
|---|---|---|
| 0 | chain: S^T in registers; idle in the blocks behind the first two | 224 |
| 1 | inverse: X of this block's chunks | 120 |
| 2 | product: R, Z and row factors of this block's chunks | 128 |
| 3 | copies: warp 0 K, Q, V of every chunk; 1 the output; 2 K and Q for the makers, tiles to other blocks; 3 gates | 40 |

`stage` = chunk % 2 also names the slot of the ring. `turn` counts the chunks that a block makes. A chain's block makes tiles in
the slot where its chain reads them, when both chains have taken what lay there. Another's ring holds its own tiles on their way:
they are made when what was sent two turns ago has arrived, and sent when both chains have room.

| barrier | waits | arrives (count) |
|---|---|---|
| full[stage] | chain | warp 0 (32) + bytes of K, Q, V |
| empty[stage] | warp 0 | one lane of every chain warp (4), Q S done: V is read and U made one chunk earlier |
| ready[stage] | chain | in the block that made it: 2 lanes of warp 2; else: 2 copies that announce themselves + their bytes |
| taken | of the block that fills the slot next: product, or warp 2 where there is no chain | one lane of every chain warp (8) |
| room | product, where there is no chain | warp 2 (32) behind `taken`: what it sent before has arrived |
| made | warp 2 | product threads (128) |
| out_full | warp 1 | chain threads (128) |
| out_empty | chain | warp 1 (32), when the copy has read the staged rows |
| k_full[turn % 2] | inverse, product | warp 2 (32) + bytes of K |
| k_empty[turn % 2] | warp 2 | one lane of every product warp (4), after inverse |
| q_full | product | warp 2 (32) + bytes of Q |
| q_empty | warp 2 | one lane of every product warp (4) |
| gates_full[turn % 2] | inverse, product | warp 3 (32) |
| gates_free[turn % 2] | warp 3 | one lane of every product warp (4), after inverse |
| factors_full[turn % 2] | product | inverse threads (128), its factors in place of beta |
| x_full[turn % 2] | product | inverse threads (128) |
| x_free[turn % 2] | inverse | one lane of every product warp (4) |
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl.chunk.makers import CHAINS, KEY_BUFFERS, LOWER_PITCH, gate_role, inverse_role, product_role, ring_slot
from kernels_tl.chunk.prepare import DIAGONAL_PITCH
from kernels_tl.chunk.state_chain import ACCUMULATOR, PANEL, ROWS, transposed_accumulator
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
    gate_tensor,
    row_tensor,
    state_storer,
    state_tensor,
    token_tensor,
    turn,
)

THREADS = 512
STAGES = 2
CHAIN_REGISTERS = 224
INVERSE_REGISTERS = 120
PRODUCT_REGISTERS = 128  # what all begin with; said all the same, else the assembler gives them fewer
COPY_REGISTERS = 40
FUSED_REGISTERS = 128 * (CHAIN_REGISTERS + INVERSE_REGISTERS + PRODUCT_REGISTERS + COPY_REGISTERS)
_INVERSE, _PRODUCT, _COPY = 128, 256, 384  # first threads of the warpgroups
_LOAD, _STORE, _GIVE, _GATE = 384, 416, 448, 480  # and of the copying warps
RING_TILES = 3  # R, Z's halves
RING_COPIES = 2  # the tiles, the row factors
_TILE_BYTES = CHUNK * HALF * 2
_TILES = 4 * STAGES + STAGES + 1 + STAGES * RING_TILES + 2 * KEY_BUFFERS + 2 + 3  # K, Q; V; out; ring; makers' K, Q; L, X
_FLOATS = STAGES * NUM_VECTORS * CHUNK + CHUNK * DIAGONAL_PITCH + 9 * CHUNK + MOST_RANKED
FUSED_BYTES = _TILES * _TILE_BYTES + 4 * _FLOATS + 1024  # barriers


def fused(problem: ChunkProblem, makers: int = CHAINS, decides: bool = False) -> Any:
    """The prim_func `chunk_fused`; makers: blocks of a cluster, two or more.

    decides: works only where no sequence has more than `cut_above` tokens, which else is not read.
    """
    head_k, head_v, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    heads_per_q = heads // problem.num_q_heads
    heads_per_k = heads // problem.num_k_heads
    heads_per_v = heads // problem.num_v_heads
    dtype = problem.dtype
    has_gate, pooled = problem.gate_dtype is not None, problem.pooled
    raw_gate = has_gate and problem.use_gate
    normalize = problem.use_qk_l2norm
    v_first = problem.state_v_first
    has_initial, has_final, has_mask = problem.has_initial_state, problem.has_final_state, problem.has_mask
    has_final_indices, has_checkpoints = problem.has_final_indices, problem.has_checkpoints
    columns = PANEL
    final_dtype = problem.state_dtype if pooled else "float32"
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
    checkpoints = T.dynamic("num_checkpoints")
    checkpoint_offset_type = checkpoint_tensor(checkpoints, bounds, problem, "int32")
    checkpoint_slot_type = checkpoint_tensor(checkpoints, bounds, problem, problem.index_dtype)
    out_type = token_tensor("out", num_tokens, heads, head_v, dtype)

    take_turn = turn(decides, cuts=False)
    store_state = state_storer(problem, columns, final_dtype)
    gates = gate_role(problem, makers)
    inverse = inverse_role(problem, makers)
    product = product_role(problem, makers)

    @T.macro
    def start_state(source, starts, slot, head, column_begin, fragment, first):
        # Chosen element by element: of two branches, one that loads and one that clears, the loop's registers are spilled.
        for i, j in T.Parallel(columns, HALF):
            if v_first:
                fragment[i, j] = T.if_then_else(starts, T.cast(source[slot, head, column_begin + i, first + j], "float32"), 0.0)
            else:
                fragment[i, j] = T.if_then_else(starts, T.cast(source[slot, head, first + j, column_begin + i], "float32"), 0.0)

    @T.macro
    def load_halves(source, head, token, low, high, barriers, buffer):
        end = token + CHUNK
        T.tma_copy(source[token:end, head, 0:HALF], low[buffer, :, :], barrier=barriers[buffer], leader_scope_threads=32)
        T.tma_copy(source[token:end, head, HALF:head_k], high[buffer, :, :], barrier=barriers[buffer], leader_scope_threads=32)

    @T.macro
    def load_queries(source, head, token, low, high, barriers):
        end = token + CHUNK
        T.tma_copy(source[token:end, head, 0:HALF], low, barrier=barriers[0], leader_scope_threads=32)
        T.tma_copy(source[token:end, head, HALF:head_k], high, barrier=barriers[0], leader_scope_threads=32)

    @T.macro
    def send(ring, vector_ring, slot, remote_slot, ready, block):
        T.copy_cluster(ring[slot, :, :, :], ring[remote_slot, :, :, :], dst_block=block, remote_barrier=ready[remote_slot])
        T.copy_cluster(
            vector_ring[slot, :, :], vector_ring[remote_slot, :, :], dst_block=block, remote_barrier=ready[remote_slot]
        )

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
        checkpoint_offsets: checkpoint_offset_type,
        checkpoint_slots: checkpoint_slot_type,
        scale: T.float32,
        null_slot: T.int32,
        cut_above: T.int32,
    ):
        # Sequences slowest: blocks start in this order, those of the longest sequence first.
        with T.Kernel(makers, heads, bounds - 1, threads=THREADS, cluster_dims=(makers, 1, 1)) as (rank, head, place):
            k_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
            k_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
            q_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
            q_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
            v_shared = T.alloc_shared((CHUNK, PANEL), dtype)  # of even chunks; matrix loads ignore the offset of a region
            v_odd_shared = T.alloc_shared((CHUNK, PANEL), dtype)
            out_shared = T.alloc_shared((CHUNK, PANEL), dtype)
            ring = T.alloc_shared((STAGES, RING_TILES, CHUNK, HALF), dtype)
            vector_ring = T.alloc_shared((STAGES, NUM_VECTORS, CHUNK), "float32")
            maker_k_shared = T.alloc_shared((KEY_BUFFERS, CHUNK, HALF), dtype)
            maker_k_high_shared = T.alloc_shared((KEY_BUFFERS, CHUNK, HALF), dtype)
            maker_q_shared = T.alloc_shared((CHUNK, HALF), dtype)
            maker_q_high_shared = T.alloc_shared((CHUNK, HALF), dtype)
            lower_shared = T.alloc_shared((CHUNK, LOWER_PITCH), inverse_dtype)
            x_shared = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            diagonal_shared = T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32")
            sum_shared = T.alloc_shared((2, CHUNK), "float32")
            beta_shared = T.alloc_shared((2, CHUNK), "float32")  # from the inverse on: the factors of Z and R
            k_factor_shared = T.alloc_shared((2, CHUNK), "float32")
            k_norm_shared = T.alloc_shared((2, CHUNK), "float32")
            q_factor_shared = T.alloc_shared((CHUNK,), "float32")
            lengths = T.alloc_shared((MOST_RANKED,), "int32")
            chosen = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier([32] * STAGES)
            empty = T.alloc_barrier([4] * STAGES)
            ready = T.alloc_cluster_barrier([RING_COPIES] * STAGES)
            taken = T.alloc_cluster_barrier([4 * CHAINS])
            room = T.alloc_barrier(32)
            made = T.alloc_barrier(128)
            out_full = T.alloc_barrier(128)
            out_empty = T.alloc_barrier(32)
            k_full = T.alloc_barrier([32] * KEY_BUFFERS)
            k_empty = T.alloc_barrier([4] * KEY_BUFFERS)
            q_full = T.alloc_barrier([32])
            q_empty = T.alloc_barrier(4)
            gates_full = T.alloc_barrier([32] * 2)
            gates_free = T.alloc_barrier([4] * 2)
            factors_full = T.alloc_barrier([128] * 2)
            x_full = T.alloc_barrier([128] * 2)
            x_free = T.alloc_barrier([4] * 2)
            state_fragment = T.alloc_fragment((columns, HALF), "float32")
            state_high_fragment = T.alloc_fragment((columns, HALF), "float32")
            state_operand = T.alloc_fragment((columns, HALF), dtype)
            state_high_operand = T.alloc_fragment((columns, HALF), dtype)
            u_fragment = T.alloc_fragment((columns, CHUNK), "float32")
            v_fragment = T.alloc_fragment((CHUNK, PANEL), dtype)
            w_operand = T.alloc_fragment((columns, CHUNK), dtype)
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
                    maker_q_shared: make_swizzled_layout(maker_q_shared),
                    maker_q_high_shared: make_swizzled_layout(maker_q_high_shared),
                    v_fragment: transposed_accumulator(columns),
                    out_rows: transposed_accumulator(columns),
                }
            )

            take_turn(cu_seqlens, bounds, cut_above)
            find_ranked(cu_seqlens, bounds, place, lengths, chosen)
            sequence = chosen[0]
            sequence_begin = T.cast(cu_seqlens[sequence], "int32")
            length = T.cast(cu_seqlens[sequence + 1], "int32") - sequence_begin
            column_begin = rank * columns
            read_slot = T.cast(sequence, "int64")
            if pooled:
                read_slot = T.cast(indices[sequence], "int64")
                live = length > 0 and read_slot > T.cast(null_slot, "int64")
            num_chunks = T.if_then_else(live, T.ceildiv(length, CHUNK), 0)
            turns = (num_chunks + makers - 1 - rank) // makers
            # What a block without a chain skips: whole loops, whose bodies the compiler then sees as they are.
            chained = makers == CHAINS or rank < CHAINS
            chain_chunks = num_chunks if makers == CHAINS else T.if_then_else(chained, num_chunks, 0)

            if tx < _INVERSE:
                T.set_max_nreg(CHAIN_REGISTERS, 1)
                starts = has_initial and live and chained
                if has_initial and has_mask:
                    if live and chained:
                        starts = mask[sequence]
                if has_initial:
                    start_state(initial_state, starts, read_slot, head, column_begin, state_fragment, 0)
                    start_state(initial_state, starts, read_slot, head, column_begin, state_high_fragment, HALF)
                else:
                    T.clear(state_fragment)
                    T.clear(state_high_fragment)
                T.copy(state_fragment, state_operand)
                T.copy(state_high_fragment, state_high_operand)
                if chain_chunks > 0:
                    T.barrier_wait(full[0], 0)
                T.copy(v_shared, v_fragment)
                T.wgmma_gemm(state_operand, k_shared[0, :, :], u_fragment, transpose_B=True, clear_accum=True, policy=ROWS)
                T.wgmma_gemm(state_high_operand, k_high_shared[0, :, :], u_fragment, transpose_B=True, policy=ROWS)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(u_fragment, num_regs=ACCUMULATOR)
                for step in T.serial(chain_chunks):
                    stage = step & 1
                    following = stage ^ 1
                    valid = T.min(length - step * CHUNK, CHUNK)
                    T.barrier_wait(ready[stage], (step >> 1) & 1)
                    # Loads queue behind products: what W needs is read first.
                    for i, j in T.Parallel(columns, CHUNK):
                        factor_fragment[i, j] = vector_ring[stage, ROW_STATE_KEY, j]
                    last[0] = vector_ring[stage, ROW_LAST, 0]
                    T.wgmma_gemm(
                        state_operand, q_shared[stage, :, :], out_fragment, transpose_B=True, clear_accum=True, policy=ROWS
                    )
                    T.wgmma_gemm(state_high_operand, q_high_shared[stage, :, :], out_fragment, transpose_B=True, policy=ROWS)
                    # Nothing to wait for. It tells so to the assembler, which would wait for Q S where U and S are read.
                    T.wait_wgmma(2)
                    T.warpgroup_fence_operand(u_fragment, num_regs=ACCUMULATOR)
                    if valid == CHUNK:
                        for i, j in T.Parallel(columns, CHUNK):
                            w_operand[i, j] = T.cast(v_fragment[j, i], "float32") - factor_fragment[i, j] * u_fragment[i, j]
                    else:
                        for i, j in T.Parallel(columns, CHUNK):
                            w_operand[i, j] = T.if_then_else(
                                j < valid, T.cast(v_fragment[j, i], "float32") - factor_fragment[i, j] * u_fragment[i, j], 0.0
                            )
                    for i, j in T.Parallel(columns, CHUNK):
                        out_factor_fragment[i, j] = vector_ring[stage, ROW_STATE_QUERY, j]
                    for i, j in T.Parallel(columns, HALF):
                        state_fragment[i, j] *= last[0]
                    for i, j in T.Parallel(columns, HALF):
                        state_high_fragment[i, j] *= last[0]
                    T.wgmma_gemm(w_operand, ring[stage, TILE_Z, :, :], state_fragment, policy=ROWS)
                    T.wgmma_gemm(w_operand, ring[stage, TILE_Z_HIGH, :, :], state_high_fragment, policy=ROWS)
                    T.wait_wgmma(2)  # Q S
                    T.warpgroup_fence_operand(out_fragment, num_regs=ACCUMULATOR)
                    for i, j in T.Parallel(columns, CHUNK):
                        out_fragment[i, j] *= out_factor_fragment[i, j]
                    T.wgmma_gemm(w_operand, ring[stage, TILE_R, :, :], out_fragment, transpose_B=True, policy=ROWS)
                    if tx % 32 == 0:
                        T.barrier_arrive(empty[stage])
                    if step + 1 < chain_chunks:
                        T.barrier_wait(full[following], ((step + 1) >> 1) & 1)
                    if following == 0:
                        T.copy(v_shared, v_fragment)
                    else:
                        T.copy(v_odd_shared, v_fragment)
                    # U of the next chunk; behind the last one, of whatever lies there, for nobody.
                    T.wait_wgmma(2)  # the lower half of the state
                    T.warpgroup_fence_operand(state_fragment, num_regs=ACCUMULATOR)
                    T.copy(state_fragment, state_operand)
                    T.wgmma_gemm(
                        state_operand, k_shared[following, :, :], u_fragment, transpose_B=True, clear_accum=True, policy=ROWS
                    )
                    T.wait_wgmma(2)  # the upper half
                    T.warpgroup_fence_operand(state_high_fragment, num_regs=ACCUMULATOR)
                    T.copy(state_high_fragment, state_high_operand)
                    T.wgmma_gemm(state_high_operand, k_high_shared[following, :, :], u_fragment, transpose_B=True, policy=ROWS)
                    T.wait_wgmma(2)  # W R^T
                    T.warpgroup_fence_operand(out_fragment, num_regs=ACCUMULATOR)
                    if tx % 32 == 0:
                        T.mbarrier_arrive(taken[0], (step + 2) % makers)  # whose block fills it next
                    for i, j in T.Parallel(columns, CHUNK):
                        out_rows[j, i] = out_fragment[i, j]
                    if valid == CHUNK:
                        T.barrier_wait(out_empty, (step & 1) ^ 1)
                        T.copy(out_rows, out_shared)
                        T.fence_proxy_async()
                        T.barrier_arrive(out_full)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(u_fragment, num_regs=ACCUMULATOR)
                    if has_checkpoints:
                        if valid == CHUNK:
                            for column in T.serial(checkpoints):
                                if checkpoint_offsets[chosen[0], column] == (step + 1) * CHUNK:
                                    write_slot = T.cast(checkpoint_slots[chosen[0], column], "int64")
                                    if write_slot > T.cast(null_slot, "int64"):
                                        store_state(
                                            final_state, write_slot, head, column_begin, state_fragment, state_high_fragment
                                        )

                T.sync_warp()
                T.cluster_arrive()  # before the stores below: it waits for those above
                if chain_chunks > 0:
                    begin = sequence_begin + (num_chunks - 1) * CHUNK
                    valid_rows = length - (num_chunks - 1) * CHUNK
                    if valid_rows < CHUNK:
                        for i, j in T.Parallel(columns, CHUNK):
                            if j < valid_rows:
                                out[T.cast(begin + j, "int64"), head, column_begin + i] = out_rows[j, i]

                live = live and chained
                if has_final:
                    # Once more from memory: the loop has no register to keep them in.
                    ending = chosen[0]
                    write_slot = T.cast(ending, "int64")
                    if pooled and not has_final_indices:
                        write_slot = T.cast(indices[ending], "int64")
                    if has_final_indices:
                        if live:
                            write_slot = T.cast(final_indices[ending], "int64")
                            live = write_slot > T.cast(null_slot, "int64")
                    if live:
                        store_state(final_state, write_slot, head, column_begin, state_fragment, state_high_fragment)
            elif tx < _PRODUCT:
                T.set_max_nreg(INVERSE_REGISTERS, 0)
                inverse(
                    tx - _INVERSE, turns, rank, length, maker_k_shared, maker_k_high_shared, lower_shared, x_shared,
                    diagonal_shared, beta_shared, k_factor_shared, k_norm_shared, k_full, gates_full, factors_full,
                    x_full, x_free,
                )  # fmt: skip
            elif tx < _COPY:
                T.set_max_nreg(PRODUCT_REGISTERS, 0)
                product(
                    tx - _PRODUCT, turns, rank, scale, maker_k_shared, maker_k_high_shared, maker_q_shared,
                    maker_q_high_shared, x_shared, sum_shared, beta_shared, k_factor_shared, q_factor_shared,
                    ring, vector_ring, k_full, k_empty, q_full, q_empty, gates_full, gates_free,
                    factors_full, x_full, x_free, taken, room, made,
                )  # fmt: skip
            else:
                T.set_max_nreg(COPY_REGISTERS, 0)
                if tx < _STORE:
                    for step in T.serial(chain_chunks):
                        stage = step & 1
                        token = sequence_begin + step * CHUNK
                        T.barrier_wait(empty[stage], ((step >> 1) & 1) ^ 1)
                        load_halves(k, head // heads_per_k, token, k_shared, k_high_shared, full, stage)
                        load_halves(q, head // heads_per_q, token, q_shared, q_high_shared, full, stage)
                        if stage == 0:
                            T.tma_copy(
                                v[token : token + CHUNK, head // heads_per_v, column_begin : column_begin + PANEL],
                                v_shared,
                                barrier=full[0],
                                leader_scope_threads=32,
                            )
                        else:
                            T.tma_copy(
                                v[token : token + CHUNK, head // heads_per_v, column_begin : column_begin + PANEL],
                                v_odd_shared,
                                barrier=full[1],
                                leader_scope_threads=32,
                            )
                        # By all lanes: whichever lane was elected for the copies announced their bytes before its own arrival.
                        T.barrier_arrive(full[stage])
                elif tx < _GIVE:
                    for step in T.serial(T.if_then_else(live and chained, length // CHUNK, 0)):
                        token = sequence_begin + step * CHUNK
                        T.barrier_wait(out_full, step & 1)
                        T.tma_copy(
                            out_shared,
                            out[token : token + CHUNK, head, column_begin : column_begin + PANEL],
                            leader_scope_threads=32,
                        )
                        T.tma_store_wait(0)
                        T.barrier_arrive(out_empty)
                    # Rows that nobody else writes: of padding sequences, and a share of those behind the last sequence.
                    if chained and not live:
                        for row in T.serial(length):
                            for half in T.unroll(2):
                                out[T.cast(sequence_begin + row, "int64"), head, column_begin + tx - _STORE + 32 * half] = 0
                    used = T.cast(cu_seqlens[bounds - 1], "int32")
                    for round in T.serial(T.if_then_else(chained, T.ceildiv(T.max(num_tokens - used - place, 0), bounds - 1), 0)):
                        row = used + place + round * (bounds - 1)
                        for half in T.unroll(2):
                            out[T.cast(row, "int64"), head, column_begin + tx - _STORE + 32 * half] = 0
                elif tx < _GATE:
                    for turn in T.serial(T.min(turns, KEY_BUFFERS)):
                        token = sequence_begin + (makers * turn + rank) * CHUNK
                        load_halves(k, head // heads_per_k, token, maker_k_shared, maker_k_high_shared, k_full, turn)
                        T.barrier_arrive(k_full[turn])
                        if turn == 0:
                            load_queries(q, head // heads_per_q, token, maker_q_shared, maker_q_high_shared, q_full)
                            T.barrier_arrive(q_full[0])
                    for turn in T.serial(turns):
                        token = sequence_begin + (makers * turn + rank) * CHUNK
                        if turn + 1 < turns:
                            T.barrier_wait(q_empty, turn & 1)
                            load_queries(
                                q, head // heads_per_q, token + makers * CHUNK, maker_q_shared, maker_q_high_shared, q_full
                            )
                            T.barrier_arrive(q_full[0])
                        if turn + KEY_BUFFERS < turns:  # free before the tiles are made
                            buffer = turn % KEY_BUFFERS
                            ahead = token + makers * KEY_BUFFERS * CHUNK
                            T.barrier_wait(k_empty[buffer], (turn // KEY_BUFFERS) & 1)
                            load_halves(k, head // heads_per_k, ahead, maker_k_shared, maker_k_high_shared, k_full, buffer)
                            T.barrier_arrive(k_full[buffer])
                        T.barrier_wait(made, turn & 1)
                        slot = ring_slot(makers, rank, turn)
                        if makers == CHAINS:
                            if tx < _GIVE + RING_COPIES:
                                T.barrier_arrive(ready[slot])
                            send(ring, vector_ring, slot, slot, ready, rank ^ 1)
                        elif rank < CHAINS:
                            if tx < _GIVE + RING_COPIES:
                                T.barrier_arrive(ready[slot])
                            send(ring, vector_ring, slot, slot, ready, rank ^ 1)
                        else:
                            T.barrier_wait(taken[0], turn & 1)
                            T.barrier_arrive(room)
                            send(ring, vector_ring, slot, (makers * turn + rank) & 1, ready, 0)
                            send(ring, vector_ring, slot, (makers * turn + rank) & 1, ready, 1)
                else:
                    gates(
                        tx - _GATE, turns, rank, sequence_begin, length, head, g, beta, a_log, dt_bias, sum_shared, beta_shared,
                        gates_full, gates_free,
                    )  # fmt: skip
            T.sync_warp()
            if tx >= _INVERSE:
                T.cluster_arrive()
            T.cluster_wait()  # the other block may still send to this one

    return chunk_fused
