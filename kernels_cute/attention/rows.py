"""The end of a tile: a math warp divides its 16 rows of o, stores them, and has rows that are not finite computed once more.

The positions that a tile walks are more than each of its queries sees. One that a row does not see has p = 0 there, and 0 v is
not 0 where v is infinite or NaN. So that a row is not finite has one of two causes: its own query sees a NaN or an infinity, or
another query of the tile does. A warp that meets such a row adds up, in float32, the positions that the row's own query sees.
That is right in both cases, and slow, as nobody needs it fast.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.attention import ptx
from kernels_cute.common.memory import sigmoid

LN2, LOG2E = 0.6931471805599453, 1.4426950408889634


@cute.jit
def finish(tiles: cutlass.Constexpr, params, results, item, row0, lane, repeat: cutlass.Constexpr):
    """Store a warp's rows of a tile.

    results: o, m and the sums of a lane; item: first token, number of queries, key head; row0: first row of the warp in the tile;
    repeat(row): computes and stores a row again.
    """
    rOutputs, rMost, rSums = results
    first, count, kv_head = item
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
                    repeat(row0 + 8 * side + quad)


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


class Repeated(NamedTuple):
    """Sums of a row that a warp computes again; a lane has dim / 32 neighbouring columns."""

    query: Any
    row: Any  # of a cache, as loaded
    sums: Any  # of p v


@cute.jit
def begin_again(tiles: cutlass.Constexpr, params, origin, row, lane):
    """Load the row's query, and clear its sums."""
    width = cutlass.const_expr(tiles.dim // 32)
    again = Repeated(*[cute.make_rmem_tensor(width, Float32) for _ in range(3)])
    load_columns(tiles, row_address(tiles, params.q, origin, row), lane, again.query)
    again.sums.fill(0.0)
    return again


@cute.jit
def add_position(tiles: cutlass.Constexpr, params, again, cache_row, kv_head, lane, most, total):
    """Add one position to the sums of a row. Return its largest score and the sum of p."""
    width = cutlass.const_expr(tiles.dim // 32)
    load_columns(tiles, cache_address(tiles, params.k_cache, cache_row, kv_head), lane, again.row)
    score = Float32(0.0)
    for c in cutlass.range_constexpr(width):
        score = score + again.query[c] * again.row[c]
    for power in cutlass.range_constexpr(5):
        score = score + cute.arch.shuffle_sync_bfly(score, 1 << power)
    score = score * (params.scale * LOG2E)
    higher = cute.arch.fmax(most, score)
    base = cutlass.select_(higher == -float("inf"), Float32(0.0), higher)
    rescale, share = ptx.exp2(most - base), ptx.exp2(score - base)
    load_columns(tiles, cache_address(tiles, params.v_cache, cache_row, kv_head), lane, again.row)
    for c in cutlass.range_constexpr(width):
        again.sums[c] = again.sums[c] * rescale + again.row[c] * share
    return higher, total * rescale + share


@cute.jit
def store_again(tiles: cutlass.Constexpr, params, again, origin, row, lane, most, total):
    width = cutlass.const_expr(tiles.dim // 32)
    address = row_address(tiles, params.out, origin, row) + lane * (2 * width)
    inverse = cutlass.select_(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
    is_aligned = ptx.as_int((address & 3) == 0)
    for c in cutlass.range_constexpr(0, width, 2):
        word = ptx.pack(tiles.dtype, again.sums[c] * inverse, again.sums[c + 1] * inverse)
        if cutlass.const_expr(tiles.has_gate):
            gate_at = row_address(tiles, params.gate, origin, row) + lane * (2 * width)
            word = gated(tiles, word, ptx.load_global_word(gate_at + 2 * c), total)
        ptx.store_pair_of_halves(address + 2 * c, word, is_aligned)
    if lane == 0:
        store_lse(tiles, params, origin, row, most, total)


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
