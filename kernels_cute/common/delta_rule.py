"""Steps of the delta rule on a thread's registers, for the kernels that keep a head's state there.

    u = beta * (v - a * S^T k);   o = a * S^T q + u * (k . q), which is S_new^T q without a second pass;   S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products and u,
never the registers of q and k.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from kernels_cute.common.state_tile import Place, StateTile

L2NORM_EPS = 1e-6


class HeadGate(NamedTuple):
    """A head's part of the decay, where g comes raw."""

    minus_decay: Any  # Float32: -exp(A_log)
    bias: Any  # Float32: dt_bias


class Work(NamedTuple):
    """float32 registers of the token that is computed."""

    k: Any  # [K entries], or words of two values
    v: Any  # [columns]
    sums: Any  # S k and S q of column r at 2 * r and 2 * r + 1; k q, k k, q q
    u: Any  # [columns]: beta * (v - decay * S k)


def make_work(tile: StateTile, num_sums: int, words: Any = None) -> Work:
    """words: registers of k, where they are not those of float32 values."""
    sizes = (tile.k_per_thread, tile.v_per_thread, num_sums, tile.v_per_thread)
    made = [cute.make_rmem_tensor(size, Float32) for size in sizes[words is not None :]]
    return Work(*([] if words is None else [words]), *made)


@cute.jit
def decay(raw: Float32, minus_decay: Float32):
    """exp(g) of raw = a + dt_bias."""
    return cute.math.exp(log_decay(raw, minus_decay))


@cute.jit
def log_decay(raw: Float32, minus_decay: Float32):
    """g of raw = a + dt_bias."""
    softplus = raw
    if raw <= 20.0:
        softplus = cute.math.log1p(cute.math.exp(raw))
    return minus_decay * softplus


@cute.jit
def add_products(
    tile: StateTile, rState: cute.Tensor, entry: Constexpr, k_value: Float32, q_value: Float32, has_norms: Constexpr,
    rSums: cute.Tensor,
):  # fmt: skip
    """Adds what a K entry of a thread is worth to its sums."""
    columns = cutlass.const_expr(tile.v_per_thread)
    rSums[2 * columns] += q_value * k_value
    if cutlass.const_expr(has_norms):
        rSums[2 * columns + 1] += k_value * k_value
        rSums[2 * columns + 2] += q_value * q_value
    for r in cutlass.range_constexpr(columns):
        s_value = rState[tile.at(r, entry)]
        rSums[2 * r] += s_value * k_value
        rSums[2 * r + 1] += s_value * q_value


def own_column(tile: StateTile, lane: Any, rX: Any) -> Any:
    """The value, of one per column, that the lane stores; anything for a lane that stores none."""
    value = rX[0]
    for r in range(1, tile.v_per_thread):
        value = cutlass.select_(lane == r, rX[r], value)
    return value


@cute.jit
def row_factors(tile: StateTile, rSums: cute.Tensor, scale: Float32, has_norms: Constexpr):
    """Factors of k and q."""
    if cutlass.const_expr(not has_norms):
        return Float32(1.0), scale
    k_factor = cute.math.rsqrt(rSums[2 * tile.v_per_thread + 1] + L2NORM_EPS)
    return k_factor, scale * cute.math.rsqrt(rSums[2 * tile.v_per_thread + 2] + L2NORM_EPS)


@cute.jit
def combine(tile: StateTile, factors: Any, lane: Int32, work: Work):
    """Set work.u to each column's update. Return the output of column `lane` and this thread's sum of squared outputs: of column
    `lane` alone if several warps share a column, else of all its columns. factors: decay, beta, those of k and q."""
    alpha, beta, k_factor, q_factor = factors
    rSums, rU, rV = work.sums, work.u, work.v
    columns = cutlass.const_expr(tile.v_per_thread)
    o_value = Float32(0.0)
    squares = Float32(0.0)
    for r in cutlass.range_constexpr(columns):
        rU[r] = k_factor * (beta * (rV[r] - alpha * (k_factor * rSums[2 * r])))
        if cutlass.const_expr(tile.k_warps == 1):
            o_row = q_factor * (alpha * rSums[2 * r + 1] + rU[r] * rSums[2 * columns])
            squares += o_row * o_row
            if lane == r:
                o_value = o_row
    if cutlass.const_expr(tile.k_warps > 1):
        o_value = q_factor * (alpha * rSums[1] + own_column(tile, lane, rU) * rSums[2 * columns])
        squares = cutlass.select_(lane < columns, o_value * o_value, Float32(0.0))
    return o_value, squares


@cute.jit
def update(tile: StateTile, alpha: Float32, work: Work, rState: cute.Tensor):
    """S = decay * S + k u^T."""
    for r in cutlass.range_constexpr(tile.v_per_thread):
        for i in cutlass.range_constexpr(tile.k_per_thread):
            rState[tile.at(r, i)] = alpha * rState[tile.at(r, i)] + work.u[r] * work.k[i]


@cute.jit
def store_out(tile: StateTile, gOut: cute.Tensor, token: Int32, place: Place, value: Float32):
    """Lane r of a group stores the group's r-th column."""
    live = place.lane < tile.v_per_thread
    if cutlass.const_expr(tile.masks_v):
        live = live & (place.v_start < tile.head_v_dim)
    if live:
        gOut[token, place.head, place.v_start + place.lane] = value.to(gOut.element_type)


@cute.jit
def store_zeros(tile: StateTile, gOut: cute.Tensor, first: Int32, end: Int32, step: Int32, place: Place):
    """Zeroes rows first, first + step, ... of out before `end`."""
    for token in cutlass.range(first, end, step, unroll=1):
        store_out(tile, gOut, token, place, Float32(0.0))
