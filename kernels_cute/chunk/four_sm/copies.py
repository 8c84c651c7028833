"""The warps of a maker block of the wide chunk kernel that bring K and Q and make the gates.

The barriers and who waits for whom stand in `_chunk_wide`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from kernels_cute.chunk.four_sm.shape import KEY_BYTES, KEY_STAGES, MAKERS, ROUND, SETS
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK


class MakerCopies:
    """Methods of the copying warpgroup's warps; `self` is a WideBlock."""

    @cute.jit
    def copy_keys(self, atom, source, target, barrier, blocks):
        """K or Q; blocks: a bit for every rank that gets it."""
        cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=Int16(blocks))

    @cute.jit
    def maker_copy_warp(self, storage, copies, item):
        """K and Q of this block's chunks, for either set. K first: M is made from it, and takes longest."""
        begin, length, head, number = item.begin, item.live_length, item.head, item.piece
        to_q, from_q = self.tiles(storage.q, copies.q_atom, copies.q, self.dim, SETS, begin, head // self.q_group, 0)
        to_k, from_k = self.tiles(storage.k, copies.k_atom, copies.k, self.dim, SETS * KEY_STAGES, begin, head // self.k_group, 0)
        here = Int32(1) << (number + self.first_maker)
        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(number, num_chunks, MAKERS, unroll=1):
            group, turn = step // MAKERS % SETS, step // ROUND
            stage = group * KEY_STAGES + turn % KEY_STAGES
            full = storage.k_full.data_ptr() + stage
            cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + stage, turn // KEY_STAGES & 1 ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
            self.copy_keys(copies.k_atom, from_k[None, step], to_k[None, stage], full, here)
            full = storage.q_full.data_ptr() + group
            cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + group, turn & 1 ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
            self.copy_keys(copies.q_atom, from_q[None, step], to_q[None, group], full, here)
            if cutlass.const_expr(self.prefetch > 0):
                if step + ROUND < num_chunks:
                    cute.prefetch(copies.k_atom, from_k[None, step + ROUND])
                    cute.prefetch(copies.q_atom, from_q[None, step + ROUND])

    @cute.jit
    def maker_gate_warp(self, storage, params, item):
        """Cumulative log2 decays and beta of this block's chunks, for either set."""
        begin, length, head, number = item.begin, item.live_length, item.head, item.piece
        lane = cute.arch.lane_idx()
        words, log_rate, bias = self.ask_item(params, begin, number, length, head, lane)
        minus_rate = self.minus_rate(log_rate)
        for step in cutlass.range(number, (length + (CHUNK - 1)) // CHUNK, MAKERS, unroll=1):
            turn = step // ROUND
            half, half_turn = step // MAKERS % SETS * 2 + turn % 2, turn // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            values = self.make_gates(params, words, minus_rate, bias, length - step * CHUNK, lane)
            self.ask_gates(params, words, begin, (step + MAKERS) * CHUNK, length, head, lane)
            cute.arch.mbarrier_wait(storage.gates_free.data_ptr() + half, half_turn ^ 1)
            self.publish_gates(rows, values, lane)
            cute.arch.mbarrier_arrive(storage.gates_full.data_ptr() + half)
