"""A math warpgroup of the dense prefill kernel: 64 rows of the block's tile, from the last position that it sees to the first
(attention/products.py). Only the first steps have positions that some row does not see, so only they are masked.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.attention import ptx
from kernels_cute.attention.dense.again import repeat_row
from kernels_cute.attention.dense.merge import merge, store_part
from kernels_cute.attention.dense.shape import ROWS
from kernels_cute.attention.dense.tiles import PIECE_BYTES, ZEROED
from kernels_cute.attention.products import (
    advance,
    barrier_at,
    by_rows,
    clear,
    end_step,
    issue_outputs,
    issue_scores,
    operands_of,
    put_shares,
    registers_of,
    release,
    soften,
    tensor_of,
)
from kernels_cute.attention.rows import LOG2E, finish


@cute.jit
def math_warpgroup(tiles: cutlass.Constexpr, storage, params, tile, half, warp, lane):
    """half: number of the math warpgroup; warp: within it."""
    sQueries = cute.local_tile(tensor_of(storage.queries, by_rows(tiles, ROWS, 1)), (64, tiles.dim), (None, 0, 0))
    queries, keys, values = operands_of(tiles, storage, sQueries)
    operands, registers = (queries[None, None, None, half], keys, values), registers_of(tiles)
    clear(registers)
    row = half * 64 + warp * 16 + lane // 4
    # The last position that this lane's rows see, counted from the lane's first column.
    own = [cutlass.min(tile.position + (row + 8 * side) // tiles.group, tile.limit - 1) - lane % 4 * 2 for side in range(2)]
    walk(tiles, storage, operands, registers, tile, (own[0], own[1]), half, warp, lane, params.scale * LOG2E)
    _, rOutputs, _, rMost, rSums = registers
    results, row0 = (rOutputs, rMost, rSums), half * 64 + warp * 16
    if cutlass.const_expr(tiles.splits == 1):
        repeat = partial(repeat_row, tiles, params, tile, lane)
        finish(tiles, params, results, (tile.first, tile.count, tile.kv_head), row0, lane, repeat)
    else:
        store_part(tiles, storage, results, row0, lane)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        merge(tiles, storage, params, tile, half * 4 + warp, lane)
        # Others may still read this block's part. Relaxed: a release would wait until the rows of out are in memory.
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


@cute.jit
def walk(tiles: cutlass.Constexpr, storage, operands, registers, tile, own, half, warp, lane, factor):
    """Compute o, m and the sums of the tile."""
    # Steps whose positions all queries of the tile see; the first step taken is masked in any case.
    whole = cutlass.max(cutlass.min((tile.position + 1) // tiles.step, tile.newest) - tile.oldest, 0)
    ring, value_ring = (Int32(0), Int32(0)), (Int32(0), Int32(0))
    if tile.newest >= tile.oldest:
        cute.arch.mbarrier_wait(barrier_at(storage, "queries_full"), 0)
        issue_scores(tiles, storage, operands, registers[0], *ring)
        warpgroup.wait_group(0)
        release(storage, "keys_free", ring[0], lane)
        mask(tiles, registers[0], own, tile.newest * tiles.step, factor)
        soften(tiles, registers)
        put_shares(tiles, registers)
        clear_values(tiles, storage, tile.limit - tile.newest * tiles.step, half, warp, lane)
        for number in cutlass.range(1, tile.newest - tile.oldest + 1 - whole, unroll=1):
            place = (tile.newest - number) * tiles.step
            ring, value_ring = take_step(tiles, storage, operands, registers, (own, place, factor), ring, value_ring, lane, True)
        for _ in cutlass.range(whole, unroll=1):
            ring, value_ring = take_step(
                tiles, storage, operands, registers, (own, Int32(0), factor), ring, value_ring, lane, False
            )
        issue_outputs(tiles, storage, operands, registers, *value_ring)
        warpgroup.wait_group(0)


@cute.jit
def take_step(
    tiles: cutlass.Constexpr, storage, operands, registers, seen, ring, value_ring, lane, is_masked: cutlass.Constexpr
):  # fmt: skip
    """Add the p v of the step before, and compute p of the next one. Return the rings' stages and parities."""
    own, place, factor = seen
    rScores = registers[0]
    stage, parity = advance(*ring, tiles.key_stages)
    issue_scores(tiles, storage, operands, rScores, stage, parity)
    issue_outputs(tiles, storage, operands, registers, *value_ring)
    warpgroup.wait_group(1)
    release(storage, "keys_free", stage, lane)
    if cutlass.const_expr(is_masked):
        mask(tiles, rScores, own, place, factor)
    else:
        for i in cutlass.range_constexpr(tiles.step // 2):
            rScores[i] = rScores[i] * factor
    factors = soften(tiles, registers)
    value_ring = end_step(tiles, storage, registers, factors, value_ring, lane, storage.queries.data_ptr().toint())
    return (stage, parity), value_ring


@cute.jit
def mask(tiles: cutlass.Constexpr, rScores, own, place, factor):
    """Scale the scores of a step that begins at position `place`; -inf where the row does not see the position."""
    for side in cutlass.range_constexpr(2):
        last = own[side] - place
        for n in cutlass.range_constexpr(tiles.step // 8):
            for e in cutlass.range_constexpr(2):
                i = 4 * n + 2 * side + e
                rScores[i] = cutlass.select_(last >= 8 * n + e, rScores[i] * factor, Float32(-float("inf")))


@cute.jit
def clear_values(tiles: cutlass.Constexpr, storage, count, half, warp, lane):
    """Write zeros to the values of the first step taken that come after the sequence's last position: p is 0 there, and memory
    that nobody wrote may hold NaN. Both warpgroups write the same zeros, so that neither waits for the other."""
    if count < tiles.step:
        base = storage.values.data_ptr().toint()
        cute.arch.mbarrier_wait(barrier_at(storage, "values_full", 0), 0)
        units = cutlass.const_expr(tiles.row_bytes // 16)
        for unit in cutlass.range(count * units + warp * 32 + lane, tiles.step * units, 128, unroll=1):
            row, in_row = unit // units, unit % units
            address = base + (in_row // 8 * tiles.step + row) * PIECE_BYTES + in_row % 8 * 16
            ptx.store_zeros(address)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ZEROED + half, number_of_threads=128)
