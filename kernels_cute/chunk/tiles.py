"""The inverse and score roles of the fused chunk kernel: M, P and the row vectors of a chunk, none of which depends on
the state.

The maths, the barriers and who waits for whom stand in `_chunk_fused`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    BLOCK,
    CHUNK,
    COLUMN_PITCH,
    CUM,
    HALF,
    INVERSE_BARRIER,
    KEY_BETA,
    KEY_FACTOR,
    KEY_TO_LAST,
    NORM_EPS,
    QUERY_FACTOR,
    ROW_PITCH,
    SCORE_BARRIER,
    SCRATCH_BYTES,
    STATE_KEY,
    STATE_QUERY,
    TILE_BYTES,
    VECTOR_BYTES,
    VECTORS,
    WARPGROUP,
)
from kernels_cute.common import ptx


class TileRoles:
    """Methods of the inverse and the score warpgroup; `self` is the FusedChunk."""

    @cute.jit
    def inverse_warpgroup(self, storage, length, first, warp, base=0):
        """M of an item's chunks first, first + self.aux_step, ...; before the item the block had `base` chunks. Rows 16 warp ..
        of a tile are this warp's; of the lower triangle it computes the 16 x 16 blocks left of the diagonal and the diagonal
        one, the rest stays zero."""
        lane = cute.arch.lane_idx()
        thread = warp * 32 + lane
        row, pair = lane // 4, lane % 4
        mma = self.product(CHUNK, True)
        keys = self.right(mma, storage.k, layouts.by_rows(self.dtype, CHUNK, self.dim, self.key_stages))
        left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, self.dim)), self.dtype)
        left_words = cute.recast_tensor(left_operand, Int32)
        kk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
        diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        inverse = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
        m_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # blocks of M, to be stored when there is room
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        k_base, m_base = storage.k.data_ptr().toint(), storage.m.data_ptr().toint()
        lower = storage.lower.data_ptr().toint()
        scratch = storage.scratch.data_ptr().toint() + warp * SCRATCH_BYTES
        # Where this lane points when its warp's 16 rows of a tile are moved as matrices, and when a block is an operand B.
        tile_row = warp * 16 + lane % 16
        matrix_row = lane % 16
        unit = lane // 16
        lane_column = Float32(lane % HALF)
        keeps_below = (row > 2 * pair, row > 2 * pair + 1)
        row0 = warp * 16 + row

        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(first, num_chunks, self.aux_step, unroll=1):
            count = base + step
            stage, parity = self.key_stage_of(count)
            buffer, turn = count & 1, count >> 1 & 1
            half, half_turn = self.half_of(count)
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            columns = rows + pair * 8
            valid = length - step * CHUNK
            cute.arch.mbarrier_wait(self.keys_full(storage) + stage, parity)
            if valid < CHUNK:
                # The tile ends with the next sequence's keys, NaN perhaps, and 0 * NaN in the state update is NaN.
                self.zero_keys(k_base + stage * self.key_bytes, valid, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                self.sync_inverse()
            # The left operand in registers: both from shared memory would take all of its bandwidth.
            self.load_rows(k_base + stage * self.key_bytes, left_words, tile_row, unit)
            warpgroup.fence()
            self.multiply(mma, kk, left_operand, keys[None, None, None, stage], True)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
            warpgroup.wait_group(0)
            self.diagonal_block(kk, diagonal, warp)
            self.key_factors(diagonal, rows, row, pair, row0)
            cute.arch.mbarrier_arrive(storage.factors_full.data_ptr() + half)
            self.sync_inverse()

            # L, negated: the diagonal block in float32, what lies left of it in float16 for the products.
            row_cum = self.row_values(rows, CUM, row0)
            row_key = self.row_values(rows, KEY_FACTOR, row0)
            row_scale = (-row_key[0], -row_key[1])
            self.store_lower(kk, lower, columns, row_scale, tile_row, unit, warp)
            self.invert_block(diagonal, inverse, row_scale, columns + warp * 64, lower, scratch, tile_row, unit, warp,
                              lane_column, lane, row, pair)  # fmt: skip

            # M: the diagonal block first, then, with every warp's L and inverted blocks in place, leftwards:
            # A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu.
            left.fill(0)
            words = self.half_words([inverse[i] for i in range(8)])
            for w in cutlass.range_constexpr(1, 4):
                if warp == w:
                    for i in cutlass.range_constexpr(4):
                        left[4 * w + i] = words[i]
            self.sync_inverse()
            values = self.decayed_diagonal(inverse, columns, row_cum, keeps_below, warp)
            self.keep_block(m_words, 3, values)
            reference, row_decay = self.row_decays(rows, row_cum, warp)
            for back in cutlass.range_constexpr(3):
                u = 2 - back
                if u < warp:
                    values = self.next_block(left, lower, columns, reference, row_decay, matrix_row, unit, u)
                    self.keep_block(m_words, u, values)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
            self.store_blocks(m_base + buffer * TILE_BYTES, tile_row, unit, warp, m_words)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ready + buffer)

    @cute.jit
    def score_warpgroup(self, storage, scale, length, first, warp, base=0):
        """P and the vectors of the same chunks, rows and blocks as inverse_warpgroup's."""
        lane = cute.arch.lane_idx()
        thread = warp * 32 + lane
        row, pair = lane // 4, lane % 4
        mma = self.product(CHUNK, True)
        keys = self.right(mma, storage.k, layouts.by_rows(self.dtype, CHUNK, self.dim, self.key_stages))
        left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, self.dim)), self.dtype)
        left_words = cute.recast_tensor(left_operand, Int32)
        qk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
        diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        p_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        q_base, p_base = storage.q.data_ptr().toint(), storage.p.data_ptr().toint()
        tile_row = warp * 16 + lane % 16
        unit = lane // 16
        keeps_diagonal = (row >= 2 * pair, row >= 2 * pair + 1)
        row0 = warp * 16 + row

        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(first, num_chunks, self.aux_step, unroll=1):
            count = base + step
            stage, parity = self.stage_of(count)
            buffer, turn = count & 1, count >> 1 & 1
            half, half_turn = self.half_of(count)
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            columns = rows + pair * 8
            key_stage, key_parity = self.key_stage_of(count)
            cute.arch.mbarrier_wait(self.keys_full(storage) + key_stage, key_parity)
            cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, parity)
            self.load_rows(q_base + stage * self.key_bytes, left_words, tile_row, unit)
            warpgroup.fence()
            # Rows of K past the end may be anything here: right of the diagonal, or in rows past the end.
            self.multiply(mma, qk, left_operand, keys[None, None, None, key_stage], True)
            warpgroup.commit_group()
            row_query = self.query_factors(left_words, scale)
            cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
            if pair == 0:
                ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4, row_query[0])
                ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4 + 32, row_query[1])
            warpgroup.wait_group(0)
            cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
            cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)

            self.make_p(qk, diagonal, p_words, rows, columns, row_query, keeps_diagonal, row0, warp)
            cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
            self.store_blocks(p_base + buffer * TILE_BYTES, tile_row, unit, warp, p_words)
            if thread < CHUNK:
                self.publish_vectors(storage.vectors.data_ptr().toint() + buffer * VECTOR_BYTES, rows, thread)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ready + buffer)

    @cute.jit
    def make_p(self, qk, diagonal, p_words, rows, columns, row_query, keeps_diagonal, row0, warp):
        """The warp's blocks of P, as words, from those of Q K^T."""
        row_cum = self.row_values(rows, CUM, row0)
        reference, row_decay = self.row_decays(rows, row_cum, warp)
        row_part = (row_query[0] * row_decay[0], row_query[1] * row_decay[1])
        self.diagonal_block(qk, diagonal, warp)
        for u in cutlass.range_constexpr(3):
            if u < warp:
                values = [None] * 8
                for m in cutlass.range_constexpr(2):
                    n = 2 * u + m
                    keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + n * 32)
                    cums = ptx.load_pair(columns + CUM * CHUNK * 4 + n * 32)
                    for odd in cutlass.range_constexpr(2):
                        column_part = keys_of[odd] * ptx.exp2(reference - cums[odd])
                        for side in cutlass.range_constexpr(2):
                            values[4 * m + 2 * side + odd] = qk[4 * n + 2 * side + odd] * (row_part[side] * column_part)
                self.keep_block(p_words, u, values)
        values = [None] * 8
        for m in cutlass.range_constexpr(2):
            keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + warp * 64 + m * 32)
            cums = ptx.load_pair(columns + CUM * CHUNK * 4 + warp * 64 + m * 32)
            for i in cutlass.range_constexpr(4):
                gap = self.gap(row_cum, cums, keeps_diagonal, m, i)
                value = diagonal[4 * m + i] * (row_query[i // 2] * keys_of[i % 2]) * gap
                # Selected, not multiplied by 0: keys past the end may be NaN, and they stand above the diagonal.
                if cutlass.const_expr(m == 1 and i < 2):
                    value = Float32(0.0)
                if cutlass.const_expr(m == i // 2):
                    value = self.where(keeps_diagonal[i % 2], value, Float32(0.0))
                values[4 * m + i] = value
        self.keep_block(p_words, 3, values)

    @cute.jit
    def store_lower(self, kk, lower, columns, row_scale, tile_row, unit, warp):
        """The warp's blocks of L left of the diagonal, negated, from those of K K^T."""
        for u in cutlass.range_constexpr(3):
            if u < warp:
                values = [None] * 8
                for m in cutlass.range_constexpr(2):
                    keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + (2 * u + m) * 32)
                    for i in cutlass.range_constexpr(4):
                        values[4 * m + i] = kk[8 * u + 4 * m + i] * (row_scale[i // 2] * keys_of[i % 2])
                self.store_block(lower, tile_row, 2 * u + unit, cutlass.Float16, values)

    @cute.jit
    def next_block(self, left, lower, columns, reference, row_decay, matrix_row, unit, u: cutlass.Constexpr):
        """Block u of the warp's row of A, to `left`, from those right of it; returns it with decays, as M has it."""
        sums = [(Float32(0.0),) * 4, (Float32(0.0),) * 4]
        for x in cutlass.range_constexpr(u + 1, 4):
            b = ptx.load_matrices(layouts.address(lower, x * BLOCK + matrix_row, 2 * u + unit), True)
            operand = [left[4 * x + i] for i in range(4)]
            sums[0] = ptx.multiply_small(cutlass.Float16, sums[0], operand, b[0], b[1])
            sums[1] = ptx.multiply_small(cutlass.Float16, sums[1], operand, b[2], b[3])
        operand = self.half_words([*sums[0], *sums[1]])
        d = ptx.load_matrices(layouts.address(lower, u * BLOCK + matrix_row, 2 * u + unit), True)
        zero = (Float32(0.0),) * 4
        product0 = ptx.multiply_small(cutlass.Float16, zero, operand, d[0], d[1])
        product1 = ptx.multiply_small(cutlass.Float16, zero, operand, d[2], d[3])
        products = [*product0, *product1]
        words = self.half_words(products)
        for i in cutlass.range_constexpr(4):
            left[4 * u + i] = words[i]
        values = [None] * 8
        for m in cutlass.range_constexpr(2):
            cums = ptx.load_pair(columns + CUM * CHUNK * 4 + (2 * u + m) * 32)
            for odd in cutlass.range_constexpr(2):
                column_part = ptx.exp2(reference - cums[odd])
                for side in cutlass.range_constexpr(2):
                    place = 4 * m + 2 * side + odd
                    values[place] = products[place] * (column_part * row_decay[side])
        return values

    def decayed_diagonal(self, inverse: Any, columns: Any, row_cum: Any, keeps: Any, warp: Any) -> list[Any]:
        """The warp's diagonal block of A with decays; keeps: of a square on the diagonal, what is not zeroed."""
        values = [None] * 8
        for m in range(2):
            cums = ptx.load_pair(columns + CUM * CHUNK * 4 + warp * 64 + m * 32)
            for i in range(4):
                gap = self.gap(row_cum, cums, keeps, m, i)
                values[4 * m + i] = inverse[4 * m + i] * gap
        return values

    def row_decays(self, rows: Any, row_cum: Any, warp: Any) -> tuple[Any, Any]:
        """Left of the diagonal block exp(c_i - c_j) is a product of two decays, both at most 1: from the row down to the last
        token before the block, and from there to the column. Returns c there and the decays of this lane's two rows."""
        reference = ptx.load_one(rows + CUM * CHUNK * 4 + cutlass.max(warp * 16 - 1, 0) * 4)
        return reference, (ptx.exp2(row_cum[0] - reference), ptx.exp2(row_cum[1] - reference))

    def gap(self, row_cum: Any, cums: Any, keeps: Any, m: int, i: int) -> Any:
        """exp(c_i - c_j) in the diagonal block, 0 above the diagonal, for value i of its columns 8 m .."""
        side, odd = i // 2, i % 2
        if m == 1 and side == 0:
            return Float32(0.0)
        gap = ptx.exp2(row_cum[side] - cums[odd])
        return self.where(keeps[odd], gap, Float32(0.0)) if m == side else gap

    @cute.jit
    def store_blocks(self, tile, tile_row, unit, warp, words):
        """A warp's blocks: number u of words is column block u, the last one the diagonal block."""
        for u in cutlass.range_constexpr(3):
            if u < warp:
                ptx.store_matrices(layouts.address(tile, tile_row, 2 * u + unit), [words[4 * u + i] for i in range(4)], False)
        ptx.store_matrices(layouts.address(tile, tile_row, 2 * warp + unit), [words[12 + i] for i in range(4)], False)

    @cute.jit
    def zero_keys(self, tile, valid, thread):
        """Rows of K from valid on."""
        for i in cutlass.range(cutlass.max(valid, 0) * 8 + thread, CHUNK * 8, WARPGROUP, unroll=1):
            for part in cutlass.range_constexpr(self.dim // 64):
                ptx.store_zeros(tile + part * TILE_BYTES + i * 16)

    @cute.jit
    def diagonal_block(self, sums, diagonal, warp):
        """The warp's 16 x 16 block on the diagonal out of its 16 rows."""
        for w in cutlass.range_constexpr(4):
            if warp == w:
                for i in cutlass.range_constexpr(8):
                    diagonal[i] = sums[8 * w + i]

    def store_block(self, tile: Any, tile_row: Any, unit: Any, dtype: Any, values: Any) -> None:
        """A 16 x 16 block of the warp's rows, rounded."""
        words = [ptx.pack(dtype, values[2 * i], values[2 * i + 1]) for i in range(4)]
        ptx.store_matrices(layouts.address(tile, tile_row, unit), words, False)

    def keep_block(self, words: Any, u: int, values: Any) -> None:
        """A 16 x 16 block, rounded, as number u of words."""
        for i in range(4):
            words[4 * u + i] = ptx.pack(self.dtype, values[2 * i], values[2 * i + 1])

    def half_words(self, values: Any) -> list[Any]:
        return [ptx.pack(cutlass.Float16, values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]

    def sync_inverse(self) -> None:
        cute.arch.barrier(barrier_id=INVERSE_BARRIER, number_of_threads=WARPGROUP)

    def load_rows(self, tile: Any, words: Any, tile_row: Any, unit: Any) -> None:
        """The warp's 16 rows of Q or K as an operand in registers."""
        for step in range(self.dim // 16):
            loaded = ptx.load_matrices(layouts.address(tile + step // 4 * TILE_BYTES, tile_row, step % 4 * 2 + unit), False)
            for i in range(4):
                words[4 * step + i] = loaded[i]

    def query_factors(self, words: Any, scale: Any) -> tuple[Any, Any]:
        """scale / |q| of this lane's two rows, whose columns four lanes share."""
        if not self.normalize:
            return scale, scale
        first, second = self.query_squares(words)
        return cute.math.rsqrt(first + NORM_EPS) * scale, cute.math.rsqrt(second + NORM_EPS) * scale

    def query_squares(self, words: Any) -> list[Any]:
        """|q|^2 of this lane's two rows: from the diagonals of the products of the warp's rows with the first and the last eight
        of them, an eighth of the instructions that single elements take."""
        lane = cute.arch.lane_idx()
        row = lane // 4
        holder = row * 4 + row // 2  # of the four lanes of a row
        squares = []
        for side in range(2):
            sums = (Float32(0.0),) * 4
            for step in range(self.dim // 16):
                operand = [words[4 * step + i] for i in range(4)]
                sums = ptx.multiply_small(self.dtype, sums, operand, operand[side], operand[side + 2])
            own = self.where(row % 2 == 1, sums[2 * side + 1], sums[2 * side])
            squares.append(cute.arch.shuffle_sync(own, holder))
        return squares

    @cute.jit
    def key_factors(self, diagonal, rows, row, pair, row0):
        """1 / |k| from the diagonal of K K^T, by the lanes that hold it; and that times beta, where beta was."""
        first, second = Float32(1.0), Float32(1.0)
        if cutlass.const_expr(self.normalize):
            first = cute.math.rsqrt(self.where(row % 2 == 1, diagonal[1], diagonal[0]) + NORM_EPS)
            second = cute.math.rsqrt(self.where(row % 2 == 1, diagonal[7], diagonal[6]) + NORM_EPS)
        if pair == row // 2:
            place = rows + KEY_FACTOR * CHUNK * 4 + row0 * 4
            ptx.store_one(place, first)
            ptx.store_one(place + 32, second)
            betas = self.row_values(rows, KEY_BETA, row0)
            place = rows + KEY_BETA * CHUNK * 4 + row0 * 4
            ptx.store_one(place, first * betas[0])
            ptx.store_one(place + 32, second * betas[1])

    @cute.jit
    def invert_block(
        self, diagonal, inverse, row_scale, columns, lower, scratch, tile_row, unit, warp, lane_column, lane, row, pair
    ):
        """The warp's diagonal block of (I + L)^-1; to `inverse` and, in float16, to `lower`. diagonal: of K K^T; columns: of the
        block's rows of factors. With the block as [[B, 0], [N, C]], both halves by forward substitution in float32, a lane per
        column, side by side; then -C^-1 N B^-1 as two products of float16."""
        below = [None] * 2
        for m in cutlass.range_constexpr(2):
            keys_of = ptx.load_pair(columns + KEY_BETA * CHUNK * 4 + m * 32)
            for odd in cutlass.range_constexpr(2):
                # What lies above the diagonal is stored with the rest, and never read.
                place = scratch + (8 * m + 2 * pair + odd) * COLUMN_PITCH + (row + 8 * m) * 4
                ptx.store_one(place, diagonal[6 * m + odd] * (row_scale[m] * keys_of[odd]))
                if cutlass.const_expr(m == 0):
                    below[odd] = diagonal[2 + odd] * (row_scale[1] * keys_of[odd])
        cute.arch.sync_warp()
        half = lane // HALF % 2
        x = cute.make_rmem_tensor(cute.make_layout(HALF), Float32)
        for i in cutlass.range_constexpr(HALF):
            x[i] = ptx.is_equal(lane_column, Float32(i))
        first_column = scratch + half * (HALF * COLUMN_PITCH + HALF * 4)
        for step in cutlass.range_constexpr(HALF - 1):
            for part in cutlass.range_constexpr((step + 1) // 4, HALF // 4):
                factors = ptx.load_four(first_column + step * COLUMN_PITCH + part * 16)
                for i in cutlass.range_constexpr(4):
                    if cutlass.const_expr(4 * part + i > step):
                        x[4 * part + i] = x[4 * part + i] + factors[i] * x[step]
        cute.arch.sync_warp()
        if lane < BLOCK:
            for i in cutlass.range_constexpr(HALF):
                ptx.store_one(scratch + (HALF * half + i) * ROW_PITCH + lane * 4, x[i])
        cute.arch.sync_warp()
        upper = ptx.load_pair(scratch + row * ROW_PITCH + 2 * pair * 4)
        last = ptx.load_pair(scratch + (row + HALF) * ROW_PITCH + (HALF + 2 * pair) * 4)
        upper_words, below_words = self.half_words(upper), self.half_words(below)
        none, zero = Int32(0), (Float32(0.0),) * 4
        operand = [upper_words[0], none, none, self.half_words(last)[0]]
        product = ptx.multiply_small(cutlass.Float16, zero, operand, none, ptx.transpose(below_words[0]))
        operand = [none, self.half_words(product)[1], none, none]
        product = ptx.multiply_small(cutlass.Float16, zero, operand, ptx.transpose(upper_words[0]), none)
        values = [upper[0], upper[1], product[2], product[3], Float32(0.0), Float32(0.0), last[0], last[1]]
        for i in cutlass.range_constexpr(8):
            inverse[i] = values[i]
        self.store_block(lower, tile_row, 2 * warp + unit, cutlass.Float16, inverse)
        cute.arch.sync_warp()  # the next chunk's stores into scratch come after these loads

    @cute.jit
    def publish_vectors(self, vectors, rows, thread):
        cum = ptx.load_one(rows + CUM * CHUNK * 4 + thread * 4)
        total = ptx.load_one(rows + CUM * CHUNK * 4 + (CHUNK - 1) * 4)
        key = ptx.load_one(rows + KEY_FACTOR * CHUNK * 4 + thread * 4)
        key_beta = ptx.load_one(rows + KEY_BETA * CHUNK * 4 + thread * 4)
        query = ptx.load_one(rows + QUERY_FACTOR * CHUNK * 4 + thread * 4)
        grown = cute.math.exp2(cum, fastmath=True)
        ptx.store_one(vectors + STATE_KEY * CHUNK * 4 + thread * 4, grown * key)
        ptx.store_one(vectors + KEY_TO_LAST * CHUNK * 4 + thread * 4, self.decay(total - cum) * key_beta)
        ptx.store_one(vectors + STATE_QUERY * CHUNK * 4 + thread * 4, grown * query)
        if thread == 0:
            ptx.store_one(vectors + VECTORS * CHUNK * 4, cute.math.exp2(total, fastmath=True))
