"""The end of a tile whose steps are dealt to the blocks of a cluster: each stores its part, and merges some rows of all parts.

A part of a row is (m, sum, O): the largest score in the log2 domain, the sum of 2^(s - m), and the sum of that times the
values. Its weight is 2^(m - the largest m). Parts lie where keys and values were, pairs (m, sum) where the queries were.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_cute.attention import ptx
from kernels_cute.attention.dense.again import repeat_row
from kernels_cute.attention.dense.shape import ROWS
from kernels_cute.attention.dense.tiles import MATH_WARPS, PARTS_STORED
from kernels_cute.attention.rows import Repeated, store_again

_PAIR = 8  # bytes of (m, sum)


def pitch(tiles: Any) -> int:
    """Bytes between rows of a part: eight rows, as a warp stores them, lie in all banks."""
    return 4 * (tiles.dim + 8)


@cute.jit
def store_part(tiles: cutlass.Constexpr, storage, results, row0, lane):
    """Store a warp's rows, once nobody in the block reads keys, values or queries."""
    rOutputs, rMost, rSums = results
    pairs, part = storage.queries.data_ptr().toint(), storage.keys.data_ptr().toint()
    cute.arch.barrier(barrier_id=PARTS_STORED, number_of_threads=32 * MATH_WARPS)
    for side in cutlass.range_constexpr(2):
        row = row0 + 8 * side + lane // 4
        total = rSums[side]
        total = total + cute.arch.shuffle_sync_bfly(total, 1)
        total = total + cute.arch.shuffle_sync_bfly(total, 2)
        if lane % 4 == 0:
            ptx.store_two(pairs + row * _PAIR, rMost[side], total)
        address = part + row * pitch(tiles) + lane % 4 * 8
        for n in cutlass.range_constexpr(tiles.dim // 8):
            i = 4 * n + 2 * side
            ptx.store_two(address + 32 * n, rOutputs[i], rOutputs[i + 1])


@cute.jit
def merge(tiles: cutlass.Constexpr, storage, params, tile, warp, lane):
    """Merge this block's share of the rows, a warp a row. warp: among all math warps of the block."""
    pairs, part = storage.queries.data_ptr().toint(), storage.keys.data_ptr().toint()
    rows = cutlass.const_expr(ROWS // tiles.splits)
    width = cutlass.const_expr(tiles.dim // 32)
    for index in cutlass.range(rows // MATH_WARPS, unroll=1):
        row = tile.rank * rows + index * MATH_WARPS + warp
        if row // tiles.group < tile.count and row < tiles.queries * tiles.group:
            most, sums = [], []
            for other in cutlass.range_constexpr(tiles.splits):
                pair = ptx.load_pair_from_block(ptx.in_block(pairs + row * _PAIR, Int32(other)))
                most.append(pair[0])
                sums.append(pair[1])
            best = most[0]
            for other in cutlass.range_constexpr(1, tiles.splits):
                best = cute.arch.fmax(best, most[other])
            base = cutlass.select_(best == -float("inf"), Float32(0.0), best)
            total = Float32(0.0)
            merged = Repeated(None, None, cute.make_rmem_tensor(width, Float32))
            merged.sums.fill(0.0)
            for other in cutlass.range_constexpr(tiles.splits):
                weight = ptx.exp2(most[other] - base)
                total = total + sums[other] * weight
                address = ptx.in_block(part + row * pitch(tiles) + lane * (4 * width), Int32(other))
                for first in cutlass.range_constexpr(0, width, 4):
                    four = ptx.load_four_from_block(address + 4 * first)
                    for c in cutlass.range_constexpr(4):
                        merged.sums[first + c] = merged.sums[first + c] + four[c] * weight
            store_again(tiles, params, merged, (tile.first, tile.kv_head), row, lane, best, total)
            spoilt = total * Float32(0.0)  # 0 if all is finite, else NaN
            for c in cutlass.range_constexpr(width):
                spoilt = spoilt + merged.sums[c] * Float32(0.0)
            if cute.arch.vote_any_sync(not (spoilt == Float32(0.0))):
                repeat_row(tiles, params, tile, lane, row)
