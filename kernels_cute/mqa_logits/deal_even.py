"""Which items a block of the ragged logits kernel takes.

Items are (query tile, span of key tiles), query tiles first, so blocks that take them round robin read the same keys at the same
time. Their loads then differ by an item or two. With `balanced_fraction` > 0 the last balanced_fraction / 8 of the rounds are
held back, and each block takes one run of their key tiles, long enough that all blocks end with the same
cost. The cost of an item is its number of key tiles plus a few more for its queries. Runs end anywhere inside an item, so the loads are equal to the tile.

Costs are added up by the warps that write -inf, while the first rounds run; where all is dealt in runs, by all warps at first.

    loads[b]    cost of the items that block b takes round robin
    tails[p]    cost of the p-th part of the items held back
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.mqa_logits.ptx import add_shared

KEY_ROWS = 64  # as in _logits_ragged
THREADS = 384
ROWS_PER_LANE = 8  # ranges one lane reads when a warp looks for work
NO_KEY = 2**31 - 1
COSTS_BARRIER = 6  # named: two warps have added up costs, the two that walk the list wait for it
PARTS = 32  # of the items held back, one a lane
DONE = 2  # value of `tail`: 0 = round robin, 1 = the run
EVERYTHING = 2**30


class EvenDeal:
    """Methods of RaggedLogits."""

    @cute.jit
    def row_range(self, starts, ends, row, num_queries, num_keys, num_columns, least):
        """A query's keys as (first, end), (0, 0) where it sees none, or at most `least`, or there is no such row."""
        # Loads stand outside of conditions, so that those of several rows travel together.
        near = cutlass.min(row, num_queries - 1)
        first = cutlass.max(starts[near], 0)
        end = cutlass.min(ends[near], num_keys)
        if cutlass.const_expr(self.bounded):
            end = cutlass.min(end, num_columns)
        if first >= end or row >= num_queries:
            first, end = Int32(0), Int32(0)
        if cutlass.const_expr(not self.clean):
            if end - first <= least:  # neither is negative here
                end = first
        if cutlass.const_expr(self.packed):
            end = first + cutlass.min(end - first, num_columns)
        return first, end

    @cute.jit
    def seen(self, ranges, query_tile, wanted):
        """Keys [low, high) that some query of a tile sees, the same in all of the tile's `item_lanes` lanes; high 0: none."""
        starts, ends, num_queries, num_keys, num_columns, _, _, least = ranges[:8]
        low, high = Int32(NO_KEY), Int32(0)
        local0 = cute.arch.lane_idx() % self.item_lanes * ROWS_PER_LANE
        if wanted:
            if local0 < self.queries:
                for row in cutlass.range_constexpr(ROWS_PER_LANE):
                    first, end = self.row_range(
                        starts, ends, query_tile * self.queries + local0 + row, num_queries, num_keys, num_columns, least
                    )
                    if first < end:
                        low = cutlass.min(low, first)
                        high = cutlass.max(high, end)
        for power in cutlass.range_constexpr(self.item_lanes.bit_length() - 1):
            low = cutlass.min(low, cute.arch.shuffle_sync_bfly(low, 1 << power))
            high = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, 1 << power))
        return low, high

    @cute.jit
    def first_row(self, item, ranges):
        return item % ranges[5] * self.queries

    @cute.jit
    def item_span(self, ranges, base, stride, limit):
        """Key tiles [first, end) that some query sees, of `batch` items from base on, one in `item_lanes` lanes each; empty
        from limit on. Reading a batch at once pays the latency of the ranges once."""
        query_tiles, item_tiles = ranges[5], ranges[6]
        item = base + cute.arch.lane_idx() // self.item_lanes * stride
        query_tile, span = item % query_tiles, item // query_tiles * item_tiles
        low, high = self.seen(ranges, query_tile, item < limit)
        tile_first = cutlass.max(low // KEY_ROWS, span)
        tile_end = cutlass.min((high + (KEY_ROWS - 1)) // KEY_ROWS, span + item_tiles)
        return tile_first, tile_end

    # ---- only with balanced_fraction > 0

    @cute.jit
    def head_items(self, all_tiles, num_items, blocks):
        """Items dealt round robin: whole rounds. All of them where costs might not fit 32 bits."""
        head = num_items
        if cutlass.const_expr(self.balanced_fraction > 0):
            rounds = num_items // blocks
            held = cutlass.min(cutlass.max(rounds * self.balanced_fraction // 8, 1), rounds)
            head = (rounds - held) * blocks
            if all_tiles + Int64(num_items) * self.item_cost >= 2**30:
                head = num_items
        return head

    @cute.jit
    def part_items(self, num_items, head_items):
        """Items of one part: whole batches."""
        batches = (num_items - head_items + (self.batch - 1)) // self.batch
        return cutlass.max((batches + (PARTS - 1)) // PARTS, 1) * self.batch

    @cute.jit
    def clear_costs(self, storage):
        thread, _, _ = cute.arch.thread_idx()
        s_loads = storage.loads.get_tensor(cute.make_layout(self.load_words))
        for word in cutlass.range(thread, self.load_words, THREADS, unroll=1):
            s_loads[word] = Int32(0)

    @cute.jit
    def sum_costs(
        self, storage, starts, ends, out, num_keys, query_tiles, item_tiles, num_items, head_items, least, worker,
        workers: cutlass.Constexpr,
    ):  # fmt: skip
        """Fills loads and tails, cleared before; so many warps take their share each. The caller synchronises afterwards."""
        num_queries, num_columns = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        ranges = (starts, ends, num_queries, num_keys, num_columns, query_tiles, item_tiles, least)
        lane = cute.arch.lane_idx()
        loads = storage.loads.data_ptr().toint()
        blocks, _, _ = cute.arch.grid_dim()
        part_items = self.part_items(num_items, head_items)
        for base in cutlass.range(worker * self.batch, query_tiles, workers * self.batch, unroll=1):
            query_tile = base + lane // self.item_lanes
            low, high = self.seen(ranges, query_tile, query_tile < query_tiles)
            tile_end = (high + (KEY_ROWS - 1)) // KEY_ROWS
            tile_first = cutlass.min(low // KEY_ROWS, tile_end)
            # The lanes of a query tile share its spans.
            span = tile_first // item_tiles + lane % self.item_lanes
            while span * item_tiles < tile_end:
                tiles = cutlass.min((span + 1) * item_tiles, tile_end) - cutlass.max(span * item_tiles, tile_first)
                item = span * query_tiles + query_tile
                word = item % blocks
                if item >= head_items:
                    word = self.num_blocks + (item - head_items) // part_items
                add_shared(loads + 4 * word, tiles + self.item_cost)
                span = span + self.item_lanes

    @cute.jit
    def first_round(self, head_items):
        """(base, stride, limit, position, count, tail) of a warp that starts to walk through this block's items."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return Int32(block), Int32(blocks), head_items, Int32(0), Int32(EVERYTHING), Int32(0)

    @cute.jit
    def tail_run(self, storage, num_items, head_items):
        """This block's run of the items held back: (item to start from, cost from the run's start to there, at most 0, cost
        of the run)."""
        if cutlass.const_expr(self.balanced_fraction < 8):
            cute.arch.barrier(barrier_id=COSTS_BARRIER, number_of_threads=128)
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        s_loads = storage.loads.get_tensor(cute.make_layout(self.load_words))
        own = s_loads[self.num_blocks + lane]
        total = own
        for other in cutlass.range(lane, blocks, 32, unroll=1):
            total = total + s_loads[other]
        share = (cute.arch.warp_redux_sync(total, "add") + (blocks - 1)) // blocks
        start = Int32(0)
        for other in cutlass.range(lane, block, 32, unroll=1):
            start = start + cutlass.max(share - s_loads[other], 0)
        start = cute.arch.warp_redux_sync(start, "add")
        before = own
        for power in cutlass.range_constexpr(5):
            further = cute.arch.shuffle_sync_up(before, 1 << power, mask_and_clamp=0)
            if lane >= 1 << power:
                before = before + further
        before = before - own
        # The last part that begins at or before the run.
        reached = Int32(0)
        if before <= start:
            reached = Int32(1)
        part = cute.arch.warp_redux_sync(reached, "add") - 1
        base = head_items + part * self.part_items(num_items, head_items)
        return base, cute.arch.shuffle_sync(before, part) - start, cutlass.max(share - s_loads[block], 0)

    @cute.jit
    def skip(self, lane_first, lane_end, position, tail):
        """(items of a batch to look at, position): none where the whole batch comes before this block's run."""
        steps = Int32(self.batch)
        if tail != 0:
            own = Int32(0)
            if cute.arch.lane_idx() % self.item_lanes == 0 and lane_first < lane_end:
                own = lane_end - lane_first + self.item_cost
            own = cute.arch.warp_redux_sync(own, "add")
            if position + own <= 0:
                steps, position = Int32(0), position + own
        return steps, position

    @cute.jit
    def cut(self, lane_first, lane_end, step, position, count, tail):
        """Key tiles [first, end) of an item of the batch that are in this block's run, and the position behind the item."""
        item_first = cute.arch.shuffle_sync(lane_first, step * self.item_lanes)
        tiles = cute.arch.shuffle_sync(lane_end, step * self.item_lanes) - item_first
        tile_first, tile_end = item_first, item_first + tiles
        if tail != 0:
            if tiles > 0:
                tile_first = item_first + cutlass.min(cutlass.max(-position - self.item_cost, 0), tiles)
                tile_end = item_first + cutlass.min(cutlass.max(count - position - self.item_cost, 0), tiles)
                position = position + tiles + self.item_cost
        return tile_first, tile_end, position
