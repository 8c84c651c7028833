"""The recurrent kernel without a token ahead: for calls of at most one token a sequence, correct for any.

Nothing of the next token lies in registers while the current one is computed, so 64 values of the state fit a thread of 128
registers: 512 threads an SM hold 128 KiB of state. What the slot depends on is asked for at once; q, k, v, gates and the
state follow together: two dependent trips to memory, whatever the form of the call. The gates are computed while the state
is under way. A later token is loaded when the one before it is done.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.common.opaque import anew
from kernels_cute.common.ptx import unpack
from kernels_cute.common.rounding import mixed_seed

_LANES = 32  # of a warp


class InTurn:
    """Part of the recurrent kernel's class, whose attributes and methods it uses."""

    @cute.kernel
    def kernel_in_turn(
        self,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        gV: cute.Tensor,
        gG: cute.Tensor,
        gBeta: cute.Tensor,
        gALog: cute.Tensor,
        gBias: cute.Tensor,
        gPool: cute.Tensor,
        gIndices: cute.Tensor,
        gAccepted: cute.Tensor,
        gFinal: cute.Tensor,
        gFinalIndices: cute.Tensor,
        gOffsets: cute.Tensor,
        gParents: cute.Tensor,
        gSeed: cute.Tensor,
        gOut: cute.Tensor,
        scale: Float32,
        null_slot: Int64,
    ):
        rows, entries = cutlass.const_expr(self.rows), cutlass.const_expr(self.entries)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        num_sequences = gOffsets.shape[0] - 1
        sequence = block // (self.HS * self.v_tiles)
        head = block // self.v_tiles % self.HS
        lane, group = self.lane_and_group(thread)
        v_start = (block % self.v_tiles * self.groups + group) * rows

        # Everything that the slot depends on, at once, and what else needs nothing to be known.
        q_start = self.start_of(gQ, head // self.q_group, lane * self.vec)
        k_start = self.start_of(gK, head // self.k_group, lane * self.vec)
        v_part = self.start_of(gV, head // self.v_group, v_start)
        begin = Int32(gOffsets[sequence])
        count = Int32(gOffsets[sequence + 1]) - begin
        written_tokens = Int32(gOffsets[num_sequences])
        read_slot = Int64(sequence)
        if cutlass.const_expr(self.pooled):
            read_slot = self.slot_to_read(sequence, thread, null_slot, gIndices, gAccepted)
        write_slot = read_slot
        if cutlass.const_expr(self.write_pool and not self.every_token and self.has_final_indices):
            write_slot = Int64(gFinalIndices[sequence])
        seed = Int32(0)
        if cutlass.const_expr(self.rounds):
            seed = mixed_seed(gSeed)

        parts = self.shared_parts()
        rState = cute.make_rmem_tensor(rows * entries, Float32)
        rQ = cute.make_rmem_tensor(entries // 2, Int32)
        rK = cute.make_rmem_tensor(entries // 2, Int32)
        rVIn = cute.make_rmem_tensor(rows, self.dtype)
        rG = cute.make_rmem_tensor(1, self.gate_dtype)
        rBeta = cute.make_rmem_tensor(1, self.beta_dtype)
        rGates = cute.make_rmem_tensor(2, Float32)  # decay and beta of the current token
        rV = cute.make_rmem_tensor(rows, Float32)
        rSums = cute.make_rmem_tensor(self.num_sums, Float32)
        rU = cute.make_rmem_tensor(rows, Float32)
        rState.fill(0.0)
        rQ.fill(0)
        rK.fill(0)
        rVIn.fill(0.0)
        rG.fill(0.0)
        rBeta.fill(0.0)
        rGates.fill(0.0)
        minus_decay = Float32(0.0)
        bias = Float32(0.0)

        # A padding sequence has no slot: its rows become zero and nothing else happens.
        live_count = cutlass.max(count, 0)
        if cutlass.const_expr(self.pooled):
            if read_slot <= null_slot:
                live_count = Int32(0)
        if cutlass.const_expr(self.read_state and not self.pooled):
            self.load_state(read_slot, head, lane, v_start, gPool, rState)
        if live_count > 0:
            # One block of code from the loads to the gates: what another block uses waits for all that is under way.
            if cutlass.const_expr(self.use_gate):
                minus_decay = gALog[head]
                bias = gBias[head]
            self.load_words(begin, head, lane, v_start, q_start, k_start, v_part, gQ, gK, gV, gG, gBeta, rQ, rK, rVIn, rG, rBeta)
            if cutlass.const_expr(self.read_state and self.pooled):
                self.load_state(read_slot, head, lane, v_start, gPool, rState)
            if cutlass.const_expr(self.use_gate):
                minus_decay = -cute.math.exp(minus_decay)
            rGates[0], rGates[1] = self.gates(rG, rBeta, minus_decay, bias)

        zero = Float32(0.0)
        for t in cutlass.range(live_count, count, unroll=1):
            self.store_out(begin + t, head, lane, v_start, zero, gOut)
        # Rows beyond the last sequence are dealt to all blocks of the head.
        for t in cutlass.range(written_tokens + sequence, gOut.shape[0], num_sequences, unroll=1):
            self.store_out(t, head, lane, v_start, zero, gOut)

        for token in cutlass.range(begin, begin + live_count, unroll=1):
            if cutlass.const_expr(self.write_pool and self.every_token and not self.stores_meanwhile):
                write_slot = self.slot_to_write(sequence, token - begin, null_slot, gIndices, gFinalIndices)
            for r in cutlass.range_constexpr(rows):
                rV[r] = rVIn[r].to(Float32)
            self.dot_products(rQ, rK, rState, rSums)
            own = anew(lane)  # what follows from it is made here too, not kept in predicates
            o_value = self.combine(rGates[0], rGates[1], scale, own, rV, rSums, rU, parts, token % 2)
            self.store_out(token, head, own, v_start, o_value, gOut)
            if cutlass.const_expr(self.stores_meanwhile):
                # Not before the exchange of sums, which needs the registers, and from nothing that would have to be kept.
                at = anew(sequence)
                node = anew(token) - Int32(gOffsets[at])
                write_slot = self.slot_to_write(at, node, null_slot, gIndices, gFinalIndices)
            self.move_on(rGates[0], rU, rK, rState)
            if token + 1 < begin + live_count:
                # Addresses are made here: from values known outside the loop they would take registers all along.
                self.load_later(
                    anew(token + 1), anew(head), anew(lane), anew(v_start), gQ, gK, gV, gG, gBeta, rQ, rK, rVIn, rG, rBeta
                )  # fmt: skip
                if cutlass.const_expr(not self.stores_meanwhile):
                    rGates[0], rGates[1] = self.gates(rG, rBeta, minus_decay, bias)
            if cutlass.const_expr(self.write_pool and self.every_token):
                if write_slot > null_slot:
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState, seed)
            if cutlass.const_expr(self.stores_meanwhile):
                if cutlass.const_expr(self.use_gate and rows > 4):  # whose sums leave no registers for these either
                    minus_decay = -cute.math.exp(gALog[anew(head)])
                    bias = gBias[anew(head)]
                rGates[0], rGates[1] = self.gates(rG, rBeta, minus_decay, bias)

        if cutlass.const_expr(not self.stores_after_loop):
            # With nothing live after the loop, its branch back is compiled in a form from which ptxas peels an iteration:
            # twice the code, and spills.
            cute.arch.inline_ptx("// {$r0} is used", read_only_args=[rState[0]])
        if cutlass.const_expr(self.write_pool and not self.every_token):
            if live_count > 0:
                if write_slot > null_slot:
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState, seed)
        if cutlass.const_expr(self.write_new):
            # Without a pool an empty sequence passes its state on.
            self.store_state(Int64(sequence), head, lane, v_start, self.new_width, gFinal, rState, seed)

    @property
    def stores_meanwhile(self) -> bool:
        """K first, whether a token's state leaves while the inputs of the next one are under way, for which the gates wait."""
        return not self.v_first and self.write_pool and self.every_token

    @cute.jit
    def start_of(self, gX: cute.Tensor, head: Int32, within: Int32):
        """Address of a thread's first element of a head's row of token 0, computed here and not where it is used."""
        address = gX.iterator.toint() + (Int64(head) * gX.stride[1] + within) * (gX.element_type.width // 8)
        return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[address])

    @cute.jit
    def load_later(
        self, token: Int32, head: Int32, lane: Int32, v_start: Int32, gQ, gK, gV, gG, gBeta, rQ, rK, rV, rG, rBeta
    ):  # fmt: skip
        q_start = self.start_of(gQ, head // self.q_group, lane * self.vec)
        k_start = self.start_of(gK, head // self.k_group, lane * self.vec)
        v_part = self.start_of(gV, head // self.v_group, v_start)
        self.load_words(token, head, lane, v_start, q_start, k_start, v_part, gQ, gK, gV, gG, gBeta, rQ, rK, rV, rG, rBeta)

    @cute.jit
    def load_words(
        self, token: Int32, head: Int32, lane: Int32, v_start: Int32, q_start: Int64, k_start: Int64, v_part: Int64, gQ, gK, gV,
        gG, gBeta, rQ, rK, rV, rG, rBeta,
    ):  # fmt: skip
        """A token's gates, v, and q and k as words of two values."""
        width = cutlass.const_expr(self.vec // 2)
        k_source = cute.make_ptr(Int32, self.row_of(gK, k_start, token), cute.AddressSpace.gmem, assumed_align=4 * width)
        q_source = cute.make_ptr(Int32, self.row_of(gQ, q_start, token), cute.AddressSpace.gmem, assumed_align=4 * width)
        v_align = cutlass.const_expr(self.rows * self.dtype.width // 8)
        v_source = cute.make_ptr(self.dtype, self.row_of(gV, v_part, token), cute.AddressSpace.gmem, assumed_align=v_align)
        for c in cutlass.range_constexpr(self.chunks):
            step = cutlass.const_expr(c * self.lanes * width)
            if cutlass.const_expr(self.mask_k):
                if 2 * step + lane * self.vec < self.K:
                    self.load(k_source + step, width, False, rK, c * width)
                    self.load(q_source + step, width, False, rQ, c * width)
            else:
                self.load(k_source + step, width, False, rK, c * width)
                self.load(q_source + step, width, False, rQ, c * width)
        if cutlass.const_expr(self.mask_v):
            if v_start < self.V:
                self.load(v_source, self.rows, False, rV, 0)
        else:
            self.load(v_source, self.rows, False, rV, 0)
        if cutlass.const_expr(self.has_gate):
            rG[0] = gG[token, head]
        if cutlass.const_expr(self.has_beta):
            rBeta[0] = gBeta[token, head]

    def row_of(self, gX: cute.Tensor, start: Any, token: Any) -> Any:
        """`start` of a token."""
        return start + Int64(token) * gX.stride[0] * (gX.element_type.width // 8)

    @cute.jit
    def dot_products(self, rQ: cute.Tensor, rK: cute.Tensor, rState: cute.Tensor, rSums: cute.Tensor):
        """`products` of words."""
        rows = cutlass.const_expr(self.rows)
        rSums.fill(0.0)
        for word in cutlass.range_constexpr(self.entries // 2):
            q_values = unpack(self.dtype, rQ[word])
            k_values = unpack(self.dtype, rK[word])
            for half in cutlass.range_constexpr(2):
                q_value = q_values[half]
                k_value = k_values[half]
                rSums[2 * rows] += q_value * k_value
                if cutlass.const_expr(self.use_l2norm):
                    rSums[2 * rows + 1] += k_value * k_value
                    rSums[2 * rows + 2] += q_value * q_value
                for r in cutlass.range_constexpr(rows):
                    s_value = rState[self.at(r, 2 * word + half)]
                    rSums[2 * r] += s_value * k_value
                    rSums[2 * r + 1] += s_value * q_value

    @cute.jit
    def move_on(self, alpha: Float32, rU: cute.Tensor, rK: cute.Tensor, rState: cute.Tensor):
        """`update` of words: k is unpacked once more, so that it takes half the registers in between."""
        for word in cutlass.range_constexpr(self.entries // 2):
            k_values = self.unpack_anew(rK[word])
            for half in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(self.rows):
                    at = cutlass.const_expr(self.at(r, 2 * word + half))
                    rState[at] = alpha * rState[at] + rU[r] * k_values[half]

    def unpack_anew(self, word: Any) -> Any:
        """`unpack` in other instructions: of the same ones the assembler would keep the results."""
        if self.dtype is not cutlass.BFloat16:
            return unpack(self.dtype, word)
        code = "{prmt.b32 {$w0}, {$r0}, 0, 0x1044;\nprmt.b32 {$w1}, {$r0}, 0, 0x3244;}"
        return cute.arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[word])

    @cute.jit
    def slot_to_read(self, sequence: Int32, thread: Int32, null_slot: Int64, gIndices: cute.Tensor, gAccepted: cute.Tensor):
        """Of a sequence's index row, of which the lanes of a warp load the first columns while the accepted count is under way;
        null where that is no column of it."""
        if cutlass.const_expr(not self.every_token):
            return Int64(gIndices[sequence])
        columns = gIndices.shape[1]
        column = Int32(0)
        if cutlass.const_expr(self.has_accepted):
            column = gAccepted[sequence] - 1
        mine = Int32(0)
        if cutlass.const_expr(self.has_accepted):
            mine = thread % _LANES
        lane_slot = null_slot
        if mine < columns:
            lane_slot = Int64(gIndices[sequence, mine])
        slot = lane_slot
        if cutlass.const_expr(self.has_accepted):
            slot = cute.arch.shuffle_sync(lane_slot, cutlass.max(cutlass.min(column, _LANES - 1), 0))
            if column < 0:
                slot = null_slot
            if column >= _LANES:
                slot = null_slot
                if column < columns:
                    slot = Int64(gIndices[sequence, column])
        return slot
