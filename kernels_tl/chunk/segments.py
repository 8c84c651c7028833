"""The two launches between `chunk_prepare` and `chunk_chain` that cut sequences into segments of `split_chunks` chunks.

A run of chunks maps the state before it to P S + h. For every segment but its sequence's last, `chunk_summaries` computes h (the
state after it from a zero state; for the first segment from the sequence's own start) and the transition P (not for the first),
each in a block of its own: the chain of state_chain.py without Q, output and R; P is the result for the identity with V = 0.
`chunk_starts` then walks the segments of a sequence, a block per head and 64 V columns:

    start_1 = h_0        start_{i+1} = P_i start_i + h_i

P and the starts enter the tensor cores as two bfloat16 summands each, as hi hi + lo hi + hi lo. In the workspace h_i is where
start_{i+1} will be, and the first segment's start is there too: the last segment's block may write a pool's slot before the
first one's has begun.

Only whole segments are summarised, so there are no tails here. Barriers (`tl.disable_thread_storage_sync`) in both:

| barrier | waits | arrives (count) |
|---|---|---|
| full[stage] | math | the copying warp (32) + the bytes of the stage's bulk copies |
| empty[stage] | the copying warp | one lane of every math warp |
"""

from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk import state_chain as steps
from kernels_tl.chunk.constants import CHUNK, HALF, TRANSITION_DTYPE
from kernels_tl.chunk.sizes import MATH_REGISTERS, PANEL, PRODUCER_REGISTERS, PRODUCER_THREADS, STAGES
from kernels_tl.chunk.state_chain import ACCUMULATOR, ROWS, halves_of
from kernels_tl.chunk.types import declare, exit_unless_chosen, find_segment, load_state
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load
from kernels_tl.common.versions import prim_func

START_STAGES = 3
START_THREADS = 128  # of the math warpgroup


class Summary(NamedTuple):
    """The segment that a summary block works on, all V columns of it."""

    head: Any
    has_values: Any  # the result is h of the segment; else its transition P, with V = 0
    token_begin: Any
    first_slot: Any  # workspace slot of the first chunk
    num_chunks: Any  # 0: nothing to do
    column_begin: int = 0


@T.macro
def run_chunk(shared, summary, step, registers):
    stage = step % STAGES
    steps.multiply_state(registers, shared.k, stage, registers.u)
    steps.decay_state(registers)
    steps.wait_for_keys(registers)
    steps.make_values(registers)
    steps.add_values(registers, shared.z, stage)
    if step + 1 < summary.num_chunks:
        T.barrier_wait(shared.full[(step + 1) % STAGES], ((step + 1) // STAGES) & 1)
    steps.read_ahead(shared, (step + 1) % STAGES, summary, registers)
    for half, fragment in enumerate(registers.state):
        T.wait_wgmma(len(registers.state) - 1 - half)
        T.warpgroup_fence_operand(fragment, num_regs=ACCUMULATOR)
        T.copy(fragment, registers.state_operand[half])
    if T.get_thread_binding() % 32 == 0:
        T.barrier_arrive(shared.empty[stage])


@T.macro
def store_start(segment_starts, slot, head, column_begin, fragments):
    for half, fragment in enumerate(fragments):
        for i, j in T.Parallel(int(fragment.shape[0]), HALF):
            segment_starts[slot, head, column_begin + i, HALF * half + j] = fragment[i, j]


@T.macro
def store_transition(transitions, slot, head, registers):
    """P as two summands."""
    for half, state in enumerate(registers.state):
        for i, j in T.Parallel(registers.columns, HALF):
            transitions[slot, head, 0, i, HALF * half + j] = T.cast(state[i, j], TRANSITION_DTYPE)
        for i, j in T.Parallel(registers.columns, HALF):
            transitions[slot, head, 1, i, HALF * half + j] = T.cast(
                state[i, j] - T.cast(T.cast(state[i, j], TRANSITION_DTYPE), "float32"), TRANSITION_DTYPE
            )


def summaries(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_summaries`; decides: as for `prepare`."""
    names = "k v initial_state state_indices has_initial_state cu_seqlens tiles vectors segment_starts transitions"
    names += " null_slot split_chunks split_if_longest_exceeds"
    columns = problem.head_v_dim  # V columns for h, or as many columns of the identity: both halves of a head share the copies
    math_threads = columns * 2

    @prim_func
    def chunk_summaries():
        tensors = declare(problem, names)
        cu_seqlens, split_chunks, segment_starts = tensors.cu_seqlens, tensors.split_chunks, tensors.segment_starts
        grid = (2, segment_starts.shape[0], problem.num_state_heads)
        with T.Kernel(*grid, threads=math_threads + PRODUCER_THREADS) as (kind, piece, head):
            shared = steps.allocate_stages(problem, columns, with_output=False)
            registers = steps.allocate_chain(problem, columns)
            place = T.alloc_local((2,), "int32")
            read_slot = T.alloc_var("int64", init=0)
            live, starts = build.variables(2, "bool", init=True)
            tx = T.get_thread_binding()
            T.annotate_layout(
                {buffer: make_swizzled_layout(buffer) for buffer in shared.v}
                | {registers.v: steps.transposed_accumulator(columns)}
            )

            exit_unless_chosen(decides, True, tensors)
            find_segment(cu_seqlens, piece, split_chunks, place)
            sequence = place[0]
            index = place[1]
            is_state = kind == 0
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            token_begin = whole_begin + index * split_chunks * CHUNK
            first_slot = whole_begin // CHUNK + sequence + index * split_chunks
            read_slot = T.cast(sequence, "int64")
            live = whole_length - index * split_chunks * CHUNK > split_chunks * CHUNK and (is_state or index > 0)
            if problem.pooled:
                read_slot = T.cast(tensors.state_indices[sequence], "int64")
                live = live and read_slot > T.cast(tensors.null_slot, "int64")
            num_chunks = T.if_then_else(live, split_chunks, 0)
            summary = Summary(head, is_state, token_begin, first_slot, num_chunks)

            if tx >= math_threads:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < math_threads + 32:
                    steps.load_chunks(problem, tensors, shared, summary)
            else:
                T.set_max_nreg(MATH_REGISTERS, 1)
                T.clear(registers.v)
                for half, fragment in enumerate(registers.state):
                    for i, j in T.Parallel(columns, HALF):
                        fragment[i, j] = T.if_then_else(i == j + HALF * half and not is_state, 1.0, 0.0)
                if problem.has_initial_state:
                    starts = live and is_state and index == 0
                    if problem.has_mask:
                        starts = starts and tensors.has_initial_state[sequence]
                    if starts:
                        load_state(problem, tensors.initial_state, read_slot, head, 0, registers)
                if live and is_state and index == 0:
                    store_start(segment_starts, piece, head, 0, registers.state)
                steps.begin_chain(shared, summary, registers)
                for step in T.serial(num_chunks):
                    run_chunk(shared, summary, step, registers)
                if live:
                    if is_state:
                        store_start(segment_starts, piece + 1, head, 0, registers.state)
                    else:
                        store_transition(tensors.transitions, piece, head, registers)

    return chunk_summaries


@T.macro
def load_transition(source, quarters, barriers, stage, piece, head):
    """Loads both summands of P by quarters, [64 before, 64 after] each."""
    for before, row in enumerate(quarters):
        for after, target in enumerate(row):
            rows, columns = slice(before * HALF, (before + 1) * HALF), slice(after * HALF, (after + 1) * HALF)
            for part in T.unroll(2):
                bulk_load(source[piece, head, part, rows, columns], target[stage * 2 + part, :, :], barriers[stage])


@T.macro
def load_start(segment_starts, slot, head, column_begin, fragments):
    for half, fragment in enumerate(fragments):
        for i, j in T.Parallel(PANEL, HALF):
            fragment[i, j] = segment_starts[slot, head, column_begin + i, HALF * half + j]


@T.macro
def split_up(source, operand, rest):
    """source = operand + rest, nearly."""
    for i, j in T.Parallel(PANEL, HALF):
        operand[i, j] = T.cast(source[i, j], TRANSITION_DTYPE)
    for i, j in T.Parallel(PANEL, HALF):
        rest[i, j] = T.cast(source[i, j] - T.cast(operand[i, j], "float32"), TRANSITION_DTYPE)


@T.macro
def multiply(operand, rest, transition, stage, accumulator):
    T.wgmma_gemm(operand, transition[stage * 2, :, :], accumulator, policy=ROWS)
    T.wgmma_gemm(rest, transition[stage * 2, :, :], accumulator, policy=ROWS)
    T.wgmma_gemm(operand, transition[stage * 2 + 1, :, :], accumulator, policy=ROWS)


def _allocate_starts(problem: ChunkProblem) -> Any:
    halves, dtype = halves_of(problem), TRANSITION_DTYPE
    return build.named(
        # Quarters of P by halves of K before, then after.
        transition=tuple(tuple(T.alloc_shared((START_STAGES * 2, HALF, HALF), dtype) for _ in halves) for _ in halves),
        full=T.alloc_barrier([32] * START_STAGES),
        empty=T.alloc_barrier([START_THREADS // 32] * START_STAGES),
        state=tuple(T.alloc_fragment((PANEL, HALF), "float32") for _ in halves),
        following=tuple(T.alloc_fragment((PANEL, HALF), "float32") for _ in halves),
        operand=tuple(T.alloc_fragment((PANEL, HALF), dtype) for _ in halves),
        rest=tuple(T.alloc_fragment((PANEL, HALF), dtype) for _ in halves),
        first=T.alloc_local((1,), "int32"),  # in a register: a plain name would be divided anew at every use
    )


def starts(problem: ChunkProblem, decides: bool = False) -> Any:
    """The prim_func `chunk_starts`; decides: as for `prepare`."""
    names = "state_indices cu_seqlens segment_starts transitions null_slot split_chunks split_if_longest_exceeds"

    @prim_func
    def chunk_starts():
        tensors = declare(problem, names)
        cu_seqlens, split_chunks, segment_starts = tensors.cu_seqlens, tensors.split_chunks, tensors.segment_starts
        grid = (problem.head_v_dim // PANEL, cu_seqlens.shape[0] - 1, problem.num_state_heads)
        with T.Kernel(*grid, threads=START_THREADS + 32) as (v_slice, sequence, head):
            own = _allocate_starts(problem)
            full, empty, first = own.full, own.empty, own.first
            live = T.alloc_var("bool", init=True)
            tx = T.get_thread_binding()

            exit_unless_chosen(decides, True, tensors)
            whole_begin = T.cast(cu_seqlens[sequence], "int32")
            whole_length = T.cast(cu_seqlens[sequence + 1], "int32") - whole_begin
            first[0] = whole_begin // (split_chunks * CHUNK) + sequence + 1  # the second segment's slot
            column_begin = v_slice * PANEL
            if problem.pooled:
                live = tensors.state_indices[sequence] > tensors.null_slot
            # Two segments need nothing: what lies in the second one's slot is its start already.
            num_steps = T.if_then_else(live, T.max(T.ceildiv(whole_length, split_chunks * CHUNK) - 2, 0), 0)

            if tx >= START_THREADS:
                for step in T.serial(num_steps):
                    stage = step % START_STAGES
                    T.barrier_wait(empty[stage], ((step // START_STAGES) & 1) ^ 1)
                    load_transition(tensors.transitions, own.transition, full, stage, first[0] + step, head)
                    T.barrier_arrive(full[stage])
            elif num_steps > 0:
                load_start(segment_starts, first[0], head, column_begin, own.state)
                load_start(segment_starts, first[0] + 1, head, column_begin, own.following)
                for step in T.serial(num_steps):
                    stage = step % START_STAGES
                    for half, state in enumerate(own.state):
                        split_up(state, own.operand[half], own.rest[half])
                        T.copy(own.following[half], state)
                    T.barrier_wait(full[stage], (step // START_STAGES) & 1)
                    for after, state in enumerate(own.state):
                        for before, quarters in enumerate(own.transition):
                            multiply(own.operand[before], own.rest[before], quarters[after], stage, state)
                    # h for the step after the next; in the last step, any h of this sequence.
                    load_start(segment_starts, first[0] + T.min(step + 2, num_steps), head, column_begin, own.following)
                    T.wait_wgmma(0)
                    for state in own.state:
                        T.warpgroup_fence_operand(state, num_regs=ACCUMULATOR)
                    if tx % 32 == 0:
                        T.barrier_arrive(empty[stage])
                    store_start(segment_starts, first[0] + step + 1, head, column_begin, own.state)

    return chunk_starts
