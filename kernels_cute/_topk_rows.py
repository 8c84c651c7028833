"""The top-k kernel: a block a row, a radix select on the float bits, indices in order from a bitmap of the row.

    1 histogram   the row is read once; a key's upper 12 bits are counted, and its upper 16 kept in shared memory as far
                  as they fit. After a quarter of the row the counts already bound the answer from below: what lies under the
                  bound is not counted any more, so that the bulk of a row does not queue for its bins.
    2 levels      only where the bin of the k-th score holds more entries than the list: read again and count 10 bits more,
                  10 more, and among equal scores their index. Without heavy ties this does not happen.
    3 mark        a bit per column that is above the bin; the columns inside it go to the list, in any order. From what is
                  kept; the rest of the row, or after step 2 all of it, is read again.
    4 refine      the list is narrowed by 10 bits of the score, 10, then 11 of the index and 11, until all of it that is
                  left is wanted; those set their bits.
    5 write       the bitmap is scanned in order: place = number of bits before. By score: the pairs are sorted first.

With `list_short` a row of at most k columns lists them all and is not read.

What the order of arrival decides (places in the list) no result depends on; bits and counts are integers.
Columns are counted from the last multiple of four elements at or before the row's range, so that four are one access.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute import _topk_ptx as ptx

BINS = 4096  # of the first digit: sign, exponent, three bits of the mantissa
DIGITS = 2048  # of every later one
FIRST_SHIFT = 20
LEAST_BIN = 8  # of a score that may be selected; below stand NaN and -inf
LEAST_KEY = LEAST_BIN << FIRST_SHIFT
FIRST_SIGN = BINS // 2  # first bin of scores from 0.0 on
NO_LEAST = ptx.MINUS_INFINITY
INDEX_BITS = 11  # of a digit of the index; two of them number the columns
MOST_COLUMNS = 1 << 20  # a bitmap of 128 KiB
NO_INDEX = 2**31 - 1
SPARE_QUADS = 8  # columns before the range, and the rest of the bitmap's last word


class TopkRows:
    """Everything here is known at compile time; sizes, strides, ranges and k arrive at launch."""

    def __init__(
        self,
        is_float32: bool,
        has_starts: bool,
        has_ends: bool,
        by_score: bool,
        threads: int,
        unroll: int,
        blocks_per_sm: int,
        kept_columns: int,
        list_entries: int,
        max_columns: int,
    ):
        self.is_float32, self.element_bytes = is_float32, 4 if is_float32 else 2
        self.has_starts, self.has_ends, self.by_score = has_starts, has_ends, by_score
        self.threads, self.unroll, self.blocks_per_sm = threads, unroll, blocks_per_sm
        self.warps = threads // 32
        self.kept_quads = kept_columns // 4 + SPARE_QUADS if kept_columns else 0
        self.list_entries = list_entries
        self.bitmap_words = max_columns // 32 + SPARE_QUADS // 8 + 1

    # ---- host

    @cute.jit
    def launch(self, logits, starts, ends, out, list_short, num_keys, drafts, stream):
        self.kernel(logits, starts, ends, out, list_short, num_keys, drafts).launch(
            grid=(cute.size(logits, mode=[0]), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,  # percent; without a value the DSL asks a device for its limit
            stream=stream,
        )

    def storage_type(self):
        @cute.struct
        class Storage:
            kept: cute.struct.Align[cute.struct.MemRange[Uint32, max(2 * self.kept_quads, self.list_entries)], 16]
            bins: cute.struct.Align[cute.struct.MemRange[Int32, BINS], 16]
            bitmap: cute.struct.Align[cute.struct.MemRange[Uint32, self.bitmap_words], 16]
            columns: cute.struct.Align[cute.struct.MemRange[Int32, self.list_entries], 16]
            warp_sums: cute.struct.MemRange[Int32, 32]
            found: cute.struct.MemRange[Int32, 4]
            tickets: cute.struct.MemRange[Int32, 4]

        return Storage

    # ---- device

    @cute.kernel
    def kernel(
        self, logits: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, out: cute.Tensor, list_short: Int32,
        num_keys: Int32, drafts: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        k = Int32(out.shape[1])
        first, end = self.row_range(starts, ends, row, Int32(logits.shape[1]), num_keys, drafts)
        if list_short != 0 and end - first <= k:
            for place in cutlass.range(thread, k, self.threads, unroll=1):
                column = Int32(place)
                if place >= end - first:
                    column = Int32(-1)
                out[row, place] = column
        else:
            self.select(storage, logits, out, row, first, end, thread, k)

    @cute.jit
    def select(self, storage, logits, out, row, first, end, thread, k):
        s_bins = storage.bins.get_tensor(cute.make_layout(BINS))
        address = logits.iterator.toint() + (Int64(row) * logits.stride[0] + first) * self.element_bytes
        lead = Int32(address & (4 * self.element_bytes - 1)) // self.element_bytes
        base = address - lead * self.element_bytes
        stop = lead + (end - first)  # the row is columns [lead, stop) of base
        words = (stop + 31) // 32

        for i in cutlass.range_constexpr(BINS // self.threads):
            s_bins[i * self.threads + thread] = Int32(0)
        if thread < 4:
            storage.found.data_ptr()[thread] = Int32(0)
            storage.tickets.data_ptr()[thread] = Int32(0)
        cute.arch.sync_threads()

        # Scores in [lower, upper) are undecided, `count` of them, and `left` are to be selected; above, all are.
        lower, upper = Uint32(LEAST_KEY), Uint32(LEAST_KEY)
        tie_low, tie_high = Int32(0), Int32(NO_INDEX)  # undecided among equal scores; below tie_low, all are selected
        left, count = Int32(0), Int32(0)
        kept_words = Int32(0)
        if stop - lead > k:
            if cutlass.const_expr(self.kept_quads > 0):
                kept_words = cutlass.min(words, self.kept_quads // 8)
            floor_bin = Int32(LEAST_BIN)
            split = words
            if stop - lead >= 4 * k:
                split = words // 4
            self.count_first(storage, base, lead, stop, thread, Int32(0), split * 8, floor_bin, kept_words)
            cute.arch.sync_threads()
            if split < words:
                bin, _, _, seen = self.find(storage, thread, BINS, k, False)
                if seen >= k:
                    floor_bin = bin
                self.count_first(storage, base, lead, stop, thread, split * 8, words * 8, floor_bin, kept_words)
                cute.arch.sync_threads()
            bin, bin_left, bin_count, total = self.find(storage, thread, BINS, k, True)
            if total > k:
                lower = Uint32(bin) << FIRST_SHIFT
                upper = lower + (1 << FIRST_SHIFT)
                left, count = bin_left, bin_count
            if count > self.list_entries:
                # Too many for the list.
                for level in cutlass.range(3, unroll=1):
                    if count > self.list_entries and left != count:
                        kept_words = Int32(0)
                        self.count_again(storage, base, lead, stop, thread, words * 8, level, lower, upper)
                        cute.arch.sync_threads()
                        bin, left, count, _ = self.find(storage, thread, DIGITS, left, True)
                        lower, upper, tie_low, tie_high = self.narrow(level, bin, lower, upper, tie_low, tie_high)
            if left == count:
                # The whole interval is selected: nothing is undecided.
                if tie_high == NO_INDEX:
                    upper = lower
                tie_low = tie_high
        if cutlass.const_expr(self.kept_quads > 0):
            self.mark_kept(storage, thread, kept_words, lower, upper)
        self.mark_read(storage, base, lead, stop, thread, kept_words, words, lower, upper, tie_low, tie_high)
        cute.arch.sync_threads()
        if left != count:
            self.refine(storage, base, thread, lower, upper, tie_low, tie_high, left, count)
            cute.arch.sync_threads()
        self.write(storage, base, out, row, lead, words, thread, k)

    @cute.jit
    def row_range(self, starts, ends, row, columns, num_keys, drafts):
        """[first, end) of a row's columns, clamped; first = end where it is empty.

        With starts and num_keys >= 0 they are ranges of so many keys, and column 0 is a range's first. Without starts the end
        of the last of `drafts` rows is given, and each row before it has one column less.
        """
        first, end = Int32(0), columns
        if cutlass.const_expr(self.has_starts):
            limit = columns
            if num_keys >= 0:
                limit = num_keys
            first, end = self.clamped(starts[row], 0, limit), limit
            if cutlass.const_expr(self.has_ends):
                end = self.clamped(ends[row], 0, limit)
            end = cutlass.max(first, end)
            if num_keys >= 0:
                first, end = Int32(0), cutlass.min(end - first, columns)
        elif cutlass.const_expr(self.has_ends):
            end = self.clamped(ends[row // drafts], drafts - 1 - row % drafts, columns)
        return first, end

    @cute.jit
    def clamped(self, bound, less, most):
        """bound - less, between 0 and `most`, and narrowed only then: an int64 may hold anything."""
        wide = cutlass.min(cutlass.max(Int64(bound), Int64(0)), Int64(most) + less)
        return Int32(cutlass.max(wide - less, Int64(0)))

    @cute.jit
    def load_quads(
        self, base, lead, stop, first_quad, end_quad, least, quads: cutlass.Constexpr, step: cutlass.Constexpr,
        keys: cute.Tensor,
    ):  # fmt: skip
        """Keys of `quads` quads from first_quad on, `step` apart; of columns outside the row and from end_quad on that of NaN.
        What is less than the float whose bits are `least` counts as `least`, as NaN does.

        The loads of whole quads come first and travel together; the two quads that the row's ends cut are read by element.
        """
        first_whole = (lead + 3) // 4
        num_whole = Uint32(cutlass.max(cutlass.min(stop // 4, end_quad) - first_whole, 0))
        for u in cutlass.range_constexpr(quads):
            quad = first_quad + u * step
            is_whole = ptx.as_int(Uint32(quad - first_whole) < num_whole)
            address = base + Int64(quad) * (4 * self.element_bytes)
            a, b, c, d = ptx.load_quad(self.is_float32, address, is_whole)
            keys[4 * u], keys[4 * u + 1], keys[4 * u + 2], keys[4 * u + 3] = a, b, c, d
        for u in cutlass.range_constexpr(quads):
            quad = first_quad + u * step
            if Uint32(quad - first_whole) >= num_whole:
                if quad < end_quad:
                    for j in cutlass.range_constexpr(4):
                        column = quad * 4 + j
                        is_inside = ptx.as_int(column >= lead and column < stop)
                        address = base + Int64(column) * self.element_bytes
                        keys[4 * u + j] = ptx.load_one(self.is_float32, address, is_inside)
            for j in cutlass.range_constexpr(4):
                keys[4 * u + j] = ptx.key_of(keys[4 * u + j], least)

    @cute.jit
    def count_first(self, storage, base, lead, stop, thread, first_quad, end_quad, floor_bin, kept_words):
        """Counts the first digit of keys, and keeps their upper halves; all keys below floor_bin are one, in the bin below."""
        bins = storage.bins.data_ptr().toint()
        kept = storage.kept.data_ptr().toint()
        keys = cute.make_rmem_tensor(4 * self.unroll, Uint32)
        kept_end = cutlass.min(end_quad, kept_words * 8)
        # A float of the bin below, without branches in the loop: its bits for keys up to that of -0.0, and above.
        highest = (Uint32(floor_bin) << FIRST_SHIFT) - 2
        least = ~highest
        if floor_bin > FIRST_SIGN:
            least = highest ^ Uint32(0x80000000)
        if floor_bin == LEAST_BIN:
            least = Uint32(ptx.MINUS_INFINITY)
        for start in cutlass.range(first_quad + thread, end_quad, self.threads * self.unroll, unroll=1):
            self.load_quads(base, lead, stop, start, end_quad, least, self.unroll, self.threads, keys)
            for u in cutlass.range_constexpr(self.unroll):
                for j in cutlass.range_constexpr(4):
                    ptx.count(bins + Int32((keys[4 * u + j] >> (FIRST_SHIFT - 2)) & (4 * BINS - 4)))
                if cutlass.const_expr(self.kept_quads > 0):
                    quad = start + u * self.threads
                    if quad < kept_end:
                        ptx.store_pair(
                            kept + quad * 8,
                            ptx.top_halves(keys[4 * u], keys[4 * u + 1]),
                            ptx.top_halves(keys[4 * u + 2], keys[4 * u + 3]),
                        )

    @cute.jit
    def digit(self, step, key, column):
        """The digit that a step looks at, larger for what is selected first: score bits 10-19, 0-9, index bits 11-21, 0-10."""
        value = Int32((key >> 10) & 1023)
        if step == 1:
            value = Int32(key & 1023)
        if step == 2:
            value = (DIGITS - 1) - (column >> INDEX_BITS)
        if step == 3:
            value = (DIGITS - 1) - (column & (DIGITS - 1))
        return value

    @cute.jit
    def narrow(self, step, bin, lower, upper, tie_low, tie_high):
        """The undecided interval after a step whose digit was found to be `bin`."""
        if step == 0:
            lower = (lower & Uint32(0xFFF00000)) | (Uint32(bin) << 10)
            upper = lower + 1024
        if step == 1:
            lower = (lower & Uint32(0xFFFFFC00)) | Uint32(bin)
            upper = lower + 1
        if step == 2:
            tie_low = ((DIGITS - 1) - bin) << INDEX_BITS
            tie_high = tie_low + DIGITS
        if step == 3:
            tie_low = (tie_low & ~Int32(DIGITS - 1)) + ((DIGITS - 1) - bin)
            tie_high = tie_low + 1
        return lower, upper, tie_low, tie_high

    @cute.jit
    def count_again(self, storage, base, lead, stop, thread, end_quad, level, lower, upper):
        """Counts the level's digit of the undecided columns, from memory."""
        bins = storage.bins.data_ptr().toint()
        keys = cute.make_rmem_tensor(4 * self.unroll, Uint32)
        for start in cutlass.range(thread, end_quad, self.threads * self.unroll, unroll=1):
            self.load_quads(base, lead, stop, start, end_quad, NO_LEAST, self.unroll, self.threads, keys)
            for u in cutlass.range_constexpr(self.unroll):
                for j in cutlass.range_constexpr(4):
                    key = keys[4 * u + j]
                    if key < upper:
                        column = 4 * (start + u * self.threads) + j
                        ptx.count_from(bins + 4 * self.digit(level, key, column), key, lower)

    @cute.jit
    def mark_kept(self, storage, thread, words, lower, upper):
        """Sets the bits of what is selected for certain, and lists what is undecided, from the upper halves of the keys.

        Only the first digit has been looked at by then, and the upper half holds all of it.
        """
        kept = storage.kept.data_ptr().toint()
        bitmap = storage.bitmap.data_ptr().toint()
        keys = cute.make_rmem_tensor(8, Uint32)
        for octet in cutlass.range(thread, words * 4, self.threads, unroll=2):
            pairs = ptx.load_four(kept + octet * 16)
            for i in cutlass.range_constexpr(4):
                keys[2 * i], keys[2 * i + 1] = pairs[i] << 16, pairs[i]
            bits = ptx.bits_from(upper, [keys[i] for i in range(8)])
            undecided = ptx.bits_from(lower, [keys[i] for i in range(8)]) ^ bits
            if undecided != 0:
                bits = self.settle(storage, octet * 8, bits, undecided, Int32(0), Int32(NO_INDEX))
            ptx.store_byte(bitmap + octet, bits)

    @cute.jit
    def mark_read(self, storage, base, lead, stop, thread, first_word, words, lower, upper, tie_low, tie_high):
        """The same, from memory and after any number of levels."""
        bitmap = storage.bitmap.data_ptr().toint()
        end_quad = words * 8
        keys = cute.make_rmem_tensor(4 * self.unroll, Uint32)
        # All lanes of a warp take part in the exchange of bits, so the trip count is the block's.
        for start in cutlass.range(first_word * 8, end_quad, self.threads * self.unroll, unroll=1):
            self.load_quads(base, lead, stop, start + thread, end_quad, NO_LEAST, self.unroll, self.threads, keys)
            for u in cutlass.range_constexpr(self.unroll):
                quad = start + u * self.threads + thread
                bits = ptx.bits_from(upper, [keys[4 * u + j] for j in range(4)])
                undecided = ptx.bits_from(lower, [keys[4 * u + j] for j in range(4)]) ^ bits
                if undecided != 0:
                    bits = self.settle(storage, quad * 4, bits, undecided, tie_low, tie_high)
                other = cute.arch.shuffle_sync_bfly(bits, offset=1)
                if quad % 2 == 0 and quad < end_quad:
                    ptx.store_byte(bitmap + quad // 2, bits | (other << 4))

    @cute.jit
    def settle(self, storage, first_column, bits, undecided, tie_low, tie_high):
        """The undecided columns: below tie_low they are selected, from tie_high on they are not, between them listed."""
        tickets = storage.tickets.data_ptr().toint()
        s_columns = storage.columns.get_tensor(cute.make_layout(self.list_entries))
        while undecided != 0:
            lowest = undecided & -undecided
            column = first_column + ptx.highest_bit(Uint32(lowest))
            if column < tie_low:
                bits = bits | lowest
            elif column < tie_high:
                s_columns[ptx.take_ticket(tickets)] = column
            undecided = undecided ^ lowest
        return bits

    @cute.jit
    def refine(self, storage, base, thread, lower, upper, tie_low, tie_high, left, count):
        """Decides the columns of the list and sets the bits of those that are selected."""
        bins = storage.bins.data_ptr().toint()
        bitmap = storage.bitmap.data_ptr().toint()
        s_keys = storage.kept.get_tensor(cute.make_layout(self.list_entries))  # of no other use by now
        s_columns = storage.columns.get_tensor(cute.make_layout(self.list_entries))
        listed = count
        for i in cutlass.range(thread, listed, self.threads, unroll=1):
            address = base + Int64(s_columns[i]) * self.element_bytes
            s_keys[i] = ptx.key_of(ptx.load_one(self.is_float32, address, Int32(1)))
        # Every entry is read by the thread that wrote its key.
        for step in cutlass.range(4, unroll=1):
            if left != count:
                for i in cutlass.range(thread, listed, self.threads, unroll=1):
                    key, column = s_keys[i], s_columns[i]
                    if key < upper and column >= tie_low and column < tie_high:
                        ptx.count_from(bins + 4 * self.digit(step, key, column), key, lower)
                cute.arch.sync_threads()
                bin, left, count, _ = self.find(storage, thread, DIGITS, left, True)
                lower, upper, tie_low, tie_high = self.narrow(step, bin, lower, upper, tie_low, tie_high)
        for i in cutlass.range(thread, listed, self.threads, unroll=1):
            key, column = s_keys[i], s_columns[i]
            if key >= upper or (key >= lower and column < tie_high):
                ptx.or_shared(bitmap + column // 32 * 4, Uint32(1) << Uint32(column % 32))

    @cute.jit
    def sum_before(self, storage, thread, value):
        """The sum of value over the threads before this one, and over all. One barrier; sums stay until the next."""
        s_sums = storage.warp_sums.get_tensor(cute.make_layout(32))
        lane, warp = thread % 32, thread // 32
        running = value
        for power in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(running, offset=1 << power, mask_and_clamp=0)
            if lane >= 1 << power:
                running = running + other
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
    def find(self, storage, thread, num_bins: cutlass.Constexpr, wanted, clear: cutlass.Constexpr):
        """The bin of the wanted-th largest entry: (bin, how many of it are wanted, its count, entries in all).

        The first digit's bins of what may not be selected do not count. Bins beyond num_bins stay untouched; the others
        are zero afterwards where clear. Without that many entries only the last result holds. Two barriers; the counts
        must be complete at the call.
        """
        s_bins = storage.bins.get_tensor(cute.make_layout(BINS))
        s_found = storage.found.get_tensor(cute.make_layout(4))
        per_thread = cutlass.const_expr(num_bins // self.threads)
        counts = cute.make_rmem_tensor(per_thread, Int32)
        last = (num_bins - 1) - thread * per_thread
        mine = Int32(0)
        for i in cutlass.range_constexpr(per_thread):
            counts[i] = s_bins[last - i]
            if cutlass.const_expr(num_bins == BINS):
                if last - i < LEAST_BIN:
                    counts[i] = Int32(0)
            mine = mine + counts[i]
        before, total = self.sum_before(storage, thread, mine)
        if before < wanted and wanted <= before + mine:
            for i in cutlass.range_constexpr(per_thread):
                if before < wanted and wanted <= before + counts[i]:
                    s_found[0], s_found[1], s_found[2] = last - i, wanted - before, counts[i]
                before = before + counts[i]
        if cutlass.const_expr(clear):
            for i in cutlass.range_constexpr(per_thread):
                s_bins[last - i] = Int32(0)
        cute.arch.sync_threads()
        return s_found[0], s_found[1], s_found[2], total

    @cute.jit
    def write(self, storage, base, out, row, lead, words, thread, k):
        s_bitmap = storage.bitmap.get_tensor(cute.make_layout(self.bitmap_words))
        s_columns = storage.columns.get_tensor(cute.make_layout(self.list_entries))
        line = out.iterator + Int64(row) * out.stride[0]
        written = Int32(0)
        own = Int32(thread)
        for _ in cutlass.range(0, words, self.threads, unroll=1):
            word = Uint32(0)
            if own < words:
                word = s_bitmap[own]
            before, total = self.sum_before(storage, thread, Int32(cute.arch.popc(word)))
            place = written + before
            column = own * 32
            own = own + self.threads
            while word != 0:
                lowest = word & (~word + 1)
                if cutlass.const_expr(self.by_score):
                    s_columns[place] = column + ptx.highest_bit(lowest)
                else:
                    line[place] = column + ptx.highest_bit(lowest) - lead
                word = word ^ lowest
                place = place + 1
            written = written + total
            cute.arch.sync_threads()
        if cutlass.const_expr(self.by_score):
            self.sort(storage, base, thread, written)
            for i in cutlass.range(thread, written, self.threads, unroll=1):
                line[i] = s_columns[i] - lead
        for i in cutlass.range(written + thread, k, self.threads, unroll=1):
            line[i] = Int32(-1)

    @cute.jit
    def sort(self, storage, base, thread, written):
        """columns[:written] by descending score, then ascending column: a bitonic sort of (inverted key, column)."""
        s_keys = storage.kept.get_tensor(cute.make_layout(self.list_entries))  # of no other use by now
        s_columns = storage.columns.get_tensor(cute.make_layout(self.list_entries))
        size = Int32(2)
        while size < written:
            size = size * 2
        for i in cutlass.range(thread, size, self.threads, unroll=1):
            # Beyond the end: behind everything.
            key, column = Uint32(0), Int32(NO_INDEX)
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
