"""A math warpgroup of the ragged logits kernel, with one set of accumulators or two, each for half of the columns. With one set a
whole epilogue must fit into the other warpgroup's turn, and from 32 heads down it does not; with two half of one must. The price
is N = 128 a product in place of 256: keys are read from shared memory twice.

After the sum over heads a lane has two keys, 8 apart, of one query a group; eight lanes have neighbouring keys. Scores are stored
directly (`store_width` 8), or through shared memory, where the four warps of a warpgroup lay their keys side by side (32).
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.indexer.problem import MqaLogitsParams
from kernels_cute.mqa_logits import products
from kernels_cute.mqa_logits.barriers import SCORES, TURN, arrive_named, wait, wait_named
from kernels_cute.mqa_logits.orders import KEY_ROWS
from kernels_cute.mqa_logits.shape import PITCH
from kernels_cute.mqa_logits.tiles import RaggedTiles


class Target(NamedTuple):
    """Destination of an item's scores."""

    out: Any
    line: Any  # pointer to this lane's first row of out
    query: Any  # that row's number in the query tile
    stage: Any  # of the item
    half: Any  # math warpgroup
    warp: Any  # in its warpgroup


@cute.jit
def math_warpgroup(tiles: RaggedTiles, storage: Any, params: MqaLogitsParams, mma: cute.TiledMma, half: Int32, warp: Int32):
    """half: number of the math warpgroup; warp: within it."""
    lane, operands = cute.arch.lane_idx(), products.operands_of(tiles, storage, mma)
    rWeights = cute.make_rmem_tensor(cute.make_layout(tiles.groups * tiles.num_heads), Float32)  # of this lane's queries
    scale = params.scale * 0.5 if tiles.relu_as_add_abs else params.scale
    key_lane = 16 * warp + lane // 4  # this lane's first key row in a tile; its second is 8 further
    query_lane = half * tiles.queries_per_warpgroup + lane % 4
    if cutlass.const_expr(tiles.accumulator_sets == 2):
        rParts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)  # sums of a query
        registers = (products.product_tensor(tiles, mma), products.product_tensor(tiles, mma), rWeights, rParts)
    else:
        rTotals = cute.make_rmem_tensor(cute.make_layout(2 * tiles.groups), Float32)  # over the key heads of a tile
        registers = (products.product_tensor(tiles, mma), rWeights, rTotals)
    lane_at = (half, warp, key_lane, query_lane)
    take = partial(score_item, tiles, storage, params._replace(scale=scale), operands, registers, rWeights, lane_at)
    products.walk_published(tiles, storage, half, take)


@cute.jit
def score_item(
    tiles: RaggedTiles, storage: Any, params: MqaLogitsParams, operands: Any, registers: Any, rWeights: cute.Tensor, lane_at: Any,
    item: Any, key_ring: Any,
):  # fmt: skip
    """Compute and store the scores of an item. Return the stage and parity that come next in the ring of keys."""
    half, warp, key_lane, query_lane = lane_at
    stage, row0, tile_first, tile_end = item
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.slots * tiles.num_heads))
    slot = stage * tiles.queries + query_lane
    target = target_of(tiles, params.out, row0, stage, half, warp)
    if cutlass.const_expr(tiles.has_weights):
        for group in cutlass.range_constexpr(tiles.groups):
            for head in cutlass.range_constexpr(tiles.num_heads):
                rWeights[group * tiles.num_heads + head] = sWeights[(slot + 4 * group) * tiles.num_heads + head]
    for tile in cutlass.range(tile_first, tile_end, unroll=1):
        scales = (params.k_scale, tile * KEY_ROWS + key_lane, params.scale)
        score_tile = tile_with_two_sets if tiles.accumulator_sets == 2 else tile_with_one_set
        key_ring = score_tile(tiles, storage, operands, registers, scales, target, tile, key_ring)
    return key_ring


@cute.jit
def key_factors(tiles: RaggedTiles, scales: Any, first_kv: cutlass.Constexpr):
    """Load the scales of this lane's two keys for the key heads of a round. The loads are issued before the products, whose time
    hides them."""
    k_scale, key, _ = scales
    rFactors = cute.make_rmem_tensor(cute.make_layout(2 * tiles.kv_heads_per_round), Float32)
    rFactors.fill(1.0)
    if cutlass.const_expr(tiles.has_k_scale):
        num_keys = cute.size(k_scale, mode=[0])
        gScales = cute.make_tensor(k_scale.iterator, cute.make_layout(num_keys * tiles.num_kv_heads))
        for side in cutlass.range_constexpr(2):
            if key + 8 * side < num_keys:
                for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
                    row = (key + 8 * side) * tiles.num_kv_heads
                    rFactors[2 * nth + side] = gScales[row + first_kv + nth]
    return rFactors


@cute.jit
def tile_with_one_set(
    tiles: RaggedTiles, storage: Any, operands: Any, registers: Any, scales: Any, target: Target, tile: Int32, key_ring: Any
):
    """Score one key tile with one set of accumulators. Return the stage and parity that come next in the ring of keys."""
    rProducts, rWeights, rTotals = registers
    half = target.half
    if cutlass.const_expr(tiles.num_kv_heads > 1):
        rTotals.fill(0.0)
    for kv_round in cutlass.range_constexpr(tiles.rounds):
        first_kv = kv_round * tiles.kv_heads_per_round
        is_last = kv_round == tiles.rounds - 1
        rFactors = key_factors(tiles, scales, first_kv)
        wait(tiles, storage, "keys_full", *key_ring, by="math")
        wait_named(TURN, half)
        warpgroup.fence()
        products.issue_products(tiles, rProducts, operands, ((), ()), (key_ring[0], target.stage * 2 + half), first_kv, True)
        # While the last products are still on their way the other warpgroup may queue its own after them.
        warpgroup.wait_group(tiles.steps_in_flight_at_turn)
        arrive_named(TURN, 1 - half)
        warpgroup.wait_group(0)
        key_ring = products.release_keys(tiles, storage, key_ring)
        for one in cutlass.range_constexpr(2 * tiles.kv_heads_per_round):
            rFactors[one] = rFactors[one] * scales[2]
        if cutlass.const_expr(is_last):
            begin_tile(tiles, target)
        for group in cutlass.range_constexpr(tiles.groups):
            low, high = Float32(0.0), Float32(0.0)
            if cutlass.const_expr(tiles.num_kv_heads == 1):
                sums = products.head_sums(tiles, rProducts, rWeights, group, 0, 0)
                low, high = sums[0] * rFactors[0], sums[1] * rFactors[1]
            else:
                low, high = products.add_round(tiles, rTotals, rProducts, rWeights, rFactors, group, first_kv)
            if cutlass.const_expr(is_last):
                put(tiles, storage, target, tile, group, low, high)
        if cutlass.const_expr(is_last):
            finish_tile(tiles, storage, target, tile)
    return key_ring


@cute.jit
def tile_with_two_sets(
    tiles: RaggedTiles, storage: Any, operands: Any, registers: Any, scales: Any, target: Target, tile: Int32, key_ring: Any
):
    """Score one key tile with two sets of accumulators. Return the stage and parity that come next in the ring of keys."""
    rFirst, rSecond, rWeights, rParts = registers
    half = target.half
    rFactors = key_factors(tiles, scales, 0)
    wait(tiles, storage, "keys_full", *key_ring, by="math")
    wait_named(TURN, half)
    warpgroup.fence()
    products.issue_products(tiles, rFirst, operands, ((), (0,)), (key_ring[0], target.stage * 2 + half), 0, False)
    products.issue_products(tiles, rSecond, operands, ((), (1,)), (key_ring[0], target.stage * 2 + half), 0, False)
    # While the second half is still on its way the other warpgroup may queue its own after it.
    if cutlass.const_expr(tiles.pass_turn_at_issue):
        arrive_named(TURN, 1 - half)
    warpgroup.wait_group(1)
    if cutlass.const_expr(not tiles.pass_turn_at_issue):
        arrive_named(TURN, 1 - half)
    begin_tile(tiles, target)
    half_sums(tiles, storage, (rFirst, rWeights, rParts), 0, rFactors, scales[2], target, tile)
    warpgroup.wait_group(0)
    key_ring = products.release_keys(tiles, storage, key_ring)
    half_sums(tiles, storage, (rSecond, rWeights, rParts), 1, rFactors, scales[2], target, tile)
    finish_tile(tiles, storage, target, tile)
    return key_ring


@cute.jit
def half_sums(
    tiles: RaggedTiles, storage: Any, registers: Any, column_half: cutlass.Constexpr, rFactors: cute.Tensor, scale: Float32,
    target: Target, tile: Int32,
):  # fmt: skip
    """Sum half of the columns, eight of them (two heads of four queries) at a time, and store the queries that end in it. rParts:
    the sums of the query that the first half left unfinished."""
    rProducts, rWeights, rParts = registers
    blocks, pairs = tiles.columns // 16, tiles.num_heads // 2
    for block in cutlass.range_constexpr(blocks):
        group, pair = (column_half * blocks + block) // pairs, (column_half * blocks + block) % pairs
        if cutlass.const_expr(pair == 0):
            rParts.fill(0.0)
        products.add_pair(tiles, rParts, rProducts, rWeights, block, group, [2 * pair, 2 * pair + 1], pair == 0)
        if cutlass.const_expr(pair == pairs - 1):
            low = (rParts[0, 0] + rParts[0, 1]) * (rFactors[0] * scale)
            high = (rParts[1, 0] + rParts[1, 1]) * (rFactors[1] * scale)
            put(tiles, storage, target, tile, group, low, high)


@cute.jit
def target_of(tiles: RaggedTiles, out: cute.Tensor, row0: Int32, stage: Int32, half: Int32, warp: Int32):
    query = half * tiles.queries_per_warpgroup
    if cutlass.const_expr(tiles.store_width == 8):
        query = query + cute.arch.lane_idx() % 4
    return Target(out, out.iterator + Int64(row0 + query) * out.stride[0], query, stage, half, warp)


@cute.jit
def begin_tile(tiles: RaggedTiles, target: Target):
    """Wait, before a tile's first `put`, until the scores of the tile before have been read from shared memory."""
    if cutlass.const_expr(tiles.store_width == 32):
        wait_named(SCORES, target.half)


@cute.jit
def put(tiles: RaggedTiles, storage: Any, target: Target, tile: Int32, group: cutlass.Constexpr, low: Float32, high: Float32):
    """Store the scores of this lane's query of a group, for keys key and key + 8, or put them into shared memory."""
    out, lane = target.out, cute.arch.lane_idx()
    key = tile * KEY_ROWS + 16 * target.warp + lane // 4
    if cutlass.const_expr(tiles.store_width == 8):
        first, end = range_of(tiles, storage, target.stage, target.query + 4 * group)
        start = start_of(tiles, target.line + 4 * group * out.stride[0], first) + key
        products.store_between(out.element_type, start, low, key, first, end)
        products.store_between(out.element_type, start + 8, high, key + 8, first, end)
    else:
        sScores = storage.scores.get_tensor(cute.make_layout(tiles.score_words))
        at = (target.query + 4 * group + lane % 4) * PITCH + 16 * target.warp + lane // 4
        sScores[at] = low
        sScores[at + 8] = high


@cute.jit
def finish_tile(tiles: RaggedTiles, storage: Any, target: Target, tile: Int32):
    """Store, after a tile's last `put`, the scores that went through shared memory."""
    if cutlass.const_expr(tiles.store_width == 32):
        out, lane = target.out, cute.arch.lane_idx()
        sScores = storage.scores.get_tensor(cute.make_layout(tiles.score_words))
        wait_named(SCORES, target.half)
        for step in cutlass.range_constexpr(tiles.queries_per_warpgroup // 4):
            row = 4 * step + target.warp
            first, end = range_of(tiles, storage, target.stage, target.query + row)
            for part in cutlass.range_constexpr(KEY_ROWS // 32):
                key = tile * KEY_ROWS + 32 * part + lane
                start = start_of(tiles, target.line + row * out.stride[0], first) + key
                score = sScores[(target.query + row) * PITCH + 32 * part + lane]
                products.store_between(out.element_type, start, score, key, first, end)


@cute.jit
def range_of(tiles: RaggedTiles, storage: Any, stage: Int32, query: Int32):
    sStarts = storage.starts.get_tensor(cute.make_layout(tiles.slots))
    sEnds = storage.ends.get_tensor(cute.make_layout(tiles.slots))
    return sStarts[stage * tiles.queries + query], sEnds[stage * tiles.queries + query]


@cute.jit
def start_of(tiles: RaggedTiles, line: cute.Pointer, first: Int32):
    """Address of key 0 in a row."""
    if cutlass.const_expr(tiles.packed):
        line = line - first
    return line
