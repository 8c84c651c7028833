"""The warp of the paged logits kernel that copies: queries once an item, keys and their scales through a ring."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels_cute.mqa_logits.barriers import arrive, arrive_and_expect, pointer, wait
from kernels_cute.mqa_logits.paged_schedule import first_work, job_length, likely_first, tiles_of
from kernels_cute.mqa_logits.paged_tiles import QUERY_STAGES
from kernels_cute.mqa_logits.products import advance, query_partition
from kernels_cute.mqa_logits.ptx import copy_bulk, prefetch


@cute.jit
def prefetch_pages(tiles, params, lengths):
    """Table entries of this block's first keys, if sequences are as long as they can be. Lengths, table entries and keys come
    from memory one after the other, which is most of a short launch: here two of them travel together."""
    tables, lane = params.block_tables, cute.arch.lane_idx()
    job, tile = likely_first(tiles, lengths, lengths.batch * tiles.passes)
    page = cutlass.min((tile * tiles.tile + lane * tiles.piece) // tiles.page_size, cute.size(tables, mode=[1]) - 1)
    prefetch(tables.iterator + Int64(job // tiles.passes) * tables.stride[0] + page)


@cute.jit
def copy_warp(tiles, storage, tma, params, lengths):
    query_smem, key_smem = tiles.query_smem(), tiles.key_smem()
    sQueries = storage.queries.get_tensor(query_smem.outer, swizzle=query_smem.inner)
    sKeys = storage.keys.get_tensor(key_smem.outer, swizzle=key_smem.inner)
    gKeys = cute.local_tile(tma.key_tensor, (tiles.piece, tiles.head_dim, 1), (None, None, None))
    to_keys, from_keys = cpasync.tma_partition(
        tma.key_atom, 0, cute.make_layout(1), cute.group_modes(sKeys, 0, 3), cute.group_modes(gKeys, 0, 3)
    )
    barriers, tables, lane = tiles.barriers, params.block_tables, cute.arch.lane_idx()
    jobs = lengths.batch * tiles.passes

    stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    job, tile, left = first_work(tiles, lengths, jobs)
    base = job
    lane_length = job_length(tiles, lengths, base + lane, jobs)
    while left > 0:
        if job - base == 32:
            base = job
            lane_length = job_length(tiles, lengths, base + lane, jobs)
        length = cute.arch.shuffle_sync(lane_length, job - base)
        num_tiles = cutlass.min(tiles_of(tiles, length) - tile, left)
        if num_tiles > 0:
            sequence = job // tiles.passes
            line = tables.iterator + Int64(sequence) * tables.stride[0]
            first = tile * tiles.tile  # key of the item
            ahead = page_numbers(tiles, line, first, length, lane)
            wait(barriers.queries_free, storage, stage, parity ^ 1, by="copy")
            with cute.arch.elect_one():
                arrive_and_expect(barriers.queries_full, storage, stage, tiles.query_bytes, by="copy")
            for kv_head in cutlass.range(tiles.num_kv_heads, unroll=1):
                to_queries, from_queries = query_partition(tiles, tma, sQueries, kv_head)
                for group in cutlass.range_constexpr(tiles.groups):
                    cute.copy(
                        tma.query_atom,
                        from_queries[None, job % tiles.passes * tiles.groups + group, sequence],
                        to_queries[None, group, stage * tiles.num_kv_heads + kv_head],
                        tma_bar_ptr=pointer(barriers.queries_full, storage, stage),
                    )
            stage, parity = advance(stage, parity, QUERY_STAGES)
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
                    wait(barriers.keys_free, storage, key_stage, key_parity ^ 1, by="copy")
                    with cute.arch.elect_one():
                        arrive_and_expect(barriers.keys_full, storage, key_stage, pieces * tiles.piece_bytes, by="copy")
                    for piece in cutlass.range(pieces, unroll=1):
                        piece_page = cute.arch.shuffle_sync(page, slot * tiles.pieces + piece)
                        row = (key + piece * tiles.piece) % tiles.page_size
                        for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
                            kv_head = kv_round * tiles.kv_heads_per_round + nth
                            cute.copy(
                                tma.key_atom,
                                from_keys[None, row >> tiles.piece_bits, kv_head, piece_page],
                                to_keys[None, piece, key_stage * tiles.kv_heads_per_round + nth],
                                tma_bar_ptr=pointer(barriers.keys_full, storage, key_stage),
                            )
                        if cutlass.const_expr(tiles.has_k_scale):
                            copy_scales(tiles, storage, params.cache, piece_page, row, piece, key_stage)
                    key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
            left = left - num_tiles
        job = job + 1
        tile = Int32(0)
    # The end mark carries no bytes: only the arrival that queries_full counts.
    wait(barriers.queries_free, storage, stage, parity ^ 1, by="copy")
    with cute.arch.elect_one():
        arrive(barriers.queries_full, storage, stage, by="copy")


@cute.jit
def copy_scales(tiles, storage, cache, page, row, piece, key_stage):
    """Scales of all key heads of a piece, from the end of its page."""
    scale_bytes = 4 * tiles.num_kv_heads  # of a key
    in_page = tiles.page_size * tiles.num_kv_heads * tiles.head_dim + row * scale_bytes
    source = cache.iterator + (Int64(page) * cache.stride[0] + in_page)
    place = (key_stage * tiles.tile + piece * tiles.piece) * tiles.num_kv_heads
    with cute.arch.elect_one():
        copy_bulk(
            (storage.scales.data_ptr() + place).toint(),
            source.toint(),
            Int32(tiles.piece * scale_bytes),
            pointer(tiles.barriers.keys_full, storage, key_stage).toint(),
        )


@cute.jit
def page_numbers(tiles, line, key, length, lane):
    """Table entries of the next 32 pieces from `key` on, one a lane; those beyond the last key repeat its entry."""
    index = cutlass.min(key + lane * tiles.piece, length - 1) // tiles.page_size
    return cute.make_tensor(line + index, cute.make_layout(1))[0]
