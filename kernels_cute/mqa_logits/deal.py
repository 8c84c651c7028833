"""How the key tiles of a batch are dealt over blocks, from lengths that only the device knows.

A job is a pass over one sequence: some of its drafts against all keys that one of them sees. The tiles of all jobs form one
line, and every block takes an equal run of it, to the tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

JOBS_AT_ONCE = 4  # lengths a lane asks for before it adds any


class Deal:
    """The compile-time side; `lengths`, the clamp `limit` and the number of sequences arrive at launch."""

    def __init__(
        self, tile_rows: int, drafts: int, passes: int, next_n: int, per_draft_lengths: bool, blocks: int, all_jobs: bool
    ):  # fmt: skip
        self.tile_rows, self.drafts, self.passes = tile_rows, drafts, passes  # tile_rows is a power of two
        self.next_n, self.per_draft_lengths = next_n, per_draft_lengths
        self.blocks = blocks
        self.all_jobs = all_jobs  # `least` is 0

    @cute.jit
    def row_length(self, lengths, limit, sequence, draft):
        """Keys that a draft sees; draft < next_n."""
        length = Int32(0)
        if cutlass.const_expr(self.per_draft_lengths):
            line = cute.make_tensor(lengths.iterator + Int64(sequence) * lengths.stride[0], cute.make_layout(self.next_n))
            length = line[draft]
        else:
            # Clamped before the subtraction, which would wrap at the most negative lengths.
            length = cutlass.max(lengths[sequence], 0) + (draft - self.next_n + 1)
        return cutlass.max(cutlass.min(length, limit), 0)

    @cute.jit
    def job_length(self, lengths, limit, least, job, jobs):
        """Keys that some draft of a job sees; 0 up to `least`, and beyond the last job.

        Loads stand outside of conditions and travel together.
        """
        near = cutlass.min(job, jobs - 1)
        sequence, first = near // self.passes, near % self.passes * self.drafts
        length = Int32(0)
        if cutlass.const_expr(self.per_draft_lengths):
            for local in cutlass.range_constexpr(min(self.drafts, self.next_n)):
                draft = cutlass.min(first + local, self.next_n - 1)
                length = cutlass.max(length, self.row_length(lengths, limit, sequence, draft))
        else:  # the last draft sees most
            length = self.row_length(lengths, limit, sequence, cutlass.min(first + self.drafts, self.next_n) - 1)
        if job >= jobs:
            length = Int32(0)
        if cutlass.const_expr(not self.all_jobs):
            if length <= least:
                length = Int32(0)
        return length

    @cute.jit
    def tiles(self, length):
        return (length + (self.tile_rows - 1)) >> (self.tile_rows.bit_length() - 1)

    @cute.jit
    def run(self, total):
        """(first tile, tiles) of this block, of a line of `total` (Int64) tiles."""
        block, _, _ = cute.arch.block_idx()
        start = Int32(total * block // self.blocks)
        return start, Int32(total * (block + 1) // self.blocks) - start

    @cute.jit
    def likely_first(self, limit, jobs):
        """(job, tile) where this block's run starts if every sequence is as long as it can be. For prefetches only."""
        tiles_each = cutlass.max(self.tiles(limit), 1)
        start, _ = self.run(Int64(jobs) * tiles_each)
        return cutlass.min(start // tiles_each, jobs - 1), start % tiles_each

    @cute.jit
    def first_work(self, lengths, limit, least, jobs):
        """(job, tile, tiles): where this block's run starts and how long it is. Of a whole warp; all lanes return the same."""
        lane = cute.arch.lane_idx()
        own = Int32(0)
        for base in cutlass.range(lane, jobs, 32 * JOBS_AT_ONCE, unroll=1):
            for part in cutlass.range_constexpr(JOBS_AT_ONCE):
                own = own + self.tiles(self.job_length(lengths, limit, least, base + 32 * part, jobs))
        total = cute.arch.warp_redux_sync(own, "add")

        start, count = self.run(Int64(total))
        job, tile = Int32(0), Int32(0)
        if count > 0:
            before, base = Int32(0), Int32(0)
            while before <= start:  # ends: before reaches total, which is beyond start
                own = self.tiles(self.job_length(lengths, limit, least, base + lane, jobs))
                upto = own
                for power in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(upto, 1 << power, mask_and_clamp=0)
                    if lane >= 1 << power:
                        upto = upto + other
                low = before + upto - own
                if start >= low and start < low + own:  # in one lane at most
                    job, tile = base + lane, start - low
                before = before + cute.arch.shuffle_sync(upto, 31)
                base = base + 32
            job = cute.arch.warp_redux_sync(job, "max")
            tile = cute.arch.warp_redux_sync(tile, "max")
        return job, tile, count
