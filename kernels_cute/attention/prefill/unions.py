"""The first launch of the prefill kernel: a block lists the distinct positions that the queries of its tile selected, in
ascending order, each as its cache row and a mask with a bit for each query.

A table in shared memory has a mask for each position of a window; every selected position sets its query's bit, and a scan in
order writes what is not 0. Sequences that are longer than the window take several, in ascending order: the indices are read again
for each. What the order of the bits' arrival is does not matter, so the list is the same every time.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute.attention import ptx
from kernels_cute.attention.prefill.shape import STEP
from kernels_cute.attention.prefill.tiles import masks_address, record_address, rows_address
from kernels_cute.attention.tile import tile_of

LOADS = 4  # indices of a thread in flight


@cute.jit
def list_tile(tiles: cutlass.Constexpr, storage, params, lists, thread, number):
    """Write the list and the record of tile `number` of the launch."""
    sequence, first, count, position = tile_of(tiles, params, lists.first_tile + number)
    total = list_positions(tiles, storage, params, lists, thread, number, (sequence, first, count, position))
    pad_list(tiles, lists, thread, number, total)
    if thread == 0:
        record = record_address(lists, number)
        for word, value in enumerate((first, count, (total + (STEP - 1)) // STEP, sequence)):
            ptx.store_global_word(record + 4 * word, value)
        if number == 0:
            ptx.store_global_word(lists.base, Int32(0))  # the next launch counts its items up from here


@cute.jit
def list_positions(tiles: cutlass.Constexpr, storage, params, lists, thread, number, tile):
    """Writes the list; number of its positions, in all threads."""
    sequence, first, count, position = tile
    table_positions = Int64(params.block_tables.shape[1]) * tiles.block_size
    limit = cutlass.max(position + count, 0)  # of the positions that its last query sees
    if count == 0:
        limit = Int32(0)  # a number between sequences
    if table_positions < Int64(limit):
        limit = Int32(table_positions)
    table, total = storage.table.data_ptr().toint(), Int32(0)
    for start in cutlass.range(0, limit, tiles.window, unroll=1):
        width = cutlass.min(limit - start, tiles.window)
        cleared = (width * tiles.mask_bytes + 127) // 128 * 128  # the scan reads whole words of a warp
        for byte in cutlass.range(thread * 16, cleared, tiles.union_threads * 16, unroll=1):
            ptx.store_zeros(table + byte)
        cute.arch.sync_threads()
        for query in cutlass.range(count, unroll=1):
            last = cutlass.min(position + query, start + width - 1)  # what it may select, of this window
            mark_query(tiles, params, table, thread, first + query, query, start, last)
        cute.arch.sync_threads()
        total = list_window(tiles, storage, params, lists, thread, number, (sequence, start, width), total)
        cute.arch.sync_threads()
    return total


@cute.jit
def mark_query(tiles: cutlass.Constexpr, params, table, thread, token, query, start, last):
    """Set the query's bit at each selected position in [start, last]."""
    length = Int32(params.topk_indices.shape[1])
    if cutlass.const_expr(params.topk_length is not None):
        given = params.topk_length[token]
        if given < length:
            length = Int32(given)
    line = params.topk_indices.iterator + Int64(token) * params.topk_indices.stride[0]
    gLine = cute.make_tensor(line, cute.make_layout(params.topk_indices.shape[1], stride=params.topk_indices.stride[1]))
    rIndex = cute.make_rmem_tensor(LOADS, Int32)
    for column in cutlass.range(thread, length, LOADS * tiles.union_threads, unroll=1):
        for i in cutlass.range_constexpr(LOADS):
            rIndex[i] = Int32(-1)
            if column + i * tiles.union_threads < length:
                index = gLine[column + i * tiles.union_threads]
                if index >= start and index <= last:
                    rIndex[i] = Int32(index) - start
        for i in cutlass.range_constexpr(LOADS):
            if rIndex[i] >= 0:
                if cutlass.const_expr(tiles.mask_bytes == 2):
                    ptx.or_shared(table + rIndex[i] // 2 * 4, Uint32(1) << Uint32(rIndex[i] % 2 * 16 + query))
                else:
                    ptx.or_shared(table + rIndex[i] * 4, Uint32(1) << Uint32(query))


@cute.jit
def list_window(tiles: cutlass.Constexpr, storage, params, lists, thread, number, window, total):
    """Append the window's positions to the list, and return its new length. A warp takes neighbouring groups, a lane a word of
    each."""
    sequence, start, width = window
    warps, each = cutlass.const_expr(tiles.union_threads // 32), cutlass.const_expr(4 // tiles.mask_bytes)
    warp, lane = thread // 32, cute.arch.lane_idx()
    groups = (width + (32 * each - 1)) // (32 * each)
    share = (groups + (warps - 1)) // warps
    first, end = warp * share, cutlass.min(warp * share + share, groups)
    words = storage.table.data_ptr().toint() + lane * 4
    sSums = storage.sums.get_tensor(cute.make_layout(32))
    found = Int32(0)
    for group in cutlass.range(first, end, unroll=1):
        for mask in masks_of(tiles, ptx.load_word(words + group * 128)):
            found = found + ptx.as_int(mask != 0)
    found = cute.arch.warp_redux_sync(found, "add")
    if lane == 0:
        sSums[warp] = found
    cute.arch.sync_threads()
    other = Int32(0)
    if lane < warps:
        other = sSums[lane]
    before = cute.arch.warp_redux_sync(cutlass.select_(lane < warp, other, Int32(0)), "add")
    after = total + cute.arch.warp_redux_sync(other, "add")
    list_index = total + before
    rows, masks = rows_address(lists, number), masks_address(tiles, lists, number)
    below = (Uint32(1) << Uint32(lane)) - Uint32(1)  # lanes before this one
    for group in cutlass.range(first, end, unroll=1):
        found_masks = masks_of(tiles, ptx.load_word(words + group * 128))
        ballots = [cute.arch.vote_ballot_sync(mask != 0) for mask in found_masks]
        slot = list_index
        for ballot in ballots:
            slot = slot + cute.arch.popc(Uint32(ballot) & below)
            list_index = list_index + cute.arch.popc(ballot)
        for i in cutlass.range_constexpr(each):
            mask = found_masks[i]
            if mask != 0:
                row = cache_row(tiles, params, sequence, start + (group * 32 + lane) * each + i)
                ptx.store_global_word(rows + Int64(slot) * 4, row)
                if cutlass.const_expr(tiles.mask_bytes == 2):
                    ptx.store_global_half(masks + Int64(slot) * 2, mask)
                else:
                    ptx.store_global_word(masks + Int64(slot) * 4, mask)
                slot = slot + 1
    return after


def masks_of(tiles: Any, word: Any) -> list[Any]:
    """Masks in a word of the table, of the smaller position first."""
    word = Uint32(word)
    return [word & Uint32(0xFFFF), word >> Uint32(16)] if tiles.mask_bytes == 2 else [word]


@cute.jit
def cache_row(tiles: cutlass.Constexpr, params, sequence, position):
    """Row of a position, counted over all blocks."""
    column = position // tiles.block_size
    block = params.block_tables[sequence, column]
    block = cutlass.max(cutlass.min(block, Int32(params.k_cache.shape[0]) - 1), 0)
    return block * tiles.block_size + position % tiles.block_size


@cute.jit
def pad_list(tiles: cutlass.Constexpr, lists, thread, number, total):
    """Fill the last step with its last row, which no query selects a second time."""
    list_index = total + thread
    if total > 0 and list_index < (total + (STEP - 1)) // STEP * STEP and thread < STEP:
        rows, masks = rows_address(lists, number), masks_address(tiles, lists, number)
        ptx.store_global_word(rows + Int64(list_index) * 4, ptx.load_global_word(rows + Int64(total - 1) * 4))
        if cutlass.const_expr(tiles.mask_bytes == 2):
            ptx.store_global_half(masks + Int64(list_index) * 2, Uint32(0))
        else:
            ptx.store_global_word(masks + Int64(list_index) * 4, Uint32(0))
