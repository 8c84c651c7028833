"""A token of the fused decode step: convolution, delta rule and norm."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import Work, add_products, combine, make_work, row_factors, store_out, update
from kernels_cute.common.memory import narrowed, sigmoid
from kernels_cute.common.state_sums import Exchange, add_up
from kernels_cute.common.state_tile import Place, store_kept_state, store_state
from kernels_cute.gdn_decode.convolution import beta_of, convolve, load_gates, load_row, log_decay_of, store_column
from kernels_cute.gdn_decode.shape import CHANNELS, WORDS
from kernels_cute.gdn_decode.spec import Block, Registers, Sequence, Shared, Spec, column_in_head


@cute.jit
def run_token(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, registers: Registers, shared: Shared
):
    """Compute token `step` of the sequence. registers hold its inputs, and afterwards those of the next token."""
    tile, place, rState = spec.tile, block.place, registers.state
    write_inputs(spec, params, block, registers, shared)
    cute.arch.sync_threads()
    if cutlass.const_expr(spec.cluster > 1):
        # The windows of this block are read (its values have been used), and its barriers are set up.
        if step == 0:
            cute.arch.cluster_arrive_relaxed()
    alpha = ptx.load_one(shared.tokens + 4 * spec.gates_at)
    beta = ptx.load_one(shared.tokens + 4 * spec.gates_at + 4)
    work = make_work(tile, 2 * tile.v_per_thread + 3)
    multiply(spec, shared.tokens, place.lane, rState, work)
    add_up(tile, work.sums, 2 * tile.v_per_thread + 3, Exchange(shared.warp_parts, step % 2))
    value, squares = finish(spec, block, (alpha, beta, params.scale), work, shared.tokens)

    if cutlass.const_expr(spec.cluster > 1):
        if step == 0:
            cute.arch.cluster_wait()
    parity = step % 2
    if cutlass.const_expr(spec.has_norm):
        send_squares(spec, block, squares, parity, shared)

    # While the sums are under way: the window's new columns, the next token's inputs, and the state.
    move_windows(spec, params, block, sequence, step, registers.line)
    norm_gate = gate_of_norm(spec, registers)
    if cutlass.const_expr(spec.has_several_tokens):
        if step + 1 < sequence.count:
            token = sequence.begin + step + 1
            load_row(spec, params, token, block, registers)
            load_gates(spec, params, token, block, registers.gates)
    update(tile, alpha, work, rState)
    if cutlass.const_expr(spec.problem.intermediate_dtype is None):
        store_after_token(spec, params, block, sequence, step, registers)
    else:
        store_intermediate(spec, params, block, step, rState)

    if cutlass.const_expr(spec.has_norm):
        total = sum_of_squares(spec, block, step, parity, shared)
        inverse = cute.math.rsqrt(total * (1.0 / tile.head_v_dim) + params.eps)
        value = value * inverse * registers.norm_weight * norm_gate
    elif cutlass.const_expr(spec.has_several_tokens):
        cute.arch.sync_threads()  # all have read the token's inputs, which the next one's replace
    store_out(tile, params.out, sequence.begin + step, place, value)


def activated(spec: Any, z: Any) -> Any:
    """The norm's gate, of z."""
    return sigmoid(z) if spec.problem.gate_sigmoid else z * sigmoid(z)


@cute.jit
def gate_of_norm(spec: Spec, registers: Registers):
    """Factor of the thread's output after the norm."""
    norm_gate = Float32(1.0)
    if cutlass.const_expr(spec.has_norm):
        norm_gate = activated(spec, registers.z[0])
    return norm_gate


@cute.jit
def write_inputs(spec: Spec, params: GdnDecodeParams, block: Block, registers: Registers, shared: Shared):
    """Write q, k and v after the convolution, the decay and beta to shared memory."""
    write_convolved(spec, block, registers, shared)
    if block.thread == spec.tiles.threads - 1:
        at = shared.tokens + 4 * spec.gates_at
        ptx.store_one(at, cute.math.exp(log_decay_of(spec, params, block, registers.gates)))
        ptx.store_one(at + 4, beta_of(spec, params, block, registers.gates))


@cute.jit
def write_convolved(spec: Spec, block: Block, registers: Registers, shared: Shared):
    """q, k and v after the convolution to shared memory."""
    rOut = registers.out
    for p in cutlass.range_constexpr(spec.passes):
        item = p * spec.tiles.threads + block.thread
        convolve(spec, p, registers)
        ptx.store_where(shared.tokens + item * (4 * CHANNELS), [rOut[c] for c in range(CHANNELS)], spec.items - item)


@cute.jit
def multiply(spec: Spec, tokens: Int32, lane: Int32, rState: cute.Tensor, work: Work):
    """Compute the thread's parts of a token's dot products in work.sums, with k in work.k."""
    tile, vector = spec.tile, cutlass.const_expr(spec.tile.vector)
    work.sums.fill(0.0)
    for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
        at = tokens + ((i // vector * tile.threads_per_column + lane) * vector + i % vector) * 4
        q_values = ptx.load_four(at)
        k_values = ptx.load_four(at + 4 * tile.head_k_dim)
        for e in cutlass.range_constexpr(4):
            work.k[i + e] = k_values[e]
            add_products(tile, rState, i + e, k_values[e], q_values[e], True, work.sums)


@cute.jit
def finish(spec: Spec, block: Block, factors: Any, work: Work, tokens: Int32):
    """Set work.u to the update of each column. Return the output of column `lane`, and the warp's sum of squared outputs.

    factors: decay, beta, scale."""
    tile, place = spec.tile, block.place
    alpha, beta, scale = factors
    of_rows = row_factors(tile, work.sums, scale, True)
    for r in cutlass.range_constexpr(tile.v_per_thread):
        at = tokens + (2 * tile.head_k_dim + r) * 4
        work.v[r] = ptx.load_one(at + (place.v_start - column_in_head(spec, block.rank)) * 4)
    o_value, squares = combine(tile, (alpha, beta, *of_rows), place.lane, work)
    return o_value, squares_of_head(spec, squares)


@cute.jit
def squares_of_head(spec: Spec, squares: Float32):
    """Return the warp's sum of squared outputs, from those of its threads."""
    tile = spec.tile
    if cutlass.const_expr(spec.has_norm):
        if cutlass.const_expr(tile.k_warps > 1):
            squares = cute.arch.warp_reduction_sum(squares)
        for bit in cutlass.range_constexpr(tile.groups_per_warp.bit_length() - 1 if tile.k_warps == 1 else 0):
            squares += cute.arch.shuffle_sync_bfly(squares, offset=tile.group_step << bit)
    return squares


@cute.jit
def send_squares(spec: Spec, block: Block, squares: Float32, parity: Int32, shared: Shared):
    """Send the warp's sum of squares to all blocks of the head."""
    thread, rank = block.thread, block.rank
    if cutlass.const_expr(spec.splits > 1):
        own = (rank % spec.splits * spec.warps + thread // 32) * 4 + parity * spec.parity_bytes
        target = rank // spec.splits * spec.splits + thread % spec.splits
        place = ptx.in_block(shared.sums + own, target)
        barrier = ptx.in_block((shared.sums_full + parity).toint(), target)
        ptx.send(place, squares, barrier, Int32(spec.splits) - thread % 32)
    else:
        if thread % 32 == 0:
            ptx.store_one(shared.sums + thread // 32 * 4, squares)


@cute.jit
def move_windows(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, rLine: cute.Tensor):
    """Move the line of every item on by a token. With columns, the window's new columns are stored before."""
    if cutlass.const_expr(spec.problem.has_columns):
        store_columns(spec, params, block, sequence, step, rLine)
    move_line(spec, rLine)


@cute.jit
def store_columns(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, rLine: cute.Tensor):
    """Store the window's column of a token, and with the first token also the columns before."""
    history, slot = spec.history, sequence.window_slot
    for p in cutlass.range_constexpr(spec.passes):
        if step == 0:
            for c in cutlass.range_constexpr(1, history):
                store_column(spec, params, block, Int64(slot), Int32(c - 1), (p, c), rLine)
        if history - 1 + step < params.conv_state.shape[2]:
            store_column(spec, params, block, Int64(slot), Int32(history - 1) + step, (p, history), rLine)


@cute.jit
def move_line(spec: Spec, rLine: cute.Tensor):
    """The line of every item moves on by a token."""
    for p in cutlass.range_constexpr(spec.passes):
        for i in cutlass.range_constexpr(spec.history * WORDS):
            at = cutlass.const_expr(p * spec.line_rows * WORDS + i)
            rLine[at] = rLine[at + WORDS]


@cute.jit
def store_after_token(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, registers: Registers):
    """Store the state after every token that has a column, or the state and the window after the last token."""
    tile, place, rState, rLine = spec.tile, block.place, registers.state, registers.line
    if cutlass.const_expr(spec.problem.has_columns):
        if step < params.state_indices.shape[1]:
            write_slot = Int64(slot_of(step, block.sequence, sequence.lane_slot, params.state_indices))
            if write_slot > params.null_slot:
                store_state(tile, write_slot, place, tile.width, params.ssm_state, rState, sequence.seed)
    else:
        if step + 1 == sequence.count:
            if cutlass.const_expr(spec.problem.has_rounding and spec.has_several_tokens):
                # The noise takes the number of every element: made before the first token, those of a thread would take as many
                # registers as its state.
                place = Place(place.head, ptx.opaque(place.lane), place.v_start)
            store_state(tile, Int64(sequence.read_slot), place, tile.width, params.ssm_state, rState, sequence.seed)
            # The line has moved on by a token: its first rows are the newest inputs.
            for p in cutlass.range_constexpr(spec.passes):
                for c in cutlass.range_constexpr(spec.history):
                    store_column(spec, params, block, Int64(sequence.window_slot), Int32(c), (p, c), rLine)


@cute.jit
def store_intermediate(spec: Spec, params: GdnDecodeParams, block: Block, step: Int32, rState: cute.Tensor):
    """Store the state after a token into the sequence's row of intermediate_states, unless the row is null. The pools stay as
    they are."""
    if step < params.intermediate_states.shape[1]:
        row = Int64(params.intermediate_indices[block.sequence])
        if row > params.null_slot:
            store_kept_state(spec.tile, row, step, block.place, params.intermediate_states, rState)


@cute.jit
def total_of_parts(spec: Spec, sums: Int32):
    """Return the sum of the parts of all warps of the head, from shared memory."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(0, spec.parts - 3, 4):
        four = ptx.load_four(sums + 4 * i)
        total += (four[0] + four[1]) + (four[2] + four[3])
    for i in cutlass.range_constexpr(spec.parts // 4 * 4, spec.parts):
        total += ptx.load_one(sums + 4 * i)
    return total


@cute.jit
def sum_of_squares(spec: Spec, block: Block, step: Int32, parity: Int32, shared: Shared):
    """Return the head's sum of squares of outputs, once all its warps have sent theirs."""
    sums, sums_full = shared.sums, shared.sums_full
    if cutlass.const_expr(spec.splits > 1):
        cute.arch.mbarrier_wait(sums_full + parity, step // 2 % 2)
        if cutlass.const_expr(spec.has_several_tokens):
            if block.thread == 0:  # for the token after the next one
                cute.arch.mbarrier_arrive_and_expect_tx(sums_full + parity, 4 * spec.parts)
        sums = sums + parity * spec.parity_bytes
    else:
        cute.arch.sync_threads()
    return total_of_parts(spec, sums)


@cute.jit
def slot_of(column, sequence, lane_slot, gIndices):
    """Return gIndices[sequence, column]. The lanes of a warp hold the first 32 columns."""
    slot = cute.arch.shuffle_sync(lane_slot, cutlass.min(column, 31))
    if column >= 32:
        slot = narrowed(gIndices[sequence, column])
    return slot
