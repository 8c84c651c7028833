"""A math warp: scores, softmax and O of up to 8 query heads of a key head, over every `readers`-th tile of the block.

Positions are the rows of both products and query heads the columns, transposed against the usual order: 8 columns fit a group of
8 heads, where 16 rows would be half empty.

    S^T [16 positions, 8 heads] = K q^T        K by ldmatrix, q in registers
    O^T [D, 8 heads]           += V^T P^T      V by transposed ldmatrix, P^T by movmatrix from the sums of S^T

A thread has positions lane / 4 and lane / 4 + 8 and heads 2 (lane % 4) and the next of S^T, and rows of D instead of positions
of O^T: maxima, sums and factors of a head are in the lanes that need them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.attention.problem import SparseDecodeParams
from kernels_cute.attention.decode.places import columns_of, sequence_of
from kernels_cute.attention.decode.sizes import COLUMNS, TILE
from kernels_cute.attention.decode.spec import LOWEST, NamedBarrier, Spec, Work
from kernels_cute.common import ptx

_LOG2_E = 1.4426950408889634
_CHAINS = 2  # sums of S^T that do not wait for each other


@cute.jit
def math_warp(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, warp: Int32):
    lane = cute.arch.lane_idx()
    kv_head, part, reader = warp % spec.sharers // spec.parts, warp % spec.parts, warp // spec.sharers
    rQuery = cute.make_rmem_tensor(2 * spec.steps, Int32)
    load_queries(spec, params, work, kv_head, part, rQuery)
    rOut = cute.make_rmem_tensor(4 * spec.steps, Float32)
    rOut.fill(0.0)
    rBest = cute.make_rmem_tensor(2, Float32)
    rBest.fill(LOWEST)
    rTotal = cute.make_rmem_tensor(2, Float32)
    rTotal.fill(0.0)
    own = Int32(0)
    if cutlass.const_expr(spec.problem.dense):
        _, own = sequence_of(params, work.token)
    _, count = columns_of(spec, params, work, own)
    scale = params.scale * _LOG2_E
    if warp == 0:  # which made the mbarriers
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.COPY, number_of_threads=spec.copy_barrier_threads)
    cute.arch.barrier(barrier_id=NamedBarrier.MATH, number_of_threads=spec.math_threads)

    for tile in cutlass.range(reader, (count + (TILE - 1)) // TILE, spec.readers, unroll=1):
        stage = tile % spec.stages
        cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, tile // spec.stages & 1)
        valid = ptx.load_word(storage.valid.data_ptr().toint() + stage * 4)
        if valid != 0:
            keys = storage.ring.data_ptr().toint() + stage * spec.stage_bytes + kv_head * spec.head_bytes
            attend_tile(spec, keys, valid, scale, rQuery, rOut, rBest, rTotal)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.free.data_ptr() + stage)
    # The ring is read, and with it every copy is over.
    cute.arch.barrier(barrier_id=NamedBarrier.MATH, number_of_threads=spec.math_threads)
    store_part(spec, storage, warp, rOut, rBest, rTotal)


@cute.jit
def load_queries(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, kv_head, part, rQuery: cute.Tensor):
    """Load the B fragments of 8 queries of a key head. A lane has query lane / 4, and of each 8 entries of D numbers 2 (lane % 4)
    and the next."""
    lane = cute.arch.lane_idx()
    head = part * COLUMNS + lane // 4
    first = (work.kv_set * spec.kv_heads + kv_head) * spec.group
    row = Int64(work.token) * spec.problem.num_heads + first + cutlass.min(head, spec.group - 1)
    address = params.q.iterator.toint() + row * spec.head_bytes + lane % 4 * 4
    words = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    gWords = cute.make_tensor(words, cute.make_layout(spec.dim // 2))
    for index in cutlass.range_constexpr(2 * spec.steps):
        word = gWords[4 * index]
        if head >= spec.group:
            word = Int32(0)
        rQuery[index] = word


@cute.jit
def attend_tile(spec: cutlass.Constexpr[Spec], keys, valid, scale, rQuery, rOut, rBest, rTotal):
    """keys: address of the first key of the tile, of the warp's head. valid: a bit for each position."""
    lane = cute.arch.lane_idx()
    k_lane = keys + lane % 16 * spec.pitch + lane // 16 * 16
    sums = [[Float32(0.0)] * 4 for _ in range(_CHAINS)]
    for i in cutlass.range_constexpr(spec.steps):
        left = ptx.load_matrices(k_lane + i * 32, False)
        sums[i % _CHAINS] = ptx.multiply_small(spec.dtype, sums[i % _CHAINS], left, rQuery[2 * i], rQuery[2 * i + 1])

    scores = [Float32(0.0)] * 4
    for e in cutlass.range_constexpr(4):
        score = (sums[0][e] + sums[1][e]) * scale
        if valid >> (lane // 4 + e // 2 * 8) & 1 == 0:
            score = -Float32.inf  # not a sum: the row may hold NaN
        scores[e] = score
    for side in cutlass.range_constexpr(2):
        best = cute.arch.fmax(scores[side], scores[side + 2])
        for bit in cutlass.range_constexpr(3):
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=4 << bit))
        best = cute.arch.fmax(best, rBest[side])
        factor = ptx.exp2(rBest[side] - best)
        rBest[side] = best
        for half in cutlass.range_constexpr(2):
            scores[2 * half + side] = ptx.exp2(scores[2 * half + side] - best)
        rTotal[side] = rTotal[side] * factor + (scores[side] + scores[side + 2])
        for i in cutlass.range_constexpr(2 * spec.steps):
            rOut[2 * i + side] = rOut[2 * i + side] * factor
    shares = [ptx.transpose(ptx.pack(spec.dtype, scores[2 * half], scores[2 * half + 1])) for half in range(2)]

    v_lane = keys + TILE * spec.pitch + (lane % 8 + lane // 16 * 8) * spec.pitch + lane // 8 % 2 * 16
    for i in cutlass.range_constexpr(spec.steps):
        left = ptx.load_matrices(v_lane + i * 32, True)
        added = ptx.multiply_small(spec.dtype, [rOut[4 * i + e] for e in range(4)], left, *shares)
        for e in cutlass.range_constexpr(4):
            rOut[4 * i + e] = added[e]


@cute.jit
def store_part(spec: cutlass.Constexpr[Spec], storage, warp, rOut, rBest, rTotal):
    """Store the warp's maxima, sums and O to shared memory, of each query head a row of D."""
    lane = cute.arch.lane_idx()
    part_at = storage.ring.data_ptr().toint() + warp * (4 * spec.part_floats)
    sums_at = storage.sums.data_ptr().toint() + warp * (8 * COLUMNS)
    for side in cutlass.range_constexpr(2):
        total = rTotal[side]
        for bit in cutlass.range_constexpr(3):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=4 << bit)
        column = lane % 4 * 2 + side
        if lane < 4:
            ptx.store_pair(sums_at + column * 8, rBest[side], total)
        row = part_at + column * (4 * spec.part_pitch) + lane // 4 * 4
        for i in cutlass.range_constexpr(2 * spec.steps):
            ptx.store_one(row + 32 * i, rOut[2 * i + side])
