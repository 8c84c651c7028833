"""Macros of the chain of chunks: the state in registers, one chunk after the other.

`chunk_chain`, the one launch (`fused`) and the segments' summaries are built from them. A math warpgroup owns 64 rows (V
columns) of S^T and computes, per chunk,

    U^T  = S^T K^T              O^T = S^T Q^T                     S^T rounded to 16 bits, A operand from registers
    W^T  = V^T - exp(c) U^T     columns of tokens past the end are set to zero here
    S^T  = exp(c_last) S^T + W^T Z
    O^T  = exp(c) O^T + W^T R^T

The layout of a float32 accumulator, rounded, is the layout of a register operand, so nothing of the chain passes through shared
memory. K, Q, Z and S^T are kept as halves of 64 key columns; 64 key columns have no high half. The order of the products is Q S,
W Z, W R^T, and U of the next chunk: W is made while Q S runs, S is rounded while W R^T runs, the output is converted while U
runs. The waits below count on this order.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from gdn.problems import ChunkProblem
from kernels_tl.chunk.types import CHUNK, HALF, state_storer

PANEL = 64  # V columns of a math warpgroup: the rows of its wgmmas
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


@dataclass(frozen=True)
class ChainRegisters:
    """Registers of the math warpgroups."""

    state: Any  # [columns, 64] float32: S^T of key columns 0 to 63
    state_high: Any  # of key columns 64 to 127
    state_operand: Any  # the same rounded, as left operands
    state_high_operand: Any
    u: Any  # [columns, 64 tokens] float32
    v: Any  # [tokens, columns] in panels, transposed_accumulator
    w_operand: Any  # [columns, 64 tokens]
    factor: Any  # [columns, 64 tokens] float32: the factor of U of each token
    last: Any  # [1] float32: exp(c_last)


@dataclass(frozen=True)
class OutputRegisters:
    """Registers of the math warpgroups of kernels that write o."""

    out: Any  # [columns, 64 tokens] float32: O^T
    factor: Any  # [columns, 64 tokens] float32: the factor of Q S of each token
    rows: Any  # [tokens, columns] in panels, transposed_accumulator


class ChainMacros(NamedTuple):
    """The steps of the chain; the kernels call them in the order in which they are listed."""

    allocate: Any
    allocate_output: Any
    round_state: Any
    multiply_state: Any
    make_values: Any
    make_valid_values: Any
    decay_state: Any
    add_values: Any
    make_output: Any
    multiply_next_keys: Any
    wait_output: Any
    transpose_output: Any


def chain_macros(problem: ChunkProblem, columns: int) -> ChainMacros:
    """The macros for blocks of `columns` V columns, 64 per math warpgroup."""
    dtype = problem.dtype
    wide = problem.head_k_dim > HALF
    halves = problem.head_k_dim // HALF
    rows = columns // PANEL * CHUNK

    @T.macro
    def allocate():
        state_fragment = T.alloc_fragment((columns, HALF), "float32")
        state_high_fragment = T.alloc_fragment((columns, HALF), "float32")
        state_operand = T.alloc_fragment((columns, HALF), dtype)
        state_high_operand = T.alloc_fragment((columns, HALF), dtype)
        u_fragment = T.alloc_fragment((columns, CHUNK), "float32")
        v_fragment = T.alloc_fragment((rows, PANEL), dtype)
        w_operand = T.alloc_fragment((columns, CHUNK), dtype)
        factor_fragment = T.alloc_fragment((columns, CHUNK), "float32")
        last = T.alloc_local((1,), "float32")
        return ChainRegisters(
            state_fragment, state_high_fragment, state_operand, state_high_operand,
            u_fragment, v_fragment, w_operand, factor_fragment, last,
        )  # fmt: skip

    @T.macro
    def allocate_output():
        out_fragment = T.alloc_fragment((columns, CHUNK), "float32")
        out_factor_fragment = T.alloc_fragment((columns, CHUNK), "float32")
        out_rows = T.alloc_fragment((rows, PANEL), dtype)
        return OutputRegisters(out_fragment, out_factor_fragment, out_rows)

    @T.macro
    def round_state(registers):
        T.copy(registers.state, registers.state_operand)
        if wide:
            T.copy(registers.state_high, registers.state_high_operand)

    @T.macro
    def multiply_state(registers, tile, tile_high, accumulator):
        """accumulator = S^T tile^T, issued."""
        T.wgmma_gemm(registers.state_operand, tile, accumulator, transpose_B=True, clear_accum=True, policy=ROWS)
        if wide:
            T.wgmma_gemm(registers.state_high_operand, tile_high, accumulator, transpose_B=True, policy=ROWS)

    @T.macro
    def make_values(registers):
        """W^T of a full chunk."""
        for i, j in T.Parallel(columns, CHUNK):
            registers.w_operand[i, j] = (
                T.cast(registers.v[i // PANEL * CHUNK + j, i % PANEL], "float32") - registers.factor[i, j] * registers.u[i, j]
            )

    @T.macro
    def make_valid_values(registers, valid):
        """W^T of a chunk of `valid` tokens, while Q S runs."""
        # Nothing to wait for: U is there. Without this wait the assembler would wait for Q S where U and S are read.
        T.wait_wgmma(halves)
        T.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR)
        if valid == CHUNK:
            make_values(registers)
        else:
            for i, j in T.Parallel(columns, CHUNK):
                registers.w_operand[i, j] = T.if_then_else(
                    j < valid,
                    T.cast(registers.v[i // PANEL * CHUNK + j, i % PANEL], "float32")
                    - registers.factor[i, j] * registers.u[i, j],
                    0.0,
                )

    @T.macro
    def decay_state(registers):
        for i, j in T.Parallel(columns, HALF):
            registers.state[i, j] *= registers.last[0]
        if wide:
            for i, j in T.Parallel(columns, HALF):
                registers.state_high[i, j] *= registers.last[0]

    @T.macro
    def add_values(registers, z, z_high):
        """S^T += W^T Z, issued."""
        T.wgmma_gemm(registers.w_operand, z, registers.state, policy=ROWS)
        if wide:
            T.wgmma_gemm(registers.w_operand, z_high, registers.state_high, policy=ROWS)

    @T.macro
    def make_output(registers, output, r):
        """O^T = exp(c) O^T + W^T R^T: scaled while W Z runs, then issued."""
        T.wait_wgmma(halves)  # Q S
        T.warpgroup_fence_operand(output.out, num_regs=ACCUMULATOR)
        for i, j in T.Parallel(columns, CHUNK):
            output.out[i, j] *= output.factor[i, j]
        T.wgmma_gemm(registers.w_operand, r, output.out, transpose_B=True, policy=ROWS)

    @T.macro
    def multiply_next_keys(registers, k, k_high):
        """U^T of the next chunk, issued, from the state rounded while W R^T runs. After the last chunk its result is not used."""
        T.wait_wgmma(halves)  # W Z, low half
        T.warpgroup_fence_operand(registers.state, num_regs=ACCUMULATOR)
        T.copy(registers.state, registers.state_operand)
        T.wgmma_gemm(registers.state_operand, k, registers.u, transpose_B=True, clear_accum=True, policy=ROWS)
        if wide:
            T.wait_wgmma(2)  # W Z, high half
            T.warpgroup_fence_operand(registers.state_high, num_regs=ACCUMULATOR)
            T.copy(registers.state_high, registers.state_high_operand)
            T.wgmma_gemm(registers.state_high_operand, k_high, registers.u, transpose_B=True, policy=ROWS)

    @T.macro
    def wait_output(output):
        T.wait_wgmma(halves)  # W R^T
        T.warpgroup_fence_operand(output.out, num_regs=ACCUMULATOR)

    @T.macro
    def transpose_output(output):
        for i, j in T.Parallel(columns, CHUNK):
            output.rows[i // PANEL * CHUNK + j, i % PANEL] = output.out[i, j]

    return ChainMacros(
        allocate, allocate_output, round_state, multiply_state, make_values, make_valid_values, decay_state, add_values,
        make_output, multiply_next_keys, wait_output, transpose_output,
    )  # fmt: skip


class StoreMacros(NamedTuple):
    """How the math warpgroups write what a chain leaves."""

    store_checkpoints: Any
    store_tail: Any
    store_final: Any


def store_macros(problem: ChunkProblem, columns: int) -> StoreMacros:
    """The macros for blocks of `columns` V columns."""
    pooled, has_final_indices = problem.pooled, problem.has_final_indices
    store_state = state_storer(problem, columns, problem.state_dtype if pooled else "float32")

    @T.macro
    def store_checkpoints(tensors, sequence, done, head, column_begin, registers, write_slot: T.Ref):
        """Stores the state to the slots whose checkpoint is after the sequence's first `done` tokens."""
        for column in T.serial(tensors.checkpoint_offsets.shape[1]):
            if tensors.checkpoint_offsets[sequence, column] == done:
                write_slot = T.cast(tensors.checkpoint_slots[sequence, column], "int64")
                if write_slot > T.cast(tensors.null_slot, "int64"):
                    store_state(tensors.final_state, write_slot, head, column_begin, registers.state, registers.state_high)

    @T.macro
    def store_tail(out, begin, valid, head, column_begin, output):
        """Stores the output of the last chunk from registers: it has fewer than 64 tokens."""
        for i, j in T.Parallel(columns, CHUNK):
            if j < valid:
                row = T.cast(begin + j, "int64")
                out[row, head, column_begin + i] = output.rows[i // PANEL * CHUNK + j, i % PANEL]

    @T.macro
    def store_final(tensors, sequence, head, column_begin, registers, live: T.Ref, write_slot: T.Ref):
        """Stores the final state of a live sequence."""
        write_slot = T.cast(sequence, "int64")
        if pooled and not has_final_indices:
            write_slot = T.cast(tensors.state_indices[sequence], "int64")
        if has_final_indices:
            if live:
                write_slot = T.cast(tensors.final_state_indices[sequence], "int64")
                live = write_slot > T.cast(tensors.null_slot, "int64")
        if live:
            store_state(tensors.final_state, write_slot, head, column_begin, registers.state, registers.state_high)

    return StoreMacros(store_checkpoints, store_tail, store_final)
