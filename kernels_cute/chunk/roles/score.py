"""The score role: P and the row vectors of a chunk, which do not depend on the state.

The formulas and who waits for whom: fused.py, four_sm/kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.rings import PreparedChunks, chunks_in, gate_place, key_place, ring_place
from kernels_cute.chunk.roles import tile_blocks as blocks
from kernels_cute.chunk.roles.maker_tiles import fold_tiles
from kernels_cute.chunk.roles.norm import norm_chunks
from kernels_cute.chunk.roles.tile_blocks import Lane
from kernels_cute.chunk.shape import CHUNK, CUM, KEY_BETA, KEY_FACTOR, QUERY_FACTOR
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx


@cute.jit
def score_warpgroup(
    spec: ChunkSpec, storage: Any, scale: Float32, prepared: PreparedChunks, length: Int32, warp: Int32, norm: Any = None,
    done: Int32 | None = None,
):  # fmt: skip
    """Compute P and the row vectors of the chunks that this block prepares. In a maker block, compute Z and P M instead of P. A
    warp has the rows and blocks that inverse_warpgroup gives it.

    norm, done: (terms, NormLane) and `done` of norm_chunks. With them the outputs of the two chunks before are normed after each
    P.
    """
    in_maker_block = prepared.group is not None
    group = prepared.group if cutlass.const_expr(in_maker_block) else 0
    at = blocks.lane_of(warp)
    mma = operands.tiled_mma(spec.dtype, CHUNK)
    keys = operands.smem_operand_b(mma, storage.k, operands.by_rows(spec.dtype, CHUNK, spec.dim, spec.key_stages))
    left_operand, left_words = operands.register_operand(spec.dtype, mma, spec.dim)
    qk = operands.accumulators(mma, CHUNK)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    p_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
    q_base, vectors = storage.q.data_ptr().toint() + group * spec.key_bytes, storage.vectors.data_ptr().toint()
    keeps = (at.row >= 2 * at.pair, at.row >= 2 * at.pair + 1)

    for step in cutlass.range(prepared.first, chunks_in(length), prepared.stride, unroll=1):
        key_stage, key_parity = key_place(spec, prepared, step)
        gate_buffer, gate_turn = gate_place(prepared, step)
        rows = storage.rows.data_ptr().toint() + gate_buffer * shape.AUX_BYTES
        if cutlass.const_expr(in_maker_block):
            buffer, turn = group, step // prepared.sets.round & 1
            cute.arch.mbarrier_wait(storage.q_full.data_ptr() + group, turn)
            blocks.load_rows(spec, at, q_base, left_words)
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + key_stage, key_parity)
        else:
            buffer, turn = (prepared.base + step) & 1, (prepared.base + step) >> 1 & 1
            stage, parity = ring_place(spec.query_stages, prepared.base + step)
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + key_stage, key_parity)
            q_full = storage.q_full if cutlass.const_expr(spec.has_norm) else storage.full
            cute.arch.mbarrier_wait(q_full.data_ptr() + stage, parity)
            blocks.load_rows(spec, at, q_base + stage * spec.key_bytes, left_words)
        warpgroup.fence()
        # Rows of K past the end may be anything here: right of the diagonal, or in rows past the end.
        operands.multiply(mma, qk, left_operand, keys[None, None, None, key_stage], True)
        warpgroup.commit_group()
        row_query = query_factors(
            spec, left_words, scale, query_squares_by_elements if cutlass.const_expr(in_maker_block) else query_squares
        )
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + gate_buffer, gate_turn)
        if at.pair == 0:
            blocks.store_row_values(rows + QUERY_FACTOR, at.row0, row_query[0], row_query[1])
        warpgroup.wait_group(0)
        if cutlass.const_expr(in_maker_block):
            cute.arch.sync_warp()
            if at.lane == 0:
                cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + group)
        operands.sync_warpgroup(
            prepared.sets.score_barrier + group if cutlass.const_expr(in_maker_block) else shape.NamedBarrier.SCORE
        )
        cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + gate_buffer, gate_turn)

        make_p(spec, at, qk, diagonal, p_words, rows, row_query, keeps)
        if cutlass.const_expr(in_maker_block):
            fold_tiles(spec, storage, at, p_words, key_stage, group, prepared.sets.count, turn)
        else:
            cute.arch.mbarrier_wait(storage.tile_released.data_ptr() + buffer, turn ^ 1)
            blocks.store_blocks(storage.p.data_ptr().toint() + buffer * shape.TILE_BYTES, at, p_words)
        if at.thread < CHUNK:
            publish_vectors(vectors + buffer * shape.VECTOR_BYTES, rows, at.thread)
        cute.arch.sync_warp()
        if at.lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + gate_buffer)
            if cutlass.const_expr(in_maker_block):
                cute.arch.mbarrier_arrive(storage.k_empty.data_ptr() + key_stage)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive((storage.made if cutlass.const_expr(in_maker_block) else storage.ready).data_ptr() + buffer)
        if cutlass.const_expr(norm is not None):
            terms, norm_lane = norm
            count = prepared.base + step
            norm_chunks(spec, storage, terms, norm_lane, cutlass.max(count - 2, done), count, count, done)


@cute.jit
def make_p(
    spec: ChunkSpec, at: Lane, qk: cute.Tensor, diagonal: cute.Tensor, p_words: cute.Tensor, rows: Int32, row_query: Any,
    keeps: Any,
):  # fmt: skip
    """The warp's blocks of P, as words, from those of Q K^T."""
    columns, warp = rows + at.pair * 8, at.warp
    row_cum = blocks.row_values(rows + CUM, at.row0)
    reference, row_decay = blocks.row_decays(rows, row_cum, warp)
    row_part = (row_query[0] * row_decay[0], row_query[1] * row_decay[1])
    blocks.diagonal_block(qk, diagonal, warp)
    for u in cutlass.range_constexpr(3):
        if u < warp:
            blocks.set_words(p_words, u, blocks.packed(spec.dtype, left_scores(qk, u, columns, reference, row_part)))
    blocks.set_words(p_words, 3, blocks.packed(spec.dtype, last_scores(at, diagonal, columns, row_cum, row_query, keeps)))


def left_scores(qk: Any, u: int, columns: Any, reference: Any, row_part: Any) -> list[Any]:
    """Return block u of P, left of the diagonal block, of the warp's rows. columns: this lane's, of the rows of factors;
    row_part: factors of its two rows down to `reference`, the token of tile_blocks.row_decays."""
    values: list[Any] = [None] * 8
    for m in range(2):
        n = 2 * u + m
        keys_of = ptx.load_pair(columns + KEY_BETA + n * 32)
        cums = ptx.load_pair(columns + CUM + n * 32)
        for odd in range(2):
            column_part = keys_of[odd] * ptx.exp2(reference - cums[odd])
            for side in range(2):
                values[4 * m + 2 * side + odd] = qk[4 * n + 2 * side + odd] * (row_part[side] * column_part)
    return values


def last_scores(at: Any, diagonal: Any, columns: Any, row_cum: Any, row_query: Any, keeps: Any) -> list[Any]:
    """The diagonal block of P of the warp's rows."""
    values: list[Any] = [None] * 8
    for m in range(2):
        keys_of = ptx.load_pair(columns + KEY_BETA + at.warp * 64 + m * 32)
        cums = ptx.load_pair(columns + CUM + at.warp * 64 + m * 32)
        for i in range(4):
            gap = blocks.block_decay(row_cum, cums, keeps, m, i)
            value = diagonal[4 * m + i] * (row_query[i // 2] * keys_of[i % 2]) * gap
            # Selected, not multiplied by 0: keys past the end may be NaN, and they are above the diagonal.
            if m == 1 and i < 2:
                value = Float32(0.0)
            if m == i // 2:
                value = operands.select(keeps[i % 2], value, Float32(0.0))
            values[4 * m + i] = value
    return values


def query_factors(spec: Any, words: Any, scale: Any, squares: Any) -> tuple[Any, Any]:
    """Return scale / |q| of this lane's two rows, whose columns four lanes share. squares: function of (spec, words) that returns
    |q|^2."""
    if not spec.normalize:
        return scale, scale
    first, second = squares(spec, words)
    return cute.math.rsqrt(first + shape.NORM_EPS) * scale, cute.math.rsqrt(second + shape.NORM_EPS) * scale


def query_squares(spec: Any, words: Any) -> list[Any]:
    """Return |q|^2 of this lane's two rows, from the diagonals of the products of the warp's rows with the first and the last
    eight of them. That takes an eighth of the instructions of sums over single elements."""
    lane = cute.arch.lane_idx()
    row = lane // 4
    holder = row * 4 + row // 2  # of the four lanes of a row
    squares = []
    for side in range(2):
        sums = (Float32(0.0),) * 4
        for step in range(spec.dim // 16):
            operand = [words[4 * step + i] for i in range(4)]
            sums = ptx.multiply_small(spec.dtype, sums, operand, operand[side], operand[side + 2])
        own = operands.select(row % 2 == 1, sums[2 * side + 1], sums[2 * side])
        squares.append(cute.arch.shuffle_sync(own, holder))
    return squares


def row_squares(spec: Any, queries: Any) -> list[Any]:
    """Return |q|^2 of this lane's two rows from the tile of Q in shared memory, with few of its words in registers at a time.
    queries: (Lane, tile)."""
    at, tile = queries
    holder = at.row * 4 + at.row // 2
    sums = [(Float32(0.0),) * 4 for _ in range(2)]
    for step in range(spec.dim // 16):
        operand = blocks.load_words(at, tile, step)
        for side in range(2):
            sums[side] = ptx.multiply_small(spec.dtype, sums[side], operand, operand[side], operand[side + 2])
    own = [operands.select(at.row % 2 == 1, sums[side][2 * side + 1], sums[side][2 * side]) for side in range(2)]
    return [cute.arch.shuffle_sync(one, holder) for one in own]


def query_squares_by_elements(spec: Any, words: Any) -> list[Any]:
    """Return |q|^2 of this lane's two rows by single elements: a maker's warpgroup has no registers for products."""
    squares = []
    for side in range(2):
        sums = [Float32(0.0)] * 2
        for step in range(spec.dim // 16):
            for part in range(2):
                low, high = ptx.unpack(spec.dtype, words[4 * step + side + 2 * part])
                sums[part] = sums[part] + low * low
                sums[part] = sums[part] + high * high
        total = sums[0] + sums[1]
        total = total + cute.arch.shuffle_sync_bfly(total, 1)
        squares.append(total + cute.arch.shuffle_sync_bfly(total, 2))
    return squares


@cute.jit
def publish_vectors(vectors: Int32, rows: Int32, thread: Int32):
    cum, total = ptx.load_one(rows + CUM + thread * 4), ptx.load_one(rows + shape.LAST_CUM)
    key, key_beta, query = (ptx.load_one(rows + kind + thread * 4) for kind in (KEY_FACTOR, KEY_BETA, QUERY_FACTOR))
    grown = cute.math.exp2(cum, fastmath=True)
    ptx.store_one(vectors + shape.STATE_KEY + thread * 4, grown * key)
    ptx.store_one(vectors + shape.KEY_TO_LAST + thread * 4, operands.exp2_clamped(total - cum) * key_beta)
    ptx.store_one(vectors + shape.STATE_QUERY + thread * 4, grown * query)
    if thread == 0:
        ptx.store_one(vectors + shape.LAST_DECAY, cute.math.exp2(total, fastmath=True))
