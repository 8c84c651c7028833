"""Narrowing: the k-th largest key by digits of 12 bits, over a sample, the whole row or the list."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels_cute.common.ptx import load_words, store_zeros
from kernels_cute.topk import ptx
from kernels_cute.topk.read import load_quads, prefetch
from kernels_cute.topk.shape import BINS, DIGIT_BITS
from kernels_cute.topk.tiles import COLUMN_BITS, FIRST_SHIFT, LAST_COLUMN, Digit

OPEN = 32  # undecided bits of a key with no bound from above
# Bins of the first digit that scores can have; the others hold what is less than the bound, NaN and -inf too.
FIRST_VALID = BINS - 8
RANKED = 128  # up to this many entries of the list in one bin are ranked by comparison, without further digits
PIECE_BITS = 1  # a piece is two neighbouring quads: 32 bytes of float32, which memory reads anyway
PREFETCH_BYTES = 65536  # bytes of the row that the L2 fetches while the sample is searched


@cute.jit
def narrow(tiles: cutlass.Constexpr, storage, span, thread, entries, lower, open_shift, wanted, room):
    """Bounds the wanted-th largest entry from below, digit by digit, until at most `room` entries are at or above the bound;
    where room is too small for that, until exactly the wanted ones are.

    Only entries with keys from `lower` on count. The first digit begins at bit `open_shift`. A sample is not narrowed beyond
    its keys. Returns
        lower: the bound
        tie_key, last_column: keys above tie_key are selected, and keys equal to it in columns up to last_column
        number of entries at or above the bound
        undecided, highest: how many of the keys in [bound, highest] are selected; 0: all. Which ones is left open (RANKED)
    """
    base, _, stop = span
    num, every_bits = entries.num, entries.every_bits
    bits, is_tie, tie_key = Int32(OPEN), Int32(0), lower
    above, left, count = Int32(0), wanted, num
    beneath = Int32(BINS - FIRST_VALID)  # bins of the first digit into which keys below an open bin's edge wrap
    few = cutlass.const_expr(RANKED if entries.from_list else 0)  # entries that may stay undecided, if not among equal keys
    while (
        left < count and (above + count > room or is_tie != 0) and (bits > 0 or every_bits == 0)
        and (count > few or is_tie != 0)
    ):  # fmt: skip
        if bits == 0:
            # Equal keys: from here on the undecided values are columns, the smaller ones larger.
            is_tie, tie_key, lower, bits = Int32(1), lower, Uint32(0), Int32(COLUMN_BITS)
        # Keys that are already decided fall into the bin after the digit's, which is ignored.
        shift, top = cutlass.max(bits - DIGIT_BITS, 0), Int32(1) << cutlass.min(bits, DIGIT_BITS)
        valid = top
        if bits == OPEN:
            shift, top, valid = open_shift, Int32(BINS - 1), Int32(BINS)
            if open_shift == FIRST_SHIFT:
                valid = Int32(BINS - beneath)
        if cutlass.const_expr(entries.from_list):
            count_list(tiles, storage, thread, num, Digit(lower, shift, top, is_tie, tie_key))
        else:
            count_row(tiles, storage, span, thread, every_bits, Digit(lower, shift, top, is_tie, tie_key))
            if bits == OPEN and every_bits > 0:
                # For the filter's first loads. An earlier prefetch would come before the sample.
                prefetch(base, cutlass.min(stop * tiles.element_bytes, PREFETCH_BYTES), thread)
        cute.arch.sync_threads()
        bin, bin_left, bin_count, total = find(tiles, storage, thread, left, valid)
        if total <= left:
            # No more entries than that exist.
            left, count = total, total
        else:
            above, left, count = above + left - bin_left, bin_left, bin_count
            lower, bits, open_shift = lower + (Uint32(bin) << Uint32(shift)), shift, Int32(FIRST_SHIFT)
            if bin == top:
                bits = Int32(OPEN)  # that bin also holds all keys above it
                if cutlass.const_expr(entries.from_list):
                    beneath = cutlass.max(beneath, (Int32(1) << shift) >> (FIRST_SHIFT - DIGIT_BITS))
    last_column = Int32(LAST_COLUMN)
    if is_tie != 0:
        last_column = LAST_COLUMN - Int32(lower)
    else:
        tie_key = lower
    # How many of the keys in [bound, highest] to select; 0: all of them.
    undecided, highest = Int32(0), Uint32(0xFFFFFFFF)
    if left < count and is_tie == 0:
        undecided = left
        if bits < OPEN:
            highest = lower + ((Uint32(1) << Uint32(bits)) - 1)
    return lower, tie_key, last_column, above + count, undecided, highest


@cute.jit
def count_row(tiles: cutlass.Constexpr, storage, span, thread, every_bits, digit):
    """Counts a digit over one piece in 2**every_bits of the row; which piece is taken varies along the row."""
    stop, lower, shift, top = span.stop, digit.lower, digit.shift, digit.top
    bins = storage.bins.data_ptr().toint()
    scores = cute.make_rmem_tensor(4, Uint32)
    quads = cute.make_rmem_tensor(1, Int32)
    span_bits = every_bits + PIECE_BITS
    others = (Int32(1) << every_bits) - 1
    counted = ((stop + 3) // 4 + (Int32(1) << span_bits) - 1) >> span_bits << PIECE_BITS
    for number in cutlass.range(thread, counted, tiles.threads, unroll=1):
        piece = number >> PIECE_BITS
        skipped = piece * others + ((piece * 3) & others)
        quads[0] = number + (skipped << PIECE_BITS)
        load_quads(tiles, span, quads, scores, 1)
        for j in cutlass.range_constexpr(4):
            scores[j] = ptx.key_of(scores[j])
        if digit.is_tie != 0:
            for j in cutlass.range_constexpr(4):
                scores[j] = tie_value(scores[j], 4 * quads[0] + j, digit.tie_key)
        for j in cutlass.range_constexpr(4):
            ptx.count_digit(bins, scores[j], lower, shift, top)


@cute.jit
def count_list(tiles: cutlass.Constexpr, storage, thread, num, digit):
    """Counts a digit over the list's entries."""
    lower, shift, top = digit.lower, digit.shift, digit.top
    bins = storage.bins.data_ptr().toint()
    for i in cutlass.range(thread, num, tiles.threads, unroll=2):
        key, column = entry(tiles, storage, i)
        if digit.is_tie != 0:
            ptx.count_digit(bins, tie_value(key, column, digit.tie_key), lower, shift, top)
        else:
            ptx.count_digit(bins, key, lower, shift, top)


@cute.jit
def entry(tiles: cutlass.Constexpr, storage, i):
    """(key, column) of the list's entry i."""
    score, column = ptx.load_pair(storage.keys.data_ptr().toint() + 8 * i)
    if cutlass.const_expr(not tiles.is_float32):
        score = ptx.half_of(score, column)
    return ptx.key_of(score), column


@cute.jit
def tie_value(key, column, tie_key):
    """Value that is narrowed among equal keys: larger for smaller columns; for other keys, larger than all."""
    value = Uint32(0xFFFFFFFF)
    if key == tie_key:
        value = Uint32(LAST_COLUMN - column)
    return value


@cute.jit
def clear_bins(tiles: cutlass.Constexpr, storage, thread):
    """Zeroes the bins. No barrier."""
    bins = storage.bins.data_ptr().toint()
    for i in cutlass.range_constexpr(BINS // 4 // tiles.threads):
        store_zeros(bins + (i * tiles.threads + thread) * 16)


@cute.jit
def opaque_bins(tiles: cutlass.Constexpr, storage):
    """Address of the bins. With 256 threads a thread owns 16 groups of them, whose addresses ptxas would keep over the whole row,
    and spill."""
    bins = storage.bins.data_ptr().toint()
    if cutlass.const_expr(tiles.threads == 256):
        bins = Int32(ptx.opaque_uniform(Uint32(bins)))
    return bins


@cute.jit
def find(tiles: cutlass.Constexpr, storage, thread, wanted, valid):
    """The bin of the wanted-th largest entry: (bin, how many of it are wanted, its count, entries in all).

    Bins from `valid` on, a multiple of four, do not count. The bins are zero afterwards. Without that many entries only
    the last result holds. Two barriers; the counts must be complete at the call.
    """
    bins = opaque_bins(tiles, storage)
    s_found = storage.found.get_tensor(cute.make_layout(4))
    groups = cutlass.const_expr(BINS // 4 // tiles.threads)  # of four bins each, the last ones first
    last = (BINS - 4) - thread * (4 * groups)
    mine = Int32(0)
    for i in cutlass.range_constexpr(groups):
        a, b, c, d = load_words(bins + (last - 4 * i) * 4)
        mine = mine + cutlass.select_(last - 4 * i < valid, a + b + c + d, Int32(0))
    before, total = sum_before(tiles, storage, thread, mine)
    if before < wanted and wanted <= before + mine:
        # One thread reads its bins again, which is less than that all keep theirs.
        for i in cutlass.range(groups, unroll=1):
            first = last - 4 * i
            if first < valid:
                counts = load_words(bins + first * 4)
                for j in cutlass.range_constexpr(4):
                    if before < wanted and wanted <= before + counts[3 - j]:
                        s_found[0], s_found[1], s_found[2] = first + (3 - j), wanted - before, counts[3 - j]
                    before = before + counts[3 - j]
    for i in cutlass.range_constexpr(groups):
        store_zeros(bins + (last - 4 * i) * 4)
    cute.arch.sync_threads()
    return s_found[0], s_found[1], s_found[2], total


@cute.jit
def sum_before(tiles: cutlass.Constexpr, storage, thread, value):
    """The sum of value over the threads before this one, and over all threads. One barrier; sums stay until the next."""
    s_sums = storage.warp_sums.get_tensor(cute.make_layout(32))
    lane, warp = thread % 32, thread // 32
    running = ptx.running_sum(value)
    if lane == 31:
        s_sums[warp] = running
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if lane < tiles.warps:
        of_warp = s_sums[lane]
    total = cute.arch.warp_redux_sync(of_warp, "add")
    if lane >= warp:
        of_warp = Int32(0)
    return running - value + cute.arch.warp_redux_sync(of_warp, "add"), total
