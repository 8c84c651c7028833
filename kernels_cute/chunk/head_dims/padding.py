"""Copies around a kernel of another head dim than the call's: in, padded with zeros; out, cut off.

    pad     q, k, v; the states that sequences start from, of either dtype; the slots and places of states in the padded pool
    unpad   out; the padded states, to the slots that they are to be stored in

With D = P no token is copied, only states. A state that a sequence does not start from (has_initial_state False, or none
given) is zero; of a padding sequence nothing is read or written, and nothing of an empty one in a pool. Rows and columns of
a state are padded alike, so nothing here depends on which of K and V comes first.

A block copies a piece of 8 columns a thread, in 4 tokens each, or 8 pieces of 4 values a thread of a state.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_cute.chunk.head_dims.copies import PAD, CopyParams, has_state_copies, needed, values
from kernels_cute.chunk.library import fake_params
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.common import build
from kernels_cute.common.memory import load, pointer, store

_THREADS = 128
_TOKENS = 4  # of a block
_COLUMNS = 8  # of a token, a thread: 16 bytes where it is padded, and twice 8 where it is not
_STATE_PIECES = 8  # of a thread, of 4 values


def compile(problem: ChunkProblem, padded: ChunkProblem) -> dict[str, bytes]:
    dim, libraries = padded.head_k_dim, {}
    for name in needed(problem, dim):
        fakes = values(fake_params(problem), fake_params(padded), Int64(-1), name == PAD)
        libraries[name] = build.library(name, _Copies(problem, dim, name == PAD), *fakes)
    return libraries


class _Copies:
    """The copies in one direction; attributes are compile-time constants. dim: the padded one."""

    def __init__(self, problem: ChunkProblem, dim: int, is_pad: bool) -> None:
        self.dim, self.heads, self.is_pad = dim, problem.num_state_heads, is_pad
        self.token_heads = [problem.num_q_heads, problem.num_k_heads, problem.num_v_heads] if is_pad else [self.heads]
        self.has_initial, self.has_mask = problem.has_initial_state, problem.has_mask
        self.pooled, self.has_final_indices = problem.pooled, problem.has_final_indices
        self.has_checkpoints = problem.has_checkpoints
        self.tokens_differ = dim != problem.head_k_dim
        self.has_states = has_state_copies(problem) if is_pad else problem.has_final_state
        self.pieces = dim // _COLUMNS  # of a head of a token
        self.row_pieces = dim // 4  # of a row of a state
        self.state_blocks = -(-dim * self.row_pieces // (_THREADS * _STATE_PIECES))  # of a head
        self.slices = -(-sum(self.token_heads) * self.pieces // _THREADS)  # blocks that share a tile of tokens

    @cute.jit
    def __call__(self, *values: Any):
        params, stream = CopyParams(*values[:-1]), values[-1]
        blocks = self.token_blocks(params.q)
        if cutlass.const_expr(self.has_states):
            count = params.cu_seqlens.shape[0] - 1
            if cutlass.const_expr(self.has_checkpoints and not self.is_pad):
                count = count * (1 + params.checkpoint_offsets.shape[1])
            blocks = blocks + count * (self.heads * self.state_blocks)
        self.kernel(params).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    def token_blocks(self, x: Any) -> Any:
        return (x.shape[1] + (_TOKENS - 1)) // _TOKENS * self.slices if self.tokens_differ else Int32(0)

    @cute.kernel
    def kernel(self, params: CopyParams):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        token_blocks = self.token_blocks(params.q)
        if cutlass.const_expr(self.tokens_differ):
            if block < token_blocks:
                unit = block % self.slices * _THREADS + thread
                head, piece = unit // self.pieces, unit % self.pieces
                first = block // self.slices * _TOKENS
                pairs = ((params.q, params.q_copy), (params.k, params.k_copy), (params.v, params.v_copy))
                for i in cutlass.range_constexpr(len(self.token_heads)):
                    before = cutlass.const_expr(sum(self.token_heads[:i]))
                    if (head >= before) & (head < before + self.token_heads[i]):
                        self.copy_tokens(pairs[i][0], pairs[i][1], first, head - before, piece)
        if cutlass.const_expr(self.has_states):
            if block >= token_blocks:
                part = block - token_blocks
                index = part // (self.heads * self.state_blocks)  # in the padded states
                within = part % (self.heads * self.state_blocks)
                source, target, reads = Int64(index), Int64(index), Boolean(True)
                if cutlass.const_expr(self.is_pad):
                    is_copied = self.is_live(params, index)
                    if (within == 0) & (thread == 0):
                        self.write_slots(params, index, is_copied)
                    if is_copied:
                        source, reads = self.source(params, index)
                else:
                    target = self.target(params, index)
                    is_copied = target > params.null_slot
                if is_copied:
                    first = within % self.state_blocks * (_THREADS * _STATE_PIECES) + thread
                    head = within // self.state_blocks
                    rS = cute.make_rmem_tensor(4 * _STATE_PIECES, Float32)
                    rS.fill(0.0)
                    if cutlass.const_expr(self.has_initial or not self.is_pad):
                        self.move_state(params.initial_state, source, head, first, reads, rS, False)
                    self.move_state(params.final_state, target, head, first, Boolean(True), rS, True)

    @cute.jit
    def copy_tokens(self, source: cute.Tensor, target: cute.Tensor, first: Int32, head: Int32, piece: Int32):
        """Copy 8 columns of a head in `_TOKENS` tokens. Columns beyond the source's head dim are zero; columns beyond the
        target's are not stored."""
        rX = cute.make_rmem_tensor(_TOKENS * _COLUMNS, source.element_type)
        rX.fill(0.0)
        last = source.shape[1] - 1
        column = piece * _COLUMNS
        for u in cutlass.range_constexpr(_TOKENS):
            self.move_columns(source, cutlass.min(first + u, last), head, column, rX, u * _COLUMNS, False)
        for u in cutlass.range_constexpr(_TOKENS):
            if first + u <= last:
                self.move_columns(target, first + u, head, column, rX, u * _COLUMNS, True)

    @cute.jit
    def move_columns(
        self, x: cute.Tensor, token: Int32, head: Int32, column: Int32, rX: cute.Tensor, start: cutlass.Constexpr,
        stores: cutlass.Constexpr,
    ):  # fmt: skip
        """8 columns of a token from x to rX[start : start + 8], or back."""
        is_whole = cutlass.const_expr(x.shape[3] % _COLUMNS == 0 and x.shape[3] == self.dim)
        width = cutlass.const_expr(_COLUMNS if is_whole else 4)
        offset = Int64(token) * x.stride[1] + Int64(head) * x.stride[2] + column
        for first in cutlass.range_constexpr(0, _COLUMNS, width):
            if Boolean(True) if cutlass.const_expr(is_whole) else column + first < x.shape[3]:
                self.move(pointer(x, offset + first, 2 * width), width, rX, start + first, stores)

    @cute.jit
    def move_state(
        self, x: cute.Tensor, slot: Int64, head: Int32, first: Int32, reads: Boolean, rS: cute.Tensor, stores: cutlass.Constexpr
    ):
        """Move pieces first, first + 128, ... of a state to rS or from it: those that the state has and, where it is read, that
        are to be read."""
        dim = cutlass.const_expr(x.shape[3])
        for i in cutlass.range_constexpr(_STATE_PIECES):
            piece = first + i * _THREADS
            row, column = piece // self.row_pieces, piece % self.row_pieces * 4
            if reads & (row < dim) & (column < dim):
                offset = slot * x.stride[0] + head * (dim * dim) + row * dim + column
                self.move(pointer(x, offset, x.element_type.width // 2), 4, rS, 4 * i, stores)

    def move(self, address: Any, width: int, registers: Any, start: int, stores: bool) -> None:
        if stores:
            store(registers, start, width, address)
        else:
            load(address, width, registers, start, True)

    @cute.jit
    def length(self, cu_seqlens: cute.Tensor, sequence: Int32):
        return cutlass.max(Int32(cu_seqlens[sequence + 1]) - Int32(cu_seqlens[sequence]), 0)

    @cute.jit
    def is_live(self, params: CopyParams, sequence: Int32):
        """Whether a sequence has a state at all. Without a pool an empty one passes its state through."""
        live = Boolean(True)
        if cutlass.const_expr(self.pooled):
            slot = Int64(params.state_indices[sequence])
            live = (self.length(params.cu_seqlens, sequence) > 0) & (slot > params.null_slot)
        return live

    @cute.jit
    def write_slots(self, params: CopyParams, sequence: Int32, live: Boolean):
        slot = Int32(-1)
        if live:
            slot = sequence
        params.slots[sequence] = slot
        if cutlass.const_expr(self.has_checkpoints):
            columns = params.checkpoint_slots.shape[1]
            for column in cutlass.range(columns, unroll=1):
                params.checkpoint_slots[sequence, column] = params.cu_seqlens.shape[0] - 1 + sequence * columns + column

    @cute.jit
    def source(self, params: CopyParams, sequence: Int32):
        """Slot of the state that a sequence starts from, and whether it does."""
        slot, reads = Int64(sequence), Boolean(True)
        if cutlass.const_expr(self.pooled):
            slot = Int64(params.state_indices[sequence])
        if cutlass.const_expr(self.has_mask):
            reads = Boolean(params.has_initial_state[sequence])
        return slot, reads

    @cute.jit
    def target(self, params: CopyParams, index: Int32):
        """Slot for the state at `index`; null_slot = nowhere."""
        sequences = params.cu_seqlens.shape[0] - 1
        target = params.null_slot
        if index < sequences:
            if self.is_live(params, index):
                target = Int64(index)
                if cutlass.const_expr(self.has_final_indices):
                    target = Int64(params.final_state_indices[index])
                elif cutlass.const_expr(self.pooled):
                    target = Int64(params.state_indices[index])
        if cutlass.const_expr(self.has_checkpoints):
            if index >= sequences:
                sequence = (index - sequences) // params.checkpoint_offsets.shape[1]
                column = (index - sequences) % params.checkpoint_offsets.shape[1]
                done = Int32(params.checkpoint_offsets[sequence, column])
                is_reached = (done > 0) & (done <= self.length(params.cu_seqlens, sequence)) & (done % CHUNK == 0)
                if is_reached & self.is_live(params, sequence):
                    target = Int64(params.checkpoint_slots[sequence, column])
        return target
