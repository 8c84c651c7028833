"""A math warpgroup of the prefill kernel: 64 rows of a tile, a row a (query, head), through all positions of the tile's list.

    s = scale log2(e) q k^T, -inf where the query did not select the position      p = 2^(s - m)      o = sum p v / sum p

m is the running maximum of a row. The next step's scores are on the tensor cores before this step's p v, so that the softmax runs
under products. Where a loop closes nothing is in flight.

A position of the list that a query did not select meets it with p = 0, and 0 v is not 0 where v is infinite or NaN. So a row of
o that is not finite is computed once more by itself (`rows.py`), from the positions that its own query selected.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_cute.attention.prefill import ptx
from kernels_cute.attention.prefill.copy import advance
from kernels_cute.attention.prefill.rows import finish
from kernels_cute.attention.prefill.shape import STEP
from kernels_cute.attention.prefill.tiles import ITEM_WORDS, barrier_at

COLUMNS = STEP // 8  # groups of 8 columns of the scores


def by_rows(tiles: Any, count: int) -> Any:
    """(rows, dim, count): an operand whose contraction runs along dim."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, tiles.dtype)
    return cute.tile_to_shape(atom, (STEP, tiles.dim, count), order=(0, 1, 2))


def by_columns(tiles: Any, count: int) -> Any:
    """(dim, rows, count): the bytes of `by_rows`, as an operand whose contraction runs along rows."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, tiles.dtype)
    return cute.tile_to_shape(atom, (tiles.dim, STEP, count), order=(1, 0, 2))


def score_mma(tiles: Any) -> Any:
    """64 queries x 64 keys."""
    major, source = OperandMajorMode.K, warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(tiles.dtype, Float32, (64, STEP, 16), source, major, major))


def output_mma(tiles: Any) -> Any:
    """64 queries x dim, with p in registers."""
    source = warpgroup.OperandSource.RMEM
    kinds = (OperandMajorMode.K, OperandMajorMode.MN)
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(tiles.dtype, Float32, (64, tiles.dim, 16), source, *kinds))


def tensor_of(field: Any, layout: Any) -> Any:
    return field.get_tensor(layout.outer, swizzle=layout.inner)


@cute.jit
def math_warpgroup(tiles: cutlass.Constexpr, storage, params, lists, half, warp, lane):
    """half: number of the math warpgroup; warp: within it."""
    scores, outputs = score_mma(tiles), output_mma(tiles)
    thread, output_thread = scores.get_slice(0), outputs.get_slice(0)
    queries = thread.make_fragment_A(thread.partition_A(tensor_of(storage.queries, by_rows(tiles, 2))))[None, None, None, half]
    keys = thread.make_fragment_B(thread.partition_B(tensor_of(storage.keys, by_rows(tiles, tiles.key_stages))))
    values = output_thread.make_fragment_B(
        output_thread.partition_B(tensor_of(storage.values, by_columns(tiles, tiles.value_stages)))
    )
    rScores = cute.make_rmem_tensor(scores.partition_shape_C((64, STEP)), Float32)
    rOutputs = cute.make_rmem_tensor(outputs.partition_shape_C((64, tiles.dim)), Float32)
    rShares = cute.make_rmem_tensor(outputs.partition_shape_A((64, STEP)), tiles.dtype)
    rMost = cute.make_rmem_tensor(2, Float32)  # of this lane's two rows, 8 apart: largest score so far, sum of p
    rSums = cute.make_rmem_tensor(2, Float32)
    operands, registers = (queries, keys, values), (rScores, rOutputs, rShares, rMost, rSums)
    row = half * 64 + warp * 16 + lane // 4
    bits = (bit_of(tiles, row), bit_of(tiles, row + 8))
    factor = params.scale * 1.4426950408889634
    sRecords = storage.records.get_tensor(cute.make_layout(2 * ITEM_WORDS))

    number, going = Int32(0), Boolean(True)
    rings = (Int32(0), Int32(0), Int32(0), Int32(0))  # stage and parity of keys, and of values
    while going:
        cute.arch.mbarrier_wait(barrier_at(storage, "queries_full"), number & 1)
        steps = sRecords[(number & 1) * ITEM_WORDS]
        if steps > 0:
            rings = attend(tiles, storage, operands, registers, (bits, factor, lane), steps, rings)
        else:
            rOutputs.fill(0.0)
            rMost.fill(-float("inf"))
            rSums.fill(0.0)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier_at(storage, "queries_free"))
        going = steps >= 0
        if going:
            # The record keeps until the queries of the next item have been read.
            item = [sRecords[(number & 1) * ITEM_WORDS + word] for word in range(5)]
            finish(tiles, params, lists, (rOutputs, rMost, rSums), item, half * 64 + warp * 16, lane)
        number = number + 1


@cute.jit
def bit_of(tiles: cutlass.Constexpr, row):
    """The bit of a row's query, 0 where there is none."""
    query, bit = row // tiles.group, Uint32(0)
    if query < tiles.queries:
        bit = Uint32(1) << Uint32(query)
    return bit


@cute.jit
def attend(tiles: cutlass.Constexpr, storage, operands, registers, lanes, steps, rings):
    """Compute o, m and the sums of an item. Return the stages and parities that come next in the rings."""
    rScores, rOutputs, rShares, rMost, rSums = registers
    lane = lanes[2]
    rOutputs.fill(0.0)
    rMost.fill(-float("inf"))
    rSums.fill(0.0)
    stage, parity, value_stage, value_parity = rings
    issue_scores(tiles, storage, operands, rScores, stage, parity)
    warpgroup.wait_group(0)
    weigh(tiles, storage, registers, lanes, stage)
    put_shares(tiles, registers)
    for step in cutlass.range(1, steps, unroll=1):
        stage, parity = advance(stage, parity, tiles.key_stages)
        issue_scores(tiles, storage, operands, rScores, stage, parity)
        issue_outputs(tiles, storage, operands, registers, value_stage, value_parity)
        warpgroup.wait_group(1)
        factors = weigh(tiles, storage, registers, lanes, stage)
        # Never stores, sums are not negative: what the sums are made of stays before the wait, under P V.
        ptx.store_if_negative(storage.taken.data_ptr().toint(), rSums[0] + rSums[1])
        warpgroup.wait_group(0)
        release(storage, "values_free", value_stage, lane)
        value_stage, value_parity = advance(value_stage, value_parity, tiles.value_stages)
        # After the first steps a row's maximum seldom changes.
        if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
            for n in cutlass.range_constexpr(tiles.dim // 8):
                for side in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        rOutputs[4 * n + 2 * side + e] = rOutputs[4 * n + 2 * side + e] * factors[side]
        put_shares(tiles, registers)
    release(storage, "queries_free", Int32(0), lane)
    issue_outputs(tiles, storage, operands, registers, value_stage, value_parity)
    warpgroup.wait_group(0)
    release(storage, "values_free", value_stage, lane)
    stage, parity = advance(stage, parity, tiles.key_stages)
    value_stage, value_parity = advance(value_stage, value_parity, tiles.value_stages)
    return stage, parity, value_stage, value_parity


@cute.jit
def issue_scores(tiles: cutlass.Constexpr, storage, operands, rScores, stage, parity):
    queries, keys, _ = operands
    cute.arch.mbarrier_wait(barrier_at(storage, "keys_full", stage), parity)
    # What the copy warps' cp.async wrote, the barrier has made visible to this thread; the fence does so to wgmma.
    cute.arch.fence_proxy("async.shared", space="cta")
    warpgroup.fence()
    mma = score_mma(tiles)
    for step in cutlass.range_constexpr(tiles.dim // 16):
        mma.set(warpgroup.Field.ACCUMULATE, step != 0)
        cute.gemm(mma, rScores, queries[None, None, step], keys[None, None, step, stage], rScores)
    warpgroup.commit_group()


@cute.jit
def issue_outputs(tiles: cutlass.Constexpr, storage, operands, registers, stage, parity):
    values, rOutputs, rShares = operands[2], registers[1], registers[2]
    cute.arch.mbarrier_wait(barrier_at(storage, "values_full", stage), parity)
    cute.arch.fence_proxy("async.shared", space="cta")
    warpgroup.fence()
    mma = output_mma(tiles)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(STEP // 16):
        cute.gemm(mma, rOutputs, rShares[None, None, step], values[None, None, step, stage], rOutputs)
    warpgroup.commit_group()


@cute.jit
def release(storage, name: cutlass.Constexpr, stage, lane):
    """A warp is done with a stage."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier_at(storage, name, stage))


@cute.jit
def weigh(tiles: cutlass.Constexpr, storage, registers, lanes, stage):
    """Replace the scores by p, update m and the sums, and return the factors of o for the new m. Frees the stage of the keys."""
    rScores, _, _, rMost, rSums = registers
    bits, factor, lane = lanes
    masks = storage.masks.data_ptr().toint() + stage * (STEP * tiles.mask_bytes) + lane % 4 * (2 * tiles.mask_bytes)
    for n in cutlass.range_constexpr(COLUMNS):
        words = column_masks(tiles, masks + n * (8 * tiles.mask_bytes))
        for e in cutlass.range_constexpr(2):
            for side in cutlass.range_constexpr(2):
                i = 4 * n + 2 * side + e
                bit = bits[side] << Uint32(16) if tiles.mask_bytes == 2 and e == 1 else bits[side]
                is_selected = (words[e] & bit) != 0
                rScores[i] = cutlass.select_(is_selected, rScores[i] * factor, Float32(-float("inf")))
    release(storage, "keys_free", stage, lane)
    factors = []
    for side in cutlass.range_constexpr(2):
        most = rMost[side]
        for n in cutlass.range_constexpr(COLUMNS):
            for e in cutlass.range_constexpr(2):
                most = cute.arch.fmax(most, rScores[4 * n + 2 * side + e])
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 1))
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 2))
        base = cutlass.select_(most == -float("inf"), Float32(0.0), most)  # a row without positions so far: -inf - 0
        # 1 where there was no position before: o and the sum are 0.
        before = cutlass.select_(rMost[side] == -float("inf"), base, rMost[side])
        rescale = ptx.exp2(before - base)
        rMost[side] = most
        total = rSums[side] * rescale
        for n in cutlass.range_constexpr(COLUMNS):
            for e in cutlass.range_constexpr(2):
                i = 4 * n + 2 * side + e
                rScores[i] = ptx.exp2(rScores[i] - base)
                total = total + rScores[i]
        rSums[side] = total
        factors.append(rescale)
    return factors[0], factors[1]


def column_masks(tiles: Any, address: Any) -> tuple[Any, Any]:
    """Return the words that hold the masks of two neighbouring columns. With 16-bit masks the second one is in the upper half."""
    if tiles.mask_bytes == 2:
        word = Uint32(ptx.load_word(address))
        return word, word
    low, high = ptx.load_pair_of_words(address)
    return Uint32(low), Uint32(high)


@cute.jit
def put_shares(tiles: cutlass.Constexpr, registers):
    """p, rounded, as the next product's operand."""
    rScores, _, rShares, _, _ = registers
    words = cute.recast_tensor(rShares, Int32)
    for i in cutlass.range_constexpr(STEP // 4):
        words[i] = ptx.pack(tiles.dtype, rScores[2 * i], rScores[2 * i + 1])
