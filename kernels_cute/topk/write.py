"""Writing the result from the bitmap, in the order of columns or of scores."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute.topk import ptx
from kernels_cute.topk.narrow import sum_before
from kernels_cute.topk.tiles import LAST_COLUMN


@cute.jit
def write(tiles: cutlass.Constexpr, storage, params, row, span, words, thread):
    """Writes the bitmap's columns, in order or sorted: each thread takes neighbouring words, whose columns follow its
    predecessors' in the result.

    Columns are gathered in shared memory if they fit, so that neighbouring lanes write neighbouring places."""
    out, lead, k = params.out, span.lead, Int32(params.out.shape[1])
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
    place, written = sum_before(tiles, storage, thread, mine)
    if written <= tiles.list_entries:
        for i in cutlass.range(first, end, unroll=1):
            word, column = s_bitmap[i], i * 32
            while word != 0:
                lowest = word & (~word + 1)
                s_columns[place] = column + Int32(cute.arch.bfind(lowest))
                word = word ^ lowest
                place = place + 1
        cute.arch.sync_threads()
        if cutlass.const_expr(tiles.by_score):
            sort(tiles, storage, span, thread, written)
        for i in cutlass.range(thread, written, tiles.threads, unroll=2):
            line[i] = s_columns[i] - lead
    else:
        for i in cutlass.range(first, end, unroll=1):
            word, column = s_bitmap[i], i * 32 - lead
            while word != 0:
                lowest = word & (~word + 1)
                line[place] = column + Int32(cute.arch.bfind(lowest))
                word = word ^ lowest
                place = place + 1
    for i in cutlass.range(written + thread, k, tiles.threads, unroll=1):
        line[i] = Int32(-1)


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
