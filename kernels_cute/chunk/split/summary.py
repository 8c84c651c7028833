"""The first launch of a split call: the summary (h, P) of every segment but a sequence's last.

Both are runs of the chain of `_chunk_fused` over the segment's chunks without outputs: h from a zero state (segment 0: from the
sequence's own), P with V = 0 from the identity. A segment has only whole chunks here.

    U^T  = S^T K^T
    W^T  = V^T - exp(c) f U^T
    Y^T  = W^T + W^T M^T
    S^T  = exp(c_last) S^T + (Y^T exp(c_last - c) f beta) K

At D = 128 the two blocks of a head and segment are a cluster: block 0 runs h, block 1 runs P, with two state warpgroups of 64
columns each, and block b prepares the chunks of parity b for both. At D = 64 one block has a warpgroup for each. The other
warpgroups: inverse (M, as in the fused kernel), and one whose warps copy K and V in, make the gates, the vectors, and hand over.

    barrier             arrivals                                      waits
    full[stage]         1: the copying lane, with the bytes           state, inverse
    empty[stage]        8: a lane of a state warp, K and V read       the copying warp
    ready[buffer]       160: inverse and the vector warp; or          state; the handing warp
                        1: the other block, with the bytes
    taken[buffer]       8 a block that takes: a lane of a state warp  inverse, the vector warp
    gates_full[half]    32: the gate warp                             inverse, the vector warp
    factors_full[half]  128: inverse, key factors written             the vector warp
    gates_free[half]    5: a lane of each inverse warp and            the gate warp
                        of the vector warp
A state warp waits for what inverse made of a stage before it frees the stage.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from gdn.problems import ChunkParams
from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import TokenCopies
from kernels_cute.chunk.fused import FusedChunk
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    BUFFERS,
    CHUNK,
    CUM,
    KEY_BETA,
    KEY_FACTOR,
    KEY_TO_LAST,
    SCRATCH_BYTES,
    STATE_KEY,
    TILE_BYTES,
    VECTOR_BYTES,
    VECTORS,
    WARPGROUP,
)
from kernels_cute.chunk.split.segments import Segments
from kernels_cute.common import ptx

STAGES = 5
# Registers a thread of the state (two of them), inverse and copying warpgroups.
_REGISTERS = (168, 136, 40)
_STATE_GROUPS = 2


class SummaryChunk(Segments, FusedChunk):
    """options: FusedChunk's of the second launch."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.stages = self.key_stages = STAGES
        self.threads = (_STATE_GROUPS + 2) * WARPGROUP
        self.state_registers, self.inverse_registers, self.copy_registers = _REGISTERS

    def keys_full(self, storage: Any) -> Any:
        return storage.full.data_ptr()  # V comes with K

    def storage_type(self):
        stages, pieces = self.stages, self.dim // 64
        tile = CHUNK * 64

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            ready: cute.struct.MemRange[Int64, BUFFERS]
            taken: cute.struct.MemRange[Int64, BUFFERS]
            gates_full: cute.struct.MemRange[Int64, 2]
            factors_full: cute.struct.MemRange[Int64, 2]
            gates_free: cute.struct.MemRange[Int64, 2]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, BUFFERS * VECTOR_BYTES // 4], 128]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * AUX_BYTES // 4], 128]
            scratch: cute.struct.Align[cute.struct.MemRange[Float32, 4 * SCRATCH_BYTES // 4], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            zeros: cute.struct.Align[cute.struct.MemRange[self.dtype, tile], 1024]
            m: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * BUFFERS], 1024]
            lower: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, tile], 1024]

        return Storage

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, segment_tokens: Int32, split_if_longest_exceeds: Int32):
        if self.works(params.cu_seqlens, split_if_longest_exceeds):
            block, _, _ = cute.arch.block_idx()
            slot = block // (self.sharers * self.heads)
            segment = self.find_segment(params, slot, segment_tokens)
            if segment.is_summarized & (segment.index < segment.count - 1):
                head, rank = block // self.sharers % self.heads, block % 2
                self.summarize(params, copies, head, rank, segment)

    @cute.jit
    def summarize(self, params, copies, head, rank, segment):
        """The whole of a block; rank: in the pair."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        if warp == 0:
            cpasync.prefetch_descriptor(copies.k_atom)
            cpasync.prefetch_descriptor(copies.v_atom)
            with cute.arch.elect_one():
                self.init_barriers(storage, rank)
        thread, _, _ = cute.arch.thread_idx()
        # Above the diagonal M stays zero.
        for i in cutlass.range(thread, BUFFERS * TILE_BYTES // 16, self.threads, unroll=1):
            ptx.store_zeros(storage.m.data_ptr().toint() + i * 16)
        for i in cutlass.range(thread, TILE_BYTES // 16, self.threads, unroll=1):
            ptx.store_zeros(storage.zeros.data_ptr().toint() + i * 16)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.paired):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        begin, length = segment.begin, segment.length
        first = rank if cutlass.const_expr(self.paired) else Int32(0)
        if warp < 4 * _STATE_GROUPS:
            self.set_registers(self.state_registers)
            self.summary_warpgroup(storage, params, head, segment, rank, warp // 4, warp % 4)
        elif warp < 4 * (_STATE_GROUPS + 1):
            self.set_registers(self.inverse_registers)
            self.inverse_warpgroup(storage, length, first, warp % 4)
        else:
            self.set_registers(self.copy_registers)
            copier = warp % 4
            if copier == 0:
                self.copy_keys_warp(storage, copies, begin, length, head, rank)
            if copier == 1:
                self.gate_warp(storage, params, begin, length, head, first)
            if copier == 2:
                self.vector_warp(storage, length, first)
            if cutlass.const_expr(self.paired):
                if copier == 3:
                    self.hand_m_over_warp(storage, length, rank)
        if cutlass.const_expr(self.paired):
            # The other block may still write to this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def init_barriers(self, storage, rank):
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(storage.full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 4 * _STATE_GROUPS)
        for buffer in cutlass.range_constexpr(BUFFERS):
            count = Int32(WARPGROUP + 32)
            if cutlass.const_expr(self.paired):
                if rank != buffer:  # of a pair, block b fills buffer b of both
                    count = Int32(1)
            cute.arch.mbarrier_init(storage.ready.data_ptr() + buffer, count)
            cute.arch.mbarrier_init(storage.taken.data_ptr() + buffer, 4 * _STATE_GROUPS * self.sharers)
        for i in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(storage.gates_full.data_ptr() + i, 32)
            cute.arch.mbarrier_init(storage.factors_full.data_ptr() + i, WARPGROUP)
            cute.arch.mbarrier_init(storage.gates_free.data_ptr() + i, 5)

    @cute.jit
    def summary_warpgroup(self, storage, params, head, segment, rank, half, warp):
        """64 columns of h or of P."""
        lane = cute.arch.lane_idx()
        dim = self.dim
        by_key = self.product(CHUNK, True)
        by_token = self.product(dim, True, True)
        keys = self.right(by_key, storage.k, layouts.by_rows(self.dtype, CHUNK, dim, self.stages))
        tokens = self.right(by_token, storage.k, layouts.by_columns(self.dtype, CHUNK, dim, self.stages))
        m_operand = self.right(by_key, storage.m, layouts.by_rows(self.dtype, CHUNK, CHUNK, BUFFERS))

        state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
        state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), self.dtype)
        sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), self.dtype)
        decayed = cute.make_rmem_tensor(by_token.partition_shape_A((64, CHUNK)), self.dtype)
        state_words = cute.recast_tensor(state_operand, Int32)
        operand_words = cute.recast_tensor(operand, Int32)
        decayed_words = cute.recast_tensor(decayed, Int32)

        row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
        pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
        group = half if cutlass.const_expr(self.paired) else Int32(0)  # of 64 columns
        is_transition = (rank if cutlass.const_expr(self.paired) else half) == 1
        row0 = group * 64 + warp * 16 + row
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        vectors = storage.vectors.data_ptr().toint() + pair * 8
        # Lane l names row l % 8 of matrix l // 8; matrices alternate between the warp's two halves of 8 columns.
        matrix_row = lane % 8 + lane // 16 * 8
        values_base = storage.v.data_ptr().toint() + group * TILE_BYTES
        values_step = Int32(self.key_bytes)
        if is_transition:
            values_base = storage.zeros.data_ptr().toint()
            values_step = Int32(0)
        value_lane = layouts.address(values_base, matrix_row, warp * 2 + lane // 8 % 2)
        self.start_summary(params, state, head, segment, is_transition, row0, group, warp, lane)

        # As in the fused kernel: products but M's a k step at a time, nothing in flight where the loop closes. Here one U too
        # many is issued, and dropped.
        num_chunks = segment.length // CHUNK
        cute.arch.mbarrier_wait(full, 0)
        self.issue_keys(by_key, sums, state, state_operand, state_words, keys, Int32(0))
        warpgroup.wait_group(0)
        for step in cutlass.range(num_chunks, unroll=1):
            stage, following = step % self.stages, (step + 1) % self.stages
            buffer, turn = step % BUFFERS, step // BUFFERS & 1
            vector = vectors + buffer * VECTOR_BYTES
            cute.arch.mbarrier_wait(ready + buffer, turn)

            # W and M; W is what the product adds to
            for i in cutlass.range_constexpr(CHUNK // 16):
                values = ptx.load_matrices(value_lane + stage * values_step + i * 16 * layouts.ROW_BYTES, True)
                for m in cutlass.range_constexpr(2):
                    n = 2 * i + m
                    factors = ptx.load_pair(vector + STATE_KEY * CHUNK * 4 + n * 32)
                    for side in cutlass.range_constexpr(2):
                        value0, value1 = ptx.unpack(self.dtype, values[2 * m + side])
                        place = 4 * n + 2 * side
                        sums[place] = value0 - factors[0] * sums[place]
                        sums[place + 1] = value1 - factors[1] * sums[place + 1]
                        operand_words[2 * n + side] = ptx.pack(self.dtype, sums[place], sums[place + 1])
            warpgroup.fence()
            self.multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
            warpgroup.commit_group()
            last = ptx.load_one(vector + VECTORS * CHUNK * 4 - pair * 8)
            for i in cutlass.range_constexpr(dim // 2):
                state[i] = state[i] * last
            factors = self.load_factors(vector, KEY_TO_LAST)
            warpgroup.wait_group(0)

            # S
            for i in cutlass.range_constexpr(CHUNK // 16):
                for m in cutlass.range_constexpr(2):
                    n = 2 * i + m
                    for side in cutlass.range_constexpr(2):
                        place = 4 * n + 2 * side
                        decayed_words[2 * n + side] = ptx.pack(
                            self.dtype, sums[place] * factors[n][0], sums[place + 1] * factors[n][1]
                        )
                warpgroup.fence()
                self.multiply_step(by_token, state, decayed, tokens[None, None, None, stage], i, False)
            warpgroup.commit_group()
            if lane == 0:
                if cutlass.const_expr(self.paired):
                    ptx.arrive_in_cluster(ptx.in_block(taken.toint() + buffer * 8, buffer))
                else:
                    cute.arch.mbarrier_arrive(taken + buffer)
            if step + 1 < num_chunks:
                cute.arch.mbarrier_wait(full + following, (step + 1) // self.stages & 1)
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)
            self.issue_keys(by_key, sums, state, state_operand, state_words, keys, following)
            warpgroup.wait_group(0)

        if is_transition:
            if segment.index > 0:
                self.store_transition(self.transition_address(segment, segment.index, head), state, row0, pair)
        else:
            self.store_summary(self.summary_address(segment, segment.index, head), group, warp, lane, state)

    @cute.jit
    def start_summary(self, params, state, head, segment, is_transition, row0, group, warp, lane):
        state.fill(0.0)
        pair = lane % 4
        if is_transition:
            for n in cutlass.range_constexpr(self.dim // 8):
                for i in cutlass.range_constexpr(4):
                    if row0 + i // 2 * 8 == 8 * n + 2 * pair + i % 2:
                        state[4 * n + i] = Float32(1.0)
        elif segment.index == 0:
            self.load_state(params, state, segment, head, row0, pair)
            self.store_summary(self.summary_address(segment, segment.count - 1, head), group, warp, lane, state)

    def store_transition(self, address: Any, state: Any, row0: Any, pair: Any) -> None:
        """This warpgroup's rows of P^T, as summands, in the order of K tiles."""
        tile = address + Int64(row0 // CHUNK * self.key_bytes)
        row = row0 % CHUNK
        for n in range(self.dim // 8):
            piece = tile + n // 8 * TILE_BYTES
            for side in range(2):
                place = layouts.address(Int32(0), row + 8 * side, n % 8) + pair * 4
                first, second = state[4 * n + 2 * side], state[4 * n + 2 * side + 1]
                word = ptx.pack(BFloat16, first, second)
                ptx.store_global_word(piece + Int64(place), word)
                high, higher = ptx.unpack(BFloat16, word)
                rest = ptx.pack(BFloat16, first - high, second - higher)
                ptx.store_global_word(piece + Int64(place + self.dim * self.dim * 2), rest)

    @cute.jit
    def copy_keys_warp(self, storage, copies, begin, length, head, rank):
        """K, and V where this block runs h."""
        pieces = self.dim // 64
        to_k, from_k = self.tiles(storage.k, copies.k_atom, copies.k, self.dim, self.stages, begin, head // self.k_group, 0)
        layout = layouts.by_rows(self.dtype, CHUNK, 64, pieces * self.stages)
        shared = storage.v.get_tensor(layout.outer, swizzle=layout.inner)
        rows = cute.domain_offset((begin, 0), copies.v[None, None, head // self.v_group])
        to_v, from_v = cpasync.tma_partition(
            copies.v_atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
            cute.group_modes(cute.local_tile(rows, (CHUNK, 64), (None, None)), 0, 2),
        )  # fmt: skip
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        has_values = Boolean(True)
        num_bytes = Int32(2 * self.key_bytes)
        if cutlass.const_expr(self.paired):
            if rank == 1:
                has_values = Boolean(False)
                num_bytes = Int32(self.key_bytes)
        for step in cutlass.range(length // CHUNK, unroll=1):
            stage, parity = step % self.stages, step // self.stages & 1
            cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_bytes)
            cute.copy(copies.k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full + stage)
            if has_values:
                for piece in cutlass.range_constexpr(pieces):
                    source, target = from_v[None, step, piece], to_v[None, stage * pieces + piece]
                    cute.copy(copies.v_atom, source, target, tma_bar_ptr=full + stage)

    @cute.jit
    def vector_warp(self, storage, length, first):
        """The factors that the state warpgroups need of the chunks that this block prepares."""
        lane = cute.arch.lane_idx()
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        for step in cutlass.range(first, length // CHUNK, self.aux_step, unroll=1):
            buffer, turn = step % BUFFERS, step // BUFFERS & 1
            half = step // self.aux_step % 2
            half_turn = step // self.aux_step // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            vectors = storage.vectors.data_ptr().toint() + buffer * VECTOR_BYTES
            cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
            cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)
            cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
            total = ptx.load_one(rows + CUM * CHUNK * 4 + (CHUNK - 1) * 4)
            for i in cutlass.range_constexpr(CHUNK // 32):
                token = lane + 32 * i
                cum = ptx.load_one(rows + CUM * CHUNK * 4 + token * 4)
                key = ptx.load_one(rows + KEY_FACTOR * CHUNK * 4 + token * 4)
                key_beta = ptx.load_one(rows + KEY_BETA * CHUNK * 4 + token * 4)
                ptx.store_one(vectors + STATE_KEY * CHUNK * 4 + token * 4, cute.math.exp2(cum, fastmath=True) * key)
                ptx.store_one(vectors + KEY_TO_LAST * CHUNK * 4 + token * 4, self.decay(total - cum) * key_beta)
            if lane == 0:
                ptx.store_one(vectors + VECTORS * CHUNK * 4, cute.math.exp2(total, fastmath=True))
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ready + buffer)

    @cute.jit
    def hand_m_over_warp(self, storage, length, rank):
        """M and the vectors of this block's chunks to the other block of the pair."""
        other = rank ^ 1
        own = storage.ready.data_ptr() + rank
        barrier = ptx.in_block(storage.ready.data_ptr().toint() + rank * 8, other)
        for step in cutlass.range(rank, length // CHUNK, 2, unroll=1):
            cute.arch.mbarrier_wait(own, step // BUFFERS & 1)
            with cute.arch.elect_one():
                ptx.expect_in_cluster(barrier, Int32(TILE_BYTES + VECTOR_BYTES))
                for field, size in ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES)):
                    source = field.data_ptr().toint() + rank * size
                    ptx.copy_in_cluster(ptx.in_block(source, other), source, Int32(size), barrier)
