"""The warp of the ragged logits kernel that copies: queries once an item, keys through a ring."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from kernels_cute.mqa_logits.barriers import arrive, arrive_and_expect, pointer, wait
from kernels_cute.mqa_logits.constants import KEY_ROWS, QUERIES_PER_GROUP
from kernels_cute.mqa_logits.products import advance, query_partition
from kernels_cute.mqa_logits.ragged_schedule import DONE, cut, first_round, first_row, item_span, skip, tail_run
from kernels_cute.mqa_logits.ragged_tiles import ranges_of


@cute.jit
def copy_warp(tiles, storage, tma, params, work):
    ranges = ranges_of(params, work)
    query_smem, key_smem = tiles.query_smem(), tiles.key_smem()
    sQueries = storage.queries.get_tensor(query_smem.outer, swizzle=query_smem.inner)
    sKeys = storage.keys.get_tensor(key_smem.outer, swizzle=key_smem.inner)
    gKeys = cute.local_tile(tma.key_tensor, (KEY_ROWS, tiles.head_dim), (None, None))
    to_keys, from_keys = cpasync.tma_partition(
        tma.key_atom, 0, cute.make_layout(1), cute.group_modes(sKeys, 0, 2), cute.group_modes(gKeys, 0, 2)
    )
    tensors = (tma, sQueries, to_keys, from_keys)

    stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
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
                    stage, parity, key_stage, key_parity = copy_item(
                        tiles, storage, tensors, row0, tile_first, tile_end, (stage, parity, key_stage, key_parity)
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
                stage, parity, key_stage, key_parity = copy_item(
                    tiles, storage, tensors, row0, tile_first, tile_end, (stage, parity, key_stage, key_parity)
                )
    # The end mark carries no bytes: only the arrival that queries_full counts.
    wait(tiles.barriers.queries_free, storage, stage, parity ^ 1, by="copy")
    with cute.arch.elect_one():
        arrive(tiles.barriers.queries_full, storage, stage, by="copy")


@cute.jit
def copy_item(tiles, storage, tensors, row0, tile_first, tile_end, rings):
    """Queries and keys of one item, where it holds any; the places that come next in the two rings."""
    tma, sQueries, to_keys, from_keys = tensors
    stage, parity, key_stage, key_parity = rings
    barriers = tiles.barriers
    if tile_first < tile_end:
        wait(barriers.queries_free, storage, stage, parity ^ 1, by="copy")
        with cute.arch.elect_one():
            arrive_and_expect(barriers.queries_full, storage, stage, tiles.query_bytes, by="copy")
        for kv_head in cutlass.range(tiles.num_kv_heads, unroll=1):
            to_queries, from_queries = query_partition(tiles, tma, sQueries, kv_head)
            for half in cutlass.range_constexpr(2):
                for group in cutlass.range(tiles.groups, unroll=1):
                    box = row0 // QUERIES_PER_GROUP + half * tiles.groups + group
                    cute.copy(
                        tma.query_atom,
                        from_queries[None, box],
                        to_queries[None, group, (stage * 2 + half) * tiles.num_kv_heads + kv_head],
                        tma_bar_ptr=pointer(barriers.queries_full, storage, stage),
                    )
        stage, parity = advance(stage, parity, tiles.query_stages)
        for tile in cutlass.range(tile_first, tile_end, unroll=1):
            for kv_round in cutlass.range(tiles.rounds, unroll=1):
                wait(barriers.keys_free, storage, key_stage, key_parity ^ 1, by="copy")
                with cute.arch.elect_one():
                    arrive_and_expect(barriers.keys_full, storage, key_stage, tiles.key_bytes, by="copy")
                for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
                    cute.copy(
                        tma.key_atom,
                        from_keys[None, tile, kv_round * tiles.kv_heads_per_round + nth],
                        to_keys[None, key_stage * tiles.kv_heads_per_round + nth],
                        tma_bar_ptr=pointer(barriers.keys_full, storage, key_stage),
                    )
                key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
    return stage, parity, key_stage, key_parity
