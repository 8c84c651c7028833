"""The delta rule of a sequence of one token, for one value head: the recurrent form in float32, without M and P.

    u = beta (v - a S^T k),  S <- a S + k u^T,  o = S^T q    with k and q normed, q scaled

A warpgroup has 64 V columns of S. A lane has two of them and a quarter of their K entries, as the accumulators of the chunk rule.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands
from kernels_cute.chunk.shape import CUM, KEY_BETA, NORM_EPS, TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.state_memory import fetch_state, settle_state, write_state
from kernels_cute.common import ptx
from kernels_cute.gdn_prefill.short.rows import Sequence
from kernels_cute.gdn_prefill.short.rule import place

_LANES = 4  # that share a V column


@cute.jit
def run_token(spec: ChunkSpec, storage: Any, params: ChunkParams, sequence: Sequence, head: Int32, rows: Int32, thread: Int32):
    """Compute the output, which takes the place of V, and the state, which goes back to its slot. rows: of the value head, with
    the gates."""
    warp, group, at = place(thread)
    row0 = group * 64 + warp * 16 + at.row
    state = cute.make_rmem_tensor(cute.make_layout(spec.dim // 2), Float32)
    fetch_state(spec, params.initial_state, state, sequence.is_continued, sequence.slot, head, row0, at.pair)
    settle_state(spec, params.initial_state, state, state, at.pair)
    keys, queries = (field.data_ptr().toint() + at.pair * 4 for field in (storage.k, storage.q))
    # Of two V columns: S^T k and S^T q.
    by_key, by_query = [Float32(0.0)] * 2, [Float32(0.0)] * 2
    key_squares, query_squares, score = Float32(0.0), Float32(0.0), Float32(0.0)
    for n in cutlass.range_constexpr(spec.dim // 8):
        key, query = (_columns(spec, tile, n) for tile in (keys, queries))
        for i in cutlass.range_constexpr(2):
            key_squares += key[i] * key[i]
            query_squares += query[i] * query[i]
            score += key[i] * query[i]
            for side in cutlass.range_constexpr(2):
                by_key[side] += state[4 * n + 2 * side + i] * key[i]
                by_query[side] += state[4 * n + 2 * side + i] * query[i]
    key_factor, query_factor, score = Float32(1.0), Float32(params.scale), _total(score)
    if cutlass.const_expr(spec.normalize):
        key_factor = cute.math.rsqrt(_total(key_squares) + NORM_EPS)
        query_factor = query_factor * cute.math.rsqrt(_total(query_squares) + NORM_EPS)
    decay, beta = cute.math.exp2(ptx.load_one(rows + CUM), fastmath=True), ptx.load_one(rows + KEY_BETA)
    tile, corrections = storage.v.data_ptr().toint() + group * TILE_BYTES, [None] * 2
    for side in cutlass.range_constexpr(2):
        word = tile + (warp * 2 + side) * 16 + at.row // 2 * 4
        low, high = ptx.unpack(spec.dtype, ptx.load_word(word))
        value = operands.select(at.row % 2 == 1, high, low)
        correction = key_factor * beta * (value - decay * key_factor * _total(by_key[side]))
        output = query_factor * (decay * _total(by_query[side]) + correction * score)
        # The shuffle comes after every lane's load of V.
        other = cute.arch.shuffle_sync_bfly(output, _LANES)
        if (at.pair == 0) & (at.row % 2 == 0):
            ptx.store_word(word, ptx.pack(spec.dtype, output, other))
        corrections[side] = correction
    keys = ptx.opaque(keys)  # read again: there are no registers to keep them in
    for n in cutlass.range_constexpr(spec.dim // 8):
        key = _columns(spec, keys, n)
        for i in cutlass.range_constexpr(2):
            for side in cutlass.range_constexpr(2):
                index = 4 * n + 2 * side + i
                state[index] = state[index] * decay + key[i] * corrections[side]
    write_state(spec, params.final_state, sequence.slot, state, head, row0, at.pair)


def _columns(spec: Any, row: Any, n: int) -> tuple[Any, Any]:
    """Columns 8 n and 8 n + 1 after the lane's first in row 0 of a tile, whose units of 8 columns are not permuted."""
    low, high = ptx.unpack(spec.dtype, ptx.load_word(row + n // 8 * TILE_BYTES + n % 8 * 16))
    return low, high


def _total(value: Any) -> Any:
    """Sum over the lanes that share a V column."""
    for bit in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, bit)
    return value
