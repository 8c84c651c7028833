"""The result: a bit in shared memory for every selected column, and the columns from there, in their order or that of scores."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute.topk import ptx
from kernels_cute.topk.narrow import entry, opaque_bins, sum_before
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
    crowd = storage.passed.get_tensor(cute.make_layout(4))[1]
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


@cute.jit
def write(tiles: cutlass.Constexpr, storage, params, row, span, words, thread):
    """Writes the bitmap's columns, in order or sorted: each thread takes neighbouring words, whose columns follow its
    predecessors' in the result.

    Columns are gathered in shared memory if they fit, so that neighbouring lanes write neighbouring words."""
    out, lead, ratio = params.out, span.lead, cutlass.const_expr(tiles.ratio)
    s_bitmap = storage.bitmap.get_tensor(cute.make_layout(tiles.bitmap_words))
    s_columns = storage.columns.get_tensor(cute.make_layout(tiles.list_entries))
    line = out.iterator + Int64(row) * out.stride[0]
    each = (words + (tiles.threads - 1)) // tiles.threads
    if each > 4:
        each = each | 1  # an odd distance: no bank conflicts
    first = thread * each
    end = cutlass.min(first + each, words)
    mine = Int32(0)
    for i in cutlass.range(first, end, unroll=1):
        mine = mine + Int32(cute.arch.popc(s_bitmap[i]))
    index, written = sum_before(tiles, storage, thread, mine)
    if written <= tiles.list_entries:
        for i in cutlass.range(first, end, unroll=1):
            word, column = s_bitmap[i], i * 32
            while word != 0:
                lowest = word & (~word + 1)
                s_columns[index] = column + Int32(cute.arch.bfind(lowest))
                word = word ^ lowest
                index = index + 1
        cute.arch.sync_threads()
        if cutlass.const_expr(tiles.by_score):
            sort(tiles, storage, span, thread, written)
        for i in cutlass.range(thread, written * ratio, tiles.threads, unroll=2):
            line[i] = (s_columns[i // ratio] - lead) * ratio + i % ratio
    else:
        for i in cutlass.range(first, end, unroll=1):
            word, column = s_bitmap[i], i * 32 - lead
            while word != 0:
                lowest = word & (~word + 1)
                for member in cutlass.range(ratio, unroll=1):
                    line[index * ratio + member] = (column + Int32(cute.arch.bfind(lowest))) * ratio + member
                word = word ^ lowest
                index = index + 1
    position = Int32(-1)
    if cutlass.const_expr(ratio > 1):
        position = storage.passed.get_tensor(cute.make_layout(4))[2]
    write_rest(tiles, out, row, written * ratio, position, thread)


@cute.jit
def write_rest(tiles: cutlass.Constexpr, out, row, first, position, thread):
    """Writes the columns of out from `first` on: the tokens of the query's unfinished group, up to its position, then -1."""
    count = Int32(0)
    if cutlass.const_expr(tiles.ratio > 1):
        if position >= 0:
            count = (position % tiles.ratio + 1) % tiles.ratio
    line = out.iterator + Int64(row) * out.stride[0]
    for i in cutlass.range(first + thread, out.shape[1], tiles.threads, unroll=1):
        token = Int32(-1)
        if cutlass.const_expr(tiles.ratio > 1):
            if i - first < count:
                token = position - (count - 1) + (i - first)
        line[i] = token


def num_selected(tiles: Any, out: Any) -> Any:
    """Number of columns to select (k): a row of out has room for their tokens and for those of an unfinished group."""
    return Int32(out.shape[1] - (tiles.ratio - 1)) // tiles.ratio


@cute.jit
def sort(tiles: cutlass.Constexpr, storage, span, thread, written):
    """columns[:written] by descending score, then ascending column: a bitonic sort of (inverted key, column)."""
    s_keys = storage.keys.get_tensor(cute.make_layout(tiles.list_entries))
    s_columns = storage.columns.get_tensor(cute.make_layout(tiles.list_entries))
    size = Int32(2)
    while size < written:
        size = size * 2
    for i in cutlass.range(thread, size, tiles.threads, unroll=1):
        # Beyond the end: last in the order.
        key, column = Uint32(0), Int32(LAST_COLUMN)
        if i < written:
            column = s_columns[i]
            key = ptx.key_of(ptx.load_one(tiles.is_float32, span.base + Int64(column) * tiles.element_bytes, Int32(1)))
        s_keys[i], s_columns[i] = ~key, column
    cute.arch.sync_threads()
    span = Int32(2)
    while span <= size:
        stride = span // 2
        while stride > 0:
            for i in cutlass.range(thread, size // 2, tiles.threads, unroll=1):
                low = i // stride * (2 * stride) + i % stride
                high = low + stride
                key_low, key_high = s_keys[low], s_keys[high]
                column_low, column_high = s_columns[low], s_columns[high]
                is_after = key_low > key_high or (key_low == key_high and column_low > column_high)
                if is_after == ((low & span) == 0):
                    s_keys[low], s_keys[high] = key_high, key_low
                    s_columns[low], s_columns[high] = column_high, column_low
            cute.arch.sync_threads()
            stride = stride // 2
        span = span * 2
