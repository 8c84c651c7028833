"""The warp of a logits kernel that copies: queries once an item, keys (and, paged, their scales) through a ring."""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.ops.indexer.problem import MqaLogitsParams, PagedMqaLogitsParams
from kernels_cute.common.ptx import copy_from_global
from kernels_cute.mqa_logits.barriers import arrive, arrive_and_expect, pointer, wait
from kernels_cute.mqa_logits.orders import QUERIES_PER_GROUP
from kernels_cute.mqa_logits.paged_schedule import likely_first, walk_jobs
from kernels_cute.mqa_logits.products import advance, query_partition
from kernels_cute.mqa_logits.ragged_schedule import walk_items
from kernels_cute.mqa_logits.tiles import Lengths, LogitsTiles, PagedTiles, RaggedTiles, Tma, Work, ranges_of


def tensors_of(tiles, storage, tma):
    """(tma, queries in shared memory, keys there, keys in the tensor map), as `cute.copy` takes the keys."""
    query_smem, key_smem, modes = tiles.query_smem(), tiles.key_smem(), len(tiles.key_box)
    sQueries = storage.queries.get_tensor(query_smem.outer, swizzle=query_smem.inner)
    sKeys = storage.keys.get_tensor(key_smem.outer, swizzle=key_smem.inner)
    gKeys = cute.local_tile(tma.key_tensor, tiles.key_box, (None,) * modes)
    sKeys, gKeys = cute.group_modes(sKeys, 0, modes), cute.group_modes(gKeys, 0, modes)
    return tma, sQueries, *cpasync.tma_partition(tma.key_atom, 0, cute.make_layout(1), sKeys, gKeys)


@cute.jit
def end_list(tiles: LogitsTiles, storage: Any, stage: Int32, parity: Int32):
    """Announce the end of the list. It carries no bytes: only the arrival that queries_full counts."""
    wait(tiles, storage, "queries_free", stage, parity ^ 1, by="copy")
    with cute.arch.elect_one():
        arrive(tiles, storage, "queries_full", stage, by="copy")


@cute.jit
def fill_stage(tiles: LogitsTiles, storage: Any, ring: cutlass.Constexpr, stage: Int32, parity: Int32, num_bytes: Int32):
    """Wait until a stage of a ring is free, and announce the bytes that will be copied there."""
    wait(tiles, storage, f"{ring}_free", stage, parity ^ 1, by="copy")
    with cute.arch.elect_one():
        arrive_and_expect(tiles, storage, f"{ring}_full", stage, num_bytes, by="copy")


@cute.jit
def ragged_warp(tiles: RaggedTiles, storage: Any, tma: Tma, params: MqaLogitsParams, work: Work):
    ranges = ranges_of(params, work)
    take = partial(copy_ragged_item, tiles, storage, tensors_of(tiles, storage, tma))
    stage, parity, _, _ = walk_items(tiles, storage, ranges, take, (Int32(0), Int32(0), Int32(0), Int32(0)))
    end_list(tiles, storage, stage, parity)


@cute.jit
def copy_ragged_item(tiles: RaggedTiles, storage: Any, tensors: Any, row0: Int32, tile_first: Int32, tile_end: Int32, rings: Any):
    """Copy the queries and keys of one item, if it holds any. Return the stages and parities that come next in the two rings."""
    tma, sQueries, to_keys, from_keys = tensors
    stage, parity, key_stage, key_parity = rings
    if tile_first < tile_end:
        fill_stage(tiles, storage, "queries", stage, parity, tiles.query_bytes)
        for kv_head in cutlass.range(tiles.num_kv_heads, unroll=1):
            to_queries, from_queries = query_partition(tiles, tma, sQueries, kv_head)
            for half in cutlass.range_constexpr(2):
                for group in cutlass.range(tiles.groups, unroll=1):
                    box = row0 // QUERIES_PER_GROUP + half * tiles.groups + group
                    to = to_queries[None, group, (stage * 2 + half) * tiles.num_kv_heads + kv_head]
                    full = pointer(storage, "queries_full", stage)
                    cute.copy(tma.query_atom, from_queries[None, box], to, tma_bar_ptr=full)
        stage, parity = advance(stage, parity, tiles.query_stages)
        for tile in cutlass.range(tile_first, tile_end, unroll=1):
            for kv_round in cutlass.range(tiles.rounds, unroll=1):
                fill_stage(tiles, storage, "keys", key_stage, key_parity, tiles.key_bytes)
                for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
                    keys = from_keys[None, tile, kv_round * tiles.kv_heads_per_round + nth]
                    to = to_keys[None, key_stage * tiles.kv_heads_per_round + nth]
                    cute.copy(tma.key_atom, keys, to, tma_bar_ptr=pointer(storage, "keys_full", key_stage))
                key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
    return stage, parity, key_stage, key_parity


@cute.jit
def prefetch_pages(tiles: PagedTiles, params: PagedMqaLogitsParams, lengths: Lengths):
    """Prefetch the table entries of this block's first keys, as if every sequence were as long as it can be. Lengths, table
    entries and keys come from memory one after the other, which is most of a short launch; here two of these trips overlap."""
    tables, lane = params.block_tables, cute.arch.lane_idx()
    job, tile = likely_first(tiles, lengths, lengths.batch * tiles.passes)
    page = cutlass.min((tile * tiles.tile + lane * tiles.piece) // tiles.page_size, cute.size(tables, mode=[1]) - 1)
    address = tables.iterator + Int64(job // tiles.passes) * tables.stride[0] + page
    cute.arch.prefetch(address.to_llvm_ptr(), cache_level="L1")


@cute.jit
def paged_warp(tiles: PagedTiles, storage: Any, tma: Tma, params: PagedMqaLogitsParams, lengths: Lengths):
    take = partial(copy_paged_item, tiles, storage, tensors_of(tiles, storage, tma), params)
    stage, parity, _, _ = walk_jobs(tiles, lengths, take, (Int32(0), Int32(0), Int32(0), Int32(0)))
    end_list(tiles, storage, stage, parity)


@cute.jit
def copy_paged_item(
    tiles: PagedTiles, storage: Any, tensors: Any, params: PagedMqaLogitsParams, job: Int32, tile: Int32, num_tiles: Int32,
    length: Int32, rings: Any,
):  # fmt: skip
    """Copy the queries and keys of one item. Return the stages and parities that come next in the two rings."""
    tma, sQueries, to_keys, from_keys = tensors
    stage, parity, key_stage, key_parity = rings
    tables, lane = params.block_tables, cute.arch.lane_idx()
    sequence = job // tiles.passes
    line = tables.iterator + Int64(sequence) * tables.stride[0]
    first = tile * tiles.tile  # key of the item
    ahead = page_numbers(tiles, line, first, length, lane)
    fill_stage(tiles, storage, "queries", stage, parity, tiles.query_bytes)
    for kv_head in cutlass.range(tiles.num_kv_heads, unroll=1):
        to_queries, from_queries = query_partition(tiles, tma, sQueries, kv_head)
        for group in cutlass.range_constexpr(tiles.groups):
            queries = from_queries[None, job % tiles.passes * tiles.groups + group, sequence]
            to = to_queries[None, group, stage * tiles.num_kv_heads + kv_head]
            cute.copy(tma.query_atom, queries, to, tma_bar_ptr=pointer(storage, "queries_full", stage))
    stage, parity = advance(stage, parity, tiles.query_stages)
    page = ahead
    for step in cutlass.range(num_tiles, unroll=1):
        slot = step % tiles.tiles_per_load
        key = first + step * tiles.tile
        if slot == 0:
            # The next entries are asked for a load ahead of their use.
            page = ahead
            ahead = page_numbers(tiles, line, key + tiles.tiles_per_load * tiles.tile, length, lane)
        # Pieces beyond the last key are left out: they have no table entry, and their scores are not stored.
        pieces = cutlass.min((length - key + (tiles.piece - 1)) >> tiles.piece_bits, tiles.pieces)
        for kv_round in cutlass.range(tiles.rounds, unroll=1):
            fill_stage(tiles, storage, "keys", key_stage, key_parity, pieces * tiles.piece_bytes)
            for piece in cutlass.range(pieces, unroll=1):
                piece_page = cute.arch.shuffle_sync(page, slot * tiles.pieces + piece)
                row = (key + piece * tiles.piece) % tiles.page_size
                for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
                    keys = from_keys[None, row >> tiles.piece_bits, kv_round * tiles.kv_heads_per_round + nth, piece_page]
                    to = to_keys[None, piece, key_stage * tiles.kv_heads_per_round + nth]
                    cute.copy(tma.key_atom, keys, to, tma_bar_ptr=pointer(storage, "keys_full", key_stage))
                if cutlass.const_expr(tiles.has_k_scale):
                    copy_scales(tiles, storage, params.cache, piece_page, row, piece, key_stage)
            key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
    return stage, parity, key_stage, key_parity


@cute.jit
def copy_scales(tiles: PagedTiles, storage: Any, cache: cute.Tensor, page: Int32, row: Int32, piece: Int32, key_stage: Int32):
    """Copy the scales of all key heads of a piece, from the end of its page."""
    scale_bytes = 4 * tiles.num_kv_heads  # of a key
    in_page = tiles.page_size * tiles.num_kv_heads * tiles.head_dim + row * scale_bytes
    source = cache.iterator + (Int64(page) * cache.stride[0] + in_page)
    target = storage.scales.data_ptr() + (key_stage * tiles.tile + piece * tiles.piece) * tiles.num_kv_heads
    full = pointer(storage, "keys_full", key_stage)
    with cute.arch.elect_one():
        copy_from_global(target.toint(), source.toint(), Int32(tiles.piece * scale_bytes), full.toint())


@cute.jit
def page_numbers(tiles: PagedTiles, line: cute.Pointer, key: Int32, length: Int32, lane: Int32):
    """Load the table entries of the next 32 pieces from `key` on, one a lane. Pieces beyond the last key repeat its entry."""
    index = cutlass.min(key + lane * tiles.piece, length - 1) // tiles.page_size
    return cute.make_tensor(line + index, cute.make_layout(1))[0]
