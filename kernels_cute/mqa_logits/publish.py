"""The warp of a logits kernel that tells the math warps of each item: its place, ranges or lengths, and weights in float32."""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.indexer.problem import MqaLogitsParams, PagedMqaLogitsParams
from kernels_cute.mqa_logits.barriers import arrive, wait
from kernels_cute.mqa_logits.paged_schedule import row_length, walk_jobs
from kernels_cute.mqa_logits.products import advance
from kernels_cute.mqa_logits.ragged_schedule import row_range, walk_items
from kernels_cute.mqa_logits.tiles import Lengths, LogitsTiles, PagedTiles, RaggedTiles, Ranges, Work, ranges_of

END_OF_LIST = -1  # query row of the item after the last


@cute.jit
def end_list(tiles: LogitsTiles, storage: Any, stage: Int32, parity: Int32):
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))
    wait(tiles, storage, "queries_free", stage, parity ^ 1, by="publish")
    if cute.arch.lane_idx() == 0:
        sItems[4 * stage] = Int32(END_OF_LIST)
    arrive(tiles, storage, "queries_full", stage, by="publish")


def weight_at(weights, row, head):
    """A weight in float32."""
    offset = row * weights.stride[0] + head
    return Float32(cute.make_tensor(weights.iterator + offset, cute.make_layout(1))[0])


@cute.jit
def ragged_warp(tiles: RaggedTiles, storage: Any, params: MqaLogitsParams, work: Work):
    ranges = ranges_of(params, work)
    take = partial(publish_ragged_item, tiles, storage, params.weights, ranges)
    stage, parity = walk_items(tiles, storage, ranges, take, (Int32(0), Int32(0)))
    end_list(tiles, storage, stage, parity)


@cute.jit
def publish_ragged_item(
    tiles: RaggedTiles, storage: Any, weights: cute.Tensor, ranges: Ranges, row0: Int32, tile_first: Int32, tile_end: Int32,
    ring: Any,
):  # fmt: skip
    """Publish one item, if it holds anything. Return the stage and parity that come next in the ring."""
    stage, parity = ring
    lane = cute.arch.lane_idx()
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))
    sStarts = storage.starts.get_tensor(cute.make_layout(tiles.slots))
    sEnds = storage.ends.get_tensor(cute.make_layout(tiles.slots))
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.slots * tiles.num_heads))
    if tile_first < tile_end:
        wait(tiles, storage, "queries_free", stage, parity ^ 1, by="publish")
        if lane == 0:
            sItems[4 * stage], sItems[4 * stage + 1], sItems[4 * stage + 2] = row0, tile_first, tile_end
        slot = stage * tiles.queries
        for part in cutlass.range_constexpr((tiles.queries + 31) // 32):
            local = lane + 32 * part
            if local < tiles.queries:
                first, end = row_range(tiles, ranges, row0 + local)
                sStarts[slot + local] = first
                sEnds[slot + local] = end
        if cutlass.const_expr(tiles.has_weights):
            for local in cutlass.range(lane, tiles.queries * tiles.num_heads, 32, unroll=tiles.weight_loads):
                row = row0 + local // tiles.num_heads
                weight = Float32(0.0)
                if row < ranges.num_queries:
                    weight = weight_at(weights, Int64(row), local % tiles.num_heads)
                sWeights[slot * tiles.num_heads + local] = weight
        arrive(tiles, storage, "queries_full", stage, by="publish")
        stage, parity = advance(stage, parity, tiles.query_stages)
    return stage, parity


@cute.jit
def paged_warp(tiles: PagedTiles, storage: Any, params: PagedMqaLogitsParams, lengths: Lengths):
    take = partial(publish_paged_item, tiles, storage, params.weights, lengths)
    stage, parity = walk_jobs(tiles, lengths, take, (Int32(0), Int32(0)))
    end_list(tiles, storage, stage, parity)


@cute.jit
def publish_paged_item(
    tiles: PagedTiles, storage: Any, weights: cute.Tensor, lengths: Lengths, job: Int32, tile: Int32, num_tiles: Int32, _: Int32,
    ring: Any,
):  # fmt: skip
    """Publish the lengths and weights of an item's drafts. A draft beyond the last has length 0, so nothing of it is stored."""
    stage, parity = ring
    lane, sequence, draft0 = cute.arch.lane_idx(), job // tiles.passes, job % tiles.passes * tiles.drafts
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))
    wait(tiles, storage, "queries_free", stage, parity ^ 1, by="publish")
    if lane == 0:
        sItems[4 * stage] = sequence * tiles.next_n + draft0
        sItems[4 * stage + 1] = tile * tiles.tile
        sItems[4 * stage + 2] = num_tiles
    sLengths = storage.lengths.get_tensor(cute.make_layout(tiles.drafts * tiles.query_stages))
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.weight_slots * tiles.query_stages))
    for local in cutlass.range(lane, tiles.drafts, 32, unroll=1):
        own = Int32(0)
        if draft0 + local < tiles.next_n:
            own = row_length(tiles, lengths, sequence, draft0 + local)
        sLengths[stage * tiles.drafts + local] = own
    if cutlass.const_expr(tiles.has_weights):
        for column in cutlass.range(lane, tiles.weight_slots, 32, unroll=4):
            draft = draft0 + column // tiles.num_heads
            weight = Float32(0.0)
            if draft < tiles.next_n:
                weight = weight_at(weights, Int64(sequence) * tiles.next_n + draft, column % tiles.num_heads)
            sWeights[stage * tiles.weight_slots + column] = weight
    arrive(tiles, storage, "queries_full", stage, by="publish")
    stage, parity = advance(stage, parity, tiles.query_stages)
    return stage, parity
