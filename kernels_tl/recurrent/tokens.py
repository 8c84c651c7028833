"""Steps of the recurrent kernel over a token: load its inputs, multiply, take the output, update the state."""

from typing import Any

import tilelang.language as T

from kernels_tl.common import build
from kernels_tl.recurrent.spec import ALPHA, BETA, GATE, K_FACTOR, OUT, Q_FACTOR, Spec, first_entry, k_exists, register, v_exists

L2NORM_EPS = 1e-6


def allocate_registers(spec: Spec) -> Any:
    """A thread's registers."""
    p = spec.problem
    return build.named(
        state=T.alloc_local((spec.columns * spec.entries,), "float32"),
        q_next=T.alloc_local((spec.entries,), p.dtype),  # inputs of a token as they are loaded
        k_next=T.alloc_local((spec.entries,), p.dtype),
        v_next=T.alloc_local((spec.columns,), p.dtype),
        g_next=T.alloc_local((1,), p.gate_dtype or "float32"),
        beta_next=T.alloc_local((1,), p.beta_dtype or "float32"),
        q=T.alloc_local((spec.entries,), "float32"),  # of the token that is computed
        k=T.alloc_local((spec.entries,), "float32"),
        v=T.alloc_local((spec.columns,), "float32"),
        sums=T.alloc_local((spec.num_sums,), "float32"),  # S k and S q of column r at 2 * r and 2 * r + 1; k q, k k, q q
        u=T.alloc_local((spec.columns,), "float32"),  # beta * (v - decay * S k)
        scalars=T.alloc_local((6,), "float32"),
    )


def allocate_exchange(spec: Spec) -> Any:
    """Shared memory through which warps that share columns exchange sums; None where none do."""
    if spec.k_warps == 1:
        return None
    warps, width = spec.tiles.threads // 32, spec.sum_width
    return build.named(
        column_sums=T.alloc_shared((2, warps, 2 * spec.columns // width, spec.groups_per_warp, width), "float32"),
        token_sums=T.alloc_shared((2, warps, 4), "float32"),
    )


def row_unit(tensor, token, head, width):
    """Offset of a row of q, k or v in units of `width`."""
    return token * (tensor.strides[1] // width) + head * (tensor.strides[2] // width)


@T.macro
def load_token(spec, token, place, tensors, registers):
    """A token's inputs."""
    p, vector, lane = spec.problem, spec.vector, place.lane
    q_head, k_head, v_head = (place.head // (spec.heads // heads) for heads in (p.num_q_heads, p.num_k_heads, p.num_v_heads))
    for c in T.unroll(spec.chunks):
        if k_exists(spec, first_entry(spec, c, lane)):
            for e in T.vectorized(vector):
                unit = row_unit(tensors.q, token, q_head, vector) + c * spec.lanes + lane
                registers.q_next[c * vector + e] = tensors.q[0, 0, 0, unit * vector + e]
            for e in T.vectorized(vector):
                unit = row_unit(tensors.k, token, k_head, vector) + c * spec.lanes + lane
                registers.k_next[c * vector + e] = tensors.k[0, 0, 0, unit * vector + e]
    if v_exists(spec, place.v_start):
        for e in T.vectorized(spec.columns):
            unit = row_unit(tensors.v, token, v_head, spec.columns)
            registers.v_next[e] = tensors.v[0, 0, 0, (unit + place.v_start // spec.columns) * spec.columns + e]
    if spec.has_gate:
        registers.g_next[0] = tensors.g[0, token, place.head]
    if p.beta_dtype is not None:
        registers.beta_next[0] = tensors.beta[0, token, place.head]


@T.macro
def multiply(spec, minus_decay: T.Ref, bias: T.Ref, registers):
    """The thread's parts of a token's dot products in sums; its decay and beta."""
    q, k, sums, state, scalars = registers.q, registers.k, registers.sums, registers.state, registers.scalars
    qk_sum, kk_sum, qq_sum = 2 * spec.columns, 2 * spec.columns + 1, 2 * spec.columns + 2
    for i in T.unroll(spec.entries):
        q[i] = T.cast(registers.q_next[i], "float32")
        k[i] = T.cast(registers.k_next[i], "float32")
    for r in T.unroll(spec.columns):
        registers.v[r] = T.cast(registers.v_next[r], "float32")
    scalars[ALPHA] = 1.0
    if spec.has_gate:
        scalars[GATE] = T.cast(registers.g_next[0], "float32")
        if spec.use_gate:
            scalars[GATE] = scalars[GATE] + bias
            scalars[GATE] = minus_decay * T.if_then_else(scalars[GATE] <= 20.0, T.log1p(T.exp(scalars[GATE])), scalars[GATE])
        scalars[ALPHA] = T.exp(scalars[GATE])
    scalars[BETA] = 1.0
    if spec.problem.beta_dtype is not None:
        scalars[BETA] = T.cast(registers.beta_next[0], "float32")
        if spec.problem.use_beta_sigmoid:
            scalars[BETA] = 1.0 / (1.0 + T.exp(-scalars[BETA]))

    for i in T.unroll(spec.num_sums):
        sums[i] = 0.0
    for i in T.unroll(spec.entries):
        sums[qk_sum] = sums[qk_sum] + q[i] * k[i]
        if spec.problem.use_qk_l2norm:
            sums[kk_sum] = sums[kk_sum] + k[i] * k[i]
            sums[qq_sum] = sums[qq_sum] + q[i] * q[i]
        for r in T.unroll(spec.columns):
            sums[2 * r] = sums[2 * r] + state[register(spec, r, i)] * k[i]
            sums[2 * r + 1] = sums[2 * r + 1] + state[register(spec, r, i)] * q[i]


@T.macro
def add_up(spec, buffer, thread, sums, exchange):
    """The sums over all lanes of the columns. Buffers alternate from token to token: a warp writes one again after the barrier of
    the token in between, at which every warp arrives when it has read (kernels_cute/common/state_sums.py)."""
    first, width = 2 * spec.columns, spec.sum_width
    for step in T.unroll(spec.warp_lanes.bit_length() - 1):
        for i in T.unroll(spec.num_sums):
            sums[i] = sums[i] + T.shfl_xor(sums[i], spec.lane_step << step)
    if spec.k_warps > 1:
        if spec.has_one_buffer:  # the other warps may still read it
            T.sync_threads()
        if thread % 32 < spec.groups_per_warp:
            for c in T.unroll(first // width):
                for e in T.vectorized(width):
                    exchange.column_sums[buffer, thread // 32, c, thread % 32, e] = sums[c * width + e]
        if thread % 32 == 0:
            for i in T.unroll(spec.num_sums - first):
                exchange.token_sums[buffer, thread // 32, i] = sums[first + i]
        T.sync_threads()
        for i in T.unroll(spec.num_sums):
            sums[i] = 0.0
        for w in T.unroll(spec.k_warps):
            for c in T.unroll(first // width):
                for e in T.vectorized(width):
                    other = thread // 32 // spec.k_warps * spec.k_warps + w
                    group = thread % spec.groups_per_warp
                    sums[c * width + e] = sums[c * width + e] + exchange.column_sums[buffer, other, c, group, e]
            for i in T.unroll(spec.num_sums - first):
                other = thread // 32 // spec.k_warps * spec.k_warps + w
                sums[first + i] = sums[first + i] + exchange.token_sums[buffer, other, i]


@T.macro
def finish_token(spec, begin: T.Ref, t, is_wanted, place, scale, registers, out):
    """The token's output, stored where it is wanted, and the state after it."""
    sums, u, scalars, state = registers.sums, registers.u, registers.scalars, registers.state
    qk_sum, kk_sum, qq_sum = 2 * spec.columns, 2 * spec.columns + 1, 2 * spec.columns + 2
    scalars[Q_FACTOR] = scale
    scalars[K_FACTOR] = 1.0
    if spec.problem.use_qk_l2norm:
        scalars[Q_FACTOR] = scale * T.rsqrt(sums[qq_sum] + L2NORM_EPS)
        scalars[K_FACTOR] = T.rsqrt(sums[kk_sum] + L2NORM_EPS)

    scalars[OUT] = 0.0
    for r in T.unroll(spec.columns):
        u[r] = scalars[K_FACTOR] * (scalars[BETA] * (registers.v[r] - scalars[ALPHA] * (scalars[K_FACTOR] * sums[2 * r])))
        if spec.selects_values:
            o_row = scalars[Q_FACTOR] * (scalars[ALPHA] * sums[2 * r + 1] + u[r] * sums[qk_sum])
            if place.lane == r:
                scalars[OUT] = o_row
        elif place.lane == r:
            scalars[OUT] = scalars[Q_FACTOR] * (scalars[ALPHA] * sums[2 * r + 1] + u[r] * sums[qk_sum])
    if place.lane < spec.columns and v_exists(spec, place.v_start) and is_wanted:
        out[0, begin + t, place.head, place.v_start + place.lane] = T.cast(scalars[OUT], spec.problem.dtype)

    for r in T.unroll(spec.columns):
        for i in T.unroll(spec.entries):
            at = register(spec, r, i)
            state[at] = scalars[ALPHA] * state[at] + u[r] * registers.k[i]
