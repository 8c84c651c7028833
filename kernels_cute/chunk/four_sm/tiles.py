"""The inverse and score roles of a maker block of the wide chunk kernel: Z, P M and the row vectors of a chunk.

The maths, the barriers and who waits for whom stand in `_chunk_wide`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.four_sm.shape import (
    KEY_BYTES,
    KEY_STAGES,
    MAKERS,
    ROUND,
    SETS,
    WIDE_INVERSE_BARRIER,
    WIDE_SCORE_BARRIER,
)
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    CHUNK,
    CUM,
    HALF,
    KEY_BETA,
    KEY_FACTOR,
    QUERY_FACTOR,
    SCRATCH_BYTES,
    TILE_BYTES,
    VECTOR_BYTES,
    WARPGROUP,
)
from kernels_cute.common import ptx


class MakerRoles:
    """Methods of a set's inverse and score warpgroups; `self` is a WideBlock, `number` the maker's, `group` the set's."""

    @cute.jit
    def wide_inverse_warpgroup(self, storage, length, number, group, warp):
        """M of a set's chunks, as TileRoles.inverse_warpgroup makes it but with the diagonal, to `plain`; and with rows decayed
        to the last token and scaled by norms and beta, in parts, to `m`."""
        lane = cute.arch.lane_idx()
        thread = warp * 32 + lane
        row, pair = lane // 4, lane % 4
        mma = self.product(CHUNK, True)
        keys = self.right(mma, storage.k, layouts.by_rows(self.dtype, CHUNK, self.dim, SETS * KEY_STAGES))
        left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, self.dim)), self.dtype)
        left_words = cute.recast_tensor(left_operand, Int32)
        kk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
        diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        inverse = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
        k_base = storage.k.data_ptr().toint()
        lower = storage.lower.data_ptr().toint() + group * TILE_BYTES
        plain = storage.plain.data_ptr().toint() + group * TILE_BYTES
        m_tile = storage.m.data_ptr().toint() + group * (self.parts * TILE_BYTES)
        scratch = storage.scratch.data_ptr().toint() + (group * 4 + warp) * SCRATCH_BYTES
        # Where this lane points when its warp's 16 rows of a tile are moved as matrices, and when a block is an operand B.
        tile_row = warp * 16 + lane % 16
        matrix_row = lane % 16
        unit = lane // 16
        lane_column = Float32(lane % HALF)
        keeps_diagonal = (row >= 2 * pair, row >= 2 * pair + 1)
        row0 = warp * 16 + row
        first = number + group * MAKERS

        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(first, num_chunks, ROUND, unroll=1):
            turn = step // ROUND
            stage, parity = group * KEY_STAGES + turn % KEY_STAGES, turn // KEY_STAGES & 1
            half, half_turn = group * 2 + turn % 2, turn // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            columns = rows + pair * 8
            valid = length - step * CHUNK
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + stage, parity)
            if valid < CHUNK:
                # The tile ends with the next sequence's keys, NaN perhaps, and 0 * NaN in Z is NaN.
                self.zero_keys(k_base + stage * KEY_BYTES, valid, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                self.sync_wide(WIDE_INVERSE_BARRIER, group)
            # The left operand in registers: both from shared memory would take all of its bandwidth.
            self.load_rows(k_base + stage * KEY_BYTES, left_words, tile_row, unit)
            warpgroup.fence()
            self.multiply(mma, kk, left_operand, keys[None, None, None, stage], True)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
            warpgroup.wait_group(0)
            self.diagonal_block(kk, diagonal, warp)
            self.key_factors(diagonal, rows, row, pair, row0)
            cute.arch.mbarrier_arrive(storage.factors_full.data_ptr() + half)
            self.sync_wide(WIDE_INVERSE_BARRIER, group)

            # L, negated: the diagonal block in float32, what lies left of it in float16 for the products.
            row_cum = self.row_values(rows, CUM, row0)
            row_key = self.row_values(rows, KEY_FACTOR, row0)
            row_scale = (-row_key[0], -row_key[1])
            self.store_lower(kk, lower, columns, row_scale, tile_row, unit, warp)
            self.invert_block(diagonal, inverse, row_scale, columns + warp * 64, lower, scratch, tile_row, unit, warp,
                              lane_column, lane, row, pair)  # fmt: skip

            # M: the diagonal block first, then, with every warp's L and inverted blocks in place, leftwards:
            # A_wu = -(sum over u < x <= w of A_wx L_xu) A_uu. Score took the last M long ago.
            left.fill(0)
            words = self.half_words([inverse[i] for i in range(8)])
            for w in cutlass.range_constexpr(1, 4):
                if warp == w:
                    for i in cutlass.range_constexpr(4):
                        left[4 * w + i] = words[i]
            self.sync_wide(WIDE_INVERSE_BARRIER, group)
            cute.arch.mbarrier_wait(storage.m_free.data_ptr() + group, turn & 1 ^ 1)
            values = self.decayed_diagonal(inverse, columns, row_cum, keeps_diagonal, warp)
            total = ptx.load_one(rows + CUM * CHUNK * 4 + (CHUNK - 1) * 4)
            row_key_beta = self.row_values(rows, KEY_BETA, row0)
            to_last = [self.decay(total - row_cum[side]) * row_key_beta[side] for side in range(2)]
            self.store_m(plain, m_tile, tile_row, 2 * warp + unit, values, to_last)
            reference, row_decay = self.row_decays(rows, row_cum, warp)
            for back in cutlass.range_constexpr(3):
                u = 2 - back
                if u < warp:
                    values = self.next_block(left, lower, columns, reference, row_decay, matrix_row, unit, u)
                    self.store_m(plain, m_tile, tile_row, 2 * u + unit, values, to_last)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(storage.m_full.data_ptr() + group)

    def store_m(self, plain: Any, m_tile: Any, tile_row: Any, unit: Any, values: Any, to_last: Any) -> None:
        """A block of M, as it is, and scaled, in parts: the second is what rounding took away from the first."""
        self.store_block(plain, tile_row, unit, self.dtype, values)
        scaled = [values[i] * to_last[i // 2 % 2] for i in range(8)]
        place = layouts.address(m_tile, tile_row, unit)
        words = [ptx.pack(self.dtype, scaled[2 * i], scaled[2 * i + 1]) for i in range(4)]
        ptx.store_matrices(place, words, False)
        if self.parts == 2:
            rests = []
            for i in range(4):
                low, high = ptx.unpack(self.dtype, words[i])
                rests.append(ptx.pack(self.dtype, scaled[2 * i] - low, scaled[2 * i + 1] - high))
            ptx.store_matrices(place + TILE_BYTES, rests, False)

    @cute.jit
    def wide_score_warpgroup(self, storage, scale, length, number, group, warp):
        """P of the same chunks, rows and blocks as the set's inverse warpgroup's; then P M, Z and the vectors."""
        lane = cute.arch.lane_idx()
        thread = warp * 32 + lane
        row, pair = lane // 4, lane % 4
        mma = self.product(CHUNK, True)
        keys = self.right(mma, storage.k, layouts.by_rows(self.dtype, CHUNK, self.dim, SETS * KEY_STAGES))
        left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, self.dim)), self.dtype)
        left_words = cute.recast_tensor(left_operand, Int32)
        qk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
        diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        p_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
        q_base = storage.q.data_ptr().toint() + group * KEY_BYTES
        tile_row = warp * 16 + lane % 16
        unit = lane // 16
        keeps_diagonal = (row >= 2 * pair, row >= 2 * pair + 1)
        row0 = warp * 16 + row
        first = number + group * MAKERS

        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(first, num_chunks, ROUND, unroll=1):
            turn = step // ROUND
            stage, parity = group * KEY_STAGES + turn % KEY_STAGES, turn // KEY_STAGES & 1
            half, half_turn = group * 2 + turn % 2, turn // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            columns = rows + pair * 8
            cute.arch.mbarrier_wait(storage.q_full.data_ptr() + group, turn & 1)
            self.load_rows(q_base, left_words, tile_row, unit)
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + stage, parity)
            warpgroup.fence()
            # Rows of K past the end may be anything here: right of the diagonal, or in rows past the end.
            self.multiply(mma, qk, left_operand, keys[None, None, None, stage], True)
            warpgroup.commit_group()
            row_query = self.query_factors(left_words, scale)
            cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
            if pair == 0:
                ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4, row_query[0])
                ptx.store_one(rows + QUERY_FACTOR * CHUNK * 4 + row0 * 4 + 32, row_query[1])
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + group)
            self.sync_wide(WIDE_SCORE_BARRIER, group)
            cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)

            self.make_p(qk, diagonal, p_words, rows, columns, row_query, keeps_diagonal, row0, warp)
            self.wide_fold(storage, p_words, stage, group, turn & 1, tile_row, unit, warp, lane)
            if thread < CHUNK:
                self.publish_vectors(storage.vectors.data_ptr().toint() + group * VECTOR_BYTES, rows, thread)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
                cute.arch.mbarrier_arrive(storage.k_empty.data_ptr() + stage)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(storage.made.data_ptr() + group)

    def query_squares(self, words: Any) -> list[Any]:
        """As TileRoles has it, but by single elements: this warpgroup has no registers for more products."""
        squares = []
        for side in range(2):
            sums = [Float32(0.0)] * 2
            for step in range(self.dim // 16):
                for part in range(2):
                    low, high = ptx.unpack(self.dtype, words[4 * step + side + 2 * part])
                    sums[part] = sums[part] + low * low
                    sums[part] = sums[part] + high * high
            total = sums[0] + sums[1]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            squares.append(total + cute.arch.shuffle_sync_bfly(total, 2))
        return squares

    @cute.jit
    def wide_fold(self, storage, p_words, stage, group, parity, tile_row, unit, warp, lane):
        """Z = (M exp(c_last - c) f beta)^T K and P M, with M from the inverse warpgroup: what the state is multiplied with."""
        pieces = self.dim // 64
        mma = self.product(64, True, True)
        keys = self.right(mma, storage.k, layouts.by_columns(self.dtype, CHUNK, 64, pieces * SETS * KEY_STAGES))
        plain = self.right(mma, storage.plain, layouts.by_columns(self.dtype, CHUNK, CHUNK, SETS))
        left = cute.make_rmem_tensor(mma.partition_shape_A((64, CHUNK * self.parts)), self.dtype)
        p_left = cute.make_rmem_tensor(mma.partition_shape_A((64, CHUNK)), self.dtype)
        sums = cute.make_rmem_tensor(mma.partition_shape_C((64, 64)), Float32)
        words, p_left_words = cute.recast_tensor(left, Int32), cute.recast_tensor(p_left, Int32)
        for x in cutlass.range_constexpr(4):
            for i in cutlass.range_constexpr(4):
                p_left_words[4 * x + i] = Int32(0)
                if warp == x:
                    p_left_words[4 * x + i] = p_words[12 + i]
                if cutlass.const_expr(x < 3):
                    if warp > x:
                        p_left_words[4 * x + i] = p_words[4 * x + i]
        cute.arch.mbarrier_wait(storage.m_full.data_ptr() + group, parity)
        warpgroup.fence()
        self.multiply(mma, sums, p_left, plain[None, None, None, group], True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        m_base = storage.m.data_ptr().toint() + group * (self.parts * TILE_BYTES)
        m_lane = layouts.address(m_base, lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2)
        for part in cutlass.range_constexpr(self.parts):
            for x in cutlass.range_constexpr(4):
                loaded = ptx.load_matrices(m_lane + (part * TILE_BYTES + x * 16 * layouts.ROW_BYTES), True)
                for i in cutlass.range_constexpr(4):
                    words[16 * part + 4 * x + i] = loaded[i]
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.m_free.data_ptr() + group)
        cute.arch.mbarrier_wait(storage.taken.data_ptr() + group, parity ^ 1)
        self.store_tile_rows(storage.p.data_ptr().toint() + group * TILE_BYTES, tile_row, unit, sums)
        for piece in cutlass.range_constexpr(pieces):
            warpgroup.fence()
            for part in cutlass.range_constexpr(self.parts):
                for step in cutlass.range_constexpr(4):
                    mma.set(warpgroup.Field.ACCUMULATE, step + part > 0)
                    right = keys[None, None, step, stage * pieces + piece]
                    cute.gemm(mma, sums, left[None, None, 4 * part + step], right, sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            place = storage.z.data_ptr().toint() + group * KEY_BYTES + piece * TILE_BYTES
            self.store_tile_rows(place, tile_row, unit, sums)

    def store_tile_rows(self, tile: Any, tile_row: Any, unit: Any, sums: Any) -> None:
        """The warp's 16 rows of a tile, rounded."""
        for x in range(4):
            self.store_block(tile, tile_row, 2 * x + unit, self.dtype, [sums[8 * x + i] for i in range(8)])

    def sync_wide(self, barrier: int, group: Any) -> None:
        cute.arch.barrier(barrier_id=barrier + group, number_of_threads=WARPGROUP)
