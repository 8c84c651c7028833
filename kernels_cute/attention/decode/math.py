"""A math warp: scores, softmax and O of one key head over every `readers`-th tile of the block.

Positions are the rows of both products and query heads the columns, transposed against the usual order: 8 columns fit a group of 8
heads, where 16 rows would be half empty.

    S^T [16 positions, 8 heads] = K q^T        K by ldmatrix, q in registers
    O^T [D, 8 heads]           += V^T P^T      V by transposed ldmatrix, P^T by movmatrix from the sums of S^T

A thread has positions lane / 4 and lane / 4 + 8 and heads 2 (lane % 4) and the next of S^T, and rows of D instead of positions
of O^T: maxima, sums and factors of a head are in the lanes that need them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gdn.problems import SparseDecodeParams
from kernels_cute.attention.decode.places import columns_of, sequence_of
from kernels_cute.attention.decode.spec import COLUMNS, TILE, Spec, Work
from kernels_cute.common import ptx

_LOG2_E = 1.4426950408889634
_CHAINS = 2  # sums of S^T that do not wait for each other


@cute.jit
def math_warp(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, warp: Int32):
    lane = cute.arch.lane_idx()
    kv_head, reader = warp % spec.kv_heads, warp // spec.kv_heads
    rQuery = cute.make_rmem_tensor(2 * spec.steps * spec.column_tiles, Int32)
    load_queries(spec, params, work, kv_head, rQuery)
    rOut = cute.make_rmem_tensor(4 * spec.steps * spec.column_tiles, Float32)
    rOut.fill(0.0)
    rBest = cute.make_rmem_tensor(2 * spec.column_tiles, Float32)
    rBest.fill(-Float32.inf)
    rTotal = cute.make_rmem_tensor(2 * spec.column_tiles, Float32)
    rTotal.fill(0.0)
    own = Int32(0)
    if cutlass.const_expr(spec.problem.dense):
        _, own = sequence_of(params, work.token)
    _, count = columns_of(spec, params, work, own)
    scale = params.scale * _LOG2_E
    cute.arch.sync_threads()  # the barriers are there

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
    cute.arch.sync_threads()  # the ring is read
    store_part(spec, storage, warp, rOut, rBest, rTotal)


@cute.jit
def load_queries(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, kv_head: Int32, rQuery: cute.Tensor):
    """The B fragments of a key head's queries: heads lane / 4, entries 2 (lane % 4) and the next, of each 8 of D."""
    lane = cute.arch.lane_idx()
    first = (work.kv_set * spec.kv_heads + kv_head) * spec.group
    for part in cutlass.range_constexpr(spec.column_tiles):
        head = part * COLUMNS + lane // 4
        row = params.q.iterator.toint() + (
            cutlass.Int64(work.token) * spec.problem.num_heads + first + cutlass.min(head, spec.group - 1)
        ) * spec.head_bytes
        gWords = cute.make_tensor(
            cute.make_ptr(Int32, row + lane % 4 * 4, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(spec.dim // 2)
        )
        for place in cutlass.range_constexpr(2 * spec.steps):
            word = gWords[4 * place]
            if head >= spec.group:
                word = Int32(0)
            rQuery[part * 2 * spec.steps + place] = word


@cute.jit
def attend_tile(spec: cutlass.Constexpr[Spec], keys, valid, scale, rQuery, rOut, rBest, rTotal):
    """keys: address of the first key of the tile, of the warp's head. valid: a bit for each position."""
    lane = cute.arch.lane_idx()
    k_lane = keys + lane % 16 * spec.pitch + lane // 16 * 16
    sums = [[[Float32(0.0)] * 4 for _ in range(_CHAINS)] for _ in range(spec.column_tiles)]
    for i in cutlass.range_constexpr(spec.steps):
        left = ptx.load_matrices(k_lane + i * 32, False)
        for part in cutlass.range_constexpr(spec.column_tiles):
            place = 2 * (part * spec.steps + i)
            sums[part][i % _CHAINS] = ptx.multiply_small(
                spec.dtype, sums[part][i % _CHAINS], left, rQuery[place], rQuery[place + 1]
            )

    shares = []
    for part in cutlass.range_constexpr(spec.column_tiles):
        scores = [Float32(0.0)] * 4
        for e in cutlass.range_constexpr(4):
            score = (sums[part][0][e] + sums[part][1][e]) * scale
            if valid >> (lane // 4 + e // 2 * 8) & 1 == 0:
                score = -Float32.inf  # not a sum: the row may hold NaN
            scores[e] = score
        for side in cutlass.range_constexpr(2):
            best = cute.arch.fmax(scores[side], scores[side + 2])
            for bit in cutlass.range_constexpr(3):
                best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=4 << bit))
            column = cutlass.const_expr(2 * part + side)
            best = cute.arch.fmax(best, rBest[column])  # finite: one position counts, unless its score is not
            factor = ptx.exp2(rBest[column] - best)
            rBest[column] = best
            scores[side] = ptx.exp2(scores[side] - best)
            scores[side + 2] = ptx.exp2(scores[side + 2] - best)
            rTotal[column] = rTotal[column] * factor + (scores[side] + scores[side + 2])
            for i in cutlass.range_constexpr(spec.steps):
                for half in cutlass.range_constexpr(2):
                    place = cutlass.const_expr(4 * (part * spec.steps + i) + 2 * half + side)
                    rOut[place] = rOut[place] * factor
        shares.append([ptx.transpose(ptx.pack(spec.dtype, scores[2 * half], scores[2 * half + 1])) for half in range(2)])

    v_lane = keys + TILE * spec.pitch + (lane % 8 + lane // 16 * 8) * spec.pitch + lane // 8 % 2 * 16
    for i in cutlass.range_constexpr(spec.steps):
        left = ptx.load_matrices(v_lane + i * 32, True)
        for part in cutlass.range_constexpr(spec.column_tiles):
            place = cutlass.const_expr(4 * (part * spec.steps + i))
            added = ptx.multiply_small(spec.dtype, [rOut[place + e] for e in range(4)], left, *shares[part])
            for e in cutlass.range_constexpr(4):
                rOut[place + e] = added[e]


@cute.jit
def store_part(spec: cutlass.Constexpr[Spec], storage, warp, rOut, rBest, rTotal):
    """The warp's maxima, sums and O in shared memory: of each head a row of D."""
    lane = cute.arch.lane_idx()
    part_at = storage.ring.data_ptr().toint() + warp * (4 * spec.part_floats)
    sums_at = storage.sums.data_ptr().toint() + warp * (8 * spec.columns)
    for part in cutlass.range_constexpr(spec.column_tiles):
        for side in cutlass.range_constexpr(2):
            total = rTotal[2 * part + side]
            for bit in cutlass.range_constexpr(3):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=4 << bit)
            head = part * COLUMNS + lane % 4 * 2 + side
            if lane < 4:
                ptx.store_pair(sums_at + head * 8, rBest[2 * part + side], total)
            row = part_at + head * (4 * spec.part_pitch) + lane // 4 * 4
            for i in cutlass.range_constexpr(spec.steps):
                for half in cutlass.range_constexpr(2):
                    ptx.store_one(row + (16 * i + 8 * half) * 4, rOut[4 * (part * spec.steps + i) + 2 * half + side])
