"""The warp of the paged logits kernel that tells the math warps of each item: its place, lengths and weights in float32."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.mqa_logits.barriers import arrive, wait
from kernels_cute.mqa_logits.constants import END_OF_LIST
from kernels_cute.mqa_logits.paged_schedule import first_work, job_length, row_length, tiles_of
from kernels_cute.mqa_logits.paged_tiles import QUERY_STAGES
from kernels_cute.mqa_logits.products import advance


@cute.jit
def publish_warp(tiles, storage, params, lengths):
    lane = cute.arch.lane_idx()
    sItems = storage.items.get_tensor(cute.make_layout(4 * QUERY_STAGES))
    jobs = lengths.batch * tiles.passes

    stage, parity = Int32(0), Int32(0)
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
            sequence = job // tiles.passes
            draft0 = job % tiles.passes * tiles.drafts
            wait(tiles.barriers.queries_free, storage, stage, parity ^ 1, by="publish")
            if lane == 0:
                sItems[4 * stage] = sequence * tiles.next_n + draft0
                sItems[4 * stage + 1] = tile * tiles.tile
                sItems[4 * stage + 2] = num_tiles
            publish_drafts(tiles, storage, params.weights, lengths, sequence, draft0, stage)
            arrive(tiles.barriers.queries_full, storage, stage, by="publish")
            stage, parity = advance(stage, parity, QUERY_STAGES)
            left = left - num_tiles
        job = job + 1
        tile = Int32(0)
    wait(tiles.barriers.queries_free, storage, stage, parity ^ 1, by="publish")
    if lane == 0:
        sItems[4 * stage] = Int32(END_OF_LIST)
    arrive(tiles.barriers.queries_full, storage, stage, by="publish")


@cute.jit
def publish_drafts(tiles, storage, weights, lengths, sequence, draft0, stage):
    """Lengths and weights of an item's drafts; 0 for a draft beyond the last: nothing of it is stored."""
    lane = cute.arch.lane_idx()
    sLengths = storage.lengths.get_tensor(cute.make_layout(tiles.drafts * QUERY_STAGES))
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.weight_slots * QUERY_STAGES))
    for local in cutlass.range(lane, tiles.drafts, 32, unroll=1):
        own = Int32(0)
        if draft0 + local < tiles.next_n:
            own = row_length(tiles, lengths, sequence, draft0 + local)
        sLengths[stage * tiles.drafts + local] = own
    if cutlass.const_expr(tiles.has_weights):
        for column in cutlass.range(lane, tiles.weight_slots, 32, unroll=4):
            draft = draft0 + column // tiles.num_heads
            weight = Float32(0.0)
            if draft < tiles.next_n:
                offset = (Int64(sequence) * tiles.next_n + draft) * weights.stride[0] + column % tiles.num_heads
                weight = Float32(cute.make_tensor(weights.iterator + offset, cute.make_layout(1))[0])
            sWeights[stage * tiles.weight_slots + column] = weight
