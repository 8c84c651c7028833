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

from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk import state_chain as steps
from kernels_tl.chunk.constants import CHUNK, HALF, TILE_R, TILE_Z
from kernels_tl.chunk.inverse import inverse_role
from kernels_tl.chunk.makers import MakerWork, allocate_makers, allocate_ring, feed_makers, gate_role
from kernels_tl.chunk.product import product_role
from kernels_tl.chunk.sizes import (
    CHAIN_REGISTERS,
    CHAINS,
    COPY_REGISTERS,
    FUSED_THREADS,
    INVERSE_REGISTERS,
    MOST_RANKED,
    PANEL,
    PRODUCT_REGISTERS,
    RING_STAGES,
)
from kernels_tl.chunk.state_chain import ROWS, halves_of, load_halves
from kernels_tl.chunk.types import declare, exit_unless_chosen, find_ranked
from kernels_tl.common import build
from kernels_tl.common.versions import prim_func

_INVERSE, _PRODUCT, _COPY = 128, 256, 384  # first threads of the warpgroups
_LOAD, _STORE, _GIVE, _GATE = 384, 416, 448, 480  # and of the copying warps


class ChainWork(NamedTuple):
    """The sequence that a block's chain works on."""

    head: Any
    column_begin: Any  # first V column
    token_begin: Any
    length: Any  # tokens
    num_chunks: Any  # 0 in blocks without a chain


def _allocate_shared(problem: ChunkProblem) -> Any:
    """Shared memory and barriers between a block's chain and its copies."""
    halves, dtype = halves_of(problem), problem.dtype
    return build.named(
        k=tuple(T.alloc_shared((RING_STAGES, CHUNK, HALF), dtype) for _ in halves),
        q=tuple(T.alloc_shared((RING_STAGES, CHUNK, HALF), dtype) for _ in halves),
        v=tuple(T.alloc_shared((CHUNK, PANEL), dtype) for _ in range(RING_STAGES)),  # matrix loads ignore the offset of a region
        full=T.alloc_barrier([32] * RING_STAGES),
        empty=T.alloc_barrier([4] * RING_STAGES),
        out=T.alloc_shared((CHUNK, PANEL), dtype),  # the output of a full chunk on its way to global memory
        out_full=T.alloc_barrier(128),
        out_empty=T.alloc_barrier(32),
    )


@T.macro
def load_chunks(problem, tensors, shared, chain):
    """The warp that loads the chain's K, Q and V: every chunk of the sequence."""
    head, heads = chain.head, problem.num_state_heads
    q_head, k_head = head // (heads // problem.num_q_heads), head // (heads // problem.num_k_heads)
    v_head = head // (heads // problem.num_v_heads)
    for step in T.serial(chain.num_chunks):
        stage = step & 1
        token = chain.token_begin + step * CHUNK
        T.barrier_wait(shared.empty[stage], ((step >> 1) & 1) ^ 1)
        load_halves(tensors.k, k_head, token, shared.k, stage, shared.full)
        load_halves(tensors.q, q_head, token, shared.q, stage, shared.full)
        steps.load_values(tensors.v, v_head, token, chain.column_begin, shared.v, stage, shared.full, 0)
        # All lanes arrive: the lane that was elected for the copies has announced their bytes before its own arrival.
        T.barrier_arrive(shared.full[stage])


@T.macro
def store_outputs(out, shared, chain, num_full_chunks):
    """The warp that stores the output of full chunks."""
    for step in T.serial(num_full_chunks):
        T.barrier_wait(shared.out_full, step & 1)
        steps.store_chunk(shared.out, out, chain, chain.token_begin + step * CHUNK)
        T.tma_store_wait(0)
        T.barrier_arrive(shared.out_empty)


@T.macro
def zero_row(out, row, head, column):
    for half in T.unroll(2):
        out[T.cast(row, "int64"), head, column + 32 * half] = 0


@T.macro
def start_state(problem, source, starts, slot, chain, registers):
    # Chosen element by element: with two branches, one that loads and one that clears, the loop's registers are spilled.
    for half, fragment in enumerate(registers.state):
        for i, j in T.Parallel(PANEL, HALF):
            if problem.state_v_first:
                place = (slot, chain.head, chain.column_begin + i, HALF * half + j)
            else:
                place = (slot, chain.head, HALF * half + j, chain.column_begin + i)
            fragment[i, j] = T.if_then_else(starts, T.cast(source[place], "float32"), 0.0)


@T.macro
def begin_chain(shared, chain, registers):
    """U^T of the first chunk."""
    steps.round_state(registers)
    if chain.num_chunks > 0:
        T.barrier_wait(shared.full[0], 0)
    T.copy(shared.v[0], registers.v)
    steps.multiply_state(registers, shared.k, 0, registers.u)
    steps.wait_for_keys(registers)


@T.macro
def run_chunk(makers, shared, ring, chain, step, valid, registers, output):
    tx = T.get_thread_binding()
    stage = step & 1
    following = stage ^ 1
    T.barrier_wait(ring.ready[stage], (step >> 1) & 1)
    # Loads wait for products that were issued before them: what W needs is read first.
    steps.read_factors(ring.vectors, stage, registers)
    steps.multiply_state(registers, shared.q, stage, output.out)
    steps.make_valid_values(registers, valid)
    steps.read_query_factors(ring.vectors, stage, registers, output)
    steps.decay_state(registers)
    for half, fragment in enumerate(registers.state):
        T.wgmma_gemm(registers.w_operand, ring.tiles[stage, TILE_Z + half, :, :], fragment, policy=ROWS)
    steps.make_output(registers, output, ring.tiles[stage, TILE_R, :, :])
    if tx % 32 == 0:
        T.barrier_arrive(shared.empty[stage])
    if step + 1 < chain.num_chunks:
        T.barrier_wait(shared.full[following], ((step + 1) >> 1) & 1)
    steps.read_values(shared.v, following, registers.v, 0)
    steps.multiply_next_keys(registers, shared.k, following)
    steps.finish_output(registers, output)
    if tx % 32 == 0:
        T.mbarrier_arrive(ring.taken[0], (step + 2) % makers)  # the block that fills the slot next
    steps.transpose_output(registers, output)
    if valid == CHUNK:
        T.barrier_wait(shared.out_empty, (step & 1) ^ 1)
        T.copy(output.rows, shared.out)
        T.fence_proxy_async()
        T.barrier_arrive(shared.out_full)
    steps.wait_for_keys(registers)


def fused(problem: ChunkProblem, makers: int = CHAINS, decides: bool = False) -> Any:
    """The prim_func `chunk_fused`; makers: blocks of a cluster, two or more.

    decides: the launch works only if no sequence has more than `split_if_longest_exceeds` tokens; without, it reads no
    such bound.
    """
    names = "q k v g beta A_log dt_bias initial_state state_indices has_initial_state final_state final_state_indices cu_seqlens"
    names += " out checkpoint_offsets checkpoint_slots checkpoint_states scale null_slot split_if_longest_exceeds"

    @prim_func
    def chunk_fused():
        tensors = declare(problem, names)
        cu_seqlens, out, null_slot = tensors.cu_seqlens, tensors.out, tensors.null_slot
        num_sequences = cu_seqlens.shape[0] - 1
        grid = (makers, problem.num_state_heads, num_sequences)
        # Sequences are the slowest index: blocks start in this order, those of the longest sequence first.
        with T.ClusterKernel(*grid, threads=FUSED_THREADS, cluster_dims=(makers, 1, 1)) as (rank, head, place):
            shared = _allocate_shared(problem)
            ring = allocate_ring(problem)
            maker_shared = allocate_makers(problem)
            lengths = T.alloc_shared((MOST_RANKED,), "int32")
            chosen = T.alloc_shared((1,), "int32")
            registers = steps.allocate_chain(problem, PANEL)
            output = steps.allocate_output(problem, PANEL)
            read_slot, write_slot = build.variables(2, "int64", init=0)
            live, starts = build.variables(2, "bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout(
                {buffer: make_swizzled_layout(buffer) for buffer in (*shared.v, shared.out, *maker_shared.q)}
                | {rows: steps.transposed_accumulator(PANEL) for rows in (registers.v, output.rows)}
            )

            exit_unless_chosen(decides, False, tensors)
            find_ranked(cu_seqlens, place, lengths, chosen)
            sequence = chosen[0]
            sequence_begin = T.cast(cu_seqlens[sequence], "int32")
            length = T.cast(cu_seqlens[sequence + 1], "int32") - sequence_begin
            column_begin = rank * PANEL
            read_slot = T.cast(sequence, "int64")
            if problem.pooled:
                read_slot = T.cast(tensors.state_indices[sequence], "int64")
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
                starts = problem.has_initial_state and live and chained
                if problem.has_initial_state and problem.has_mask:
                    if live and chained:
                        starts = tensors.has_initial_state[sequence]
                if problem.has_initial_state:
                    start_state(problem, tensors.initial_state, starts, read_slot, chain, registers)
                else:
                    for fragment in registers.state:
                        T.clear(fragment)
                begin_chain(shared, chain, registers)
                for step in T.serial(chain_chunks):
                    valid = T.min(length - step * CHUNK, CHUNK)
                    run_chunk(makers, shared, ring, chain, step, valid, registers, output)
                    if problem.has_checkpoints:
                        if valid == CHUNK:
                            done = (step + 1) * CHUNK
                            steps.store_checkpoints(problem, tensors, chosen[0], done, head, column_begin, registers, write_slot)
                T.sync_warp()
                T.cluster_arrive()  # before the stores below: it waits for those above
                if chain_chunks > 0:
                    begin = sequence_begin + (num_chunks - 1) * CHUNK
                    valid = length - (num_chunks - 1) * CHUNK
                    if valid < CHUNK:
                        steps.store_tail(out, begin, valid, head, column_begin, output)
                live = live and chained
                if problem.has_final_state:
                    # Read again: the loop has no register to keep the sequence in.
                    steps.store_final(problem, tensors, chosen[0], head, column_begin, registers, live, write_slot)
            elif tx < _PRODUCT:
                T.set_max_nreg(INVERSE_REGISTERS, 0)
                inverse_role(problem, makers, tx - _INVERSE, work, maker_shared)
            elif tx < _COPY:
                T.set_max_nreg(PRODUCT_REGISTERS, 0)
                product_role(problem, makers, tx - _PRODUCT, work, tensors.scale, maker_shared, ring)
            else:
                T.set_max_nreg(COPY_REGISTERS, 0)
                if tx < _STORE:
                    load_chunks(problem, tensors, shared, chain)
                elif tx < _GIVE:
                    store_outputs(out, shared, chain, T.if_then_else(live and chained, length // CHUNK, 0))
                    # Rows that no chain writes: those of padding sequences, and a share of those past the last sequence.
                    column = column_begin + tx - _STORE
                    if chained and not live:
                        for row in T.serial(length):
                            zero_row(out, sequence_begin + row, head, column)
                    used = T.cast(cu_seqlens[num_sequences], "int32")
                    rounds = T.ceildiv(T.max(out.shape[0] - used - place, 0), num_sequences)
                    for round in T.serial(T.if_then_else(chained, rounds, 0)):
                        zero_row(out, used + place + round * num_sequences, head, column)
                elif tx < _GATE:
                    feed_makers(problem, makers, tensors, tx - _GIVE, work, maker_shared, ring)
                else:
                    gate_role(problem, makers, tensors, tx - _GATE, work, maker_shared)
            T.sync_warp()
            if tx >= _INVERSE:
                T.cluster_arrive()
            T.cluster_wait()  # the other block may still send to this one

    return chunk_fused
