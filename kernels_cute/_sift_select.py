"""Selects from a row's lists; and, of rows that these do not answer, from all scores.

The lists answer a row if none failed, was full or met another, and k entries or more are there: then the k largest scores, and
all that equal the least of them, are among them, whatever the bound was. With the least bound of all they hold whatever may be
selected.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute import _topk_ptx as ptx
from kernels_cute._chunk_ptx import copy_from_global, store_words
from kernels_cute._sift_ptx import BATCH, count_entries, mark_entries, place_entries
from kernels_cute._sift_rows import AT_ONCE, BOUND, COUNTS, FAILED, HEADER, LISTS, WARPS, part_of, room_of
from kernels_cute._topk_rows import BINS, FIRST_SHIFT, LAST_COLUMN, LEAST_KEY, LIST_SHIFT, TopkRows

PLACES = 1024  # words of the bins that say how many bits come before a word of the bitmap; the result's columns follow


class SelectListed(TopkRows):
    def __init__(self, threads: int, blocks_per_sm: int, list_entries: int, max_columns: int):
        super().__init__(True, True, True, False, threads, 1, blocks_per_sm, list_entries, max_columns)
        self.by_entry = max_columns == 128 * threads  # four words of the bitmap a thread

    @cute.jit
    def launch(self, rows, starts, ends, out, again_starts, again_ends, num_keys: Int32, stream):
        self.kernel(rows, starts, ends, out, again_starts, again_ends, num_keys).launch(
            grid=(cute.size(rows, mode=[0]), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    def storage_type(self):
        @cute.struct
        class Storage:
            # Those of TopkRows; bins, once nothing is counted any more, are places by word and the result's columns.
            keys: cute.struct.Align[cute.struct.MemRange[Uint32, self.list_entries], 16]
            columns: cute.struct.Align[cute.struct.MemRange[Int32, self.list_entries], 16]
            bins: cute.struct.Align[cute.struct.MemRange[Int32, BINS + 4], 16]
            bitmap: cute.struct.Align[cute.struct.MemRange[Uint32, self.bitmap_words], 16]
            warp_sums: cute.struct.MemRange[Int32, 32]
            found: cute.struct.MemRange[Int32, 4]
            passed: cute.struct.MemRange[Int32, 4]
            arrived: cute.struct.MemRange[Int64, 1]
            listed: cute.struct.MemRange[Int32, 2]

        return Storage

    @cute.kernel
    def kernel(
        self, rows: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, out: cute.Tensor, again_starts: cute.Tensor,
        again_ends: cute.Tensor, num_keys: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        k = Int32(out.shape[1])
        _, visible = self.row_range(starts, ends, row, num_keys, num_keys, Int32(1))
        first = self.clamped(starts[row], 0, num_keys)
        lower = ptx.key_of(Uint32(rows[row, BOUND]))
        again_start, again_end = Int32(0), Int32(0)
        if visible <= k:
            for i in cutlass.range(thread, k, self.threads, unroll=1):
                column = Int32(i)
                if i >= visible:
                    column = Int32(-1)
                out[row, i] = column
        else:
            s_listed = storage.listed.get_tensor(cute.make_layout(2))
            s_passed = storage.passed.get_tensor(cute.make_layout(4))
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                listed = self.fetch(storage, rows, row, k, lower)
                if thread == 0:
                    s_listed[0], s_passed[0], s_passed[1] = listed, Int32(0), Int32(0)
            self.clear_bins(storage, thread)
            if cutlass.const_expr(self.by_entry):
                ptx.store_zeros(storage.bitmap.data_ptr().toint() + 16 * thread)
            else:
                self.clear_bitmap(storage, thread, (first + visible + 31) // 32)
            cute.arch.sync_threads()
            listed = s_listed[0]
            if listed >= 0:
                cute.arch.mbarrier_wait(storage.arrived.data_ptr(), 0)
                self.select_listed(storage, out, row, first, visible, thread, k, listed, lower)
            else:
                again_start, again_end = starts[row], ends[row]
        if thread == 0:
            again_starts[row], again_ends[row] = again_start, again_end

    @cute.jit
    def fetch(self, storage, rows, row, k, lower):
        """One warp has the row's lists copied to the block's, a lane each. Number of entries; -1 where they are no answer, and
        then nothing comes.

        Copies are of two entries at least. Of a list of an odd number the one that stands apart is put behind all others.
        """
        lane = cute.arch.lane_idx()
        own, number, warp = lane % (LISTS * WARPS), lane % (LISTS * WARPS) // WARPS, lane % WARPS
        count, failed = rows[row, COUNTS + own], rows[row, FAILED]
        arrived = storage.arrived.data_ptr()
        if lane == 0:
            cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        first, entries = part_of(room_of(Int32(cute.size(rows, mode=[1]))), number, warp)
        # At the limit a list may have lost entries; and two that fill a part must not have met.
        other = cute.arch.shuffle_sync_bfly(count, WARPS)
        spoilt = ptx.as_int(count >= entries - AT_ONCE or count + other > entries or failed != 0)
        if lane >= LISTS * WARPS:
            count = Int32(0)
        odd = count & 1
        # Twice 16 bits: neither sum is more than 16 of these lists, or than the most that a row has.
        before = ptx.running_sum((count - odd) + (odd << 24)) - ((count - odd) + (odd << 24))
        listed = ptx.warp_sum(count)
        pairs = listed - ptx.warp_sum(odd)
        is_answer = ptx.warp_sum(spoilt) == 0 and listed <= self.list_entries and (listed >= k or lower == LEAST_KEY)
        if is_answer:
            source = rows.iterator.toint() + (Int64(row) * rows.stride[0] + HEADER) * 4 + first * 8
            apart = count - odd
            # The first entry in memory of a list that has been filled from the back is its last one.
            if number % 2 == 1:
                source = source + 8 * (entries - count)
                apart = Int32(0)
            target = storage.keys.data_ptr().toint()
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, 8 * pairs)
            cute.arch.sync_warp()
            if odd != 0:
                score, column = ptx.load_global_pair(source + 8 * apart)
                ptx.store_pair(target + 8 * (pairs + (before >> 24)), score, column)
                if apart == 0:
                    source = source + 8
            if count > 1:
                copy_from_global(target + 8 * (before & 0xFFFFFF), source, 8 * (count - odd), arrived.toint())
        else:
            listed = Int32(-1)
        return listed

    @cute.jit
    def select_listed(self, storage, out, row, first, visible, thread, k, listed, lower):
        # Entries have keys, which stand for columns as if the row began with the first of all.
        shift = Int32(LIST_SHIFT)
        if lower == LEAST_KEY:
            shift = Int32(FIRST_SHIFT)
        _, tie_key, last_column, _, wanted, highest = self.narrow(
            storage, Int64(0), Int32(0), visible, thread, Int32(0), lower, shift, k, listed, Int32(0), True
        )
        if wanted > 0:
            self.mark_ranked(storage, thread, listed, tie_key, highest, wanted)
        else:
            self.mark_listed(storage, thread, listed, tie_key, last_column)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.by_entry):
            self.write_entries(storage, out, row, first, thread, k, listed)
        else:
            self.write(storage, Int64(0), out, row, first, (first + visible + 31) // 32, thread, k)

    @cute.jit
    def count_list(self, storage, thread, num, lower, shift, top, is_tie, tie_key):
        if is_tie != 0:
            TopkRows.count_list(self, storage, thread, num, lower, shift, top, is_tie, tie_key)
        else:
            bins, entries = storage.bins.data_ptr().toint(), storage.keys.data_ptr().toint()
            for i in cutlass.range(thread, num, self.threads * BATCH, unroll=1):
                count_entries(entries + 8 * i, num - i, self.threads, bins, lower, shift, top)

    @cute.jit
    def mark_ranked(self, storage, thread, num, lower, highest, wanted):
        bitmap, aside = storage.bitmap.data_ptr().toint(), self.bins_anew(storage)
        counter, entries = storage.passed.data_ptr().toint() + 4, storage.keys.data_ptr().toint()
        for i in cutlass.range(thread, num, self.threads * BATCH, unroll=1):
            found = mark_entries(entries + 8 * i, num - i, self.threads, bitmap, lower, highest)
            while found != 0:
                nth = ptx.highest_bit(Uint32(found))
                key, column = self.entry(storage, i + self.threads * nth)
                ptx.store_pair(aside + 8 * ptx.reserve(counter, Int32(1)), LAST_COLUMN - column, key)
                found = found ^ (Int32(1) << nth)
        cute.arch.sync_threads()
        self.rank(storage, thread, aside, wanted)

    @cute.jit
    def write_entries(self, storage, out, row, first, thread, k, listed):
        """Every entry whose bit is set goes to the place behind the bits before its own; a thread adds up four words."""
        bitmap, before = storage.bitmap.data_ptr().toint(), storage.bins.data_ptr().toint()
        s_columns = cute.make_tensor(storage.bins.data_ptr() + PLACES, cute.make_layout(BINS - PLACES))
        line = out.iterator + Int64(row) * out.stride[0]
        a, b, c, d = ptx.load_four(bitmap + 16 * thread)
        of_a, of_b, of_c, of_d = cute.arch.popc(a), cute.arch.popc(b), cute.arch.popc(c), cute.arch.popc(d)
        place, written = self.sum_before(storage, thread, Int32(of_a + of_b + of_c + of_d))
        store_words(before + 16 * thread, [place, place + of_a, place + of_a + of_b, place + of_a + of_b + of_c])
        cute.arch.sync_threads()
        places, entries = before + 4 * PLACES, storage.keys.data_ptr().toint()
        for i in cutlass.range(thread, listed, self.threads * BATCH, unroll=1):
            place_entries(entries + 8 * i, listed - i, self.threads, bitmap, before, places)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, written, self.threads, unroll=4):
            line[i] = s_columns[i] - first
        for i in cutlass.range(written + thread, k, self.threads, unroll=1):
            line[i] = Int32(-1)


class SelectAgain(TopkRows):
    """Rows of whole scores; those with an empty range keep what they have.

    A block has every so many rows, as many blocks as run at a time: where nothing is to be done, all are gone at once.
    """

    def __init__(self, threads: int, unroll: int, blocks_per_sm: int, list_entries: int, max_columns: int, num_sms: int):
        super().__init__(True, True, True, False, threads, unroll, blocks_per_sm, list_entries, max_columns)
        self.num_blocks = num_sms * blocks_per_sm

    @cute.jit
    def launch(self, scores, starts, ends, out, stream):
        self.kernel(scores, starts, ends, out).launch(
            grid=(cutlass.min(cute.size(scores, mode=[0]), self.num_blocks), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, scores: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        num_rows, columns = Int32(scores.shape[0]), Int32(scores.shape[1])
        anything = Int32(0)
        for mine in cutlass.range(block + cute.arch.lane_idx() * blocks, num_rows, 32 * blocks, unroll=1):
            first, end = self.row_range(starts, ends, mine, columns, Int32(-1), Int32(1))
            anything = anything | ptx.as_int(first < end)
        if cute.arch.vote_ballot_sync(anything != 0) != 0:
            for row in cutlass.range(block, num_rows, blocks, unroll=1):
                first, end = self.row_range(starts, ends, row, columns, Int32(-1), Int32(1))
                if first < end:
                    self.clear_bins(storage, thread)
                    self.select(storage, scores, out, row, first, end, thread, Int32(out.shape[1]))
                    cute.arch.sync_threads()
