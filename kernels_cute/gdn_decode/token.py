"""A token of the fused decode step: convolution, delta rule and norm."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.problems import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import own_column
from kernels_cute.common.indices import narrowed
from kernels_cute.common.memory import sigmoid
from kernels_cute.common.ptx import opaque
from kernels_cute.common.state_sums import Exchange, add_up
from kernels_cute.common.state_tile import Place, store_state
from kernels_cute.gdn_decode.convolution import convolve, load_gates, load_row, store_column
from kernels_cute.gdn_decode.ptx import send
from kernels_cute.gdn_decode.spec import CHANNELS, WORDS, Block, HeadGate, Registers, Sequence, Shared, Spec, column_in_head

L2NORM_EPS = 1e-6


class Work(NamedTuple):
    """float32 registers of the token that is computed."""

    k: Any  # [K entries]
    u: Any  # [columns]: beta * (v - decay * S k)
    sums: Any  # S k and S q of column r at 2 * r and 2 * r + 1; k q, k k, q q


@cute.jit
def run_token(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, gate: HeadGate, registers: Registers,
    shared: Shared,
):  # fmt: skip
    """Token `step` of the sequence: registers hold its inputs, afterwards those of the next one."""
    tile, place, rState = spec.tile, block.place, registers.state
    write_inputs(spec, block, gate, registers, shared)
    cute.arch.sync_threads()
    if cutlass.const_expr(spec.cluster > 1):
        # The windows of this block are read (its values have been used), and its barriers are set up.
        if step == 0:
            cute.arch.cluster_arrive_relaxed()
    alpha = ptx.load_one(shared.tokens + 4 * spec.gates_at)
    beta = ptx.load_one(shared.tokens + 4 * spec.gates_at + 4)
    work = Work(
        cute.make_rmem_tensor(tile.k_per_thread, Float32),
        cute.make_rmem_tensor(tile.v_per_thread, Float32),
        cute.make_rmem_tensor(2 * tile.v_per_thread + 3, Float32),
    )
    multiply(spec, shared.tokens, place.lane, rState, work)
    add_up(tile, work.sums, 2 * tile.v_per_thread + 3, Exchange(shared.warp_parts, step % 2))
    o_value, squares = combine(spec, block, (alpha, beta, params.scale), work, shared.tokens)

    if cutlass.const_expr(spec.cluster > 1):
        if step == 0:
            cute.arch.cluster_wait()
    parity = step % 2
    send_squares(spec, block, squares, parity, shared)

    # While the sums are under way: the window's new columns, the next token's inputs, and the state.
    move_windows(spec, params, block, sequence, step, registers.line)
    norm_gate = gate_of(spec, registers.z[0])
    if cutlass.const_expr(spec.has_several_tokens):
        if step + 1 < sequence.count:
            token = sequence.begin + step + 1
            load_row(spec, params, token, block, registers)
            load_gates(spec, params, token, block, registers.gates)
    for r in cutlass.range_constexpr(tile.v_per_thread):
        for i in cutlass.range_constexpr(tile.k_per_thread):
            rState[tile.at(r, i)] = alpha * rState[tile.at(r, i)] + work.u[r] * work.k[i]
    store_after_token(spec, params, block, sequence, step, registers)

    total = sum_of_squares(spec, block, step, parity, shared)
    inverse = cute.math.rsqrt(total * (1.0 / tile.head_v_dim) + params.eps)
    store_out(spec, params, sequence.begin + step, place, o_value * inverse * registers.norm_weight * norm_gate)


@cute.jit
def write_inputs(spec: Spec, block: Block, gate: HeadGate, registers: Registers, shared: Shared):
    """q, k and v after the convolution, and decay and beta, to shared memory."""
    rOut, rGates, threads = registers.out, registers.gates, spec.tiles.threads
    for p in cutlass.range_constexpr(spec.passes):
        item = p * threads + block.thread
        convolve(spec, p, registers)
        ptx.store_where(shared.tokens + item * (4 * CHANNELS), [rOut[c] for c in range(CHANNELS)], spec.items - item)
    if block.thread == threads - 1:
        ptx.store_one(shared.tokens + 4 * spec.gates_at, decay(rGates[0] + gate.dt_bias, gate.minus_decay))
        ptx.store_one(shared.tokens + 4 * spec.gates_at + 4, 1.0 / (1.0 + cute.math.exp(-rGates[1])))


@cute.jit
def decay(raw: Float32, minus_decay: Float32):
    """exp(g) of raw = a + dt_bias."""
    softplus = raw
    if raw <= 20.0:
        softplus = cute.math.log1p(cute.math.exp(raw))
    return cute.math.exp(minus_decay * softplus)


@cute.jit
def multiply(spec: Spec, tokens: Int32, lane: Int32, rState: cute.Tensor, work: Work):
    """The thread's parts of a token's dot products in work.sums, k in work.k."""
    tile, rSums, rK = spec.tile, work.sums, work.k
    columns, vector = cutlass.const_expr(tile.v_per_thread), cutlass.const_expr(tile.vector)
    rSums.fill(0.0)
    for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
        at = tokens + ((i // vector * tile.threads_per_column + lane) * vector + i % vector) * 4
        q_values = ptx.load_four(at)
        k_values = ptx.load_four(at + 4 * tile.head_k_dim)
        for e in cutlass.range_constexpr(4):
            q_value = q_values[e]
            k_value = k_values[e]
            rK[i + e] = k_value
            rSums[2 * columns] += q_value * k_value
            rSums[2 * columns + 1] += k_value * k_value
            rSums[2 * columns + 2] += q_value * q_value
            for r in cutlass.range_constexpr(columns):
                s_value = rState[tile.at(r, i + e)]
                rSums[2 * r] += s_value * k_value
                rSums[2 * r + 1] += s_value * q_value


@cute.jit
def combine(spec: Spec, block: Block, factors: Any, work: Work, tokens: Int32):
    """work.u = what the columns take up of k; returns the output of column `lane`, and the warp's sum of squares of outputs.

    factors: decay, beta, scale."""
    tile, place, rSums, rU = spec.tile, block.place, work.sums, work.u
    alpha, beta, scale = factors
    columns = cutlass.const_expr(tile.v_per_thread)
    k_factor = cute.math.rsqrt(rSums[2 * columns + 1] + L2NORM_EPS)
    q_factor = scale * cute.math.rsqrt(rSums[2 * columns + 2] + L2NORM_EPS)
    o_value = Float32(0.0)
    squares = Float32(0.0)
    for r in cutlass.range_constexpr(columns):
        at = tokens + (2 * tile.head_k_dim + r) * 4
        v_value = ptx.load_one(at + (place.v_start - column_in_head(spec, block.rank)) * 4)
        rU[r] = k_factor * (beta * (v_value - alpha * (k_factor * rSums[2 * r])))
        if cutlass.const_expr(tile.k_warps == 1):
            o_row = q_factor * (alpha * rSums[2 * r + 1] + rU[r] * rSums[2 * columns])
            squares += o_row * o_row
            if place.lane == r:
                o_value = o_row
    if cutlass.const_expr(tile.k_warps > 1):
        o_value = q_factor * (alpha * rSums[1] + own_column(tile, place.lane, rU) * rSums[2 * columns])
        squares = cutlass.select_(place.lane < columns, o_value * o_value, Float32(0.0))
        squares = cute.arch.warp_reduction_sum(squares)
    for bit in cutlass.range_constexpr(tile.groups_per_warp.bit_length() - 1 if tile.k_warps == 1 else 0):
        squares += cute.arch.shuffle_sync_bfly(squares, offset=tile.group_step << bit)
    return o_value, squares


@cute.jit
def send_squares(spec: Spec, block: Block, squares: Float32, parity: Int32, shared: Shared):
    """The warp's sum of squares to all blocks of the head."""
    thread, rank = block.thread, block.rank
    if cutlass.const_expr(spec.splits > 1):
        own = (rank % spec.splits * spec.warps + thread // 32) * 4 + parity * spec.parity_bytes
        target = rank // spec.splits * spec.splits + thread % spec.splits
        send(
            ptx.in_block(shared.sums + own, target),
            squares,
            ptx.in_block((shared.barriers + parity).toint(), target),
            Int32(spec.splits) - thread % 32,
        )
    else:
        if thread % 32 == 0:
            ptx.store_one(shared.sums + thread // 32 * 4, squares)


@cute.jit
def move_windows(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, rLine: cute.Tensor):
    """The line of every item moves on by a token; with columns, the window's new columns are stored before."""
    history, slot = spec.history, sequence.window_slot
    for p in cutlass.range_constexpr(spec.passes):
        if cutlass.const_expr(spec.problem.has_columns):
            if step == 0:
                for c in cutlass.range_constexpr(1, history):
                    store_column(spec, params, block, Int64(slot), Int32(c - 1), (p, c), rLine)
            if history - 1 + step < params.conv_state.shape[2]:
                store_column(spec, params, block, Int64(slot), Int32(history - 1) + step, (p, history), rLine)
        for i in cutlass.range_constexpr(history * WORDS):
            at = cutlass.const_expr(p * spec.problem.width * WORDS + i)
            rLine[at] = rLine[at + WORDS]


@cute.jit
def store_after_token(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, registers: Registers
):  # fmt: skip
    """The state after every token that has a column, or state and window after the last token."""
    tile, place, rState, rLine = spec.tile, block.place, registers.state, registers.line
    if cutlass.const_expr(spec.problem.has_columns):
        if step < params.state_indices.shape[1]:
            write_slot = Int64(slot_of(step, block.sequence, sequence.lane_slot, params.state_indices))
            if write_slot > params.null_slot:
                store_state(tile, write_slot, place, tile.width, params.ssm_state, rState, sequence.seed)
    else:
        if step + 1 == sequence.count:
            after = place_after_tokens(spec, place)
            store_state(tile, Int64(sequence.read_slot), after, tile.width, params.ssm_state, rState, sequence.seed)
            # The line has moved on by a token: its first rows are the newest inputs.
            for p in cutlass.range_constexpr(spec.passes):
                for c in cutlass.range_constexpr(spec.history):
                    store_column(spec, params, block, Int64(sequence.window_slot), Int32(c), (p, c), rLine)


def place_after_tokens(spec: Spec, place: Place) -> Place:
    """The place, for a state that is stored once. Its noise takes the number of every element: made before the first token,
    those of a thread would take as many registers as its state."""
    if spec.problem.has_rounding and spec.has_several_tokens:
        return Place(place.head, opaque(place.lane), place.v_start)
    return place


@cute.jit
def sum_of_squares(spec: Spec, block: Block, step: Int32, parity: Int32, shared: Shared):
    """The head's sum of squares of outputs, once all its warps have sent theirs."""
    sums, barriers = shared.sums, shared.barriers
    total = Float32(0.0)
    if cutlass.const_expr(spec.splits > 1):
        cute.arch.mbarrier_wait(barriers + parity, step // 2 % 2)
        if cutlass.const_expr(spec.has_several_tokens):
            if block.thread == 0:  # for the token after the next one
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + parity, 4 * spec.parts)
        sums = sums + parity * spec.parity_bytes
    else:
        cute.arch.sync_threads()
    for i in cutlass.range_constexpr(0, spec.parts - 3, 4):
        four = ptx.load_four(sums + 4 * i)
        total += (four[0] + four[1]) + (four[2] + four[3])
    for i in cutlass.range_constexpr(spec.parts // 4 * 4, spec.parts):
        total += ptx.load_one(sums + 4 * i)
    return total


def gate_of(spec: Spec, z: Any) -> Any:
    return sigmoid(z) if spec.problem.gate_sigmoid else z * sigmoid(z)


@cute.jit
def slot_of(column, sequence, lane_slot, gIndices):
    """gIndices[sequence, column], of which the lanes of a warp hold the first 32."""
    slot = cute.arch.shuffle_sync(lane_slot, cutlass.min(column, 31))
    if column >= 32:
        slot = narrowed(gIndices[sequence, column])
    return slot


@cute.jit
def store_out(spec: Spec, params: GdnDecodeParams, token: Int32, place: Place, value: Float32):
    """Lane r of a group stores the group's r-th column."""
    gOut = params.out
    if place.lane < spec.tile.v_per_thread:
        gOut[token, place.head, place.v_start + place.lane] = value.to(spec.dtype)
