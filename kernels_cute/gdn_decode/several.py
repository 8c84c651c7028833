"""Several tokens of a sequence without a ring, V first: convolutions, gates and norms of up to four tokens at once, then the
delta rule token by token, with no barrier between two of them, then their outputs at once.

    token i of a batch, with the factors that `write_factors` makes of its gates and norms:
    u = (beta |k|^-1) (v - (alpha |k|^-1) S^T k)
    o = (alpha scale |q|^-1) S^T q + (scale |q|^-1 q . k) u
    S = alpha S + k u^T

The sums over K of a thread's columns go through a butterfly that halves what each lane holds: lane r of a group keeps S^T k of
the group's column r, lane v_per_thread + r keeps S^T q of it. An output takes the place of its v in shared memory, where only the
warp that has the column reads it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import L2NORM_EPS, own_column
from kernels_cute.common.ring_batch import halved
from kernels_cute.common.staged_state import fill_state, lay_aside, take_back
from kernels_cute.common.state_tile import Place, store_state
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
from kernels_cute.gdn_decode.convolution import load_filter, store_column
from kernels_cute.gdn_decode.spec import Block, Registers, Sequence, Shared, Spec, column_in_head
from kernels_cute.gdn_decode.token import activated, slot_of, store_intermediate

_WARP = 32


@cute.jit
def run_tokens(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, registers: Registers, shared: Shared):
    """Compute all tokens of a sequence, a batch at a time. registers hold the inputs of the first batch."""
    uniform = [cute.arch.make_warp_uniform(value) for value in sequence[:4]]
    same = sequence._replace(begin=uniform[0], count=uniform[1], read_slot=uniform[2], window_slot=uniform[3])
    for first in cutlass.range(0, same.count, spec.batch, unroll=1):
        # Addresses are made in each turn: made before the first one, they would take registers all along.
        run_batch(spec, params, opaque_block(block), same, first, registers, shared)


def output_place(spec: Spec, thread: Any, number: int) -> tuple[Any, Any]:
    """Return output `number` of a lane: its token in the batch, which may lie beyond it, and its column in the block. A warp has
    the outputs of its own columns, a row of them in neighbouring lanes."""
    lane, columns = thread % _WARP, spec.warp_columns
    return number * (_WARP // columns) + lane // columns, thread // _WARP * columns + lane % columns


@cute.jit
def run_batch(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, first: Int32, registers: Registers,
    shared: Shared,
):  # fmt: skip
    """Compute the tokens from `first` on. registers hold their inputs, and afterwards those of the next batch."""
    batch = cutlass.const_expr(spec.batch)
    count = cutlass.min(sequence.count - first, Int32(batch))
    write_rows(spec, block, registers, shared)
    write_gates(spec, block, registers, shared)
    cute.arch.sync_threads()
    if cutlass.const_expr(spec.cluster > 1):
        if first == 0:  # the windows of this block are read (their values have been used), and its barriers are set up
            cute.arch.cluster_arrive_relaxed()
    write_factors(spec, params, block.thread, shared)
    if cutlass.const_expr(spec.cluster > 1):
        if first == 0:
            cute.arch.cluster_wait()
    # Here, so that the delta rule has the registers of the line.
    store_windows(spec, params, block, sequence, first, count, registers.line)
    cute.arch.sync_threads()  # all factors are there
    # The state comes through shared memory, so that its registers are those of the convolution before.
    rState = cute.make_rmem_tensor(spec.tile.values, Float32)
    if first == 0:
        cute.arch.cp_async_wait_group(0)
        fill_state(spec.tile, params.ssm_state.element_type, shared.state, block.thread, rState)
    else:
        take_back(spec.tile, shared.state, block.thread, rState)
    for i in cutlass.range(count, unroll=1):
        run_token(spec, params, block, sequence, first + i, shared.tokens + i * (4 * spec.token_floats), rState)
    if first + batch < sequence.count:
        lay_aside(spec.tile, shared.state, block.thread, rState)
    cute.arch.sync_warp()

    parity = first // batch % 2
    rOut = cute.make_rmem_tensor(spec.lane_outputs, Float32)
    rZ = cute.make_rmem_tensor(spec.lane_outputs, Float32)
    norm_weight = Float32(1.0)
    for number in cutlass.range_constexpr(spec.lane_outputs):
        token, column = output_place(spec, block.thread, number)
        row = cutlass.min(token, batch - 1) * (4 * spec.token_floats)
        rOut[number] = ptx.load_one(shared.tokens + row + (2 * spec.problem.head_k_dim + column) * 4)
        at = column_in_head(spec, block.rank) + column
        if cutlass.const_expr(spec.has_norm):
            z_row = cutlass.min(sequence.begin + first + token, sequence.begin + sequence.count - 1)
            rZ[number] = z_of(spec, params, z_row, block, at)
            norm_weight = params.norm_weight[at].to(Float32)
    if cutlass.const_expr(spec.has_norm):
        send_squares(spec, block, rOut, parity, shared)

    # While the sums are under way: the next batch's inputs. Without zeros the old ones would keep their registers all along, for
    # the turn that is not followed by another.
    for rX in (registers.line, registers.weight, registers.bias, *registers.gates):
        rX.fill(0)
    if first + batch < sequence.count:
        load_rows(spec, params, block, sequence, first + batch, registers, spec.history)
        load_filter(spec, params, block, registers)  # again: kept, it would take registers all along

    if cutlass.const_expr(spec.has_norm):
        wait_for_squares(spec, block, first // batch, parity, shared)
    for number in cutlass.range_constexpr(spec.lane_outputs):
        token, column = output_place(spec, block.thread, number)
        value = rOut[number]
        if cutlass.const_expr(spec.has_norm):
            total = sum_of_squares(spec, cutlass.min(token, batch - 1), parity, shared)
            inverse = cute.math.rsqrt(total * (1.0 / spec.problem.head_v_dim) + params.eps)
            value = value * inverse * norm_weight * activated(spec, rZ[number])
        if token < count:
            row, at_column = sequence.begin + first + token, column_in_head(spec, block.rank) + column
            params.out[row, block.place.head, at_column] = Float32(value).to(params.out.element_type)
    if cutlass.const_expr(not spec.has_norm):
        if first + batch < sequence.count:
            cute.arch.sync_threads()  # all have read what the next batch replaces


@cute.jit
def write_gates(spec: Spec, block: Block, registers: Registers, shared: Shared):
    """Write the decays and betas of the batch to shared memory, a token a thread."""
    first = cutlass.const_expr(spec.tiles.threads - spec.batch)
    if block.thread >= first:
        g, beta = gates(registers)
        at = shared.tokens + (block.thread - first) * (4 * spec.token_floats) + 4 * spec.gates_at
        ptx.store_pair(at, cute.math.exp(g), beta)


@cute.jit
def write_factors(spec: Spec, params: GdnDecodeParams, thread: Int32, shared: Shared):
    """Write the factors of a token's sums in the place of its gates. A warp takes a token at a time."""
    lane, warp, units = thread % _WARP, thread // _WARP, cutlass.const_expr(spec.problem.head_k_dim // 4)
    rSums = cute.make_rmem_tensor(3, Float32)  # k . k, q . q, q . k
    for turn in cutlass.range_constexpr(-(-spec.batch // spec.warps)):
        token = warp + turn * spec.warps
        if token < spec.batch:
            at = shared.tokens + token * (4 * spec.token_floats)
            rSums.fill(0.0)
            for p in cutlass.range_constexpr(-(-units // _WARP)):
                unit = p * _WARP + lane
                if cutlass.const_expr(units % _WARP == 0) or unit < units:
                    q_values, k_values = ptx.load_four(at + unit * 16), ptx.load_four(at + (units + unit) * 16)
                    for e in cutlass.range_constexpr(4):
                        rSums[0] += k_values[e] * k_values[e]
                        rSums[1] += q_values[e] * q_values[e]
                        rSums[2] += q_values[e] * k_values[e]
            for n in cutlass.range_constexpr(3):
                rSums[n] = cute.arch.warp_reduction_sum(rSums[n])
            gates = at + 4 * spec.gates_at
            alpha, beta = ptx.load_one(gates), ptx.load_one(gates + 4)
            cute.arch.sync_warp()  # all lanes have read what the first one replaces
            k_factor = cute.math.rsqrt(rSums[0] + L2NORM_EPS)
            q_factor = params.scale * cute.math.rsqrt(rSums[1] + L2NORM_EPS)
            ptx.store_where(gates, [alpha, k_factor * beta, alpha * k_factor, alpha * q_factor], 1 - lane)
            ptx.store_where(gates + 16, [q_factor * rSums[2]], 1 - lane)


@cute.jit
def run_token(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, token: Int32, rState: cute.Tensor
):
    """Compute token `step` of the sequence, whose inputs begin at address `token`: its outputs to shared memory, and the state
    after it."""
    tile, place = spec.tile, block.place
    columns, vector, lanes = cutlass.const_expr(tile.v_per_thread), cutlass.const_expr(tile.vector), tile.threads_per_column
    rSums = cute.make_rmem_tensor(2 * columns, Float32)  # S^T k, then S^T q
    rK = cute.make_rmem_tensor(tile.k_per_thread, Float32)
    rU = cute.make_rmem_tensor(columns, Float32)
    rSums.fill(0.0)
    for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
        at = token + ((i // vector * lanes + place.lane) * vector + i % vector) * 4
        q_values, k_values = ptx.load_four(at), ptx.load_four(at + 4 * tile.head_k_dim)
        for e in cutlass.range_constexpr(4):
            rK[i + e] = k_values[e]
            for r in cutlass.range_constexpr(columns):
                rSums[r] += rState[tile.at(r, i + e)] * k_values[e]
                rSums[columns + r] += rState[tile.at(r, i + e)] * q_values[e]
    halved(rSums, 2 * columns, 1, place.lane)
    own = rSums[0]
    for bit in cutlass.range_constexpr((2 * columns - 1).bit_length(), (lanes - 1).bit_length()):
        own += cute.arch.shuffle_sync_bfly(own, offset=1 << bit)

    alpha, of_v, of_k, of_q = ptx.load_four(token + 4 * spec.gates_at)
    of_u = ptx.load_one(token + 4 * spec.gates_at + 16)
    column = place.v_start - column_in_head(spec, block.rank) + place.lane % columns
    v_at = token + (2 * tile.head_k_dim + column) * 4
    u = of_v * (ptx.load_one(v_at) - of_k * own)  # in the first lanes of a group
    for r in cutlass.range_constexpr(columns):
        rU[r] = cute.arch.shuffle_sync(u, block.thread % _WARP - place.lane + r)
    output = of_q * own + of_u * own_column(tile, place.lane % columns, rU)
    has_output = (place.lane >= columns) & (place.lane < 2 * columns)
    ptx.store_where(v_at, [output], cutlass.select_(has_output, Int32(1), Int32(0)))
    for r in cutlass.range_constexpr(columns):
        for i in cutlass.range_constexpr(tile.k_per_thread):
            rState[tile.at(r, i)] = alpha * rState[tile.at(r, i)] + rU[r] * rK[i]
    store_after(spec, params, block, sequence, step, rState)


@cute.jit
def store_after(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, rState: cute.Tensor):
    """Store the state after a token if it has a slot: one of its own, or, after the last token, the sequence's."""
    tile, place = spec.tile, block.place
    if cutlass.const_expr(spec.problem.intermediate_dtype is not None):
        store_intermediate(spec, params, block, step, rState)
    else:
        slot = Int64(sequence.read_slot)
        is_stored = step + 1 == sequence.count
        if cutlass.const_expr(spec.problem.has_columns):
            is_stored = step < params.state_indices.shape[1]
            if is_stored:
                slot = Int64(slot_of(step, block.sequence, sequence.lane_slot, params.state_indices))
        if is_stored & (slot > params.null_slot):
            if cutlass.const_expr(spec.problem.has_rounding):
                # The noise takes the number of every element: made before the first token, those of a thread would take as many
                # registers as its state.
                place = Place(place.head, ptx.opaque(place.lane), place.v_start)
            store_state(tile, slot, place, tile.width, params.ssm_state, rState, sequence.seed)


@cute.jit
def store_windows(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, first: Int32, count: Int32, rLine: cute.Tensor
):
    """Store the window's columns of the batch, or the window after the sequence's last token."""
    if cutlass.const_expr(spec.problem.has_columns):
        store_columns(spec, params, block, sequence, first, count, rLine)
    elif cutlass.const_expr(spec.problem.intermediate_dtype is None):
        for last in cutlass.range_constexpr(spec.batch):
            if first + (last + 1) == sequence.count:
                for p in cutlass.range_constexpr(spec.passes):
                    for c in cutlass.range_constexpr(spec.history):
                        store_column(spec, params, block, Int64(sequence.window_slot), Int32(c), (p, last + 1 + c), rLine)


@cute.jit
def send_squares(spec: Spec, block: Block, rOut: cute.Tensor, parity: Int32, shared: Shared):
    """Send the warp's sums of squared outputs, of every token, to all blocks of the head."""
    number_of_lane, columns = block.thread % _WARP % spec.warp_columns, cutlass.const_expr(spec.warp_columns)
    for number in cutlass.range_constexpr(spec.lane_outputs):
        token, _ = output_place(spec, block.thread, number)
        value = rOut[number] * rOut[number]
        for bit in cutlass.range_constexpr((columns - 1).bit_length()):
            value += cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
        own = (token * spec.padded_parts + block.rank % spec.splits * spec.warps + block.thread // _WARP) * 4
        own += parity * spec.parity_bytes
        targets = cutlass.select_(token < spec.batch, Int32(spec.splits), Int32(0))
        if cutlass.const_expr(spec.splits > 1):
            target = block.rank // spec.splits * spec.splits + cutlass.min(number_of_lane, spec.splits - 1)
            barrier = ptx.in_block((shared.sums_full + parity).toint(), target)
            ptx.send(ptx.in_block(shared.sums + own, target), value, barrier, targets - number_of_lane)
        else:
            ptx.store_where(shared.sums + own, [value], targets - number_of_lane)
