"""Replay decode in a block: the live entries of a sequence, and what a token and the state get from them.

    w_e = exp(sum of g after entry e, up to the token)                       D = exp(sum of g of all entries and the token)
    S^T k = D S0^T k + sum_e w_e (k_e . k) u_e                               S^T q alike
    fold:  S0 = exp(sum of g) S0 + sum_e exp(sum of g after e) k_e u_e^T     over the entries that the state takes in

A block has the columns of V of one state head, its state S0 in registers (`state_tile`), and in shared memory the entries
`k_e [K]`, `u_e [columns of the block]`, `g_e`, oldest first: those that may be live, which positions alone tell before the slot
is read, and behind them those of the call's own tokens. `gdn.ops.delta_rule.problem` has the rule of positions.

Which entry a warp or a lane has:

    dot products k_e . k and k_e . q     entry e: warp e mod warps, a lane 4 entries of K; the weighted pair goes to shared memory
    sums over u_e                        entry e: lane e mod threads_per_column of each group of columns, before its shuffles
    fold                                 all entries in each thread: its own K entries and columns
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import Work, own_column
from kernels_cute.common.state_sums import load_some
from kernels_cute.common.state_tile import Place, StateTile

_WARP, TEAM = 32, 8
_MOST_ENTRY_TURNS = 16  # of a loop over entries that is unrolled
_COPIES = {1: ptx.copy_one, 2: ptx.copy_pair, 4: ptx.copy_four}


class RingTile:
    """Sizes of a block's entries, known when the kernel is compiled."""

    def __init__(self, rows: int, fold_every: int, has_accepted: bool, num_k_heads: int, num_heads: int, tile: StateTile) -> None:
        self.rows, self.fold_every, self.tile = rows, fold_every, tile
        self.most_tokens = (rows + 1 - fold_every) // 2 if has_accepted else 1
        self.most_live = fold_every - 1 + self.most_tokens  # entries before a call
        self.head_k_dim, self.head_v_dim = tile.head_k_dim, tile.head_v_dim
        self.updates_at = num_k_heads * tile.head_k_dim  # elements of a row before u, and before g
        self.decays_at = self.updates_at + num_heads * tile.head_v_dim
        self.block_v = tile.groups * tile.v_per_thread
        self.key_units = tile.head_k_dim // 4  # copies of a key, of 16 bytes
        self.update_width = min(4, self.block_v & -self.block_v)  # elements of a copy of u
        self.update_units = self.block_v // self.update_width
        self.warps = tile.threads // _WARP
        self.chunks = -(-rows // _WARP)  # entries of a lane, 32 apart
        self.key_passes = -(-self.key_units // _WARP)  # copies of a key in a lane
        self.passes_of_team = -(-self.key_units // TEAM)  # the same in a lane of a team

    def floats(self, batch: int = 1) -> int:
        """Of shared memory: keys, updates, weights (a pair for each token that is computed at once) and a decay an entry, and the
        slot's count."""
        rows = self.rows + batch - 1  # places of a batch's tokens that are beyond the last
        return self.rows * (self.head_k_dim + self.block_v) + 4 * (-(-((2 * batch + 1) * rows + 1) // 4))


class Entries(NamedTuple):
    """Addresses in shared memory; entries lie next to each other, oldest first."""

    keys: Any  # [K] each
    updates: Any  # [columns of the block] each
    weights: Any  # pairs: those of u in S^T k and in S^T q
    decays: Any  # one each
    written: Any  # a word: state_tokens of the slot


class Live(NamedTuple):
    """A sequence's entries before the call, counted from the first that may be live."""

    base: Any  # Int32: row of the ring of the first
    count: Any  # Int32: number of them; those of the call's tokens follow
    start: Any  # Int32: the first that is live
    target: Any  # Int32: the state takes in those from start on and before target
    is_valid: Any  # Boolean: False where the sequence turns out to be padding


def entries_at(ring: RingTile, address: Any, batch: int = 1) -> Entries:
    """Shared memory of `ring.floats(batch)` floats from address, a multiple of 16, on."""
    updates = address + 4 * ring.rows * ring.head_k_dim
    weights = updates + 4 * ring.rows * ring.block_v
    rows = ring.rows + batch - 1
    decays = weights + 8 * batch * rows
    return Entries(address, updates, weights, decays, decays + 4 * rows)


@cute.jit
def boundary(ring: RingTile, tokens: Int32, phase: Int32):
    """F * floor((tokens + phase) / F) - phase, not below 0; in 32 unsigned bits, which hold 2**31 tokens and a phase."""
    shifted = Uint32(cutlass.max(tokens, -phase)) + Uint32(phase)
    return cutlass.max(Int32(shifted // ring.fold_every * ring.fold_every - Uint32(phase)), Int32(0))


@cute.jit
def is_served(ring: RingTile, committed: Int32, accepted: Int32, count: Int32):
    """Whether a sequence is none of padding, as far as its counts tell."""
    most = cutlass.const_expr(ring.most_tokens)
    return (committed >= 0) & (accepted >= 1) & (accepted <= most) & (count >= 1) & (count <= most)


@cute.jit
def load_entries(
    ring: RingTile, tensors: Any, slot: Int64, key_head: Int32, place: Place, first_and_committed: Any, thread: Int32,
    entries: Entries, unrolls: Constexpr,
):  # fmt: skip
    """Starts the copies of the slot's count and of all entries of positions [first, committed), for `cp_async_wait_group(0)` and
    a barrier. As registers of loads they would be waited for together with the state.

    tensors: ring and state_tokens. unrolls: whether there are registers for the addresses of several copies at once.
    """
    gRing, gWritten = tensors
    first, committed = first_and_committed
    if thread == 0:
        _COPIES[1](entries.written, gWritten.iterator.toint() + slot * gWritten.stride[0] * 4)
    count, base = committed - first, Int32(Uint32(first) % ring.rows)
    source = gRing.iterator.toint() + slot * gRing.stride[0] * 4
    key_at = key_head * (4 * ring.head_k_dim)
    column = first_column(ring, place, thread)
    update_at = 4 * (ring.updates_at + place.head * ring.head_v_dim + column)
    decay_at = 4 * (ring.decays_at + place.head)
    left = (ring.head_v_dim - column) * 4  # bytes of the head's columns from the block's first on
    size, copy = cutlass.const_expr(4 * ring.update_width), _COPIES[ring.update_width]
    if cutlass.const_expr(unrolls):
        of_rows = (base, count, Int64(gRing.stride[1]) * 4)
        copy_rows(ring, of_rows, source + key_at, entries.keys, (16, ring.key_units, None), thread)
        copy_rows(ring, of_rows, source + update_at, entries.updates, (size, ring.update_units, left), thread)
        copy_rows(ring, of_rows, source + decay_at, entries.decays, (4, 1, None), thread)
    else:
        for unit in cutlass.range(thread, count * ring.key_units, ring.tile.threads, unroll=1):
            row = source + Int64(row_of(ring, base, unit // ring.key_units)) * gRing.stride[1] * 4
            _COPIES[4](entries.keys + unit * 16, row + (key_at + unit % ring.key_units * 16))
        for unit in cutlass.range(thread, count * ring.update_units, ring.tile.threads, unroll=1):
            row = source + Int64(row_of(ring, base, unit // ring.update_units)) * gRing.stride[1] * 4
            within = unit % ring.update_units * size
            if within < left:
                copy(entries.updates + unit * size, row + (update_at + within))
        for entry in cutlass.range(thread, count, ring.tile.threads, unroll=1):
            row = source + Int64(row_of(ring, base, entry)) * gRing.stride[1] * 4
            _COPIES[1](entries.decays + entry * 4, row + decay_at)
    cute.arch.cp_async_commit_group()


@cute.jit
def copy_rows(ring: RingTile, of_rows: Any, source: Int64, target: Int32, units: Any, thread: Int32):
    """Starts the copies of a part of the entries' rows: a thread copies the same unit of several rows, so that its addresses take
    few instructions.

    of_rows: row of the ring of the first entry, number of entries, bytes from row to row. units: bytes and number of a row's, and
    None or the bytes that exist.
    """
    (base, count, pitch), (size, number, left) = of_rows, units
    width = cutlass.const_expr(1 << (number - 1).bit_length())
    at_once = cutlass.const_expr(ring.tile.threads // width)
    unit, first = thread % width, thread // width
    exists = unit < number
    if cutlass.const_expr(left is not None):
        exists = exists & (unit * size < left)
    source, target = source + unit * size, target + (first * number + unit) * size
    turns = cutlass.const_expr(-(-ring.most_live // at_once))
    for turn in cutlass.range(turns, unroll=cutlass.const_expr(turns if turns <= _MOST_ENTRY_TURNS else 1)):
        entry = first + turn * at_once
        if exists & (entry < count):
            row = source + Int64(row_of(ring, base, entry)) * pitch
            _COPIES[size // 4](target + turn * (at_once * number * size), row)


def first_column(ring: RingTile, place: Place, thread: Any) -> Any:
    """First column of V of the thread's block."""
    return place.v_start - group_of(ring, thread) * ring.tile.v_per_thread


def group_of(ring: RingTile, thread: Any) -> Any:
    return ring.tile.lane_and_group(thread)[1]


@cute.jit
def row_of(ring: RingTile, base: Int32, entry: Int32):
    """Row of the ring that holds an entry; both are below the number of rows."""
    row = base + entry
    if row >= ring.rows:
        row -= ring.rows
    return row


@cute.jit
def live_entries(ring: RingTile, entries: Entries, first_and_committed: Any, phase: Int32):
    """The entries of positions [first, committed), once they are in shared memory. Of padding, which may have any count, none
    before `committed` is live."""
    first, committed = first_and_committed
    written = ptx.load_word(entries.written)
    start = cutlass.max(cutlass.min(written, committed), first) - first
    target = cutlass.max(written, boundary(ring, committed, phase)) - first
    base = Int32(Uint32(first) % ring.rows)
    is_valid = (written <= committed) & (written >= 0)
    return Live(base, committed - first, start, target, is_valid)


@cute.jit
def log_decays(ring: RingTile, entries: Entries, ends: Any, path: Any, lane: Int32, rTails: cute.Tensor):
    """rTails[c] = sum of g of the entries after entry 32 c + lane; returns the sum of all.

    ends: first entry, first one after the last, and the number of those before the call. path: as `is_on` has it. Added from the
    newest entry back; entries before the first may hold anything.
    """
    first, end, before = ends
    total = Float32(0.0)
    for back in cutlass.range_constexpr(ring.chunks):
        c = cutlass.const_expr(ring.chunks - 1 - back)
        entry = c * _WARP + lane
        value = Float32(0.0)
        if (entry >= first) & (entry < end) & is_on(path, entry - before):
            value = ptx.load_one(entries.decays + entry * 4)
        for bit in cutlass.range_constexpr(5):
            later = cute.arch.shuffle_sync_down(value, offset=1 << bit)
            value += cutlass.select_(lane + (1 << bit) < _WARP, later, Float32(0.0))
        value += total
        rTails[c] = cutlass.select_(lane == _WARP - 1, total, cute.arch.shuffle_sync_down(value, offset=1))
        total = cute.arch.shuffle_sync(value, 0)
    return total


def is_on(path: Any, node: Any) -> Any:
    """Whether an entry counts: those before the call's tokens (node < 0), and tokens with a bit in `path`; None = all."""
    return Boolean(True) if path is None else (node < 0) | ((path >> cutlass.max(node, 0)) & 1 != 0)


@cute.jit
def weigh(ring: RingTile, entries: Entries, live: Live, newest: Int32, path: Any, q_and_k: Any, thread: Int32):
    """Weights of the entries before `newest`, the token's own, into shared memory; returns D.

    path: a bit for every token of the call that counts, None = all. q_and_k: the lane's 4 entries of K of every pass, as
    `lane_values` has them; not normalised.
    """
    rQ, rK = q_and_k
    lane, warp = thread % _WARP, thread // _WARP
    rTails = cute.make_rmem_tensor(ring.chunks, Float32)
    total = log_decays(ring, entries, (live.start, newest + 1, live.count), path, lane, rTails)
    for c in cutlass.range_constexpr(ring.chunks):
        factor = cute.math.exp(rTails[c])
        low = cutlass.max(live.start, Int32(c * _WARP))
        for entry in cutlass.range(
            low + ((warp - low) & (ring.warps - 1)), cutlass.min(newest, Int32(c * _WARP + _WARP)), ring.warps, unroll=1
        ):
            of_k = Float32(0.0)
            of_q = Float32(0.0)
            for p in cutlass.range_constexpr(ring.key_passes):
                unit = p * _WARP + lane
                if unit < ring.key_units:
                    key = ptx.load_four(entries.keys + (entry * ring.key_units + unit) * 16)
                    for e in cutlass.range_constexpr(4):
                        of_k += key[e] * rK[4 * p + e]
                        of_q += key[e] * rQ[4 * p + e]
            of_k, of_q = cute.arch.warp_reduction_sum(of_k), cute.arch.warp_reduction_sum(of_q)
            if lane == entry % _WARP:
                ptx.store_pair(entries.weights + entry * 8, factor * of_k, factor * of_q)
    return cute.math.exp(total)


@cute.jit
def lane_values(ring: RingTile, at: Int32, lane: Int32, rX: cute.Tensor):
    """rX = the lane's entries of K of a row of float32 in shared memory; 0 where there are none."""
    rX.fill(0.0)
    for p in cutlass.range_constexpr(ring.key_passes):
        unit = p * _WARP + lane
        if unit < ring.key_units:
            four = ptx.load_four(at + unit * 16)
            for e in cutlass.range_constexpr(4):
                rX[4 * p + e] = four[e]


@cute.jit
def add_entries(
    ring: RingTile, entries: Entries, live: Live, newest: Int32, path: Any, decay: Float32, place: Place, thread: Int32,
    rSums: cute.Tensor, unrolls: Constexpr,
):  # fmt: skip
    """The thread's sums over S0, of 2 columns each, become those over S: its share of the entries joins them.

    unrolls: whether there are registers for several entries at once; path is None then.
    """
    columns, lanes = cutlass.const_expr(ring.tile.v_per_thread), cutlass.const_expr(ring.tile.threads_per_column)
    for i in cutlass.range_constexpr(2 * columns):
        rSums[i] *= decay
    at = entries.updates + group_of(ring, thread) * (4 * columns)
    if cutlass.const_expr(unrolls):
        for turn in cutlass.range_constexpr(-(-ring.most_live // lanes)):
            entry = cutlass.min(live.start + place.lane + turn * lanes, newest)
            is_there = entry < newest  # from there on, shared memory may hold anything
            of_k, of_q = ptx.load_pair(entries.weights + entry * 8)
            values = [of_k, of_q, *load_columns(at + entry * (4 * ring.block_v), columns)]
            of_k, of_q, *u_values = [cutlass.select_(is_there, value, Float32(0.0)) for value in values]
            for r in cutlass.range_constexpr(columns):
                rSums[2 * r] += of_k * u_values[r]
                rSums[2 * r + 1] += of_q * u_values[r]
    else:
        for entry in cutlass.range(live.start + ((place.lane - live.start) & (lanes - 1)), newest, lanes, unroll=1):
            if is_on(path, entry - live.count):
                of_k, of_q = ptx.load_pair(entries.weights + entry * 8)
                u_values = load_columns(at + entry * (4 * ring.block_v), columns)
                for r in cutlass.range_constexpr(columns):
                    rSums[2 * r] += of_k * u_values[r]
                    rSums[2 * r + 1] += of_q * u_values[r]


def load_columns(at: Any, columns: int) -> list[Any]:
    """Neighbouring values of shared memory, in the widest accesses."""
    width = min(4, columns)
    return [value for c in range(0, columns, width) for value in load_some(at + 4 * c, width)]


@cute.jit
def combine(tile: StateTile, factors: Any, lane: Int32, work: Work):
    """Set work.u to the correction of each column. Return the output of column `lane` and this thread's sum of squared outputs,
    as `delta_rule.combine` does. factors: beta, those of k and q."""
    beta, k_factor, q_factor = factors
    rSums, rU, rV = work.sums, work.u, work.v
    columns = cutlass.const_expr(tile.v_per_thread)
    own = k_factor * rSums[2 * columns]  # k . q without the factor of q
    o_value = Float32(0.0)
    squares = Float32(0.0)
    for r in cutlass.range_constexpr(columns):
        rU[r] = beta * (rV[r] - k_factor * rSums[2 * r])
        if cutlass.const_expr(tile.k_warps == 1):
            o_row = q_factor * (rSums[2 * r + 1] + rU[r] * own)
            squares += o_row * o_row
            if lane == r:
                o_value = o_row
    if cutlass.const_expr(tile.k_warps > 1):
        o_value = q_factor * (rSums[1] + own_column(tile, lane, rU) * own)
        squares = cutlass.select_(lane < columns, o_value * o_value, Float32(0.0))
    return o_value, squares


@cute.jit
def append(
    ring: RingTile, target: Any, live: Live, newest: Int32, entry: Any, heads: Any, at_thread: Any, entries: Entries,
    is_followed: Constexpr,
):  # fmt: skip
    """The token's entry goes to its row of the ring, and where tokens follow to shared memory.

    target: the ring and the slot. entry: factor of the key, log decay, and the work that has key and corrections. at_thread: the
    thread's place and number. heads: the key head where this block writes its key, else -1; whether it writes the log decay.
    Written by the lanes that have the values: key entries by the first group, a correction by the lane that stores the column's
    output.
    """
    (gRing, slot), (k_factor, log_decay, work), (place, thread) = target, entry, at_thread
    key_head, writes_decay = heads
    tile, columns = ring.tile, cutlass.const_expr(ring.tile.v_per_thread)
    row = gRing.iterator.toint() + (slot * gRing.stride[0] + Int64(row_of(ring, live.base, newest)) * gRing.stride[1]) * 4
    group = group_of(ring, thread)
    if group == 0:
        for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
            at = ((i // tile.vector * tile.threads_per_column + place.lane) * tile.vector + i % tile.vector) * 4
            values = [k_factor * work.k[i + e] for e in range(4)]
            exists = Int32(ring.head_k_dim) * 4 - at  # > 0 where the tile's entry is one of K
            if cutlass.const_expr(is_followed):
                ptx.store_where(entries.keys + newest * (4 * ring.head_k_dim) + at, values, exists)
            if (key_head >= 0) & live.is_valid & (exists > 0):
                ptx.store_global_four(row + (key_head * (4 * ring.head_k_dim) + at), values)
    has_column = place.lane < columns
    if cutlass.const_expr(tile.masks_v):
        has_column = has_column & (place.v_start < ring.head_v_dim)
    if has_column:
        value = own_column(tile, place.lane, work.u)
        column = group * columns + place.lane
        if cutlass.const_expr(is_followed):
            ptx.store_one(entries.updates + (newest * ring.block_v + column) * 4, value)
        if live.is_valid:
            at = 4 * (ring.updates_at + place.head * ring.head_v_dim + place.v_start + place.lane)
            ptx.store_global_word(row + at, value.bitcast(Int32))
    if (thread == 0) & writes_decay & live.is_valid:
        ptx.store_global_word(row + 4 * (ring.decays_at + place.head), log_decay.bitcast(Int32))


@cute.jit
def fold(ring: RingTile, entries: Entries, live: Live, place: Place, thread: Int32, rState: cute.Tensor):
    """The state takes in the entries from live.start on and before live.target."""
    columns, lane = cutlass.const_expr(ring.tile.v_per_thread), thread % _WARP
    rTails = cute.make_rmem_tensor(ring.chunks, Float32)
    total = cute.math.exp(log_decays(ring, entries, (live.start, live.target, live.count), None, lane, rTails))
    for i in cutlass.range_constexpr(ring.tile.values):
        rState[i] *= total
    column = group_of(ring, thread) * columns
    for c in cutlass.range_constexpr(ring.chunks):
        factor = cute.math.exp(rTails[c])
        begin = cutlass.max(live.start, Int32(c * _WARP))
        for entry in cutlass.range(begin, cutlass.min(live.target, Int32(c * _WARP + _WARP)), unroll=1):
            add_to_state(ring, entries, entry, cute.arch.shuffle_sync(factor, entry % _WARP), (place.lane, column), rState)


@cute.jit
def add_to_state(ring: RingTile, entries: Entries, entry: Int32, weight: Float32, part: Any, rState: cute.Tensor):
    """The state + weight k_e u_e^T. part: the thread's lane among those of a column, its first column in the block."""
    tile, (lane, column) = ring.tile, part
    at = entries.updates + (entry * ring.block_v + column) * 4
    u_values = [weight * value for value in load_columns(at, tile.v_per_thread)]
    for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
        step = (i // tile.vector * tile.threads_per_column + lane) * tile.vector + i % tile.vector
        key = ptx.load_four(entries.keys + (entry * ring.head_k_dim + step) * 4)
        for e in cutlass.range_constexpr(4):
            for r in cutlass.range_constexpr(tile.v_per_thread):
                rState[tile.at(r, i + e)] += key[e] * u_values[r]


def needs_fold(live: Live) -> Boolean:
    return live.is_valid & (live.target > live.start)
