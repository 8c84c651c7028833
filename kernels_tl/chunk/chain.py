"""The launch `chunk_chain`: the chain of chunks of a sequence or segment, the state transposed and in registers.

One block per (V slice of 64 columns, sequence or segment, state head): a math warpgroup, whose loop is made of the macros of
state_chain.py, and a copying warpgroup. Warp 0 of the latter loads K, Q, V, tiles and vectors, warp 1 stores the output of full
chunks. The output of a last, partial chunk is stored from registers. An iteration ends with all products done: the assembler
serialises products that are in flight from one iteration to the next. The compiler inserts no barrier
(`tl.disable_thread_storage_sync`).

| barrier | waits | arrives (count) |
|---|---|---|
| full[stage] | math | warp 0 (32) + the bytes of the stage's bulk copies |
| empty[stage] | warp 0 | one lane of every math warp (4) |
| out_full[step % 2] | warp 1 | every math thread (128) |
| out_empty[step % 2] | math | warp 1 (32), when the copy has read the staged rows |
"""

from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk import state_chain as steps
from kernels_tl.chunk.constants import CHUNK, HALF
from kernels_tl.chunk.sizes import MATH_REGISTERS, MATH_THREADS, MOST_RANKED, PANEL, PRODUCER_REGISTERS, PRODUCER_THREADS, STAGES
from kernels_tl.chunk.types import declare, exit_unless_chosen, find_ranked, find_segment, load_state
from kernels_tl.common import build
from kernels_tl.common.versions import prim_func


class Piece(NamedTuple):
    """The part of a sequence that a block works on."""

    sequence: Any
    head: Any
    column_begin: Any  # first V column
    token_begin: Any
    length: Any  # tokens
    first_slot: Any  # workspace slot of the first chunk
    num_chunks: Any  # 0: nothing to do
    has_values: Any = True


def allocate_staged(problem: ChunkProblem) -> Any:
    """Output of even and of odd chunks on its way to global memory."""
    return build.named(
        out=tuple(T.alloc_shared((CHUNK, PANEL), problem.dtype) for _ in range(2)),
        out_full=T.alloc_barrier([MATH_THREADS] * 2),
        out_empty=T.alloc_barrier([32] * 2),
    )


@T.macro
def store_outputs(out, staged, piece, num_full_chunks):
    """The storing warp: the staged output of every full chunk."""
    for step in T.serial(num_full_chunks):
        token = piece.token_begin + step * CHUNK
        T.barrier_wait(staged.out_full[step % 2], (step // 2) & 1)
        if step % 2 == 0:
            steps.store_chunk(staged.out[0], out, piece, token)
        else:
            steps.store_chunk(staged.out[1], out, piece, token)
        T.tma_store_wait(0)
        T.barrier_arrive(staged.out_empty[step % 2])


@T.macro
def run_chunk(shared, staged, piece, step, valid, registers, output):
    """The math warpgroup's chunk, from its U to the next one's."""
    stage = step % STAGES
    following = (step + 1) % STAGES
    steps.multiply_state(registers, shared.q, stage, output.out)
    steps.read_query_factors(shared.vectors, stage, registers, output)
    steps.make_valid_values(registers, valid)
    steps.decay_state(registers)
    steps.add_values(registers, shared.z, stage)
    steps.make_output(registers, output, shared.r[stage, :, :])
    if step + 1 < piece.num_chunks:
        T.barrier_wait(shared.full[following], ((step + 1) // STAGES) & 1)
    steps.read_ahead(shared, following, piece, registers)
    steps.multiply_next_keys(registers, shared.k, following)
    steps.finish_output(registers, output)
    steps.transpose_output(registers, output)
    if valid == CHUNK:
        T.barrier_wait(staged.out_empty[step % 2], ((step // 2) & 1) ^ 1)
        if step % 2 == 0:
            T.copy(output.rows, staged.out[0])
        else:
            T.copy(output.rows, staged.out[1])
        T.fence_proxy_async()
        T.barrier_arrive(staged.out_full[step % 2])
    if T.get_thread_binding() % 32 == 0:
        T.barrier_arrive(shared.empty[stage])
    steps.wait_for_keys(registers)


@T.macro
def load_start(segment_starts, slot, piece, registers):
    """The state at the start of a segment of a sequence that has several."""
    for half, fragment in enumerate(registers.state):
        for i, j in T.Parallel(PANEL, HALF):
            fragment[i, j] = segment_starts[slot, piece.head, piece.column_begin + i, HALF * half + j]


def chain(problem: ChunkProblem, split: bool = False, decides: bool = False) -> Any:
    """The prim_func `chunk_chain`; split: a block works on a segment of a sequence; decides: as for `prepare`."""
    names = "q k v initial_state state_indices has_initial_state final_state final_state_indices cu_seqlens out tiles vectors"
    names += " segment_starts" if split else ""
    names += " checkpoint_offsets checkpoint_slots checkpoint_states null_slot split_chunks split_if_longest_exceeds"
    has_checkpoints, pooled = problem.has_checkpoints, problem.pooled

    @prim_func
    def chunk_chain():
        tensors = declare(problem, names)
        cu_seqlens, split_chunks, null_slot = tensors.cu_seqlens, tensors.split_chunks, tensors.null_slot
        pieces = tensors.segment_starts.shape[0] if split else cu_seqlens.shape[0] - 1
        grid = (problem.head_v_dim // PANEL, problem.num_state_heads, pieces)
        # Pieces are the slowest index: blocks start in this order, those of the longest sequence first.
        with T.Kernel(*grid, threads=MATH_THREADS + PRODUCER_THREADS) as (v_slice, head, piece_slot):
            shared = steps.allocate_stages(problem, PANEL, with_output=True)
            staged = allocate_staged(problem)
            registers = steps.allocate_chain(problem, PANEL)
            output = steps.allocate_output(problem, PANEL)
            lengths = T.alloc_shared((MOST_RANKED,), "int32")
            chosen = T.alloc_shared((2,), "int32")
            place = T.alloc_local((2,), "int32")
            read_slot, write_slot = build.variables(2, "int64", init=0)
            live, starts = build.variables(2, "bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout(
                {buffer: make_swizzled_layout(buffer) for buffer in (*shared.v, *staged.out)}
                | {rows: steps.transposed_accumulator(PANEL) for rows in (registers.v, output.rows)}
            )

            exit_unless_chosen(decides, True, tensors)
            if split:
                find_segment(cu_seqlens, piece_slot, split_chunks, place)
                if has_checkpoints:
                    # The sequence, and its tokens before this segment: kept in registers, they spill.
                    if tx == 0:
                        chosen[0] = place[0]
                        chosen[1] = place[1] * split_chunks * CHUNK
                    T.sync_threads()
            else:
                find_ranked(cu_seqlens, piece_slot, lengths, chosen)
            sequence = place[0] if split else chosen[0]
            index = place[1] if split else 0
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            rest = whole_length - index * split_chunks * CHUNK if split else whole_length
            token_begin = whole_begin + index * split_chunks * CHUNK if split else whole_begin
            length = T.min(rest, split_chunks * CHUNK) if split else whole_length
            first_slot = whole_begin // CHUNK + sequence + index * split_chunks if split else whole_begin // CHUNK + sequence
            only = whole_length <= split_chunks * CHUNK if split else True  # the sequence is one segment
            read_slot = T.cast(sequence, "int64")
            if pooled:
                read_slot = T.cast(tensors.state_indices[sequence], "int64")
                live = length > 0 and read_slot > T.cast(null_slot, "int64")
            elif split:
                live = index == 0 or length > 0  # else the slot is unused
            num_chunks = T.if_then_else(live, T.ceildiv(length, CHUNK), 0)
            piece = Piece(sequence, head, v_slice * PANEL, token_begin, length, first_slot, num_chunks)

            if tx >= MATH_THREADS:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < MATH_THREADS + 32:
                    steps.load_chunks(problem, tensors, shared, piece)
                elif tx < MATH_THREADS + 64:
                    store_outputs(tensors.out, staged, piece, T.if_then_else(live, length // CHUNK, 0))
            else:
                T.set_max_nreg(MATH_REGISTERS, 1)
                for fragment in registers.state:
                    T.clear(fragment)
                if split:
                    if live and not only:
                        load_start(tensors.segment_starts, piece_slot, piece, registers)
                if problem.has_initial_state:
                    starts = (live and only) if split else live
                    if problem.has_mask:
                        if (live and only) if split else live:
                            starts = tensors.has_initial_state[sequence]
                    if starts:
                        load_state(problem, tensors.initial_state, read_slot, head, piece.column_begin, registers)
                steps.begin_chain(shared, piece, registers)
                steps.multiply_state(registers, shared.k, 0, registers.u)
                steps.wait_for_keys(registers)
                for step in T.serial(num_chunks):
                    valid = T.min(length - step * CHUNK, CHUNK)
                    run_chunk(shared, staged, piece, step, valid, registers, output)
                    if has_checkpoints:
                        if valid == CHUNK:
                            done = chosen[1] + (step + 1) * CHUNK if split else (step + 1) * CHUNK
                            steps.store_checkpoints(
                                problem, tensors, chosen[0], done, head, piece.column_begin, registers, write_slot
                            )
                if num_chunks > 0:
                    begin = token_begin + (num_chunks - 1) * CHUNK
                    valid = length - (num_chunks - 1) * CHUNK
                    if valid < CHUNK:
                        steps.store_tail(tensors.out, begin, valid, head, piece.column_begin, output)
                if split:
                    live = live and rest <= split_chunks * CHUNK  # the last segment
                if problem.has_final_state:
                    # Read again: the loop has no register to keep the sequence in.
                    ending = place[0] if split and not has_checkpoints else chosen[0]
                    steps.store_final(problem, tensors, ending, head, piece.column_begin, registers, live, write_slot)

    return chunk_chain
