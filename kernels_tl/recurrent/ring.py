"""Steps of the recurrent kernel with a ring: the entries of a sequence, and what a token and the state get from them.

    w_e = exp(sum of g after entry e, up to the token)                       D = exp(sum of g of all entries and the token)
    S^T k = D S0^T k + sum_e w_e (k_e . k) u_e                               S^T q alike
    fold:  S0 = exp(sum of g) S0 + sum_e exp(sum of g after e) k_e u_e^T     over the entries that the state takes in

A block has its columns of S0 in registers and the entries `k_e [K]`, `u_e [columns of the block]`, `g_e` in shared memory, oldest
first: those that may be live, which positions alone tell before the slot's count is read (`gdn.ops.delta_rule.problem`), and
behind them those of the call's own tokens. Which entry a thread has:

    dot products k_e . k and k_e . q     8 threads an entry, each an eighth of K; the weighted pair goes to shared memory
    sums over u_e                        entry e: lane e mod threads_per_column of each group of columns, before its shuffles
    fold                                 all entries in each thread: its own K entries and columns
"""

from typing import Any, NamedTuple

import tilelang.language as T

from kernels_tl.common import build, ptx
from kernels_tl.recurrent.spec import BETA, GATE, K_FACTOR, Q_FACTOR, Spec, first_entry, register, v_exists
from kernels_tl.recurrent.tokens import L2NORM_EPS, row_unit

_WARP = 32
_ENTRY_LANES = 8  # threads that share the dot products of an entry


class RingSpec:
    """Sizes of a block's entries, and where they lie in shared memory: numbers of float32."""

    def __init__(self, spec: Spec) -> None:
        p = spec.problem
        assert p.ring_rows is not None and p.fold_every is not None
        self.spec = spec
        self.rows, self.fold_every = p.ring_rows, p.fold_every
        self.most_tokens = (p.ring_rows + 1 - p.fold_every) // 2 if p.has_accepted else 1
        self.updates_in_row = p.num_k_heads * p.head_k_dim  # elements of a ring's row before u, and before g
        self.decays_in_row = self.updates_in_row + spec.heads * p.head_v_dim
        self.key_units = p.head_k_dim // 4
        self.update_units = spec.tiles.block_v // 4
        self.row_passes = -(-2 * self.key_units // spec.tiles.threads)  # parts of q and k in a thread
        self.chunks = -(-self.rows // _WARP)  # entries of a lane that sums up decays, 32 apart
        self.entries_at_once = spec.tiles.threads // _ENTRY_LANES
        self.unit_passes = -(-self.key_units // _ENTRY_LANES)
        self.row_floats = spec.entries * spec.lanes  # of q or k, with what the tile pads
        # Lanes of a column read as many entries at once: four more floats a row, and these lie in different banks.
        self.update_stride = spec.tiles.block_v + 4
        self.keys_at = 4 * self.row_floats  # q and k of a token, for even and odd tokens, come before
        self.updates_at = self.keys_at + self.rows * p.head_k_dim
        self.weights_at = self.updates_at + self.rows * self.update_stride  # pairs: those of u in S^T k and in S^T q
        self.decays_at = self.weights_at + 2 * self.rows
        # A fold's last key is read with what the tile pads.
        self.floats = -(-max(self.decays_at + self.rows, self.updates_at + self.row_floats) // 4) * 4


class Live(NamedTuple):
    """Variables of a sequence's entries, which count from the first that may be live."""

    first: Any  # position of the first
    base: Any  # its row of the ring
    count: Any  # number of those before the call's tokens
    start: Any  # the first that is live
    target: Any  # the state takes in those from start on and before target
    is_valid: Any  # 0 where the sequence turns out to be padding


def allocate_registers(spec: Spec, ring: RingSpec) -> Any:
    """A thread's registers, and the block's shared memory."""
    p = spec.problem
    return build.named(
        state=T.alloc_local((spec.columns * spec.entries,), "float32"),
        row_next=T.alloc_local((4 * ring.row_passes,), p.dtype),  # inputs of a token as they are loaded: part of q or of k
        v_next=T.alloc_local((spec.columns,), p.dtype),
        g_next=T.alloc_local((1,), p.gate_dtype or "float32"),
        beta_next=T.alloc_local((1,), p.beta_dtype or "float32"),
        v=T.alloc_local((spec.columns,), "float32"),  # of the token that is computed
        sums=T.alloc_local((spec.num_sums,), "float32"),
        u=T.alloc_local((spec.columns,), "float32"),
        scalars=T.alloc_local((6,), "float32"),
        tails=T.alloc_local((ring.chunks,), "float32"),  # sums of log decays after entries
        total=T.alloc_local((1,), "float32"),
        four=T.alloc_local((4,), "float32"),
        other=T.alloc_local((4,), "float32"),
        pair=T.alloc_local((2,), "float32"),
        shared=T.alloc_shared((ring.floats,), "float32"),
        written=T.alloc_shared((4,), "int32"),
    )


@T.macro
def boundary(ring, tokens, phase, scratch: T.Ref, result: T.Ref):
    """result = F * floor((tokens + phase) / F) - phase, not below 0; in 32 unsigned bits, which hold 2**31 tokens and a phase."""
    scratch = T.cast(T.max(tokens, -phase), "uint32")
    scratch = scratch + T.cast(phase, "uint32")
    scratch = T.truncdiv(scratch, T.uint32(ring.fold_every))
    scratch = scratch * T.uint32(ring.fold_every)
    # The compiler takes a cast to int32 for one of no negative number: the difference is not formed where it would be.
    result = T.if_then_else(  # noqa: F841 - a reference
        scratch > T.cast(phase, "uint32"), T.cast(scratch - T.cast(phase, "uint32"), "int32"), 0
    )


def row_of(ring, base, entry):
    """Row of the ring that holds an entry; both are below the number of rows."""
    return T.if_then_else(base + entry >= ring.rows, base + entry - ring.rows, base + entry)


@T.macro
def load_entries(ring, slot, place, thread, tensors, live, registers):
    """Starts the copies of the slot's count and of all entries that may be live. As registers of loads they would be waited for
    together with the state."""
    spec = ring.spec
    shared, gRing, threads = registers.shared, tensors.ring, spec.tiles.threads
    key_head = place.head // (spec.heads // spec.problem.num_k_heads)
    first_column = place.v_start - group_of(spec, thread) * spec.columns
    if thread == 0:
        ptx.copy(registers.written[0], tensors.state_tokens[slot], 1)
    for i in T.serial(T.ceildiv(live.count * ring.key_units - thread, threads)):
        unit = thread + i * threads
        row = row_of(ring, live.base, unit // ring.key_units)
        at = key_head * spec.problem.head_k_dim + unit % ring.key_units * 4
        ptx.copy(shared[ring.keys_at + unit * 4], gRing[slot, row, at], 4)
    for i in T.serial(T.ceildiv(live.count * ring.update_units - thread, threads)):
        unit = thread + i * threads
        row = row_of(ring, live.base, unit // ring.update_units)
        column = unit % ring.update_units * 4
        if v_exists(spec, first_column + column):
            at = ring.updates_in_row + place.head * spec.problem.head_v_dim + first_column + column
            ptx.copy(shared[ring.updates_at + unit // ring.update_units * ring.update_stride + column], gRing[slot, row, at], 4)
    for i in T.serial(T.ceildiv(live.count - thread, threads)):
        row = row_of(ring, live.base, thread + i * threads)
        ptx.copy(shared[ring.decays_at + thread + i * threads], gRing[slot, row, ring.decays_in_row + place.head], 1)


def group_of(spec, thread):
    """The thread's place among the groups of columns of a block."""
    if spec.problem.state_v_first:
        return thread // spec.lanes
    return thread // 32 // spec.k_warps * spec.groups_per_warp + thread % spec.groups_per_warp


@T.macro
def load_row(ring, token, place, thread, tensors, registers):
    """A token's inputs: four entries of q or k, the thread's columns of v, and the gates."""
    spec = ring.spec
    p, units = spec.problem, ring.key_units
    q_head, k_head, v_head = (place.head // (spec.heads // heads) for heads in (p.num_q_heads, p.num_k_heads, p.num_v_heads))
    for i in T.unroll(ring.row_passes):
        unit = thread + i * spec.tiles.threads
        if unit < units:
            for e in T.vectorized(4):
                registers.row_next[i * 4 + e] = tensors.q[0, 0, 0, (row_unit(tensors.q, token, q_head, 4) + unit) * 4 + e]
        elif unit < 2 * units:
            for e in T.vectorized(4):
                registers.row_next[i * 4 + e] = tensors.k[0, 0, 0, (row_unit(tensors.k, token, k_head, 4) + unit - units) * 4 + e]
    if v_exists(spec, place.v_start):
        for e in T.vectorized(spec.columns):
            unit = row_unit(tensors.v, token, v_head, spec.columns)
            registers.v_next[e] = tensors.v[0, 0, 0, (unit + place.v_start // spec.columns) * spec.columns + e]
    if spec.has_gate:
        registers.g_next[0] = tensors.g[0, token, place.head]
    if p.beta_dtype is not None:
        registers.beta_next[0] = tensors.beta[0, token, place.head]


@T.macro
def clear_padding(ring, thread, registers):
    """Zeros in the entries beyond K that the tile has, of q and k of both buffers."""
    spec = ring.spec
    beyond = ring.row_floats - spec.problem.head_k_dim
    # An extent of at most 1 that depends on the thread would become 1 for all threads: the compiler takes no loop for empty.
    for i in T.serial(-(-4 * beyond // spec.tiles.threads)):
        at = thread + i * spec.tiles.threads
        if at < 4 * beyond:
            registers.shared[at // beyond * ring.row_floats + spec.problem.head_k_dim + at % beyond] = 0.0


@T.macro
def write_row(ring, rows_at, thread, registers):
    """The thread's part of q or k to shared memory, as float32."""
    spec, units = ring.spec, ring.key_units
    for i in T.unroll(ring.row_passes):
        unit = thread + i * spec.tiles.threads
        if unit < 2 * units:
            for e in T.vectorized(4):
                at = rows_at // 4 + T.if_then_else(unit < units, unit, unit - units + ring.row_floats // 4)
                registers.shared[at * 4 + e] = T.cast(registers.row_next[i * 4 + e], "float32")


@T.macro
def read_gates(spec, minus_decay: T.Ref, bias: T.Ref, registers):
    """Log decay and beta of a token."""
    scalars = registers.scalars
    scalars[GATE] = 0.0
    if spec.has_gate:
        scalars[GATE] = T.cast(registers.g_next[0], "float32")
        if spec.use_gate:
            scalars[GATE] = scalars[GATE] + bias
            scalars[GATE] = minus_decay * T.if_then_else(scalars[GATE] <= 20.0, T.log1p(T.exp(scalars[GATE])), scalars[GATE])
    scalars[BETA] = 1.0
    if spec.problem.beta_dtype is not None:
        scalars[BETA] = T.cast(registers.beta_next[0], "float32")
        if spec.problem.use_beta_sigmoid:
            scalars[BETA] = 1.0 / (1.0 + T.exp(-scalars[BETA]))


def is_on(has_path, path, node):
    """Whether an entry counts: those before the call's tokens (node < 0), and of these the ones with a bit in path."""
    return T.Or(node < 0, ((path >> T.max(node, 0)) & 1) != 0) if has_path else True


@T.macro
def log_decays(ring, first, end, before, has_path, path, lane, registers):
    """tails[c] = sum of g of the entries after entry 32 c + lane, total = of all: from first on and before end, those that count.

    before: number of those before the call. Added from the newest entry back; entries before the first may hold anything."""
    tails, total, four = registers.tails, registers.total, registers.four
    total[0] = 0.0
    for back in T.unroll(ring.chunks):
        c = ring.chunks - 1 - back
        entry = c * _WARP + lane
        four[0] = 0.0
        if entry >= first and entry < end and is_on(has_path, path, entry - before):
            four[0] = registers.shared[ring.decays_at + entry]
        for bit in T.unroll(5):
            four[1] = T.shfl_down(four[0], 1 << bit)
            four[0] = four[0] + T.if_then_else(lane + (1 << bit) < _WARP, four[1], 0.0)
        four[0] = four[0] + total[0]
        four[1] = T.shfl_down(four[0], 1)
        tails[c] = T.if_then_else(lane == _WARP - 1, total[0], four[1])
        total[0] = T.shfl_sync(four[0], 0)


@T.macro
def weigh(ring, rows_at, live, newest, path, thread, registers):
    """Weights of the entries before newest, the token's own, into shared memory; total = D. q and k are not normalised."""
    spec = ring.spec
    shared, tails, four, other, pair = registers.shared, registers.tails, registers.four, registers.other, registers.pair
    log_decays(ring, live.start, newest + 1, live.count, spec.problem.has_parent, path, thread % _WARP, registers)
    registers.total[0] = T.exp(registers.total[0])
    for c in T.unroll(ring.chunks):
        tails[c] = T.exp(tails[c])
    for i in T.serial(T.ceildiv(newest - live.start, ring.entries_at_once)):
        entry = live.start + i * ring.entries_at_once + thread // _ENTRY_LANES
        pair[0] = 0.0
        pair[1] = 0.0
        for p in T.unroll(ring.unit_passes):
            unit = p * _ENTRY_LANES + thread % _ENTRY_LANES
            if entry < newest and (ring.key_units % _ENTRY_LANES == 0 or unit < ring.key_units):
                for e in T.vectorized(4):
                    four[e] = shared[ring.keys_at + (entry * ring.key_units + unit) * 4 + e]
                for e in T.vectorized(4):
                    other[e] = shared[(rows_at // 4 + ring.row_floats // 4 + unit) * 4 + e]
                for e in T.unroll(4):
                    pair[0] = pair[0] + four[e] * other[e]
                for e in T.vectorized(4):
                    other[e] = shared[(rows_at // 4 + unit) * 4 + e]
                for e in T.unroll(4):
                    pair[1] = pair[1] + four[e] * other[e]
        for bit in T.unroll(3):
            for which in T.unroll(2):
                pair[which] = pair[which] + T.shfl_xor(pair[which], 1 << bit)
        four[0] = 0.0
        for c in T.unroll(ring.chunks):
            four[1] = T.shfl_sync(tails[c], entry % _WARP)
            four[0] = T.if_then_else(entry // _WARP == c, four[1], four[0])
        for which in T.unroll(2):
            pair[which] = four[0] * pair[which]
        if thread % _ENTRY_LANES == 0 and entry < newest:
            for e in T.vectorized(2):
                shared[ring.weights_at + entry * 2 + e] = pair[e]


@T.macro
def multiply(ring, rows_at, place, registers):
    """The thread's parts of a token's dot products in sums: those of the state decayed."""
    spec = ring.spec
    sums, state, four, other = registers.sums, registers.state, registers.four, registers.other
    qk_sum, kk_sum, qq_sum = 2 * spec.columns, 2 * spec.columns + 1, 2 * spec.columns + 2
    for i in T.unroll(spec.num_sums):
        sums[i] = 0.0
    for i in T.unroll(spec.entries // 4):
        for e in T.vectorized(4):
            unit = rows_at // 4 + first_entry(spec, i * 4 // spec.vector, place.lane) // 4 + i % (spec.vector // 4)
            four[e] = registers.shared[(unit + ring.row_floats // 4) * 4 + e]
        for e in T.vectorized(4):
            unit = rows_at // 4 + first_entry(spec, i * 4 // spec.vector, place.lane) // 4 + i % (spec.vector // 4)
            other[e] = registers.shared[unit * 4 + e]
        for e in T.unroll(4):
            sums[qk_sum] = sums[qk_sum] + other[e] * four[e]
            if spec.problem.use_qk_l2norm:
                sums[kk_sum] = sums[kk_sum] + four[e] * four[e]
                sums[qq_sum] = sums[qq_sum] + other[e] * other[e]
            for r in T.unroll(spec.columns):
                sums[2 * r] = sums[2 * r] + state[register(spec, r, i * 4 + e)] * four[e]
                sums[2 * r + 1] = sums[2 * r + 1] + state[register(spec, r, i * 4 + e)] * other[e]
    for i in T.unroll(2 * spec.columns):
        sums[i] = sums[i] * registers.total[0]


@T.macro
def add_entries(ring, live, newest, path, place, thread, registers):
    """The thread's share of the entries joins its sums."""
    spec = ring.spec
    shared, sums, four, pair = registers.shared, registers.sums, registers.four, registers.pair
    skipped = (place.lane - live.start) & (spec.lanes - 1)
    for i in T.serial(T.ceildiv(newest - live.start - skipped, spec.lanes)):
        entry = live.start + skipped + i * spec.lanes
        if is_on(spec.problem.has_parent, path, entry - live.count):
            for e in T.vectorized(2):
                pair[e] = shared[ring.weights_at + entry * 2 + e]
            for c in T.unroll(spec.columns // 4):
                for e in T.vectorized(4):
                    at = ring.updates_at + entry * ring.update_stride + group_of(spec, thread) * spec.columns + c * 4
                    four[e] = shared[at + e]
                for e in T.unroll(4):
                    sums[2 * (c * 4 + e)] = sums[2 * (c * 4 + e)] + pair[0] * four[e]
                    sums[2 * (c * 4 + e) + 1] = sums[2 * (c * 4 + e) + 1] + pair[1] * four[e]


@T.macro
def combine(spec, scale, registers):
    """u = the corrections of the columns, and sums[2 r + 1] = their outputs."""
    sums, u, scalars = registers.sums, registers.u, registers.scalars
    qk_sum, kk_sum, qq_sum = 2 * spec.columns, 2 * spec.columns + 1, 2 * spec.columns + 2
    scalars[Q_FACTOR] = scale
    scalars[K_FACTOR] = 1.0
    if spec.problem.use_qk_l2norm:
        scalars[Q_FACTOR] = scale * T.rsqrt(sums[qq_sum] + L2NORM_EPS)
        scalars[K_FACTOR] = T.rsqrt(sums[kk_sum] + L2NORM_EPS)
    for r in T.unroll(spec.columns):
        u[r] = scalars[BETA] * (registers.v[r] - scalars[K_FACTOR] * sums[2 * r])
        sums[2 * r + 1] = scalars[Q_FACTOR] * (sums[2 * r + 1] + u[r] * (scalars[K_FACTOR] * sums[qk_sum]))


@T.macro
def store_out(spec, token, place, is_valid, registers, out):
    """The outputs of the thread's columns, zeros where the sequence is none."""
    four = registers.four
    if place.lane == 0 and v_exists(spec, place.v_start):
        for c in T.unroll(spec.columns // 4):
            for e in T.unroll(4):
                four[e] = T.if_then_else(is_valid != 0, registers.sums[2 * (c * 4 + e) + 1], 0.0)
            for e in T.vectorized(4):
                unit = row_unit(out, token, place.head, 4) + place.v_start // 4 + c
                out[0, 0, 0, unit * 4 + e] = T.cast(four[e], spec.problem.dtype)


@T.macro
def append(ring, rows_at, slot, live, newest, is_followed, place, thread, tensors, registers):
    """The token's entry goes to its row of the ring, and where tokens follow to shared memory."""
    spec = ring.spec
    shared, gRing, scalars, four = registers.shared, tensors.ring, registers.scalars, registers.four
    k_group = spec.heads // spec.problem.num_k_heads
    is_first_block = place.v_start == group_of(spec, thread) * spec.columns
    row_units = slot * (gRing.strides[0] // 4) + row_of(ring, live.base, newest) * (gRing.strides[1] // 4)
    writes = spec.problem.has_final_state
    if thread < ring.key_units:
        for e in T.vectorized(4):
            four[e] = shared[(rows_at // 4 + ring.row_floats // 4 + thread) * 4 + e]
        for e in T.unroll(4):
            four[e] = scalars[K_FACTOR] * four[e]
        if is_followed:
            for e in T.vectorized(4):
                shared[ring.keys_at + (newest * ring.key_units + thread) * 4 + e] = four[e]
        if writes and live.is_valid != 0 and is_first_block and place.head % k_group == 0:
            for e in T.vectorized(4):
                key = place.head // k_group * ring.key_units + thread
                gRing[0, 0, (row_units + key) * 4 + e] = four[e]
    if place.lane == 0 and v_exists(spec, place.v_start):
        for c in T.unroll(spec.columns // 4):
            if is_followed:
                for e in T.vectorized(4):
                    at = ring.updates_at + newest * ring.update_stride + group_of(spec, thread) * spec.columns + c * 4
                    shared[at + e] = registers.u[c * 4 + e]
            if writes and live.is_valid != 0:
                for e in T.vectorized(4):
                    column = ring.updates_in_row // 4 + (place.head * spec.problem.head_v_dim + place.v_start) // 4 + c
                    gRing[0, 0, (row_units + column) * 4 + e] = registers.u[c * 4 + e]
    if writes and thread == 0 and live.is_valid != 0 and is_first_block:
        gRing[slot, row_of(ring, live.base, newest), ring.decays_in_row + place.head] = scalars[GATE]


@T.macro
def fold(ring, live, place, thread, registers):
    """The state takes in the entries from live.start on and before live.target."""
    spec = ring.spec
    shared, state, four, other, tails = registers.shared, registers.state, registers.four, registers.other, registers.tails
    log_decays(ring, live.start, live.target, live.count, False, 0, thread % _WARP, registers)
    for c in T.unroll(ring.chunks):
        tails[c] = T.exp(tails[c])
    registers.total[0] = T.exp(registers.total[0])
    for i in T.unroll(spec.columns * spec.entries):
        state[i] = state[i] * registers.total[0]
    for i in T.serial(live.target - live.start):
        entry = live.start + i
        registers.pair[0] = 0.0
        for c in T.unroll(ring.chunks):
            registers.pair[1] = T.shfl_sync(tails[c], entry % _WARP)
            registers.pair[0] = T.if_then_else(entry // _WARP == c, registers.pair[1], registers.pair[0])
        for c in T.unroll(spec.columns // 4):
            for e in T.vectorized(4):
                at = ring.updates_at + entry * ring.update_stride + group_of(spec, thread) * spec.columns + c * 4
                other[e] = shared[at + e]
            for e in T.unroll(4):
                other[e] = registers.pair[0] * other[e]
            for j in T.unroll(spec.entries // 4):
                for e in T.vectorized(4):
                    unit = first_entry(spec, j * 4 // spec.vector, place.lane) // 4 + j % (spec.vector // 4)
                    four[e] = shared[ring.keys_at + (entry * ring.key_units + unit) * 4 + e]
                for e in T.unroll(4):
                    for r in T.unroll(4):
                        at = register(spec, c * 4 + r, j * 4 + e)
                        state[at] = state[at] + four[e] * other[r]
