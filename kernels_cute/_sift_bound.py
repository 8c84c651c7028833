"""From a row's sampled scores the bound of what is listed. A block a row; the digits are those of the top-k kernel."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute import _topk_ptx as ptx
from kernels_cute._sift_rows import BOUND, HEADER
from kernels_cute._topk_rows import ACCESS, FIRST_SHIFT, LEAST_KEY, TopkRows

SPARE = 16  # so many more sampled scores than wanted may lie above the bound: digits that would leave them out save nothing


class SiftBound(TopkRows):
    def __init__(self, threads: int, blocks_per_sm: int):
        super().__init__(True, True, True, False, threads, 1, blocks_per_sm, 32, 32)

    @cute.jit
    def launch(self, rows, starts, ends, rank: Int32, stream):
        self.kernel(rows, starts, ends, rank).launch(
            grid=(cute.size(rows, mode=[0]), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, rank: Int32):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        first, end = starts[row], ends[row]
        bound = Uint32(LEAST_KEY)
        if end - first > rank:
            self.clear_bins(storage, thread)
            cute.arch.sync_threads()
            address = rows.iterator.toint() + (Int64(row) * rows.stride[0] + (HEADER + first)) * 4
            lead = Int32(address & (ACCESS - 1)) // 4
            stop = lead + (end - first)
            # The least key of all where fewer scores than wanted may be selected. Among equal keys their own.
            _, bound, _, _, _, _ = self.narrow(
                storage, address - lead * 4, lead, stop, thread, Int32(0), Uint32(LEAST_KEY), Int32(FIRST_SHIFT), rank,
                stop - lead, rank + SPARE, False,
            )  # fmt: skip
        if thread < HEADER:
            word = Int32(0)
            if thread == BOUND:
                word = Int32(ptx.float_of(bound))
            rows[row, thread] = word
