"""Replay decode of several tokens of a sequence at once (`ring.py` has one at a time, and the formulas).

All products with the state and with the entries are taken for `batch` tokens together; what remains in order of the tokens is a
triangular system of a few values a column:

    y_i = D_i S0^T k_i + sum_e w_ei (k_e . k_i) u_e                          all tokens at once; e: entries before the batch
    u_i = beta_i (v_i - y_i - sum_(j < i) d_ij (k_j . k_i) u_j)              in order, in the lanes that have the column
    o_i = the same sums with q_i, + sum_(j <= i) d_ij (k_j . q_i) u_j

Weights: for every entry e before the batch, and for the batch's own tokens as entries n, n + 1, ..., a row of 2 * batch floats in
shared memory, (of k_i, of q_i) for every token i: exp(log decay after e, up to i) times the dot product. A team of 8 lanes takes
an entry; its lanes add up in a butterfly that halves what each holds, so that lane l ends with value l of the row.

V first, with 2 * v_per_thread of the lanes of a column at least: of the sums over K, in the same kind of butterfly, lane l keeps
those of S^T k (l < v_per_thread) or S^T q of its group's column l % v_per_thread, for all tokens.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import L2NORM_EPS
from kernels_cute.common.ring import TEAM, Entries, Live, RingTile, load_columns, log_decays
from kernels_cute.common.staged_state import is_possible, load_access
from kernels_cute.common.state_tile import StateTile

_WARP = 32


def serves(tile: StateTile) -> bool:
    """Whether the sums of a group's columns fit its lanes."""
    return is_possible(tile) and tile.threads_per_column >= 2 * tile.v_per_thread


def halved(rX: Any, count: int, size: int, lane: Any) -> None:
    """Sums over lanes of `count` items of `size` values: afterwards rX[:size] is item lane % count, summed over the lanes that
    differ in these bits. count: a power of two."""
    for bit in reversed(range((count - 1).bit_length())):
        half, is_upper = size << bit, lane & (1 << bit) != 0
        for i in range(half):
            low, high = rX[i], rX[i + half]
            sent = cutlass.select_(is_upper, low, high)
            rX[i] = cutlass.select_(is_upper, high, low) + cute.arch.shuffle_sync_bfly(sent, offset=1 << bit)


@cute.jit
def weigh(
    ring: RingTile,
    entries: Entries,
    live: Live,
    before: Int32,
    batch: Constexpr,
    tokens: Any,
    thread: Int32,
    rDecays: cute.Tensor,
):
    """Weights of all entries and of the batch's tokens into shared memory, q . q of the tokens next to them; rDecays = D_i.

    before: number of entries before the batch. tokens: address of q of the first token, k behind it; bytes from token to token;
    address of q . q, None where nobody asks for it.
    """
    rows, pitch, norms = tokens
    lane, part, warp = thread % _WARP, thread % TEAM, thread // _WARP
    rTails = cute.make_rmem_tensor(ring.chunks, Float32)
    teams, end = cutlass.const_expr(ring.tile.threads // TEAM), before + batch
    first = live.start + warp * (_WARP // TEAM) + lane // TEAM
    # Without a loop, an entry's products fill the time of the exchanges of log decays, and go on with those of the state.
    takes_one_turn = cutlass.const_expr(batch == 1 and ring.most_live + 1 <= teams)
    rX = cute.make_rmem_tensor(2 * batch, Float32)
    if cutlass.const_expr(takes_one_turn):
        add_products(ring, key_of(ring, entries, cutlass.min(first, end - 1), before, rows, pitch), (rows, pitch), part, rX)
    total = log_decays(ring, entries, (live.start, before, before), None, lane, rTails)
    rG = cute.make_rmem_tensor(batch, Float32)
    for i in cutlass.range_constexpr(batch):
        rG[i] = ptx.load_one(entries.decays + (before + i) * 4)
        total += rG[i]
        rDecays[i] = cute.math.exp(total)
    if cutlass.const_expr(takes_one_turn):
        store_weights(ring, entries, cutlass.min(first, end - 1), before, rX, part, rTails, rG)
    else:
        # All teams of a warp make as many turns, since their lanes exchange log decays.
        for turn in cutlass.range(first - lane // TEAM, end, teams, unroll=1):
            entry = cutlass.min(turn + lane // TEAM, end - 1)
            add_products(ring, key_of(ring, entries, entry, before, rows, pitch), (rows, pitch), part, rX)
            store_weights(ring, entries, entry, before, rX, part, rTails, rG)
    if cutlass.const_expr(norms is not None):
        if warp == 0:
            token = cutlass.min(lane // TEAM, batch - 1)
            square = Float32(0.0)
            for c in cutlass.range_constexpr(ring.passes_of_team):
                unit = c * TEAM + part
                if cutlass.const_expr(ring.key_units % TEAM == 0) or unit < ring.key_units:
                    four = ptx.load_four(rows + token * pitch + unit * 16)
                    for e in cutlass.range_constexpr(4):
                        square += four[e] * four[e]
            for bit in cutlass.range_constexpr(3):
                square += cute.arch.shuffle_sync_bfly(square, offset=1 << bit)
            if part == 0:
                ptx.store_one(norms + token * 4, square)


@cute.jit
def key_of(ring: RingTile, entries: Entries, entry: Int32, before: Int32, rows: Any, pitch: Any):
    """Address of an entry's key; those from `before` on are the batch's own tokens."""
    new = entry - before
    return cutlass.select_(new < 0, entries.keys + entry * (4 * ring.head_k_dim), rows + new * pitch + 4 * ring.head_k_dim)


@cute.jit
def add_products(ring: RingTile, key: Int32, tokens: Any, part: Int32, rX: cute.Tensor):
    """rX = the lane's parts of key . k_0, key . q_0, key . k_1, ...; tokens: address of q of the first, bytes from one to the
    next."""
    rows, pitch = tokens
    rX.fill(0.0)
    for c in cutlass.range_constexpr(ring.passes_of_team):
        unit = c * TEAM + part
        if cutlass.const_expr(ring.key_units % TEAM == 0) or unit < ring.key_units:
            own = ptx.load_four(key + unit * 16)
            for i in cutlass.range_constexpr(cute.size(rX) // 2):
                at = rows + i * pitch + unit * 16
                q_values, k_values = ptx.load_four(at), ptx.load_four(at + 4 * ring.head_k_dim)
                for e in cutlass.range_constexpr(4):
                    rX[2 * i] += own[e] * k_values[e]
                    rX[2 * i + 1] += own[e] * q_values[e]


@cute.jit
def total_of_team(rX: cute.Tensor, part: Int32):
    """The sum over the team of rX's value `part % size`."""
    count = cutlass.const_expr(cute.size(rX))
    halved(rX, count, 1, part)
    value = rX[0]
    for bit in cutlass.range_constexpr((count - 1).bit_length(), 3):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
    return value


@cute.jit
def product(ring: RingTile, key: Int32, tokens: Any, batch: Constexpr, part: Int32):
    """Of key . k_0, key . q_0, key . k_1, ... the one of number `part % (2 * batch)`."""
    rX = cute.make_rmem_tensor(2 * batch, Float32)
    add_products(ring, key, tokens, part, rX)
    return total_of_team(rX, part)


@cute.jit
def store_weights(
    ring: RingTile,
    entries: Entries,
    entry: Int32,
    before: Int32,
    rX: cute.Tensor,
    part: Int32,
    rTails: cute.Tensor,
    rG: cute.Tensor,
):
    """The weights of the team's entry, from its lanes' parts of the products; a lane stores one, as far as there are any."""
    count, new = cutlass.const_expr(cute.size(rX)), entry - before
    value = total_of_team(rX, part)
    exponent = cutlass.select_(new < 0, tail_of(ring, entry, rTails), Float32(0.0))
    index = part % count
    for m in cutlass.range_constexpr(count // 2):
        exponent += cutlass.select_((new < m) & (m <= index // 2), rG[m], Float32(0.0))
    ptx.store_where(entries.weights + (entry * count + index) * 4, [cute.math.exp(exponent) * value], Int32(count) - part)


@cute.jit
def tail_of(ring: RingTile, entry: Int32, rTails: cute.Tensor):
    """What `log_decays` has found for an entry, which may be another one in every lane."""
    tail = cute.arch.shuffle_sync(rTails[0], entry % _WARP)
    for c in cutlass.range_constexpr(1, ring.chunks):
        other = cute.arch.shuffle_sync(rTails[c], entry % _WARP)
        tail = cutlass.select_(entry >= c * _WARP, other, tail)
    return tail


@cute.jit
def multiply(
    ring: RingTile, entries: Entries, live: Live, before: Int32, batch: Constexpr, tokens: Any, at: Any, state: Any,
    rDecays: cute.Tensor, rY: cute.Tensor,
):  # fmt: skip
    """rY [batch] = S^T k_i, or S^T q_i, before the batch's own tokens, of the lane's column.

    at: the thread's lane and group. state: dtype and address of the state (`staged_state`), and the thread.
    """
    tile, (rows, pitch), (lane, group) = ring.tile, tokens, at
    columns, vector = cutlass.const_expr(tile.v_per_thread), cutlass.const_expr(tile.vector)
    rSums = cute.make_rmem_tensor(2 * columns * batch, Float32)  # of k, of q; column by column
    rSums.fill(0.0)
    for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
        place = ((i // vector * tile.threads_per_column + lane) * vector + i % vector) * 4
        if cutlass.const_expr(i % vector == 0):
            s_values = [load_access(tile, *state, r * tile.chunks + i // vector) for r in range(columns)]
        for t in cutlass.range_constexpr(batch):
            q_values = ptx.load_four(rows + t * pitch + place)
            k_values = ptx.load_four(rows + t * pitch + 4 * ring.head_k_dim + place)
            for e in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(columns):
                    s_value = s_values[r][i % vector + e]
                    rSums[r * batch + t] += s_value * k_values[e]
                    rSums[(columns + r) * batch + t] += s_value * q_values[e]
    for t in cutlass.range_constexpr(batch):
        for r in cutlass.range_constexpr(2 * columns):
            rSums[r * batch + t] *= rDecays[t]
    lanes = cutlass.const_expr(tile.threads_per_column)
    updates = entries.updates + group * (4 * columns)
    for entry in cutlass.range(live.start + ((lane - live.start) & (lanes - 1)), before, lanes, unroll=1):
        add_entry(ring, entries.weights + entry * (8 * batch), updates + entry * (4 * ring.block_v), batch, rSums)
    halved(rSums, 2 * columns, batch, lane)
    for t in cutlass.range_constexpr(batch):
        value = rSums[t]
        for bit in cutlass.range_constexpr((2 * columns - 1).bit_length(), (lanes - 1).bit_length()):
            value += cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
        rY[t] = value


@cute.jit
def add_entry(ring: RingTile, weights: Int32, updates: Int32, batch: Constexpr, rSums: cute.Tensor):
    """An entry's part of all sums."""
    columns = cutlass.const_expr(ring.tile.v_per_thread)
    u_values, row = load_columns(updates, columns), load_columns(weights, 2 * batch)
    for t in cutlass.range_constexpr(batch):
        for r in cutlass.range_constexpr(columns):
            rSums[r * batch + t] += row[2 * t] * u_values[r]
            rSums[(columns + r) * batch + t] += row[2 * t + 1] * u_values[r]


def solve(ring: RingTile, entries: Entries, before: Any, norms: Any, scale: Any, lane: Any, registers: Any) -> None:
    """rU = corrections of the lane's column, rY = outputs in the lanes from v_per_thread on, rK = factors of the keys.

    norms: address of q . q of every token, or None without norms. registers: rY (of `multiply`), rV, rBeta, rU, rK.
    """
    rY, rV, rBeta, rU, rK = registers
    columns, batch = ring.tile.v_per_thread, cute.size(rY)
    is_of_k = lane & columns == 0
    others = [cute.arch.shuffle_sync_bfly(rY[i], offset=columns) for i in range(batch)]
    values = [cutlass.select_(is_of_k, rY[i], others[i]) for i in range(batch)]
    for j in range(batch):  # a row of weights at a time: all of them would take registers next to the state
        row = load_columns(entries.weights + (before + j) * (8 * batch), 2 * batch)
        k_factor, q_factor = Float32(1.0), scale
        if norms is not None:
            k_factor = cute.math.rsqrt(row[2 * j] + L2NORM_EPS)
            q_factor = scale * cute.math.rsqrt(ptx.load_one(norms + 4 * j) + L2NORM_EPS)
        rK[j] = k_factor
        rU[j] = rBeta[j] * (rV[j] - k_factor * values[j])
        weighted = k_factor * rU[j]  # as it stands in every sum
        rY[j] = q_factor * (rY[j] + row[2 * j + 1] * weighted)
        for i in range(j + 1, batch):
            values[i] += row[2 * i] * weighted
            rY[i] += row[2 * i + 1] * weighted
