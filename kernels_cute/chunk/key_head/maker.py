"""The maker role: M, P and the row vectors of a chunk for all state heads of a work tile. None of it depends on the state.

The formulas: fused.py. K K^T and Q K^T are those of the key head; what follows from them is made for the heads side by side.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.key_head import shape as head_shape
from kernels_cute.chunk.key_head.tiles import block_address
from kernels_cute.chunk.rings import PreparedChunks, chunks_in, gate_place, key_place, ring_place
from kernels_cute.chunk.roles import inverse, score
from kernels_cute.chunk.roles import tile_blocks as blocks
from kernels_cute.chunk.roles.tile_blocks import Lane
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, CUM, KEY_BETA, KEY_FACTOR, LAST_CUM, QUERY_FACTOR, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx

_HALF = 8
_TRIANGLE = head_shape.TRIANGLE_BYTES


@cute.jit
def maker_warpgroup(spec: ChunkSpec, storage: Any, scale: Float32, prepared: PreparedChunks, length: Int32, warp: Int32):
    """Make M, P and the vectors of the chunks that this block prepares. This warp has rows 16 warp to 16 warp + 15 of every
    tile."""
    heads = spec.state_heads
    lane = cute.arch.lane_idx()
    # Both operands from shared memory: it has the bandwidth every second chunk, this warpgroup no registers.
    mma = operands.smem_mma(spec.dtype, CHUNK)
    key_layout, query_layout = (operands.by_rows(spec.dtype, CHUNK, spec.dim, count) for count in (spec.key_stages, spec.stages))
    keys = operands.smem_operand_b(mma, storage.k, key_layout)
    left_keys = operands.smem_operand_a(mma, storage.k, key_layout)
    left_queries = operands.smem_operand_a(mma, storage.q, query_layout)
    sums = operands.accumulators(mma, CHUNK)
    diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    row_words = [cute.make_rmem_tensor(cute.make_layout(16), Int32) for _ in range(heads)]  # each head's blocks of P
    last_words = [cute.make_rmem_tensor(cute.make_layout(4), Int32) for _ in range(heads)]  # diagonal blocks of M
    k_base, q_base = storage.k.data_ptr().toint(), storage.q.data_ptr().toint()
    lowers = [storage.lower.data_ptr().toint() + i * _TRIANGLE for i in range(heads)]
    scratch = storage.scratch.data_ptr().toint() + warp * (heads * head_shape.SCRATCH_BYTES)

    for step in cutlass.range(prepared.first, chunks_in(length), prepared.stride, unroll=1):
        key_stage, key_parity = key_place(spec, prepared, step)
        stage, parity = ring_place(spec.stages, prepared.base + step)
        gate_buffer, gate_turn = gate_place(prepared, step)
        buffer, turn = (prepared.base + step) & 1, (prepared.base + step) >> 1 & 1
        rows = [storage.rows.data_ptr().toint() + (gate_buffer * heads + i) * AUX_BYTES for i in range(heads)]
        m_tiles, p_tiles = (
            [field.data_ptr().toint() + (buffer * heads + i) * TILE_BYTES for i in range(heads)]
            for field in (storage.m, storage.p)
        )
        valid = length - step * CHUNK
        # Addresses of a part are made where it begins: kept from before the loop, they would be too many.
        at = blocks.lane_of(warp, ptx.opaque(lane))
        cute.arch.mbarrier_wait(storage.k_full.data_ptr() + key_stage, key_parity)
        if valid < CHUNK:
            # The tile ends with the next sequence's keys, NaN perhaps, and 0 * NaN in the state update is NaN.
            blocks.zero_keys(spec, k_base + key_stage * spec.key_bytes, valid, at.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            operands.sync_warpgroup(shape.NamedBarrier.MAKER)
        warpgroup.fence()
        operands.multiply(mma, sums, left_keys[None, None, None, key_stage], keys[None, None, None, key_stage], True)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + gate_buffer, gate_turn)
        warpgroup.wait_group(0)
        blocks.diagonal_block(sums, diagonal, warp)
        inverse.key_factors(spec, at, diagonal, rows)
        operands.sync_warpgroup(shape.NamedBarrier.MAKER)

        at = blocks.lane_of(warp, ptx.opaque(lane))
        is_below = (at.row > 2 * at.pair, at.row > 2 * at.pair + 1)
        invert(spec, at, sums, diagonal, rows, lowers, scratch, last_words, is_below)
        parts = column_parts(at, rows, scratch)
        operands.sync_warpgroup(shape.NamedBarrier.MAKER)
        # Block by block to where it goes: all of M does not fit into registers. While one head waits, the other runs.
        at = blocks.lane_of(warp, ptx.opaque(lane))
        cute.arch.mbarrier_wait(storage.m_tile_released.data_ptr() + buffer, turn ^ 1)
        store_m(spec, at, rows, lowers, last_words, storage.scratch.data_ptr().toint(), m_tiles)

        at = blocks.lane_of(warp, ptx.opaque(lane))
        cute.arch.mbarrier_wait(storage.q_full.data_ptr() + stage, parity)
        warpgroup.fence()
        operands.multiply(mma, sums, left_queries[None, None, None, stage], keys[None, None, None, key_stage], True)
        warpgroup.commit_group()
        row_query = score.query_factors(spec, (at, q_base + stage * spec.key_bytes), scale, score.row_squares)
        if at.pair == 0:
            blocks.store_row_values(rows[0] + QUERY_FACTOR, at.row0, row_query[0], row_query[1])
        operands.sync_warpgroup(shape.NamedBarrier.MAKER)
        vectors = vector_values(rows[0], rows[0] + at.thread // CHUNK * AUX_BYTES, at.thread % CHUNK)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        if at.lane == 0:
            cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + stage)
        at = blocks.lane_of(warp, ptx.opaque(lane))
        is_not_above = (at.row >= 2 * at.pair, at.row >= 2 * at.pair + 1)
        make_p(spec, at, sums, diagonal, rows, row_query, is_not_above, (row_words, parts))
        at = blocks.lane_of(warp, ptx.opaque(lane))
        cute.arch.sync_warp()
        if at.lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + gate_buffer)
        cute.arch.mbarrier_wait(storage.tile_released.data_ptr() + buffer, turn ^ 1)
        for tile, words in zip(p_tiles, row_words, strict=True):
            blocks.store_blocks(tile, at, words)
        publish(spec, storage, vectors, buffer, at)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(storage.ready.data_ptr() + buffer)


@cute.jit
def invert(
    spec: ChunkSpec, at: Lane, kk: cute.Tensor, diagonal: cute.Tensor, rows: list[Int32], lowers: list[Int32], scratch: Int32,
    last_words: list[cute.Tensor], keeps: Any,
):  # fmt: skip
    """Invert the warp's diagonal block of I + L for every head, and store it with the warp's blocks of L, negated, in the head's
    `lower`. The inverse also goes to last_words, as a block of M. diagonal: of K K^T.

    A diagonal block [[B, 0], [N, C]] is inverted by forward substitution of its halves in float32, a lane a column. Lanes 16 i to
    16 i + 15 have the block of head i.
    """
    row, pair, lane = at.row, at.pair, at.lane
    columns = [own + pair * 8 for own in rows]
    row_key = blocks.row_values(rows[0] + KEY_FACTOR, at.row0)
    row_scale = (-row_key[0], -row_key[1])  # of every head
    for u in cutlass.range_constexpr(3):
        if u < at.warp:
            scaled = [kk[8 * u + i] * row_scale[i // 2 % 2] for i in range(8)]
            store_all(at, u, lowers, [lower_words(scaled, own + 64 * u) for own in columns], block_address)
    # All loads first: ptxas takes none past a store.
    keys_of = [[ptx.load_pair(own + at.warp * 64 + KEY_BETA + m * 32) for m in range(2)] for own in columns]
    belows = []
    scaled = [diagonal[i] * row_scale[i // 2 % 2] for i in range(8)]
    for i in cutlass.range_constexpr(len(rows)):
        for m in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                # The part above the diagonal is stored with the rest, and never read.
                address = scratch + i * head_shape.SCRATCH_BYTES + m * head_shape.COLUMN_HALF
                address = address + (2 * pair + odd) * head_shape.COLUMN_PITCH + row * 4
                ptx.store_one(address, scaled[6 * m + odd] * keys_of[i][m][odd])
        belows.append([scaled[2 + odd] * keys_of[i][0][odd] for odd in range(2)])
    cute.arch.sync_warp()
    column, half, head = lane % _HALF, lane // _HALF % 2, lane // (2 * _HALF)
    own = scratch + head * head_shape.SCRATCH_BYTES
    x = inverse.substitute(own + half * head_shape.COLUMN_HALF, head_shape.COLUMN_PITCH, Float32(column))
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(_HALF):
        ptx.store_one(own + half * head_shape.INVERSE_HALF + i * head_shape.INVERSE_PITCH + column * 4, x[i])
    cute.arch.sync_warp()
    addresses = [scratch + i * head_shape.SCRATCH_BYTES + row * head_shape.INVERSE_PITCH + pair * 8 for i in range(len(rows))]
    halves = [(ptx.load_pair(address), ptx.load_pair(address + head_shape.INVERSE_HALF)) for address in addresses]
    joined = [inverse.join_halves(*both, below) for both, below in zip(halves, belows, strict=True)]
    for i in cutlass.range_constexpr(len(rows)):
        row_cum = blocks.row_values(rows[i] + CUM, at.row0)
        values = inverse.decayed_diagonal(joined[i], columns[i], row_cum, keeps, at.warp)
        blocks.set_words(last_words[i], 0, blocks.packed(spec.dtype, values))
    store_all(at, at.warp, lowers, [blocks.half_words(values) for values in joined], block_address)
    cute.arch.sync_warp()  # the next chunk's stores into scratch come after these loads


def lower_words(scaled: Any, columns: Any) -> list[Any]:
    """A block of L, negated, left of the diagonal block, from that of K K^T with its rows scaled."""
    keys_of = [ptx.load_pair(columns + KEY_BETA + m * 32) for m in range(2)]
    return blocks.half_words([scaled[i] * keys_of[i // 4][i % 2] for i in range(8)])


@cute.jit
def column_parts(at: Lane, rows: list[Int32], scratch: Int32):
    """Compute the decays from the last token before the warp's diagonal block to each column left of it, of every head, and those
    decays times the columns' factors of P. A lane computes a column, instead of every lane that has an element of it. Return the
    address of this lane's first."""
    references = [ptx.load_one(own + CUM + cutlass.max(at.warp * 16 - 1, 0) * 4) for own in rows]
    owners = [(i, (half * 32 + at.lane) * 4) for i in range(len(rows)) for half in range(2)]
    loaded = [(ptx.load_one(rows[i] + CUM + column), ptx.load_one(rows[i] + KEY_BETA + column)) for i, column in owners]
    for (i, column), (cum, key_beta) in zip(owners, loaded, strict=True):
        decay, own = ptx.exp2(references[i] - cum), scratch + i * head_shape.SCRATCH_BYTES + column
        ptx.store_one(own, decay)
        ptx.store_one(own + head_shape.PART_BYTES, decay * key_beta)
    cute.arch.sync_warp()
    return [scratch + i * head_shape.SCRATCH_BYTES + at.pair * 8 for i in range(len(rows))]


@cute.jit
def store_m(
    spec: ChunkSpec, at: Lane, rows: list[Int32], lowers: list[Int32], last_words: list[cute.Tensor], scratch: Int32,
    tiles: list[Int32],
):  # fmt: skip
    """Store M of every head. A warp stores the diagonal blocks of its own rows, and three blocks left of a diagonal: row 3 of
    blocks of one head, or row 2 of one head and row 1 of the other. scratch: the first warp's."""
    for i in cutlass.range_constexpr(len(rows)):
        blocks.store_block(tiles[i], at, at.warp, [last_words[i][k] for k in range(4)])
    head = 1 - at.warp // 2
    if (at.warp == 0) | (at.warp == 3):
        store_left(spec, at, [(3, head)], rows, lowers, scratch, tiles)
    else:
        store_left(spec, at, [(2, head), (1, 1 - head)], rows, lowers, scratch, tiles)


def store_left(spec: Any, at: Any, which: Any, rows: Any, lowers: Any, scratch: Any, tiles: Any) -> None:
    """Store rows of blocks of M, left of the diagonal. which: (number of the row, head) of each."""
    found = []
    for number, head in which:
        parts = scratch + (number * len(rows) + head) * head_shape.SCRATCH_BYTES + at.pair * 8
        own = rows[0] + head * (rows[1] - rows[0])
        found.append(left_blocks(spec, at, number, lowers[0] + head * _TRIANGLE, own, parts))
    for (number, head), words in zip(which, found, strict=True):
        for u, own in enumerate(words):
            address = blocks.square_address(tiles[0] + head * TILE_BYTES, number * 16 + at.lane % 16, u, at.unit)
            ptx.store_matrices(address, own, False)


def left_blocks(spec: Any, at: Any, number: int, lower: Any, rows: Any, parts: Any) -> list[Any]:
    """Return the words of a row of blocks of M left of the diagonal, A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu with decays.
    The blocks are a chain of products, so products that do not need the block before are issued first. parts: column_parts of the
    row."""

    def load(row: int, u: int, turned: bool) -> Any:
        return ptx.load_matrices(block_address(lower, row * 16 + at.lane % 16, u, at.unit), turned)

    def add(sums: Any, left: Any, right: Any) -> Any:
        return [ptx.multiply_small(cutlass.Float16, sums[side], left, right[2 * side], right[2 * side + 1]) for side in range(2)]

    zero = [(Float32(0.0),) * 4] * 2
    left = load(number, number, False)
    sums = [add(zero, left, load(number, u, True)) for u in range(number)]
    row_cum = blocks.row_values(rows + CUM, number * 16 + at.row)
    reference = ptx.load_one(rows + CUM + (number * 16 - 1) * 4)
    row_decay = [ptx.exp2(one - reference) for one in row_cum]
    words: list[Any] = [None] * number
    for u in range(number - 1, -1, -1):
        product = add(zero, blocks.half_words([*sums[u][0], *sums[u][1]]), load(u, u, True))
        if u > 0:
            left = blocks.half_words([*product[0], *product[1]])
            for t in range(u - 1, -1, -1):
                sums[t] = add(sums[t], left, load(u, t, True))
        decays = [ptx.load_pair(parts + (2 * u + m) * 32) for m in range(2)]
        words[u] = blocks.packed(
            spec.dtype, [product[m][i] * (decays[m][i % 2] * row_decay[i // 2]) for m in range(2) for i in range(4)]
        )
    return words


@cute.jit
def make_p(
    spec: ChunkSpec, at: Lane, qk: cute.Tensor, diagonal: cute.Tensor, rows: list[Int32], row_query: Any, keeps: Any,
    to_words: Any,
):  # fmt: skip
    """Make the blocks of P of the warp's rows, for every head."""
    row_words, column_parts = to_words
    blocks.diagonal_block(qk, diagonal, at.warp)
    columns, row_cums = [own + at.pair * 8 for own in rows], [blocks.row_values(own + CUM, at.row0) for own in rows]
    decays = [blocks.row_decays(own, row_cum, at.warp) for own, row_cum in zip(rows, row_cums, strict=True)]
    for words in row_words:
        words.fill(0)  # or what a warp does not set would be kept from chunk to chunk
    parts = [(reference, (row_query[0] * of_rows[0], row_query[1] * of_rows[1])) for reference, of_rows in decays]
    for u in cutlass.range_constexpr(3):
        if u < at.warp:
            found = [left_scores(qk, u, own, row_part) for own, (_, row_part) in zip(column_parts, parts, strict=True)]
            for words, values in zip(row_words, found, strict=True):
                blocks.set_words(words, u, blocks.packed(spec.dtype, values))
    last = [
        score.last_scores(at, diagonal, own, row_cum, row_query, keeps) for own, row_cum in zip(columns, row_cums, strict=True)
    ]
    for words, values in zip(row_words, last, strict=True):
        blocks.set_words(words, 3, blocks.packed(spec.dtype, values))


def left_scores(qk: Any, u: int, columns: Any, row_part: Any) -> list[Any]:
    """Block u of P, left of the diagonal block, of the warp's rows. columns: column_parts of this lane."""
    values: list[Any] = []
    for m in range(2):
        parts = ptx.load_pair(columns + head_shape.PART_BYTES + (2 * u + m) * 32)
        values += [qk[8 * u + 4 * m + i] * (row_part[i // 2] * parts[i % 2]) for i in range(4)]
    return values


def store_all(at: Any, u: Any, tiles: Any, words: Any, address: Any = blocks.square_address) -> None:
    """Store column block u of every head. All values are loaded before the first store."""
    for tile, own in zip(tiles, words, strict=True):
        blocks.store_block(tile, at, u, own, address)


@cute.jit
def vector_values(shared: Int32, rows: Int32, token: Int32):
    """Return one token's elements of the row vectors, and the decay of the whole chunk. shared: the rows with the norms."""
    cum, total = ptx.load_one(rows + CUM + token * 4), ptx.load_one(rows + LAST_CUM)
    key_beta = ptx.load_one(rows + KEY_BETA + token * 4)
    key, query = ptx.load_one(shared + KEY_FACTOR + token * 4), ptx.load_one(shared + QUERY_FACTOR + token * 4)
    grown = cute.math.exp2(cum, fastmath=True)
    return grown * key, operands.exp2_clamped(total - cum) * key_beta, grown * query, cute.math.exp2(total, fastmath=True)


@cute.jit
def publish(spec: ChunkSpec, storage: Any, values: Any, buffer: Int32, at: Lane):
    """Write the row vectors of every head, 64 threads a head."""
    head, token = at.thread // CHUNK, at.thread % CHUNK
    vectors = storage.vectors.data_ptr().toint() + (buffer * spec.state_heads + head) * VECTOR_BYTES
    for kind, value in zip((shape.STATE_KEY, shape.KEY_TO_LAST, shape.STATE_QUERY), values[:3], strict=True):
        ptx.store_one(vectors + kind + token * 4, value)
    if token == 0:
        ptx.store_one(vectors + shape.LAST_DECAY, values[3])
