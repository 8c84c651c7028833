"""The ragged logits kernel: keys are the M operand (64 rows a tile), queries x heads the N operand.

With several key heads a tile is taken in turns of `heads_at_once` key heads: so many products, one a key head, each of the
query heads that belong to it. The scores of a tile add up in registers over its turns.

A block keeps a tile of queries in shared memory (half of them for each math warpgroup) and streams key tiles past it; both
warpgroups read the same key tile, in turns, so that one sums over heads while the tensor cores work for the other.

Warps of the first warpgroup: 0 copies (queries once an item, keys through a ring), 1 publishes the item (ranges and weights
in float32), 2 and 3 write -inf wherever no key of the range stands. Warpgroups 1 and 2 multiply and write the scores.

An item is (query tile, span of key tiles). Items are dealt round robin, the last of them where wanted in runs that make all
blocks' loads equal (_logits_deal_even); warps 0 and 1 derive the same list from the same ranges and pass over items that no
range touches, the others only see what is published; query row -1 ends the list.

    barrier        arrivals                                            waits       (of key tiles: of a turn's key heads)
    queries_full   33: warp 0 once, with the bytes; warp 1, 32 lanes   math warps
    queries_free    8: one lane of each math warp, item done           warps 0 and 1
    keys_full       1: warp 0, with the bytes                          math warps
    keys_free       8: one lane of each math warp, products done       warp 0
    turn 0 / 1     named, 256 threads: the other warpgroup arrives, this one waits, before it issues a tile
    scores 0 / 1   named, 128 threads of a math warpgroup, twice a tile (only with store_width 32)
    costs          named, 128 threads: warps 2, 3 arrive once, their sums done; warps 0, 1 wait once, where the runs begin
Both warpgroups meet the same tiles, so the turns alternate strictly; warpgroup 1 hands out the first turn, and warpgroup 0
takes the last one when the list has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from gdn.problems import MqaLogitsParams
from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.deal_even import COSTS_BARRIER, DONE, PARTS, ROWS_PER_LANE, EvenDeal
from kernels_cute.mqa_logits.overlap import OverlappedMath
from kernels_cute.mqa_logits.scores import Scores, score_words

KEY_ROWS = 64  # rows of a key tile: M of wgmma
WARPGROUP = 128
NUM_THREADS = 3 * WARPGROUP
MATH_WARPS = 8
TURN_BARRIER = 2  # named barriers 2 and 3; 0 is the block's, 1 stays free, 4 to 6 are those of scores and costs
FILL_WARP = 2  # first of the two warps that write -inf
FILL_TILES = 32  # key tiles' worth of columns that a warp fills with -inf at a time, at most
END_OF_LIST = -1


class RaggedLogits(EvenDeal, OverlappedMath, Scores):
    """Everything here is known at compile time; sizes, strides and the scale arrive at launch."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        fp8: bool,
        has_k_scale: bool,
        has_weights: bool,
        relu: bool,
        clean: bool,
        packed: bool,
        columns: int,
        query_stages: int,
        key_stages: int,
        accumulator_sets: int,
        steps_in_flight_at_turn: int,
        pass_turn_at_issue: bool,
        relu_as_add_abs: bool,
        balanced_fraction: int,
        store_width: int,
        tiles_per_item: int,
        num_blocks: int,
    ):
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.order = layouts.HeadOrder(num_heads, num_kv_heads)
        self.dtype = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
        self.has_k_scale, self.has_weights = has_k_scale, has_weights
        self.relu, self.clean, self.packed = relu, clean, packed
        self.bounded = not packed  # ranges end with the columns of out, too
        self.columns = columns
        self.query_stages, self.key_stages = query_stages, key_stages
        self.accumulator_sets, self.pass_turn_at_issue = accumulator_sets, pass_turn_at_issue
        self.steps_in_flight_at_turn = steps_in_flight_at_turn
        # x + |x| is twice relu(x), exactly, and one FADD, which has twice the rate of FMNMX; the half goes into the scale. An
        # infinity would give NaN, but no product of FP8 values is one.
        self.doubled = relu_as_add_abs and relu and fp8
        self.balanced_fraction, self.store_width = balanced_fraction, store_width
        # Of a query tile's loads and an item's ends, in key tiles: more where nothing loads the next queries in advance.
        self.item_cost = 1 if query_stages == 2 else 3
        self.load_words = num_blocks + PARTS if balanced_fraction else 1
        self.tiles_per_item, self.num_blocks = tiles_per_item, num_blocks
        self.product_columns = columns // num_kv_heads
        self.queries_per_warpgroup = self.product_columns // self.order.slots
        self.groups = self.queries_per_warpgroup // layouts.QUERIES_PER_GROUP
        self.queries = 2 * self.queries_per_warpgroup
        self.score_words = score_words(store_width, self.queries)
        # Fewer at once where a division by the number of heads takes registers of its own.
        self.weight_loads = 4 if num_heads & (num_heads - 1) else 8
        self.item_lanes = 1 << (self.queries // ROWS_PER_LANE - 1).bit_length()
        self.batch = 32 // self.item_lanes  # items whose ranges a warp reads at once
        self.query_bytes = 2 * columns * head_dim * self.dtype.width // 8
        row_bytes = head_dim * self.dtype.width // 8
        self.kv_turn = layouts.heads_at_once(num_kv_heads, row_bytes, KEY_ROWS)  # key heads of a turn and of a stage of keys
        self.turns = num_kv_heads // self.kv_turn  # of a tile
        self.key_bytes = KEY_ROWS * row_bytes * self.kv_turn
        self.k_steps = head_dim * self.dtype.width // 256
        # With 128, 128 and 128 threads: the 168 a thread at launch.
        self.math_registers, self.copy_registers = (216, 72) if balanced_fraction else (224, 56)

    # ---- host

    @cute.jit
    def __call__(self, *values):
        """values: MqaLogitsParams, flat, and the stream."""
        params, stream = MqaLogitsParams(*values[:-1]), values[-1]
        q, k, out = params.q, params.k, params.out
        mma = cute.make_tiled_mma(self._mma_op(self.product_columns // self.accumulator_sets))
        query_smem, key_smem = self.query_smem(), self.key_smem()
        num_queries, num_keys = cute.size(q, mode=[0]), cute.size(k, mode=[0])
        heads, dim = self.num_heads, self.head_dim
        (in_run, positions), (run_stride, position_stride) = self.order.view(dim)
        q_view = cute.make_tensor(
            q.iterator,
            cute.make_layout((in_run, num_queries, positions, dim), stride=(run_stride, heads * dim, position_stride, 1)),
        )
        key_row = self.num_kv_heads * dim
        k_view = cute.make_tensor(k.iterator, cute.make_layout((num_keys, key_row), stride=(key_row, 1)))
        copy = cpasync.CopyBulkTensorTileG2SOp()
        query_box = self.query_box()
        query_atom, query_tensor = cpasync.make_tiled_tma_atom(copy, q_view, layouts.leading(query_smem, 4), query_box)
        key_atom, key_tensor = cpasync.make_tiled_tma_atom(copy, k_view, cute.slice_(key_smem, (None, None, 0)), (KEY_ROWS, dim))
        columns = cute.size(out, mode=[1])
        query_tiles = cute.ceil_div(num_queries, self.queries)
        # Packed columns count from a row's own first key, so both key tiles and columns must be covered.
        key_tiles = cute.ceil_div(cutlass.max(num_keys, columns), KEY_ROWS)
        all_tiles = Int64(query_tiles) * key_tiles
        # Enough items for an even deal, none so small that loading its queries shows.
        wanted = Int32(all_tiles // (self.num_blocks * 8))
        item_tiles = cutlass.max(cutlass.min(wanted, self.tiles_per_item), min(4, self.tiles_per_item))
        fill_tiles = item_tiles
        most_blocks = Int64(self.num_blocks)
        if cutlass.const_expr(self.balanced_fraction == 8):
            # Nothing but runs: an item needs no end but where its keys would leave the L2 cache.
            fill_tiles = cutlass.max(cutlass.min(wanted, FILL_TILES), 4)
            item_tiles = cutlass.max(cutlass.min(key_tiles, self.tiles_per_item), 1)
        num_items = query_tiles * self.pieces(key_tiles, item_tiles)
        fill_items = query_tiles * self.pieces(key_tiles, fill_tiles)
        if cutlass.const_expr(self.balanced_fraction > 0):
            blocks = cutlass.max(Int32(cutlass.min(all_tiles, most_blocks)), 1)
        else:
            blocks = cutlass.max(cutlass.min(num_items, self.num_blocks), 1)
        self.kernel(
            query_atom, query_tensor, key_atom, key_tensor, params._replace(q=None, k=None), mma, num_keys, query_tiles,
            item_tiles, num_items, self.head_items(all_tiles, num_items, blocks), fill_tiles, fill_items,
        ).launch(
            grid=(blocks, 1, 1),
            block=(NUM_THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    def pieces(self, length, piece):
        """ceil(length / piece). Not the DSL's own: it fails where the compiler finds a piece to be 1."""
        return (length + piece - 1) // piece

    def query_box(self):
        return (2, layouts.QUERIES_PER_GROUP, self.order.pairs, self.head_dim)

    def query_smem(self):
        """(head in run, query, pair, head_dim, groups, key head of (stage, warpgroup))"""
        outer = 2 * self.query_stages * self.num_kv_heads
        return layouts.query_layout(self.dtype, self.order.slots, self.head_dim, self.groups, outer)

    def key_smem(self):
        """(key, head_dim, key head of stage)"""
        return layouts.operand_layout(self.dtype, KEY_ROWS, self.head_dim, self.key_stages * self.kv_turn)

    def _mma_op(self, columns: int):
        k_major = OperandMajorMode.K
        source = warpgroup.OperandSource.SMEM
        if self.dtype is cutlass.BFloat16:
            return warpgroup.MmaF16BF16Op(self.dtype, Float32, (KEY_ROWS, columns, 16), source, k_major, k_major)
        shape = (KEY_ROWS, columns, 32)
        return warpgroup.MmaF8Op(self.dtype, self.dtype, Float32, shape, source, k_major, k_major)

    def storage_type(self):
        query_elements = 2 * self.columns * self.head_dim * self.query_stages
        key_elements = KEY_ROWS * self.head_dim * self.key_stages * self.kv_turn
        slots = self.queries * self.query_stages

        @cute.struct
        class Storage:
            queries_full: cute.struct.MemRange[Int64, self.query_stages]
            queries_free: cute.struct.MemRange[Int64, self.query_stages]
            keys_full: cute.struct.MemRange[Int64, self.key_stages]
            keys_free: cute.struct.MemRange[Int64, self.key_stages]
            loads: cute.struct.MemRange[Int32, self.load_words]
            items: cute.struct.MemRange[Int32, 4 * self.query_stages]
            starts: cute.struct.MemRange[Int32, slots]
            ends: cute.struct.MemRange[Int32, slots]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, slots * self.num_heads], 16]
            scores: cute.struct.Align[cute.struct.MemRange[Float32, self.score_words], 16]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, query_elements], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, key_elements], 1024]

        return Storage

    # ---- device

    @cute.kernel
    def kernel(
        self,
        query_atom: cute.CopyAtom,
        query_tensor: cute.Tensor,
        key_atom: cute.CopyAtom,
        key_tensor: cute.Tensor,
        params: MqaLogitsParams,  # without q and k, which the copy engine reads through its descriptors
        mma: cute.TiledMma,
        num_keys: Int32,
        query_tiles: Int32,
        item_tiles: Int32,
        num_items: Int32,
        head_items: Int32,
        fill_tiles: Int32,
        fill_items: Int32,
    ):
        _, _, k_scale, weights, starts, ends, out, scale, least = params
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        if warp == 0:
            cpasync.prefetch_descriptor(query_atom)
            cpasync.prefetch_descriptor(key_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.query_stages):
                    cute.arch.mbarrier_init(storage.queries_full.data_ptr() + stage, 33)
                    cute.arch.mbarrier_init(storage.queries_free.data_ptr() + stage, MATH_WARPS)
                for stage in cutlass.range_constexpr(self.key_stages):
                    cute.arch.mbarrier_init(storage.keys_full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.keys_free.data_ptr() + stage, MATH_WARPS)
        cute.arch.mbarrier_init_fence()
        work = (storage, starts, ends, out, num_keys, query_tiles, item_tiles, num_items, head_items, least)
        if cutlass.const_expr(self.balanced_fraction > 0):
            self.clear_costs(storage)
        if cutlass.const_expr(self.balanced_fraction == 8):
            cute.arch.sync_threads()
            self.sum_costs(*work, warp, NUM_THREADS // 32)
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.copy_registers)
            if warp == 0:
                self.copy_warp(
                    storage, query_atom, query_tensor, key_atom, key_tensor, starts, ends, out, num_keys,
                    query_tiles, item_tiles, num_items, head_items, least,
                )  # fmt: skip
            if warp == 1:
                self.publish_warp(
                    storage, weights, starts, ends, out, num_keys, query_tiles, item_tiles, num_items, head_items, least
                )
            if cutlass.const_expr(0 < self.balanced_fraction < 8):
                if warp >= FILL_WARP:
                    self.sum_costs(*work, warp - FILL_WARP, 2)
                    cute.arch.barrier_arrive(barrier_id=COSTS_BARRIER, number_of_threads=WARPGROUP)
            if cutlass.const_expr(self.clean):
                if warp >= FILL_WARP:
                    self.fill_warp(starts, ends, out, num_keys, query_tiles, fill_tiles, fill_items, warp - FILL_WARP)
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            if cutlass.const_expr(self.doubled):
                scale = scale * 0.5
            if cutlass.const_expr(self.accumulator_sets == 2):
                self.overlapped_warpgroup(storage, k_scale, out, scale, mma, warp // 4 - 1, warp % 4)
            else:
                self.math_warpgroup(storage, k_scale, out, scale, mma, warp // 4 - 1, warp % 4)

    @cute.jit
    def copy_warp(
        self, storage, query_atom, query_tensor, key_atom, key_tensor, starts, ends, out, num_keys, query_tiles,
        item_tiles, num_items, head_items, least,
    ):  # fmt: skip
        num_queries, num_columns = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        query_layout, key_layout = self.query_smem(), self.key_smem()
        s_queries = storage.queries.get_tensor(query_layout.outer, swizzle=query_layout.inner)
        s_keys = storage.keys.get_tensor(key_layout.outer, swizzle=key_layout.inner)
        g_keys = cute.local_tile(key_tensor, (KEY_ROWS, self.head_dim), (None, None))
        single = cute.make_layout(1)
        to_keys, from_keys = cpasync.tma_partition(
            key_atom, 0, single, cute.group_modes(s_keys, 0, 2), cute.group_modes(g_keys, 0, 2)
        )
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        tensors = (query_atom, query_tensor, s_queries, key_atom, to_keys, from_keys)

        stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        ranges = (starts, ends, num_queries, num_keys, num_columns, query_tiles, item_tiles, least)
        if cutlass.const_expr(self.balanced_fraction > 0):
            base, stride, limit, position, count, tail = self.first_round(head_items)
            while tail < DONE:
                if tail == 0 and base >= limit:
                    base, position, count = self.tail_run(storage, num_items, head_items)
                    stride, limit, tail = Int32(1), num_items, Int32(1)
                if base < limit and position < count:
                    lane_first, lane_end = self.item_span(ranges, base, stride, limit)
                    steps, position = self.skip(lane_first, lane_end, position, tail)
                    for step in cutlass.range(steps, unroll=1):
                        tile_first, tile_end, position = self.cut(lane_first, lane_end, step, position, count, tail)
                        stage, parity, key_stage, key_parity = self.copy_item(
                            storage, tensors, self.first_row(base + step * stride, ranges), tile_first, tile_end,
                            stage, parity, key_stage, key_parity,
                        )  # fmt: skip
                    base = base + self.batch * stride
                else:
                    tail = Int32(DONE)
        else:
            block, _, _ = cute.arch.block_idx()
            blocks, _, _ = cute.arch.grid_dim()
            for base in cutlass.range(block, num_items, self.batch * blocks, unroll=1):
                lane_first, lane_end = self.item_span(ranges, base, blocks, num_items)
                for step in cutlass.range(self.batch, unroll=1):
                    tile_first = cute.arch.shuffle_sync(lane_first, step * self.item_lanes)
                    tile_end = cute.arch.shuffle_sync(lane_end, step * self.item_lanes)
                    stage, parity, key_stage, key_parity = self.copy_item(
                        storage, tensors, self.first_row(base + step * blocks, ranges), tile_first, tile_end,
                        stage, parity, key_stage, key_parity,
                    )  # fmt: skip
        # The end mark carries no bytes: only the arrival that queries_full counts.
        cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(queries_full + stage)

    @cute.jit
    def copy_item(self, storage, tensors, row0, tile_first, tile_end, stage, parity, key_stage, key_parity):
        """Queries and keys of one item, where it holds any; the places that come next in the two rings."""
        query_atom, query_tensor, s_queries, key_atom, to_keys, from_keys = tensors
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        keys_full, keys_free = storage.keys_full.data_ptr(), storage.keys_free.data_ptr()
        if tile_first < tile_end:
            cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(queries_full + stage, self.query_bytes)
            for kv_head in cutlass.range(self.num_kv_heads, unroll=1):
                to_queries, from_queries = self.query_partition(query_atom, query_tensor, s_queries, kv_head)
                for half in cutlass.range_constexpr(2):
                    for group in cutlass.range(self.groups, unroll=1):
                        box = row0 // layouts.QUERIES_PER_GROUP + half * self.groups + group
                        cute.copy(
                            query_atom,
                            from_queries[None, box],
                            to_queries[None, group, (stage * 2 + half) * self.num_kv_heads + kv_head],
                            tma_bar_ptr=queries_full + stage,
                        )
            stage, parity = self.advance(stage, parity, self.query_stages)
            for tile in cutlass.range(tile_first, tile_end, unroll=1):
                for turn in cutlass.range(self.turns, unroll=1):
                    cute.arch.mbarrier_wait(keys_free + key_stage, key_parity ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(keys_full + key_stage, self.key_bytes)
                    for nth in cutlass.range_constexpr(self.kv_turn):
                        cute.copy(
                            key_atom,
                            from_keys[None, tile, turn * self.kv_turn + nth],
                            to_keys[None, key_stage * self.kv_turn + nth],
                            tma_bar_ptr=keys_full + key_stage,
                        )
                    key_stage, key_parity = self.advance(key_stage, key_parity, self.key_stages)
        return stage, parity, key_stage, key_parity

    def query_partition(self, query_atom, query_tensor, s_queries, kv_head):
        """Where the boxes of a key head's queries go and come from."""
        if self.num_kv_heads > 1:
            query_tensor = cute.domain_offset((0, 0, self.order.position(kv_head), 0), query_tensor)
        g_queries = cute.local_tile(query_tensor, self.query_box(), (0, None, 0, 0))
        return cpasync.tma_partition(
            query_atom, 0, cute.make_layout(1), cute.group_modes(s_queries, 0, 4), cute.group_modes(g_queries, 0, 4)
        )

    @cute.jit
    def publish_warp(
        self, storage, weights, starts, ends, out, num_keys, query_tiles, item_tiles, num_items, head_items, least
    ):  # fmt: skip
        num_queries, num_columns = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()

        stage, parity = Int32(0), Int32(0)
        ranges = (starts, ends, num_queries, num_keys, num_columns, query_tiles, item_tiles, least, out)
        if cutlass.const_expr(self.balanced_fraction > 0):
            base, stride, limit, position, count, tail = self.first_round(head_items)
            while tail < DONE:
                if tail == 0 and base >= limit:
                    base, position, count = self.tail_run(storage, num_items, head_items)
                    stride, limit, tail = Int32(1), num_items, Int32(1)
                if base < limit and position < count:
                    lane_first, lane_end = self.item_span(ranges, base, stride, limit)
                    steps, position = self.skip(lane_first, lane_end, position, tail)
                    for step in cutlass.range(steps, unroll=1):
                        tile_first, tile_end, position = self.cut(lane_first, lane_end, step, position, count, tail)
                        row0 = self.first_row(base + step * stride, ranges)
                        stage, parity = self.publish_item(storage, weights, ranges, row0, tile_first, tile_end, stage, parity)
                    base = base + self.batch * stride
                else:
                    tail = Int32(DONE)
        else:
            block, _, _ = cute.arch.block_idx()
            blocks, _, _ = cute.arch.grid_dim()
            for base in cutlass.range(block, num_items, self.batch * blocks, unroll=1):
                lane_first, lane_end = self.item_span(ranges, base, blocks, num_items)
                for step in cutlass.range(self.batch, unroll=1):
                    tile_first = cute.arch.shuffle_sync(lane_first, step * self.item_lanes)
                    tile_end = cute.arch.shuffle_sync(lane_end, step * self.item_lanes)
                    row0 = self.first_row(base + step * blocks, ranges)
                    stage, parity = self.publish_item(storage, weights, ranges, row0, tile_first, tile_end, stage, parity)
        cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
        if cute.arch.lane_idx() == 0:
            s_items[4 * stage] = Int32(END_OF_LIST)
        cute.arch.mbarrier_arrive(queries_full + stage)

    @cute.jit
    def publish_item(self, storage, weights, ranges, row0, tile_first, tile_end, stage, parity):
        """Tells the math warps of one item, where it holds anything: its place, ranges and weights."""
        starts, ends, num_queries, num_keys, num_columns, _, _, least, _ = ranges
        lane = cute.arch.lane_idx()
        slots = self.queries * self.query_stages
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_starts, s_ends = storage.starts.get_tensor(cute.make_layout(slots)), storage.ends.get_tensor(cute.make_layout(slots))
        s_weights = storage.weights.get_tensor(cute.make_layout(slots * self.num_heads))
        if tile_first < tile_end:
            cute.arch.mbarrier_wait(storage.queries_free.data_ptr() + stage, parity ^ 1)
            if lane == 0:
                s_items[4 * stage] = row0
                s_items[4 * stage + 1] = tile_first
                s_items[4 * stage + 2] = tile_end
            slot = stage * self.queries
            for part in cutlass.range_constexpr((self.queries + 31) // 32):
                local = lane + 32 * part
                if local < self.queries:
                    first, end = self.row_range(starts, ends, row0 + local, num_queries, num_keys, num_columns, least)
                    s_starts[slot + local] = first
                    s_ends[slot + local] = end
            if cutlass.const_expr(self.has_weights):
                self.publish_weights(s_weights, weights, row0, num_queries, slot)
            cute.arch.mbarrier_arrive(storage.queries_full.data_ptr() + stage)
            stage, parity = self.advance(stage, parity, self.query_stages)
        return stage, parity

    @cute.jit
    def publish_weights(self, s_weights, weights, row0, num_queries, slot):
        lane = cute.arch.lane_idx()
        for local in cutlass.range(lane, self.queries * self.num_heads, 32, unroll=self.weight_loads):
            row = row0 + local // self.num_heads
            weight = Float32(0.0)
            if row < num_queries:
                offset = Int64(row) * weights.stride[0] + local % self.num_heads
                weight = Float32(cute.make_tensor(weights.iterator + offset, cute.make_layout(1))[0])
            s_weights[slot * self.num_heads + local] = weight

    @cute.jit
    def fill_warp(self, starts, ends, out, num_keys, query_tiles, fill_tiles, fill_items, half):
        """-inf in the columns of a part that lie outside a row's range; two warps share the rows."""
        num_queries, num_columns = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        for part_of_all in cutlass.range(block, fill_items, blocks, unroll=1):
            row0 = (part_of_all % query_tiles) * self.queries
            column0 = part_of_all // query_tiles * fill_tiles * KEY_ROWS
            column1 = cutlass.min(column0 + fill_tiles * KEY_ROWS, num_columns)
            if column0 < num_columns:
                for part in cutlass.range_constexpr((self.queries + 31) // 32):
                    part_rows = cutlass.const_expr(min(32, self.queries - 32 * part))
                    # One load a lane; the rows' ranges are then handed round.
                    lane_first, lane_end = self.row_range(
                        starts, ends, row0 + 32 * part + lane, num_queries, num_keys, num_columns, Int32(0)
                    )
                    for step in cutlass.range(part_rows // 2, unroll=1):
                        local = 2 * step + half
                        first = cute.arch.shuffle_sync(lane_first, local)
                        end = cute.arch.shuffle_sync(lane_end, local)
                        row = row0 + 32 * part + local
                        if row < num_queries:
                            line = out.iterator + Int64(row) * out.stride[0]
                            if cutlass.const_expr(self.packed):
                                self.fill(line, out.element_type, cutlass.max(end - first, column0), column1, lane)
                            else:
                                self.fill(line, out.element_type, column0, cutlass.min(first, column1), lane)
                                self.fill(line, out.element_type, cutlass.max(end, column0), column1, lane)

    @cute.jit
    def fill(self, line, element_type: cutlass.Constexpr, first, end, lane):
        for column in cutlass.range(first + lane, end, 32, unroll=4):
            cute.make_tensor(line + column, cute.make_layout(1))[0] = element_type(-Float32.inf)

    @cute.jit
    def math_warpgroup(self, storage, k_scale, out, scale, mma, half, warp):
        lane = cute.arch.lane_idx()
        slots = self.queries * self.query_stages
        outer = 2 * self.query_stages * self.num_kv_heads
        query_layout = layouts.operand_layout(self.dtype, self.product_columns, self.head_dim, outer)
        key_layout = self.key_smem()
        s_queries = storage.queries.get_tensor(query_layout.outer, swizzle=query_layout.inner)
        s_keys = storage.keys.get_tensor(key_layout.outer, swizzle=key_layout.inner)
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_weights = storage.weights.get_tensor(cute.make_layout(slots * self.num_heads))
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        keys_full, keys_free = storage.keys_full.data_ptr(), storage.keys_free.data_ptr()

        thread_mma = mma.get_slice(0)
        keys_operand = mma.make_fragment_A(thread_mma.partition_A(s_keys))
        queries_operand = mma.make_fragment_B(thread_mma.partition_B(s_queries))
        product_shape = thread_mma.partition_shape_C((KEY_ROWS, self.product_columns))
        if cutlass.const_expr(self.kv_turn > 1):
            product_shape = (*product_shape, self.kv_turn)
        products = cute.make_rmem_tensor(product_shape, Float32)
        # Weights of this lane's queries.
        held = cute.make_rmem_tensor(cute.make_layout(self.groups * self.num_heads), Float32)
        totals = cute.make_rmem_tensor(cute.make_layout(2 * self.groups), Float32)  # over the key heads of a tile

        if cutlass.const_expr(self.has_k_scale):
            num_keys = cute.size(k_scale, mode=[0])
            key_scales = cute.make_tensor(k_scale.iterator, cute.make_layout(num_keys * self.num_kv_heads))
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
                if cutlass.const_expr(self.num_kv_heads > 1):
                    totals.fill(0.0)
                for turn in cutlass.range_constexpr(self.turns):
                    first_kv = turn * self.kv_turn
                    # Asked for here and used after the products, the scales cost no wait.
                    factor = cute.make_rmem_tensor(cute.make_layout(2 * self.kv_turn), Float32)
                    factor.fill(1.0)
                    if cutlass.const_expr(self.has_k_scale):
                        for side in cutlass.range_constexpr(2):
                            if key + 8 * side < num_keys:
                                for nth in cutlass.range_constexpr(self.kv_turn):
                                    row = (key + 8 * side) * self.num_kv_heads
                                    factor[2 * nth + side] = key_scales[row + first_kv + nth]
                    cute.arch.mbarrier_wait(keys_full + key_stage, key_parity)
                    cute.arch.barrier(barrier_id=TURN_BARRIER + half, number_of_threads=2 * WARPGROUP)
                    warpgroup.fence()
                    for nth in cutlass.range_constexpr(self.kv_turn):
                        product = products
                        if cutlass.const_expr(self.kv_turn > 1):
                            product = products[None, None, None, nth]
                        for step in cutlass.range_constexpr(self.k_steps):
                            mma.set(warpgroup.Field.ACCUMULATE, step != 0)
                            cute.gemm(
                                mma,
                                product,
                                keys_operand[None, None, step, key_stage * self.kv_turn + nth],
                                queries_operand[None, None, step, (stage * 2 + half) * self.num_kv_heads + first_kv + nth],
                                product,
                            )
                            warpgroup.commit_group()
                    # While the last products are still on their way the other warpgroup may queue its own behind them.
                    warpgroup.wait_group(self.steps_in_flight_at_turn)
                    self.pass_turn(1 - half)
                    warpgroup.wait_group(0)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(keys_free + key_stage)
                    key_stage, key_parity = self.advance(key_stage, key_parity, self.key_stages)
                    for one in cutlass.range_constexpr(2 * self.kv_turn):
                        factor[one] = factor[one] * scale
                    if cutlass.const_expr(turn == self.turns - 1):
                        self.begin(place, half)
                    for group in cutlass.range_constexpr(self.groups):
                        low, high = Float32(0.0), Float32(0.0)
                        if cutlass.const_expr(self.num_kv_heads == 1):
                            sums = self.head_sums(products, held, group, 0, 0)
                            low, high = sums[0] * factor[0], sums[1] * factor[1]
                        else:
                            for nth in cutlass.range_constexpr(self.kv_turn):
                                sums = self.head_sums(products, held, group, first_kv, nth)
                                totals[2 * group] = totals[2 * group] + sums[0] * factor[2 * nth]
                                totals[2 * group + 1] = totals[2 * group + 1] + sums[1] * factor[2 * nth + 1]
                            low, high = totals[2 * group], totals[2 * group + 1]
                        if cutlass.const_expr(turn == self.turns - 1):
                            self.put(storage, out, place, stage, tile, warp, group, low, high)
                    if cutlass.const_expr(turn == self.turns - 1):
                        self.finish(storage, out, place, stage, tile, half, warp)
            cute.arch.sync_warp()  # the other lanes' reads of ranges and weights come before the release
            if lane == 0:
                cute.arch.mbarrier_arrive(queries_free + stage)
            stage, parity = self.advance(stage, parity, self.query_stages)
            cute.arch.mbarrier_wait(queries_full + stage, parity)
            row0 = s_items[4 * stage]
        if half == 0:
            cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def head_sums(self, products, held, group: cutlass.Constexpr, first_kv: cutlass.Constexpr, nth: cutlass.Constexpr):
        """The two keys' sums over the heads of one query and one key head (the `nth`-th of a turn). Even and odd heads run
        as chains of their own."""
        parts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)
        parts.fill(0.0)
        for pair in cutlass.range_constexpr(self.order.pairs):
            place = group * self.order.pairs + pair + nth * (self.product_columns // 8)
            heads = [self.order.head(first_kv + nth, odd, pair) for odd in range(2)]
            self.add_pair(parts, products, held, place, group, heads)
        return parts[0, 0] + parts[0, 1], parts[1, 0] + parts[1, 1]

    @cute.jit
    def add_pair(self, parts, products, held, place: cutlass.Constexpr, group: cutlass.Constexpr, heads: cutlass.Constexpr):
        """Adds two heads of a query, the place-th eight columns of products, to its sums."""
        for side in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                if cutlass.const_expr(heads[odd] is not None):
                    value = products[odd + 2 * side + 4 * place]
                    if cutlass.const_expr(self.doubled):
                        value = value + cute.math.absf(value)
                    elif cutlass.const_expr(self.relu):
                        value = cute.arch.fmax(value, Float32(0.0))
                    if cutlass.const_expr(self.has_weights):
                        weight = held[group * self.num_heads + heads[odd]]
                        parts[side, odd] = parts[side, odd] + value * weight
                    else:
                        parts[side, odd] = parts[side, odd] + value

    @cute.jit
    def pass_turn(self, half):
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + half, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def advance(self, stage, parity, stages: cutlass.Constexpr):
        stage = stage + 1
        if stage == stages:
            stage = Int32(0)
            parity = parity ^ 1
        return stage, parity
