"""Kernel of prefill.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gdn.ops.layer_step.problem import Conv1dParams, Conv1dProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, store_channels, window_offset
from kernels_cute.conv1d.convolution import Convolution, fake_common
from kernels_cute.conv1d.shape import CHANNELS
from kernels_cute.conv1d.tiles import find_sequence


def fakes(problem: Conv1dProblem) -> Conv1dParams:
    offsets, slots = [fake(problem.checkpoint_dtype, None, None) for _ in range(2)]
    return Conv1dParams(
        **fake_common(problem, "conv_states"),
        cache_indices=fake(problem.index_dtype, None),
        has_initial_state=fake("uint8" if problem.has_mask else None, None, last=1),
        checkpoint_offsets=offsets,
        checkpoint_slots=slots,
        checkpoint_windows=fake(problem.checkpoint_window_dtype, cute.sym_int64(), problem.dim, cute.sym_int64()),
    )


class Conv1d(Convolution, params=Conv1dParams):
    def __init__(self, problem: Conv1dProblem, config: Any) -> None:
        super().__init__(problem, config.threads, config.batch)
        self.rows = config.rows
        self.limits = {"min_blocks_per_mp": config.min_threads_per_sm // config.threads, **self.limits}
        # Single float16 values take a register each, and instructions that split words and join them again.
        self.line_dtype = Int32 if self.dtype is cutlass.Float16 else self.dtype
        self.row_places = CHANNELS * self.dtype.width // self.line_dtype.width  # elements of a row in rLine

    def blocks(self, params: Conv1dParams) -> Any:
        return (params.x.shape[0] // self.rows + params.cu_seqlens.shape[0] - 1) * self.slices

    @cute.kernel
    def kernel(self, params: Conv1dParams):
        tile, channel, is_live = self.assignment()
        num_sequences = params.cu_seqlens.shape[0] - 1
        sequence = find_sequence(self.rows, tile, num_sequences, params.cu_seqlens)
        if is_live:
            self.run_tile(params, tile, sequence, channel)
            tiles = params.x.shape[0] // self.rows + num_sequences
            # Rows after the last sequence are dealt to all blocks.
            first = Int32(params.cu_seqlens[num_sequences]) + tile
            self.zero_rows(params.out, first, params.out.shape[0], tiles, channel)

    @cute.jit
    def start_of(self, params: Conv1dParams, sequence: Int32):
        """A sequence's slot, whether it is none of padding, and whether it continues the window there."""
        slot = Int64(sequence)
        is_live = Boolean(True)
        if cutlass.const_expr(params.cache_indices is not None):
            slot = Int64(params.cache_indices[sequence])
            is_live = slot > params.null_slot
        is_continued = Boolean(True)
        if cutlass.const_expr(params.has_initial_state is not None):
            is_continued = params.has_initial_state[sequence] != 0
        return slot, is_live, is_continued

    @cute.jit
    def run_tile(self, params: Conv1dParams, tile: Int32, sequence: Int32, channel: Int32):
        history, batch = cutlass.const_expr(self.history), cutlass.const_expr(self.batch)
        begin = Int32(params.cu_seqlens[sequence])
        end = Int32(params.cu_seqlens[sequence + 1])
        slot, is_live, is_continued = self.start_of(params, sequence)
        first = begin + (tile - begin // self.rows - sequence) * self.rows
        stop = first + self.rows
        if stop > end:
            stop = end
        if first >= begin:
            if is_live and first < end:
                registers = self.make_registers(self.line_dtype)
                rLine = registers.line
                rNext = cute.make_rmem_tensor(batch * self.row_places, self.line_dtype)
                rLine.fill(0)
                if first == begin:
                    if cutlass.const_expr(params.conv_states is not None):
                        if is_continued:
                            self.load_history(params.conv_states, slot, Int32(0), channel, rLine)
                else:
                    for c in cutlass.range_constexpr(history):
                        self.load_row(params.x, first - history + c, channel, rLine, c)
                self.load_filter(channel, params.weight, params.bias, registers)

                self.load_batch(params.x, first, stop, channel, rNext)
                for token in cutlass.range(first, stop, batch, unroll=1):
                    for i in cutlass.range_constexpr(batch * self.row_places):
                        rLine[history * self.row_places + i] = rNext[i]
                    if token + batch < stop:
                        self.load_batch(params.x, token + batch, stop, channel, rNext)
                    for u in cutlass.range_constexpr(batch):
                        self.convolve(registers, u)
                        if token + u < stop:
                            self.store_row(registers.out, params.out, token + u, channel)
                    for i in cutlass.range_constexpr(history * self.row_places):
                        rLine[i] = rLine[batch * self.row_places + i]

                if cutlass.const_expr(params.conv_states is not None or params.checkpoint_windows is not None):
                    self.store_windows(params, tile, sequence, channel)
            else:
                self.zero_rows(params.out, first, stop, Int32(1), channel)

    @cute.jit
    def load_batch(self, gX: cute.Tensor, token: Int32, stop: Int32, channel: Int32, rNext: cute.Tensor):
        """Loads the next rows; after the tile's end its last row again, so that no load needs its own condition."""
        for u in cutlass.range_constexpr(self.batch):
            row = token + u
            if row >= stop:
                row = stop - 1
            self.load_row(gX, row, channel, rNext, u)

    @cute.jit
    def store_windows(self, params: Conv1dParams, tile: Int32, sequence: Int32, channel: Int32):
        """Stores the last window in the sequence's slot, then the checkpoints, at the end of a sequence's first tile.

        Everything is read again, also the old window where it is part of a new one: holding it over the tile would take
        more registers than there are.
        """
        begin = Int32(params.cu_seqlens[sequence])
        if tile == begin // self.rows + sequence:
            slot, _, is_continued = self.start_of(params, sequence)
            count = Int32(params.cu_seqlens[sequence + 1]) - begin
            rHistory = cute.make_rmem_tensor(self.history * CHANNELS, self.dtype)
            rKept = cute.make_rmem_tensor(self.history * CHANNELS, self.dtype)
            rHistory.fill(0.0)
            rKept.fill(0.0)
            if cutlass.const_expr(params.conv_states is not None):
                is_needed = is_continued
                if cutlass.const_expr(params.checkpoint_slots is None):
                    is_needed = is_continued & (count < self.history)
                if is_needed:
                    self.load_history(params.conv_states, slot, Int32(0), channel, rHistory)
                self.load_window(params.x, begin, count, channel, rHistory, rKept)
                self.store_window(rKept, 0, params.conv_states, slot, channel)
            if cutlass.const_expr(params.checkpoint_slots is not None):
                for i in cutlass.range(params.checkpoint_offsets.shape[1], unroll=1):
                    tokens = Int64(params.checkpoint_offsets[sequence, i])
                    target = Int64(params.checkpoint_slots[sequence, i])
                    if tokens > 0 and tokens <= count and target > params.null_slot:
                        self.load_window(params.x, begin, Int32(tokens), channel, rHistory, rKept)
                        self.store_checkpoint(params, rKept, target, channel)

    @cute.jit
    def store_checkpoint(self, params: Conv1dParams, rKept: cute.Tensor, row: Int64, channel: Int32):
        """Stores a window in a slot of the pool, or in a row of a tensor of its own, whose strides may be others."""
        if cutlass.const_expr(params.checkpoint_windows is None):
            self.store_window(rKept, 0, params.conv_states, row, channel)
        else:
            for c in cutlass.range_constexpr(self.history):
                offset = window_offset(params.checkpoint_windows, row, Int32(c), channel)
                store_channels(rKept, c * CHANNELS, CHANNELS, params.checkpoint_windows, offset, False)


def library(problem: Conv1dProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, Conv1d(problem, config), fakes(problem))
