"""The recurrent kernel with a ring: the state is some tokens old and stays in registers as it is; a token adds to it what the
ring's entries and the call's own tokens before it are worth (`common.ring`).

In a draft tree a node takes the call's tokens that are its ancestors. Nothing is computed twice.

A token, in a block:

    q, k in float32 and its log decay to shared memory                     | barrier
    weights of all entries: dot products by warps                          | barrier
    dot products with the state, entries added by lanes, sums by shuffles, output
    its entry to the ring, and to shared memory for the tokens after it

q and k have two buffers, for even and odd tokens: a warp writes one again after two barriers of the token between.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import RecurrentParams
from kernels_cute.common import ptx, ring
from kernels_cute.common.delta_rule import HeadGate, Work, add_products, log_decay, make_work, row_factors, store_out
from kernels_cute.common.memory import load, narrowed, pointer
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.state_sums import Exchange, add_up
from kernels_cute.common.state_tile import load_state, store_state
from kernels_cute.recurrent import tokens
from kernels_cute.recurrent.draft_tree import parent_of
from kernels_cute.recurrent.tokens import Block, Spec


class Shared(NamedTuple):
    """Addresses in shared memory."""

    rows: Any  # q and k of a token, padded to the tile, for even and odd tokens
    entries: ring.Entries
    parts: Any  # sums over K of warps that share columns


class Inputs(NamedTuple):
    """Registers of a token's inputs as they are loaded."""

    row: Any  # [4]: entries of q or of k, the thread's place in `Shared.rows`
    v: Any  # [columns]
    g: Any  # [1]
    beta: Any  # [1]


@cute.jit
def run_replayed(spec: Spec, params: RecurrentParams):
    """A sequence, head and columns of V."""
    problem, block = spec.problem, tokens.block_of(spec)
    sequence, thread, place = block

    # Everything that the places of the entries depend on, at once.
    begin, count, written = tokens.rows_of(params, sequence)
    count = cutlass.max(count, 0)
    committed = Int32(params.num_computed_tokens[sequence])
    slot = narrowed(params.state_indices[sequence])
    accepted = Int32(1)
    if cutlass.const_expr(problem.has_accepted):
        accepted = params.num_accepted_tokens[sequence]
    seed = mixed_seed(params.rounding_seed)
    gate = HeadGate(Float32(0.0), Float32(0.0))
    if cutlass.const_expr(spec.use_gate):
        gate = HeadGate(-cute.math.exp(params.A_log[place.head]), params.dt_bias[place.head])

    first = ring.boundary(spec.ring, committed - accepted, params.fold_phase)
    is_served = ring.is_served(spec.ring, committed, accepted, count)
    is_served = is_served & (Int64(slot) > params.null_slot) & (Int64(slot) < params.ring.shape[0])
    live_count = cutlass.select_(is_served, count, Int32(0))
    if is_served:
        positions = (first, committed)
        run_sequence(spec, params, block, begin, count, Int64(slot), positions, gate, seed)
    tokens.store_idle(spec, params, block, begin, live_count, count, written)


@cute.jit
def run_sequence(
    spec: Spec, params: RecurrentParams, block: Block, begin: Int32, count: Int32, slot: Int64, positions: Any, gate: HeadGate,
    seed: Int32,
):  # fmt: skip
    """A sequence that is no padding, as far as its counts tell."""
    tile, (_, thread, place) = spec.tile, block
    key_head = place.head // spec.k_group
    shared = shared_of(spec)
    tensors = (params.ring, params.state_tokens)
    ring.load_entries(spec.ring, tensors, slot, key_head, place, positions, thread, shared.entries, False)
    dtypes = (spec.dtype, spec.dtype, spec.gate_dtype, spec.beta_dtype)
    sizes = (4 * spec.row_passes, tile.v_per_thread, 1, 1)
    following = Inputs(*[cute.make_rmem_tensor(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)])
    for rX in following:
        rX.fill(0)
    load_token(spec, params, begin, block, following)
    rState = cute.make_rmem_tensor(tile.values, Float32)
    rState.fill(0.0)
    load_state(tile, slot, place, params.initial_state, rState)
    for step in cutlass.range(count, unroll=1):
        run_token(spec, params, block, (begin, step, count), slot, positions, gate, following, rState, shared)
    live = ring.live_entries(spec.ring, shared.entries, positions, params.fold_phase)
    ptx.use(rState[0])
    if cutlass.const_expr(spec.problem.has_final_state):
        if ring.needs_fold(live):
            ring.fold(spec.ring, shared.entries, live, place, thread, rState)
            store_state(tile, slot, place, tile.width, params.initial_state, rState, seed)


def shared_of(spec: Spec) -> Shared:
    """Shared memory of the block."""
    num_rows, num_entries, num_parts = 4 * spec.row_floats, spec.ring.floats(), spec.shared_floats

    @cute.struct
    class Storage:
        rows: cute.struct.Align[cute.struct.MemRange[Float32, num_rows], 16]
        entries: cute.struct.Align[cute.struct.MemRange[Float32, num_entries], 16]
        parts: cute.struct.Align[cute.struct.MemRange[Float32, num_parts], 16]

    storage = cutlass.utils.SmemAllocator().allocate(Storage)
    rows, entries, parts = [x.data_ptr().toint() for x in (storage.rows, storage.entries, storage.parts)]
    return Shared(rows, ring.entries_at(spec.ring, entries), parts)


@cute.jit
def load_token(spec: Spec, params: RecurrentParams, token: Int32, block: Block, inputs: Inputs):
    """A thread's part of q or k, its columns of v, and the gates."""
    tile, row, gQ, gK, gV, place = spec.tile, Int64(token), params.q, params.k, params.v, block.place
    size = cutlass.const_expr(spec.dtype.width // 8)
    units = cutlass.const_expr(spec.ring.key_units)
    for p in cutlass.range_constexpr(spec.row_passes):
        unit = block.thread + p * tile.threads
        if unit < units:
            at = row * gQ.stride[0] + Int64(place.head // spec.q_group) * gQ.stride[1] + unit * 4
            load(pointer(gQ, at, 4 * size), 4, inputs.row, 4 * p, False)
        elif unit < 2 * units:
            at = row * gK.stride[0] + Int64(place.head // spec.k_group) * gK.stride[1] + (unit - units) * 4
            load(pointer(gK, at, 4 * size), 4, inputs.row, 4 * p, False)
    v_offset = row * gV.stride[0] + Int64(place.head // spec.v_group) * gV.stride[1] + place.v_start
    tokens.load_v_and_gates(spec, params, token, place, pointer(gV, v_offset, tile.v_per_thread * size), inputs)


@cute.jit
def write_row(spec: Spec, rows: Int32, thread: Int32, inputs: Inputs):
    """Write the thread's part of q or k to shared memory, as float32. Entries of the tile beyond K are zero."""
    units = cutlass.const_expr(spec.ring.key_units)
    for p in cutlass.range_constexpr(spec.row_passes):
        unit = thread + p * spec.tile.threads
        padded = unit + cutlass.select_(unit < units, Int32(0), Int32(spec.row_floats // 4 - units))
        values = [inputs.row[4 * p + e].to(Float32) for e in range(4)]
        ptx.store_where(rows + padded * 16, values, 2 * units - unit)
    if cutlass.const_expr(spec.row_floats > spec.problem.head_k_dim):
        for unit in cutlass.range(units + thread, spec.row_floats // 4, spec.tile.threads, unroll=1):
            for which in cutlass.range_constexpr(2):
                ptx.store_zeros(rows + (which * spec.row_floats * 4) + unit * 16)


@cute.jit
def log_gates(spec: Spec, inputs: Inputs, gate: HeadGate):
    """Log decay and beta of a token."""
    log_alpha = Float32(0.0)
    if cutlass.const_expr(spec.has_gate):
        log_alpha = inputs.g[0].to(Float32)
        if cutlass.const_expr(spec.use_gate):
            log_alpha = log_decay(log_alpha + gate.bias, gate.minus_decay)
    return log_alpha, tokens.beta_of(spec, inputs)


@cute.jit
def run_token(
    spec: Spec, params: RecurrentParams, block: Block, at: Any, slot: Int64, positions: Any, gate: HeadGate, inputs: Inputs,
    rState: cute.Tensor, shared: Shared,
):  # fmt: skip
    """Compute a token. at: the sequence's first token, this token's number, and their count. inputs: this token's, afterwards
    those of the next one."""
    tile, (_, thread, place), (begin, step, count) = spec.tile, block, at
    entries, lane = shared.entries, thread % 32
    newest = positions[1] - positions[0] + step
    rows = shared.rows + step % 2 * (8 * spec.row_floats)
    k_row = rows + 4 * spec.row_floats
    log_alpha, beta = log_gates(spec, inputs, gate)
    write_row(spec, rows, thread, inputs)
    if thread == 0:
        ptx.store_one(entries.decays + newest * 4, log_alpha)
    work = make_work(tile, spec.num_sums)
    for r in cutlass.range_constexpr(tile.v_per_thread):
        work.v[r] = inputs.v[r].to(Float32)
    if step == 0:
        cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    if step + 1 < count:
        load_token(spec, params, begin + step + 1, block, inputs)

    live = ring.live_entries(spec.ring, entries, positions, params.fold_phase)
    path = None
    if cutlass.const_expr(spec.problem.has_parent):
        path = path_of(step, begin, params.parent_token)
    rQ = cute.make_rmem_tensor(4 * spec.ring.key_passes, Float32)
    rK = cute.make_rmem_tensor(4 * spec.ring.key_passes, Float32)
    ring.lane_values(spec.ring, rows, lane, rQ)
    ring.lane_values(spec.ring, k_row, lane, rK)
    alpha = ring.weigh(spec.ring, entries, live, newest, path, (rQ, rK), thread)
    cute.arch.sync_threads()  # all weights are there

    multiply(spec, (rows, k_row), place.lane, rState, work)
    ring.add_entries(spec.ring, entries, live, newest, path, alpha, place, thread, work.sums, False)
    add_up(tile, work.sums, spec.num_sums, Exchange(shared.parts, step % 2))
    k_factor, q_factor = row_factors(tile, work.sums, params.scale, spec.problem.use_qk_l2norm)
    value, _ = ring.combine(tile, (beta, k_factor, q_factor), place.lane, work)
    store_out(tile, params.out, begin + step, place, cutlass.select_(live.is_valid, value, Float32(0.0)))

    # Without an update of the state the ring stays as it is too; the tokens after this one still need its entry.
    is_written = live.is_valid & Boolean(spec.problem.has_final_state)
    is_first_block = place.v_start == ring.group_of(spec.ring, thread) * tile.v_per_thread
    writes_key = is_first_block & (place.head % spec.k_group == 0)
    heads = (cutlass.select_(writes_key, place.head // spec.k_group, Int32(-1)), is_first_block)
    appended = live._replace(is_valid=is_written)
    entry = (k_factor, log_alpha, work)
    ring.append(spec.ring, (params.ring, slot), appended, newest, entry, heads, (place, thread), entries, True)


@cute.jit
def path_of(node: Int32, begin: Int32, gParents: cute.Tensor):
    """A bit for a node and each of its ancestors."""
    path = Int32(0)
    while node >= 0:
        path = path | (Int32(1) << node)
        node = parent_of(node, begin, gParents)
    return path


@cute.jit
def multiply(spec: Spec, rows: Any, lane: Int32, rState: cute.Tensor, work: Work):
    """Compute the thread's parts of a token's dot products in work.sums, with k in work.k. rows: addresses of q and k."""
    tile, vector = spec.tile, cutlass.const_expr(spec.tile.vector)
    q_row, k_row = rows
    work.sums.fill(0.0)
    for i in cutlass.range_constexpr(0, tile.k_per_thread, 4):
        at = ((i // vector * tile.threads_per_column + lane) * vector + i % vector) * 4
        q_values = ptx.load_four(q_row + at)
        k_values = ptx.load_four(k_row + at)
        for e in cutlass.range_constexpr(4):
            work.k[i + e] = k_values[e]
            add_products(tile, rState, i + e, k_values[e], q_values[e], spec.problem.use_qk_l2norm, work.sums)
