"""From a row's sampled scores the bound of what is listed.

The scores stay in registers: 64 a lane, one warp a row, or four where there may be more than 2048 of them. A guess is counted
against all, so no place in memory is fought for. Guesses go down from the largest score, an octave at first and twice as far
every time, until enough scores reach one; then they halve what is between. Any score will do that `rank` of them reach and
hardly more: a count or two of SPARE ends the search early.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute import _sift_ptx as sift_ptx
from kernels_cute import _topk_ptx as ptx
from kernels_cute._sift_rows import BOUND, HEADER
from kernels_cute._topk_rows import LEAST_KEY

THREADS = 128
A_LANE = 64  # scores
SPARE = 4  # so many more sampled scores than wanted may reach the bound
OCTAVE = 1 << 23


class SiftBound:
    def __init__(self, warps: int):
        """warps: of a row, 1 or 4."""
        self.warps, self.rows = warps, THREADS // 32 // warps

    @cute.jit
    def launch(self, rows, starts, ends, rank: Int32, stream):
        self.kernel(rows, starts, ends, rank).launch(
            grid=((cute.size(rows, mode=[0]) + (self.rows - 1)) // self.rows, 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=5,
            preferred_smem_carveout=100,  # as the kernels before and after
            stream=stream,
        )

    def storage_type(self):
        @cute.struct
        class Storage:
            # A warp a row needs none. Two sets, so that a guess costs one barrier.
            parts: cute.struct.MemRange[Int32, 2 * self.warps]

        return Storage

    @cute.kernel
    def kernel(self, rows: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, rank: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row, own = block * self.rows + warp // self.warps, warp % self.warps
        if row < cute.size(rows, mode=[0]):
            first, end = starts[row], ends[row]
            bound = Uint32(LEAST_KEY)
            if end - first > rank:
                line = rows.iterator.toint() + (Int64(row) * rows.stride[0] + HEADER) * 4
                bound = self.search(storage, line, first, end, own, rank)
            word = cute.arch.lane_idx()
            if own == 0 and word < HEADER:
                value = Int32(0)
                if word == BOUND:
                    value = Int32(ptx.float_of(bound))
                rows[row, word] = value

    @cute.jit
    def search(self, storage, line, first, end, own, rank):
        """The largest key but for SPARE that `rank` of the scores reach; LEAST_KEY where no number does."""
        scores = cute.make_rmem_tensor(A_LANE, Uint32)
        place = first + own * 32 + cute.arch.lane_idx()
        line = line + Int64(place) * 4
        for i in cutlass.range_constexpr(A_LANE):
            step = 32 * self.warps * i
            scores[i] = ptx.load_one(True, line + 4 * step, ptx.as_int(place + step < end))
        highest = self.largest(storage, ptx.key_of(sift_ptx.largest_of([scores[i] for i in range(A_LANE)])), own)
        turn = Int32(1)
        low, high = Uint32(LEAST_KEY), highest + 1
        reached, reach = Int32(0x7FFFFFFF), Uint32(OCTAVE)
        while low + 1 < high and reached > rank + SPARE:
            guess = low + ((high - low) >> Uint32(1))
            if reach > 0:
                if highest - low > reach:
                    guess = highest - reach
                    reach = reach + reach
                else:
                    reach = Uint32(0)
            count = ptx.warp_sum(ptx.count_from(ptx.float_of(guess), [scores[i] for i in range(A_LANE)]))
            if cutlass.const_expr(self.warps > 1):
                count = self.sum_of(storage, count, own, turn)
                turn = turn ^ 1
            if count >= rank:
                low, reached, reach = guess, count, Uint32(0)
            else:
                high = guess
        return low

    @cute.jit
    def largest(self, storage, key, own):
        """Of all lanes; of all warps of the row."""
        key = sift_ptx.warp_largest(key)
        if cutlass.const_expr(self.warps > 1):
            parts = storage.parts.get_tensor(cute.make_layout(2 * self.warps))
            if cute.arch.lane_idx() == 0:
                parts[own] = Int32(key)
            cute.arch.sync_threads()
            for other in cutlass.range_constexpr(self.warps):
                key = cutlass.max(key, Uint32(parts[other]))
        return key

    @cute.jit
    def sum_of(self, storage, count, own, turn):
        parts = storage.parts.get_tensor(cute.make_layout(2 * self.warps))
        if cute.arch.lane_idx() == 0:
            parts[turn * self.warps + own] = count
        cute.arch.sync_threads()
        total = Int32(0)
        for other in cutlass.range_constexpr(self.warps):
            total = total + parts[turn * self.warps + other]
        return total
