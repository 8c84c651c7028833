"""Assignment of a batch's key tiles to blocks, from lengths that only the device knows.

A job is a pass over one sequence: some of its drafts against all keys that one of them sees. The tiles of all jobs form one
line, and every block takes an equal run of it, to the tile.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.mqa_logits.products import running_sum
from kernels_cute.mqa_logits.tiles import Lengths, PagedTiles

JOBS_AT_ONCE = 4  # lengths a lane asks for before it adds any


@cute.jit
def row_length(tiles: PagedTiles, lengths: Lengths, sequence: Int32, draft: Int32):
    """Return the number of keys that a draft sees. draft < next_n."""
    context_lens = lengths.context_lens
    length = Int32(0)
    if cutlass.const_expr(tiles.per_draft_lengths):
        line = context_lens.iterator + Int64(sequence) * context_lens.stride[0]
        length = cute.make_tensor(line, cute.make_layout(tiles.next_n))[draft]
    else:
        # Clamped before the subtraction, which would wrap at the most negative lengths.
        length = cutlass.max(context_lens[sequence], 0) + (draft - tiles.next_n + 1)
    return cutlass.max(cutlass.min(length, lengths.most_keys), 0)


@cute.jit
def job_length(tiles: PagedTiles, lengths: Lengths, job: Int32, jobs: Int32):
    """Return the number of keys that some draft of a job sees; 0 if they are too few to be scored, and beyond the last job.

    All loads come before the conditions, so that they overlap.
    """
    near = cutlass.min(job, jobs - 1)
    sequence, first = near // tiles.passes, near % tiles.passes * tiles.drafts
    length = Int32(0)
    if cutlass.const_expr(tiles.per_draft_lengths):
        for local in cutlass.range_constexpr(min(tiles.drafts, tiles.next_n)):
            draft = cutlass.min(first + local, tiles.next_n - 1)
            length = cutlass.max(length, row_length(tiles, lengths, sequence, draft))
    else:  # the last draft sees most
        length = row_length(tiles, lengths, sequence, cutlass.min(first + tiles.drafts, tiles.next_n) - 1)
    if job >= jobs:
        length = Int32(0)
    if cutlass.const_expr(not tiles.clean):  # else skip_rows_up_to is 0
        if length <= lengths.skip_rows_up_to:
            length = Int32(0)
    return length


@cute.jit
def tiles_of(tiles: PagedTiles, length: Int32):
    return (length + (tiles.tile - 1)) >> (tiles.tile.bit_length() - 1)


@cute.jit
def run(tiles: PagedTiles, total: Int64):
    """Return the first tile and the number of tiles of this block, of a line of `total` (Int64) tiles."""
    block, _, _ = cute.arch.block_idx()
    start = Int32(total * block // tiles.blocks)
    return start, Int32(total * (block + 1) // tiles.blocks) - start


@cute.jit
def likely_first(tiles: PagedTiles, lengths: Lengths, jobs: Int32):
    """Return the job and tile where this block's run would start if every sequence were as long as it can be. For prefetches
    only."""
    tiles_each = cutlass.max(tiles_of(tiles, lengths.most_keys), 1)
    start, _ = run(tiles, Int64(jobs) * tiles_each)
    return cutlass.min(start // tiles_each, jobs - 1), start % tiles_each


@cute.jit
def first_work(tiles: PagedTiles, lengths: Lengths, jobs: Int32):
    """Return the job and tile where this block's run starts, and the run's length in tiles. A whole warp calls it; all lanes
    return the same."""
    lane = cute.arch.lane_idx()
    own = Int32(0)
    for base in cutlass.range(lane, jobs, 32 * JOBS_AT_ONCE, unroll=1):
        for part in cutlass.range_constexpr(JOBS_AT_ONCE):
            own = own + tiles_of(tiles, job_length(tiles, lengths, base + 32 * part, jobs))
    total = cute.arch.warp_redux_sync(own, "add")

    start, count = run(tiles, Int64(total))
    job, tile = Int32(0), Int32(0)
    if count > 0:
        before, base = Int32(0), Int32(0)
        while before <= start:  # ends: before reaches total, which is beyond start
            own = tiles_of(tiles, job_length(tiles, lengths, base + lane, jobs))
            upto = running_sum(own)
            low = before + upto - own
            if start >= low and start < low + own:  # in one lane at most
                job, tile = base + lane, start - low
            before = before + cute.arch.shuffle_sync(upto, 31)
            base = base + 32
        job = cute.arch.warp_redux_sync(job, "max")
        tile = cute.arch.warp_redux_sync(tile, "max")
    return job, tile, count


@cute.jit
def walk_jobs(tiles: PagedTiles, lengths: Lengths, take: cutlass.Constexpr, carried: Any):
    """Call carried = take(job, first tile, tiles, keys of the job, carried) for each item of this block, in the same order in
    every warp that walks."""
    lane, jobs = cute.arch.lane_idx(), lengths.batch * tiles.passes
    job, tile, left = first_work(tiles, lengths, jobs)
    base = job
    lane_length = job_length(tiles, lengths, base + lane, jobs)
    while left > 0:
        if job - base == 32:
            base = job
            lane_length = job_length(tiles, lengths, base + lane, jobs)
        length = cute.arch.shuffle_sync(lane_length, job - base)
        num_tiles = cutlass.min(tiles_of(tiles, length) - tile, left)
        if num_tiles > 0:
            carried = take(job, tile, num_tiles, length, carried)
            left = left - num_tiles
        job = job + 1
        tile = Int32(0)
    return carried
