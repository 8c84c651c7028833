"""The warps of a maker block of the four-SM form that bring K and Q and make the gates.

The barriers and who waits for whom: kernel.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from kernels_cute.chunk.arguments import partition_tiles
from kernels_cute.chunk.four_sm.shape import KEY_BYTES, MAKERS, ROUND, SET_KEY_STAGES, SETS
from kernels_cute.chunk.roles.gates import ask_gates, ask_item, make_gates, negative_rate, publish_gates
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK


@cute.jit
def copy_multicast(atom, source, target, barrier, blocks):
    """K or Q; blocks: a bit for every rank that gets it."""
    cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=Int16(blocks))


@cute.jit
def maker_copy_warp(spec, form, storage, copies, item):
    """K and Q of this block's chunks, for either set. K first: M is made from it, and takes longest."""
    begin, length, head, number = item.begin, item.live_length, item.head, item.piece
    q_head = head // spec.q_group
    to_q, from_q = partition_tiles(spec, storage.q, copies.q_atom, copies.q, spec.dim, SETS, begin, q_head, 0)
    to_k, from_k = partition_tiles(
        spec, storage.k, copies.k_atom, copies.k, spec.dim, SETS * SET_KEY_STAGES, begin, head // spec.k_group, 0
    )
    here = Int32(1) << (number + form.first_maker)
    num_chunks = (length + (CHUNK - 1)) // CHUNK
    for step in cutlass.range(number, num_chunks, MAKERS, unroll=1):
        group, turn = step // MAKERS % SETS, step // ROUND
        stage = group * SET_KEY_STAGES + turn % SET_KEY_STAGES
        full = storage.k_full.data_ptr() + stage
        cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + stage, turn // SET_KEY_STAGES & 1 ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
        copy_multicast(copies.k_atom, from_k[None, step], to_k[None, stage], full, here)
        full = storage.q_full.data_ptr() + group
        cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + group, turn & 1 ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
        copy_multicast(copies.q_atom, from_q[None, step], to_q[None, group], full, here)
        if cutlass.const_expr(spec.prefetch > 0):
            if step + ROUND < num_chunks:
                cute.prefetch(copies.k_atom, from_k[None, step + ROUND])
                cute.prefetch(copies.q_atom, from_q[None, step + ROUND])


@cute.jit
def maker_gate_warp(spec, storage, params, item):
    """Cumulative log2 decays and beta of this block's chunks, for either set."""
    begin, length, head, number = item.begin, item.live_length, item.head, item.piece
    lane = cute.arch.lane_idx()
    words, log_rate, bias = ask_item(spec, params, begin, number, length, head, lane)
    minus_rate = negative_rate(spec, log_rate)
    for step in cutlass.range(number, (length + (CHUNK - 1)) // CHUNK, MAKERS, unroll=1):
        turn = step // ROUND
        half, half_turn = step // MAKERS % SETS * 2 + turn % 2, turn // 2 & 1
        rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
        values = make_gates(spec, params, words, minus_rate, bias, length - step * CHUNK, lane)
        ask_gates(spec, params, words, begin, (step + MAKERS) * CHUNK, length, head, lane)
        cute.arch.mbarrier_wait(storage.gates_free.data_ptr() + half, half_turn ^ 1)
        publish_gates(rows, values, lane)
        cute.arch.mbarrier_arrive(storage.gates_full.data_ptr() + half)
