"""Selects from a row's lists; and, of rows that these do not answer, from all scores.

The lists answer a row if none failed, was full or met another, and k entries or more are there: then the k largest scores, and
all that equal the least of them, are among them, whatever the bound was. With the least bound of all they hold whatever may be
selected.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute import _topk_ptx as ptx
from kernels_cute._sift_rows import AT_ONCE, BOUND, COUNTS, FAILED, HEADER, LISTS, WARPS, room_of
from kernels_cute._topk_rows import FIRST_SHIFT, LEAST_KEY, LIST_SHIFT, TopkRows


class SelectListed(TopkRows):
    def __init__(self, threads: int, blocks_per_sm: int, list_entries: int, max_columns: int):
        super().__init__(True, True, True, False, threads, 1, blocks_per_sm, list_entries, max_columns)

    @cute.jit
    def launch(self, rows, starts, ends, out, again_starts, again_ends, num_keys: Int32, stream):
        self.kernel(rows, starts, ends, out, again_starts, again_ends, num_keys).launch(
            grid=(cute.size(rows, mode=[0]), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

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
        # Each quarter of the block takes the lists of one warp of the logits, which it first looks over: all four, so that all
        # threads know all counts.
        room = room_of(Int32(cute.size(rows, mode=[1])))
        own = thread // (self.threads // WARPS)
        counts = cute.make_rmem_tensor(LISTS, Int32)
        counts.fill(0)
        listed, place, is_whole = Int32(0), Int32(0), rows[row, FAILED] == 0
        for warp in cutlass.range_constexpr(WARPS):
            if own == warp:
                place = listed
            for number in cutlass.range_constexpr(LISTS):
                count = rows[row, COUNTS + number * WARPS + warp]
                if own == warp:
                    counts[number] = count
                listed = listed + count
                entries = room // WARPS
                if cutlass.const_expr(number >= 2):
                    entries = entries // 2
                # At the limit a list may have lost entries; and two that fill a part must not have met.
                is_whole = is_whole and count < entries - AT_ONCE
                if cutlass.const_expr(number % 2 == 1):
                    is_whole = is_whole and count + rows[row, COUNTS + (number - 1) * WARPS + warp] <= entries
        bound = Uint32(rows[row, BOUND])
        again_start, again_end = Int32(0), Int32(0)
        if visible <= k:
            for i in cutlass.range(thread, k, self.threads, unroll=1):
                column = Int32(i)
                if i >= visible:
                    column = Int32(-1)
                out[row, i] = column
        else:
            lower = ptx.key_of(bound)
            if is_whole and listed <= self.list_entries and (listed >= k or lower == LEAST_KEY):
                self.select_listed(storage, rows, out, row, visible, thread, k, counts, own, place, room, listed, lower)
            else:
                again_start, again_end = starts[row], ends[row]
        if thread == 0:
            again_starts[row], again_ends[row] = again_start, again_end

    @cute.jit
    def select_listed(self, storage, rows, out, row, visible, thread, k, counts, own, place, room, listed, lower):
        words = (visible + 31) // 32
        s_passed = storage.passed.get_tensor(cute.make_layout(4))
        if thread == 0:
            s_passed[0], s_passed[1] = Int32(0), Int32(0)
        self.clear_bins(storage, thread)
        self.clear_bitmap(storage, thread, words)
        line = rows.iterator.toint() + (Int64(row) * rows.stride[0] + HEADER) * 4
        for number in cutlass.range_constexpr(LISTS):
            count, entries, first = counts[number], room // WARPS, own * (room // WARPS)
            if cutlass.const_expr(number >= 2):
                entries = entries // 2
                first = room + own * entries
            # The first entry in memory of a list that has been filled from the back is its last one.
            if cutlass.const_expr(number % 2 == 1):
                first = first + entries - count
            self.take(storage, line + Int64(first) * 8, count, place, thread % (self.threads // WARPS))
            place = place + count
        cute.arch.sync_threads()
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
        self.write(storage, Int64(0), out, row, Int32(0), words, thread, k)

    @cute.jit
    def take(self, storage, address, count, place, thread):
        """`count` entries from a global address on become those of the block's list from `place` on. thread: of a quarter."""
        target = storage.keys.data_ptr().toint() + 8 * place
        for i in cutlass.range(thread, count, self.threads // WARPS, unroll=4):
            score, column = ptx.load_global_pair(address + Int64(i) * 8)
            ptx.store_pair(target + 8 * i, score, column)


class SelectAgain(TopkRows):
    """Rows of whole scores; those with an empty range keep what they have."""

    def __init__(self, threads: int, unroll: int, blocks_per_sm: int, list_entries: int, max_columns: int):
        super().__init__(True, True, True, False, threads, unroll, blocks_per_sm, list_entries, max_columns)

    @cute.jit
    def launch(self, scores, starts, ends, out, stream):
        self.kernel(scores, starts, ends, out).launch(
            grid=(cute.size(scores, mode=[0]), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, scores: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        first, end = self.row_range(starts, ends, row, Int32(scores.shape[1]), Int32(-1), Int32(1))
        if first < end:
            self.clear_bins(storage, thread)
            self.select(storage, scores, out, row, first, end, thread, Int32(out.shape[1]))
