"""Shared by prefill and decode of the causal depthwise convolution:

    y[t] = activation(bias + sum_j weight[:, j] * x[t - (width - 1) + j])

A thread owns `CHANNELS` neighbouring channels; a row of x is one 16-byte access. `rLine` holds width - 1 rows of history
and then the rows of a batch, row by row: in the dtype of x, or as Int32 words of two such values.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from gdn.ops.layer_step.problem import ConvolutionProblem
from kernels_cute.common import memory
from kernels_cute.common.build import Kernel
from kernels_cute.common.memory import fake, load, load_channels, pointer, sigmoid, store, store_channels, window_offset, words
from kernels_cute.common.ptx import pack, unpack
from kernels_cute.conv1d.shape import CHANNELS, WORDS, slices


class Registers(NamedTuple):
    """A thread's registers: the filter and an output row in float32, the line in the kernel's choice."""

    weight: Any  # [channel * width + tap]
    bias: Any  # [channel]; zeros without a bias
    line: Any  # width - 1 rows of history and the rows of a batch
    out: Any  # [channel]


def fake_common(problem: ConvolutionProblem, pool: str) -> dict[str, Any]:
    """The arguments that both operators have, to compile for; pool: name of the conv state's."""
    dim, num_tokens = problem.dim, cute.sym_int()
    channel_stride = 1 if problem.state_channels_contiguous else None
    x, out = [fake(problem.dtype, num_tokens, dim, last=1) for _ in range(2)]
    return {
        "x": x,
        "weight": fake(problem.weight_dtype, dim, problem.width, last=(problem.width, 1)),
        "bias": fake(problem.bias_dtype, dim, last=1),
        pool: fake(problem.state_dtype, cute.sym_int64(), dim, cute.sym_int64(), last=(channel_stride, None)),
        "cu_seqlens": fake(problem.cu_seqlens_dtype, None, last=1),
        "out": out,
        "null_slot": Int64(-1),
    }


class Convolution(Kernel):
    """The convolution's steps on a thread's channels."""

    # No shared memory is used; without a value the DSL asks a device for its limit.
    limits = {"preferred_smem_carveout": 0}

    def __init__(self, problem: ConvolutionProblem, threads: int, batch: int) -> None:
        self.threads, self.batch = threads, batch
        self.dim, self.width, self.history = problem.dim, problem.width, problem.width - 1
        self.dtype = memory.CUTE_DTYPES[problem.dtype]
        self.silu = problem.silu
        self.channels_contiguous = problem.state_channels_contiguous
        self.slices = slices(problem.dim, threads)
        self.has_partial_slice = problem.dim % (threads * CHANNELS) != 0  # the last block of a row has idle threads

    @cute.jit
    def assignment(self):
        """This thread's share: number of the tile or sequence, first channel, and whether the channel exists."""
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        channel = (block % self.slices * self.threads + thread) * CHANNELS
        is_live = Boolean(True)
        if cutlass.const_expr(self.has_partial_slice):
            is_live = channel < self.dim
        return block // self.slices, channel, is_live

    @cute.jit
    def zero_rows(self, gOut: cute.Tensor, first: Int32, end: Int32, step: Int32, channel: Int32):
        """Zeroes rows first, first + step, ... of out before `end`."""
        rZero = cute.make_rmem_tensor(CHANNELS, self.dtype)
        rZero.fill(0.0)
        for token in cutlass.range(first, end, step, unroll=1):
            self.store_row(rZero, gOut, token, channel)

    def make_registers(self, line_dtype: Any) -> Registers:
        rWeight = cute.make_rmem_tensor(CHANNELS * self.width, Float32)
        rBias = cute.make_rmem_tensor(CHANNELS, Float32)
        row = CHANNELS * self.dtype.width // line_dtype.width
        rLine = cute.make_rmem_tensor((self.history + self.batch) * row, line_dtype)
        return Registers(rWeight, rBias, rLine, cute.make_rmem_tensor(CHANNELS, Float32))

    @cute.jit
    def load_filter(self, channel: Int32, gWeight: cute.Tensor, gBias: Any, registers: Registers):
        rWeight, rBias, _, _ = registers
        load(pointer(gWeight, Int64(channel) * self.width, 16), CHANNELS * self.width, rWeight, 0, False)
        rBias.fill(0.0)
        if cutlass.const_expr(gBias is not None):
            load(pointer(gBias, Int64(channel), 16), CHANNELS, rBias, 0, False)

    def column_of(self, channel: Int32) -> Int32:
        """Column of x that has a thread's first channel."""
        return channel

    @cute.jit
    def load_row(self, gX: cute.Tensor, token: Int32, channel: Int32, rLine: cute.Tensor, line_row: Constexpr):
        offset = Int64(token) * gX.stride[0] + self.column_of(channel)
        if cutlass.const_expr(rLine.element_type is Int32):
            load(words(gX, offset, 16), WORDS, rLine, line_row * WORDS, True)
        else:
            load(pointer(gX, offset, 16), CHANNELS, rLine, line_row * CHANNELS, True)

    @cute.jit
    def load_history(self, gStates: cute.Tensor, slot: Int64, first: Int32, channel: Int32, rLine: cute.Tensor):
        """Fills the first rows of rLine with the window that starts at column `first` of a slot."""
        has_words = cutlass.const_expr(rLine.element_type is Int32)
        for c in cutlass.range_constexpr(self.history):
            rRow, start = rLine, c * CHANNELS
            if cutlass.const_expr(has_words):
                rRow, start = cute.make_rmem_tensor(CHANNELS, Float32), 0
            offset = window_offset(gStates, slot, first + c, channel)
            load_channels(gStates, offset, self.channels_contiguous, CHANNELS, rRow, start)
            if cutlass.const_expr(has_words):
                for word in cutlass.range_constexpr(WORDS):
                    rLine[c * WORDS + word] = pack(self.dtype, rRow[2 * word], rRow[2 * word + 1])

    @cute.jit
    def store_column(
        self, rRows: cute.Tensor, line_row: Constexpr, gStates: cute.Tensor, slot: Int64, column: Int32, channel: Int32
    ):
        offset = window_offset(gStates, slot, column, channel)
        store_channels(rRows, line_row * CHANNELS, CHANNELS, gStates, offset, self.channels_contiguous)

    @cute.jit
    def store_window(self, rRows: cute.Tensor, first: Constexpr, gStates: cute.Tensor, slot: Int64, channel: Int32):
        """Stores width - 1 rows, from row `first` on."""
        for c in cutlass.range_constexpr(self.history):
            self.store_column(rRows, first + c, gStates, slot, Int32(c), channel)

    @cute.jit
    def load_window(self, gX: cute.Tensor, begin: Int32, count: Int32, channel: Int32, rHistory: cute.Tensor, rKept: cute.Tensor):
        """Fills rKept with the last width - 1 rows of [history | the first `count` >= 1 tokens of the sequence]."""
        for c in cutlass.range_constexpr(self.history):
            token = count - self.history + c
            if token >= 0:
                self.load_row(gX, begin + token, channel, rKept, c)
            for h in cutlass.range_constexpr(c + 1, self.history):
                if count + c == h:
                    self.copy_row(rHistory, h, rKept, c)

    def copy_row(self, rFrom: Any, source: int, rTo: Any, target: int) -> None:
        for e in range(CHANNELS):
            rTo[target * CHANNELS + e] = rFrom[source * CHANNELS + e]

    @cute.jit
    def convolve(self, registers: Registers, line_row: Constexpr):
        """Fills registers.out with the output of the token whose oldest input is row `line_row` of the line."""
        rWeight, rBias, rLine, rOut = registers
        for c in cutlass.range_constexpr(CHANNELS):
            total = rBias[c]
            for j in cutlass.range_constexpr(self.width):
                total += rWeight[c * self.width + j] * self.value_of(rLine, (line_row + j) * CHANNELS + c)
            if cutlass.const_expr(self.silu):
                total = total * sigmoid(total)
            rOut[c] = total

    def value_of(self, rLine: Any, number: int) -> Any:
        """Value `number` of the rows in rLine, as float32."""
        if rLine.element_type is Int32:
            return unpack(self.dtype, rLine[number // 2])[number % 2]
        return rLine[number].to(Float32)

    @cute.jit
    def store_row(self, rOut: cute.Tensor, gOut: cute.Tensor, token: Int32, channel: Int32):
        store(rOut, 0, CHANNELS, pointer(gOut, Int64(token) * gOut.stride[0] + channel, 16))
