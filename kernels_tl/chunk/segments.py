"""The two launches between `chunk_prepare` and `chunk_chain` that cut sequences into segments of `segment` chunks.

A run of chunks maps the state before it to P S + h. Of every segment but its sequence's last, `chunk_summaries` computes h (the
state after it, from zero; after the first one, from the sequence's own start) and the transition P (not of the first), each
in a block of its own: the chain of _chunk_chain.py without Q, output and R; P is what it makes of the identity with V = 0.
`chunk_starts` then walks the segments of a sequence, a block per head and 64 V columns:

    start_1 = h_0        start_{i+1} = P_i start_i + h_i

P and the starts enter the tensor cores as two bfloat16 summands each, as hi hi + lo hi + hi lo. In the workspace h_i lies where
start_{i+1} will, and the first segment's start lies there too: a pool's slot may be written by the last segment's block
before the first one's has begun.

Only whole segments are summarised, so there are no tails here. Barriers (`tl.disable_thread_storage_sync`) in both:

| barrier | waits | arrives (count) |
|---|---|---|
| full[stage] | math | the copying warp (32) + the bytes of the stage's bulk copies |
| empty[stage] | the copying warp | one lane of every math warp |
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.problems import ChunkProblem
from kernels_tl.chunk.chain import MATH_REGISTERS, PRODUCER_REGISTERS, PRODUCER_THREADS
from kernels_tl.chunk.state_chain import ACCUMULATOR, PANEL, ROWS, chain_macros, transposed_accumulator
from kernels_tl.chunk.types import (
    CHUNK,
    HALF,
    NUM_VECTORS,
    ROW_LAST,
    ROW_STATE_KEY,
    TILE_Z,
    TILE_Z_HIGH,
    TRANSITION_DTYPE,
    Tensors,
    bounds_tensor,
    find_segment,
    row_tensor,
    starts_tensor,
    state_loader,
    state_tensor,
    tiles_tensor,
    token_tensor,
    transitions_tensor,
    turn,
)

SUMMARY_STAGES = 3
START_STAGES = 3
START_THREADS = 128  # of the math warpgroup


@dataclass(frozen=True)
class SummaryShared:
    """Shared memory and barriers of a summary block."""

    k: Any  # [stages, 64 tokens, 64 key columns]
    k_high: Any
    v: tuple[Any, ...]  # one buffer per stage, in panels of 64 columns: matrix loads ignore the offset of a region
    z: Any
    z_high: Any
    vectors: Any  # [stages, NUM_VECTORS, 64]
    full: Any
    empty: Any


class Summary(NamedTuple):
    """What a summary block works on."""

    head: Any
    is_state: Any  # h of the segment; else its transition P
    token_begin: Any
    first_slot: Any  # workspace slot of the first chunk
    num_chunks: Any  # 0: nothing to do


class SummaryMacros(NamedTuple):
    """What the two warpgroups of a summary block do."""

    allocate: Any
    load_chunks: Any
    begin: Any
    run_chunk: Any
    store_states: Any
    store_transition: Any


def _summary_copies(problem: ChunkProblem, columns: int) -> tuple[Any, Any]:
    """Macros that allocate the shared memory and that load the chunks."""
    head_k, heads, dtype = problem.head_k_dim, problem.num_state_heads, problem.dtype
    heads_per_k, heads_per_v = heads // problem.num_k_heads, heads // problem.num_v_heads
    wide = head_k > HALF
    panels = columns // PANEL
    rows = panels * CHUNK

    @T.macro
    def allocate():
        k_shared = T.alloc_shared((SUMMARY_STAGES, CHUNK, HALF), dtype)
        k_high_shared = T.alloc_shared((SUMMARY_STAGES, CHUNK, HALF), dtype)
        v_shared = T.alloc_shared((rows, PANEL), dtype)
        v_second_shared = T.alloc_shared((rows, PANEL), dtype)
        v_third_shared = T.alloc_shared((rows, PANEL), dtype)
        z_shared = T.alloc_shared((SUMMARY_STAGES, CHUNK, HALF), dtype)
        z_high_shared = T.alloc_shared((SUMMARY_STAGES, CHUNK, HALF), dtype)
        vector_shared = T.alloc_shared((SUMMARY_STAGES, NUM_VECTORS, CHUNK), "float32")
        full = T.alloc_barrier([32] * SUMMARY_STAGES)
        empty = T.alloc_barrier([columns * 2 // 32] * SUMMARY_STAGES)
        return SummaryShared(
            k_shared, k_high_shared, (v_shared, v_second_shared, v_third_shared), z_shared, z_high_shared, vector_shared,
            full, empty,
        )  # fmt: skip

    @T.macro
    def load(source, target, barriers, stage):
        T.tma_copy(source, target, barrier=barriers[stage], leader_scope_threads=32)

    @T.macro
    def load_v(source, target, barriers, stage, token, head):
        for panel in T.unroll(panels):
            T.tma_copy(
                source[token : token + CHUNK, head, panel * PANEL : (panel + 1) * PANEL],
                target[panel * CHUNK : (panel + 1) * CHUNK, :],
                barrier=barriers[stage],
                leader_scope_threads=32,
            )

    @T.macro
    def load_chunks(tensors, shared, summary):
        head = summary.head
        k_head, v_head = head // heads_per_k, head // heads_per_v
        for step in T.serial(summary.num_chunks):
            stage = step % SUMMARY_STAGES
            T.barrier_wait(shared.empty[stage], ((step // SUMMARY_STAGES) & 1) ^ 1)
            token = summary.token_begin + step * CHUNK
            slot = summary.first_slot + step
            load(tensors.k[token : token + CHUNK, k_head, 0:HALF], shared.k[stage, :, :], shared.full, stage)
            if wide:
                load(tensors.k[token : token + CHUNK, k_head, HALF:head_k], shared.k_high[stage, :, :], shared.full, stage)
            if summary.is_state:
                if stage == 0:
                    load_v(tensors.v, shared.v[0], shared.full, 0, token, v_head)
                elif stage == 1:
                    load_v(tensors.v, shared.v[1], shared.full, 1, token, v_head)
                else:
                    load_v(tensors.v, shared.v[2], shared.full, 2, token, v_head)
            load(tensors.vectors[slot, head, :, :], shared.vectors[stage, :, :], shared.full, stage)
            load(tensors.tiles[slot, head, TILE_Z, :, :], shared.z[stage, :, :], shared.full, stage)
            if wide:
                load(tensors.tiles[slot, head, TILE_Z_HIGH, :, :], shared.z_high[stage, :, :], shared.full, stage)
            # All lanes arrive: the lane that was elected for the copies has announced their bytes before its own arrival.
            T.barrier_arrive(shared.full[stage])

    return allocate, load_chunks


def _summary_macros(problem: ChunkProblem, columns: int) -> SummaryMacros:
    wide = problem.head_k_dim > HALF
    steps = chain_macros(problem, columns)

    @T.macro
    def read_ahead(shared, stage, is_state, registers):
        """What the next chunk reads from shared memory before its first product; P has V = 0."""
        if is_state:
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
    def begin(shared, summary, registers):
        steps.round_state(registers)
        if summary.num_chunks > 0:
            T.barrier_wait(shared.full[0], 0)
        read_ahead(shared, 0, summary.is_state, registers)

    @T.macro
    def run_chunk(shared, summary, step, registers):
        stage = step % SUMMARY_STAGES
        steps.multiply_state(registers, shared.k[stage, :, :], shared.k_high[stage, :, :], registers.u)
        steps.decay_state(registers)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)
        steps.make_values(registers)
        steps.add_values(registers, shared.z[stage, :, :], shared.z_high[stage, :, :])
        if step + 1 < summary.num_chunks:
            T.barrier_wait(shared.full[(step + 1) % SUMMARY_STAGES], ((step + 1) // SUMMARY_STAGES) & 1)
        read_ahead(shared, (step + 1) % SUMMARY_STAGES, summary.is_state, registers)
        if wide:
            T.wait_wgmma(1)
            T.warpgroup_fence_operand(registers.state, num_regs=ACCUMULATOR)
            T.copy(registers.state, registers.state_operand)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(registers.state_high, num_regs=ACCUMULATOR)
            T.copy(registers.state_high, registers.state_high_operand)
        else:
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(registers.state, num_regs=ACCUMULATOR)
            T.copy(registers.state, registers.state_operand)
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(shared.empty[stage])

    @T.macro
    def store_states(segment_starts, slot, head, registers):
        for i, j in T.Parallel(columns, HALF):
            segment_starts[slot, head, i, j] = registers.state[i, j]
        if wide:
            for i, j in T.Parallel(columns, HALF):
                segment_starts[slot, head, i, HALF + j] = registers.state_high[i, j]

    @T.macro
    def store_summands(transitions, slot, head, state, first):
        """Half of P's key columns, from `first` on, as two summands."""
        for i, j in T.Parallel(columns, HALF):
            transitions[slot, head, 0, i, first + j] = T.cast(state[i, j], TRANSITION_DTYPE)
        for i, j in T.Parallel(columns, HALF):
            transitions[slot, head, 1, i, first + j] = T.cast(
                state[i, j] - T.cast(T.cast(state[i, j], TRANSITION_DTYPE), "float32"), TRANSITION_DTYPE
            )

    @T.macro
    def store_transition(transitions, slot, head, registers):
        store_summands(transitions, slot, head, registers.state, 0)
        if wide:
            store_summands(transitions, slot, head, registers.state_high, HALF)

    return SummaryMacros(*_summary_copies(problem, columns), begin, run_chunk, store_states, store_transition)


def summaries(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_summaries`; decides: as for `prepare`."""
    head_k, head_v, heads, dtype = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads, problem.dtype
    pooled, has_initial, has_mask = problem.pooled, problem.has_initial_state, problem.has_mask
    columns = head_v  # V columns for h, or as many columns of the identity: both halves of a head share the copies
    math_threads = columns * 2
    wide = head_k > HALF

    num_tokens, bounds, slots = T.dynamic("num_tokens"), T.dynamic("num_bounds"), T.dynamic("num_slots")
    segment_slots = T.dynamic("num_segment_slots")
    k_type = token_tensor("k", num_tokens, problem.num_k_heads, head_k, dtype)
    v_type = token_tensor("v", num_tokens, problem.num_v_heads, head_v, dtype)
    initial_type = state_tensor("initial", bounds, problem, problem.state_dtype if has_initial else None)
    index_type = row_tensor("indices", bounds, problem, problem.index_dtype)
    mask_type = row_tensor("mask", bounds, problem, "bool" if has_mask else None)
    bounds_type = bounds_tensor(bounds, problem)
    take_turn = turn(decides, cuts=True)
    load_state = state_loader(problem, columns)
    steps = chain_macros(problem, columns)
    roles = _summary_macros(problem, columns)

    @T.prim_func
    def chunk_summaries(
        k: k_type,
        v: v_type,
        initial_state: initial_type,
        indices: index_type,
        mask: mask_type,
        cu_seqlens: bounds_type,
        tiles: tiles_tensor(slots, problem),
        vectors: T.Tensor((slots, heads, NUM_VECTORS, CHUNK), "float32"),
        segment_starts: starts_tensor(segment_slots, problem),
        transitions: transitions_tensor(segment_slots, problem),
        null_slot: T.int32,
        segment: T.int32,
        cut_above: T.int32,
    ):
        with T.Kernel(2, segment_slots, heads, threads=math_threads + PRODUCER_THREADS) as (kind, piece, head):
            shared = roles.allocate()
            registers = steps.allocate()
            place = T.alloc_local((2,), "int32")
            read_slot = T.alloc_var("int64", init=0)
            live = T.alloc_var("bool", init=True)
            starts = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout(
                {buffer: make_swizzled_layout(buffer) for buffer in shared.v} | {registers.v: transposed_accumulator(columns)}
            )

            take_turn(cu_seqlens, bounds, cut_above)
            find_segment(cu_seqlens, bounds, piece, segment, place)
            sequence = place[0]
            index = place[1]
            is_state = kind == 0
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            token_begin = whole_begin + index * segment * CHUNK
            first_slot = whole_begin // CHUNK + sequence + index * segment
            read_slot = T.cast(sequence, "int64")
            live = whole_length - index * segment * CHUNK > segment * CHUNK and (is_state or index > 0)
            if pooled:
                read_slot = T.cast(indices[sequence], "int64")
                live = live and read_slot > T.cast(null_slot, "int64")
            num_chunks = T.if_then_else(live, segment, 0)
            summary = Summary(head, is_state, token_begin, first_slot, num_chunks)

            if tx >= math_threads:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < math_threads + 32:
                    roles.load_chunks(Tensors(k=k, v=v, tiles=tiles, vectors=vectors), shared, summary)
            else:
                T.set_max_nreg(MATH_REGISTERS, 1)
                T.clear(registers.v)
                for i, j in T.Parallel(columns, HALF):
                    registers.state[i, j] = T.if_then_else(i == j and not is_state, 1.0, 0.0)
                if wide:
                    for i, j in T.Parallel(columns, HALF):
                        registers.state_high[i, j] = T.if_then_else(i == j + HALF and not is_state, 1.0, 0.0)
                if has_initial:
                    starts = live and is_state and index == 0
                    if has_mask:
                        if starts:
                            starts = mask[sequence]
                    if starts:
                        load_state(initial_state, read_slot, head, 0, registers.state, registers.state_high)
                if live and is_state and index == 0:
                    roles.store_states(segment_starts, piece, head, registers)
                roles.begin(shared, summary, registers)
                for step in T.serial(num_chunks):
                    roles.run_chunk(shared, summary, step, registers)
                if live:
                    if is_state:
                        roles.store_states(segment_starts, piece + 1, head, registers)
                    else:
                        roles.store_transition(transitions, piece, head, registers)

    return chunk_summaries


def starts(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_starts`; decides: as of `prepare`."""
    head_k, head_v, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    pooled = problem.pooled
    wide = head_k > HALF
    slices = head_v // PANEL
    dtype = TRANSITION_DTYPE

    bounds, segment_slots = T.dynamic("num_bounds"), T.dynamic("num_segment_slots")
    index_type = row_tensor("indices", bounds, problem, problem.index_dtype)
    bounds_type = bounds_tensor(bounds, problem)
    take_turn = turn(decides, cuts=True)

    @T.macro
    def load(source, target, barriers, stage, piece, head, before, after):
        """Both summands of a quarter of P, [64 before, 64 after]."""
        for part in T.unroll(2):
            T.tma_copy(
                source[piece, head, part, before * HALF : (before + 1) * HALF, after * HALF : (after + 1) * HALF],
                target[stage * 2 + part, :, :],
                barrier=barriers[stage],
                leader_scope_threads=32,
            )

    @T.macro
    def split_up(source, operand, rest):
        """source = operand + rest, nearly."""
        for i, j in T.Parallel(PANEL, HALF):
            operand[i, j] = T.cast(source[i, j], dtype)
        for i, j in T.Parallel(PANEL, HALF):
            rest[i, j] = T.cast(source[i, j] - T.cast(operand[i, j], "float32"), dtype)

    @T.macro
    def multiply(operand, rest, transition, stage, accumulator):
        T.wgmma_gemm(operand, transition[stage * 2, :, :], accumulator, policy=ROWS)
        T.wgmma_gemm(rest, transition[stage * 2, :, :], accumulator, policy=ROWS)
        T.wgmma_gemm(operand, transition[stage * 2 + 1, :, :], accumulator, policy=ROWS)

    @T.prim_func
    def chunk_starts(
        indices: index_type,
        cu_seqlens: bounds_type,
        segment_starts: starts_tensor(segment_slots, problem),
        transitions: transitions_tensor(segment_slots, problem),
        null_slot: T.int32,
        segment: T.int32,
        cut_above: T.int32,
    ):
        with T.Kernel(slices, bounds - 1, heads, threads=START_THREADS + 32) as (v_slice, sequence, head):
            # Quarters of P: [K before, K after], low or high.
            low_low_shared = T.alloc_shared((START_STAGES * 2, HALF, HALF), dtype)
            low_high_shared = T.alloc_shared((START_STAGES * 2, HALF, HALF), dtype)
            high_low_shared = T.alloc_shared((START_STAGES * 2, HALF, HALF), dtype)
            high_high_shared = T.alloc_shared((START_STAGES * 2, HALF, HALF), dtype)
            full = T.alloc_barrier([32] * START_STAGES)
            empty = T.alloc_barrier([START_THREADS // 32] * START_STAGES)
            state_fragment = T.alloc_fragment((PANEL, HALF), "float32")
            state_high_fragment = T.alloc_fragment((PANEL, HALF), "float32")
            next_fragment = T.alloc_fragment((PANEL, HALF), "float32")
            next_high_fragment = T.alloc_fragment((PANEL, HALF), "float32")
            operand = T.alloc_fragment((PANEL, HALF), dtype)
            rest = T.alloc_fragment((PANEL, HALF), dtype)
            high_operand = T.alloc_fragment((PANEL, HALF), dtype)
            high_rest = T.alloc_fragment((PANEL, HALF), dtype)
            first = T.alloc_local((1,), "int32")  # in a register: a plain name would be divided anew at every use
            live = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()

            take_turn(cu_seqlens, bounds, cut_above)
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            first[0] = whole_begin // (segment * CHUNK) + sequence + 1  # the second segment's slot
            column_begin = v_slice * PANEL
            if pooled:
                live = indices[sequence] > null_slot
            # Two segments need nothing: what lies in the second one's slot is its start already.
            steps = T.if_then_else(live, T.max(T.ceildiv(whole_length, segment * CHUNK) - 2, 0), 0)

            if tx >= START_THREADS:
                for step in T.serial(steps):
                    stage = step % START_STAGES
                    T.barrier_wait(empty[stage], ((step // START_STAGES) & 1) ^ 1)
                    load(transitions, low_low_shared, full, stage, first[0] + step, head, 0, 0)
                    if wide:
                        load(transitions, low_high_shared, full, stage, first[0] + step, head, 0, 1)
                        load(transitions, high_low_shared, full, stage, first[0] + step, head, 1, 0)
                        load(transitions, high_high_shared, full, stage, first[0] + step, head, 1, 1)
                    T.barrier_arrive(full[stage])
            elif steps > 0:
                for i, j in T.Parallel(PANEL, HALF):
                    state_fragment[i, j] = segment_starts[first[0], head, column_begin + i, j]
                    next_fragment[i, j] = segment_starts[first[0] + 1, head, column_begin + i, j]
                if wide:
                    for i, j in T.Parallel(PANEL, HALF):
                        state_high_fragment[i, j] = segment_starts[first[0], head, column_begin + i, HALF + j]
                        next_high_fragment[i, j] = segment_starts[first[0] + 1, head, column_begin + i, HALF + j]
                for step in T.serial(steps):
                    stage = step % START_STAGES
                    split_up(state_fragment, operand, rest)
                    T.copy(next_fragment, state_fragment)
                    if wide:
                        split_up(state_high_fragment, high_operand, high_rest)
                        T.copy(next_high_fragment, state_high_fragment)
                    T.barrier_wait(full[stage], (step // START_STAGES) & 1)
                    multiply(operand, rest, low_low_shared, stage, state_fragment)
                    if wide:
                        multiply(high_operand, high_rest, high_low_shared, stage, state_fragment)
                        multiply(operand, rest, low_high_shared, stage, state_high_fragment)
                        multiply(high_operand, high_rest, high_high_shared, stage, state_high_fragment)
                    # h of the step behind this one; in the last step, anything of this sequence.
                    ahead = first[0] + T.min(step + 2, steps)
                    for i, j in T.Parallel(PANEL, HALF):
                        next_fragment[i, j] = segment_starts[ahead, head, column_begin + i, j]
                    if wide:
                        for i, j in T.Parallel(PANEL, HALF):
                            next_high_fragment[i, j] = segment_starts[ahead, head, column_begin + i, HALF + j]
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(state_fragment, num_regs=ACCUMULATOR)
                    if wide:
                        T.warpgroup_fence_operand(state_high_fragment, num_regs=ACCUMULATOR)
                    if tx % 32 == 0:
                        T.barrier_arrive(empty[stage])
                    for i, j in T.Parallel(PANEL, HALF):
                        segment_starts[first[0] + step + 1, head, column_begin + i, j] = state_fragment[i, j]
                    if wide:
                        for i, j in T.Parallel(PANEL, HALF):
                            segment_starts[first[0] + step + 1, head, column_begin + i, HALF + j] = state_high_fragment[i, j]

    return chunk_starts
