"""The warps of the fused chunk kernel that move data: K, Q, V in, gates, O out, and tiles to the other block of a pair.

The barriers and who waits for whom stand in `_chunk_fused`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels_cute.chunk import layouts
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    CHUNK,
    CUM,
    KEY_BETA,
    LOG2E,
    LOWEST_LOG_DECAY,
    SOFTPLUS_THRESHOLD,
    TILE_BYTES,
    VECTOR_BYTES,
)
from kernels_cute.common import ptx


class CopyRoles:
    """Methods of the copying warpgroup's warps; `self` is the FusedChunk."""

    @cute.jit
    def copy_warp(self, storage, copies, item, base):
        begin, length, head, piece = item.begin, item.live_length, item.head, item.piece
        to_q, from_q = self.tiles(storage.q, copies.q_atom, copies.q, self.dim, self.stages, begin, head // self.q_group, 0)
        to_k, from_k = self.tiles(storage.k, copies.k_atom, copies.k, self.dim, self.key_stages, begin, head // self.k_group, 0)
        v_head = head // self.v_group
        to_v, from_v = self.tiles(storage.v, copies.v_atom, copies.v, self.columns, self.stages, begin, v_head, piece)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        num_chunks = (length + (CHUNK - 1)) // CHUNK
        if num_chunks > 0:
            self.copy_keys(storage, copies.k_atom, from_k, to_k, Int32(0), base)
        for step in cutlass.range(num_chunks, unroll=1):
            if step + 1 < num_chunks:
                self.copy_keys(storage, copies.k_atom, from_k, to_k, step + 1, base)
            stage, parity = self.stage_of(base + step)
            cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.key_bytes + self.value_bytes)
            cute.copy(copies.q_atom, from_q[None, step], to_q[None, stage], tma_bar_ptr=full + stage)
            cute.copy(copies.v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
            if cutlass.const_expr(self.prefetch > 0):
                if step + self.prefetch < num_chunks:
                    cute.prefetch(copies.k_atom, from_k[None, step + self.prefetch])
                    cute.prefetch(copies.q_atom, from_q[None, step + self.prefetch])
                    cute.prefetch(copies.v_atom, from_v[None, step + self.prefetch])

    @cute.jit
    def copy_keys(self, storage, k_atom, from_k, to_k, step, base):
        stage, parity = self.key_stage_of(base + step)
        full = storage.keys_full.data_ptr() + stage
        cute.arch.mbarrier_wait(storage.keys_empty.data_ptr() + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.key_bytes)
        cute.copy(k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full)

    @cute.jit
    def prefetch_state(self, initial_state, item):
        """Asks the L2 cache for the state that an item starts from."""
        if cutlass.const_expr(self.has_initial):
            if item.starts:
                size = initial_state.element_type.width // 8
                # Lines of 128 bytes: all of 64 V rows, or 64 columns of every K row.
                pitch = self.dim * size
                lines = (self.dim if self.v_first else 64) * size // 128
                rows = 64 if self.v_first else self.dim
                row0, column0 = (item.piece * 64, Int32(0)) if self.v_first else (Int32(0), item.piece * 64)
                offset = item.read_slot * initial_state.stride[0] + Int64(item.head) * (self.dim * self.dim)
                first = (initial_state.iterator + offset).toint() + Int64(row0 * pitch + column0 * size)
                for i in cutlass.range(cute.arch.lane_idx(), rows * lines, 32, unroll=1):
                    ptx.prefetch_line(first + Int64(i // lines * pitch + i % lines * 128))

    @cute.jit
    def tiles(self, field, atom, tensor, columns: cutlass.Constexpr, stages: cutlass.Constexpr, begin, head, piece):
        """Shared and global sides of a tensor's tiles: (copy, stage) and (copy, chunk of the sequence)."""
        layout = layouts.by_rows(self.dtype, CHUNK, columns, stages)
        shared = field.get_tensor(layout.outer, swizzle=layout.inner)
        rows = cute.domain_offset((begin, 0), tensor[None, None, head])
        chunks = cute.local_tile(rows, (CHUNK, columns), (None, piece))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(chunks, 0, 2))

    @cute.jit
    def store_warp(self, storage, copies, out, item, base):
        """Outputs from shared memory to their rows; then the stage is free, for everything else of it has been read."""
        begin, length, head, piece = item.begin, item.live_length, item.head, item.piece
        lane = cute.arch.lane_idx()
        layout = layouts.by_rows(self.dtype, CHUNK, 64, self.stages)
        shared = storage.v.get_tensor(layout.outer, swizzle=layout.inner)
        rows = cute.domain_offset((begin, 0), copies.out[None, None, head])
        source, target = cpasync.tma_partition(
            copies.out_atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
            cute.group_modes(cute.local_tile(rows, (CHUNK, 64), (None, None)), 0, 2),
        )  # fmt: skip
        for step in cutlass.range((length + (CHUNK - 1)) // CHUNK, unroll=1):
            stage, parity = self.stage_of(base + step)
            cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, parity)
            # Here, not in the warps that wrote O: they would wait for it.
            cute.arch.fence_proxy("async.shared", space="cta")
            valid = length - step * CHUNK
            if valid >= CHUNK:
                cute.copy(copies.out_atom, source[None, stage], target[None, step, piece])
            else:
                tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
                column = piece * self.columns + lane % 8 * 8
                for row in cutlass.range(lane // 8, valid, 4, unroll=1):
                    offset = Int64(begin + step * CHUNK + row) * out.stride[0] + Int64(head) * out.stride[1] + column
                    words = ptx.load_words(layouts.address(tile, row, lane % 8))
                    ptx.store_global_words(out.iterator.toint() + 2 * offset, words)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.empty.data_ptr() + stage)

    @cute.jit
    def zero_rows(self, out, begin, length, live_length, head, column0, warp, lane):
        """Rows of a padding sequence."""
        row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
        zero = [Int32(0)] * 4
        for i in cutlass.range(live_length + row, length, 16, unroll=1):
            offset = Int64(begin + i) * out.stride[0] + Int64(head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)

    @cute.jit
    def zero_rows_beyond(self, out, end, sequences, sequence, head, column0, warp, lane):
        """A sequence's share of the rows from `end` on, which are beyond the last sequence."""
        row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
        zero = [Int32(0)] * 4
        for i in cutlass.range(end + sequence * 16 + row, cute.size(out, mode=[0]), sequences * 16, unroll=1):
            offset = Int64(i) * out.stride[0] + Int64(head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)

    @cute.jit
    def hand_over_warp(self, storage, length, rank, first, base=0):
        """M, P and the vectors of this block's chunks to the other block of the pair."""
        other = rank ^ 1
        own = storage.ready.data_ptr() + rank
        barrier = ptx.in_block(storage.ready.data_ptr().toint() + rank * 8, other)
        for step in cutlass.range(first, (length + (CHUNK - 1)) // CHUNK, 2, unroll=1):
            cute.arch.mbarrier_wait(own, (base + step) >> 1 & 1)
            with cute.arch.elect_one():
                ptx.expect_in_cluster(barrier, Int32(2 * TILE_BYTES + VECTOR_BYTES))
                for field, size in ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES), (storage.p, TILE_BYTES)):
                    source = field.data_ptr().toint() + rank * size
                    ptx.copy_in_cluster(ptx.in_block(source, other), source, Int32(size), barrier)

    @cute.jit
    def gate_warp(self, storage, params, begin, length, head, first, base=0, asked=None):
        """Cumulative log2 decays and beta of the chunks that this block prepares; asked: the first one's, if on their way.
        They are made, and the next chunk's asked for, before there is room for them."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(asked is None):
            asked = self.ask_item(params, begin, first, length, head, lane)
        words, log_rate, bias = asked
        minus_rate = self.minus_rate(log_rate)
        gates_full, gates_free = storage.gates_full.data_ptr(), storage.gates_free.data_ptr()
        for step in cutlass.range(first, (length + (CHUNK - 1)) // CHUNK, self.aux_step, unroll=1):
            half, half_turn = self.half_of(base + step)
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            values = self.make_gates(params, words, minus_rate, bias, length - step * CHUNK, lane)
            self.ask_gates(params, words, begin, (step + self.aux_step) * CHUNK, length, head, lane)
            cute.arch.mbarrier_wait(gates_free + half, half_turn ^ 1)
            self.publish_gates(rows, values, lane)
            cute.arch.mbarrier_arrive(gates_full + half)

    @cute.jit
    def ask_item(self, params, begin, first, length, head, lane):
        """ask_gates of an item's first chunk, and its head's constants: (words, A_log, dt_bias)."""
        words = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        self.ask_gates(params, words, begin, first * CHUNK, length, head, lane)
        rate, bias = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(self.raw_gate):
            rate, bias = params.A_log[head], params.dt_bias[head]
        return words, rate, bias

    @cute.jit
    def minus_rate(self, log_rate):
        """-exp(A_log), which softplus is multiplied with."""
        rate = log_rate
        if cutlass.const_expr(self.raw_gate):
            rate = -cute.math.exp(log_rate)
        return rate

    # What is asked for stays as it lies in memory until it is used: a conversion, or a branch around the load, would
    # have the warp wait for one answer of the memory after the other.
    @cute.jit
    def ask_gates(self, params, words, begin, offset, length, head, lane):
        """Lane l asks for tokens 2 l and 2 l + 1 of the chunk: g, then beta; 0 past the end."""
        for i in cutlass.range_constexpr(2):
            token = offset + 2 * lane + i
            if cutlass.const_expr(self.has_gate):
                words[i] = self.ask_element(params.g, begin + token, head, length - token)
            if cutlass.const_expr(self.has_beta):
                words[2 + i] = self.ask_element(params.beta, begin + token, head, length - token)

    @cute.jit
    def ask_element(self, x, token, head, positive):
        offset = Int64(token) * x.stride[0] + Int64(head) * x.stride[1]
        size = x.element_type.width // 8
        return ptx.load_global_if(x.iterator.toint() + offset * size, size, positive)

    @cute.jit
    def make_gates(self, params, words, minus_rate, bias, valid, lane):
        """Cumulative log2 decays and beta of a lane's two tokens; those past the end have g = 0 and beta = 0."""
        logs = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        strengths = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        for i in cutlass.range_constexpr(2):
            log_decay = Float32(0.0)
            if cutlass.const_expr(self.has_gate):
                log_decay = ptx.number(params.g.element_type, words[i])
            if cutlass.const_expr(self.raw_gate):
                raw = log_decay + bias
                softplus = raw
                if raw <= SOFTPLUS_THRESHOLD:
                    softplus = cute.math.log1p(cute.math.exp(raw))
                log_decay = minus_rate * softplus
            strength = Float32(1.0)
            if cutlass.const_expr(self.has_beta):
                strength = ptx.number(params.beta.element_type, words[2 + i])
                if cutlass.const_expr(self.raw_beta):
                    strength = 1.0 / (1.0 + cute.math.exp(-strength))
            if 2 * lane + i >= valid:
                log_decay, strength = Float32(0.0), Float32(0.0)
            # A NaN gate stays NaN.
            if log_decay < LOWEST_LOG_DECAY:
                log_decay = Float32(LOWEST_LOG_DECAY)
            logs[i] = log_decay * LOG2E
            strengths[i] = strength
        total = logs[0] + logs[1]
        for power in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(total, 1 << power, mask_and_clamp=0)
            if lane >= 1 << power:
                total = total + before
        before = cute.arch.shuffle_sync_up(total, 1, mask_and_clamp=0)
        if lane == 0:
            before = Float32(0.0)
        first = before + logs[0]
        return first, first + logs[1], strengths[0], strengths[1]

    @cute.jit
    def publish_gates(self, rows, values, lane):
        ptx.store_pair(rows + CUM * CHUNK * 4 + lane * 8, values[0], values[1])
        ptx.store_pair(rows + KEY_BETA * CHUNK * 4 + lane * 8, values[2], values[3])
