"""The warp of the ragged logits kernel that tells the math warps of each item: its place, ranges and weights in float32."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.mqa_logits.barriers import arrive, wait
from kernels_cute.mqa_logits.constants import END_OF_LIST
from kernels_cute.mqa_logits.products import advance
from kernels_cute.mqa_logits.ragged_schedule import (
    DONE,
    cut,
    first_round,
    first_row,
    item_span,
    row_range,
    skip,
    tail_run,
)
from kernels_cute.mqa_logits.ragged_tiles import ranges_of


@cute.jit
def publish_warp(tiles, storage, params, work):
    ranges = ranges_of(params, work)
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))

    stage, parity = Int32(0), Int32(0)
    if cutlass.const_expr(tiles.balanced_fraction > 0):
        base, stride, limit, position, count, tail = first_round(work.head_items)
        while tail < DONE:
            if tail == 0 and base >= limit:
                base, position, count = tail_run(tiles, storage, work)
                stride, limit, tail = Int32(1), work.num_items, Int32(1)
            if base < limit and position < count:
                lane_first, lane_end = item_span(tiles, ranges, base, stride, limit)
                steps, position = skip(tiles, lane_first, lane_end, position, tail)
                for step in cutlass.range(steps, unroll=1):
                    tile_first, tile_end, position = cut(tiles, lane_first, lane_end, step, position, count, tail)
                    row0 = first_row(tiles, ranges, base + step * stride)
                    stage, parity = publish_item(
                        tiles, storage, params.weights, ranges, row0, tile_first, tile_end, stage, parity
                    )
                base = base + tiles.batch * stride
            else:
                tail = Int32(DONE)
    else:
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        for base in cutlass.range(block, work.num_items, tiles.batch * blocks, unroll=1):
            lane_first, lane_end = item_span(tiles, ranges, base, blocks, work.num_items)
            for step in cutlass.range(tiles.batch, unroll=1):
                tile_first = cute.arch.shuffle_sync(lane_first, step * tiles.item_lanes)
                tile_end = cute.arch.shuffle_sync(lane_end, step * tiles.item_lanes)
                row0 = first_row(tiles, ranges, base + step * blocks)
                stage, parity = publish_item(tiles, storage, params.weights, ranges, row0, tile_first, tile_end, stage, parity)
    wait(tiles.barriers.queries_free, storage, stage, parity ^ 1, by="publish")
    if cute.arch.lane_idx() == 0:
        sItems[4 * stage] = Int32(END_OF_LIST)
    arrive(tiles.barriers.queries_full, storage, stage, by="publish")


@cute.jit
def publish_item(tiles, storage, weights, ranges, row0, tile_first, tile_end, stage, parity):
    """Publishes one item, where it holds anything; the place that comes next in the ring."""
    lane = cute.arch.lane_idx()
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))
    sStarts = storage.starts.get_tensor(cute.make_layout(tiles.slots))
    sEnds = storage.ends.get_tensor(cute.make_layout(tiles.slots))
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.slots * tiles.num_heads))
    if tile_first < tile_end:
        wait(tiles.barriers.queries_free, storage, stage, parity ^ 1, by="publish")
        if lane == 0:
            sItems[4 * stage] = row0
            sItems[4 * stage + 1] = tile_first
            sItems[4 * stage + 2] = tile_end
        slot = stage * tiles.queries
        for part in cutlass.range_constexpr((tiles.queries + 31) // 32):
            local = lane + 32 * part
            if local < tiles.queries:
                first, end = row_range(tiles, ranges, row0 + local)
                sStarts[slot + local] = first
                sEnds[slot + local] = end
        if cutlass.const_expr(tiles.has_weights):
            publish_weights(tiles, sWeights, weights, row0, ranges.num_queries, slot)
        arrive(tiles.barriers.queries_full, storage, stage, by="publish")
        stage, parity = advance(stage, parity, tiles.query_stages)
    return stage, parity


@cute.jit
def publish_weights(tiles, sWeights, weights, row0, num_queries, slot):
    lane = cute.arch.lane_idx()
    for local in cutlass.range(lane, tiles.queries * tiles.num_heads, 32, unroll=tiles.weight_loads):
        row = row0 + local // tiles.num_heads
        weight = Float32(0.0)
        if row < num_queries:
            offset = Int64(row) * weights.stride[0] + local % tiles.num_heads
            weight = Float32(cute.make_tensor(weights.iterator + offset, cute.make_layout(1))[0])
        sWeights[slot * tiles.num_heads + local] = weight
