"""Second launch of the chunk kernel: the chain of chunks of a sequence or segment, the state transposed and in registers.

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

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl.chunk.state_chain import ACCUMULATOR, PANEL, chain_macros, store_macros, transposed_accumulator
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
    bounds_tensor,
    checkpoint_tensor,
    find_ranked,
    find_segment,
    row_tensor,
    starts_tensor,
    state_loader,
    state_tensor,
    tiles_tensor,
    token_tensor,
    turn,
)

STAGES = 3  # chunks in shared memory at a time
MATH_THREADS = 128  # one warpgroup: a block has one panel of V columns
PRODUCER_THREADS = 128  # one warpgroup: register counts change by whole warpgroups
PRODUCER_REGISTERS = 24
MATH_REGISTERS = 240
BLOCK_REGISTERS = MATH_THREADS * MATH_REGISTERS + PRODUCER_THREADS * PRODUCER_REGISTERS


@dataclass(frozen=True)
class ChainShared:
    """Shared memory and barriers of a chain block."""

    k: Any  # [stages, 64 tokens, 64 key columns]
    k_high: Any
    q: Any
    q_high: Any
    v: tuple[Any, ...]  # one buffer [64 tokens, 64 columns] per stage: matrix loads ignore the offset of a region
    z: Any
    z_high: Any
    r: Any
    vectors: Any  # [stages, NUM_VECTORS, 64]
    out: tuple[Any, Any]  # staged output of even and of odd chunks
    full: Any
    empty: Any
    out_full: Any
    out_empty: Any


class Piece(NamedTuple):
    """The part of a sequence that a block works on."""

    sequence: Any
    head: Any
    column_begin: Any  # first V column
    token_begin: Any
    length: Any  # tokens
    first_slot: Any  # workspace slot of the first chunk
    num_chunks: Any  # 0: nothing to do


class CopyMacros(NamedTuple):
    """Loads and stores of a chain block."""

    allocate: Any
    load_chunks: Any
    store_outputs: Any


def _copy_macros(problem: ChunkProblem) -> CopyMacros:
    head_k, heads, dtype = problem.head_k_dim, problem.num_state_heads, problem.dtype
    heads_per_q, heads_per_k = heads // problem.num_q_heads, heads // problem.num_k_heads
    heads_per_v = heads // problem.num_v_heads
    wide = head_k > HALF

    @T.macro
    def allocate():
        k_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        q_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        k_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        q_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        v_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        v_second_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        v_third_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        z_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        z_high_shared = T.alloc_shared((STAGES, CHUNK, HALF), dtype)
        r_shared = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
        vector_shared = T.alloc_shared((STAGES, NUM_VECTORS, CHUNK), "float32")
        out_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        out_odd_shared = T.alloc_shared((CHUNK, PANEL), dtype)
        full = T.alloc_barrier([32] * STAGES)
        empty = T.alloc_barrier([MATH_THREADS // 32] * STAGES)
        out_full = T.alloc_barrier([MATH_THREADS] * 2)
        out_empty = T.alloc_barrier([32] * 2)
        return ChainShared(
            k_shared, k_high_shared, q_shared, q_high_shared, (v_shared, v_second_shared, v_third_shared),
            z_shared, z_high_shared, r_shared, vector_shared, (out_shared, out_odd_shared), full, empty, out_full, out_empty,
        )  # fmt: skip

    @T.macro
    def load(source, target, barriers, stage):
        T.tma_copy(source, target, barrier=barriers[stage], leader_scope_threads=32)

    @T.macro
    def load_chunks(tensors, shared, piece):
        """The loading warp: every chunk of the piece, one stage each."""
        head = piece.head
        q_head, k_head, v_head = head // heads_per_q, head // heads_per_k, head // heads_per_v
        low, high = slice(0, HALF), slice(HALF, head_k)
        for step in T.serial(piece.num_chunks):
            stage = step % STAGES
            T.barrier_wait(shared.empty[stage], ((step // STAGES) & 1) ^ 1)
            token = piece.token_begin + step * CHUNK
            slot = piece.first_slot + step
            load(tensors.k[token : token + CHUNK, k_head, low], shared.k[stage, :, :], shared.full, stage)
            if wide:
                load(tensors.k[token : token + CHUNK, k_head, high], shared.k_high[stage, :, :], shared.full, stage)
            load(tensors.q[token : token + CHUNK, q_head, low], shared.q[stage, :, :], shared.full, stage)
            if wide:
                load(tensors.q[token : token + CHUNK, q_head, high], shared.q_high[stage, :, :], shared.full, stage)
            v_columns = slice(piece.column_begin, piece.column_begin + PANEL)
            if stage == 0:
                load(tensors.v[token : token + CHUNK, v_head, v_columns], shared.v[0], shared.full, 0)
            elif stage == 1:
                load(tensors.v[token : token + CHUNK, v_head, v_columns], shared.v[1], shared.full, 1)
            else:
                load(tensors.v[token : token + CHUNK, v_head, v_columns], shared.v[2], shared.full, 2)
            load(tensors.vectors[slot, head, :, :], shared.vectors[stage, :, :], shared.full, stage)
            load(tensors.tiles[slot, head, TILE_Z, :, :], shared.z[stage, :, :], shared.full, stage)
            if wide:
                load(tensors.tiles[slot, head, TILE_Z_HIGH, :, :], shared.z_high[stage, :, :], shared.full, stage)
            load(tensors.tiles[slot, head, TILE_R, :, :], shared.r[stage, :, :], shared.full, stage)
            # All lanes arrive: the lane that was elected for the copies has announced their bytes before its own arrival.
            T.barrier_arrive(shared.full[stage])

    @T.macro
    def store(out, staged, piece, token):
        T.tma_copy(
            staged,
            out[token : token + CHUNK, piece.head, piece.column_begin : piece.column_begin + PANEL],
            leader_scope_threads=32,
        )

    @T.macro
    def store_outputs(out, shared, piece, num_full_chunks):
        """The storing warp: the staged output of every full chunk."""
        for step in T.serial(num_full_chunks):
            token = piece.token_begin + step * CHUNK
            T.barrier_wait(shared.out_full[step % 2], (step // 2) & 1)
            if step % 2 == 0:
                store(out, shared.out[0], piece, token)
            else:
                store(out, shared.out[1], piece, token)
            T.tma_store_wait(0)
            T.barrier_arrive(shared.out_empty[step % 2])

    return CopyMacros(allocate, load_chunks, store_outputs)


class MathMacros(NamedTuple):
    """What the math warpgroup does."""

    begin: Any
    run_chunk: Any


def _math_macros(problem: ChunkProblem) -> MathMacros:
    columns = PANEL
    steps = chain_macros(problem, columns)

    @T.macro
    def read_ahead(shared, stage, registers):
        """What the next chunk reads from shared memory before its first product."""
        if stage == 0:
            T.copy(shared.v[0], registers.v)
        elif stage == 1:
            T.copy(shared.v[1], registers.v)
        else:
            T.copy(shared.v[2], registers.v)
        for i, j in T.Parallel(columns, CHUNK):
            registers.factor[i, j] = shared.vectors[stage, ROW_STATE_KEY, j]
        registers.last[0] = shared.vectors[stage, ROW_LAST, 0]

    @T.macro
    def begin(shared, piece, registers):
        """U^T of the first chunk."""
        steps.round_state(registers)
        if piece.num_chunks > 0:
            T.barrier_wait(shared.full[0], 0)
        read_ahead(shared, 0, registers)
        steps.multiply_state(registers, shared.k[0, :, :], shared.k_high[0, :, :], registers.u)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)

    @T.macro
    def run_chunk(shared, piece, step, valid, registers, output):
        stage = step % STAGES
        following = (step + 1) % STAGES
        steps.multiply_state(registers, shared.q[stage, :, :], shared.q_high[stage, :, :], output.out)
        for i, j in T.Parallel(columns, CHUNK):
            output.factor[i, j] = shared.vectors[stage, ROW_STATE_QUERY, j]
        steps.make_valid_values(registers, valid)
        steps.decay_state(registers)
        steps.add_values(registers, shared.z[stage, :, :], shared.z_high[stage, :, :])
        steps.make_output(registers, output, shared.r[stage, :, :])
        if step + 1 < piece.num_chunks:
            T.barrier_wait(shared.full[following], ((step + 1) // STAGES) & 1)
        read_ahead(shared, following, registers)
        steps.multiply_next_keys(registers, shared.k[following, :, :], shared.k_high[following, :, :])
        steps.wait_output(output)
        steps.transpose_output(output)
        if valid == CHUNK:
            T.barrier_wait(shared.out_empty[step % 2], ((step // 2) & 1) ^ 1)
            if step % 2 == 0:
                T.copy(output.rows, shared.out[0])
            else:
                T.copy(output.rows, shared.out[1])
            T.fence_proxy_async()
            T.barrier_arrive(shared.out_full[step % 2])
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(shared.empty[stage])
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)

    return MathMacros(begin, run_chunk)


def chain(problem: ChunkProblem, split: bool = False, decides: bool = False) -> Any:
    """The prim_func `chunk_chain`.

    split: a block works on a segment of a sequence. Without, `segment_starts` and `segment` are not read.
    decides: as for `prepare`.
    """
    head_k, head_v, heads, dtype = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads, problem.dtype
    pooled = problem.pooled
    has_initial, has_final, has_mask = problem.has_initial_state, problem.has_final_state, problem.has_mask
    has_final_indices, has_checkpoints = problem.has_final_indices, problem.has_checkpoints
    columns = PANEL
    wide = head_k > HALF
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
    steps, stores, copies, math = (
        chain_macros(problem, columns), store_macros(problem, columns), _copy_macros(problem), _math_macros(problem),
    )  # fmt: skip

    @T.macro
    def load_start(segment_starts, slot, piece, registers):
        """The state at the start of a segment of a sequence that has several."""
        for i, j in T.Parallel(columns, HALF):
            registers.state[i, j] = segment_starts[slot, piece.head, piece.column_begin + i, j]
        if wide:
            for i, j in T.Parallel(columns, HALF):
                registers.state_high[i, j] = segment_starts[slot, piece.head, piece.column_begin + i, HALF + j]

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
        # Pieces are the slowest index: blocks start in this order, those of the longest sequence first.
        with T.Kernel(head_v // columns, heads, pieces, threads=MATH_THREADS + PRODUCER_THREADS) as (v_slice, head, piece_slot):
            shared = copies.allocate()
            registers = steps.allocate()
            output = steps.allocate_output()
            lengths = T.alloc_shared((MOST_RANKED,), "int32")
            chosen = T.alloc_shared((2,), "int32")
            place = T.alloc_local((2,), "int32")
            read_slot = T.alloc_var("int64", init=0)
            write_slot = T.alloc_var("int64", init=0)
            live = T.alloc_var("bool", init=True)
            starts = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            swizzled = [*shared.v, *shared.out]
            T.annotate_layout(
                {buffer: make_swizzled_layout(buffer) for buffer in swizzled}
                | {rows: transposed_accumulator(columns) for rows in (registers.v, output.rows)}
            )
            tensors = Tensors(
                q=q, k=k, v=v, state_indices=indices, final_state=final_state, final_state_indices=final_indices,
                checkpoint_offsets=checkpoint_offsets, checkpoint_slots=checkpoint_slots, tiles=tiles, vectors=vectors,
                null_slot=null_slot,
            )  # fmt: skip

            take_turn(cu_seqlens, bounds, cut_above)
            if split:
                find_segment(cu_seqlens, bounds, piece_slot, segment, place)
                if has_checkpoints:
                    # The sequence, and its tokens before this segment: kept in registers, they spill.
                    if tx == 0:
                        chosen[0] = place[0]
                        chosen[1] = place[1] * segment * CHUNK
                    T.sync_threads()
            else:
                find_ranked(cu_seqlens, bounds, piece_slot, lengths, chosen)
            sequence = place[0] if split else chosen[0]
            index = place[1] if split else 0
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            rest = whole_length - index * segment * CHUNK if split else whole_length
            token_begin = whole_begin + index * segment * CHUNK if split else whole_begin
            length = T.min(rest, segment * CHUNK) if split else whole_length
            first_slot = whole_begin // CHUNK + sequence + index * segment if split else whole_begin // CHUNK + sequence
            only = whole_length <= segment * CHUNK if split else True  # the sequence is one segment
            read_slot = T.cast(sequence, "int64")
            if pooled:
                read_slot = T.cast(indices[sequence], "int64")
                live = length > 0 and read_slot > T.cast(null_slot, "int64")
            elif split:
                live = index == 0 or length > 0  # else nobody's slot
            num_chunks = T.if_then_else(live, T.ceildiv(length, CHUNK), 0)
            piece = Piece(sequence, head, v_slice * columns, token_begin, length, first_slot, num_chunks)

            if tx >= MATH_THREADS:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < MATH_THREADS + 32:
                    copies.load_chunks(tensors, shared, piece)
                elif tx < MATH_THREADS + 64:
                    copies.store_outputs(out, shared, piece, T.if_then_else(live, length // CHUNK, 0))
            else:
                T.set_max_nreg(MATH_REGISTERS, 1)
                T.clear(registers.state)
                if wide:
                    T.clear(registers.state_high)
                if split:
                    if live and not only:
                        load_start(segment_starts, piece_slot, piece, registers)
                if has_initial:
                    starts = (live and only) if split else live
                    if has_mask:
                        if (live and only) if split else live:
                            starts = mask[sequence]
                    if starts:
                        load_state(initial_state, read_slot, head, piece.column_begin, registers.state, registers.state_high)
                math.begin(shared, piece, registers)
                for step in T.serial(num_chunks):
                    valid = T.min(length - step * CHUNK, CHUNK)
                    math.run_chunk(shared, piece, step, valid, registers, output)
                    if has_checkpoints:
                        if valid == CHUNK:
                            done = chosen[1] + (step + 1) * CHUNK if split else (step + 1) * CHUNK
                            stores.store_checkpoints(tensors, chosen[0], done, head, piece.column_begin, registers, write_slot)
                if num_chunks > 0:
                    begin = token_begin + (num_chunks - 1) * CHUNK
                    valid = length - (num_chunks - 1) * CHUNK
                    if valid < CHUNK:
                        stores.store_tail(out, begin, valid, head, piece.column_begin, output)
                if split:
                    live = live and rest <= segment * CHUNK  # the last segment
                if has_final:
                    # Read again: the loop has no register to keep the sequence in.
                    ending = place[0] if split and not has_checkpoints else chosen[0]
                    stores.store_final(tensors, ending, head, piece.column_begin, registers, live, write_slot)

    return chunk_chain
