"""Macros of the chain of chunks: the state in registers, one chunk after the other.

`chunk_chain`, the one launch (`fused`) and the segments' summaries are built from them. A math warpgroup owns 64 rows (V
columns) of S^T and computes, per chunk,

    U^T  = S^T K^T              O^T = S^T Q^T                     S^T rounded to 16 bits, A operand from registers
    W^T  = V^T - exp(c) U^T     columns of tokens past the end are set to zero here
    S^T  = exp(c_last) S^T + W^T Z
    O^T  = exp(c) O^T + W^T R^T

The layout of a float32 accumulator, rounded, is the layout of a register operand, so nothing of the chain passes through shared
memory. K, Q, Z and S^T are kept as halves of 64 key columns, in tuples: one half where there are 64 key columns. The order of the
products is Q S, W Z, W R^T, and U of the next chunk: W is made while Q S runs, S is rounded while W R^T runs, the output is
converted while U runs. The waits below count on this order.
"""

from typing import Any

import tilelang.language as T

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, HALF, NUM_VECTORS, ROW_LAST, ROW_STATE_KEY, ROW_STATE_QUERY, TILE_R, TILE_Z
from kernels_tl.chunk.sizes import PANEL, STAGES
from kernels_tl.chunk.types import store_state
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load, bulk_store

ACCUMULATOR = 32  # registers per thread of a [64, 64] float32 accumulator
ROWS = T.GemmWarpPolicy.FullRow  # each math warpgroup owns 64 rows of every product


def transposed_accumulator(columns: int) -> Any:
    """The layout of [columns / 64 panels * 64 tokens, 64] in which each panel is the transpose of a float32 accumulator [64, 64].

    Copies between it and row-major shared memory become matrix loads and stores with transposition.
    """

    def thread(row: Any, column: Any) -> Any:
        return row // CHUNK * 128 + column // 16 * 32 + column % 8 * 4 + row % 8 // 2

    def register(row: Any, column: Any) -> Any:
        return row % CHUNK // 8 * 4 + column % 16 // 8 * 2 + row % 2

    return T.Fragment([columns // PANEL * CHUNK, PANEL], forward_thread_fn=thread, forward_index_fn=register)


def halves_of(problem: ChunkProblem) -> tuple[int, ...]:
    """The halves of the key columns; a loop over a tuple is Python's, one over a range the kernel's."""
    return tuple(range(problem.head_k_dim // HALF))


def allocate_chain(problem: ChunkProblem, columns: int) -> Any:
    """Registers of the math warpgroups for `columns` V columns, 64 each."""
    halves, rows = halves_of(problem), columns // PANEL * CHUNK
    return build.named(
        columns=columns,
        state=tuple(T.alloc_fragment((columns, HALF), "float32") for _ in halves),  # S^T
        state_operand=tuple(T.alloc_fragment((columns, HALF), problem.dtype) for _ in halves),  # the same rounded, left operands
        u=T.alloc_fragment((columns, CHUNK), "float32"),
        v=T.alloc_fragment((rows, PANEL), problem.dtype),  # [tokens, columns] in panels, transposed_accumulator
        w_operand=T.alloc_fragment((columns, CHUNK), problem.dtype),
        factor=T.alloc_fragment((columns, CHUNK), "float32"),  # of U of each token
        last=T.alloc_local((1,), "float32"),  # exp(c_last)
    )


def allocate_output(problem: ChunkProblem, columns: int) -> Any:
    """More registers, of kernels that write o."""
    return build.named(
        out=T.alloc_fragment((columns, CHUNK), "float32"),  # O^T
        factor=T.alloc_fragment((columns, CHUNK), "float32"),  # of Q S of each token
        rows=T.alloc_fragment((columns // PANEL * CHUNK, PANEL), problem.dtype),  # [tokens, columns], transposed_accumulator
    )


@T.macro
def round_state(registers):
    for fragment, operand in zip(registers.state, registers.state_operand, strict=True):
        T.copy(fragment, operand)


@T.macro
def multiply_state(registers, tiles, stage, accumulator):
    """accumulator = S^T tile^T, issued; tiles: by halves."""
    for half, tile in enumerate(tiles):
        T.wgmma_gemm(
            *(registers.state_operand[half], tile[stage, :, :], accumulator), transpose_B=True, clear_accum=half == 0, policy=ROWS
        )


@T.macro
def make_values(registers):
    """W^T of a full chunk."""
    v, factor, u = registers.v, registers.factor, registers.u
    for i, j in T.Parallel(registers.columns, CHUNK):
        registers.w_operand[i, j] = T.cast(v[i // PANEL * CHUNK + j, i % PANEL], "float32") - factor[i, j] * u[i, j]


@T.macro
def make_valid_values(registers, valid):
    """W^T of a chunk of `valid` tokens, while Q S runs."""
    # Nothing to wait for: U is there. Without this wait the assembler would wait for Q S where U and S are read.
    T.wait_wgmma(len(registers.state))
    T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)
    v, factor, u = registers.v, registers.factor, registers.u
    if valid == CHUNK:
        make_values(registers)
    else:
        for i, j in T.Parallel(registers.columns, CHUNK):
            registers.w_operand[i, j] = T.if_then_else(
                j < valid, T.cast(v[i // PANEL * CHUNK + j, i % PANEL], "float32") - factor[i, j] * u[i, j], 0.0
            )


@T.macro
def decay_state(registers):
    for fragment in registers.state:
        for i, j in T.Parallel(registers.columns, HALF):
            fragment[i, j] *= registers.last[0]


@T.macro
def add_values(registers, z, stage):
    """S^T += W^T Z, issued; z: by halves."""
    for half, tile in enumerate(z):
        T.wgmma_gemm(registers.w_operand, tile[stage, :, :], registers.state[half], policy=ROWS)


@T.macro
def make_output(registers, output, r):
    """O^T = exp(c) O^T + W^T R^T: scaled while W Z runs, then issued."""
    T.wait_wgmma(len(registers.state))  # Q S
    T.warpgroup_fence_operand(output.out, num_regs=ACCUMULATOR)
    for i, j in T.Parallel(registers.columns, CHUNK):
        output.out[i, j] *= output.factor[i, j]
    T.wgmma_gemm(registers.w_operand, r, output.out, transpose_B=True, policy=ROWS)


@T.macro
def multiply_next_keys(registers, k, stage):
    """U^T of the next chunk, issued, from the state rounded while W R^T runs. After the last chunk its result is not used."""
    for half, tile in enumerate(k):
        T.wait_wgmma(2 if half else len(registers.state))  # this half of W Z
        T.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR)
        T.copy(registers.state[half], registers.state_operand[half])
        T.wgmma_gemm(
            *(registers.state_operand[half], tile[stage, :, :], registers.u), transpose_B=True, clear_accum=half == 0, policy=ROWS
        )


@T.macro
def finish_output(registers, output):
    """Waits for W R^T."""
    T.wait_wgmma(len(registers.state))
    T.warpgroup_fence_operand(output.out, num_regs=ACCUMULATOR)


@T.macro
def transpose_output(registers, output):
    for i, j in T.Parallel(registers.columns, CHUNK):
        output.rows[i // PANEL * CHUNK + j, i % PANEL] = output.out[i, j]


@T.macro
def wait_for_keys(registers):
    """Waits for U."""
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)


@T.macro
def store_checkpoints(problem, tensors, sequence, done, head, column_begin, registers, write_slot: T.Ref):
    """Stores the state to the slots whose checkpoint is after the sequence's first `done` tokens: of the pool, or of a tensor of
    their own."""
    target = tensors.final_state if problem.checkpoint_state_dtype is None else tensors.checkpoint_states
    for column in T.serial(tensors.checkpoint_offsets.shape[1]):
        if tensors.checkpoint_offsets[sequence, column] == done:
            write_slot = T.cast(tensors.checkpoint_slots[sequence, column], "int64")
            if write_slot > T.cast(tensors.null_slot, "int64"):
                store_state(problem, target, write_slot, head, column_begin, registers)


@T.macro
def store_tail(out, begin, valid, head, column_begin, output):
    """Stores the output of the last chunk from registers: it has fewer than 64 tokens."""
    for i, j in T.Parallel(PANEL, CHUNK):
        if j < valid:
            row = T.cast(begin + j, "int64")
            out[row, head, column_begin + i] = output.rows[i // PANEL * CHUNK + j, i % PANEL]


@T.macro
def store_final(problem, tensors, sequence, head, column_begin, registers, live: T.Ref, write_slot: T.Ref):
    """Stores the final state of a live sequence."""
    write_slot = T.cast(sequence, "int64")
    if problem.pooled and not problem.has_final_indices:
        write_slot = T.cast(tensors.state_indices[sequence], "int64")
    if problem.has_final_indices:
        write_slot = T.cast(tensors.final_state_indices[sequence], "int64")
        live = live and write_slot > T.cast(tensors.null_slot, "int64")
    if live:
        store_state(problem, tensors.final_state, write_slot, head, column_begin, registers)


# The chunks that `chunk_chain` and `chunk_summaries` read from the workspace, STAGES at a time.


def allocate_stages(problem: ChunkProblem, columns: int, with_output: bool) -> Any:
    """Shared memory and barriers; with_output: Q and R too."""
    halves, dtype, panels = halves_of(problem), problem.dtype, columns // PANEL
    return build.named(
        k=tuple(T.alloc_shared((STAGES, CHUNK, HALF), dtype) for _ in halves),
        q=tuple(T.alloc_shared((STAGES, CHUNK, HALF), dtype) for _ in halves if with_output),
        # One buffer per stage, in panels of 64 columns: matrix loads ignore the offset of a region.
        v=tuple(T.alloc_shared((panels * CHUNK, PANEL), dtype) for _ in range(STAGES)),
        z=tuple(T.alloc_shared((STAGES, CHUNK, HALF), dtype) for _ in halves),
        r=T.alloc_shared((STAGES, CHUNK, CHUNK), dtype) if with_output else None,
        vectors=T.alloc_shared((STAGES, NUM_VECTORS, CHUNK), "float32"),
        full=T.alloc_barrier([32] * STAGES),
        empty=T.alloc_barrier([columns * 2 // 32] * STAGES),
    )


@T.macro
def load_halves(source, head, token, halves, buffer, barrier):
    """64 rows of K or Q, by halves, into buffers of several."""
    for half, target in enumerate(halves):
        columns = slice(half * HALF, (half + 1) * HALF)
        bulk_load(source[token : token + CHUNK, head, columns], target[buffer, :, :], barrier[buffer])


@T.macro
def load_panels(source, head, token, column_begin, buffer, barrier, stage):
    for panel in T.unroll(int(buffer.shape[0]) // CHUNK):
        columns = slice(column_begin + panel * PANEL, column_begin + (panel + 1) * PANEL)
        rows = slice(panel * CHUNK, (panel + 1) * CHUNK)
        bulk_load(source[token : token + CHUNK, head, columns], buffer[rows, :], barrier[stage])


@T.macro
def load_values(source, head, token, column_begin, buffers, stage, barrier, first):
    """64 rows of V into the buffer of a stage, `first` or a later one."""
    if first + 1 == len(buffers):
        load_panels(source, head, token, column_begin, buffers[first], barrier, first)
    elif stage == first:
        load_panels(source, head, token, column_begin, buffers[first], barrier, first)
    else:
        load_values(source, head, token, column_begin, buffers, stage, barrier, first + 1)


@T.macro
def read_values(buffers, stage, values, first):
    """V of a stage into registers; the stage is `first` or a later one."""
    if first + 1 == len(buffers):
        T.copy(buffers[first], values)
    elif stage == first:
        T.copy(buffers[first], values)
    else:
        read_values(buffers, stage, values, first + 1)


@T.macro
def load_chunks(problem, tensors, shared, piece):
    """The loading warp: every chunk of a piece of a sequence, one stage each; V only where the piece has values."""
    head, heads = piece.head, problem.num_state_heads
    q_head, k_head = head // (heads // problem.num_q_heads), head // (heads // problem.num_k_heads)
    v_head = head // (heads // problem.num_v_heads)
    for step in T.serial(piece.num_chunks):
        stage = step % STAGES
        T.barrier_wait(shared.empty[stage], ((step // STAGES) & 1) ^ 1)
        token = piece.token_begin + step * CHUNK
        slot = piece.first_slot + step
        load_halves(tensors.k, k_head, token, shared.k, stage, shared.full)
        if shared.r is not None:
            load_halves(tensors.q, q_head, token, shared.q, stage, shared.full)
        if piece.has_values:
            load_values(tensors.v, v_head, token, piece.column_begin, shared.v, stage, shared.full, 0)
        bulk_load(tensors.vectors[slot, head, :, :], shared.vectors[stage, :, :], shared.full[stage])
        for half, z in enumerate(shared.z):
            bulk_load(tensors.tiles[slot, head, TILE_Z + half, :, :], z[stage, :, :], shared.full[stage])
        if shared.r is not None:
            bulk_load(tensors.tiles[slot, head, TILE_R, :, :], shared.r[stage, :, :], shared.full[stage])
        # All lanes arrive: the lane that was elected for the copies has announced their bytes before its own arrival.
        T.barrier_arrive(shared.full[stage])


@T.macro
def read_factors(vectors, stage, registers):
    for i, j in T.Parallel(registers.columns, CHUNK):
        registers.factor[i, j] = vectors[stage, ROW_STATE_KEY, j]
    registers.last[0] = vectors[stage, ROW_LAST, 0]


@T.macro
def read_query_factors(vectors, stage, registers, output):
    for i, j in T.Parallel(registers.columns, CHUNK):
        output.factor[i, j] = vectors[stage, ROW_STATE_QUERY, j]


@T.macro
def read_ahead(shared, stage, piece, registers):
    """Reads that the next chunk needs from shared memory before its first product."""
    if piece.has_values:
        read_values(shared.v, stage, registers.v, 0)
    read_factors(shared.vectors, stage, registers)


@T.macro
def begin_chain(shared, piece, registers):
    round_state(registers)
    if piece.num_chunks > 0:
        T.barrier_wait(shared.full[0], 0)
    read_ahead(shared, 0, piece, registers)


@T.macro
def store_chunk(staged, out, piece, token):
    """The staged output of a full chunk."""
    columns = slice(piece.column_begin, piece.column_begin + PANEL)
    bulk_store(staged, out[token : token + CHUNK, piece.head, columns])
