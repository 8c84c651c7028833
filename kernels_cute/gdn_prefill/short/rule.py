"""The chunk rule of a sequence of one chunk, for one value head: M, P, then 64 V columns of W, the outputs and the state.

The formulas are those of kernels_cute/chunk (fused.py), and so are the parts of its roles that are called here. All of the block
works on a value head at the same time, so there are no rings and no mbarriers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.roles import inverse, score, state
from kernels_cute.chunk.roles import tile_blocks as blocks
from kernels_cute.chunk.roles.tile_blocks import Lane
from kernels_cute.chunk.shape import CHUNK, CUM, QUERY_FACTOR, TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.state_memory import fetch_state, settle_state, store_checkpoints, write_state
from kernels_cute.common import ptx
from kernels_cute.gdn_prefill.short.rows import Sequence
from kernels_cute.gdn_prefill.short.shape import LOWER, SCRATCH

_PART = 64  # K columns of the state that are in registers at a time


def place(thread: Any) -> tuple[Any, Any, Lane]:
    """Number of the warp in its warpgroup, of the warpgroup, and the lane."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    return warp % 4, warp // 4, blocks.lane_of(warp % 4, thread % 32)


@cute.jit
def make_tiles(spec: ChunkSpec, storage: Any, scale: Float32, rows: Int32, thread: Int32):
    """Make M (warpgroup 0), P and the row vectors (warpgroup 1). rows: of the value head, with the gates."""
    warp, group, at = place(thread)
    mma = operands.tiled_mma(spec.dtype, CHUNK)
    keys = operands.smem_operand_b(mma, storage.k, operands.by_rows(spec.dtype, CHUNK, spec.dim, 1))
    left_operand, left_words = operands.register_operand(spec.dtype, mma, spec.dim)
    sums = operands.accumulators(mma, CHUNK)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    left = storage.k.data_ptr().toint()
    if group == 1:
        left = storage.q.data_ptr().toint()
    blocks.load_rows(spec, at, left, left_words)
    warpgroup.fence()
    operands.multiply(mma, sums, left_operand, keys[None, None, None, 0], True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    blocks.diagonal_block(sums, diagonal, warp)
    if group == 0:
        inverse.key_factors(spec, at, diagonal, rows)
    else:
        row_query = score.query_factors(spec, left_words, scale, score.query_squares)
        if at.pair == 0:
            blocks.store_row_values(rows + QUERY_FACTOR, at.row0, row_query[0], row_query[1])
    cute.arch.sync_threads()
    if group == 0:
        _make_m(spec, storage, at, sums, diagonal, rows)
    else:
        _make_p(spec, storage, at, sums, diagonal, rows)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()


@cute.jit
def _make_m(spec: ChunkSpec, storage: Any, at: Lane, kk: cute.Tensor, diagonal: cute.Tensor, rows: Int32):
    first = storage.state.data_ptr().toint()
    lower, scratch = first + LOWER, first + SCRATCH + at.warp * shape.SCRATCH_BYTES
    m_tile, columns = storage.m.data_ptr().toint(), rows + at.pair * 8
    inverted = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
    keeps = (at.row > 2 * at.pair, at.row > 2 * at.pair + 1)
    row_cum = blocks.row_values(rows + CUM, at.row0)
    inverse.start_row(at, kk, diagonal, inverted, left, rows, lower, scratch, Float32(at.lane % 8))
    operands.sync_warpgroup(shape.NamedBarrier.INVERSE)
    values = inverse.decayed_diagonal(inverted, columns, row_cum, keeps, at.warp)
    blocks.store_block(m_tile, at, at.warp, blocks.packed(spec.dtype, values))
    reference, row_decay = blocks.row_decays(rows, row_cum, at.warp)
    for back in cutlass.range_constexpr(3):
        u = 2 - back
        if u < at.warp:
            values = inverse.next_block(at, left, lower, columns, reference, row_decay, u)
            blocks.store_block(m_tile, at, u, blocks.packed(spec.dtype, values))


@cute.jit
def _make_p(spec: ChunkSpec, storage: Any, at: Lane, qk: cute.Tensor, diagonal: cute.Tensor, rows: Int32):
    row_query = blocks.row_values(rows + QUERY_FACTOR, at.row0)
    words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
    keeps = (at.row >= 2 * at.pair, at.row >= 2 * at.pair + 1)
    score.make_p(spec, at, qk, diagonal, words, rows, row_query, keeps)
    blocks.store_blocks(storage.p.data_ptr().toint(), at, words)
    if at.thread < CHUNK:
        score.publish_vectors(storage.vectors.data_ptr().toint(), rows, at.thread)


@cute.jit
def run_columns(spec: ChunkSpec, storage: Any, params: ChunkParams, sequence: Sequence, head: Int32, thread: Int32):
    """Compute 64 V columns of the outputs, which take the place of V, and of the state, which goes back to its slot."""
    (warp, group, at), dim = place(thread), spec.dim
    by_key, by_token = operands.tiled_mma(spec.dtype, CHUNK), operands.tiled_mma(spec.dtype, _PART, True)
    from_state = operands.smem_mma(spec.dtype, CHUNK)
    tile = operands.by_rows(spec.dtype, CHUNK, dim, 1)
    states = operands.smem_operand_a(from_state, storage.state, operands.by_rows(spec.dtype, 64, dim, 2))
    keys, queries = (operands.smem_operand_b(from_state, field, tile) for field in (storage.k, storage.q))
    tokens = operands.smem_operand_b(by_token, storage.k, operands.by_columns(spec.dtype, CHUNK, _PART, dim // _PART))
    square = operands.by_rows(spec.dtype, CHUNK, CHUNK, 1)
    m_operand, p_operand = (operands.smem_operand_b(by_key, field, square) for field in (storage.m, storage.p))
    sums, outputs = operands.accumulators(by_key, CHUNK), operands.accumulators(by_key, CHUNK)
    operand, words = operands.register_operand(spec.dtype, by_key, CHUNK)
    decayed, decayed_words = operands.register_operand(spec.dtype, by_token, CHUNK)
    final = operands.accumulators(by_token, _PART)
    row0, vector = group * 64 + warp * 16 + at.row, storage.vectors.data_ptr().toint() + at.pair * 8
    value_lane = state.value_address(storage.v.data_ptr().toint() + group * TILE_BYTES, warp, at.lane)

    sums.fill(0.0)
    outputs.fill(0.0)
    if sequence.is_continued:
        _stage_state(spec, storage, params, sequence, head, row0, at, group)
        cute.arch.fence_proxy("async.shared", space="cta")
        operands.sync_warpgroup(shape.NamedBarrier.STATE + group)
        warpgroup.fence()
        operands.multiply(from_state, sums, states[None, None, None, group], keys[None, None, None, 0], True)
        warpgroup.commit_group()
        operands.multiply(from_state, outputs, states[None, None, None, group], queries[None, None, None, 0], True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
    values = [ptx.load_matrices(value_lane + i * 16 * operands.ROW_BYTES, True) for i in range(CHUNK // 16)]
    state.subtract_keys(spec, sums, values, operands.load_factors(vector + shape.STATE_KEY))
    if sequence.length < CHUNK:
        state.mask_sums(sums, sequence.length, at.pair)
    _pack(spec, sums, words)
    warpgroup.fence()
    operands.multiply(by_key, sums, operand, m_operand[None, None, None, 0], False)
    warpgroup.commit_group()
    state.scale_columns(outputs, operands.load_factors(vector + shape.STATE_QUERY))
    warpgroup.wait_group(0)
    _pack(spec, sums, words)
    warpgroup.fence()
    operands.multiply(by_key, outputs, operand, p_operand[None, None, None, 0], False)
    warpgroup.commit_group()
    factors = operands.load_factors(vector + shape.KEY_TO_LAST)
    for n in cutlass.range_constexpr(CHUNK // 8):
        for side in cutlass.range_constexpr(2):
            index = 4 * n + 2 * side
            decayed_words[2 * n + side] = ptx.pack(spec.dtype, sums[index] * factors[n][0], sums[index + 1] * factors[n][1])
    warpgroup.wait_group(0)
    state.put_outputs(spec, outputs, value_lane)

    last = ptx.load_one(vector + shape.LAST_DECAY - at.pair * 8)
    for part in cutlass.range_constexpr(dim // _PART):
        first = part * _PART
        fetch_state(spec, params.initial_state, final, sequence.is_continued, sequence.slot, head, row0, at.pair, first)
        settle_state(spec, params.initial_state, final, final, at.pair)
        for i in cutlass.range_constexpr(_PART // 2):
            final[i] = final[i] * last
        warpgroup.fence()
        operands.multiply(by_token, final, decayed, tokens[None, None, None, part], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        write_state(spec, params.final_state, sequence.slot, final, head, row0, at.pair, True, first)
        if cutlass.const_expr(spec.has_checkpoints):
            if sequence.length == CHUNK:
                store_checkpoints(spec, params, final, sequence.number, head, sequence.length, row0, at.pair, first)


def _pack(spec: Any, sums: Any, words: Any) -> None:
    for i in range(CHUNK // 4):
        words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])


@cute.jit
def _stage_state(
    spec: ChunkSpec, storage: Any, params: ChunkParams, sequence: Sequence, head: Int32, row0: Int32, at: Lane, group: Int32
):
    """Round the state's 64 V columns of this warpgroup to the tokens' dtype, as an operand by rows."""
    entries = cute.make_rmem_tensor(cute.make_layout(spec.dim // 2), Float32)
    fetch_state(spec, params.initial_state, entries, sequence.is_continued, sequence.slot, head, row0, at.pair)
    settle_state(spec, params.initial_state, entries, entries, at.pair)
    first = storage.state.data_ptr().toint() + group * (spec.dim // 64) * TILE_BYTES
    for u in cutlass.range_constexpr(spec.dim // 16):
        words = blocks.packed(spec.dtype, [entries[8 * u + i] for i in range(8)])
        blocks.store_block(first + u // 4 * TILE_BYTES, at, u % 4, words)
