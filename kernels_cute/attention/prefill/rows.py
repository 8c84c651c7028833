"""The end of an item: a math warp divides its 16 rows of o, stores them, and computes rows that are not finite once more.

That a row is not finite has one of two causes: its own query selected a NaN or an infinity, or another query of the tile did. A
warp that meets such a row walks the tile's list and adds up, in float32, the positions that the row's own query selected: right
in both cases, and slow, as nobody needs it fast.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.attention.prefill import ptx
from kernels_cute.attention.prefill.shape import STEP
from kernels_cute.attention.prefill.tiles import masks_address, rows_address
from kernels_cute.common.memory import sigmoid

LN2 = 0.6931471805599453


@cute.jit
def finish(tiles: cutlass.Constexpr, params, lists, results, item, row0, lane):
    """results: o, m and the sums of a lane; row0: first row of the warp in the tile."""
    rOutputs, rMost, rSums = results
    steps, first, count, kv_head, tile = item
    for side in cutlass.range_constexpr(2):
        row = row0 + 8 * side + lane // 4
        is_row = row // tiles.group < count and row < tiles.queries * tiles.group
        gates = []
        if cutlass.const_expr(tiles.has_gate):  # all asked for before any is used
            gate_at = row_address(tiles, params.gate, (first, kv_head), row) + lane % 4 * 4
            gates = [ptx.load_global_if(gate_at + 16 * n, 4, ptx.as_int(is_row)) for n in range(tiles.dim // 8)]
        total = rSums[side]
        total = total + cute.arch.shuffle_sync_bfly(total, 1)
        total = total + cute.arch.shuffle_sync_bfly(total, 2)
        spoilt = total * Float32(0.0)  # 0 if all is finite, else NaN
        for n in cutlass.range_constexpr(tiles.dim // 8):
            for e in cutlass.range_constexpr(2):
                spoilt = spoilt + rOutputs[4 * n + 2 * side + e] * Float32(0.0)
        spoilt = spoilt + cute.arch.shuffle_sync_bfly(spoilt, 1)
        spoilt = spoilt + cute.arch.shuffle_sync_bfly(spoilt, 2)
        inverse = cutlass.select_(total == Float32(0.0), Float32(0.0), cute.arch.rcp_approx(total))
        address = row_address(tiles, params.out, (first, kv_head), row) + lane % 4 * 4
        if is_row:
            is_aligned = (address & 3) == 0  # out may have any strides
            for n in cutlass.range_constexpr(tiles.dim // 8):
                i = 4 * n + 2 * side
                word = ptx.pack(tiles.dtype, rOutputs[i] * inverse, rOutputs[i + 1] * inverse)
                if cutlass.const_expr(tiles.has_gate):
                    word = gated(tiles, word, gates[n], total)
                ptx.store_pair_of_halves(address + 16 * n, word, ptx.as_int(is_aligned))
            if lane % 4 == 0:
                store_lse(tiles, params, (first, kv_head), row, rMost[side], total)
        is_spoilt = ptx.as_int(is_row and not (spoilt == Float32(0.0)))
        cute.arch.sync_warp()  # whichever lane stored it, the row is written again after this
        if cute.arch.vote_any_sync(is_spoilt != 0):
            for quad in cutlass.range(8, unroll=1):
                if cute.arch.shuffle_sync(is_spoilt, 4 * quad) != 0:
                    repeat_row(tiles, params, lists, item, row0 + 8 * side + quad, lane)


def gated(tiles: Any, word: Any, gate: Any, total: Any) -> Any:
    """Two rounded entries of o times the sigmoid of their gates, both in a word.

    Without a position (total 0) both are zero, whatever the gates are.
    """
    gate = cutlass.select_(total == Float32(0.0), Int32(0), gate)
    entries, gates = ptx.unpack(tiles.dtype, word), ptx.unpack(tiles.dtype, gate)
    return ptx.pack(tiles.dtype, entries[0] * sigmoid(gates[0]), entries[1] * sigmoid(gates[1]))


@cute.jit
def row_address(tiles: cutlass.Constexpr, x, origin, row):
    """Address of a tile's row in q, gate or out; origin: first token and key head."""
    first, kv_head = origin
    token, head = first + row // tiles.group, kv_head * tiles.group + row % tiles.group
    return x.iterator.toint() + (Int64(token) * x.stride[0] + Int64(head) * x.stride[1]) * 2


@cute.jit
def store_lse(tiles: cutlass.Constexpr, params, origin, row, most, total):
    """m ln 2 + ln(sum): without a position -inf + ln 0."""
    first, kv_head = origin
    params.lse[first + row // tiles.group, kv_head * tiles.group + row % tiles.group] = most * LN2 + cute.math.log(total)


@cute.jit
def repeat_row(tiles: cutlass.Constexpr, params, lists, item, row, lane):
    """Compute a row again from its own query's positions alone. A warp does it; a lane has dim / 32 neighbouring columns."""
    steps, first, count, kv_head, tile = item
    bit = Int32(1) << (row // tiles.group)
    rows, masks = rows_address(lists, tile), masks_address(tiles, lists, tile)
    width = cutlass.const_expr(tiles.dim // 32)
    rQuery, rKey, rSums = [cute.make_rmem_tensor(width, Float32) for _ in range(3)]
    load_columns(tiles, row_address(tiles, params.q, (first, kv_head), row), lane, rQuery)
    rSums.fill(0.0)
    factor = params.scale * 1.4426950408889634
    most, total = Float32(-float("inf")), Float32(0.0)
    for entry in cutlass.range(0, steps * STEP, 32, unroll=1):
        if cutlass.const_expr(tiles.mask_bytes == 2):
            mask = ptx.load_global_half(masks + Int64(entry + lane) * 2)
        else:
            mask = ptx.load_global_word(masks + Int64(entry + lane) * 4)
        cache_row = ptx.load_global_word(rows + Int64(entry + lane) * 4)
        cache_row = cutlass.select_((mask & bit) != 0, cache_row, Int32(-1))
        for one in cutlass.range(32, unroll=1):
            found = cute.arch.shuffle_sync(cache_row, one)
            if found >= 0:
                load_columns(tiles, cache_address(tiles, params.k_cache, found, kv_head), lane, rKey)
                score = Float32(0.0)
                for c in cutlass.range_constexpr(width):
                    score = score + rQuery[c] * rKey[c]
                for power in cutlass.range_constexpr(5):
                    score = score + cute.arch.shuffle_sync_bfly(score, 1 << power)
                score = score * factor
                higher = cute.arch.fmax(most, score)
                base = cutlass.select_(higher == -float("inf"), Float32(0.0), higher)
                rescale, share = ptx.exp2(most - base), ptx.exp2(score - base)
                most, total = higher, total * rescale + share
                load_columns(tiles, cache_address(tiles, params.v_cache, found, kv_head), lane, rKey)
                for c in cutlass.range_constexpr(width):
                    rSums[c] = rSums[c] * rescale + rKey[c] * share
    address = row_address(tiles, params.out, (first, kv_head), row) + lane * (2 * width)
    inverse = cutlass.select_(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
    is_aligned = ptx.as_int((address & 3) == 0)
    for c in cutlass.range_constexpr(0, width, 2):
        word = ptx.pack(tiles.dtype, rSums[c] * inverse, rSums[c + 1] * inverse)
        if cutlass.const_expr(tiles.has_gate):
            gate_at = row_address(tiles, params.gate, (first, kv_head), row) + lane * (2 * width)
            word = gated(tiles, word, ptx.load_global_word(gate_at + 2 * c), total)
        ptx.store_pair_of_halves(address + 2 * c, word, is_aligned)
    if lane == 0:
        store_lse(tiles, params, (first, kv_head), row, most, total)


@cute.jit
def cache_address(tiles: cutlass.Constexpr, cache, row, kv_head):
    block, in_block = row // tiles.block_size, row % tiles.block_size
    offset = Int64(block) * cache.stride[0] + Int64(in_block) * cache.stride[1] + Int64(kv_head) * cache.stride[2]
    return cache.iterator.toint() + offset * 2


def load_columns(tiles: Any, address: Any, lane: Any, rX: Any) -> None:
    """A lane's columns of a row, as float32."""
    width = tiles.dim // 32
    for c in range(0, width, 2):
        rX[c], rX[c + 1] = ptx.unpack(tiles.dtype, ptx.load_global_word(address + lane * (2 * width) + 2 * c))
