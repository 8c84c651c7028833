"""The convolution of a short sequence, from the projections to tiles in shared memory.

A thread has 8 neighbouring channels (a unit) and runs of 4 tokens. The thread with a unit's first run reads the old window, and
it alone writes the new one: no other block has these channels of this slot.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.layer_step.problem import Conv1dParams
from kernels_cute.chunk import operands
from kernels_cute.chunk.shape import TILE_BYTES
from kernels_cute.common import ptx
from kernels_cute.conv1d.shape import CHANNELS
from kernels_cute.gdn_prefill.short.shape import RUN


class Sequence(NamedTuple):
    """Scalars of the kernel."""

    number: Any
    begin: Any  # first token
    length: Any  # tokens
    slot: Any
    is_live: Any  # not padding
    is_continued: Any  # from the slot's window and state, not from zero


@cute.jit
def convolve_run(conv: Any, params: Conv1dParams, sequence: Sequence, first: Int32, channel: Int32, unit: Int32, tile: Int32):
    """Fill rows first to first + 3 of 16-byte unit `unit` of a tile (of 64 columns a piece); zeros past the sequence's end."""
    target, history, dtype = tile + unit // 8 * TILE_BYTES, cutlass.const_expr(conv.history), conv.dtype
    load_row, load_history, load_filter, convolve = conv.load_row, conv.load_history, conv.load_filter, conv.convolve
    store_windows = conv.store_windows
    registers = conv.make_registers(Int32)
    line = registers.line
    if first < sequence.length:
        line.fill(0)
        if first > 0:
            for c in cutlass.range_constexpr(history):
                load_row(params.x, sequence.begin + first - history + c, channel, line, c)
        elif sequence.is_continued:
            load_history(params.conv_states, sequence.slot, Int32(0), channel, line)
        for u in cutlass.range_constexpr(RUN):
            # Past the end its last row again, so that no load needs its own condition.
            row = cutlass.min(first + u, sequence.length - 1)
            load_row(params.x, sequence.begin + row, channel, line, history + u)
        load_filter(channel, params.weight, params.bias, registers)
        for u in cutlass.range_constexpr(RUN):
            convolve(registers, u)
            row = first + u
            words = [ptx.pack(dtype, registers.out[2 * i], registers.out[2 * i + 1]) for i in range(CHANNELS // 2)]
            words = [operands.select(row < sequence.length, word, Int32(0)) for word in words]
            ptx.store_words(operands.address(target, row, unit % 8), words)
        if first == 0:
            store_windows(params, sequence.begin // conv.rows + sequence.number, sequence.number, channel)
    else:
        for u in cutlass.range_constexpr(RUN):
            ptx.store_zeros(operands.address(target, first + u, unit % 8))


@cute.jit
def note_sequence(storage: Any, sequence: Sequence, thread: Int32):
    """Leave the sequence's numbers in shared memory, where `noted` finds them: kept over all value heads they would take too
    many registers."""
    if thread == 0:
        flagged = 2 * sequence.length
        if sequence.is_continued:
            flagged = flagged + 1
        words = (Int32(sequence.slot), Int32(sequence.slot >> 32), sequence.begin, flagged)
        record = storage.record.data_ptr().toint()
        ptx.store_words(record, words)
        ptx.store_word(record + 16, sequence.number)
    cute.arch.sync_threads()


def noted(storage: Any, sequence: Sequence) -> Sequence:
    record = ptx.opaque(storage.record.data_ptr().toint())
    (low, high, begin, flagged), number = ptx.load_words(record), ptx.load_word(record + 16)
    slot = (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
    return Sequence(number, begin, flagged >> 1, slot, sequence.is_live, flagged & 1 == 1)


@cute.jit
def find_sequence(conv: Any, params: Conv1dParams, number: Int32):
    """The sequence, with the slot of the pools."""
    begin = Int32(params.cu_seqlens[number])
    length = cutlass.max(Int32(params.cu_seqlens[number + 1]) - begin, 0)
    return Sequence(number, begin, length, *conv.start_of(params, number))
