"""The copy warps of the prefill kernel: they take items, and gather the rows of queries, keys and values into shared memory, 16
bytes a lane, each where wgmma expects it.

Shared-memory tiles are 64 rows as pieces of 128 bytes, [piece][row][128 bytes], swizzled over 8 rows: the layout of a K-major
operand (queries, keys), and of an operand whose contraction runs along rows (values). Each copy warp has 16 of the rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from kernels_cute.attention import ptx
from kernels_cute.attention.prefill.shape import STEP
from kernels_cute.attention.prefill.tiles import (
    COPY_BARRIER,
    COPY_THREADS,
    COPY_WARPS,
    ITEM_WORDS,
    PIECE_BYTES,
    masks_address,
    record_address,
    rows_address,
)
from kernels_cute.attention.products import advance, barrier_at
from kernels_cute.common.ptx import count_up

WARP_ROWS = STEP // COPY_WARPS


@cute.jit
def copy_warp(tiles: cutlass.Constexpr, storage, params, lists, warp, lane):
    number = Int32(0)
    rings = (Int32(0), Int32(0), Int32(0), Int32(0))  # stage and parity of keys, and of values
    going = Boolean(True)
    while going:
        steps, first, count, kv_head, tile = take_item(tiles, storage, params, lists, number, warp, lane)
        parity = number & 1
        if steps > 0:
            item = (steps, first, count, kv_head, tile)
            rings = copy_item(tiles, storage, params, lists, item, rings, number, warp, lane)
        else:
            cute.arch.mbarrier_wait(barrier_at(storage, "queries_free"), parity ^ 1)
            publish(storage, number, (steps, first, count, kv_head, tile), warp, lane)
        going = steps >= 0
        number = number + 1


@cute.jit
def take_item(tiles: cutlass.Constexpr, storage, params, lists, number, warp, lane):
    """Take the next item that has queries. Return (steps, or -1 if there is none; first token, number of queries, key head,
    tile)."""
    sTaken = storage.taken.get_tensor(cute.make_layout(2 * ITEM_WORDS))
    slot = (number & 1) * ITEM_WORDS  # two, so that no warp still reads what the first writes
    if warp == 0 and lane == 0:
        items = lists.num_tiles * tiles.kv_heads
        steps, first, count, kv_head, tile = Int32(-1), Int32(0), Int32(0), Int32(0), Int32(0)
        searching = Boolean(True)
        while searching:
            item = count_up(lists.base)
            searching = item < items
            if searching:
                # Key heads one after the other: blocks that run together share one head's keys and values in L2. The last
                # tiles first: within a sequence they see most.
                kv_head = item // lists.num_tiles
                tile = lists.num_tiles - 1 - item % lists.num_tiles
                record = record_address(lists, tile)
                count = ptx.load_global_word(record + 4)
                if count > 0:
                    first, steps = ptx.load_global_word(record), ptx.load_global_word(record + 8)
                    searching = Boolean(False)
        for word, value in enumerate((steps, first, count, kv_head, tile)):
            sTaken[slot + word] = value
    cute.arch.barrier(barrier_id=COPY_BARRIER, number_of_threads=COPY_THREADS)
    return sTaken[slot], sTaken[slot + 1], sTaken[slot + 2], sTaken[slot + 3], sTaken[slot + 4]


@cute.jit
def publish(storage, number, item, warp, lane):
    """Tell the math warps about the item. The copies of its queries count on the same barrier; the caller has waited for
    queries_free."""
    sRecords = storage.records.get_tensor(cute.make_layout(2 * ITEM_WORDS))
    full = barrier_at(storage, "queries_full")
    if warp == 0 and lane == 0:
        for word, value in enumerate(item):
            sRecords[(number & 1) * ITEM_WORDS + word] = value
        cute.arch.mbarrier_arrive(full)
    cute.arch.cp_async_mbarrier_arrive_noinc(full)


@cute.jit
def copy_item(tiles: cutlass.Constexpr, storage, params, lists, item, rings, number, warp, lane):
    """Copy all steps of an item, keys one step ahead of values, as the math warps take them. Return the stages and parities that
    come next in the rings."""
    steps, first, count, kv_head, tile = item
    unit = lane % tiles.units
    k_head = params.k_cache.iterator.toint() + (Int64(kv_head) * params.k_cache.stride[2]) * 2 + unit * 16
    v_head = params.v_cache.iterator.toint() + (Int64(kv_head) * params.v_cache.stride[2]) * 2 + unit * 16
    keys, values = storage.keys.data_ptr().toint(), storage.values.data_ptr().toint()
    own_row = warp * WARP_ROWS + lane % WARP_ROWS
    list_rows = rows_address(lists, tile) + own_row * 4
    list_masks = masks_address(tiles, lists, tile) + lane * 16

    row = ptx.load_global_word(list_rows)  # of the step whose keys come next; asked for a step ahead
    stage, parity, value_stage, value_parity = rings
    value_offset = Int64(0)  # of the step before: its values follow the keys of this one
    for step in cutlass.range(steps + 1, unroll=1):
        next_offset = value_offset
        if step < steps:
            block, in_block = row // tiles.block_size, row % tiles.block_size
            key_offset = (Int64(block) * params.k_cache.stride[0] + Int64(in_block) * params.k_cache.stride[1]) * 2
            next_offset = (Int64(block) * params.v_cache.stride[0] + Int64(in_block) * params.v_cache.stride[1]) * 2
            if step + 1 < steps:
                row = ptx.load_global_word(list_rows + Int64(step + 1) * (4 * STEP))
            cute.arch.mbarrier_wait(barrier_at(storage, "keys_free", stage), parity ^ 1)
            mask_units = cutlass.const_expr(STEP * tiles.mask_bytes // 16)
            if warp == 0 and lane < mask_units:
                target = storage.masks.data_ptr().toint() + (stage * mask_units + lane) * 16
                ptx.copy_unit(target, list_masks + Int64(step) * (16 * mask_units))
            gather(tiles, keys + stage * tiles.stage_bytes, k_head, key_offset, warp, lane)
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier_at(storage, "keys_full", stage))
            if step == 0:
                copy_queries(tiles, storage, params, item, number, warp, lane)
        if step > 0:
            cute.arch.mbarrier_wait(barrier_at(storage, "values_free", value_stage), value_parity ^ 1)
            gather(tiles, values + value_stage * tiles.stage_bytes, v_head, value_offset, warp, lane)
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier_at(storage, "values_full", value_stage))
            value_stage, value_parity = advance(value_stage, value_parity, tiles.value_stages)
        if step < steps:
            value_offset = next_offset
            stage, parity = advance(stage, parity, tiles.key_stages)
    return stage, parity, value_stage, value_parity


@cute.jit
def copy_queries(tiles: cutlass.Constexpr, storage, params, item, number, warp, lane):
    """Copy the 128 rows of an item's queries. Rows without a query repeat the last one; their results are not stored."""
    steps, first, count, kv_head, tile = item
    base = params.q.iterator.toint() + lane % tiles.units * 16
    cute.arch.mbarrier_wait(barrier_at(storage, "queries_free"), (number & 1) ^ 1)
    for half in cutlass.range(2, unroll=1):
        own_row = half * STEP + warp * WARP_ROWS + lane % WARP_ROWS
        query, head = cutlass.min(own_row // tiles.group, count - 1), kv_head * tiles.group + own_row % tiles.group
        offset = (Int64(first + query) * params.q.stride[0] + Int64(head) * params.q.stride[1]) * 2
        gather(tiles, storage.queries.data_ptr().toint() + half * tiles.stage_bytes, base, offset, warp, lane)
    publish(storage, number, item, warp, lane)


@cute.jit
def gather(tiles: cutlass.Constexpr, tile, base, offset, warp, lane):
    """Copy 16 rows of a tile to shared memory. base: of this lane's unit of a row; offset: bytes, of row lane % 16."""
    unit = lane % tiles.units
    piece = tile + (unit // 8) * (STEP * PIECE_BYTES) + warp * (WARP_ROWS * PIECE_BYTES)
    low, high = Int32(offset & Int64(0xFFFFFFFF)), Int32(offset >> 32)
    for i in cutlass.range_constexpr(WARP_ROWS // tiles.lane_rows):
        row = i * tiles.lane_rows + lane // tiles.units
        row_low, row_high = cute.arch.shuffle_sync(low, row), cute.arch.shuffle_sync(high, row)
        source = base + ((Int64(row_high) << 32) | (Int64(row_low) & Int64(0xFFFFFFFF)))
        ptx.copy_unit(piece + row * PIECE_BYTES + ((unit % 8 ^ row & 7) << 4), source)
