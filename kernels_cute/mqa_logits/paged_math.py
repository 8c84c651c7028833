"""A math warpgroup of the paged logits kernel."""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.indexer.problem import PagedMqaLogitsParams
from kernels_cute.mqa_logits import products
from kernels_cute.mqa_logits.barriers import TURN, arrive_named, wait, wait_named
from kernels_cute.mqa_logits.orders import KEY_ROWS
from kernels_cute.mqa_logits.tiles import PagedTiles


@cute.jit
def math_warpgroup(tiles: PagedTiles, storage: Any, params: PagedMqaLogitsParams, mma: cute.TiledMma, half: Int32, warp: Int32):
    """half: number of the math warpgroup; warp: within it."""
    operands, rProducts = products.operands_of(tiles, storage, mma), products.product_tensor(tiles, mma)
    rWeights = cute.make_rmem_tensor(cute.make_layout(tiles.groups * tiles.lane_heads), Float32)  # of this lane
    rEnds = cute.make_rmem_tensor(cute.make_layout(tiles.groups), Int32)  # lengths of this lane's drafts
    rTotals = cute.make_rmem_tensor(cute.make_layout(2 * tiles.groups), Float32)  # over the key heads of a tile
    lane, lanes = cute.arch.lane_idx(), tiles.lanes_per_query
    draft = lane % 4 // lanes  # of the quad
    key_lane = KEY_ROWS * half + 16 * warp + lane // 4  # this lane's first key in a tile; its second is 8 further
    store_lane = key_lane  # the key that this lane stores, where a draft's lanes share its two
    if cutlass.const_expr(lanes > 1):
        store_lane = key_lane + lane % 2 * 8
    scale_lane = key_lane if tiles.num_kv_heads > 1 else store_lane
    registers, lanes_at = (rProducts, rWeights, rEnds, rTotals), (half, draft, store_lane, scale_lane)
    products.walk_published(tiles, storage, half, partial(score_item, tiles, storage, params, operands, registers, lanes_at))


@cute.jit
def score_item(
    tiles: PagedTiles, storage: Any, params: PagedMqaLogitsParams, operands: Any, registers: Any, lanes_at: Any, item: Any,
    key_ring: Any,
):  # fmt: skip
    """Compute and store the scores of an item. Return the stage and parity that come next in the ring of keys."""
    rProducts, rWeights, rEnds, rTotals = registers
    half, draft, store_lane, scale_lane = lanes_at
    stage, row0, first, num_tiles = item
    out = params.out
    line = out.iterator + Int64(row0 + draft) * out.stride[0]
    read_drafts(tiles, storage, rWeights, rEnds, stage)
    for step in cutlass.range(num_tiles, unroll=1):
        key = first + step * tiles.tile + store_lane
        if cutlass.const_expr(tiles.num_kv_heads > 1):
            rTotals.fill(0.0)
        for kv_round in cutlass.range_constexpr(tiles.rounds):
            first_kv = kv_round * tiles.kv_heads_per_round
            wait(tiles, storage, "keys_full", *key_ring, by="math")
            if cutlass.const_expr(tiles.takes_turns):
                wait_named(TURN, half)
            warpgroup.fence()
            products.issue_products(tiles, rProducts, operands, ((half,), ()), (key_ring[0], stage), first_kv, tiles.takes_turns)
            rFactors = key_factors(tiles, storage, params.scale, key_ring[0], scale_lane, first_kv)
            if cutlass.const_expr(tiles.takes_turns):
                warpgroup.wait_group(1)  # while the last products run, the other warpgroup may queue its own
                arrive_named(TURN, 1 - half)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()  # every lane's scales are read
            key_ring = products.release_keys(tiles, storage, key_ring)
            for group in cutlass.range_constexpr(tiles.groups):
                target = line + tiles.group_queries * group * out.stride[0] + key
                low, high = Float32(0.0), Float32(0.0)
                if cutlass.const_expr(tiles.num_kv_heads == 1):
                    low, high = products.head_sums(tiles, rProducts, rWeights, group, 0, 0)
                else:
                    low, high = products.add_round(tiles, rTotals, rProducts, rWeights, rFactors, group, first_kv)
                if cutlass.const_expr(kv_round == tiles.rounds - 1):
                    store_scores(tiles, out.element_type, target, key, rEnds[group], rFactors, low, high)
    return key_ring


@cute.jit
def read_drafts(tiles: PagedTiles, storage: Any, rWeights: cute.Tensor, rEnds: cute.Tensor, stage: Int32):
    """Load the lengths and weights of this lane's drafts of an item."""
    lane, lanes = cute.arch.lane_idx(), tiles.lanes_per_query
    part, draft = lane % lanes, lane % 4 // lanes  # of the quad: which heads of which draft
    sLengths = storage.lengths.get_tensor(cute.make_layout(tiles.drafts * tiles.query_stages))
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.weight_slots * tiles.query_stages))
    for group in cutlass.range_constexpr(tiles.groups):
        local = stage * tiles.drafts + group * tiles.group_queries + draft
        rEnds[group] = sLengths[local]
        if cutlass.const_expr(lanes == 4):
            if lane % 4 >= 2:  # lanes 2 and 3 end with the same sums as 0 and 1
                rEnds[group] = Int32(0)
        if cutlass.const_expr(tiles.has_weights):
            for head in cutlass.range_constexpr(tiles.lane_heads):
                at = head // 2 * (2 * lanes) + head % 2
                rWeights[group * tiles.lane_heads + head] = sWeights[local * tiles.num_heads + 2 * part + at]


@cute.jit
def key_factors(
    tiles: PagedTiles, storage: Any, scale: Float32, key_stage: Int32, scale_lane: Int32, first_kv: cutlass.Constexpr
):
    """Return the scales of the keys whose sums this lane ends with, for the key heads of a round. With several key heads every
    sum is scaled before lanes exchange, so the scales are those of both keys."""
    sides = 1 if tiles.lanes_per_query > 1 and tiles.num_kv_heads == 1 else 2
    sScales = storage.scales.get_tensor(cute.make_layout(tiles.scale_slots))
    rFactors = cute.make_rmem_tensor(cute.make_layout(sides * tiles.kv_heads_per_round), Float32)
    for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
        for side in cutlass.range_constexpr(sides):
            rFactors[nth * sides + side] = scale
            if cutlass.const_expr(tiles.has_k_scale):
                row = (key_stage * tiles.tile + scale_lane + 8 * side) * tiles.num_kv_heads
                rFactors[nth * sides + side] = scale * sScales[row + first_kv + nth]
    return rFactors


@cute.jit
def store_scores(
    tiles: PagedTiles, element_type: cutlass.Constexpr, target: cute.Pointer, key: Int32, end: Int32, rFactors: cute.Tensor,
    low: Float32, high: Float32,
):  # fmt: skip
    """Store the scores of one draft: of this lane's keys, key and key + 8, or, with several lanes a draft, of the one at key."""
    if cutlass.const_expr(tiles.lanes_per_query == 1):
        if cutlass.const_expr(tiles.num_kv_heads == 1):
            low, high = low * rFactors[0], high * rFactors[1]
        products.store_between(element_type, target, low, key, 0, end)
        products.store_between(element_type, target + 8, high, key + 8, 0, end)
    else:
        total = lane_sums(tiles, low, high)
        if cutlass.const_expr(tiles.num_kv_heads == 1):
            total = total * rFactors[0]
        products.store_between(element_type, target, total, key, 0, end)


@cute.jit
def lane_sums(tiles: PagedTiles, low: Float32, high: Float32):
    """Return the whole sum over heads of one of the two keys. Even lanes return the first key's, odd lanes the second's."""
    odd = cute.arch.lane_idx() % 2 != 0
    kept, given = low, high
    if odd:
        kept, given = high, low
    total = kept + cute.arch.shuffle_sync_bfly(given, 1)
    if cutlass.const_expr(tiles.lanes_per_query == 4):
        total = total + cute.arch.shuffle_sync_bfly(total, 2)
    return total
