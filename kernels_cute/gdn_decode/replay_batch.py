"""Several tokens of a sequence at once, with a ring (`common.ring_batch`): convolution, delta rule and norm of all of them
between three barriers.

A sequence of more tokens than a batch takes the rest in further turns, with the tokens before as entries.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx, ring, ring_batch
from kernels_cute.common.ring import Live
from kernels_cute.gdn_decode.batch import (
    gates,
    load_rows,
    opaque_block,
    store_columns,
    sum_of_squares,
    wait_for_squares,
    write_rows,
    z_of,
)
from kernels_cute.gdn_decode.convolution import load_filter
from kernels_cute.gdn_decode.replay import store_folded
from kernels_cute.gdn_decode.spec import Block, Registers, Sequence, Shared, Spec, column_in_head
from kernels_cute.gdn_decode.token import activated

_WARP = 32


@cute.jit
def run_tokens(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, registers: Registers, shared: Shared):
    """Compute all tokens of a sequence, a batch at a time. registers hold the inputs of the first batch."""
    batch = cutlass.const_expr(spec.batch)
    for first in cutlass.range(0, sequence.count, batch, unroll=1):
        # Addresses are made in each turn: made before the first one, they would take registers all along.
        run_batch(spec, params, opaque_block(block), sequence, first, registers, shared)
    live = ring.live_entries(spec.ring, shared.entries, (sequence.first, sequence.committed), params.fold_phase)
    store_folded(spec, params, block, sequence, live, registers, shared)


@cute.jit
def load_z(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, first: Int32, registers: Registers):
    """Load the norm's gates of the batch, in the lanes that store outputs. It comes after the convolution, which needs the
    registers."""
    place, last = block.place, sequence.begin + sequence.count - 1
    if cutlass.const_expr(spec.has_norm):
        if stores_outputs(spec, place.lane):
            for i in cutlass.range_constexpr(spec.batch):
                token = cutlass.min(sequence.begin + first + i, last)
                registers.z[i] = z_of(spec, params, token, block, place.v_start + place.lane % spec.tile.v_per_thread)


def stores_outputs(spec: Spec, lane: Any) -> Any:
    """Whether a lane has the outputs of its column: those of S^T q."""
    columns = spec.tile.v_per_thread
    return (lane >= columns) & (lane < 2 * columns)


@cute.jit
def run_batch(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, first: Int32, registers: Registers,
    shared: Shared,
):  # fmt: skip
    """Compute the tokens from `first` on. registers hold their inputs, and afterwards those of the next batch."""
    tile, place, thread, entries = spec.tile, block.place, block.thread, shared.entries
    batch, columns, pitch = cutlass.const_expr(spec.batch), spec.tile.v_per_thread, cutlass.const_expr(4 * spec.token_floats)
    count = cutlass.min(sequence.count - first, Int32(batch))
    before = sequence.committed - sequence.first + first
    write_inputs(spec, block, before, registers, shared)
    load_z(spec, params, block, sequence, first, registers)
    if first == 0:
        cute.arch.cp_async_wait_group(1)  # the entries are there, the state need not be
    cute.arch.sync_threads()
    if cutlass.const_expr(spec.cluster > 1):
        if first == 0:  # the windows of this block are read (their values have been used), and its barriers are set up
            cute.arch.cluster_arrive_relaxed()

    live = ring.live_entries(spec.ring, entries, (sequence.first, sequence.committed), params.fold_phase)
    rDecays, rY, rV, rBeta, rU, rK = [cute.make_rmem_tensor(batch, Float32) for _ in range(6)]
    norms = shared.tokens + batch * pitch
    ring_batch.weigh(spec.ring, entries, live, before, batch, (shared.tokens, pitch, norms), thread, rDecays)
    if cutlass.const_expr(spec.cluster > 1):
        if first == 0:
            cute.arch.cluster_wait()
    # Here, so that the products with the state have the registers of the line.
    if live.is_valid:
        store_columns(spec, params, block, sequence, first, count, registers.line)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()  # all weights are there

    at = (place.lane, ring.group_of(spec.ring, thread))
    tokens, state = (shared.tokens, pitch), (params.ssm_state.element_type, shared.state, thread)
    ring_batch.multiply(spec.ring, entries, live, before, batch, tokens, at, state, rDecays, rY)
    column = place.v_start - column_in_head(spec, block.rank) + place.lane % columns
    for i in cutlass.range_constexpr(batch):
        rV[i] = ptx.load_one(shared.tokens + i * pitch + (2 * tile.head_k_dim + column) * 4)
        rBeta[i] = ptx.load_one(shared.tokens + i * pitch + 4 * spec.gates_at + 4)
    ring_batch.solve(spec.ring, entries, before, norms, params.scale, place.lane, (rY, rV, rBeta, rU, rK))

    parity = first // batch % 2
    if cutlass.const_expr(spec.has_norm):
        send_squares(spec, block, rY, parity, shared)

    # While the sums are under way: the entries, and the next batch's inputs.
    append(spec, params, block, sequence, live, before, count, (rU, rK), shared)
    rGate = cute.make_rmem_tensor(batch, Float32)
    for i in cutlass.range_constexpr(batch):
        rGate[i] = activated(spec, registers.z[i])
    if first + batch < sequence.count:
        load_rows(spec, params, block, sequence, first + batch, registers, spec.history)
        load_filter(spec, params, block, registers)  # again: kept, it would take registers all along

    if cutlass.const_expr(spec.has_norm):
        wait_for_squares(spec, block, first // batch, parity, shared)
    for i in cutlass.range_constexpr(batch):
        value = rY[i]
        if cutlass.const_expr(spec.has_norm):
            total = sum_of_squares(spec, Int32(i), parity, shared)
            inverse = cute.math.rsqrt(total * (1.0 / tile.head_v_dim) + params.eps)
            value = value * inverse * registers.norm_weight * rGate[i]
        if (i < count) & stores_outputs(spec, place.lane):
            value = cutlass.select_(live.is_valid, value, Float32(0.0))
            row, at_column = sequence.begin + first + i, place.v_start + place.lane - columns
            params.out[row, place.head, at_column] = Float32(value).to(params.out.element_type)
    if first + batch < sequence.count:
        cute.arch.sync_threads()  # all have read what the next batch replaces, and its entries are there


@cute.jit
def write_inputs(spec: Spec, block: Block, before: Int32, registers: Registers, shared: Shared):
    """Write q, k and v of the batch after the convolution, log decays and betas to shared memory."""
    batch, threads = cutlass.const_expr(spec.batch), spec.tiles.threads
    pitch = cutlass.const_expr(4 * spec.token_floats)
    write_rows(spec, block, registers, shared)
    if block.thread >= threads - batch:
        i = block.thread - (threads - batch)
        g, beta = gates(registers)
        ptx.store_one(shared.entries.decays + (before + i) * 4, g)
        ptx.store_one(shared.tokens + i * pitch + 4 * spec.gates_at + 4, beta)


@cute.jit
def append(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, live: Live, before: Int32, count: Int32,
    registers: Any, shared: Shared,
):  # fmt: skip
    """Write the tokens' entries to their rows of the ring, and to shared memory for the tokens after them."""
    rU, rK = registers
    place, thread, entries, gRing = block.place, block.thread, shared.entries, params.ring
    batch, columns, units = cutlass.const_expr(spec.batch), spec.tile.v_per_thread, cutlass.const_expr(spec.ring.key_units)
    is_followed = before - (sequence.committed - sequence.first) + batch < sequence.count
    source = gRing.iterator.toint() + Int64(sequence.read_slot) * gRing.stride[0] * 4
    group = ring.group_of(spec.ring, thread)
    for i in cutlass.range_constexpr(batch):
        row = source + Int64(ring.row_of(spec.ring, live.base, before + i)) * gRing.stride[1] * 4
        if i < count:
            if place.lane < columns:
                at = 4 * (spec.ring.updates_at + place.head * spec.tile.head_v_dim + place.v_start + place.lane)
                if live.is_valid:
                    ptx.store_global_word(row + at, rU[i].bitcast(Int32))
                if is_followed:
                    target = (before + i) * spec.ring.block_v + group * columns + place.lane
                    ptx.store_one(entries.updates + target * 4, rU[i])
            for p in cutlass.range_constexpr(spec.ring.key_passes):
                unit = p * spec.tiles.threads + thread
                if unit < units:
                    pitch = cutlass.const_expr(4 * spec.token_floats)
                    key = ptx.load_four(shared.tokens + i * pitch + (4 * spec.tile.head_k_dim + unit * 16))
                    values = [rK[i] * key[e] for e in range(4)]
                    if is_followed:
                        ptx.store_where(entries.keys + ((before + i) * units + unit) * 16, values, Int32(1))
                    if (block.rank == 0) & live.is_valid:
                        ptx.store_global_four(row + block.key_head * (4 * spec.tile.head_k_dim) + unit * 16, values)
            if (thread == 0) & (block.rank % spec.splits == 0) & live.is_valid:
                decay = ptx.load_word(entries.decays + (before + i) * 4)
                ptx.store_global_word(row + 4 * (spec.ring.decays_at + place.head), decay)


@cute.jit
def send_squares(spec: Spec, block: Block, rY: cute.Tensor, parity: Int32, shared: Shared):
    """Send the warp's sums of squared outputs, of every token, to all blocks of the head."""
    batch, lane = cutlass.const_expr(spec.batch), block.thread % _WARP
    rSquares = cute.make_rmem_tensor(batch, Float32)
    for i in cutlass.range_constexpr(batch):
        rSquares[i] = cutlass.select_(stores_outputs(spec, block.place.lane), rY[i] * rY[i], Float32(0.0))
    ring_batch.halved(rSquares, batch, 1, lane)
    value = rSquares[0]
    for bit in cutlass.range_constexpr((batch - 1).bit_length(), 5):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
    token, number = lane % batch, lane // batch
    own = (token * spec.padded_parts + block.rank % spec.splits * spec.warps + block.thread // _WARP) * 4
    own += parity * spec.parity_bytes
    if cutlass.const_expr(spec.splits > 1):
        target = block.rank // spec.splits * spec.splits + cutlass.min(number, spec.splits - 1)
        barrier = ptx.in_block((shared.sums_full + parity).toint(), target)
        ptx.send(ptx.in_block(shared.sums + own, target), value, barrier, Int32(spec.splits) - number)
    else:
        if number == 0:
            ptx.store_one(shared.sums + own, value)
