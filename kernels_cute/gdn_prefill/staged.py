"""The convolution of a tile whose rows are all asked for at once: they go through shared memory.

With rows in registers a thread has at most a batch of them in flight, and memory is too far for that. Every thread copies its own
channels and waits for its own copies: there is no barrier. Sums and their order are those of the convolution alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import Conv1dParams, GdnPrefillProblem
from kernels_cute.common import ptx
from kernels_cute.conv1d.convolution import Registers
from kernels_cute.conv1d.prefill import Config
from kernels_cute.conv1d.shape import CHANNELS
from kernels_cute.conv1d.tiles import find_sequence
from kernels_cute.gdn_prefill.shape import PART_BYTES, resident_threads
from kernels_cute.gdn_prefill.steps import PrefillConv

_EVICT_FIRST = 0x12F0000000000000  # policy of the L2 cache: gone first when room is needed
# (target, source, bytes, L2 policy): 16 bytes to shared memory, zeros after the first `bytes`; in the thread's group of copies.
_copy_part = ptx.instruction("cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, {$r2}, {$r3};")


@cute.jit
def span_of(conv, params: Conv1dParams, tile: Int32, sequence: Int32):
    """Return the first token of a tile's sequence, the tile's first token and the one after its last. There is no tile if the
    last is not after the first."""
    begin = Int32(params.cu_seqlens[sequence])
    first = begin + (tile - begin // conv.rows - sequence) * conv.rows
    end = Int32(params.cu_seqlens[sequence + 1])
    stop = cutlass.min(first + conv.rows, end)
    if first < begin:
        stop = first
    if cutlass.const_expr(conv.skipped_tokens > 0):
        if end - begin <= conv.skipped_tokens:
            stop = first
    return begin, first, stop


@cute.jit
def ask_for_tile(conv, params: Conv1dParams, span, channel: Int32, address: Int32):
    """Issue the loads of a tile before the slot is known, which takes further loads. address: of this thread's part of the
    first row in shared memory."""
    begin, first, stop = span
    if (first < stop) & (channel < conv.dim):
        _ask_for_rows(conv, params.x, begin, first, stop, channel, address)


@cute.jit
def finish_tile(conv, params: Conv1dParams, tile: Int32, sequence: Int32, span, channel: Int32, address: Int32):
    begin, first, stop = span
    start_of, store_windows, zero_rows = conv.start_of, conv.store_windows, conv.zero_rows
    if (first < stop) & (channel < conv.dim):
        slot, is_live, is_continued = start_of(params, sequence)
        if is_live:
            _convolve_rows(conv, params, first, stop, channel, address, slot, is_continued & (first == begin), first != begin)
            store_windows(params, tile, sequence, channel)
        else:
            cute.arch.cp_async_wait_group(0)
            zero_rows(params.out, first, stop, Int32(1), channel)


@cute.jit
def _ask_for_rows(conv, gX: cute.Tensor, begin: Int32, first: Int32, stop: Int32, channel: Int32, address: Int32):
    """Issue the copies of a tile's rows, a group for each batch. The first group also has the rows before the tile, if they are
    of its sequence."""
    history = cutlass.const_expr(conv.history)
    if first != begin:
        for c in cutlass.range_constexpr(history):
            _ask_for_row(conv, gX, first - history + c, stop, channel, address + c * conv.pitch)
    for u in cutlass.range_constexpr(conv.rows):
        _ask_for_row(conv, gX, first + u, stop, channel, address + (history + u) * conv.pitch)
        if cutlass.const_expr(u % conv.batch == conv.batch - 1):
            cute.arch.cp_async_commit_group()


@cute.jit
def _convolve_rows(
    conv, params: Conv1dParams, first: Int32, stop: Int32, channel: Int32, address: Int32, slot: Int64, from_slot, from_rows
):
    """Convolve a tile's rows. The inputs before the tile are the slot's window (from_slot), rows (from_rows), or zero."""
    history = cutlass.const_expr(conv.history)
    load_history, convolve, store_row = conv.load_history, conv.convolve, conv.store_row
    registers = Registers(
        cute.make_rmem_tensor(CHANNELS * conv.width, Float32),
        cute.make_rmem_tensor(CHANNELS, Float32),
        cute.make_rmem_tensor((history + conv.batch) * CHANNELS, Float32),
        cute.make_rmem_tensor(CHANNELS, Float32),
    )
    rLine = registers.line
    rLine.fill(0.0)
    conv.load_filter(channel, params.weight, params.bias, registers)
    if from_slot:
        load_history(params.conv_states, slot, Int32(0), channel, rLine)
        if cutlass.const_expr(params.conv_states.element_type is not conv.dtype):
            # The window has the values that it would have as rows.
            for e in cutlass.range_constexpr(history * CHANNELS):
                rLine[e] = rLine[e].to(conv.dtype).to(Float32)
    cute.arch.cp_async_wait_group(conv.batches - 1)
    if from_rows:
        for c in cutlass.range_constexpr(history):
            _take_row(conv, address + c * conv.pitch, rLine, c)
    for i in cutlass.range_constexpr(conv.batches):
        cute.arch.cp_async_wait_group(conv.batches - 1 - i)
        token = first + i * conv.batch
        if token < stop:
            for u in cutlass.range_constexpr(conv.batch):
                _take_row(conv, address + (history + i * conv.batch + u) * conv.pitch, rLine, history + u)
            for u in cutlass.range_constexpr(conv.batch):
                convolve(registers, u)
                if token + u < stop:
                    store_row(registers.out, params.out, token + u, channel)
            for e in cutlass.range_constexpr(history * CHANNELS):
                rLine[e] = rLine[conv.batch * CHANNELS + e]


@cute.jit
def _ask_for_row(conv, gX: cute.Tensor, token: Int32, stop: Int32, channel: Int32, address: Int32):
    """Issue the copy of a row. From `stop` on nothing is read, without a branch."""
    offset = Int64(token) * gX.stride[0] + conv.column_of(channel)
    size = Int32(PART_BYTES)
    if token >= stop:
        size = Int32(0)
    _copy_part(address, gX.iterator.toint() + offset * (conv.dtype.width // 8), size, Int64(_EVICT_FIRST))


@cute.jit
def _take_row(conv, address: Int32, rLine: cute.Tensor, row: cutlass.Constexpr):
    words = ptx.load_words(address)
    for i in cutlass.range_constexpr(CHANNELS // 2):
        low, high = ptx.unpack(conv.dtype, words[i])
        rLine[row * CHANNELS + 2 * i] = low
        rLine[row * CHANNELS + 2 * i + 1] = high


class StagedTiles(PrefillConv, params=Conv1dParams):
    """A tile a block, as the convolution alone. 16-bit rows, tiles of whole batches."""

    def __init__(self, problem: GdnPrefillProblem, config: Config, skipped_tokens: int) -> None:
        """skipped_tokens: sequences of so many tokens or fewer are another launch's."""
        super().__init__(problem, config)
        self.skipped_tokens = skipped_tokens
        assert self.rows % self.batch == 0
        self.batches = self.rows // self.batch
        self.pitch = self.threads * PART_BYTES  # of a row in shared memory
        self.limits = {"min_blocks_per_mp": resident_threads(problem) // self.threads, "preferred_smem_carveout": 100}

    @cute.kernel
    def kernel(self, params: Conv1dParams):
        tile, channel, _ = self.assignment()
        thread, _, _ = cute.arch.thread_idx()
        layout = cute.make_layout((self.history + self.rows) * self.pitch // 4)
        stage = cutlass.utils.SmemAllocator().allocate_tensor(Int32, layout, 128).iterator.toint()
        address = stage + thread * PART_BYTES
        num_sequences = params.cu_seqlens.shape[0] - 1
        sequence = find_sequence(self.rows, tile, num_sequences, params.cu_seqlens)
        span = span_of(self, params, tile, sequence)
        ask_for_tile(self, params, span, channel, address)
        finish_tile(self, params, tile, sequence, span, channel, address)
        if channel < self.dim:
            # Rows after the last sequence are dealt to all blocks.
            tiles = params.x.shape[0] // self.rows + num_sequences
            self.zero_rows(params.out, Int32(params.cu_seqlens[num_sequences]) + tile, params.out.shape[0], tiles, channel)
