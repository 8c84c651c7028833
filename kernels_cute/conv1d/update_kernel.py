"""Kernel of update.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gdn.ops.layer_step.problem import Conv1dUpdateParams, Conv1dUpdateProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.conv1d.convolution import Convolution, Registers, fake_common
from kernels_cute.conv1d.shape import CHANNELS


def _fakes(problem: Conv1dUpdateProblem) -> Conv1dUpdateParams:
    return Conv1dUpdateParams(
        **fake_common(problem, "conv_state"),
        conv_state_indices=fake(problem.index_dtype, *[None] * (2 if problem.has_columns else 1)),
        num_accepted_tokens=fake("int32" if problem.has_accepted else None, None),
        parent_token=fake("int32" if problem.has_parent else None, None, last=1),
    )


class _Conv1dUpdate(Convolution, params=Conv1dUpdateParams):
    def __init__(self, problem: Conv1dUpdateProblem, config: Any) -> None:
        super().__init__(problem, config.threads, config.batch)
        self.has_columns, self.keeps_every_input = problem.has_columns, problem.keeps_every_input

    def blocks(self, params: Conv1dUpdateParams) -> Any:
        return (params.x.shape[0] if params.cu_seqlens is None else params.cu_seqlens.shape[0] - 1) * self.slices

    @cute.kernel
    def kernel(self, params: Conv1dUpdateParams):
        sequence, channel, is_live = self.assignment()
        if is_live:
            begin = Int32(sequence)
            count = Int32(1)
            if cutlass.const_expr(params.cu_seqlens is not None):
                begin = Int32(params.cu_seqlens[sequence])
                count = Int32(params.cu_seqlens[sequence + 1]) - begin
            if count > 0:
                self.run_sequence(params, sequence, begin, count, channel)
            if cutlass.const_expr(params.cu_seqlens is not None):
                num_sequences = params.cu_seqlens.shape[0] - 1
                first = Int32(params.cu_seqlens[num_sequences]) + sequence
                # Rows after the last sequence are dealt to all blocks.
                self.zero_rows(params.out, first, params.out.shape[0], num_sequences, channel)

    @cute.jit
    def run_sequence(self, params: Conv1dUpdateParams, sequence: Int32, begin: Int32, count: Int32, channel: Int32):
        history, batch = cutlass.const_expr(self.history), cutlass.const_expr(self.batch)
        registers = self.make_registers(self.dtype)
        rLine = registers.line
        # Loads that depend on no index, before the slot is known.
        for u in cutlass.range_constexpr(batch):
            row = Int32(u)
            if row >= count:
                row = count - 1
            self.load_row(params.x, begin + row, channel, rLine, history + u)
        self.load_filter(channel, params.weight, params.bias, registers)

        # The slot that is read, and the column at which its window starts.
        slot = Int64(sequence)
        column = Int32(0)
        is_live = Boolean(True)
        if cutlass.const_expr(params.num_accepted_tokens is not None):
            column = params.num_accepted_tokens[sequence] - 1
            is_live = column >= 0
            if cutlass.const_expr(params.parent_token is None):
                is_live = is_live & (column <= params.conv_state.shape[2] - history)
            if cutlass.const_expr(self.has_columns):
                is_live = is_live & (column < params.conv_state_indices.shape[1])
        if cutlass.const_expr(params.conv_state_indices is not None):
            if is_live:
                if cutlass.const_expr(params.parent_token is not None):
                    slot = Int64(params.conv_state_indices[sequence, column])
                elif cutlass.const_expr(self.has_columns):
                    slot = Int64(params.conv_state_indices[sequence, 0])
                else:
                    slot = Int64(params.conv_state_indices[sequence])
                is_live = slot > params.null_slot
        if cutlass.const_expr(params.parent_token is not None):
            column = Int32(0)

        if is_live:
            self.load_history(params.conv_state, slot, column, channel, rLine)
            if cutlass.const_expr(params.parent_token is not None):
                self.run_tree(params, sequence, begin, count, channel, registers)
            else:
                self.run_line(params, begin, count, slot, channel, registers)
        else:
            self.zero_rows(params.out, begin, begin + count, Int32(1), channel)

    @cute.jit
    def run_line(self, params: Conv1dUpdateParams, begin: Int32, count: Int32, slot: Int64, channel: Int32, registers: Registers):
        """Tokens one after the other. All columns of the window have been read."""
        history, batch, rLine = cutlass.const_expr(self.history), cutlass.const_expr(self.batch), registers.line
        rKept = cute.make_rmem_tensor(history * CHANNELS, self.dtype)
        rKept.fill(0.0)
        if cutlass.const_expr(self.keeps_every_input):
            for c in cutlass.range_constexpr(1, history):
                self.store_column(rLine, c, params.conv_state, slot, Int32(c - 1), channel)
        elif cutlass.const_expr(batch > 1):
            self.load_window(params.x, begin, count, channel, rLine, rKept)

        for t in cutlass.range(0, count, batch, unroll=1):
            for u in cutlass.range_constexpr(batch):
                if t + u < count:
                    self.convolve(registers, u)
                    self.store_row(registers.out, params.out, begin + t + u, channel)
                    if cutlass.const_expr(self.keeps_every_input):
                        if history - 1 + t + u < params.conv_state.shape[2]:
                            self.store_column(rLine, history + u, params.conv_state, slot, history - 1 + t + u, channel)
            for i in cutlass.range_constexpr(history * CHANNELS):
                rLine[i] = rLine[batch * CHANNELS + i]
            for u in cutlass.range_constexpr(batch):
                if t + batch + u < count:
                    self.load_row(params.x, begin + t + batch + u, channel, rLine, history + u)

        if cutlass.const_expr(not self.keeps_every_input):
            self.store_window(rKept if batch > 1 else rLine, 0, params.conv_state, slot, channel)

    @cute.jit
    def run_tree(
        self, params: Conv1dUpdateParams, sequence: Int32, begin: Int32, count: Int32, channel: Int32, registers: Registers
    ):
        """Each node after its ancestors; its own window goes to its own slot."""
        history = cutlass.const_expr(self.history)
        rNode = cute.make_rmem_tensor(self.width * CHANNELS, self.dtype)
        rNode.fill(0.0)
        for t in cutlass.range(count, unroll=1):
            self.load_row(params.x, begin + t, channel, rNode, history)
            node = Int32(t)
            newest = Int32(history - 1)  # row of the starting window that is next before the root
            for back in cutlass.range_constexpr(1, self.width):
                line_row = cutlass.const_expr(history - back)
                if node >= 0:
                    node = params.parent_token[begin + node]
                if node >= 0:
                    self.load_row(params.x, begin + node, channel, rNode, line_row)
                else:
                    for h in cutlass.range_constexpr(line_row, history):
                        if newest == h:
                            self.copy_row(registers.line, h, rNode, line_row)
                    newest -= 1
            self.convolve(registers._replace(line=rNode), 0)
            self.store_row(registers.out, params.out, begin + t, channel)
            if t < params.conv_state_indices.shape[1]:
                target = Int64(params.conv_state_indices[sequence, t])
                if target > params.null_slot:
                    self.store_window(rNode, 1, params.conv_state, target, channel)


def library(problem: Conv1dUpdateProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _Conv1dUpdate(problem, config), _fakes(problem))
