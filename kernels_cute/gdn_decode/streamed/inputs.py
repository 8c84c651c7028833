"""Inputs of an item in the streamed form: what its threads load while another item is computed, and the convolution.

Thread i has four channels, and with many value heads those THREADS threads further too: q, k, then v of all value heads of the
key head. The first four are loaded ahead, the others when those are done. The last threads have the gates: a token and value head
each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import log_decay
from kernels_cute.common.memory import load, words
from kernels_cute.common.ring import Live
from kernels_cute.gdn_decode.convolution import convolve_row, load_filter, load_windows, loaded_item, place_in_row, store_column
from kernels_cute.gdn_decode.shape import CHANNELS, WORDS
from kernels_cute.gdn_decode.spec import Registers, place_of_gates
from kernels_cute.gdn_decode.streamed.items import block_of
from kernels_cute.gdn_decode.streamed.spec import THREADS, Item, Shared, Spec


def make_registers(spec: Spec) -> Registers:
    """Registers of the inputs."""
    rWeight = cute.make_rmem_tensor(spec.weight_words, Int32)
    rBias = cute.make_rmem_tensor(CHANNELS, Float32)
    rLine = cute.make_rmem_tensor(spec.line_rows * WORDS, Int32)
    # Raw a and b; of few value heads, for which there are registers, A_log and dt_bias too.
    rGates = cute.make_rmem_tensor(4 if spec.turns == 1 else 2, Float32)
    for rX in (rBias, rGates):
        rX.fill(0.0)
    for rX in (rWeight, rLine):
        rX.fill(0)
    return Registers(None, rWeight, rBias, rLine, rGates, None, None, cute.make_rmem_tensor(CHANNELS, Float32))


@cute.jit
def load_inputs(spec: Spec, params: GdnDecodeParams, item: Item, thread: Int32, registers: Registers):
    """Load what the thread needs of an item ahead of it: its first channels, and the gates."""
    load_channels(spec, params, item, thread, registers)
    batch, ratio, rGates = cutlass.const_expr(spec.batch), cutlass.const_expr(spec.ratio), registers.gates
    gate = thread - (THREADS - batch * ratio)
    if gate >= 0:
        token = cutlass.min(item.begin + gate // ratio, item.begin + item.count - 1)
        for head in cutlass.range_constexpr(ratio):
            if gate % ratio == head:
                own = block_of(spec, item.key_head, thread, head)
                (gA, a_at), (gB, b_at) = place_of_gates(spec, params, own)
                values = [gA[token, a_at], gB[token, b_at]]
                if cutlass.const_expr(spec.turns == 1):
                    values += [params.A_log[own.place.head], params.dt_bias[own.place.head]]
                for i, value in enumerate(values):
                    rGates[i] = value.to(Float32)


@cute.jit
def load_channels(spec: Spec, params: GdnDecodeParams, item: Item, thread: Int32, registers: Registers):
    """Load the windows, rows and filter of four channels. thread: their number. A token beyond the last is the last one again."""
    gX, batch = params.mixed_qkv, cutlass.const_expr(spec.batch)
    if cutlass.const_expr(spec.items % THREADS == 0) or thread < spec.items:
        block, last = block_of(spec, item.key_head, thread), item.begin + item.count - 1
        load_windows(spec, params, block, Int64(item.slot), item.column, registers.line)
        at = place_in_row(spec, loaded_item(spec, 0, thread), block)
        for i in cutlass.range_constexpr(batch):
            token = cutlass.min(item.begin + i, last)
            load(words(gX, Int64(token) * gX.stride[0] + at, 4 * WORDS), WORDS, registers.line, (spec.history + i) * WORDS, True)
        load_filter(spec, params, block, registers)


@cute.jit
def finish_inputs(
    spec: Spec, params: GdnDecodeParams, item: Item, live: Live, thread: Int32, registers: Registers, shared: Shared
):  # fmt: skip
    """After the first channels are written, store their windows after the item, and do all that belongs to the further
    channels."""
    for turn in cutlass.range_constexpr(spec.turns):
        number = thread + turn * THREADS
        if cutlass.const_expr(turn > 0):
            load_channels(spec, params, item, number, registers)
            write_channels(spec, number, registers, shared)
        if live.is_valid:
            store_windows(spec, params, item, number, registers.line)


@cute.jit
def write_channels(spec: Spec, thread: Int32, registers: Registers, shared: Shared):
    """Write q, k or v of all tokens after the convolution to shared memory."""
    batch, rOut = cutlass.const_expr(spec.batch), registers.out
    if thread < spec.items:
        for i in cutlass.range_constexpr(batch):
            convolve_row(spec, 0, i * WORDS, registers, registers.line)
            values = [rOut[c] for c in range(CHANNELS)]
            ptx.store_where(shared.tokens + 4 * (i * spec.token_floats) + thread * (4 * CHANNELS), values, Int32(1))


@cute.jit
def write_gates(spec: Spec, params: GdnDecodeParams, item: Item, thread: Int32, rGates: cute.Tensor, shared: Shared):
    """Write the log decays and betas of all tokens and value heads to shared memory."""
    gate = thread - (THREADS - spec.batch * spec.ratio)
    if gate >= 0:
        if cutlass.const_expr(spec.turns == 1):
            A_log, dt_bias = rGates[2], rGates[3]
        else:
            head = item.key_head * spec.ratio + gate % spec.ratio
            A_log, dt_bias = params.A_log[head].to(Float32), params.dt_bias[head].to(Float32)
        g = log_decay(rGates[0] + dt_bias, -cute.math.exp(A_log))
        ptx.store_pair(shared.gates + gate * 8, g, 1.0 / (1.0 + cute.math.exp(-rGates[1])))


@cute.jit
def store_windows(spec: Spec, params: GdnDecodeParams, item: Item, thread: Int32, rLine: cute.Tensor):
    """Store the window after the item; with accepted counts, the inputs of all its tokens as columns behind those before."""
    block, slot, history = block_of(spec, item.key_head, thread), Int64(item.slot), cutlass.const_expr(spec.history)
    if cutlass.const_expr(spec.keeps_columns):
        for c in cutlass.range_constexpr(1, history):
            store_column(spec, params, block, slot, Int32(c - 1), (0, c), rLine)
        for i in cutlass.range_constexpr(spec.batch):
            if (i < item.count) & (history - 1 + i < params.conv_state.shape[2]):
                store_column(spec, params, block, slot, Int32(history - 1 + i), (0, history + i), rLine)
    else:
        for c in cutlass.range_constexpr(history):
            store_column(spec, params, block, slot, Int32(c), (0, c + 1), rLine)
