"""The chunk kernel in one launch: a cluster of blocks per sequence and state head of 128 key and 128 value columns.

The first two blocks run the chain of 64 V columns each (state_chain.py). Every block of the cluster (`makers` of them) makes the
tiles R and Z of every makers-th chunk (makers.py, inverse.py, product.py) and gives them to both chains: they never pass through
global memory. With many sequences and heads two blocks each fill the device. With few, a third or fourth block, on an SM that
would idle, leaves the makers of each block more time per chunk.

| warpgroup | role | registers |
|---|---|---|
| 0 | chain: S^T in registers; idle in the blocks after the first two | 224 |
| 1 | inverse: X of this block's chunks | 120 |
| 2 | product: R, Z and row factors of this block's chunks | 128 |
| 3 | copies: warp 0 K, Q, V of every chunk; 1 the output; 2 K and Q for the makers, tiles to other blocks; 3 gates | 40 |

`stage` = chunk % 2 is also the slot of the ring. `turn` counts the chunks that a block makes. A chain's block makes tiles in the
slot where its chain reads them, once both chains have taken the previous ones. The ring of a block without a chain holds its own
tiles on their way: they are made once the tiles of two turns ago have arrived, and sent once both chains have room.

| barrier | waits | arrives (count) |
|---|---|---|
| full[stage] | chain | warp 0 (32) + bytes of K, Q, V |
| empty[stage] | warp 0 | one lane of every chain warp (4), Q S done: V is read and U made one chunk earlier |
| ready[stage] | chain | in the maker's block: 2 lanes of warp 2; else 2 copies that announce themselves + their bytes |
| taken | in the block that fills the slot next: product, or warp 2 where there is no chain | one lane of every chain warp (8) |
| room | product, where there is no chain | warp 2 (32) after `taken`: the tiles it sent before have arrived |
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

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl.chunk.inverse import inverse_role
from kernels_tl.chunk.makers import (
    CHAINS,
    KEY_BUFFERS,
    RING_TILES,
    STAGES,
    MakerWork,
    gate_role,
    maker_allocation,
    ring_allocation,
    ring_slot,
)
from kernels_tl.chunk.product import product_role
from kernels_tl.chunk.state_chain import ACCUMULATOR, PANEL, chain_macros, store_macros, transposed_accumulator
from kernels_tl.chunk.tile_math import DIAGONAL_PITCH
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
    Tensors,
    checkpoint_tensor,
    cu_seqlens_tensor,
    exit_macro,
    find_ranked,
    gate_tensor,
    row_tensor,
    state_tensor,
    token_tensor,
)

THREADS = 512
CHAIN_REGISTERS = 224
INVERSE_REGISTERS = 120
PRODUCT_REGISTERS = 128  # what all warpgroups begin with; set all the same, else the assembler gives them fewer
COPY_REGISTERS = 40
FUSED_REGISTERS = 128 * (CHAIN_REGISTERS + INVERSE_REGISTERS + PRODUCT_REGISTERS + COPY_REGISTERS)
_INVERSE, _PRODUCT, _COPY = 128, 256, 384  # first threads of the warpgroups
_LOAD, _STORE, _GIVE, _GATE = 384, 416, 448, 480  # and of the copying warps
RING_COPIES = 2  # the tiles, the row factors
_TILE_BYTES = CHUNK * HALF * 2
_TILES = 4 * STAGES + STAGES + 1 + STAGES * RING_TILES + 2 * KEY_BUFFERS + 2 + 3  # K, Q; V; out; ring; makers' K, Q; L, X
_FLOATS = STAGES * NUM_VECTORS * CHUNK + CHUNK * DIAGONAL_PITCH + 9 * CHUNK + MOST_RANKED
FUSED_BYTES = _TILES * _TILE_BYTES + 4 * _FLOATS + 1024  # barriers


@dataclass(frozen=True)
class FusedShared:
    """Shared memory and barriers between a block's chain and its copies."""

    k: Any  # [STAGES, 64 tokens, 64 key columns]
    k_high: Any
    q: Any
    q_high: Any
    v: tuple[Any, Any]  # of even and of odd chunks: matrix loads ignore the offset of a region
    full: Any
    empty: Any


@dataclass(frozen=True)
class StagedOutput:
    """The output of a full chunk on its way to global memory."""

    rows: Any  # [64 tokens, 64 columns]
    full: Any
    empty: Any


class ChainWork(NamedTuple):
    """The sequence that a block's chain works on."""

    head: Any
    column_begin: Any  # first V column
    token_begin: Any
    length: Any  # tokens
    num_chunks: Any  # 0 in blocks without a chain


def _load_macros(problem: ChunkProblem, makers: int) -> tuple[Any, Any]:
    """Macros for the warp that loads the chain's K, Q and V, and for the one that loads the makers' K and Q and sends tiles."""
    head_k, heads = problem.head_k_dim, problem.num_state_heads
    heads_per_q, heads_per_k = heads // problem.num_q_heads, heads // problem.num_k_heads
    heads_per_v = heads // problem.num_v_heads

    @T.macro
    def load(source, target, barriers, stage):
        T.tma_copy(source, target, barrier=barriers[stage], leader_scope_threads=32)

    @T.macro
    def load_halves(source, head, token, low, high, barriers, buffer):
        end = token + CHUNK
        load(source[token:end, head, 0:HALF], low[buffer, :, :], barriers, buffer)
        load(source[token:end, head, HALF:head_k], high[buffer, :, :], barriers, buffer)

    @T.macro
    def load_chunks(tensors, shared, chain):
        """Every chunk of the sequence."""
        head = chain.head
        columns = slice(chain.column_begin, chain.column_begin + PANEL)
        for step in T.serial(chain.num_chunks):
            stage = step & 1
            token = chain.token_begin + step * CHUNK
            T.barrier_wait(shared.empty[stage], ((step >> 1) & 1) ^ 1)
            load_halves(tensors.k, head // heads_per_k, token, shared.k, shared.k_high, shared.full, stage)
            load_halves(tensors.q, head // heads_per_q, token, shared.q, shared.q_high, shared.full, stage)
            if stage == 0:
                load(tensors.v[token : token + CHUNK, head // heads_per_v, columns], shared.v[0], shared.full, 0)
            else:
                load(tensors.v[token : token + CHUNK, head // heads_per_v, columns], shared.v[1], shared.full, 1)
            # All lanes arrive: the lane that was elected for the copies has announced their bytes before its own arrival.
            T.barrier_arrive(shared.full[stage])

    @T.macro
    def load_keys(tensors, head, token, shared, buffer):
        load_halves(tensors.k, head // heads_per_k, token, shared.k, shared.k_high, shared.k_full, buffer)
        T.barrier_arrive(shared.k_full[buffer])

    @T.macro
    def load_queries(tensors, head, token, shared):
        end = token + CHUNK
        load(tensors.q[token:end, head // heads_per_q, 0:HALF], shared.q, shared.q_full, 0)
        load(tensors.q[token:end, head // heads_per_q, HALF:head_k], shared.q_high, shared.q_full, 0)
        T.barrier_arrive(shared.q_full[0])

    @T.macro
    def send(ring, slot, remote_slot, block):
        T.copy_cluster(
            ring.tiles[slot, :, :, :], ring.tiles[remote_slot, :, :, :], dst_block=block, remote_barrier=ring.ready[remote_slot]
        )
        T.copy_cluster(
            ring.vectors[slot, :, :], ring.vectors[remote_slot, :, :], dst_block=block, remote_barrier=ring.ready[remote_slot]
        )

    @T.macro
    def give(thread, turn, rank, ring):
        """Sends the tiles of a turn to the chains of other blocks; a chain's own block has them in place."""
        T.barrier_wait(ring.made, turn & 1)
        slot = ring_slot(makers, rank, turn)
        if makers == CHAINS:
            if thread < RING_COPIES:
                T.barrier_arrive(ring.ready[slot])
            send(ring, slot, slot, rank ^ 1)
        elif rank < CHAINS:
            if thread < RING_COPIES:
                T.barrier_arrive(ring.ready[slot])
            send(ring, slot, slot, rank ^ 1)
        else:
            T.barrier_wait(ring.taken[0], turn & 1)
            T.barrier_arrive(ring.room)
            send(ring, slot, (makers * turn + rank) & 1, 0)
            send(ring, slot, (makers * turn + rank) & 1, 1)

    @T.macro
    def feed_makers(tensors, thread, work, shared, ring):
        """K and Q of the chunks that the block makes, two chunks and one chunk ahead, and their tiles to other blocks."""
        head = work.head
        for turn in T.serial(T.min(work.turns, KEY_BUFFERS)):
            token = work.token_begin + (makers * turn + work.rank) * CHUNK
            load_keys(tensors, head, token, shared, turn)
            if turn == 0:
                load_queries(tensors, head, token, shared)
        for turn in T.serial(work.turns):
            token = work.token_begin + (makers * turn + work.rank) * CHUNK
            if turn + 1 < work.turns:
                T.barrier_wait(shared.q_empty, turn & 1)
                load_queries(tensors, head, token + makers * CHUNK, shared)
            if turn + KEY_BUFFERS < work.turns:  # free before the tiles are made
                buffer = turn % KEY_BUFFERS
                T.barrier_wait(shared.k_empty[buffer], (turn // KEY_BUFFERS) & 1)
                load_keys(tensors, head, token + makers * KEY_BUFFERS * CHUNK, shared, buffer)
            give(thread, turn, work.rank, ring)

    return load_chunks, feed_makers


def _store_macros() -> tuple[Any, Any]:
    """Macros for the warp that stores the output of full chunks, and zeros."""

    @T.macro
    def store_outputs(out, staged, chain, num_full_chunks):
        for step in T.serial(num_full_chunks):
            token = chain.token_begin + step * CHUNK
            T.barrier_wait(staged.full, step & 1)
            T.tma_copy(
                staged.rows,
                out[token : token + CHUNK, chain.head, chain.column_begin : chain.column_begin + PANEL],
                leader_scope_threads=32,
            )
            T.tma_store_wait(0)
            T.barrier_arrive(staged.empty)

    @T.macro
    def zero_row(out, row, head, column):
        for half in T.unroll(2):
            out[T.cast(row, "int64"), head, column + 32 * half] = 0

    return store_outputs, zero_row


class _ChainMacros(NamedTuple):
    """Steps of the chain's warpgroup."""

    start_state: Any
    begin: Any
    run_chunk: Any


def _chain_macros(problem: ChunkProblem, makers: int) -> _ChainMacros:
    v_first, columns = problem.state_v_first, PANEL
    steps = chain_macros(problem, columns)

    @T.macro
    def start_state(source, starts, slot, chain, fragment, first):
        # Chosen element by element: with two branches, one that loads and one that clears, the loop's registers are spilled.
        for i, j in T.Parallel(columns, HALF):
            if v_first:
                fragment[i, j] = T.if_then_else(
                    starts, T.cast(source[slot, chain.head, chain.column_begin + i, first + j], "float32"), 0.0
                )
            else:
                fragment[i, j] = T.if_then_else(
                    starts, T.cast(source[slot, chain.head, first + j, chain.column_begin + i], "float32"), 0.0
                )

    @T.macro
    def begin(shared, chain, registers):
        """U^T of the first chunk."""
        steps.round_state(registers)
        if chain.num_chunks > 0:
            T.barrier_wait(shared.full[0], 0)
        T.copy(shared.v[0], registers.v)
        steps.multiply_state(registers, shared.k[0, :, :], shared.k_high[0, :, :], registers.u)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)

    @T.macro
    def run_chunk(shared, ring, staged, chain, step, valid, registers, output):
        tx = T.get_thread_binding()
        stage = step & 1
        following = stage ^ 1
        T.barrier_wait(ring.ready[stage], (step >> 1) & 1)
        # Loads wait for products that were issued before them: what W needs is read first.
        for i, j in T.Parallel(columns, CHUNK):
            registers.factor[i, j] = ring.vectors[stage, ROW_STATE_KEY, j]
        registers.last[0] = ring.vectors[stage, ROW_LAST, 0]
        steps.multiply_state(registers, shared.q[stage, :, :], shared.q_high[stage, :, :], output.out)
        steps.make_valid_values(registers, valid)
        for i, j in T.Parallel(columns, CHUNK):
            output.factor[i, j] = ring.vectors[stage, ROW_STATE_QUERY, j]
        steps.decay_state(registers)
        steps.add_values(registers, ring.tiles[stage, TILE_Z, :, :], ring.tiles[stage, TILE_Z_HIGH, :, :])
        steps.make_output(registers, output, ring.tiles[stage, TILE_R, :, :])
        if tx % 32 == 0:
            T.barrier_arrive(shared.empty[stage])
        if step + 1 < chain.num_chunks:
            T.barrier_wait(shared.full[following], ((step + 1) >> 1) & 1)
        if following == 0:
            T.copy(shared.v[0], registers.v)
        else:
            T.copy(shared.v[1], registers.v)
        steps.multiply_next_keys(registers, shared.k[following, :, :], shared.k_high[following, :, :])
        steps.wait_output(output)
        if tx % 32 == 0:
            T.mbarrier_arrive(ring.taken[0], (step + 2) % makers)  # the block that fills the slot next
        steps.transpose_output(output)
        if valid == CHUNK:
            T.barrier_wait(staged.empty, (step & 1) ^ 1)
            T.copy(output.rows, staged.rows)
            T.fence_proxy_async()
            T.barrier_arrive(staged.full)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)

    return _ChainMacros(start_state, begin, run_chunk)


def _allocations(problem: ChunkProblem) -> tuple[Any, Any]:
    """Macros that allocate a FusedShared and a StagedOutput."""
    dtype = problem.dtype

    @T.macro
    def allocate():
        k_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        k_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        q_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        q_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        v_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        v_odd_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        full = T.alloc_barrier([32] * STAGES)
        empty = T.alloc_barrier([4] * STAGES)
        return FusedShared(k_shared, k_high_shared, q_shared, q_high_shared, (v_shared, v_odd_shared), full, empty)

    @T.macro
    def allocate_staged():
        out_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        out_full = T.alloc_barrier(128)
        out_empty = T.alloc_barrier(32)
        return StagedOutput(out_shared, out_full, out_empty)

    return allocate, allocate_staged


def fused(problem: ChunkProblem, makers: int = CHAINS, decides: bool = False) -> Any:
    """The prim_func `chunk_fused`; makers: blocks of a cluster, two or more.

    decides: the launch works only if no sequence has more than `split_if_longest_exceeds` tokens; without, it reads no
    such bound.
    """
    head_k, head_v, heads, dtype = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads, problem.dtype
    pooled, raw_gate = problem.pooled, problem.gate_dtype is not None and problem.use_gate
    has_initial, has_final, has_mask = problem.has_initial_state, problem.has_final_state, problem.has_mask
    has_final_indices, has_checkpoints = problem.has_final_indices, problem.has_checkpoints
    columns = PANEL
    final_dtype = problem.state_dtype if pooled else "float32"

    num_tokens, num_cu_seqlens = T.dynamic("num_tokens"), T.dynamic("num_cu_seqlens")
    q_type = token_tensor("q", num_tokens, problem.num_q_heads, head_k, dtype)
    k_type = token_tensor("k", num_tokens, problem.num_k_heads, head_k, dtype)
    v_type = token_tensor("v", num_tokens, problem.num_v_heads, head_v, dtype)
    g_type = gate_tensor("g", num_tokens, num_cu_seqlens, problem, problem.gate_dtype)
    beta_type = gate_tensor("beta", num_tokens, num_cu_seqlens, problem, problem.beta_dtype)
    A_log_type = T.Tensor((heads,), "float32") if raw_gate else cu_seqlens_tensor(num_cu_seqlens, problem)
    dt_bias_type = T.Tensor((heads,), "float32") if raw_gate else cu_seqlens_tensor(num_cu_seqlens, problem)
    initial_state_type = state_tensor("initial_state", num_cu_seqlens, problem, problem.state_dtype if has_initial else None)
    state_indices_type = row_tensor("state_indices", num_cu_seqlens, problem, problem.index_dtype)
    has_initial_state_type = row_tensor("has_initial_state", num_cu_seqlens, problem, "bool" if has_mask else None)
    final_state_type = state_tensor("final_state", num_cu_seqlens, problem, final_dtype if has_final else None)
    final_state_indices_type = row_tensor(
        "final_state_indices", num_cu_seqlens, problem, problem.index_dtype if has_final_indices else None
    )
    cu_seqlens_type = cu_seqlens_tensor(num_cu_seqlens, problem)
    checkpoints = T.dynamic("num_checkpoints")
    checkpoint_offsets_type = checkpoint_tensor(checkpoints, num_cu_seqlens, problem, "int32")
    checkpoint_slots_type = checkpoint_tensor(checkpoints, num_cu_seqlens, problem, problem.index_dtype)
    out_type = token_tensor("out", num_tokens, heads, head_v, dtype)

    exit_unless_chosen = exit_macro(decides, cuts=False)
    allocate_shared, allocate_staged = _allocations(problem)
    allocate_ring, allocate_makers = ring_allocation(problem, RING_COPIES), maker_allocation(problem)
    steps, stores, run = chain_macros(problem, columns), store_macros(problem, columns), _chain_macros(problem, makers)
    make_gates = gate_role(problem, makers)
    make_inverses = inverse_role(problem, makers)
    make_products = product_role(problem, makers)
    load_chunks, feed_makers = _load_macros(problem, makers)
    store_outputs, zero_row = _store_macros()

    @T.prim_func
    def chunk_fused(
        q: q_type,
        k: k_type,
        v: v_type,
        g: g_type,
        beta: beta_type,
        A_log: A_log_type,
        dt_bias: dt_bias_type,
        initial_state: initial_state_type,
        state_indices: state_indices_type,
        has_initial_state: has_initial_state_type,
        final_state: final_state_type,
        final_state_indices: final_state_indices_type,
        cu_seqlens: cu_seqlens_type,
        out: out_type,
        checkpoint_offsets: checkpoint_offsets_type,
        checkpoint_slots: checkpoint_slots_type,
        scale: T.float32,
        null_slot: T.int32,
        split_if_longest_exceeds: T.int32,
    ):
        # Sequences are the slowest index: blocks start in this order, those of the longest sequence first.
        with T.Kernel(makers, heads, num_cu_seqlens - 1, threads=THREADS, cluster_dims=(makers, 1, 1)) as (rank, head, place):
            shared = allocate_shared()
            ring = allocate_ring()
            staged = allocate_staged()
            maker_shared = allocate_makers()
            lengths = T.alloc_shared((MOST_RANKED,), "int32")
            chosen = T.alloc_shared((1,), "int32")
            registers = steps.allocate()
            output = steps.allocate_output()
            read_slot = T.alloc_var("int64", init=0)
            write_slot = T.alloc_var("int64", init=0)
            live = T.alloc_var("bool", init=True)
            starts = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            swizzled = (*shared.v, staged.rows, maker_shared.q, maker_shared.q_high)
            T.annotate_layout(
                {buffer: make_swizzled_layout(buffer) for buffer in swizzled}
                | {rows: transposed_accumulator(columns) for rows in (registers.v, output.rows)}
            )
            tensors = Tensors(
                q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, state_indices=state_indices, final_state=final_state,
                final_state_indices=final_state_indices, checkpoint_offsets=checkpoint_offsets, checkpoint_slots=checkpoint_slots,
                null_slot=null_slot,
            )  # fmt: skip

            exit_unless_chosen(cu_seqlens, num_cu_seqlens, split_if_longest_exceeds)
            find_ranked(cu_seqlens, num_cu_seqlens, place, lengths, chosen)
            sequence = chosen[0]
            sequence_begin = T.cast(cu_seqlens[sequence], "int32")
            length = T.cast(cu_seqlens[sequence + 1], "int32") - sequence_begin
            column_begin = rank * columns
            read_slot = T.cast(sequence, "int64")
            if pooled:
                read_slot = T.cast(state_indices[sequence], "int64")
                live = length > 0 and read_slot > T.cast(null_slot, "int64")
            num_chunks = T.if_then_else(live, T.ceildiv(length, CHUNK), 0)
            turns = (num_chunks + makers - 1 - rank) // makers
            # A block without a chain skips whole loops, whose bodies the compiler then sees unconditionally.
            chained = makers == CHAINS or rank < CHAINS
            chain_chunks = num_chunks if makers == CHAINS else T.if_then_else(chained, num_chunks, 0)
            chain = ChainWork(head, column_begin, sequence_begin, length, chain_chunks)
            work = MakerWork(head, rank, turns, sequence_begin, length)

            if tx < _INVERSE:
                T.set_max_nreg(CHAIN_REGISTERS, 1)
                starts = has_initial and live and chained
                if has_initial and has_mask:
                    if live and chained:
                        starts = has_initial_state[sequence]
                if has_initial:
                    run.start_state(initial_state, starts, read_slot, chain, registers.state, 0)
                    run.start_state(initial_state, starts, read_slot, chain, registers.state_high, HALF)
                else:
                    T.clear(registers.state)
                    T.clear(registers.state_high)
                run.begin(shared, chain, registers)
                for step in T.serial(chain_chunks):
                    valid = T.min(length - step * CHUNK, CHUNK)
                    run.run_chunk(shared, ring, staged, chain, step, valid, registers, output)
                    if has_checkpoints:
                        if valid == CHUNK:
                            done = (step + 1) * CHUNK
                            stores.store_checkpoints(tensors, chosen[0], done, head, column_begin, registers, write_slot)
                T.sync_warp()
                T.cluster_arrive()  # before the stores below: it waits for those above
                if chain_chunks > 0:
                    begin = sequence_begin + (num_chunks - 1) * CHUNK
                    valid = length - (num_chunks - 1) * CHUNK
                    if valid < CHUNK:
                        stores.store_tail(out, begin, valid, head, column_begin, output)
                live = live and chained
                if has_final:
                    # Read again: the loop has no register to keep the sequence in.
                    stores.store_final(tensors, chosen[0], head, column_begin, registers, live, write_slot)
            elif tx < _PRODUCT:
                T.set_max_nreg(INVERSE_REGISTERS, 0)
                make_inverses(tx - _INVERSE, work, maker_shared)
            elif tx < _COPY:
                T.set_max_nreg(PRODUCT_REGISTERS, 0)
                make_products(tx - _PRODUCT, work, scale, maker_shared, ring)
            else:
                T.set_max_nreg(COPY_REGISTERS, 0)
                if tx < _STORE:
                    load_chunks(tensors, shared, chain)
                elif tx < _GIVE:
                    store_outputs(out, staged, chain, T.if_then_else(live and chained, length // CHUNK, 0))
                    # Rows that no chain writes: those of padding sequences, and a share of those past the last sequence.
                    column = column_begin + tx - _STORE
                    if chained and not live:
                        for row in T.serial(length):
                            zero_row(out, sequence_begin + row, head, column)
                    used = T.cast(cu_seqlens[num_cu_seqlens - 1], "int32")
                    for round in T.serial(
                        T.if_then_else(chained, T.ceildiv(T.max(num_tokens - used - place, 0), num_cu_seqlens - 1), 0)
                    ):
                        zero_row(out, used + place + round * (num_cu_seqlens - 1), head, column)
                elif tx < _GATE:
                    feed_makers(tensors, tx - _GIVE, work, maker_shared, ring)
                else:
                    make_gates(tensors, tx - _GATE, work, maker_shared)
            T.sync_warp()
            if tx >= _INVERSE:
                T.cluster_arrive()
            T.cluster_wait()  # the other block may still send to this one

    return chunk_fused
