"""The top-k kernel: a block a row; a sample of the row bounds the answer, and one read of the row lists what is above.

    1 sample   a part of the row, in small pieces spread over all of it, is counted by the keys' upper 12 bits, and a
               threshold is chosen above which about 1.5 k columns are expected. If one bin holds too many for that, the
               sample is counted again, 12 bits finer.
    2 filter   the row is read once: scores from the threshold on go to a list in shared memory, with their columns.
    3 narrow   the k-th largest key of the list is found by digits of 12 bits, or until few entries share its bin; among equal
               keys the last column.
    4 mark     a bit per selected column. Of the few that share the answer's bin each is compared with all.
    5 write    the bitmap is scanned in order: place = number of bits before. By score: the pairs are sorted first.

A row that the list holds whole needs no sample. One whose sample was wrong (fewer than k passed, or more than the list
holds) is counted as the sample was, but all of it, digit after digit until the list holds what is left above, and then
filtered. Where that never happens (crowds of equal scores, large k) the digits end at the answer itself, and
the row is read once more to mark it.

With `list_short` a row of at most k columns lists them all and is not read.

What the order of arrival decides (places in the list) no result depends on; bits and counts are integers.
Columns are counted from the last multiple of 16 bytes at or before the row's range, so that as many are one access.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from gdn.problems import TopkParams
from kernels_cute.topk import ptx

DIGIT_BITS = 12
BINS = 1 << DIGIT_BITS
LEAST_KEY = 0x00800000  # of a score that may be selected; below stand NaN and -inf
OPEN = 32  # undecided bits of a key with no bound from above
FIRST_SHIFT = 20  # first digit: sign, exponent, three bits of the mantissa
FIRST_VALID = BINS - 8  # bins of it that scores can have; in the others is what is less than the bound, NaN and -inf too
# First digit of the list: 4096 bins of two octaves, or, where the sample was counted twice and so many scores stand close to
# each other, of a quarter of one. 13 would leave a last digit of one bit, and `find` leaves out bins by fours.
LIST_SHIFT = 12
FINE_SHIFT = 9
RANKED = 128  # so many entries of the list or fewer that one bin holds are ranked by comparison, without further digits
COLUMN_BITS = 21
LAST_COLUMN = (1 << COLUMN_BITS) - 1
MOST_COLUMNS = 1 << 20  # a bitmap of 128 KiB
SPARE_WORDS = 2  # of the bitmap, for columns before the range
SAMPLE_BITS = 4  # one piece of sixteen is sampled
PIECE_BITS = 1  # a piece is two neighbouring quads: 32 bytes of float32, which memory reads anyway
ACCESS = 16  # bytes
ASKED_BYTES = 65536  # of the row, which the L2 is asked for while the sample is searched


class TopkRows:
    """Everything here is known at compile time; sizes, strides, ranges and k arrive at launch."""

    def __init__(
        self,
        is_float32: bool,
        by_score: bool,
        threads: int,
        unroll: int,
        blocks_per_sm: int,
        list_entries: int,
        max_columns: int,
    ):
        self.is_float32, self.element_bytes = is_float32, 4 if is_float32 else 2
        self.by_score = by_score
        self.threads, self.unroll, self.blocks_per_sm = threads, unroll, blocks_per_sm
        self.warps = threads // 32
        self.list_entries = list_entries
        self.bitmap_words = max_columns // 32 + SPARE_WORDS

    # ---- host

    @cute.jit
    def __call__(self, *values: Any):
        params, stream = TopkParams(*values[:-1]), values[-1]
        self.kernel(params).launch(
            grid=(cute.size(params.logits, mode=[0]), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,  # percent; without a value the DSL asks a device for its limit
            stream=stream,
        )

    def storage_type(self):
        @cute.struct
        class Storage:
            # The list, pairs of score and column, takes both. Behind it come the result's columns, and keys to sort them by.
            keys: cute.struct.Align[cute.struct.MemRange[Uint32, self.list_entries], 16]
            columns: cute.struct.Align[cute.struct.MemRange[Int32, self.list_entries], 16]
            bins: cute.struct.Align[cute.struct.MemRange[Int32, BINS + 4], 16]  # one more for what is in no bin
            bitmap: cute.struct.Align[cute.struct.MemRange[Uint32, self.bitmap_words], 16]
            warp_sums: cute.struct.MemRange[Int32, 32]
            found: cute.struct.MemRange[Int32, 4]
            passed: cute.struct.MemRange[Int32, 4]

        return Storage

    # ---- device

    @cute.kernel
    def kernel(self, params: TopkParams):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        k = Int32(params.out.shape[1])
        self.clear_bins(storage, thread)  # while the range is on its way
        first, end = self.row_range(params, row)
        if params.list_short != 0 and end - first <= k:
            for place in cutlass.range(thread, k, self.threads, unroll=1):
                column = Int32(place)
                if place >= end - first:
                    column = Int32(-1)
                params.out[row, place] = column
        else:
            self.select(params, storage, row, first, end, thread)

    @cute.jit
    def select(self, params, storage, row, first, end, thread):
        k = Int32(params.out.shape[1])
        if cutlass.const_expr(self.is_float32 and params.row_starts is None and params.row_ends is None):
            end = Int32(ptx.again(Uint32(end)))  # as a parameter of the launch, ptxas spills other values for it
        address = params.logits.iterator.toint() + (Int64(row) * params.logits.stride[0] + first) * self.element_bytes
        lead = Int32(address & (ACCESS - 1)) // self.element_bytes
        base = address - lead * self.element_bytes
        stop = lead + (end - first)  # the row is columns [lead, stop) of base
        words = (stop + 31) // 32
        s_passed = storage.passed.get_tensor(cute.make_layout(4))
        if thread == 0:
            s_passed[0], s_passed[1] = Int32(0), Int32(0)
        self.clear_bitmap(storage, thread, words)
        cute.arch.sync_threads()

        # The first attempt bounds the answer from a sample, the second from all of the row.
        attempt = Int32(0)
        if stop - lead <= self.list_entries or k > self.list_entries:
            attempt = Int32(1)
        is_listed, passed = Int32(0), Int32(0)
        lower, tie_key, last_column = Uint32(LEAST_KEY), Uint32(LEAST_KEY), Int32(LAST_COLUMN)
        while attempt < 2:
            # Of the counted entries, one in 2**every_bits, at least `wanted` are to be above the bound, and at most `room`.
            every_bits, wanted, room = Int32(0), k, Int32(self.list_entries)
            if attempt == 0:
                every_bits, wanted = Int32(SAMPLE_BITS), ptx.sample_rank(k, 0.5**SAMPLE_BITS)
                room = Int32(self.list_entries * 7 // 8 >> SAMPLE_BITS)
            lower, tie_key, last_column, above, _, _ = self.narrow(
                storage, base, lead, stop, thread, every_bits, Uint32(LEAST_KEY), Int32(FIRST_SHIFT), wanted, stop - lead,
                room, False,
            )  # fmt: skip
            # A bound below all keys is a column among equal ones: the answer is known, and nothing need be listed.
            if above <= room and lower >= LEAST_KEY:
                if cutlass.const_expr(self.is_float32):
                    self.filter(storage, base, lead, stop, thread, lower)
                else:
                    self.filter_packed(storage, base, lead, stop, thread, lower)
                tie_key, last_column = lower, Int32(LAST_COLUMN)  # as they were, so no register keeps them over the filter
                cute.arch.sync_threads()
                passed = s_passed[0]
                if passed <= self.list_entries and (passed >= k or lower == LEAST_KEY):
                    is_listed, attempt = Int32(1), Int32(1)
                else:
                    # Nobody counts anew before all have read the count.
                    cute.arch.sync_threads()
                    if thread == 0:
                        s_passed[0] = Int32(0)
                    cute.arch.sync_threads()
            attempt = attempt + 1
        if is_listed != 0:
            shift = Int32(LIST_SHIFT)
            if (lower & Uint32((1 << FIRST_SHIFT) - 1)) != Uint32(LEAST_KEY & ((1 << FIRST_SHIFT) - 1)):
                shift = Int32(FINE_SHIFT)  # no edge of a first digit's bin
            if lower == LEAST_KEY:
                shift = Int32(FIRST_SHIFT)
            _, tie_key, last_column, _, wanted, highest = self.narrow(
                storage, base, lead, stop, thread, Int32(0), lower, shift, k, passed, Int32(0), True
            )
            if wanted > 0:
                self.mark_ranked(storage, thread, passed, tie_key, highest, wanted)
            else:
                self.mark_listed(storage, thread, passed, tie_key, last_column)
        else:
            self.mark_read(storage, base, lead, stop, thread, tie_key, last_column)
        cute.arch.sync_threads()
        self.write(storage, base, params.out, row, lead, words, thread, k)

    @cute.jit
    def ask_for(self, address, num_bytes, thread):
        """Asks the L2 for these bytes, and the others of the accesses that they begin and end in. A hint."""
        if thread == 0:
            first = address & Int64(-ACCESS)
            end = (address + num_bytes + (ACCESS - 1)) & Int64(-ACCESS)
            if num_bytes > 0:
                ptx.ask_l2(first, Int32(end - first))

    @cute.jit
    def clear_bins(self, storage, thread):
        """No barrier."""
        bins = storage.bins.data_ptr().toint()
        for i in cutlass.range_constexpr(BINS // 4 // self.threads):
            ptx.store_zeros(bins + (i * self.threads + thread) * 16)

    @cute.jit
    def bins_anew(self, storage):
        """Their address. A thread of 256 has 16 of them: as many addresses would be kept over all of the row, and spilled."""
        bins = storage.bins.data_ptr().toint()
        if cutlass.const_expr(self.threads == 256):
            bins = Int32(ptx.again(Uint32(bins)))
        return bins

    @cute.jit
    def clear_bitmap(self, storage, thread, words):
        """The row's part of it. No barrier."""
        s_bitmap = storage.bitmap.get_tensor(cute.make_layout(self.bitmap_words))
        for word in cutlass.range(thread, words, self.threads, unroll=1):
            s_bitmap[word] = Uint32(0)

    @cute.jit
    def row_range(self, params, row):
        """[first, end) of a row's columns, clamped; first = end where it is empty. See TopkParams."""
        columns = Int32(params.logits.shape[1])
        num_keys, drafts = params.num_keys, params.drafts
        first, end = Int32(0), columns
        if cutlass.const_expr(params.row_starts is not None):
            limit = columns
            if num_keys >= 0:
                limit = num_keys
            first, end = self.clamped(params.row_starts[row], 0, limit), limit
            if cutlass.const_expr(params.row_ends is not None):
                end = self.clamped(params.row_ends[row], 0, limit)
            end = cutlass.max(first, end)
            if num_keys >= 0:
                first, end = Int32(0), cutlass.min(end - first, columns)
        elif cutlass.const_expr(params.row_ends is not None):
            end = self.clamped(params.row_ends[row // drafts], drafts - 1 - row % drafts, columns)
        return first, end

    @cute.jit
    def clamped(self, bound, less, most):
        """bound - less, between 0 and `most`, and narrowed only then: an int64 may hold anything."""
        wide = cutlass.min(cutlass.max(Int64(bound), Int64(0)), Int64(most) + less)
        return Int32(cutlass.max(wide - less, Int64(0)))

    @cute.jit
    def load_quads(self, base, lead, stop, quad_of, scores: cute.Tensor, quads: cutlass.Constexpr):
        """float32 bits of `quads` quads, whose numbers are quad_of; of columns outside the row those of NaN.

        The loads of whole quads come first and travel together; the two quads that the row's ends cut are read by element.
        """
        first_whole = (lead + 3) // 4
        num_whole = Uint32(cutlass.max(stop // 4 - first_whole, 0))
        for u in cutlass.range_constexpr(quads):
            quad = quad_of[u]
            is_whole = ptx.as_int(Uint32(quad - first_whole) < num_whole)
            address = base + Int64(quad) * (4 * self.element_bytes)
            a, b, c, d = ptx.load_quad(self.is_float32, address, is_whole)
            scores[4 * u], scores[4 * u + 1], scores[4 * u + 2], scores[4 * u + 3] = a, b, c, d
        for u in cutlass.range_constexpr(quads):
            quad = quad_of[u]
            is_touched = Uint32(quad - lead // 4) < Uint32((stop + 3) // 4 - lead // 4)
            if Uint32(quad - first_whole) >= num_whole and is_touched:
                for j in cutlass.range_constexpr(4):
                    column = quad * 4 + j
                    is_inside = ptx.as_int(column >= lead and column < stop)
                    address = base + Int64(column) * self.element_bytes
                    scores[4 * u + j] = ptx.load_one(self.is_float32, address, is_inside)

    @cute.jit
    def narrow(
        self, storage, base, lead, stop, thread, every_bits, lower, open_shift, wanted, num, room, from_list: cutlass.Constexpr
    ):
        """Bounds the wanted-th largest of `num` entries from below, digit by digit: until at most `room` are from the bound on,
        or, where room is too small for that, until exactly those that are wanted are.

        Entries: the list's, or one piece in 2**every_bits of the row, of keys from `lower` on. The first digit begins at bit
        `open_shift`. Returns (lower, the bound; tie_key, last_column: selected are keys above tie_key, and of those that are
        equal columns up to last_column; number of entries from the bound on; wanted, highest: as many of keys between the
        bound and highest are selected, which of them is left open, see RANKED). A sample is not narrowed beyond its keys.
        """
        bits, is_tie, tie_key = Int32(OPEN), Int32(0), lower
        above, left, count = Int32(0), wanted, num
        beneath = Int32(BINS - FIRST_VALID)  # bins of the first digit that what lies below an open bin's edge wraps into
        few = cutlass.const_expr(RANKED if from_list else 0)  # are left undecided, if not among equal keys
        while (
            left < count and (above + count > room or is_tie != 0) and (bits > 0 or every_bits == 0)
            and (count > few or is_tie != 0)
        ):  # fmt: skip
            if bits == 0:
                # Equal keys: from here on the undecided values are columns, the smaller ones larger.
                is_tie, tie_key, lower, bits = Int32(1), lower, Uint32(0), Int32(COLUMN_BITS)
            # What is not undecided goes to the bin behind the digit's, which does not count.
            shift, top = cutlass.max(bits - DIGIT_BITS, 0), Int32(1) << cutlass.min(bits, DIGIT_BITS)
            valid = top
            if bits == OPEN:
                shift, top, valid = open_shift, Int32(BINS - 1), Int32(BINS)
                if open_shift == FIRST_SHIFT:
                    valid = Int32(BINS - beneath)
            if cutlass.const_expr(from_list):
                self.count_list(storage, thread, num, lower, shift, top, is_tie, tie_key)
            else:
                self.count_row(storage, base, lead, stop, thread, every_bits, lower, shift, top, is_tie, tie_key)
                if bits == OPEN and every_bits > 0:
                    # The filter's first loads find these bytes there. Asked for earlier they come before the sample.
                    self.ask_for(base, cutlass.min(stop * self.element_bytes, ASKED_BYTES), thread)
            cute.arch.sync_threads()
            bin, bin_left, bin_count, total = self.find(storage, thread, left, valid)
            if total <= left:
                # All that there are.
                left, count = total, total
            else:
                above, left, count = above + left - bin_left, bin_left, bin_count
                lower, bits, open_shift = lower + (Uint32(bin) << Uint32(shift)), shift, Int32(FIRST_SHIFT)
                if bin == top:
                    bits = Int32(OPEN)  # that bin holds all that is above, too
                    if cutlass.const_expr(from_list):
                        beneath = cutlass.max(beneath, (Int32(1) << shift) >> (FIRST_SHIFT - DIGIT_BITS))
        last_column = Int32(LAST_COLUMN)
        if is_tie != 0:
            last_column = LAST_COLUMN - Int32(lower)
        else:
            tie_key = lower
        # Of keys from the bound to `highest`, so many are selected that have to be found out; 0: all of them.
        undecided, highest = Int32(0), Uint32(0xFFFFFFFF)
        if left < count and is_tie == 0:
            undecided = left
            if bits < OPEN:
                highest = lower + ((Uint32(1) << Uint32(bits)) - 1)
        return lower, tie_key, last_column, above + count, undecided, highest

    @cute.jit
    def count_row(self, storage, base, lead, stop, thread, every_bits, lower, shift, top, is_tie, tie_key):
        """Counts a digit of the row's entries, of one piece in 2**every_bits; which one of them changes from piece to piece."""
        bins = storage.bins.data_ptr().toint()
        scores = cute.make_rmem_tensor(4, Uint32)
        quads = cute.make_rmem_tensor(1, Int32)
        span_bits = every_bits + PIECE_BITS
        others = (Int32(1) << every_bits) - 1
        counted = ((stop + 3) // 4 + (Int32(1) << span_bits) - 1) >> span_bits << PIECE_BITS
        for number in cutlass.range(thread, counted, self.threads, unroll=1):
            piece = number >> PIECE_BITS
            skipped = piece * others + ((piece * 3) & others)
            quads[0] = number + (skipped << PIECE_BITS)
            self.load_quads(base, lead, stop, quads, scores, 1)
            for j in cutlass.range_constexpr(4):
                scores[j] = ptx.key_of(scores[j])
            if is_tie != 0:
                for j in cutlass.range_constexpr(4):
                    scores[j] = self.tie_value(scores[j], 4 * quads[0] + j, tie_key)
            for j in cutlass.range_constexpr(4):
                ptx.count_digit(bins, scores[j], lower, shift, top)

    @cute.jit
    def count_list(self, storage, thread, num, lower, shift, top, is_tie, tie_key):
        """The same of the list's entries."""
        bins = storage.bins.data_ptr().toint()
        for i in cutlass.range(thread, num, self.threads, unroll=2):
            key, column = self.entry(storage, i)
            if is_tie != 0:
                ptx.count_digit(bins, self.tie_value(key, column, tie_key), lower, shift, top)
            else:
                ptx.count_digit(bins, key, lower, shift, top)

    @cute.jit
    def entry(self, storage, i):
        """(key, column) of the list's entry i."""
        score, column = ptx.load_pair(storage.keys.data_ptr().toint() + 8 * i)
        if cutlass.const_expr(not self.is_float32):
            score = ptx.half_of(score, column)
        return ptx.key_of(score), column

    @cute.jit
    def tie_value(self, key, column, tie_key):
        """What is narrowed among equal keys: larger for smaller columns; of other keys, more than any."""
        value = Uint32(0xFFFFFFFF)
        if key == tie_key:
            value = Uint32(LAST_COLUMN - column)
        return value

    @cute.jit
    def filter(self, storage, base, lead, stop, thread, lower):
        """Lists scores (float32) of keys from `lower` on with their columns, as far as there is room, and counts all of them."""
        passed = storage.passed.data_ptr().toint()
        places = storage.keys.data_ptr().toint()
        scores = cute.make_rmem_tensor(4 * self.unroll, Uint32)
        quads = cute.make_rmem_tensor(self.unroll, Int32)
        least = ptx.float_of(lower)
        lane = thread % 32
        first_whole, end_whole, end_quad = (lead + 3) // 4, stop // 4, (stop + 3) // 4
        # All lanes of a warp take part in the sums, so the trip count is the warp's.
        for start in cutlass.range(thread - lane, end_quad, self.threads * self.unroll, unroll=1):
            if start >= first_whole and start + ((self.unroll - 1) * self.threads + 32) <= end_whole:
                address = base + Int64(start + lane) * ACCESS
                for u in cutlass.range_constexpr(self.unroll):
                    a, b, c, d = ptx.load_access(address + u * self.threads * ACCESS)
                    scores[4 * u], scores[4 * u + 1], scores[4 * u + 2], scores[4 * u + 3] = a, b, c, d
            else:
                for u in cutlass.range_constexpr(self.unroll):
                    quads[u] = start + lane + u * self.threads
                self.load_quads(base, lead, stop, quads, scores, self.unroll)
            hits = ptx.count_from(least, [scores[i] for i in range(4 * self.unroll)])
            place = ptx.reserve(passed, hits)
            least_again = ptx.again(least)
            if hits > 0 and place + hits <= self.list_entries:
                slot = places + place * 8
                for u in cutlass.range_constexpr(self.unroll):
                    column = 4 * (start + lane + u * self.threads)
                    slot = ptx.store_from(least_again, [scores[4 * u + j] for j in range(4)], column, slot)

    @cute.jit
    def filter_packed(self, storage, base, lead, stop, thread, lower):
        """The same of bf16: eight scores an access, compared two at a time. Listed are their words as they are."""
        passed = storage.passed.data_ptr().toint()
        places = storage.keys.data_ptr().toint()
        accesses = cutlass.const_expr((self.unroll + 1) // 2)
        words = cute.make_rmem_tensor(4 * accesses, Uint32)
        least = ptx.two_of(ptx.float_of(self.next_bfloat16(lower)))
        lane = thread % 32
        first_whole, end_whole, end = (lead + 7) // 8, stop // 8, (stop + 7) // 8
        for start in cutlass.range(thread - lane, end, self.threads * accesses, unroll=1):
            if start >= first_whole and start + ((accesses - 1) * self.threads + 32) <= end_whole:
                address = base + Int64(start + lane) * ACCESS
                for u in cutlass.range_constexpr(accesses):
                    a, b, c, d = ptx.load_access(address + u * self.threads * ACCESS)
                    words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d
            else:
                for u in cutlass.range_constexpr(accesses):
                    access = start + lane + u * self.threads
                    is_whole = ptx.as_int(access >= first_whole and access < end_whole)
                    a, b, c, d = ptx.load_access_of_bfloat16(base + Int64(access) * ACCESS, is_whole)
                    words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d
                for u in cutlass.range_constexpr(accesses):
                    access = start + lane + u * self.threads
                    if (access < first_whole or access >= end_whole) and access < end:
                        for i in cutlass.range_constexpr(4):
                            columns = (access * 8 + 2 * i, access * 8 + 2 * i + 1)
                            pair = [
                                ptx.load_one(False, base + Int64(one) * 2, ptx.as_int(one >= lead and one < stop))
                                for one in columns
                            ]
                            words[4 * u + i] = (pair[0] >> 16) | pair[1]
            hits = ptx.count_two_from(least, [words[i] for i in range(4 * accesses)])
            place = ptx.reserve(passed, hits)
            least_again = ptx.again(least)
            if hits > 0 and place + hits <= self.list_entries:
                slot = places + place * 8
                for u in cutlass.range_constexpr(accesses):
                    column = 8 * (start + lane + u * self.threads)
                    slot = ptx.store_two_from(least_again, [words[4 * u + j] for j in range(4)], column, slot)

    @cute.jit
    def next_bfloat16(self, key):
        """The least key from this one on that a bf16 has: of positive ones the lower half is zero, of negative ones all ones."""
        rounded = key | Uint32(0xFFFF)
        if key >= Uint32(0x80000000):
            rounded = (key + Uint32(0xFFFF)) & Uint32(0xFFFF0000)
        return rounded

    @cute.jit
    def mark_listed(self, storage, thread, num, tie_key, last_column):
        """Sets the bits of what is selected: keys above tie_key, and equal ones of columns up to last_column."""
        bitmap = storage.bitmap.data_ptr().toint()
        for i in cutlass.range(thread, num, self.threads, unroll=2):
            key, column = self.entry(storage, i)
            if key > tie_key or (key == tie_key and column <= last_column):
                ptx.set_bit(bitmap, column)

    @cute.jit
    def mark_ranked(self, storage, thread, num, lower, highest, wanted):
        """The same where keys above `highest` are selected and, of at most RANKED from `lower` to there, the first `wanted`.

        Those are put aside where the bins were, and then each is compared with all. One barrier.
        """
        bitmap, aside = storage.bitmap.data_ptr().toint(), self.bins_anew(storage)
        counter = storage.passed.data_ptr().toint() + 4
        for i in cutlass.range(thread, num, self.threads, unroll=2):
            key, column = self.entry(storage, i)
            if key > highest:
                ptx.set_bit(bitmap, column)
            else:
                if key >= lower:
                    ptx.store_pair(aside + 8 * ptx.reserve(counter, Int32(1)), LAST_COLUMN - column, key)
        cute.arch.sync_threads()
        self.rank(storage, thread, aside, wanted)

    @cute.jit
    def rank(self, storage, thread, aside, wanted):
        """Sets the bits of the first `wanted` of what has been put aside."""
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
    def mark_read(self, storage, base, lead, stop, thread, tie_key, last_column):
        """The same, of the row itself."""
        bitmap = storage.bitmap.data_ptr().toint()
        scores = cute.make_rmem_tensor(4, Uint32)
        quads = cute.make_rmem_tensor(1, Int32)
        for quad in cutlass.range(thread, (stop + 3) // 4, self.threads, unroll=1):
            quads[0] = quad
            self.load_quads(base, lead, stop, quads, scores, 1)
            bits = Uint32(0)
            for j in cutlass.range_constexpr(4):
                key = ptx.key_of(scores[j])
                if key > tie_key or (key == tie_key and quad * 4 + j <= last_column):
                    bits = bits | Uint32(1 << j)
            if bits != 0:
                ptx.or_shared(bitmap + (quad >> 3) * 4, bits << Uint32((quad & 7) * 4))

    @cute.jit
    def sum_before(self, storage, thread, value):
        """The sum of value over the threads before this one, and over all. One barrier; sums stay until the next."""
        s_sums = storage.warp_sums.get_tensor(cute.make_layout(32))
        lane, warp = thread % 32, thread // 32
        running = ptx.running_sum(value)
        if lane == 31:
            s_sums[warp] = running
        cute.arch.sync_threads()
        of_warp = Int32(0)
        if lane < self.warps:
            of_warp = s_sums[lane]
        total = ptx.warp_sum(of_warp)
        if lane >= warp:
            of_warp = Int32(0)
        return running - value + ptx.warp_sum(of_warp), total

    @cute.jit
    def find(self, storage, thread, wanted, valid):
        """The bin of the wanted-th largest entry: (bin, how many of it are wanted, its count, entries in all).

        Bins from `valid` on, a multiple of four, do not count. The bins are zero afterwards. Without that many entries only
        the last result holds. Two barriers; the counts must be complete at the call.
        """
        bins = self.bins_anew(storage)
        s_found = storage.found.get_tensor(cute.make_layout(4))
        groups = cutlass.const_expr(BINS // 4 // self.threads)  # of four bins each, the last ones first
        last = (BINS - 4) - thread * (4 * groups)
        mine = Int32(0)
        for i in cutlass.range_constexpr(groups):
            a, b, c, d = ptx.load_four(bins + (last - 4 * i) * 4)
            mine = mine + cutlass.select_(last - 4 * i < valid, a + b + c + d, Int32(0))
        before, total = self.sum_before(storage, thread, mine)
        if before < wanted and wanted <= before + mine:
            # One thread reads its bins again, which is less than that all keep theirs.
            for i in cutlass.range(groups, unroll=1):
                first = last - 4 * i
                if first < valid:
                    counts = ptx.load_four(bins + first * 4)
                    for j in cutlass.range_constexpr(4):
                        if before < wanted and wanted <= before + counts[3 - j]:
                            s_found[0], s_found[1], s_found[2] = first + (3 - j), wanted - before, counts[3 - j]
                        before = before + counts[3 - j]
        for i in cutlass.range_constexpr(groups):
            ptx.store_zeros(bins + (last - 4 * i) * 4)
        cute.arch.sync_threads()
        return s_found[0], s_found[1], s_found[2], total

    @cute.jit
    def write(self, storage, base, out, row, lead, words, thread, k):
        """The bitmap's columns, in order or sorted: each thread takes neighbouring words and the places behind those before.

        They are gathered in shared memory, so that neighbouring lanes write neighbouring places, if they have room there."""
        s_bitmap = storage.bitmap.get_tensor(cute.make_layout(self.bitmap_words))
        s_columns = storage.columns.get_tensor(cute.make_layout(self.list_entries))
        line = out.iterator + Int64(row) * out.stride[0]
        each = (words + (self.threads - 1)) // self.threads
        if each > 4:
            each = each | 1  # an odd distance: lanes meet in no bank
        first = thread * each
        end = cutlass.min(first + each, words)
        mine = Int32(0)
        for i in cutlass.range(first, end, unroll=1):
            mine = mine + Int32(cute.arch.popc(s_bitmap[i]))
        place, written = self.sum_before(storage, thread, mine)
        if written <= self.list_entries:
            for i in cutlass.range(first, end, unroll=1):
                word, column = s_bitmap[i], i * 32
                while word != 0:
                    lowest = word & (~word + 1)
                    s_columns[place] = column + ptx.highest_bit(lowest)
                    word = word ^ lowest
                    place = place + 1
            cute.arch.sync_threads()
            if cutlass.const_expr(self.by_score):
                self.sort(storage, base, thread, written)
            for i in cutlass.range(thread, written, self.threads, unroll=2):
                line[i] = s_columns[i] - lead
        else:
            for i in cutlass.range(first, end, unroll=1):
                word, column = s_bitmap[i], i * 32 - lead
                while word != 0:
                    lowest = word & (~word + 1)
                    line[place] = column + ptx.highest_bit(lowest)
                    word = word ^ lowest
                    place = place + 1
        for i in cutlass.range(written + thread, k, self.threads, unroll=1):
            line[i] = Int32(-1)

    @cute.jit
    def sort(self, storage, base, thread, written):
        """columns[:written] by descending score, then ascending column: a bitonic sort of (inverted key, column)."""
        s_keys = storage.keys.get_tensor(cute.make_layout(self.list_entries))
        s_columns = storage.columns.get_tensor(cute.make_layout(self.list_entries))
        size = Int32(2)
        while size < written:
            size = size * 2
        for i in cutlass.range(thread, size, self.threads, unroll=1):
            # Beyond the end: behind everything.
            key, column = Uint32(0), Int32(LAST_COLUMN)
            if i < written:
                column = s_columns[i]
                key = ptx.key_of(ptx.load_one(self.is_float32, base + Int64(column) * self.element_bytes, Int32(1)))
            s_keys[i], s_columns[i] = ~key, column
        cute.arch.sync_threads()
        span = Int32(2)
        while span <= size:
            stride = span // 2
            while stride > 0:
                for i in cutlass.range(thread, size // 2, self.threads, unroll=1):
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
