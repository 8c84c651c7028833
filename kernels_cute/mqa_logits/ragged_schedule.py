"""Items that a block of the ragged logits kernel takes: (query tile, span of key tiles), query tiles first, so blocks that take
them round robin read the same keys at the same time. With `balanced_fraction` > 0 the last balanced_fraction / 8 of the rounds
are held back, and each block takes one run of their key tiles, which ends anywhere inside an item, so that all blocks have the
same cost: an item's number of key tiles plus a few more for its queries. See DESIGN.md for who adds costs up.

    loads[b]    cost of the items that block b takes round robin
    tails[p]    cost of the p-th part of the items held back
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gdn.ops.indexer.problem import MqaLogitsParams
from kernels_cute.mqa_logits.barriers import COSTS, wait_named
from kernels_cute.mqa_logits.orders import KEY_ROWS
from kernels_cute.mqa_logits.products import running_sum
from kernels_cute.mqa_logits.shape import PARTS
from kernels_cute.mqa_logits.tiles import ROWS_PER_LANE, RaggedTiles, Ranges, Work, ranges_of

NO_KEY = 2**31 - 1
DONE = 2  # value of `tail`: 0 = round robin, 1 = the run
EVERYTHING = 2**30


@cute.jit
def row_range(tiles: RaggedTiles, ranges: Ranges, row: Int32):
    """Return a query's keys as (first, end): (0, 0) if it sees none, if they are too few to be scored, or if there is no such
    row."""
    params, work, num_queries, num_columns = ranges
    # Loads come before the conditions, so that those of several rows travel together.
    near = cutlass.min(row, num_queries - 1)
    first = cutlass.max(params.cu_seqlen_ks[near], 0)
    end = cutlass.min(params.cu_seqlen_ke[near], work.num_keys)
    if cutlass.const_expr(not tiles.packed):  # ranges end with the columns of out, too
        end = cutlass.min(end, num_columns)
    if first >= end or row >= num_queries:
        first, end = Int32(0), Int32(0)
    if cutlass.const_expr(not tiles.clean):
        if end - first <= params.skip_rows_up_to:  # neither is negative here
            end = first
    if cutlass.const_expr(tiles.packed):
        end = first + cutlass.min(end - first, num_columns)
    return first, end


@cute.jit
def seen(tiles: RaggedTiles, ranges: Ranges, query_tile: Int32, wanted: Boolean):
    """Return the keys [low, high) that some query of a tile sees; high is 0 if there are none. All `item_lanes` lanes of the tile
    return the same."""
    low, high = Int32(NO_KEY), Int32(0)
    local0 = cute.arch.lane_idx() % tiles.item_lanes * ROWS_PER_LANE
    if wanted:
        if local0 < tiles.queries:
            for row in cutlass.range_constexpr(ROWS_PER_LANE):
                first, end = row_range(tiles, ranges, query_tile * tiles.queries + local0 + row)
                if first < end:
                    low = cutlass.min(low, first)
                    high = cutlass.max(high, end)
    for power in cutlass.range_constexpr(tiles.item_lanes.bit_length() - 1):
        low = cutlass.min(low, cute.arch.shuffle_sync_bfly(low, 1 << power))
        high = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, 1 << power))
    return low, high


@cute.jit
def item_span(tiles: RaggedTiles, ranges: Ranges, base: Int32, stride: Int32, limit: Int32):
    """Return the key tiles [first, end) that some query sees, of the `batch` items from base on, each in `item_lanes` lanes;
    empty from limit on. A batch pays the latency of the ranges once."""
    item, work = base + cute.arch.lane_idx() // tiles.item_lanes * stride, ranges.work
    query_tile, span = item % work.query_tiles, item // work.query_tiles * work.item_tiles
    low, high = seen(tiles, ranges, query_tile, item < limit)
    tile_first = cutlass.max(low // KEY_ROWS, span)
    tile_end = cutlass.min((high + (KEY_ROWS - 1)) // KEY_ROWS, span + work.item_tiles)
    return tile_first, tile_end


@cute.jit
def walk_items(tiles: RaggedTiles, storage: Any, ranges: Ranges, take: cutlass.Constexpr, carried: Any):
    """Call carried = take(first query row, first key tile, end of the key tiles, carried) for each item of this block, empty ones
    too, in the same order in every warp that walks."""
    work = ranges.work
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    if cutlass.const_expr(tiles.balanced_fraction > 0):
        base, stride, limit = Int32(block), Int32(blocks), work.head_items
        position, count, tail = Int32(0), Int32(EVERYTHING), Int32(0)
        while tail < DONE:
            if tail == 0 and base >= limit:
                base, position, count = tail_run(tiles, storage, work)
                stride, limit, tail = Int32(1), work.num_items, Int32(1)
            if base < limit and position < count:
                lane_first, lane_end = item_span(tiles, ranges, base, stride, limit)
                steps, position = skip(tiles, lane_first, lane_end, position, tail)
                for step in cutlass.range(steps, unroll=1):
                    tile_first, tile_end, position = cut(tiles, lane_first, lane_end, step, position, count, tail)
                    row0 = (base + step * stride) % work.query_tiles * tiles.queries
                    carried = take(row0, tile_first, tile_end, carried)
                base = base + tiles.batch * stride
            else:
                tail = Int32(DONE)
    else:
        for base in cutlass.range(block, work.num_items, tiles.batch * blocks, unroll=1):
            lane_first, lane_end = item_span(tiles, ranges, base, blocks, work.num_items)
            for step in cutlass.range(tiles.batch, unroll=1):
                tile_first = cute.arch.shuffle_sync(lane_first, step * tiles.item_lanes)
                tile_end = cute.arch.shuffle_sync(lane_end, step * tiles.item_lanes)
                row0 = (base + step * blocks) % work.query_tiles * tiles.queries
                carried = take(row0, tile_first, tile_end, carried)
    return carried


@cute.jit
def head_items(tiles: RaggedTiles, all_tiles: Int64, num_items: Int32, blocks: Int32):
    """Return the number of items dealt round robin, whole rounds. All items are, if costs might not fit 32 bits."""
    head = num_items
    if cutlass.const_expr(tiles.balanced_fraction > 0):
        rounds = num_items // blocks
        held_back = cutlass.min(cutlass.max(rounds * tiles.balanced_fraction // 8, 1), rounds)
        head = (rounds - held_back) * blocks
        if all_tiles + Int64(num_items) * tiles.item_cost >= 2**30:
            head = num_items
    return head


@cute.jit
def part_items(tiles: RaggedTiles, work: Work):
    """Items of one part: whole batches."""
    batches = (work.num_items - work.head_items + (tiles.batch - 1)) // tiles.batch
    return cutlass.max((batches + (PARTS - 1)) // PARTS, 1) * tiles.batch


@cute.jit
def clear_costs(tiles: RaggedTiles, storage: Any):
    thread, _, _ = cute.arch.thread_idx()
    sLoads = storage.loads.get_tensor(cute.make_layout(tiles.load_words))
    for word in cutlass.range(thread, tiles.load_words, 32 * tiles.num_warps, unroll=1):
        sLoads[word] = Int32(0)


@cute.jit
def sum_costs(tiles: RaggedTiles, storage: Any, params: MqaLogitsParams, work: Work, worker: Int32, workers: cutlass.Constexpr):
    """Fill loads and tails, which have been cleared. Each of `workers` warps adds up its share; the caller synchronises
    afterwards."""
    ranges, lane = ranges_of(params, work), cute.arch.lane_idx()
    loads = storage.loads.data_ptr().toint()
    blocks, _, _ = cute.arch.grid_dim()
    items_of_part = part_items(tiles, work)
    query_tiles, item_tiles = work.query_tiles, work.item_tiles
    for base in cutlass.range(worker * tiles.batch, query_tiles, workers * tiles.batch, unroll=1):
        query_tile = base + lane // tiles.item_lanes
        low, high = seen(tiles, ranges, query_tile, query_tile < query_tiles)
        tile_end = (high + (KEY_ROWS - 1)) // KEY_ROWS
        tile_first = cutlass.min(low // KEY_ROWS, tile_end)
        # The lanes of a query tile share its spans.
        span = tile_first // item_tiles + lane % tiles.item_lanes
        while span * item_tiles < tile_end:
            num_tiles = cutlass.min((span + 1) * item_tiles, tile_end) - cutlass.max(span * item_tiles, tile_first)
            item = span * query_tiles + query_tile
            word = item % blocks
            if item >= work.head_items:
                word = tiles.num_blocks + (item - work.head_items) // items_of_part
            address = cute.make_ptr(Int32, loads + 4 * word, cute.AddressSpace.smem, assumed_align=4)
            cute.arch.red(address, num_tiles + tiles.item_cost, op="add", dtype=Int32, sem="relaxed", scope="cta")
            span = span + tiles.item_lanes


@cute.jit
def tail_run(tiles: RaggedTiles, storage: Any, work: Work):
    """Return this block's run of the items held back: the item to start from, the cost from the run's start to that item (at most
    0), and the cost of the run."""
    if cutlass.const_expr(tiles.balanced_fraction < 8):
        wait_named(COSTS)
    lane = cute.arch.lane_idx()
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    sLoads = storage.loads.get_tensor(cute.make_layout(tiles.load_words))
    own = sLoads[tiles.num_blocks + lane]
    total = own
    for other in cutlass.range(lane, blocks, 32, unroll=1):
        total = total + sLoads[other]
    share = (cute.arch.warp_redux_sync(total, "add") + (blocks - 1)) // blocks
    start = Int32(0)
    for other in cutlass.range(lane, block, 32, unroll=1):
        start = start + cutlass.max(share - sLoads[other], 0)
    start = cute.arch.warp_redux_sync(start, "add")
    before = running_sum(own) - own
    # The last part that begins at or before the run.
    reached = Int32(0)
    if before <= start:
        reached = Int32(1)
    part = cute.arch.warp_redux_sync(reached, "add") - 1
    base = work.head_items + part * part_items(tiles, work)
    return base, cute.arch.shuffle_sync(before, part) - start, cutlass.max(share - sLoads[block], 0)


@cute.jit
def skip(tiles: RaggedTiles, lane_first: Int32, lane_end: Int32, position: Int32, tail: Int32):
    """Return the items of a batch to look at, and the position. There are none if the whole batch comes before this block's
    run."""
    steps = Int32(tiles.batch)
    if tail != 0:
        own = Int32(0)
        if cute.arch.lane_idx() % tiles.item_lanes == 0 and lane_first < lane_end:
            own = lane_end - lane_first + tiles.item_cost
        own = cute.arch.warp_redux_sync(own, "add")
        if position + own <= 0:
            steps, position = Int32(0), position + own
    return steps, position


@cute.jit
def cut(tiles: RaggedTiles, lane_first: Int32, lane_end: Int32, step: Int32, position: Int32, count: Int32, tail: Int32):
    """Return the key tiles [first, end) of an item of the batch that are in this block's run, and the position after the item."""
    item_first = cute.arch.shuffle_sync(lane_first, step * tiles.item_lanes)
    num_tiles = cute.arch.shuffle_sync(lane_end, step * tiles.item_lanes) - item_first
    tile_first, tile_end = item_first, item_first + num_tiles
    if tail != 0:
        if num_tiles > 0:
            tile_first = item_first + cutlass.min(cutlass.max(-position - tiles.item_cost, 0), num_tiles)
            tile_end = item_first + cutlass.min(cutlass.max(count - position - tiles.item_cost, 0), num_tiles)
            position = position + num_tiles + tiles.item_cost
    return tile_first, tile_end, position
