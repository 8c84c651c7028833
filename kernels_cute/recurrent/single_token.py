"""The recurrent kernel without a prefetch: for calls of at most one token a sequence, correct for any.

Nothing of the next token is in registers while the current one is computed, so 64 values of the state fit a thread of 128
registers: 512 threads an SM hold 128 KiB of state. A later token is loaded when the one before it is done. See DESIGN.md.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.delta_rule.problem import RecurrentParams
from gdn.ops.delta_rule.tiles import counts_down
from kernels_cute.common.delta_rule import HeadGate, Work, add_products, make_work, store_out
from kernels_cute.common.ptx import opaque, run, unpack
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.state_sums import Exchange
from kernels_cute.common.state_tile import Place, load_state
from kernels_cute.recurrent import tokens
from kernels_cute.recurrent.tokens import Spec

_LANES = 32  # of a warp


@cute.jit
def run_without_prefetch(spec: Spec, params: RecurrentParams):
    """A sequence, head and columns of V."""
    tile, problem = spec.tile, spec.problem
    columns = cutlass.const_expr(tile.v_per_thread)
    block = tokens.block_of(spec)
    sequence, thread, place = block

    # Everything that the slot depends on, at once, and what else needs nothing to be known.
    starts = starts_of(spec, params, place)
    begin, count, written = tokens.rows_of(params, sequence)
    read_slot = Int64(sequence)
    if cutlass.const_expr(problem.pooled):
        read_slot = slot_to_read(spec, params, sequence, thread)
    write_slot = read_slot
    if cutlass.const_expr(spec.writes_last_token and problem.has_final_indices):
        write_slot = Int64(params.final_state_indices[sequence])
    seed = mixed_seed(params.rounding_seed)

    exchange_at = tokens.shared_parts(spec)
    rState = cute.make_rmem_tensor(tile.values, Float32)
    inputs = tokens.make_inputs(spec, tile.k_per_thread // 2, Int32)
    rGates = cute.make_rmem_tensor(2, Float32)  # decay and beta of the current token
    work = make_work(tile, spec.num_sums, inputs.k)
    for rX in (rState, *inputs, rGates):
        rX.fill(0)
    minus_decay, bias = Float32(0.0), Float32(0.0)

    # A padding sequence has no slot: its rows become zero and nothing else happens.
    live_count = cutlass.max(count, 0)
    if cutlass.const_expr(problem.pooled):
        if read_slot <= params.null_slot:
            live_count = Int32(0)
    if cutlass.const_expr(problem.has_initial_state and not problem.pooled):
        load_state(tile, read_slot, place, params.initial_state, rState)
    if live_count > 0:
        # One block of code from the loads to the gates: what another block uses waits for all that is under way.
        if cutlass.const_expr(spec.use_gate):
            minus_decay = params.A_log[place.head]
            bias = params.dt_bias[place.head]
        load_words(spec, params, begin, place, starts, inputs)
        if cutlass.const_expr(problem.has_initial_state and problem.pooled):
            load_state(tile, read_slot, place, params.initial_state, rState)
        if cutlass.const_expr(spec.use_gate):
            minus_decay = -cute.math.exp(minus_decay)
        rGates[0], rGates[1] = tokens.gates(spec, inputs, HeadGate(minus_decay, bias))

    tokens.store_idle(spec, params, block, begin, live_count, count, written)

    end = begin + live_count
    # Down over the tokens left or up over all: each spills where the other does not.
    goes_down = cutlass.const_expr(counts_down(tile.threads, columns) and not problem.state_v_first)
    first, last, step = (live_count, Int32(0), -1) if cutlass.const_expr(goes_down) else (begin, end, 1)
    for at_token in cutlass.range(first, last, step, unroll=1):
        token = end - at_token if cutlass.const_expr(goes_down) else at_token
        if cutlass.const_expr(spec.writes_every_token and not spec.stores_meanwhile):
            write_slot = tokens.slot_to_write(spec, params, sequence, token - begin)
        for r in cutlass.range_constexpr(columns):
            work.v[r] = inputs.v[r].to(Float32)
        dot_products(spec, inputs, rState, work)
        own = Place(place.head, opaque(place.lane), place.v_start)  # what follows from it is made here, not kept in predicates
        o_value = tokens.finish(spec, params, rGates[0], rGates[1], own, work, Exchange(exchange_at, token % 2))
        store_out(tile, params.out, token, own, o_value)
        if cutlass.const_expr(spec.stores_meanwhile):
            # Not before the exchange of sums, which needs the registers, and from nothing that would have to be kept.
            at = opaque(sequence)
            node = opaque(token) - Int32(params.cu_seqlens[at])
            write_slot = tokens.slot_to_write(spec, params, at, node)
        move_on(spec, rGates[0], work, rState)
        if (at_token > 1) if cutlass.const_expr(goes_down) else (token + 1 < end):
            # Addresses are made here: from values known outside the loop they would take registers all along.
            following, there = opaque(token + 1), Place(*[opaque(value) for value in place])
            load_words(spec, params, following, there, starts_of(spec, params, there), inputs)
            if cutlass.const_expr(not spec.stores_meanwhile):
                rGates[0], rGates[1] = tokens.gates(spec, inputs, HeadGate(minus_decay, bias))
        if cutlass.const_expr(spec.writes_every_token):
            tokens.store_node(spec, params, write_slot, place, rState, seed)
        if cutlass.const_expr(spec.stores_meanwhile):
            if cutlass.const_expr(spec.use_gate and columns > 4):  # whose sums leave no registers for these either
                minus_decay = -cute.math.exp(params.A_log[opaque(place.head)])
                bias = params.dt_bias[opaque(place.head)]
            rGates[0], rGates[1] = tokens.gates(spec, inputs, HeadGate(minus_decay, bias))

    tokens.store_last(spec, params, block, live_count, write_slot, rState, seed)


@cute.jit
def starts_of(spec: Spec, params: RecurrentParams, place: Place):
    """Return the addresses of a thread's first elements of q, k and v of token 0."""
    vector = spec.tile.vector
    q = start_of(params.q, place.head // spec.q_group, place.lane * vector)
    k = start_of(params.k, place.head // spec.k_group, place.lane * vector)
    v = start_of(params.v, place.head // spec.v_group, place.v_start)
    return q, k, v


@cute.jit
def start_of(gX: cute.Tensor, head: Int32, within: Int32):
    """Return the address of a thread's first element of a head's row of token 0. It is computed here, not where it is used."""
    address = gX.iterator.toint() + (Int64(head) * gX.stride[1] + within) * (gX.element_type.width // 8)
    return run("mov.b64 {$w0}, {$r0};", address, gives=[Int64])


def row_of(gX: cute.Tensor, start: Any, token: Any) -> Any:
    """Return the address in a token's row that corresponds to `start` in the row of token 0."""
    return start + Int64(token) * gX.stride[0] * (gX.element_type.width // 8)


@cute.jit
def load_words(spec: Spec, params: RecurrentParams, token: Int32, place: Place, starts: Any, inputs: tokens.Inputs):
    """A token's gates, v, and q and k as words of two values."""
    tile, gmem = spec.tile, cute.AddressSpace.gmem
    width = cutlass.const_expr(tile.vector // 2)
    q_start, k_start, v_start = starts
    k_source = cute.make_ptr(Int32, row_of(params.k, k_start, token), gmem, assumed_align=4 * width)
    q_source = cute.make_ptr(Int32, row_of(params.q, q_start, token), gmem, assumed_align=4 * width)
    v_align = cutlass.const_expr(tile.v_per_thread * spec.dtype.width // 8)
    v_source = cute.make_ptr(spec.dtype, row_of(params.v, v_start, token), gmem, assumed_align=v_align)
    tokens.load_q_k(tile, place, ((k_source, inputs.k), (q_source, inputs.q)), width)
    tokens.load_v_and_gates(spec, params, token, place, v_source, inputs)


@cute.jit
def dot_products(spec: Spec, inputs: tokens.Inputs, rState: cute.Tensor, work: Work):
    """Compute the thread's parts of a token's dot products in work.sums, from words."""
    work.sums.fill(0.0)
    for word in cutlass.range_constexpr(spec.tile.k_per_thread // 2):
        q_values = unpack(spec.dtype, inputs.q[word])
        k_values = unpack(spec.dtype, inputs.k[word])
        for half in cutlass.range_constexpr(2):
            at, norms = cutlass.const_expr(2 * word + half), spec.problem.use_qk_l2norm
            add_products(spec.tile, rState, at, k_values[half], q_values[half], norms, work.sums)


@cute.jit
def move_on(spec: Spec, alpha: Float32, work: Work, rState: cute.Tensor):
    """Do `delta_rule.update` on words. k is unpacked once more, so that it takes half the registers in between."""
    for word in cutlass.range_constexpr(spec.tile.k_per_thread // 2):
        k_values = unpack_again(spec.dtype, work.k[word])
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(spec.tile.v_per_thread):
                at = cutlass.const_expr(spec.tile.at(r, 2 * word + half))
                rState[at] = alpha * rState[at] + work.u[r] * k_values[half]


def unpack_again(dtype: Any, word: Any) -> Any:
    """Unpack a word in other instructions than `unpack`: with the same ones the assembler would keep the first results."""
    if dtype is not cutlass.BFloat16:
        return unpack(dtype, word)
    code = "{prmt.b32 {$w0}, {$r0}, 0, 0x1044;\nprmt.b32 {$w1}, {$r0}, 0, 0x3244;}"
    return run(code, word, gives=[Float32] * 2)


@cute.jit
def slot_to_read(spec: Spec, params: RecurrentParams, sequence: Int32, thread: Int32):
    """Return the slot in a sequence's index row; null if the accepted count names no column. The lanes of a warp load the first
    columns while the accepted count is under way."""
    gIndices, has_accepted = params.state_indices, spec.problem.has_accepted
    if cutlass.const_expr(not spec.problem.write_every_token):
        return Int64(gIndices[sequence])
    columns = gIndices.shape[1]
    column = params.num_accepted_tokens[sequence] - 1 if cutlass.const_expr(has_accepted) else Int32(0)
    mine = thread % _LANES if cutlass.const_expr(has_accepted) else Int32(0)
    lane_slot = params.null_slot
    if mine < columns:
        lane_slot = Int64(gIndices[sequence, mine])
    slot = lane_slot
    if cutlass.const_expr(has_accepted):
        slot = cute.arch.shuffle_sync(lane_slot, cutlass.max(cutlass.min(column, _LANES - 1), 0))
        if column < 0:
            slot = params.null_slot
        if column >= _LANES:
            slot = params.null_slot
            if column < columns:
                slot = Int64(gIndices[sequence, column])
    return slot
