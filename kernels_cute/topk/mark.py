"""Marking: a bit in shared memory for every selected column."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels_cute.topk import ptx
from kernels_cute.topk.narrow import entry, opaque_bins
from kernels_cute.topk.read import load_quads
from kernels_cute.topk.tiles import LAST_COLUMN


@cute.jit
def clear_bitmap(tiles: cutlass.Constexpr, storage, thread, words):
    """Zeroes the row's words of the bitmap. No barrier."""
    s_bitmap = storage.bitmap.get_tensor(cute.make_layout(tiles.bitmap_words))
    for word in cutlass.range(thread, words, tiles.threads, unroll=1):
        s_bitmap[word] = Uint32(0)


@cute.jit
def mark_listed(tiles: cutlass.Constexpr, storage, thread, num, tie_key, last_column):
    """Sets the bits of the list's selected columns: keys above tie_key, and equal keys in columns up to last_column."""
    bitmap = storage.bitmap.data_ptr().toint()
    for i in cutlass.range(thread, num, tiles.threads, unroll=2):
        key, column = entry(tiles, storage, i)
        if key > tie_key or (key == tie_key and column <= last_column):
            ptx.set_bit(bitmap, column)


@cute.jit
def mark_ranked(tiles: cutlass.Constexpr, storage, thread, num, lower, highest, wanted):
    """`mark_listed` where keys above `highest` are selected and, of at most RANKED keys in [lower, highest], the first
    `wanted`.

    Those are put aside in the memory of the bins, and then each is compared with all. One barrier.
    """
    bitmap, aside = storage.bitmap.data_ptr().toint(), opaque_bins(tiles, storage)
    counter = storage.passed.data_ptr().toint() + 4
    for i in cutlass.range(thread, num, tiles.threads, unroll=2):
        key, column = entry(tiles, storage, i)
        if key > highest:
            ptx.set_bit(bitmap, column)
        else:
            if key >= lower:
                ptx.store_pair(aside + 8 * ptx.reserve(counter, Int32(1)), LAST_COLUMN - column, key)
    cute.arch.sync_threads()
    rank(storage, thread, aside, wanted)


@cute.jit
def rank(storage, thread, aside, wanted):
    """Sets the bits of the first `wanted` entries that were put aside."""
    bitmap = storage.bitmap.data_ptr().toint()
    s_passed = storage.passed.get_tensor(cute.make_layout(4))
    crowd = s_passed[1]
    if thread < crowd:
        own, rank = aside + 8 * thread, Int32(0)
        for i in cutlass.range(crowd, unroll=4):
            rank = ptx.count_if_greater(rank, aside + 8 * i, own)
        if rank < wanted:
            column, _ = ptx.load_pair(own)
            ptx.set_bit(bitmap, LAST_COLUMN - column)


@cute.jit
def mark_read(tiles: cutlass.Constexpr, storage, span, thread, tie_key, last_column):
    """`mark_listed` from the row itself."""
    stop = span.stop
    bitmap = storage.bitmap.data_ptr().toint()
    scores = cute.make_rmem_tensor(4, Uint32)
    quads = cute.make_rmem_tensor(1, Int32)
    for quad in cutlass.range(thread, (stop + 3) // 4, tiles.threads, unroll=1):
        quads[0] = quad
        load_quads(tiles, span, quads, scores, 1)
        bits = Uint32(0)
        for j in cutlass.range_constexpr(4):
            key = ptx.key_of(scores[j])
            if key > tie_key or (key == tie_key and quad * 4 + j <= last_column):
                bits = bits | Uint32(1 << j)
        if bits != 0:
            ptx.or_shared(bitmap + (quad >> 3) * 4, bits << Uint32((quad & 7) * 4))
