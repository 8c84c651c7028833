"""The math warpgroups of the ragged logits kernel with two sets of accumulators each, one for each half of the columns.

A warpgroup sums the first half over heads while the tensor cores are at its second one, so that only the second half's sums,
half an epilogue, must fit into the other warpgroup's turn. With one set of accumulators a whole epilogue must, and from 32
heads down it does not. The price is N = 128 a product in place of 256: keys are read from shared memory twice.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.mqa_logits import layouts

KEY_ROWS, WARPGROUP, TURN_BARRIER = 64, 128, 2  # as in _logits_ragged


class OverlappedMath:
    """Methods of RaggedLogits."""

    @cute.jit
    def overlapped_warpgroup(self, storage, k_scale, out, scale, mma, half, warp):
        lane = cute.arch.lane_idx()
        slots = self.queries * self.query_stages
        query_layout = layouts.operand_layout(self.dtype, self.columns, self.head_dim, 2 * self.query_stages)
        key_layout = layouts.operand_layout(self.dtype, KEY_ROWS, self.head_dim, self.key_stages)
        s_queries = storage.queries.get_tensor(query_layout.outer, swizzle=query_layout.inner)
        by_half = cute.local_tile(s_queries, (self.columns // 2, self.head_dim), (None, 0, None))
        s_keys = storage.keys.get_tensor(key_layout.outer, swizzle=key_layout.inner)
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_weights = storage.weights.get_tensor(cute.make_layout(slots * self.num_heads))
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        keys_full, keys_free = storage.keys_full.data_ptr(), storage.keys_free.data_ptr()

        thread_mma = mma.get_slice(0)
        operands = (
            mma.make_fragment_A(thread_mma.partition_A(s_keys)),
            mma.make_fragment_B(thread_mma.partition_B(by_half)),
        )
        shape = thread_mma.partition_shape_C((KEY_ROWS, self.columns // 2))
        first, second = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        held = cute.make_rmem_tensor(cute.make_layout(self.columns // 4), Float32)  # weights of this lane's queries
        parts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)  # sums of a query

        key_lane = 16 * warp + lane // 4  # this lane's first key row in a tile; its second is 8 further
        query_lane = half * self.queries_per_warpgroup + lane % 4

        if half == 1:
            self.pass_turn(0)

        stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(queries_full + stage, parity)
        row0 = s_items[4 * stage]
        while row0 >= 0:
            tile_first, tile_end = s_items[4 * stage + 1], s_items[4 * stage + 2]
            slot = stage * self.queries + query_lane
            place = self.place(storage, out, row0, stage, half)
            if cutlass.const_expr(self.has_weights):
                for group in cutlass.range_constexpr(self.groups):
                    for head in cutlass.range_constexpr(self.num_heads):
                        held[group * self.num_heads + head] = s_weights[(slot + 4 * group) * self.num_heads + head]
            for tile in cutlass.range(tile_first, tile_end, unroll=1):
                key = tile * KEY_ROWS + key_lane
                factor = self.key_factors(k_scale, key)
                cute.arch.mbarrier_wait(keys_full + key_stage, key_parity)
                cute.arch.barrier(barrier_id=TURN_BARRIER + half, number_of_threads=2 * WARPGROUP)
                warpgroup.fence()
                self.issue(first, operands, 0, key_stage, stage * 2 + half)
                self.issue(second, operands, 1, key_stage, stage * 2 + half)
                # While the second half is still on its way the other warpgroup may queue its own behind it.
                if cutlass.const_expr(self.pass_turn_at_issue):
                    self.pass_turn(1 - half)
                warpgroup.wait_group(1)
                if cutlass.const_expr(not self.pass_turn_at_issue):
                    self.pass_turn(1 - half)
                self.begin(place, half)
                self.half_sums(storage, out, first, held, 0, parts, factor, scale, place, stage, tile, warp)
                warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(keys_free + key_stage)
                key_stage, key_parity = self.advance(key_stage, key_parity, self.key_stages)
                self.half_sums(storage, out, second, held, 1, parts, factor, scale, place, stage, tile, warp)
                self.finish(storage, out, place, stage, tile, half, warp)
            self.leave(place)
            cute.arch.sync_warp()  # the other lanes' reads of ranges and weights come before the release
            if lane == 0:
                cute.arch.mbarrier_arrive(queries_free + stage)
            stage, parity = self.advance(stage, parity, self.query_stages)
            cute.arch.mbarrier_wait(queries_full + stage, parity)
            row0 = s_items[4 * stage]
        if half == 0:
            cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def issue(self, products, operands, column_half: cutlass.Constexpr, key_stage, query_stage):
        """Queues the products of one half of the columns, as one group."""
        keys, queries = operands
        mma = cute.make_tiled_mma(self._mma_op(self.columns // 2))  # of its own: `set` makes it a value of this place
        for step in cutlass.range_constexpr(self.k_steps):
            mma.set(warpgroup.Field.ACCUMULATE, step != 0)
            cute.gemm(
                mma,
                products,
                keys[None, None, step, key_stage],
                queries[None, None, step, column_half, query_stage],
                products,
            )
        warpgroup.commit_group()

    @cute.jit
    def key_factors(self, k_scale, key):
        """Scales of this lane's two keys. Asked for before the products are waited for, they cost no wait."""
        factor = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        factor.fill(1.0)
        if cutlass.const_expr(self.has_k_scale):
            num_keys = cute.size(k_scale, mode=[0])
            key_scales = cute.make_tensor(k_scale.iterator, cute.make_layout(num_keys))
            for side in cutlass.range_constexpr(2):
                if key + 8 * side < num_keys:
                    factor[side] = key_scales[key + 8 * side]
        return factor

    @cute.jit
    def half_sums(
        self, storage, out, products, held, column_half: cutlass.Constexpr, parts, factor, scale, place, stage, tile, warp
    ):  # fmt: skip
        """Sums a half of the columns, eight of them (two heads of four queries) at a time, and stores the queries that end
        in it. parts: the sums of a query that the first half left unfinished."""
        blocks, pairs = self.columns // 16, self.num_heads // 2
        for block in cutlass.range_constexpr(blocks):
            group, pair = (column_half * blocks + block) // pairs, (column_half * blocks + block) % pairs
            if cutlass.const_expr(pair == 0):
                self.look(place, group)
                parts.fill(0.0)
            self.add_pair(parts, products, held, block, group, [2 * pair, 2 * pair + 1])
            if cutlass.const_expr(pair == pairs - 1):
                low, high = (parts[0, 0] + parts[0, 1]) * (factor[0] * scale), (parts[1, 0] + parts[1, 1]) * (factor[1] * scale)
                self.put(storage, out, place, stage, tile, warp, group, low, high)
