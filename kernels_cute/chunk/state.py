"""The state role of the fused chunk kernel: one warpgroup carries S^T of 64 V columns through a sequence.

The maths, the barriers and who waits for whom stand in `_chunk_fused`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.shape import (
    BUFFERS,
    CHUNK,
    KEY_TO_LAST,
    STATE_BARRIER,
    STATE_KEY,
    STATE_QUERY,
    VECTOR_BYTES,
    VECTORS,
    WARPGROUP,
)
from kernels_cute.common import ptx


class StateRole:
    """Methods of the state warpgroup; `self` is the FusedChunk."""

    @cute.jit
    def state_warpgroup(self, storage, params, head, piece, warp, segment, only):
        lane = cute.arch.lane_idx()
        dim = self.dim
        by_key = self.product(CHUNK, True)
        by_token = self.product(dim, True, True)
        keys = self.right(by_key, storage.k, layouts.by_rows(self.dtype, CHUNK, dim, self.key_stages))
        queries = self.right(by_key, storage.q, layouts.by_rows(self.dtype, CHUNK, dim, self.stages))
        token_layout = layouts.by_columns(self.dtype, CHUNK, dim, self.key_stages)
        tokens = self.right(by_token, storage.k, token_layout)
        m_operand = self.right(by_key, storage.m, layouts.by_rows(self.dtype, CHUNK, CHUNK, BUFFERS))
        p_operand = self.right(by_key, storage.p, layouts.by_rows(self.dtype, CHUNK, CHUNK, BUFFERS))

        state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
        state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), self.dtype)
        sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        outputs = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), self.dtype)
        decayed = cute.make_rmem_tensor(by_token.partition_shape_A((64, CHUNK)), self.dtype)
        state_words = cute.recast_tensor(state_operand, Int32)
        operand_words = cute.recast_tensor(operand, Int32)
        decayed_words = cute.recast_tensor(decayed, Int32)

        row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
        pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
        column0 = warp * 16  # the warp's first V column of the block's
        full, keys_full = storage.full.data_ptr(), storage.keys_full.data_ptr()
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        vectors = storage.vectors.data_ptr().toint() + pair * 8
        # Lane l names row l % 8 of matrix l // 8; matrices alternate between the warp's two halves of 8 columns.
        matrix_row = lane % 8 + lane // 16 * 8
        value_lane = layouts.address(storage.v.data_ptr().toint(), matrix_row, warp * 2 + lane // 8 % 2)
        if cutlass.const_expr(segment is None):
            fetched = cute.make_rmem_tensor(state.layout, Float32)
            first_item = only
            if cutlass.const_expr(only is None):
                first_item = self.read_record(storage, Int32(0))
            self.fetch_item(params.initial_state, fetched, first_item, column0 + row, pair)
            self.settle_state(params.initial_state, fetched, state, pair)
        else:
            self.start_of_segment(storage, params, state, head, segment, piece, warp, lane)
        sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
        end = Int32(0)  # of all sequences
        if cutlass.const_expr(only is None):
            # Once for all items; with one it is read when needed, or registers do not suffice.
            end = Int32(params.cu_seqlens[sequences])

        # Products but M's are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor
        # cores work on a step while the next is made ready. Q S has no hurry and fills their pauses, half before M and half
        # after; U of the next chunk goes ahead of this one's output. Where the loop closes nothing is in flight, else ptxas
        # would serialise every product.
        number, base, going = Int32(0), Int32(0), Boolean(True)
        while going:
            item = only
            if cutlass.const_expr(only is None):
                item = self.read_record(storage, number)
            num_chunks = self.num_chunks(item.live_length)
            first_column = item.piece * self.columns  # of the warpgroup
            row0 = item.piece * self.columns + column0 + row  # of this lane
            first_stage, first_parity = self.key_stage_of(base)
            if num_chunks > 0:
                cute.arch.mbarrier_wait(keys_full + first_stage, first_parity)
            self.issue_keys(by_key, sums, state, state_operand, state_words, keys, first_stage, False)
            warpgroup.wait_group(0)
            for step in cutlass.range(num_chunks, unroll=1):
                count = base + step
                stage, parity = self.stage_of(count)
                key_stage, _ = self.key_stage_of(count)
                following, following_parity = self.key_stage_of(count + 1)
                buffer, turn = count & 1, count >> 1 & 1
                valid = cutlass.min(item.live_length - step * CHUNK, CHUNK)
                vector = vectors + buffer * VECTOR_BYTES
                half_steps = dim // 32
                # What the next steps need is asked for before the products that keep this warp waiting are issued.
                cute.arch.mbarrier_wait(full + stage, parity)
                values = [
                    ptx.load_matrices(value_lane + stage * self.value_bytes + i * 16 * layouts.ROW_BYTES, True) for i in range(4)
                ]
                warpgroup.fence()
                for i in cutlass.range_constexpr(half_steps):
                    self.multiply_step(by_key, outputs, state_operand, queries[None, None, None, stage], i, i == 0)
                warpgroup.commit_group()
                cute.arch.mbarrier_wait(ready + buffer, turn)
                factors = self.load_factors(vector, STATE_KEY)

                # W and M; W itself is what the product adds to
                for i in cutlass.range_constexpr(CHUNK // 16):
                    for m in cutlass.range_constexpr(2):
                        n = 2 * i + m
                        for side in cutlass.range_constexpr(2):
                            value0, value1 = ptx.unpack(self.dtype, values[i][2 * m + side])
                            place = 4 * n + 2 * side
                            sums[place] = value0 - factors[n][0] * sums[place]
                            sums[place + 1] = value1 - factors[n][1] * sums[place + 1]
                if valid < CHUNK:
                    self.mask_sums(sums, valid, pair)
                for i in cutlass.range_constexpr(CHUNK // 16):
                    for j in cutlass.range_constexpr(4):
                        operand_words[4 * i + j] = ptx.pack(self.dtype, sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1])
                warpgroup.fence()
                self.multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
                warpgroup.commit_group()
                for i in cutlass.range_constexpr(half_steps, 2 * half_steps):
                    self.multiply_step(by_key, outputs, state_operand, queries[None, None, None, stage], i, False)
                warpgroup.commit_group()
                last = ptx.load_one(vector + VECTORS * CHUNK * 4 - pair * 8)
                if cutlass.const_expr(self.paired):
                    if valid < CHUNK:
                        # The block whose turn it was has done this for its own tile alone.
                        self.zero_keys(storage.k.data_ptr().toint() + key_stage * self.key_bytes, valid, warp * 32 + lane)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.barrier(barrier_id=STATE_BARRIER, number_of_threads=WARPGROUP)
                factors = self.load_factors(vector, KEY_TO_LAST)
                for i in cutlass.range_constexpr(dim // 2):
                    state[i] = state[i] * last
                warpgroup.wait_group(1)

                # S
                for i in cutlass.range_constexpr(CHUNK // 16):
                    for m in cutlass.range_constexpr(2):
                        n = 2 * i + m
                        for side in cutlass.range_constexpr(2):
                            place = 4 * n + 2 * side
                            decayed_words[2 * n + side] = ptx.pack(
                                self.dtype, sums[place] * factors[n][0], sums[place + 1] * factors[n][1]
                            )
                    warpgroup.fence()
                    self.multiply_step(by_token, state, decayed, tokens[None, None, None, key_stage], i, False)
                warpgroup.commit_group()

                # O
                factors = self.load_factors(vector, STATE_QUERY)
                for i in cutlass.range_constexpr(CHUNK // 4):
                    operand_words[i] = ptx.pack(self.dtype, sums[2 * i], sums[2 * i + 1])
                warpgroup.wait_group(1)
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for side in cutlass.range_constexpr(2):
                        for odd in cutlass.range_constexpr(2):
                            outputs[4 * n + 2 * side + odd] = outputs[4 * n + 2 * side + odd] * factors[n][odd]
                warpgroup.fence()
                for i in cutlass.range_constexpr(CHUNK // 16):
                    self.multiply_step(by_key, outputs, operand, p_operand[None, None, None, buffer], i, False)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if lane == 0:
                    cute.arch.mbarrier_arrive(storage.keys_empty.data_ptr() + key_stage)
                if step + 1 < num_chunks:
                    cute.arch.mbarrier_wait(keys_full + following, following_parity)
                    self.issue_keys(by_key, sums, state, state_operand, state_words, keys, following)
                    warpgroup.wait_group(1)
                else:
                    warpgroup.wait_group(0)
                # O, turned on its way to shared memory, takes the place of the V that this warp has read.
                for i in cutlass.range_constexpr(CHUNK // 16):
                    words = [ptx.pack(self.dtype, outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]) for j in range(4)]
                    ptx.store_matrices(value_lane + (stage * self.value_bytes + i * 16 * layouts.ROW_BYTES), words, True)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)
                    if cutlass.const_expr(self.paired):
                        ptx.arrive_in_cluster(ptx.in_block(storage.taken.data_ptr().toint() + buffer * 8, buffer))
                    else:
                        cute.arch.mbarrier_arrive(taken + buffer)
                warpgroup.wait_group(0)
                if cutlass.const_expr(self.has_checkpoints):
                    if (step + 1) * CHUNK <= item.live_length:
                        done = self.tokens_before(item, segment, params.cu_seqlens) + (step + 1) * CHUNK
                        self.store_checkpoints(params, state, item.sequence, item.head, done, row0, pair)

            if cutlass.const_expr(only is None):
                # The next item's state is on its way while this one's goes.
                next_item = self.read_record(storage, number + 1)
                going = next_item.sequence >= 0
                self.fetch_item(params.initial_state, fetched, next_item, column0 + row, pair)
                self.store_state(params, state, item, row0, pair)
                self.zero_rows(params.out, item.begin, item.length, item.live_length, item.head, first_column, warp, lane)
                self.zero_rows_beyond(params.out, end, sequences, item.sequence, item.head, first_column, warp, lane)
                self.note_record(storage, number)
                self.settle_state(params.initial_state, fetched, state, pair)
            else:
                going = Boolean(False)
                is_first, is_last = Boolean(True), Boolean(True)
                if cutlass.const_expr(segment is not None):
                    is_first, is_last = segment.index == 0, segment.index == segment.count - 1
                if is_last:
                    self.store_state(params, state, item, row0, pair)
                self.zero_rows(params.out, item.begin, item.length, item.live_length, item.head, first_column, warp, lane)
                if is_first:
                    end = Int32(params.cu_seqlens[sequences])
                    self.zero_rows_beyond(params.out, end, sequences, item.sequence, item.head, first_column, warp, lane)
            number, base = number + 1, base + num_chunks

    def load_factors(self, vector: Any, kind: int) -> list[Any]:
        """A row of vectors, as pairs for the columns of this lane."""
        return [ptx.load_pair(vector + kind * CHUNK * 4 + n * 32) for n in range(CHUNK // 8)]

    @cute.jit
    def issue_keys(self, by_key, sums, state, operand, words, keys, stage, by_steps: cutlass.Constexpr = True):
        """U, by steps while the state is being rounded."""
        if cutlass.const_expr(not by_steps):
            for i in cutlass.range_constexpr(self.dim // 4):
                words[i] = ptx.pack(self.dtype, state[2 * i], state[2 * i + 1])
            warpgroup.fence()
        for i in cutlass.range_constexpr(self.dim // 16):
            if cutlass.const_expr(by_steps):
                for j in cutlass.range_constexpr(4):
                    words[4 * i + j] = ptx.pack(self.dtype, state[8 * i + 2 * j], state[8 * i + 2 * j + 1])
                warpgroup.fence()
            self.multiply_step(by_key, sums, operand, keys[None, None, None, stage], i, i == 0)
        warpgroup.commit_group()

    @cute.jit
    def mask_sums(self, sums, valid, pair):
        """Zero in columns from valid on: they come from rows of the next sequence and may be anything."""
        for n in cutlass.range_constexpr(CHUNK // 8):
            for odd in cutlass.range_constexpr(2):
                if 8 * n + 2 * pair + odd >= valid:
                    for side in cutlass.range_constexpr(2):
                        sums[4 * n + 2 * side + odd] = Float32(0.0)

    @cute.jit
    def right(self, mma, field, layout):
        """A shared-memory B operand, (MMA, columns, k steps, *outer)."""
        thread = mma.get_slice(0)
        return mma.make_fragment_B(thread.partition_B(field.get_tensor(layout.outer, swizzle=layout.inner)))

    @cute.jit
    def starts_from_initial(self, has_initial_state, sequence, live_length):
        """Whether a sequence starts from its initial state, not from zero."""
        starts = Boolean(self.has_initial)
        if cutlass.const_expr(self.has_initial):
            if cutlass.const_expr(self.pooled):
                starts = live_length > 0
            if cutlass.const_expr(self.has_mask):
                starts = starts & Boolean(has_initial_state[sequence])
        return starts

    @cute.jit
    def load_state(self, params, state, owner, head, row0, pair):
        """owner: the work tile or segment whose sequence the state belongs to."""
        starts = self.starts_from_initial(params.has_initial_state, owner.sequence, owner.live_length)
        self.fetch_state(params.initial_state, state, starts, owner.read_slot, head, row0, pair)
        self.settle_state(params.initial_state, state, state, pair)

    @cute.jit
    def fetch_item(self, initial_state, fetched, item, block_row, pair):
        """fetch_state of an item; block_row: the lane's first V row among the block's."""
        row0 = item.piece * self.columns + block_row
        self.fetch_state(initial_state, fetched, item.starts, item.read_slot, item.head, row0, pair)

    @cute.jit
    def fetch_state(self, initial_state, fetched, starts, read_slot, head, row0, pair):
        """Asks for a lane's entries of a state, in the order of memory; settle_state makes the state of it."""
        fetched.fill(0.0)
        if cutlass.const_expr(self.has_initial):
            if starts:
                if cutlass.const_expr(self.is_wide(initial_state)):
                    source = self.wide_address(initial_state, read_slot, head, row0, pair)
                    for place in cutlass.range_constexpr(self.dim // 8):
                        values = ptx.load_global_four(source + self.wide_offset(place))
                        for i in cutlass.range_constexpr(4):
                            fetched[4 * place + i] = values[i]
                else:
                    source = self.state_pointer(initial_state, read_slot, head, row0, pair)
                    for n in cutlass.range_constexpr(self.dim // 8):
                        for side in cutlass.range_constexpr(2):
                            entries = self.state_pair(source, n, side)
                            fetched[4 * n + 2 * side] = entries[0].to(Float32)
                            fetched[4 * n + 2 * side + 1] = entries[1].to(Float32)

    @cute.jit
    def settle_state(self, initial_state, fetched, state, pair):
        """The accumulators of what fetch_state asked for. May be the same registers."""
        if cutlass.const_expr(self.has_initial and self.is_wide(initial_state)):
            is_odd = pair % 2 == 1
            for n in cutlass.range_constexpr(0, self.dim // 8, 2):
                own = [fetched[4 * n + i] for i in range(8)]
                for side in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        low, high = own[4 * side + i], own[4 * side + 2 + i]
                        other = cute.arch.shuffle_sync_bfly(self.where(is_odd, low, high), 1)
                        state[4 * n + 2 * side + i] = self.where(is_odd, other, low)
                        state[4 * (n + 1) + 2 * side + i] = self.where(is_odd, high, other)
        else:
            for i in cutlass.range_constexpr(self.dim // 2):
                state[i] = fetched[i]

    @cute.jit
    def store_state(self, params, state, item, row0, pair):
        if cutlass.const_expr(self.has_final):
            written = cutlass.Boolean(True)
            write_slot = item.read_slot
            if cutlass.const_expr(self.pooled):
                written = item.live_length > 0
            if cutlass.const_expr(self.has_final_indices):
                if written:
                    write_slot = Int64(params.final_state_indices[item.sequence])
                    written = write_slot > params.null_slot
            if written:
                self.write_state(params.final_state, write_slot, state, item.head, row0, pair)

    @cute.jit
    def store_checkpoints(self, params, state, sequence, head, done, row0, pair):
        """The state after `done` tokens of the sequence, to every slot that asks for it."""
        for column in cutlass.range(cute.size(params.checkpoint_offsets, mode=[1]), unroll=1):
            if Int32(params.checkpoint_offsets[sequence, column]) == done:
                slot = Int64(params.checkpoint_slots[sequence, column])
                if slot > params.null_slot:
                    self.write_state(params.final_state, slot, state, head, row0, pair)

    def tokens_before(self, item: Any, segment: Any, cu_seqlens: Any) -> Any:
        """Tokens of the sequence in front of an item. A segment knows them: the address of its sequence's offset, kept from where
        the segment was looked up, would be two registers too many."""
        return item.begin - Int32(cu_seqlens[item.sequence]) if segment is None else segment.before

    @cute.jit
    def write_state(self, final_state, slot, state, head, row0, pair):
        if cutlass.const_expr(self.is_wide(final_state)):
            target = self.wide_address(final_state, slot, head, row0, pair)
            is_odd = pair % 2 == 1
            for n in cutlass.range_constexpr(0, self.dim // 8, 2):
                for side in cutlass.range_constexpr(2):
                    values = [None] * 4
                    for i in cutlass.range_constexpr(2):
                        first, second = state[4 * n + 2 * side + i], state[4 * (n + 1) + 2 * side + i]
                        other = cute.arch.shuffle_sync_bfly(self.where(is_odd, first, second), 1)
                        values[i] = self.where(is_odd, other, first)
                        values[2 + i] = self.where(is_odd, second, other)
                    ptx.store_global_four(target + self.wide_offset(n + side), values)
        else:
            target = self.state_pointer(final_state, slot, head, row0, pair)
            for n in cutlass.range_constexpr(self.dim // 8):
                for side in cutlass.range_constexpr(2):
                    entries = self.state_pair(target, n, side)
                    entries[0] = state[4 * n + 2 * side].to(final_state.element_type)
                    entries[1] = state[4 * n + 2 * side + 1].to(final_state.element_type)

    # Where K is contiguous and entries are float32, two neighbouring lanes swap halves, so that each has 16 bytes in a row:
    # of 16 K columns the even lanes have the first 8, the odd ones the last 8. It takes a quarter of the accesses.
    def is_wide(self, states: Any) -> bool:
        return self.v_first and states.element_type is Float32

    @cute.jit
    def wide_address(self, states, slot, head, row0, pair):
        """Of a lane's first four."""
        offset = slot * states.stride[0] + Int64(head) * (self.dim * self.dim)
        offset += Int64(row0) * self.dim + pair % 2 * 8 + pair // 2 * 4
        return states.iterator.toint() + offset * 4

    def wide_offset(self, place: int) -> int:
        """Bytes to a lane's four number `place`: 16 K columns and 8 V rows take turns."""
        return place // 2 * 64 + place % 2 * 8 * self.dim * 4

    @cute.jit
    def state_pointer(self, states, slot, head, row0, pair):
        """A lane's first entry of a head's state: V row row0, K column 2 * pair."""
        offset = slot * states.stride[0] + Int64(head) * (self.dim * self.dim)
        if cutlass.const_expr(self.v_first):
            offset += Int64(row0) * self.dim + 2 * pair
        else:
            offset += Int64(pair) * (2 * self.dim) + row0
        return states.iterator + offset

    def state_pair(self, first, n: int, side: int) -> Any:
        """Two neighbouring K entries, 8 n K columns and 8 * side V rows after the lane's first."""
        if self.v_first:
            return cute.make_tensor(first + (8 * side * self.dim + 8 * n), cute.make_layout(2))
        return cute.make_tensor(first + (8 * n * self.dim + 8 * side), cute.make_layout(2, stride=self.dim))
