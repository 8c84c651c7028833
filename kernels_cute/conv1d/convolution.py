"""Shared by prefill and decode of the causal depthwise convolution: filters, windows in slots, the sum itself.

A thread owns `CHANNELS` neighbouring channels; a row of x is one 16-byte access. `rLine` holds width - 1 rows of history
and then the rows of a batch, row by row: in the dtype of x, or as Int32 words of two such values.
"""

from typing import Any

import cutlass
import cutlass.cute as cute

from gdn.problems import ConvolutionProblem
from kernels_cute.common.memory import CUTE_DTYPES, FLOAT_DTYPES, fake, load, pointer, sigmoid, store, words
from kernels_cute.common.ptx import pack, unpack

CHANNELS = 8  # neighbouring channels of a thread
WORDS = CHANNELS // 2  # 32-bit words of two values in a thread's part of a row
THREADS = (32, 64, 128, 256)  # of a block


def refusal(problem: ConvolutionProblem) -> str | None:
    if problem.dim < 1 or problem.dim % CHANNELS:
        return f"requires channels in multiples of {CHANNELS}, got dim={problem.dim}"
    if not 2 <= problem.width <= 4:
        return f"requires a width of 2 to 4, got {problem.width}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"requires x of bfloat16 or float16, got {problem.dtype}"
    others = {"weight": problem.weight_dtype, "bias": problem.bias_dtype, "the conv state": problem.state_dtype}
    for name, dtype in others.items():
        if dtype is not None and dtype not in FLOAT_DTYPES:
            return f"requires {name} of float32, bfloat16 or float16, got {dtype}"
    return None


def threads_fit(problem: ConvolutionProblem, threads: int) -> bool:
    """Whether blocks of this size are allowed: at most half of the threads are idle."""
    return threads in THREADS and (threads == THREADS[0] or threads * CHANNELS < 2 * problem.dim)


def slices(dim: int, threads: int) -> int:
    """Number of blocks that share the channels of a row."""
    return -(-dim // (threads * CHANNELS))


def fake_slots(problem: ConvolutionProblem) -> Any:
    """The pool [slots, dim, columns]."""
    shape = (cute.sym_int64(), problem.dim, cute.sym_int64())
    strides = (cute.sym_int64(), 1 if problem.state_channels_contiguous else cute.sym_int64(), cute.sym_int64())
    return cute.runtime.make_fake_tensor(CUTE_DTYPES[str(problem.state_dtype)], shape, stride=strides)


def fake_common(problem: ConvolutionProblem) -> dict[str, Any]:
    """The arguments that both operators have, to compile for."""
    num_tokens, shape = cute.sym_int(), (problem.dim, problem.width)
    return {
        "x": fake(problem.dtype, num_tokens, problem.dim, last=1),
        "weight": cute.runtime.make_fake_tensor(CUTE_DTYPES[problem.weight_dtype], shape, stride=(problem.width, 1)),
        "bias": None if problem.bias_dtype is None else fake(problem.bias_dtype, problem.dim, last=1),
        "out": fake(problem.dtype, num_tokens, problem.dim, last=1),
        "null_slot": cutlass.Int64(-1),
    }


class Convolution:
    """Compile-time constants of the convolution, and its steps on a thread's channels."""

    def __init__(self, problem: ConvolutionProblem, threads: int, batch: int) -> None:
        self.threads, self.batch = threads, batch
        self.dim, self.width, self.history = problem.dim, problem.width, problem.width - 1
        self.dtype = CUTE_DTYPES[problem.dtype]
        self.silu = problem.silu
        self.channels_contiguous = problem.state_channels_contiguous
        self.slices = slices(problem.dim, threads)
        self.has_partial_slice = problem.dim % (threads * CHANNELS) != 0  # the last block of a row has idle threads

    @cute.jit
    def assignment(self):
        """This thread's share: number of the tile or sequence, first channel, and whether the channel exists."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        channel = (block % self.slices * self.threads + thread) * CHANNELS
        is_live = cutlass.Boolean(True)
        if cutlass.const_expr(self.has_partial_slice):
            is_live = channel < self.dim
        return block // self.slices, channel, is_live

    @cute.jit
    def zero_rows(self, gOut: cute.Tensor, first: cutlass.Int32, step: cutlass.Int32, channel: cutlass.Int32):
        """Zeroes rows first, first + step, ... of out: those after the last sequence, dealt to all blocks."""
        rZero = cute.make_rmem_tensor(CHANNELS, self.dtype)
        rZero.fill(0.0)
        for token in cutlass.range(first, gOut.shape[0], step, unroll=1):
            self.store_row(rZero, gOut, token, channel)

    @cute.jit
    def load_filter(self, channel: cutlass.Int32, gWeight: cute.Tensor, gBias: Any, rWeight: cute.Tensor, rBias: cute.Tensor):
        """Fills rWeight[channel * width + tap] and rBias[channel] as float32; zeros without a bias."""
        source = pointer(gWeight, cutlass.Int64(channel) * self.width, 16)
        load(source, CHANNELS * self.width, rWeight, 0, False)
        rBias.fill(0.0)
        if cutlass.const_expr(gBias is not None):
            load(pointer(gBias, cutlass.Int64(channel), 16), CHANNELS, rBias, 0, False)

    @cute.jit
    def row(self, gX: cute.Tensor, token: cutlass.Int32, channel: cutlass.Int32):
        return pointer(gX, cutlass.Int64(token) * gX.stride[0] + channel, 16)

    @cute.jit
    def load_row(
        self, gX: cute.Tensor, token: cutlass.Int32, channel: cutlass.Int32, rLine: cute.Tensor, place: cutlass.Constexpr
    ):
        if cutlass.const_expr(rLine.element_type is cutlass.Int32):
            source = words(gX, cutlass.Int64(token) * gX.stride[0] + channel, 16)
            load(source, WORDS, rLine, place * WORDS, True)
        else:
            load(self.row(gX, token, channel), CHANNELS, rLine, place * CHANNELS, True)

    @cute.jit
    def column(self, gStates: cute.Tensor, slot: cutlass.Int64, column: cutlass.Int32, channel: cutlass.Int32):
        """Offset of a slot's column at the thread's first channel."""
        offset = slot * gStates.stride[0] + cutlass.Int64(column) * gStates.stride[2]
        return offset + cutlass.Int64(channel) * gStates.stride[1]

    @cute.jit
    def load_column(
        self,
        gStates: cute.Tensor,
        slot: cutlass.Int64,
        column: cutlass.Int32,
        channel: cutlass.Int32,
        rLine: cute.Tensor,
        place: cutlass.Constexpr,
    ):
        """Fills row `place` of rLine with one column of a slot."""
        has_words = cutlass.const_expr(rLine.element_type is cutlass.Int32)
        rRow, first = rLine, place * CHANNELS
        if cutlass.const_expr(has_words):
            rRow, first = cute.make_rmem_tensor(CHANNELS, cutlass.Float32), 0
        offset = self.column(gStates, slot, column, channel)
        if cutlass.const_expr(self.channels_contiguous):
            load(pointer(gStates, offset, 16), CHANNELS, rRow, first, True)
        else:
            # Neighbouring columns share a sector, which L1 keeps.
            size = cutlass.const_expr(gStates.element_type.width // 8)
            for c in cutlass.range_constexpr(CHANNELS):
                load(pointer(gStates, offset + c * gStates.stride[1], size), 1, rRow, first + c, False)
        if cutlass.const_expr(has_words):
            for word in cutlass.range_constexpr(WORDS):
                rLine[place * WORDS + word] = pack(self.dtype, rRow[2 * word], rRow[2 * word + 1])

    @cute.jit
    def store_column(
        self,
        rRows: cute.Tensor,
        place: cutlass.Constexpr,
        gStates: cute.Tensor,
        slot: cutlass.Int64,
        column: cutlass.Int32,
        channel: cutlass.Int32,
    ):
        offset = self.column(gStates, slot, column, channel)
        if cutlass.const_expr(self.channels_contiguous):
            store(rRows, place * CHANNELS, CHANNELS, pointer(gStates, offset, 16))
        else:
            size = cutlass.const_expr(gStates.element_type.width // 8)
            for c in cutlass.range_constexpr(CHANNELS):
                store(rRows, place * CHANNELS + c, 1, pointer(gStates, offset + c * gStates.stride[1], size))

    @cute.jit
    def load_window(
        self,
        gX: cute.Tensor,
        begin: cutlass.Int32,
        count: cutlass.Int32,
        channel: cutlass.Int32,
        rHistory: cute.Tensor,
        rKept: cute.Tensor,
    ):
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
    def store_window(self, rKept: cute.Tensor, gStates: cute.Tensor, slot: cutlass.Int64, channel: cutlass.Int32):
        for c in cutlass.range_constexpr(self.history):
            self.store_column(rKept, c, gStates, slot, cutlass.Int32(c), channel)

    @cute.jit
    def convolve(self, rLine: cute.Tensor, place: cutlass.Constexpr, rWeight: cute.Tensor, rBias: cute.Tensor, rOut: cute.Tensor):
        """Fills rOut [CHANNELS] with the output of the token whose oldest input is row `place` of rLine."""
        for c in cutlass.range_constexpr(CHANNELS):
            total = rBias[c]
            for j in cutlass.range_constexpr(self.width):
                total += rWeight[c * self.width + j] * self.value_of(rLine, (place + j) * CHANNELS + c)
            if cutlass.const_expr(self.silu):
                total = total * sigmoid(total)
            rOut[c] = total

    def value_of(self, rLine: Any, number: int) -> Any:
        """Value `number` of the rows in rLine, as float32."""
        if rLine.element_type is cutlass.Int32:
            return unpack(self.dtype, rLine[number // 2])[number % 2]
        return rLine[number].to(cutlass.Float32)

    @cute.jit
    def store_row(self, rOut: cute.Tensor, gOut: cute.Tensor, token: cutlass.Int32, channel: cutlass.Int32):
        store(rOut, 0, CHANNELS, self.row(gOut, token, channel))
