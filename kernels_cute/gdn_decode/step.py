"""The kernel of `gdn_decode`; see there, and NOTES.md for who reads and writes what when."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from gdn.problems import GdnDecodeProblem
from kernels_cute.common import decode_ptx as ptx
from kernels_cute.common.indices import narrowed
from kernels_cute.common.memory import CUTE_DTYPES, load, pointer, sigmoid, store
from kernels_cute.common.opaque import anew
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.state_sums import StateSums, carveout
from kernels_cute.common.state_tile import StateTile

CHANNELS = 4  # of the convolution, a thread: one 8-byte access of a row
WORDS = CHANNELS // 2  # of them in a row


class DecodeStep(StateTile, StateSums):
    """The kernel for one problem and configuration; attributes are compile-time constants.

    Shared memory: `tokens`, the current token's [q | k | v of the block's columns | decay, beta] in float32; `sums`, the
    sums of squares of o of every warp of the head, for even and odd tokens; `barriers`, which count the bytes of those.
    """

    def __init__(self, problem: GdnDecodeProblem, threads: int, lanes: int, rows: int, resident: int) -> None:
        super().__init__(
            problem.head_k_dim, problem.head_v_dim, problem.state_v_first, problem.state_dtype, threads, lanes, rows,
            problem.has_rounding,
        )  # fmt: skip
        self.min_blocks = resident // threads
        self.H, self.ratio = problem.num_k_heads, problem.num_v_heads // problem.num_k_heads
        self.columns = threads // lanes * rows  # of V, a block
        self.splits = self.V // self.columns  # blocks of a value head
        self.cluster = self.ratio * self.splits  # blocks of a key head and sequence
        self.warps = threads // 32
        self.parts = self.splits * self.warps  # of a sum over the head
        self.parity_bytes = -(-self.parts // 4) * 16  # sums of a token in shared memory, read four at a time
        self.history, self.taps = problem.width - 1, problem.width
        self.dtype = CUTE_DTYPES[problem.dtype]
        self.weight_dtype = CUTE_DTYPES[problem.weight_dtype]
        self.weight_words = CHANNELS * self.taps * self.weight_dtype.width // 32  # of an item
        self.copies_windows = problem.conv_channels_contiguous and problem.conv_dtype == problem.dtype
        self.interleaved, self.together = problem.interleaved, problem.conv_channels_contiguous
        self.group_width = 2 * self.K + 2 * self.ratio * self.V  # of an interleaved row, per key head
        self.has_bias, self.silu, self.gate_sigmoid = problem.bias_dtype is not None, problem.silu, problem.gate_sigmoid
        self.has_offsets, self.has_columns = problem.cu_seqlens_dtype is not None, problem.has_columns
        self.has_accepted = problem.has_accepted
        self.shared_items = 2 * self.K // CHANNELS  # of q and k: every block of the cluster computes them
        self.items = self.shared_items + self.columns // CHANNELS
        self.passes = -(-self.items // threads)
        self.gates_at = 2 * self.K + self.columns  # in `tokens`
        self.warp_parts = max(4, self.parts_floats(2 if self.has_offsets else 1))
        self.shared_bytes = 16 + 2 * self.parity_bytes + 4 * (self.gates_at + 4) + 4 * self.warp_parts

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        z: cute.Tensor,
        b: cute.Tensor,
        a: cute.Tensor,
        conv_state: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        norm_weight: cute.Tensor,
        pool: cute.Tensor,
        indices: cute.Tensor,
        accepted: cute.Tensor,
        offsets: cute.Tensor,
        rounding_seed: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        eps: Float32,
        null_slot: Int64,
        stream: CUstream,
    ):
        num_sequences = x.shape[0]
        if cutlass.const_expr(self.has_offsets):
            num_sequences = offsets.shape[0] - 1
        self.kernel(
            x, z, b, a, conv_state, weight, bias, A_log, dt_bias, norm_weight, pool, indices, accepted, offsets, rounding_seed,
            out, scale, eps, null_slot,
        ).launch(
            grid=[num_sequences * (self.H * self.cluster), 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            # Percent: a few KiB a block; without a value the DSL asks a device for its limit.
            preferred_smem_carveout=max(16, carveout(self.shared_bytes, self.min_blocks)) if self.k_warps > 1 else 16,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        gX: cute.Tensor,
        gZ: cute.Tensor,
        gB: cute.Tensor,
        gA: cute.Tensor,
        gWindows: cute.Tensor,
        gWeight: cute.Tensor,
        gBias: cute.Tensor,
        gALog: cute.Tensor,
        gDtBias: cute.Tensor,
        gNorm: cute.Tensor,
        gPool: cute.Tensor,
        gIndices: cute.Tensor,
        gAccepted: cute.Tensor,
        gOffsets: cute.Tensor,
        gSeed: cute.Tensor,
        gOut: cute.Tensor,
        scale: Float32,
        eps: Float32,
        null_slot: Int64,
    ):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        rank = block % self.cluster
        sequence = block // (self.cluster * self.H)
        key_head = block // self.cluster % self.H
        value_head = key_head * self.ratio + rank // self.splits
        lane, group = self.lane_and_group(thread)
        v_start = rank % self.splits * self.columns + group * self.rows

        # Everything that the slot depends on, at once.
        begin = Int32(sequence)
        count = Int32(1)
        if cutlass.const_expr(self.has_offsets):
            begin = Int32(gOffsets[sequence])
            count = Int32(gOffsets[sequence + 1]) - begin
        accepted = Int32(1)
        if cutlass.const_expr(self.has_accepted):
            accepted = gAccepted[sequence]
        lane_slot = Int32(0)  # with columns: of column `lane of the warp`; -1 is null: null_slot is never less
        if cutlass.const_expr(self.has_columns):
            lane_slot = narrowed(gIndices[sequence, cutlass.min(thread % 32, gIndices.shape[1] - 1)])
        else:
            lane_slot = narrowed(gIndices[sequence])
        seed = Int32(0)
        if cutlass.const_expr(self.rounds):
            seed = mixed_seed(gSeed)

        # The gates, while the index is under way: what a branch uses waits for all that is under way, later the state too.
        rGates = cute.make_rmem_tensor(2, Float32)  # raw a and b of the thread that makes the gates
        rGates.fill(0.0)
        minus_decay = Float32(0.0)
        dt_bias = Float32(0.0)
        if thread == self.threads - 1:
            minus_decay = gALog[value_head].to(Float32)
            dt_bias = gDtBias[value_head].to(Float32)
        if cutlass.const_expr(not self.has_offsets):
            self.load_gates(begin, thread, key_head, value_head, rank, gB, gA, rGates)

        # The slots to read, and the column at which the window starts. One that is null makes the sequence padding.
        read_slot = lane_slot
        window_slot = lane_slot
        column = Int32(0)
        is_live = count > 0
        if cutlass.const_expr(self.has_columns):
            column = accepted - 1
            is_live = is_live & (column >= 0) & (column < gIndices.shape[1]) & (column <= gWindows.shape[2] - self.history)
            if is_live:
                window_slot = cute.arch.shuffle_sync(lane_slot, 0)
                read_slot = self.slot_of(column, sequence, lane_slot, gIndices)
        is_live = is_live & (Int64(read_slot) > null_slot) & (Int64(window_slot) > null_slot)
        if is_live:
            self.run(
                sequence, begin, count, key_head, value_head, rank, thread, lane, v_start, read_slot, window_slot, lane_slot,
                column, seed, minus_decay, dt_bias, rGates, gX, gZ, gB, gA, gWindows, gWeight, gBias, gNorm, gPool, gIndices,
                gOut, scale, eps, null_slot,
            )  # fmt: skip
        else:
            for token in cutlass.range(begin, begin + count, unroll=1):
                self.store_out(token, value_head, lane, v_start, Float32(0.0), gOut)
        if cutlass.const_expr(self.has_offsets):
            # Rows beyond the last sequence are dealt to all blocks of the head.
            num_sequences = gOffsets.shape[0] - 1
            first = Int32(gOffsets[num_sequences]) + sequence
            for token in cutlass.range(first, gOut.shape[0], num_sequences, unroll=1):
                self.store_out(token, value_head, lane, v_start, Float32(0.0), gOut)

    @cute.jit
    def run(
        self, sequence, begin, count, key_head, value_head, rank, thread, lane, v_start, read_slot, window_slot, lane_slot,
        column, seed, minus_decay, dt_bias, rGates, gX, gZ, gB, gA, gWindows, gWeight, gBias, gNorm, gPool, gIndices, gOut,
        scale: Float32, eps: Float32, null_slot: Int64,
    ):  # fmt: skip
        """A sequence that is no padding: all blocks of a cluster come here, or none."""
        rows, entries = cutlass.const_expr(self.rows), cutlass.const_expr(self.entries)
        # Two 16-bit values a word: one by one they would take a register each.
        rWeight = cute.make_rmem_tensor(self.passes * self.weight_words, Int32)
        rBias = cute.make_rmem_tensor(self.passes * CHANNELS, Float32)
        rLine = cute.make_rmem_tensor(self.passes * self.taps * WORDS, Int32)
        rZ = cute.make_rmem_tensor(1, Float32)
        rState = cute.make_rmem_tensor(rows * entries, Float32)
        rBias.fill(0.0)
        rZ.fill(0.0)
        # The few bytes of the convolution before the many of the state: it is done while those are under way.
        self.load_windows(thread, key_head, value_head, rank, Int64(window_slot), column, gWindows, rLine)
        self.load_row(begin, thread, lane, key_head, value_head, rank, v_start, gX, gZ, rLine, rZ)
        self.load_filter(thread, key_head, value_head, rank, gWeight, gBias, rWeight, rBias)
        if cutlass.const_expr(self.has_offsets):
            self.load_gates(begin, thread, key_head, value_head, rank, gB, gA, rGates)
        norm_weight = Float32(0.0)
        if lane < self.rows:
            norm_weight = gNorm[v_start + lane].to(Float32)
        self.load_state(Int64(read_slot), value_head, lane, v_start, gPool, rState)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        tokens = storage.tokens.data_ptr().toint()
        sums = storage.sums.data_ptr().toint()
        warp_parts = Int32(0)
        if cutlass.const_expr(self.k_warps > 1):
            warp_parts = storage.warp_parts.data_ptr().toint()
        barriers = storage.barriers.data_ptr()
        if cutlass.const_expr(self.splits > 1):
            if thread == 0:
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init_fence()
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, 4 * self.parts)

        minus_decay = -cute.math.exp(minus_decay)
        rOut = cute.make_rmem_tensor(CHANNELS, Float32)
        if cutlass.const_expr(self.has_offsets):
            for step in cutlass.range(count, unroll=1):
                self.token(
                    step, sequence, begin, count, key_head, value_head, rank, thread, lane, v_start, read_slot, window_slot,
                    lane_slot, seed, minus_decay, dt_bias, norm_weight, gX, gZ, gB, gA, gWindows, gPool, gIndices, gOut, scale,
                    eps, null_slot, rWeight, rBias, rLine, rGates, rZ, rState, rOut, tokens, sums, barriers, warp_parts,
                )  # fmt: skip
        else:
            self.token(
                Int32(0), sequence, begin, count, key_head, value_head, rank, thread, lane, v_start, read_slot, window_slot,
                lane_slot, seed, minus_decay, dt_bias, norm_weight, gX, gZ, gB, gA, gWindows, gPool, gIndices, gOut, scale, eps,
                null_slot, rWeight, rBias, rLine, rGates, rZ, rState, rOut, tokens, sums, barriers, warp_parts,
            )  # fmt: skip
        if cutlass.const_expr(self.has_offsets):
            # With nothing live after the loop, its branch back is compiled in a form from which ptxas peels an iteration:
            # twice the code, and spills.
            cute.arch.inline_ptx("// {$r0} is used", read_only_args=[rState[0]])

    @cute.jit
    def token(
        self, step, sequence, begin, count, key_head, value_head, rank, thread, lane, v_start, read_slot, window_slot, lane_slot,
        seed, minus_decay, dt_bias, norm_weight, gX, gZ, gB, gA, gWindows, gPool, gIndices, gOut, scale: Float32, eps: Float32,
        null_slot: Int64, rWeight, rBias, rLine, rGates, rZ, rState, rOut, tokens, sums, barriers, warp_parts,
    ):  # fmt: skip
        """Token `step` of the sequence: rLine, rGates and rZ hold its inputs, afterwards those of the next one."""
        rows, entries, vec = cutlass.const_expr(self.rows), cutlass.const_expr(self.entries), cutlass.const_expr(self.vec)
        for p in cutlass.range_constexpr(self.passes):
            item = p * self.threads + thread
            self.convolve(p, rWeight, rBias, rLine, rOut)
            ptx.store_four(tokens + item * (4 * CHANNELS), [rOut[c] for c in range(CHANNELS)], self.items - item)
        if thread == self.threads - 1:
            ptx.store_one(tokens + 4 * self.gates_at, self.decay(rGates[0] + dt_bias, minus_decay))
            ptx.store_one(tokens + 4 * self.gates_at + 4, 1.0 / (1.0 + cute.math.exp(-rGates[1])))
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            # The windows of this block are read (its values have been used), and its barriers are set up.
            if step == 0:
                cute.arch.cluster_arrive_relaxed()
        alpha = ptx.load_one(tokens + 4 * self.gates_at)
        beta = ptx.load_one(tokens + 4 * self.gates_at + 4)
        rK = cute.make_rmem_tensor(entries, Float32)
        rU = cute.make_rmem_tensor(rows, Float32)
        rSums = cute.make_rmem_tensor(2 * rows + 3, Float32)  # S k, S q of every column; k q, k k, q q
        rSums.fill(0.0)
        for i in cutlass.range_constexpr(0, entries, 4):
            at = tokens + ((i // vec * self.lanes + lane) * vec + i % vec) * 4
            q_values = ptx.load_four(at)
            k_values = ptx.load_four(at + 4 * self.K)
            for e in cutlass.range_constexpr(4):
                q_value = q_values[e]
                k_value = k_values[e]
                rK[i + e] = k_value
                rSums[2 * rows] += q_value * k_value
                rSums[2 * rows + 1] += k_value * k_value
                rSums[2 * rows + 2] += q_value * q_value
                for r in cutlass.range_constexpr(rows):
                    s_value = rState[self.at(r, i + e)]
                    rSums[2 * r] += s_value * k_value
                    rSums[2 * r + 1] += s_value * q_value
        self.add_up(rSums, 2 * rows + 3, warp_parts, step % 2, False)

        k_factor = cute.math.rsqrt(rSums[2 * rows + 1] + 1e-6)
        q_factor = scale * cute.math.rsqrt(rSums[2 * rows + 2] + 1e-6)
        o_value = Float32(0.0)
        squares = Float32(0.0)
        for r in cutlass.range_constexpr(rows):
            v_value = ptx.load_one(tokens + (2 * self.K + r) * 4 + (v_start - rank % self.splits * self.columns) * 4)
            rU[r] = k_factor * (beta * (v_value - alpha * (k_factor * rSums[2 * r])))
            if cutlass.const_expr(self.k_warps == 1):
                o_row = q_factor * (alpha * rSums[2 * r + 1] + rU[r] * rSums[2 * rows])
                squares += o_row * o_row
                if lane == r:
                    o_value = o_row
        if cutlass.const_expr(self.k_warps > 1):
            o_value = q_factor * (alpha * rSums[1] + self.own_column(lane, rU) * rSums[2 * rows])
            squares = cutlass.select_(lane < rows, o_value * o_value, Float32(0.0))
            squares = cute.arch.warp_reduction_sum(squares)
        for bit in cutlass.range_constexpr(self.groups_per_warp.bit_length() - 1 if self.k_warps == 1 else 0):
            squares += cute.arch.shuffle_sync_bfly(squares, offset=self.group_step << bit)

        if cutlass.const_expr(self.cluster > 1):
            if step == 0:
                cute.arch.cluster_wait()
        parity = step % 2
        if cutlass.const_expr(self.splits > 1):
            own = (rank % self.splits * self.warps + thread // 32) * 4 + parity * self.parity_bytes
            target = rank // self.splits * self.splits + thread % self.splits
            ptx.send(
                ptx.in_block(sums + own, target),
                squares,
                ptx.in_block((barriers + parity).toint(), target),
                Int32(self.splits) - thread % 32,
            )
        else:
            if thread % 32 == 0:
                ptx.store_one(sums + thread // 32 * 4, squares)

        # While the sums are under way: the window's new columns, the next token's inputs, and the state.
        for p in cutlass.range_constexpr(self.passes):
            if cutlass.const_expr(self.has_columns):
                if step == 0:
                    for c in cutlass.range_constexpr(1, self.history):
                        self.store_column(
                            p, c, Int32(c - 1), thread, key_head, value_head, rank, Int64(window_slot), gWindows, rLine
                        )
                if self.history - 1 + step < gWindows.shape[2]:
                    self.store_column(
                        p, self.history, Int32(self.history - 1) + step, thread, key_head, value_head, rank,
                        Int64(window_slot), gWindows, rLine,
                    )  # fmt: skip
            for i in cutlass.range_constexpr(self.history * WORDS):
                place = cutlass.const_expr(p * self.taps * WORDS + i)
                rLine[place] = rLine[place + WORDS]
        gate = self.gate(rZ[0])
        if cutlass.const_expr(self.has_offsets):
            if step + 1 < count:
                token = begin + step + 1
                self.load_row(token, thread, lane, key_head, value_head, rank, v_start, gX, gZ, rLine, rZ)
                self.load_gates(token, thread, key_head, value_head, rank, gB, gA, rGates)
        for r in cutlass.range_constexpr(rows):
            for i in cutlass.range_constexpr(entries):
                rState[self.at(r, i)] = alpha * rState[self.at(r, i)] + rU[r] * rK[i]
        if cutlass.const_expr(self.has_columns):
            if step < gIndices.shape[1]:
                write_slot = Int64(self.slot_of(step, sequence, lane_slot, gIndices))
                if write_slot > null_slot:
                    self.store_state(write_slot, value_head, lane, v_start, self.width, gPool, rState, seed)
        else:
            if step + 1 == count:
                lane_after = self.after_tokens(lane)
                self.store_state(Int64(read_slot), value_head, lane_after, v_start, self.width, gPool, rState, seed)
                # rLine has moved on by a token: its first rows are the newest inputs.
                for p in cutlass.range_constexpr(self.passes):
                    for c in cutlass.range_constexpr(self.history):
                        self.store_column(p, c, Int32(c), thread, key_head, value_head, rank, Int64(window_slot), gWindows, rLine)

        total = Float32(0.0)
        if cutlass.const_expr(self.splits > 1):
            cute.arch.mbarrier_wait(barriers + parity, step // 2 % 2)
            if cutlass.const_expr(self.has_offsets):
                if thread == 0:  # for the token after the next one
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers + parity, 4 * self.parts)
            sums = sums + parity * self.parity_bytes
        else:
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(0, self.parts - 3, 4):
            four = ptx.load_four(sums + 4 * i)
            total += (four[0] + four[1]) + (four[2] + four[3])
        for i in cutlass.range_constexpr(self.parts // 4 * 4, self.parts):
            total += ptx.load_one(sums + 4 * i)
        inverse = cute.math.rsqrt(total * (1.0 / self.V) + eps)
        self.store_out(begin + step, value_head, lane, v_start, o_value * inverse * norm_weight * gate, gOut)

    def after_tokens(self, lane: Any) -> Any:
        """The lane, for a state that is stored once. Its noise takes the number of every element: made before the first token,
        those of a thread would take as many registers as its state."""
        return anew(lane) if self.rounds and self.has_offsets else lane

    def storage_type(self) -> Any:
        if self.k_warps > 1:
            return self.storage_of_warps()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.parity_bytes // 2], 16]
            tokens: cute.struct.Align[cute.struct.MemRange[Float32, self.gates_at + 4], 16]

        return Storage

    def storage_of_warps(self) -> Any:
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.parity_bytes // 2], 16]
            tokens: cute.struct.Align[cute.struct.MemRange[Float32, self.gates_at + 4], 16]
            warp_parts: cute.struct.Align[cute.struct.MemRange[Float32, self.warp_parts], 16]

        return Storage

    @cute.jit
    def slot_of(self, column, sequence, lane_slot, gIndices):
        """gIndices[sequence, column], of which the lanes of a warp hold the first 32."""
        slot = cute.arch.shuffle_sync(lane_slot, cutlass.min(column, 31))
        if column >= 32:
            slot = narrowed(gIndices[sequence, column])
        return slot

    @cute.jit
    def decay(self, raw: Float32, minus_decay: Float32):
        """exp(g) of raw = a + dt_bias."""
        softplus = raw
        if raw <= 20.0:
            softplus = cute.math.log1p(cute.math.exp(raw))
        return cute.math.exp(minus_decay * softplus)

    def gate(self, z: Any) -> Any:
        return sigmoid(z) if self.gate_sigmoid else z * sigmoid(z)

    @cute.jit
    def convolve(self, p: cutlass.Constexpr, rWeight, rBias, rLine, rOut):
        """rOut [CHANNELS] = the convolution's output for item p of the thread."""
        for c in cutlass.range_constexpr(CHANNELS):
            rOut[c] = rBias[p * CHANNELS + c]
        for j in cutlass.range_constexpr(self.taps):
            for word in cutlass.range_constexpr(WORDS):
                values = ptx.unpack(self.dtype, rLine[(p * self.taps + j) * WORDS + word])
                for half in cutlass.range_constexpr(2):
                    c = cutlass.const_expr(2 * word + half)
                    rOut[c] += self.weight_of(rWeight, p, c * self.taps + j) * values[half]
        if cutlass.const_expr(self.silu):
            for c in cutlass.range_constexpr(CHANNELS):
                rOut[c] = rOut[c] * sigmoid(rOut[c])

    def weight_of(self, rWeight: Any, p: int, place: int) -> Any:
        """Filter value `place` (channel * taps + tap) of item p."""
        if self.weight_dtype is Float32:
            return ptx.as_float(rWeight[p * self.weight_words + place])
        return ptx.unpack(self.weight_dtype, rWeight[p * self.weight_words + place // 2])[place % 2]

    def channel(self, item: Any, key_head: Any, value_head: Any, rank: Any) -> Any:
        """First channel of an item, in the flat order [q | k | v]."""
        keys = self.shared_items // 2
        channel = Int32(2 * self.H * self.K) + value_head * self.V + rank % self.splits * self.columns
        channel += (item - self.shared_items) * CHANNELS
        k_channel = Int32(self.H * self.K) + key_head * self.K + (item - keys) * CHANNELS
        q_channel = key_head * self.K + item * CHANNELS
        channel = cutlass.select_(item < self.shared_items, k_channel, channel)
        return cutlass.select_(item < keys, q_channel, channel)

    def place(self, item: Any, key_head: Any, value_head: Any, rank: Any) -> Any:
        """First element of an item in a row of the projection."""
        if not self.interleaved:
            return self.channel(item, key_head, value_head, rank)
        inner = rank // self.splits * self.V + rank % self.splits * self.columns
        within = cutlass.select_(item < self.shared_items, item * CHANNELS, item * CHANNELS + inner)
        return key_head * self.group_width + within

    def loaded(self, p: int, thread: Any) -> Any:
        """The item whose inputs a thread loads in pass p: one beyond the last loads the last, so that nothing branches."""
        return cutlass.min(p * self.threads + thread, self.items - 1)

    @cute.jit
    def load_filter(self, thread, key_head, value_head, rank, gWeight, gBias, rWeight, rBias):
        for p in cutlass.range_constexpr(self.passes):
            channel = Int64(self.channel(self.loaded(p, thread), key_head, value_head, rank))
            size = cutlass.const_expr(4 * self.weight_words)
            load_words(gWeight, channel * self.taps, size, min(16, size & -size), rWeight, p * self.weight_words, False)
            if cutlass.const_expr(self.has_bias):
                align = cutlass.const_expr(min(16, CHANNELS * gBias.element_type.width // 8))
                load(pointer(gBias, channel, align), CHANNELS, rBias, p * CHANNELS, False)

    @cute.jit
    def load_gates(self, token, thread, key_head, value_head, rank, gB, gA, rGates):
        """Raw a and b, for the thread that makes decay and beta."""
        if thread == self.threads - 1:
            if cutlass.const_expr(self.interleaved):
                at = key_head * (2 * self.ratio) + rank // self.splits
                rGates[0] = gB[token, at + self.ratio].to(Float32)
                rGates[1] = gB[token, at].to(Float32)
            else:
                rGates[0] = gA[token, value_head].to(Float32)
                rGates[1] = gB[token, value_head].to(Float32)

    @cute.jit
    def load_row(self, token, thread, lane, key_head, value_head, rank, v_start, gX, gZ, rLine, rZ):
        """The token's row behind the window in rLine, and the norm's gate."""
        for p in cutlass.range_constexpr(self.passes):
            offset = Int64(token) * gX.stride[0] + self.place(self.loaded(p, thread), key_head, value_head, rank)
            load_words(gX, offset, 4 * WORDS, 4 * WORDS, rLine, (p * self.taps + self.history) * WORDS, True)
        if lane < self.rows:
            if cutlass.const_expr(self.interleaved):
                at = key_head * self.group_width + (2 * self.K + self.ratio * self.V) + rank // self.splits * self.V
                rZ[0] = gX[token, at + v_start + lane].to(Float32)
            else:
                rZ[0] = gZ[token, value_head, v_start + lane].to(Float32)

    def is_mine(self, item: Any, rank: Any) -> Any:
        """Whether this block writes the window of an item: the items of q and k are dealt to the blocks of the cluster."""
        if self.cluster == 1:
            return item < self.items
        owner = item * self.cluster // self.shared_items
        return (item < self.items) & ((item >= self.shared_items) | (owner == rank))

    def column_offset(self, gWindows: Any, slot: Any, column: Any, channel: Any) -> Any:
        return slot * gWindows.stride[0] + Int64(column) * gWindows.stride[2] + Int64(channel) * gWindows.stride[1]

    @cute.jit
    def load_windows(self, thread, key_head, value_head, rank, slot, column, gWindows, rLine):
        size = cutlass.const_expr(gWindows.element_type.width // 8)
        for p in cutlass.range_constexpr(self.passes):
            channel = self.channel(self.loaded(p, thread), key_head, value_head, rank)
            for c in cutlass.range_constexpr(self.history):
                offset = self.column_offset(gWindows, slot, column + c, channel)
                at = cutlass.const_expr((p * self.taps + c) * WORDS)
                if cutlass.const_expr(self.copies_windows):
                    load_words(gWindows, offset, 4 * WORDS, 4 * WORDS, rLine, at, True)
                else:
                    rRow = cute.make_rmem_tensor(CHANNELS, Float32)
                    if cutlass.const_expr(self.together):
                        load(pointer(gWindows, offset, CHANNELS * size), CHANNELS, rRow, 0, True)
                    else:
                        for e in cutlass.range_constexpr(CHANNELS):
                            load(pointer(gWindows, offset + e * gWindows.stride[1], size), 1, rRow, e, False)
                    for word in cutlass.range_constexpr(WORDS):
                        rLine[at + word] = ptx.pack(self.dtype, rRow[2 * word], rRow[2 * word + 1])

    @cute.jit
    def store_column(
        self, p: cutlass.Constexpr, row: cutlass.Constexpr, column, thread, key_head, value_head, rank, slot, gWindows, rLine
    ):
        """Row `row` of item p's line -> a column of its window."""
        size = cutlass.const_expr(gWindows.element_type.width // 8)
        item = p * self.threads + thread
        if self.is_mine(item, rank):
            offset = self.column_offset(gWindows, slot, column, self.channel(item, key_head, value_head, rank))
            at = cutlass.const_expr((p * self.taps + row) * WORDS)
            if cutlass.const_expr(self.copies_windows):
                ptx.store_global_pair(gWindows.iterator.toint() + offset * size, rLine[at], rLine[at + 1])
            else:
                rRow = cute.make_rmem_tensor(CHANNELS, Float32)
                for word in cutlass.range_constexpr(WORDS):
                    values = ptx.unpack(self.dtype, rLine[at + word])
                    rRow[2 * word], rRow[2 * word + 1] = values[0], values[1]
                if cutlass.const_expr(self.together):
                    store(rRow, 0, CHANNELS, pointer(gWindows, offset, CHANNELS * size))
                else:
                    for e in cutlass.range_constexpr(CHANNELS):
                        store(rRow, e, 1, pointer(gWindows, offset + e * gWindows.stride[1], size))

    @cute.jit
    def store_out(self, token, value_head, lane, v_start, value: Float32, gOut):
        """Lane r of a group stores the group's r-th column."""
        if lane < self.rows:
            gOut[token, value_head, v_start + lane] = value.to(self.dtype)


@cute.jit
def load_words(
    gX: cute.Tensor,
    offset: Int64,
    size: cutlass.Constexpr,
    align: cutlass.Constexpr,
    rX: cute.Tensor,
    start: cutlass.Constexpr,
    once: cutlass.Constexpr,
):
    """rX[start :] = the `size` bytes at gX + offset elements, a multiple of align bytes, as words; once: past L1."""
    address = gX.iterator.toint() + offset * (gX.element_type.width // 8)
    source = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=align)
    width = cutlass.const_expr(align // 4)
    for first in cutlass.range_constexpr(0, size // 4, width):
        load(source + first, width, rX, start + first, once)
