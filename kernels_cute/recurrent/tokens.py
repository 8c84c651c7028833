"""Steps of the recurrent kernel over a token: load its inputs, multiply, take the output, update the state."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.problems import RecurrentParams
from kernels_cute.common.memory import load, pointer
from kernels_cute.common.state_sums import Exchange, add_up, own_column, storage_type
from kernels_cute.common.state_tile import Place, store_state
from kernels_cute.recurrent.spec import Spec

L2NORM_EPS = 1e-6


class Inputs(NamedTuple):
    """Registers of a token's inputs as they are loaded: q and k [K entries], v [columns], g and beta [1]."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class Work(NamedTuple):
    """float32 registers of the token that is computed."""

    k: Any  # [K entries]; without a prefetch words of two values
    v: Any  # [columns]
    sums: Any  # S k and S q of column r at 2 * r and 2 * r + 1; k q, k k, q q
    u: Any  # [columns]: beta * (v - decay * S k)


class Registers(NamedTuple):
    """A thread's registers."""

    state: Any  # [values] float32
    inputs: Inputs
    work: Work


class RawGate(NamedTuple):
    """A head's part of the decay, with use_gate."""

    minus_decay: Any  # Float32: -exp(A_log)
    bias: Any  # Float32: dt_bias


class Block(NamedTuple):
    """What a thread works on."""

    sequence: Any  # Int32
    thread: Any  # Int32
    place: Place


def block_of(spec: Spec) -> Block:
    """The sequence, head and columns of a thread."""
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    sequence = block // (spec.heads * spec.v_blocks)
    head = block // spec.v_blocks % spec.heads
    lane, group = spec.tile.lane_and_group(thread)
    v_start = (block % spec.v_blocks * spec.tile.groups + group) * spec.tile.v_per_thread
    return Block(sequence, thread, Place(head, lane, v_start))


def shared_parts(spec: Spec) -> Any:
    """Address of the sums that warps exchange."""
    if spec.shared_floats == 0:
        return Int32(0)
    return cutlass.utils.SmemAllocator().allocate(storage_type(spec.shared_floats)).parts.data_ptr().toint()


@cute.jit
def load_token(spec: Spec, params: RecurrentParams, token: Int32, place: Place, inputs: Inputs):
    tile, lane = spec.tile, place.lane
    gQ, gK, gV = params.q, params.k, params.v
    row = Int64(token)
    q_offset = row * gQ.stride[0] + Int64(place.head // spec.q_group) * gQ.stride[1] + lane * tile.vector
    k_offset = row * gK.stride[0] + Int64(place.head // spec.k_group) * gK.stride[1] + lane * tile.vector
    q_source = pointer(gQ, q_offset, tile.vector * spec.dtype.width // 8)
    k_source = pointer(gK, k_offset, tile.vector * spec.dtype.width // 8)
    rQ, rK, rV, rG, rBeta = inputs
    for c in cutlass.range_constexpr(tile.chunks):
        step = cutlass.const_expr(c * tile.threads_per_column * tile.vector)
        if cutlass.const_expr(tile.masks_k):
            if step + lane * tile.vector < tile.head_k_dim:
                load(q_source + step, tile.vector, rQ, c * tile.vector, False)
                load(k_source + step, tile.vector, rK, c * tile.vector, False)
        else:
            load(q_source + step, tile.vector, rQ, c * tile.vector, False)
            load(k_source + step, tile.vector, rK, c * tile.vector, False)
    v_offset = row * gV.stride[0] + Int64(place.head // spec.v_group) * gV.stride[1] + place.v_start
    v_source = pointer(gV, v_offset, tile.v_per_thread * spec.dtype.width // 8)
    if cutlass.const_expr(tile.masks_v):
        if place.v_start < tile.head_v_dim:
            load(v_source, tile.v_per_thread, rV, 0, False)
    else:
        load(v_source, tile.v_per_thread, rV, 0, False)
    if cutlass.const_expr(spec.has_gate):
        rG[0] = params.g[token, place.head]
    if cutlass.const_expr(spec.has_beta):
        rBeta[0] = params.beta[token, place.head]


@cute.jit
def multiply(spec: Spec, inputs: Inputs, gate: RawGate, rState: cute.Tensor, work: Work):
    """The thread's parts of a token's dot products in work.sums, v and k as float32 in work; returns decay and beta."""
    for r in cutlass.range_constexpr(spec.tile.v_per_thread):
        work.v[r] = inputs.v[r].to(Float32)
    alpha, beta = gates(spec, inputs, gate)
    products(spec, inputs, rState, work)
    return alpha, beta


@cute.jit
def gates(spec: Spec, inputs: Inputs, gate: RawGate):
    """Decay and beta of a token."""
    alpha = Float32(1.0)
    if cutlass.const_expr(spec.has_gate):
        alpha = decay(spec, inputs.g[0].to(Float32), gate)
    beta = Float32(1.0)
    if cutlass.const_expr(spec.has_beta):
        beta = inputs.beta[0].to(Float32)
        if cutlass.const_expr(spec.problem.use_beta_sigmoid):
            beta = 1.0 / (1.0 + cute.math.exp(-beta))
    return alpha, beta


@cute.jit
def decay(spec: Spec, g: Float32, gate: RawGate):
    """exp(g), from g or from raw a."""
    if cutlass.const_expr(spec.use_gate):
        raw = g + gate.bias
        softplus = raw
        if raw <= 20.0:
            softplus = cute.math.log1p(cute.math.exp(raw))
        g = gate.minus_decay * softplus
    return cute.math.exp(g)


@cute.jit
def products(spec: Spec, inputs: Inputs, rState: cute.Tensor, work: Work):
    """The thread's parts of a token's dot products in work.sums, k as float32 in work.k."""
    rSums, rK = work.sums, work.k
    columns = cutlass.const_expr(spec.tile.v_per_thread)
    rSums.fill(0.0)
    for i in cutlass.range_constexpr(spec.tile.k_per_thread):
        q_value = inputs.q[i].to(Float32)
        k_value = inputs.k[i].to(Float32)
        rK[i] = k_value
        rSums[2 * columns] += q_value * k_value
        if cutlass.const_expr(spec.problem.use_qk_l2norm):
            rSums[2 * columns + 1] += k_value * k_value
            rSums[2 * columns + 2] += q_value * q_value
        for r in cutlass.range_constexpr(columns):
            s_value = rState[spec.tile.at(r, i)]
            rSums[2 * r] += s_value * k_value
            rSums[2 * r + 1] += s_value * q_value


@cute.jit
def combine(spec: Spec, alpha: Float32, beta: Float32, scale: Float32, lane: Int32, work: Work, exchange: Exchange):
    """work.u = what the columns take up of k; returns the output of column `lane`."""
    rSums, rU, rV = work.sums, work.u, work.v
    columns = cutlass.const_expr(spec.tile.v_per_thread)
    add_up(spec.tile, rSums, spec.num_sums, exchange)

    q_factor = scale
    k_factor = Float32(1.0)
    if cutlass.const_expr(spec.problem.use_qk_l2norm):
        k_factor = cute.math.rsqrt(rSums[2 * columns + 1] + L2NORM_EPS)
        q_factor = scale * cute.math.rsqrt(rSums[2 * columns + 2] + L2NORM_EPS)

    o_value = Float32(0.0)
    if cutlass.const_expr(spec.tile.k_warps > 1):
        for r in cutlass.range_constexpr(columns):
            rU[r] = k_factor * (beta * (rV[r] - alpha * (k_factor * rSums[2 * r])))
        return q_factor * (alpha * rSums[1] + own_column(spec.tile, lane, rU) * rSums[2 * columns])
    for r in cutlass.range_constexpr(columns):
        rU[r] = k_factor * (beta * (rV[r] - alpha * (k_factor * rSums[2 * r])))
        o_row = q_factor * (alpha * rSums[2 * r + 1] + rU[r] * rSums[2 * columns])
        if lane == r:
            o_value = o_row
    return o_value


@cute.jit
def update(spec: Spec, alpha: Float32, work: Work, rState: cute.Tensor):
    """S = decay * S + k u^T."""
    for r in cutlass.range_constexpr(spec.tile.v_per_thread):
        for i in cutlass.range_constexpr(spec.tile.k_per_thread):
            rState[spec.tile.at(r, i)] = alpha * rState[spec.tile.at(r, i)] + work.u[r] * work.k[i]


@cute.jit
def slot_to_write(spec: Spec, params: RecurrentParams, sequence: Int32, node: Int32):
    """The slot for the state after token `node` of a sequence; null where it has no column."""
    write_slot = params.null_slot
    if cutlass.const_expr(spec.problem.has_final_indices):
        if node < params.final_state_indices.shape[1]:
            write_slot = Int64(params.final_state_indices[sequence, node])
    else:
        if node < params.state_indices.shape[1]:
            write_slot = Int64(params.state_indices[sequence, node])
    return write_slot


@cute.jit
def store_out(spec: Spec, params: RecurrentParams, token: Int32, place: Place, value: Float32):
    """Lane r of a group stores the group's r-th column."""
    gOut = params.out
    live = place.lane < spec.tile.v_per_thread
    if cutlass.const_expr(spec.tile.masks_v):
        live = live & (place.v_start < spec.tile.head_v_dim)
    if live:
        gOut[token, place.head, place.v_start + place.lane] = value.to(spec.dtype)


@cute.jit
def store_zeros(
    spec: Spec, params: RecurrentParams, block: Block, begin: Int32, live_count: Int32, count: Int32, written: Int32
):  # fmt: skip
    """Zero rows of out: those of a padding sequence (live_count 0 of its count), and the block's share of the rows from `written`
    on, which belong to no sequence and are dealt to all blocks of the head."""
    zero = Float32(0.0)
    num_sequences = params.cu_seqlens.shape[0] - 1
    for t in cutlass.range(live_count, count, unroll=1):
        store_out(spec, params, begin + t, block.place, zero)
    for t in cutlass.range(written + block.sequence, params.out.shape[0], num_sequences, unroll=1):
        store_out(spec, params, t, block.place, zero)


@cute.jit
def store_last(
    spec: Spec, params: RecurrentParams, block: Block, live_count: Int32, write_slot: Int64, rState: cute.Tensor, seed: Int32
):  # fmt: skip
    """The state after the last token, where it is stored once: into its slot, or into a new tensor."""
    if cutlass.const_expr(not (spec.writes_new or spec.writes_last_token)):
        # With nothing live after the loop, its branch back is compiled in a form from which ptxas peels an iteration:
        # twice the code, and spills.
        cute.arch.inline_ptx("// {$r0} is used", read_only_args=[rState[0]])
    if cutlass.const_expr(spec.writes_last_token):
        if live_count > 0:
            if write_slot > params.null_slot:
                store_state(spec.tile, write_slot, block.place, spec.tile.width, params.initial_state, rState, seed)
    if cutlass.const_expr(spec.writes_new):
        # Without a pool an empty sequence passes its state on.
        width = cutlass.const_expr(min(spec.tile.width, 4))
        store_state(spec.tile, Int64(block.sequence), block.place, width, params.final_state, rState, seed)
