"""Several tokens of a sequence at once: their inputs, windows and sums of squares. With a ring `replay_batch` computes them all
together, without one `several` goes from token to token.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import log_decay
from kernels_cute.common.memory import load, words
from kernels_cute.common.state_tile import opaque_place
from kernels_cute.gdn_decode.convolution import convolve_row, loaded_item, place_in_row, store_column
from kernels_cute.gdn_decode.shape import CHANNELS, WORDS
from kernels_cute.gdn_decode.spec import Block, Registers, Sequence, Shared, Spec, place_of_gates
from kernels_cute.gdn_decode.token import total_of_parts


def opaque_block(block: Block) -> Block:
    """Return the block and thread as values of which the compiler knows nothing."""
    place = opaque_place(block.place)._replace(v_start=ptx.opaque(block.place.v_start))
    parts = [ptx.opaque(part) for part in (block.sequence, block.key_head, block.rank, block.thread)]
    return Block(*parts, place)


@cute.jit
def load_rows(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, first: Int32, registers: Registers,
    before: Constexpr = 0,
):  # fmt: skip
    """Load the inputs of the batch from token `first` on; a token beyond the last is the last one again. before: how many inputs
    before them the line gets too; after the call's first batch those are its own."""
    gX, batch = params.mixed_qkv, cutlass.const_expr(spec.batch)
    last = sequence.begin + sequence.count - 1
    for p in cutlass.range_constexpr(spec.passes):
        at = place_in_row(spec, loaded_item(spec, p, block.thread), block)
        for i in cutlass.range_constexpr(-before, batch):
            token = cutlass.min(sequence.begin + first + i, last)
            target = cutlass.const_expr((p * spec.line_rows + spec.history + i) * WORDS)
            load(words(gX, Int64(token) * gX.stride[0] + at, 4 * WORDS), WORDS, registers.line, target, True)
    if block.thread >= spec.tiles.threads - batch:
        token = cutlass.min(sequence.begin + first + block.thread - (spec.tiles.threads - batch), last)
        (gA, a_at), (gB, b_at) = place_of_gates(spec, params, block)
        values = [params.A_log[block.place.head], params.dt_bias[block.place.head], gA[token, a_at], gB[token, b_at]]
        for rX, value in zip(registers.gates, values, strict=True):
            rX[0] = value


def gates(registers: Registers) -> tuple[Any, Any]:
    """Return the log decay and beta of the thread's token, from what `load_rows` has loaded. Made there, they would wait for the
    loads."""
    A_log, dt_bias, a, b = [rX[0].to(Float32) for rX in registers.gates]
    return log_decay(a + dt_bias, -cute.math.exp(A_log)), 1.0 / (1.0 + cute.math.exp(-b))


@cute.jit
def write_rows(spec: Spec, block: Block, registers: Registers, shared: Shared):
    """Write q, k and v of the batch after the convolution to shared memory."""
    rOut, pitch = registers.out, cutlass.const_expr(4 * spec.token_floats)
    for p in cutlass.range_constexpr(spec.passes):
        item = p * spec.tiles.threads + block.thread
        if item < spec.items:
            for i in cutlass.range_constexpr(spec.batch):
                convolve_row(spec, p, (p * spec.line_rows + i) * WORDS, registers, registers.line)
                values = [rOut[c] for c in range(CHANNELS)]
                ptx.store_where(shared.tokens + i * pitch + item * (4 * CHANNELS), values, Int32(1))


def z_of(spec: Spec, params: GdnDecodeParams, token: Any, block: Block, column: Any) -> Any:
    """The norm's gate of a token's column."""
    p, head = spec.problem, block.place.head
    if p.interleaved:
        at = block.key_head * spec.group_width + (2 * p.head_k_dim + spec.ratio * p.head_v_dim)
        return params.mixed_qkv[token, at + block.rank // spec.splits * p.head_v_dim + column].to(Float32)
    return params.z[token, head, column].to(Float32)


@cute.jit
def store_columns(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, first: Int32, count: Int32, rLine: cute.Tensor
):
    """Store the windows' columns of the batch's inputs, and with the first token also the columns before."""
    history, slot, batch = spec.history, Int64(sequence.window_slot), cutlass.const_expr(spec.batch)
    for p in cutlass.range_constexpr(spec.passes):
        if first == 0:
            for c in cutlass.range_constexpr(1, history):
                store_column(spec, params, block, slot, Int32(c - 1), (p, c), rLine)
        for i in cutlass.range_constexpr(batch):
            if (i < count) & (history - 1 + first + i < params.conv_state.shape[2]):
                store_column(spec, params, block, slot, history - 1 + first + i, (p, history + i), rLine)


@cute.jit
def wait_for_squares(spec: Spec, block: Block, turn: Int32, parity: Int32, shared: Shared):
    """Wait until all warps of the head have sent the sums of this batch."""
    if cutlass.const_expr(spec.splits > 1):
        cute.arch.mbarrier_wait(shared.sums_full + parity, turn // 2 % 2)
        if block.thread == 0:  # for the batch after the next one
            cute.arch.mbarrier_arrive_and_expect_tx(shared.sums_full + parity, 4 * spec.parts * spec.batch)
    else:
        cute.arch.sync_threads()


@cute.jit
def sum_of_squares(spec: Spec, token: Int32, parity: Int32, shared: Shared):
    """The head's sum of squares of a token's outputs."""
    sums = shared.sums + parity * spec.parity_bytes + token * (4 * spec.padded_parts)
    return total_of_parts(spec, sums)
