"""Convolution of the fused decode step: items of four channels, their filters, windows and rows.

The items of a block are q and k of its key head, in order, and its own columns of v. Item p of a thread is number
p * threads + thread.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import log_decay
from kernels_cute.common.memory import load, load_channels, pointer, sigmoid, store_channels, window_offset, words
from kernels_cute.gdn_decode.shape import CHANNELS, WORDS
from kernels_cute.gdn_decode.spec import Block, Registers, Spec, column_in_head, place_of_gates


@cute.jit
def convolve(spec: Spec, p: Constexpr, registers: Registers):
    """Set registers.out [CHANNELS] to the convolution's output for item p of the thread."""
    convolve_row(spec, p, p * spec.line_rows * WORDS, registers, registers.line)


@cute.jit
def convolve_row(spec: Spec, p: Constexpr, start: Constexpr, registers: Registers, rLine: cute.Tensor):
    """Set registers.out as `convolve` does, for the rows that begin with word `start` of the line."""
    rOut, rBias, taps = registers.out, registers.bias, spec.problem.width
    for c in cutlass.range_constexpr(CHANNELS):
        rOut[c] = rBias[p * CHANNELS + c]
    for j in cutlass.range_constexpr(taps):
        for word in cutlass.range_constexpr(WORDS):
            values = ptx.unpack(spec.dtype, rLine[start + j * WORDS + word])
            for half in cutlass.range_constexpr(2):
                c = cutlass.const_expr(2 * word + half)
                rOut[c] += weight_of(spec, registers.weight, p, c * taps + j) * values[half]
    if cutlass.const_expr(spec.problem.silu):
        for c in cutlass.range_constexpr(CHANNELS):
            rOut[c] = rOut[c] * sigmoid(rOut[c])


def weight_of(spec: Spec, rWeight: Any, p: int, place: int) -> Any:
    """Filter value `place` (channel * taps + tap) of item p."""
    if spec.weight_dtype is Float32:
        return rWeight[p * spec.weight_words + place].bitcast(Float32)
    return ptx.unpack(spec.weight_dtype, rWeight[p * spec.weight_words + place // 2])[place % 2]


def channel_of(spec: Spec, item: Any, block: Block) -> Any:
    """First channel of an item, in the flat order [q | k | v]."""
    p = spec.problem
    keys = spec.shared_items // 2
    channel = Int32(2 * p.num_k_heads * p.head_k_dim) + block.place.head * p.head_v_dim + column_in_head(spec, block.rank)
    channel += (item - spec.shared_items) * CHANNELS
    k_channel = Int32(p.num_k_heads * p.head_k_dim) + block.key_head * p.head_k_dim + (item - keys) * CHANNELS
    q_channel = block.key_head * p.head_k_dim + item * CHANNELS
    channel = cutlass.select_(item < spec.shared_items, k_channel, channel)
    return cutlass.select_(item < keys, q_channel, channel)


def place_in_row(spec: Spec, item: Any, block: Block) -> Any:
    """First element of an item in a row of the projection."""
    if not spec.problem.interleaved:
        return channel_of(spec, item, block)
    inner = block.rank // spec.splits * spec.problem.head_v_dim + column_in_head(spec, block.rank)
    within = cutlass.select_(item < spec.shared_items, item * CHANNELS, item * CHANNELS + inner)
    return block.key_head * spec.group_width + within


def loaded_item(spec: Spec, p: int, thread: Any) -> Any:
    """Return the item whose inputs a thread loads in pass p. An item beyond the last is the last one, so that nothing
    branches."""
    return cutlass.min(p * spec.tiles.threads + thread, spec.items - 1)


@cute.jit
def load_filter(spec: Spec, params: GdnDecodeParams, block: Block, registers: Registers):
    gWeight, gBias, rWeight, rBias = params.conv_weight, params.conv_bias, registers.weight, registers.bias
    for p in cutlass.range_constexpr(spec.passes):
        channel = Int64(channel_of(spec, loaded_item(spec, p, block.thread), block))
        size = cutlass.const_expr(spec.weight_words)
        step = cutlass.const_expr(min(4, size & -size))
        source = words(gWeight, channel * spec.problem.width, 4 * step)
        for first in cutlass.range_constexpr(0, size, step):
            load(source + first, step, rWeight, p * size + first, False)
        if cutlass.const_expr(spec.problem.bias_dtype is not None):
            align = cutlass.const_expr(min(16, CHANNELS * gBias.element_type.width // 8))
            load(pointer(gBias, channel, align), CHANNELS, rBias, p * CHANNELS, False)


@cute.jit
def load_gates(spec: Spec, params: GdnDecodeParams, token: Int32, block: Block, rGates: cute.Tensor):
    """Load raw a and b in the last thread, which makes log decay and beta."""
    (gA, a_at), (gB, b_at) = place_of_gates(spec, params, block)
    load_numbers(spec, block, ((gA, (token, a_at)), (gB, (token, b_at))), rGates, 2)


@cute.jit
def load_head_gates(spec: Spec, params: GdnDecodeParams, block: Block, rGates: cute.Tensor):
    """Load the head's A_log and dt_bias in the last thread. Two branches on one condition that write registers become one: values
    are chosen by it instead, so that these loads do not wait for those of a and b."""
    if cutlass.const_expr(spec.stages_state):
        load_numbers(spec, block, ((params.A_log, block.place.head), (params.dt_bias, block.place.head)), rGates, 0)
    else:
        A_log = Float32(0.0)
        dt_bias = Float32(0.0)
        if block.thread == spec.tiles.threads - 1:
            A_log = params.A_log[block.place.head].to(Float32)
            dt_bias = params.dt_bias[block.place.head].to(Float32)
        rGates[0] = A_log.bitcast(Int32)
        rGates[1] = dt_bias.bitcast(Int32)


@cute.jit
def load_numbers(spec: Spec, block: Block, sources: Any, rX: cute.Tensor, start: Constexpr):
    """Load elements of tensors into the words of rX from `start` on, in the last thread; `number_of` reads them. sources: pairs
    of a tensor and an offset.

    Loads to registers share six counters, so what waits for one may wait for a state that is loaded to registers. There these are
    converted in a branch, which waits for them before the state is asked for; elsewhere nobody waits for them here.
    """
    is_last = block.thread == spec.tiles.threads - 1
    if cutlass.const_expr(spec.stages_state):
        for i in cutlass.range_constexpr(len(sources)):
            gX, at = sources[i]
            size = cutlass.const_expr(gX.element_type.width // 8)
            address = gX.iterator.toint() + Int64(cute.crd2idx(at, gX.layout)) * size
            rX[start + i] = ptx.load_global_if(address, size, Int32(is_last))
    else:
        if is_last:
            for i in cutlass.range_constexpr(len(sources)):
                gX, at = sources[i]
                rX[start + i] = gX[at].to(Float32).bitcast(Int32)


def number_of(spec: Spec, gX: cute.Tensor, word: Any) -> Any:
    """Value of a word that `load_numbers` has loaded."""
    return ptx.number(gX.element_type, word) if spec.stages_state else word.bitcast(Float32)


def log_decay_of(spec: Spec, params: GdnDecodeParams, block: Block, rGates: cute.Tensor) -> Any:
    """Log decay of what `load_head_gates` and `load_gates` have loaded."""
    tensors = (params.A_log, params.dt_bias, place_of_gates(spec, params, block)[0][0])
    A_log, dt_bias, a = [number_of(spec, gX, rGates[i]) for i, gX in enumerate(tensors)]
    return log_decay(a + dt_bias, -cute.math.exp(A_log))


def beta_of(spec: Spec, params: GdnDecodeParams, block: Block, rGates: cute.Tensor) -> Any:
    """Beta of what `load_gates` has loaded."""
    return 1.0 / (1.0 + cute.math.exp(-number_of(spec, place_of_gates(spec, params, block)[1][0], rGates[3])))


@cute.jit
def load_row(spec: Spec, params: GdnDecodeParams, token: Int32, block: Block, registers: Registers):
    """Load the token's row after the window in registers.line, and the norm's gate if there is a norm."""
    gX, gZ, rLine, rZ, place = params.mixed_qkv, params.z, registers.line, registers.z, block.place
    for p in cutlass.range_constexpr(spec.passes):
        offset = Int64(token) * gX.stride[0] + place_in_row(spec, loaded_item(spec, p, block.thread), block)
        load(words(gX, offset, 4 * WORDS), WORDS, rLine, (p * spec.line_rows + spec.history) * WORDS, True)
    if cutlass.const_expr(spec.has_norm):
        if place.lane < spec.tile.v_per_thread:
            if cutlass.const_expr(spec.problem.interleaved):
                k, v = spec.problem.head_k_dim, spec.problem.head_v_dim
                at = block.key_head * spec.group_width + (2 * k + spec.ratio * v) + block.rank // spec.splits * v
                rZ[0] = gX[token, at + place.v_start + place.lane].to(Float32)
            else:
                rZ[0] = gZ[token, place.head, place.v_start + place.lane].to(Float32)


def is_mine(spec: Spec, item: Any, rank: Any) -> Any:
    """Return whether this block writes the window of an item. The items of q and k are dealt to the blocks of the cluster."""
    if spec.cluster == 1:
        return item < spec.items
    owner = item * spec.cluster // spec.shared_items
    return (item < spec.items) & ((item >= spec.shared_items) | (owner == rank))


@cute.jit
def load_windows(spec: Spec, params: GdnDecodeParams, block: Block, slot: Int64, column: Int32, rLine: cute.Tensor):
    """The window of a slot from `column` on."""
    gWindows = params.conv_state
    for p in cutlass.range_constexpr(spec.passes):
        channel = channel_of(spec, loaded_item(spec, p, block.thread), block)
        for c in cutlass.range_constexpr(spec.history):
            offset = window_offset(gWindows, slot, column + c, channel)
            at = cutlass.const_expr((p * spec.line_rows + c) * WORDS)
            if cutlass.const_expr(spec.copies_windows):
                load(words(gWindows, offset, 4 * WORDS), WORDS, rLine, at, True)
            else:
                rRow = cute.make_rmem_tensor(CHANNELS, Float32)
                load_channels(gWindows, offset, spec.problem.conv_channels_contiguous, CHANNELS, rRow, 0)
                for word in cutlass.range_constexpr(WORDS):
                    rLine[at + word] = ptx.pack(spec.dtype, rRow[2 * word], rRow[2 * word + 1])


@cute.jit
def store_column(
    spec: Spec, params: GdnDecodeParams, block: Block, slot: Int64, column: Int32, item_and_row: Constexpr,
    rLine: cute.Tensor,
):  # fmt: skip
    """(p, row): row `row` of item p's line -> a column of its window."""
    gWindows = params.conv_state
    p, row = item_and_row
    size = cutlass.const_expr(gWindows.element_type.width // 8)
    item = p * spec.tiles.threads + block.thread
    if is_mine(spec, item, block.rank):
        offset = window_offset(gWindows, slot, column, channel_of(spec, item, block))
        at = cutlass.const_expr((p * spec.line_rows + row) * WORDS)
        if cutlass.const_expr(spec.copies_windows):
            ptx.store_global_pair(gWindows.iterator.toint() + offset * size, rLine[at], rLine[at + 1])
        else:
            rRow = cute.make_rmem_tensor(CHANNELS, Float32)
            for word in cutlass.range_constexpr(WORDS):
                values = ptx.unpack(spec.dtype, rLine[at + word])
                rRow[2 * word], rRow[2 * word + 1] = values[0], values[1]
            store_channels(rRow, 0, CHANNELS, gWindows, offset, spec.problem.conv_channels_contiguous)
