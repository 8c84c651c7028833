"""The roles of a chain block of the wide chunk kernel: the state of 64 V columns, and the warps that bring K, Q, V and take O.

The maths, the barriers and who waits for whom stand in `_chunk_wide`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.four_sm.shape import CHAINS, KEY_BYTES, SLOTS
from kernels_cute.chunk.shape import CHUNK, STATE_KEY, STATE_QUERY, TILE_BYTES, VECTOR_BYTES, VECTORS
from kernels_cute.common import ptx


class ChainRoles:
    """Methods of a chain block's warps; `self` is a WideBlock."""

    @cute.jit
    def chain_warpgroup(self, storage, route, params, item, warp):
        begin, length, live_length, sequence = item.begin, item.length, item.live_length, item.sequence
        head, piece = item.head, item.piece
        lane = cute.arch.lane_idx()
        dim, stages = self.dim, self.stages
        by_key = self.product(CHUNK, True)
        by_token = self.product(dim, True, True)
        keys = self.right(by_key, storage.k, layouts.by_rows(self.dtype, CHUNK, dim, stages))
        queries = self.right(by_key, storage.q, layouts.by_rows(self.dtype, CHUNK, dim, stages))
        z_operand = self.right(by_token, storage.z, layouts.by_columns(self.dtype, CHUNK, dim, SLOTS))
        p_operand = self.right(by_key, storage.p, layouts.by_rows(self.dtype, CHUNK, CHUNK, SLOTS))

        state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
        state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), self.dtype)
        sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        outputs = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), self.dtype)
        state_words = cute.recast_tensor(state_operand, Int32)
        operand_words = cute.recast_tensor(operand, Int32)
        values = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # V of the chunk to come
        factors = cute.make_rmem_tensor(cute.make_layout(16), Float32)  # and its factors of K S

        row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
        pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
        column0 = piece * self.columns + warp * 16  # the warp's first V column
        # Of the chain that loads for both.
        k_empty = ptx.in_block(storage.k_empty.data_ptr().toint(), Int32(self.key_loader))
        q_empty = ptx.in_block(storage.q_empty.data_ptr().toint(), Int32(self.query_loader))
        self.load_state(params, state, item, head, column0 + row, pair)

        # Products are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor cores
        # work on a step while the next is made ready. Q S fills their pause before S, O is finished while the next U runs. One
        # U too many is issued: it reads whatever lies in shared memory and is dropped. Where the loop closes nothing is in
        # flight, else ptxas would serialise every product.
        num_chunks = (live_length + (CHUNK - 1)) // CHUNK
        if num_chunks > 0:
            cute.arch.mbarrier_wait(storage.k_full.data_ptr(), 0)
        self.issue_keys(by_key, sums, state, state_operand, state_words, keys, Int32(0))
        self.expect_chunk(storage, state, values, factors, Int32(0), num_chunks, warp, lane)
        warpgroup.wait_group(0)
        for step in cutlass.range(num_chunks, unroll=1):
            stage, following, slot = step % stages, (step + 1) % stages, step % SLOTS
            valid = cutlass.min(live_length - step * CHUNK, CHUNK)
            warpgroup.fence()
            self.multiply(by_key, outputs, state_operand, queries[None, None, None, stage], True)
            warpgroup.commit_group()
            if lane == 0:
                ptx.arrive_in_cluster(k_empty + stage * 8)

            # W and S
            for i in cutlass.range_constexpr(CHUNK // 16):
                for m in cutlass.range_constexpr(2):
                    n = 2 * i + m
                    for side in cutlass.range_constexpr(2):
                        value0, value1 = ptx.unpack(self.dtype, values[4 * i + 2 * m + side])
                        operand_words[2 * n + side] = ptx.pack(
                            self.dtype,
                            value0 - factors[2 * n] * sums[4 * n + 2 * side],
                            value1 - factors[2 * n + 1] * sums[4 * n + 2 * side + 1],
                        )
                if valid < 16 * (i + 1):
                    self.mask_words(operand_words, i, valid, pair)
                warpgroup.fence()
                self.multiply_step(by_token, state, operand, z_operand[None, None, None, slot], i, False)
                warpgroup.commit_group()

            # O
            to_query = self.load_factors(self.wide_vector(storage, slot, pair), STATE_QUERY)
            warpgroup.wait_group(CHUNK // 16)
            if lane == 0:
                ptx.arrive_in_cluster(q_empty + stage * 8)
            for n in cutlass.range_constexpr(CHUNK // 8):
                for side in cutlass.range_constexpr(2):
                    for odd in cutlass.range_constexpr(2):
                        outputs[4 * n + 2 * side + odd] = outputs[4 * n + 2 * side + odd] * to_query[n][odd]
            warpgroup.fence()
            self.multiply(by_key, outputs, operand, p_operand[None, None, None, slot], False)
            warpgroup.commit_group()
            if step + 1 < num_chunks:
                cute.arch.mbarrier_wait(storage.k_full.data_ptr() + following, (step + 1) // stages & 1)
            warpgroup.wait_group(1)
            self.issue_keys(by_key, sums, state, state_operand, state_words, keys, following)
            warpgroup.wait_group(dim // 16)
            if lane == 0:
                self.free_slot(route, slot)
            self.store_output(storage, outputs, stage, warp, lane)
            if cutlass.const_expr(self.has_checkpoints):
                # Before the state decays to the end of the next chunk.
                warpgroup.wait_group(0)
                if (step + 1) * CHUNK <= live_length:
                    done = begin - Int32(params.cu_seqlens[sequence]) + (step + 1) * CHUNK
                    self.store_checkpoints(params, state, sequence, head, done, column0 + row, pair)
            self.expect_chunk(storage, state, values, factors, step + 1, num_chunks, warp, lane)
            warpgroup.wait_group(0)

        self.store_state(params, state, item, column0 + row, pair)
        self.zero_rows(params.out, begin, length, live_length, head, piece * self.columns, warp, lane)
        sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
        end = Int32(params.cu_seqlens[sequences])
        self.zero_rows_beyond(params.out, end, sequences, sequence, head, piece * self.columns, warp, lane)

    @cute.jit
    def mask_words(self, words, i: cutlass.Constexpr, valid, pair):
        """Zero in columns from valid on of k step i: they come from rows of the next sequence and may be anything."""
        for m in cutlass.range_constexpr(2):
            column = 16 * i + 8 * m + 2 * pair
            for side in cutlass.range_constexpr(2):
                place = 4 * i + 2 * m + side
                if column + 1 >= valid:
                    word = words[place] & 0xFFFF
                    if column >= valid:
                        word = Int32(0)
                    words[place] = word

    @cute.jit
    def issue_keys(self, by_key, sums, state, operand, words, keys, stage):
        """U, while the state is being rounded. A group for every step: with one for all ptxas has each step counted all the same,
        and a wait that leaves one group in flight leaves one step."""
        for i in cutlass.range_constexpr(self.dim // 16):
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = ptx.pack(self.dtype, state[8 * i + 2 * j], state[8 * i + 2 * j + 1])
            warpgroup.fence()
            self.multiply_step(by_key, sums, operand, keys[None, None, None, stage], i, i == 0)
            warpgroup.commit_group()

    @cute.jit
    def expect_chunk(self, storage, state, values, factors, step, num_chunks, warp, lane):
        """What a chunk needs besides U: V, the factors of K S, S decayed to its last token, and that Q is there."""
        stage, slot = step % self.stages, step % SLOTS
        vector = self.wide_vector(storage, slot, lane % 4)
        if step < num_chunks:
            cute.arch.mbarrier_wait(storage.v_full.data_ptr() + stage, step // self.stages & 1)
        value_lane = self.value_lane(storage, stage, warp, lane)
        for i in cutlass.range_constexpr(CHUNK // 16):
            loaded = ptx.load_matrices(value_lane + i * 16 * layouts.ROW_BYTES, True)
            for j in cutlass.range_constexpr(4):
                values[4 * i + j] = loaded[j]
        last = Float32(1.0)
        if step < num_chunks:
            cute.arch.mbarrier_wait(storage.ready.data_ptr() + slot, step // SLOTS & 1)
            last = ptx.load_one(storage.vectors.data_ptr().toint() + slot * VECTOR_BYTES + VECTORS * CHUNK * 4)
        loaded = self.load_factors(vector, STATE_KEY)
        for n in cutlass.range_constexpr(CHUNK // 8):
            factors[2 * n], factors[2 * n + 1] = loaded[n][0], loaded[n][1]
        for i in cutlass.range_constexpr(self.dim // 2):
            state[i] = state[i] * last
        if step < num_chunks:
            cute.arch.mbarrier_wait(storage.q_full.data_ptr() + stage, step // self.stages & 1)

    @cute.jit
    def store_output(self, storage, outputs, stage, warp, lane):
        """O, turned on its way to shared memory, takes the place of the V that this warp has read."""
        value_lane = self.value_lane(storage, stage, warp, lane)
        for i in cutlass.range_constexpr(CHUNK // 16):
            words = [ptx.pack(self.dtype, outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]) for j in range(4)]
            ptx.store_matrices(value_lane + i * 16 * layouts.ROW_BYTES, words, True)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)

    def value_lane(self, storage: Any, stage: Any, warp: Any, lane: Any) -> Any:
        """Where a lane points when its warp's 16 columns of V or O are moved as matrices: it names row l % 8 of matrix l // 8,
        and matrices alternate between the warp's two halves of 8 columns."""
        tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
        return layouts.address(tile, lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2)

    def wide_vector(self, storage: Any, slot: Any, pair: Any) -> Any:
        return storage.vectors.data_ptr().toint() + slot * VECTOR_BYTES + pair * 8

    @cute.jit
    def chain_copy_warp(self, storage, copies, item):
        """K and Q: one chain loads for both, the other arms its own barriers."""
        begin, length, head, rank = item.begin, item.live_length, item.head, item.piece
        to_q, from_q = self.tiles(storage.q, copies.q_atom, copies.q, self.dim, self.stages, begin, head // self.q_group, 0)
        to_k, from_k = self.tiles(storage.k, copies.k_atom, copies.k, self.dim, self.stages, begin, head // self.k_group, 0)
        for step in cutlass.range((length + (CHUNK - 1)) // CHUNK, unroll=1):
            stage, parity = step % self.stages, step // self.stages & 1
            self.bring(copies.k_atom, from_k[None, step], to_k[None, stage], storage.k_full.data_ptr() + stage,
                       storage.k_empty.data_ptr() + stage, parity, rank, self.key_loader)  # fmt: skip
            self.bring(copies.q_atom, from_q[None, step], to_q[None, stage], storage.q_full.data_ptr() + stage,
                       storage.q_empty.data_ptr() + stage, parity, rank, self.query_loader)  # fmt: skip

    @cute.jit
    def bring(self, atom, source, target, full, empty, parity, rank, loader: cutlass.Constexpr):
        """Arms `full`, and loads where it is this block that does so. The other block's copy may come before `full` is armed: a
        phase does not end without its arrival."""
        if rank == loader:
            cute.arch.mbarrier_wait(empty, parity ^ 1)
        else:
            cute.arch.mbarrier_wait(full, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
        if rank == loader:
            self.copy_keys(atom, source, target, full, Int32((1 << CHAINS) - 1))

    @cute.jit
    def value_warp(self, storage, copies, out, item):
        """V in, and O out of the same places; once an O is read, the place takes another V."""
        begin, length, head, piece = item.begin, item.live_length, item.head, item.piece
        lane = cute.arch.lane_idx()
        v_head = head // self.v_group
        to_v, from_v = self.tiles(storage.v, copies.v_atom, copies.v, self.columns, self.stages, begin, v_head, piece)
        from_o, to_o = self.tiles(storage.v, copies.out_atom, copies.out, self.columns, self.stages, begin, head, piece)
        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(cutlass.min(num_chunks, self.stages), unroll=1):
            self.load_values(storage, copies.v_atom, from_v, to_v, step, num_chunks)
        for step in cutlass.range(num_chunks, unroll=1):
            stage = step % self.stages
            cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, step // self.stages & 1)
            # Here rather than in the warps that wrote O: they would wait for it.
            cute.arch.fence_proxy("async.shared", space="cta")
            valid = length - step * CHUNK
            if valid >= CHUNK:
                cute.copy(copies.out_atom, from_o[None, stage], to_o[None, step])
            else:
                tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
                column = piece * self.columns + lane % 8 * 8
                for row in cutlass.range(lane // 8, valid, 4, unroll=1):
                    offset = Int64(begin + step * CHUNK + row) * out.stride[0] + Int64(head) * out.stride[1] + column
                    words = ptx.load_words(layouts.address(tile, row, lane % 8))
                    ptx.store_global_words(out.iterator.toint() + 2 * offset, words)
            cute.arch.cp_async_bulk_commit_group()
            if step + self.stages < num_chunks:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.load_values(storage, copies.v_atom, from_v, to_v, step + self.stages, num_chunks)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_values(self, storage, v_atom, from_v, to_v, step, num_chunks):
        stage, full = step % self.stages, storage.v_full.data_ptr()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
        cute.copy(v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
        if cutlass.const_expr(self.prefetch > 0):
            if step + self.prefetch < num_chunks:
                cute.prefetch(v_atom, from_v[None, step + self.prefetch])
