"""The fused chunk kernel: everything of a sequence, state head and slice of V columns in one block.

With c the inclusive cumulative sum of the log decays of a chunk, f the factors of the L2 norms (1 where none are asked for)
and all of M, P and the vectors computed here and never written to memory:

    A    = (I + strict_lower(beta_i f_i f_j k_i . k_j))^-1
    M    = A_ij exp(c_i - c_j) beta_j                     16-bit, as `parts` summands
    P    = lower(scale fq_i f_j exp(c_i - c_j) q_i . k_j) 16-bit
    U^T  = S^T K^T              O^T = S^T Q^T             S^T rounded to 16 bits, from registers
    W^T  = V^T - exp(c) f U^T
    Vn^T = W^T M^T
    S^T  = exp(c_last) S^T + (Vn^T exp(c_last - c) f) K
    O^T  = exp(c) fq scale O^T + Vn^T P^T

Roles, a warpgroup each: state (64 V columns of S^T, the chain in registers), inverse (M), score (P and the vectors; neither
depends on the state), and one whose warps copy K, Q, V in, make the gates, copy O out, and hand over. With `paired` the two
blocks of a head are a cluster: block b prepares the chunks of parity b for both, into buffer b of `ready` and `taken`;
otherwise a block prepares every chunk itself, buffers in turn.

    barrier             arrivals                                      waits
    full[stage]         1: the copying lane, with the bytes           state, inverse, score
    stored[stage]       128: state, O in the place of V               the storing warp
    empty[stage]        1: the storing warp, O read                   the copying warp
    ready[buffer]       256: inverse and score of this block; or      state; the handing warp
                        1: the other block, with the bytes
    taken[buffer]       4 a block that takes: a lane of a state warp  inverse, score
    gates_full[half]    32: the gate warp                             inverse, score
    factors_full[half]  128: inverse, key factors written             score
    gates_free[half]    8: a lane of each inverse and score warp      the gate warp
    named 1, 2, 3       128 threads: within inverse, score, state
A state warp is done with K, Q and V of a stage, and waits for what inverse and score made of them, before its `stored`.
`half` alternates over the chunks that a block prepares. Arrivals of the other block on `taken` are relaxed: what they free
has been read by then, and it is refilled by stores that wait for them, or by copies that count bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from kernels_cute import _chunk_layouts as layouts
from kernels_cute import _chunk_ptx as ptx

CHUNK = 64
WARPGROUP = 128
BUFFERS = 2
# Named barriers; 0 is the block's.
INVERSE_BARRIER = 1
SCORE_BARRIER = 2
STATE_BARRIER = 3  # and the next, one per state warpgroup
TILE_BYTES = CHUNK * layouts.ROW_BYTES  # a 64 x 64 tile of 16-bit elements
VECTORS = 3  # rows of 64 float32 per buffer:
STATE_KEY = 0  # exp(c) f: factor of K S
KEY_TO_LAST = 1  # exp(c_last - c) f: factor of Vn before it enters the state
STATE_QUERY = 2  # exp(c) fq scale: factor of Q S
VECTOR_BYTES = (VECTORS + 1) * CHUNK * 4  # the first element of a fourth row is exp(c_last)
AUX_ROWS = 4  # rows of 64 float32 that inverse and score share, twice: cumulative sums, beta, factors of K, of Q
CUM, BETA, KEY_FACTOR, QUERY_FACTOR = range(AUX_ROWS)
AUX_BYTES = AUX_ROWS * CHUNK * 4
BLOCK = 16  # diagonal blocks of the inverse
COLUMN_PITCH = 80  # bytes of a row of a diagonal block of L, by columns
ROW_PITCH = 96  # bytes of a row of an inverted diagonal block
SCRATCH_BYTES = BLOCK * ROW_PITCH
NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0
LOG2E = 1.4426950408889634
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0


class FusedChunk:
    """Everything here is known at compile time; sizes, strides and scalars arrive at launch."""

    def __init__(
        self,
        *,
        heads: int,
        q_group: int,
        k_group: int,
        v_group: int,
        dim: int,
        dtype: Any,
        has_gate: bool,
        raw_gate: bool,
        has_beta: bool,
        raw_beta: bool,
        normalize: bool,
        v_first: bool,
        pooled: bool,
        has_initial: bool,
        has_mask: bool,
        has_final: bool,
        has_final_indices: bool,
        num_state: int,
        paired: bool,
        stages: int,
        prefetch: int,
        parts: int,
        registers: tuple[int, int, int, int],
    ):
        self.heads, self.q_group, self.k_group, self.v_group = heads, q_group, k_group, v_group
        self.dim, self.dtype = dim, dtype
        self.has_gate, self.raw_gate = has_gate, raw_gate
        self.has_beta, self.raw_beta = has_beta, raw_beta
        self.normalize, self.v_first = normalize, v_first
        self.pooled, self.has_initial, self.has_mask = pooled, has_initial, has_mask
        self.has_final, self.has_final_indices = has_final, has_final_indices
        self.num_state, self.stages, self.prefetch, self.parts = num_state, stages, prefetch, parts
        self.state_registers, self.inverse_registers, self.score_registers, self.copy_registers = registers
        self.columns = 64 * num_state
        self.slices = dim // self.columns
        self.paired = paired
        self.sharers = 2 if paired else 1  # blocks that take from a `taken`
        self.aux_step = 2 if paired else 1  # chunks from one of this block's own to the next
        self.threads = (num_state + 3) * WARPGROUP
        self.key_bytes = CHUNK * dim * 2
        self.value_bytes = CHUNK * self.columns * 2

    # ---- host

    @cute.jit
    def launch(
        self, q, k, v, g, beta, a_log, dt_bias, initial, indices, mask, final, final_indices, bounds, out,
        scale: Float32, null_slot: Int64, stream,
    ):  # fmt: skip
        row = layouts.by_rows(self.dtype, CHUNK, self.dim)
        value = layouts.by_rows(self.dtype, CHUNK, self.columns)
        copy = cpasync.CopyBulkTensorTileG2SOp()
        q_atom, q_tensor = cpasync.make_tiled_tma_atom(copy, self.tokens(q), row, (CHUNK, self.dim))
        k_atom, k_tensor = cpasync.make_tiled_tma_atom(copy, self.tokens(k), row, (CHUNK, self.dim))
        v_atom, v_tensor = cpasync.make_tiled_tma_atom(copy, self.tokens(v), value, (CHUNK, self.columns))
        tile = layouts.by_rows(self.dtype, CHUNK, 64)
        store = cpasync.CopyBulkTensorTileS2GOp()
        out_atom, out_tensor = cpasync.make_tiled_tma_atom(store, self.tokens(out), tile, (CHUNK, 64))
        sequences = cute.size(bounds, mode=[0]) - 1
        self.kernel(
            out_atom, out_tensor, q_atom, q_tensor, k_atom, k_tensor, v_atom, v_tensor, g, beta, a_log, dt_bias, initial,
            indices, mask, final, final_indices, bounds, out, scale, null_slot,
        ).launch(
            grid=(self.slices * self.heads * sequences, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.sharers, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def tokens(self, x):
        """[tokens, heads, D] as (tokens, D, heads); strides are multiples of 16 bytes by contract."""
        tokens, heads, dim = x.shape
        token_stride = cute.assume(x.stride[0], divby=8)
        # The stride of a single head is never used and may be anything.
        head_stride = cute.assume(x.stride[1], divby=8) if cutlass.const_expr(heads > 1) else dim
        return cute.make_tensor(x.iterator, cute.make_layout((tokens, dim, heads), stride=(token_stride, 1, head_stride)))

    def storage_type(self):
        stages, pieces = self.stages, self.dim // 64
        tile = CHUNK * 64

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            stored: cute.struct.MemRange[Int64, stages]
            ready: cute.struct.MemRange[Int64, BUFFERS]
            taken: cute.struct.MemRange[Int64, BUFFERS]
            gates_full: cute.struct.MemRange[Int64, 2]
            factors_full: cute.struct.MemRange[Int64, 2]
            gates_free: cute.struct.MemRange[Int64, 2]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, BUFFERS * VECTOR_BYTES // 4], 128]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * AUX_BYTES // 4], 128]
            scratch: cute.struct.Align[cute.struct.MemRange[Float32, 4 * SCRATCH_BYTES // 4], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * self.num_state * stages], 1024]
            m: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * self.parts * BUFFERS], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * BUFFERS], 1024]
            lower: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, tile], 1024]

        return Storage

    # ---- device

    @cute.kernel
    def kernel(
        self,
        out_atom: cute.CopyAtom,
        out_tensor: cute.Tensor,
        q_atom: cute.CopyAtom,
        q_tensor: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tensor: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tensor: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        mask: cute.Tensor,
        final: cute.Tensor,
        final_indices: cute.Tensor,
        bounds: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        null_slot: Int64,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        block, _, _ = cute.arch.block_idx()
        rank = block % 2  # in the pair
        if warp == 0:
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(v_atom)
            cpasync.prefetch_descriptor(out_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(storage.full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.stored.data_ptr() + stage, WARPGROUP * self.num_state)
                for buffer in cutlass.range_constexpr(BUFFERS):
                    # Of a pair, block b fills buffer b of both.
                    if cutlass.const_expr(self.paired):
                        count = Int32(1)
                        if rank == buffer:
                            count = Int32(2 * WARPGROUP)
                        cute.arch.mbarrier_init(storage.ready.data_ptr() + buffer, count)
                    else:
                        cute.arch.mbarrier_init(storage.ready.data_ptr() + buffer, 2 * WARPGROUP)
                    cute.arch.mbarrier_init(storage.taken.data_ptr() + buffer, 4 * self.num_state * self.sharers)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(storage.gates_full.data_ptr() + i, 32)
                    cute.arch.mbarrier_init(storage.factors_full.data_ptr() + i, WARPGROUP)
                    cute.arch.mbarrier_init(storage.gates_free.data_ptr() + i, 8)
        # Above the diagonal M and P stay zero.
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(thread, BUFFERS * self.parts * TILE_BYTES // 16, self.threads, unroll=1):
            ptx.store_zeros(storage.m.data_ptr().toint() + i * 16)
        for i in cutlass.range(thread, BUFFERS * TILE_BYTES // 16, self.threads, unroll=1):
            ptx.store_zeros(storage.p.data_ptr().toint() + i * 16)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.paired):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        piece = block % self.slices
        head = block // self.slices % self.heads
        sequence = block // (self.slices * self.heads)
        begin = Int32(bounds[sequence])
        length = cutlass.max(Int32(bounds[sequence + 1]) - begin, 0)
        read_slot = Int64(sequence)
        live_length = length
        if cutlass.const_expr(self.pooled):
            read_slot = Int64(indices[sequence])
            if read_slot <= null_slot:
                live_length = Int32(0)

        if warp < 4 * self.num_state:
            self.set_registers(self.state_registers)
            self.state_warpgroup(
                storage, initial, mask, final, final_indices, bounds, out, null_slot, begin, length, live_length, sequence,
                head, piece, read_slot, warp // 4, warp % 4,
            )  # fmt: skip
        elif warp < 4 * (self.num_state + 1):
            self.set_registers(self.inverse_registers)
            first = rank if cutlass.const_expr(self.paired) else Int32(0)
            self.inverse_warpgroup(storage, live_length, first, warp % 4)
        elif warp < 4 * (self.num_state + 2):
            self.set_registers(self.score_registers)
            first = rank if cutlass.const_expr(self.paired) else Int32(0)
            self.score_warpgroup(storage, scale, live_length, first, warp % 4)
        else:
            self.set_registers(self.copy_registers)
            copier = warp % 4
            if copier == 0:
                self.copy_warp(storage, q_atom, q_tensor, k_atom, k_tensor, v_atom, v_tensor, begin, live_length, head, piece)
            if copier == 1:
                first = rank if cutlass.const_expr(self.paired) else Int32(0)
                self.gate_warp(storage, g, beta, a_log, dt_bias, begin, live_length, head, first)
            if copier == 2:
                self.store_warp(storage, out_atom, out_tensor, out, begin, live_length, head, piece)
            if cutlass.const_expr(self.paired):
                if copier == 3:
                    self.hand_over_warp(storage, live_length, rank)
        if cutlass.const_expr(self.paired):
            # The other block may still write to this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def set_registers(self, count: int) -> None:
        """What a thread has at launch is 65536 over the threads, in steps of 8."""
        if count > 65536 // self.threads // 8 * 8:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    # ---- copies

    @cute.jit
    def copy_warp(self, storage, q_atom, q_tensor, k_atom, k_tensor, v_atom, v_tensor, begin, length, head, piece):
        to_q, from_q = self.tiles(storage.q, q_atom, q_tensor, self.dim, begin, head // self.q_group, 0)
        to_k, from_k = self.tiles(storage.k, k_atom, k_tensor, self.dim, begin, head // self.k_group, 0)
        to_v, from_v = self.tiles(storage.v, v_atom, v_tensor, self.columns, begin, head // self.v_group, piece)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(num_chunks, unroll=1):
            stage, parity = step % self.stages, step // self.stages & 1
            cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * self.key_bytes + self.value_bytes)
            cute.copy(k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full + stage)
            cute.copy(q_atom, from_q[None, step], to_q[None, stage], tma_bar_ptr=full + stage)
            cute.copy(v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
            if cutlass.const_expr(self.prefetch > 0):
                if step + self.prefetch < num_chunks:
                    cute.prefetch(k_atom, from_k[None, step + self.prefetch])
                    cute.prefetch(q_atom, from_q[None, step + self.prefetch])
                    cute.prefetch(v_atom, from_v[None, step + self.prefetch])

    @cute.jit
    def tiles(self, field, atom, tensor, columns: cutlass.Constexpr, begin, head, piece):
        """Shared and global sides of a tensor's tiles: (copy, stage) and (copy, chunk of the sequence)."""
        layout = layouts.by_rows(self.dtype, CHUNK, columns, self.stages)
        shared = field.get_tensor(layout.outer, swizzle=layout.inner)
        rows = cute.domain_offset((begin, 0), tensor[None, None, head])
        chunks = cute.local_tile(rows, (CHUNK, columns), (None, piece))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(chunks, 0, 2))

    # ---- state

    def product(self, columns: int, register_operand: bool, by_columns: bool = False) -> Any:
        """The tiled m64 x columns x k16 instruction of one warpgroup."""
        source = warpgroup.OperandSource.RMEM if register_operand else warpgroup.OperandSource.SMEM
        major = OperandMajorMode.MN if by_columns else OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, columns, 16), source, OperandMajorMode.K, major)
        return cute.make_tiled_mma(op)

    @cute.jit
    def multiply(self, mma, sums, left, right, clear: cutlass.Constexpr):
        """sums (+)= left right; operands (MMA, rows, k steps)."""
        for step in cutlass.range_constexpr(cute.size(right, mode=[2])):
            self.multiply_step(mma, sums, left, right, step, clear and step == 0)

    def multiply_step(self, mma: Any, sums: Any, left: Any, right: Any, step: int, clear: bool) -> None:
        """One k step of 16."""
        mma.set(warpgroup.Field.ACCUMULATE, not clear)
        cute.gemm(mma, sums, left[None, None, step], right[None, None, step], sums)

    @cute.jit
    def state_warpgroup(
        self, storage, initial, mask, final, final_indices, bounds, out, null_slot, begin, length, live_length, sequence,
        head, piece, read_slot, half, warp,
    ):  # fmt: skip
        lane = cute.arch.lane_idx()
        dim, parts = self.dim, self.parts
        by_key = self.product(CHUNK, True)
        by_token = self.product(dim, True, True)
        key_layout = layouts.by_rows(self.dtype, CHUNK, dim, self.stages)
        token_layout = layouts.by_columns(self.dtype, CHUNK, dim, self.stages)
        keys = self.right(by_key, storage.k, key_layout)
        queries = self.right(by_key, storage.q, key_layout)
        tokens = self.right(by_token, storage.k, token_layout)
        m_operand = self.right(by_key, storage.m, layouts.by_rows(self.dtype, CHUNK, CHUNK, parts, BUFFERS))
        p_operand = self.right(by_key, storage.p, layouts.by_rows(self.dtype, CHUNK, CHUNK, BUFFERS))

        state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
        state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), self.dtype)
        sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        new = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        outputs = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
        operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), self.dtype)
        decayed = cute.make_rmem_tensor(by_token.partition_shape_A((64, CHUNK)), self.dtype)
        state_words = cute.recast_tensor(state_operand, Int32)
        operand_words = cute.recast_tensor(operand, Int32)
        decayed_words = cute.recast_tensor(decayed, Int32)

        row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
        pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
        column0 = piece * self.columns + half * 64 + warp * 16  # the warp's first V column
        full = storage.full.data_ptr()
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        vectors = storage.vectors.data_ptr().toint() + pair * 8
        # Lane l names row l % 8 of matrix l // 8; matrices alternate between the warp's two halves of 8 columns.
        matrix_row = lane % 8 + lane // 16 * 8
        value_lane = storage.v.data_ptr().toint() + half * TILE_BYTES
        value_lane = layouts.address(value_lane, matrix_row, warp * 2 + lane // 8 % 2)
        self.load_state(initial, mask, state, sequence, head, read_slot, live_length, column0 + row, pair)

        # Products are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor cores
        # work on a step while the next is made ready. Q S has no hurry and fills their pauses, half before M and half after;
        # U of the next chunk goes ahead of this one's output. One U too many is issued: it reads whatever lies in shared
        # memory and is dropped. Where the loop closes nothing is in flight, else ptxas would serialise every product.
        num_chunks = (live_length + (CHUNK - 1)) // CHUNK
        if num_chunks > 0:
            cute.arch.mbarrier_wait(full, 0)
        self.issue_keys(by_key, sums, state, state_operand, state_words, keys, Int32(0))
        warpgroup.wait_group(0)
        for step in cutlass.range(num_chunks, unroll=1):
            stage, following = step % self.stages, (step + 1) % self.stages
            buffer, turn = step % BUFFERS, step // BUFFERS & 1
            valid = cutlass.min(live_length - step * CHUNK, CHUNK)
            vector = vectors + buffer * VECTOR_BYTES
            half_steps = dim // 32
            cute.arch.mbarrier_wait(ready + buffer, turn)
            # What the next steps need is asked for before the products that keep this warp waiting are issued.
            values = [
                ptx.load_matrices(value_lane + stage * self.value_bytes + i * 16 * layouts.ROW_BYTES, True) for i in range(4)
            ]
            factors = self.load_factors(vector, STATE_KEY)
            warpgroup.fence()
            for i in cutlass.range_constexpr(half_steps):
                self.multiply_step(by_key, outputs, state_operand, queries[None, None, None, stage], i, i == 0)
            warpgroup.commit_group()

            # W and M
            for i in cutlass.range_constexpr(CHUNK // 16):
                for m in cutlass.range_constexpr(2):
                    n = 2 * i + m
                    for side in cutlass.range_constexpr(2):
                        value0, value1 = ptx.unpack(self.dtype, values[i][2 * m + side])
                        operand_words[2 * n + side] = ptx.pack(
                            self.dtype,
                            value0 - factors[n][0] * sums[4 * n + 2 * side],
                            value1 - factors[n][1] * sums[4 * n + 2 * side + 1],
                        )
                if valid < 16 * (i + 1):
                    self.mask_words(operand_words, i, valid, pair)
                warpgroup.fence()
                for part in cutlass.range_constexpr(parts):
                    tile = m_operand[None, None, None, part, buffer]
                    self.multiply_step(by_key, new, operand, tile, i, i == 0 and part == 0)
            warpgroup.commit_group()
            for i in cutlass.range_constexpr(half_steps, 2 * half_steps):
                self.multiply_step(by_key, outputs, state_operand, queries[None, None, None, stage], i, False)
            warpgroup.commit_group()
            last = ptx.load_one(vector + VECTORS * CHUNK * 4 - pair * 8)
            for i in cutlass.range_constexpr(dim // 2):
                state[i] = state[i] * last
            if cutlass.const_expr(self.paired):
                if valid < CHUNK:
                    # The block whose turn it was has done this for its own tile alone.
                    self.zero_keys(storage.k.data_ptr().toint() + stage * self.key_bytes, valid, warp * 32 + lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=STATE_BARRIER + half, number_of_threads=WARPGROUP)
            factors = self.load_factors(vector, KEY_TO_LAST)
            warpgroup.wait_group(1)

            # S
            for i in cutlass.range_constexpr(CHUNK // 16):
                for m in cutlass.range_constexpr(2):
                    n = 2 * i + m
                    for side in cutlass.range_constexpr(2):
                        place = 4 * n + 2 * side
                        decayed_words[2 * n + side] = ptx.pack(
                            self.dtype, new[place] * factors[n][0], new[place + 1] * factors[n][1]
                        )
                warpgroup.fence()
                self.multiply_step(by_token, state, decayed, tokens[None, None, None, stage], i, False)
            warpgroup.commit_group()

            # O
            factors = self.load_factors(vector, STATE_QUERY)
            for i in cutlass.range_constexpr(CHUNK // 4):
                operand_words[i] = ptx.pack(self.dtype, new[2 * i], new[2 * i + 1])
            warpgroup.wait_group(1)
            for n in cutlass.range_constexpr(CHUNK // 8):
                for side in cutlass.range_constexpr(2):
                    for odd in cutlass.range_constexpr(2):
                        outputs[4 * n + 2 * side + odd] = outputs[4 * n + 2 * side + odd] * factors[n][odd]
            warpgroup.fence()
            for i in cutlass.range_constexpr(CHUNK // 16):
                self.multiply_step(by_key, outputs, operand, p_operand[None, None, None, buffer], i, False)
            warpgroup.commit_group()
            if step + 1 < num_chunks:
                cute.arch.mbarrier_wait(full + following, (step + 1) // self.stages & 1)
            warpgroup.wait_group(1)
            self.issue_keys(by_key, sums, state, state_operand, state_words, keys, following)
            warpgroup.wait_group(1)
            # O, turned on its way to shared memory, takes the place of the V that this warp has read.
            for i in cutlass.range_constexpr(CHUNK // 16):
                words = [ptx.pack(self.dtype, outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]) for j in range(4)]
                ptx.store_matrices(value_lane + (stage * self.value_bytes + i * 16 * layouts.ROW_BYTES), words, True)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)
            if lane == 0:
                if cutlass.const_expr(self.paired):
                    ptx.arrive_in_cluster(ptx.in_block(storage.taken.data_ptr().toint() + buffer * 8, buffer))
                else:
                    cute.arch.mbarrier_arrive(taken + buffer)
            warpgroup.wait_group(0)

        self.store_state(final, final_indices, state, sequence, head, read_slot, live_length, null_slot, column0 + row, pair)
        self.zero_rows(out, bounds, sequence, begin, length, live_length, head, piece * self.columns + half * 64, warp, lane)

    def load_factors(self, vector: Any, kind: int) -> list[Any]:
        """A row of vectors, as pairs for the columns of this lane."""
        return [ptx.load_pair(vector + kind * CHUNK * 4 + n * 32) for n in range(CHUNK // 8)]

    @cute.jit
    def issue_keys(self, by_key, sums, state, operand, words, keys, stage):
        """U, while the state is being rounded."""
        for i in cutlass.range_constexpr(self.dim // 16):
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = ptx.pack(self.dtype, state[8 * i + 2 * j], state[8 * i + 2 * j + 1])
            warpgroup.fence()
            self.multiply_step(by_key, sums, operand, keys[None, None, None, stage], i, i == 0)
        warpgroup.commit_group()

    @cute.jit
    def mask_words(self, words, i: cutlass.Constexpr, valid, pair):
        """Zero in columns from valid on of k step i: they come from rows of the next sequence and may be anything."""
        for m in cutlass.range_constexpr(2):
            column = 16 * i + 8 * m + 2 * pair
            for side in cutlass.range_constexpr(2):
                place = 4 * i + 2 * m + side
                if column + 1 >= valid:
                    word = words[place] & 0xFFFF
                    if column >= valid:
                        word = Int32(0)
                    words[place] = word

    @cute.jit
    def right(self, mma, field, layout):
        """A shared-memory B operand, (MMA, columns, k steps, *outer)."""
        thread = mma.get_slice(0)
        return mma.make_fragment_B(thread.partition_B(field.get_tensor(layout.outer, swizzle=layout.inner)))

    @cute.jit
    def store_warp(self, storage, out_atom, out_tensor, out, begin, length, head, piece):
        """Outputs from shared memory to their rows; then the stage is free, for everything else of it has been read."""
        lane = cute.arch.lane_idx()
        layout = layouts.by_rows(self.dtype, CHUNK, 64, self.num_state * self.stages)
        shared = storage.v.get_tensor(layout.outer, swizzle=layout.inner)
        rows = cute.domain_offset((begin, 0), out_tensor[None, None, head])
        source, target = cpasync.tma_partition(
            out_atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
            cute.group_modes(cute.local_tile(rows, (CHUNK, 64), (None, None)), 0, 2),
        )  # fmt: skip
        for step in cutlass.range((length + (CHUNK - 1)) // CHUNK, unroll=1):
            stage, parity = step % self.stages, step // self.stages & 1
            cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, parity)
            valid = length - step * CHUNK
            for half in cutlass.range_constexpr(self.num_state):
                if valid >= CHUNK:
                    cute.copy(
                        out_atom, source[None, stage * self.num_state + half], target[None, step, piece * self.num_state + half]
                    )
                else:
                    tile = storage.v.data_ptr().toint() + (stage * self.num_state + half) * TILE_BYTES
                    column = piece * self.columns + half * 64 + lane % 8 * 8
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
    def load_state(self, initial, mask, state, sequence, head, read_slot, live_length, row0, pair):
        state.fill(0.0)
        if cutlass.const_expr(self.has_initial):
            starts = cutlass.Boolean(True)
            if cutlass.const_expr(self.pooled):
                starts = live_length > 0
            if cutlass.const_expr(self.has_mask):
                starts = starts & cutlass.Boolean(mask[sequence])
            if starts:
                source = self.state_pointer(initial, read_slot, head, row0, pair)
                for n in cutlass.range_constexpr(self.dim // 8):
                    for side in cutlass.range_constexpr(2):
                        entries = self.state_pair(source, n, side)
                        state[4 * n + 2 * side] = entries[0].to(Float32)
                        state[4 * n + 2 * side + 1] = entries[1].to(Float32)

    @cute.jit
    def store_state(self, final, final_indices, state, sequence, head, read_slot, live_length, null_slot, row0, pair):
        if cutlass.const_expr(self.has_final):
            written = cutlass.Boolean(True)
            write_slot = read_slot
            if cutlass.const_expr(self.pooled):
                written = live_length > 0
            if cutlass.const_expr(self.has_final_indices):
                if written:
                    write_slot = Int64(final_indices[sequence])
                    written = write_slot > null_slot
            if written:
                target = self.state_pointer(final, write_slot, head, row0, pair)
                for n in cutlass.range_constexpr(self.dim // 8):
                    for side in cutlass.range_constexpr(2):
                        entries = self.state_pair(target, n, side)
                        entries[0] = state[4 * n + 2 * side].to(final.element_type)
                        entries[1] = state[4 * n + 2 * side + 1].to(final.element_type)

    @cute.jit
    def state_pointer(self, states, slot, head, row0, pair):
        """A lane's first entry of a head's state: V row row0, K column 2 * pair."""
        offset = slot * states.stride[0] + Int64(head) * (self.dim * self.dim)
        if cutlass.const_expr(self.v_first):
            offset += Int64(row0) * self.dim + 2 * pair
        else:
            offset += Int64(pair) * (2 * self.dim) + row0
        return states.iterator + offset

    def state_pair(self, first, n: int, side: int) -> Any:
        """Two neighbouring K entries, 8 n K columns and 8 * side V rows after the lane's first."""
        if self.v_first:
            return cute.make_tensor(first + (8 * side * self.dim + 8 * n), cute.make_layout(2))
        return cute.make_tensor(first + (8 * n * self.dim + 8 * side), cute.make_layout(2, stride=self.dim))

    @cute.jit
    def zero_rows(self, out, bounds, sequence, begin, length, live_length, head, column0, warp, lane):
        """Rows of a padding sequence, and this block's share of the rows beyond the last sequence."""
        row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
        zero = [Int32(0)] * 4
        for i in cutlass.range(live_length + row, length, 16, unroll=1):
            offset = Int64(begin + i) * out.stride[0] + Int64(head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)
        sequences = cute.size(bounds, mode=[0]) - 1
        for i in cutlass.range(
            Int32(bounds[sequences]) + sequence * 16 + row, cute.size(out, mode=[0]), sequences * 16, unroll=1
        ):
            offset = Int64(i) * out.stride[0] + Int64(head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)

    # ---- what depends on no state

    @cute.jit
    def inverse_warpgroup(self, storage, length, first, warp):
        """M of chunks first, first + self.aux_step, ... of the sequence. Rows 16 warp .. of a tile are this warp's; of the
        lower triangle it computes the 16 x 16 blocks left of the diagonal and the diagonal one, the rest stays zero."""
        lane = cute.arch.lane_idx()
        thread = warp * 32 + lane
        row, pair = lane // 4, lane % 4
        mma = self.product(CHUNK, True)
        keys = self.right(mma, storage.k, layouts.by_rows(self.dtype, CHUNK, self.dim, self.stages))
        left_operand = cute.make_rmem_tensor(mma.partition_shape_A((CHUNK, self.dim)), self.dtype)
        left_words = cute.recast_tensor(left_operand, Int32)
        kk = cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, CHUNK)), Float32)
        diagonal = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        inverse = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        left = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # the row of A so far, as operands
        m_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # blocks of M, to be stored when there is room
        rest_words = cute.make_rmem_tensor(cute.make_layout(16), Int32)
        ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
        k_base, m_base = storage.k.data_ptr().toint(), storage.m.data_ptr().toint()
        lower = storage.lower.data_ptr().toint()
        scratch = storage.scratch.data_ptr().toint() + warp * SCRATCH_BYTES
        # Where this lane points when its warp's 16 rows of a tile are moved as matrices, and when a block is an operand B.
        tile_row = warp * 16 + lane % 16
        matrix_row = lane % 16
        unit = lane // 16
        lane_column = Float32(lane % BLOCK)
        keeps_diagonal = (row >= 2 * pair, row >= 2 * pair + 1)
        row0 = warp * 16 + row

        num_chunks = (length + (CHUNK - 1)) // CHUNK
        for step in cutlass.range(first, num_chunks, self.aux_step, unroll=1):
            stage, parity = step % self.stages, step // self.stages & 1
            buffer, turn = step % BUFFERS, step // BUFFERS & 1
            half = step // self.aux_step % 2
            half_turn = step // self.aux_step // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            columns = rows + pair * 8
            valid = length - step * CHUNK
            cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, parity)
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
            row_beta = self.row_values(rows, BETA, row0)
            row_key = self.row_values(rows, KEY_FACTOR, row0)
            row_scale = (-row_beta[0] * row_key[0], -row_beta[1] * row_key[1])
            for u in cutlass.range_constexpr(3):
                if u < warp:
                    values = [None] * 8
                    for m in cutlass.range_constexpr(2):
                        keys_of = ptx.load_pair(columns + KEY_FACTOR * CHUNK * 4 + (2 * u + m) * 32)
                        for i in cutlass.range_constexpr(4):
                            values[4 * m + i] = kk[8 * u + 4 * m + i] * (row_scale[i // 2] * keys_of[i % 2])
                    self.store_block(lower, tile_row, 2 * u + unit, cutlass.Float16, values)
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
            values = [None] * 8
            for m in cutlass.range_constexpr(2):
                betas = ptx.load_pair(columns + BETA * CHUNK * 4 + warp * 64 + m * 32)
                cums = ptx.load_pair(columns + CUM * CHUNK * 4 + warp * 64 + m * 32)
                for i in cutlass.range_constexpr(4):
                    gap = self.gap(row_cum, cums, keeps_diagonal, m, i)
                    values[4 * m + i] = inverse[4 * m + i] * (betas[i % 2] * gap)
            self.keep_parts(m_words, rest_words, 3, values)
            reference, row_decay = self.row_decays(rows, row_cum, warp)
            for back in cutlass.range_constexpr(3):
                u = 2 - back
                if u < warp:
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
                        betas = ptx.load_pair(columns + BETA * CHUNK * 4 + (2 * u + m) * 32)
                        cums = ptx.load_pair(columns + CUM * CHUNK * 4 + (2 * u + m) * 32)
                        for odd in cutlass.range_constexpr(2):
                            column_part = betas[odd] * ptx.exp2(reference - cums[odd])
                            for side in cutlass.range_constexpr(2):
                                place = 4 * m + 2 * side + odd
                                values[place] = products[place] * (column_part * row_decay[side])
                    self.keep_parts(m_words, rest_words, u, values)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
            m_tile = m_base + buffer * (self.parts * TILE_BYTES)
            self.store_blocks(m_tile, tile_row, unit, warp, m_words)
            if cutlass.const_expr(self.parts == 2):
                self.store_blocks(m_tile + TILE_BYTES, tile_row, unit, warp, rest_words)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ready + buffer)

    @cute.jit
    def score_warpgroup(self, storage, scale, length, first, warp):
        """P and the vectors of the same chunks, rows and blocks as inverse_warpgroup's."""
        lane = cute.arch.lane_idx()
        thread = warp * 32 + lane
        row, pair = lane // 4, lane % 4
        mma = self.product(CHUNK, True)
        keys = self.right(mma, storage.k, layouts.by_rows(self.dtype, CHUNK, self.dim, self.stages))
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
            stage, parity = step % self.stages, step // self.stages & 1
            buffer, turn = step % BUFFERS, step // BUFFERS & 1
            half = step // self.aux_step % 2
            half_turn = step // self.aux_step // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            columns = rows + pair * 8
            cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, parity)
            self.load_rows(q_base + stage * self.key_bytes, left_words, tile_row, unit)
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
            cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
            cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)

            row_cum = self.row_values(rows, CUM, row0)
            reference, row_decay = self.row_decays(rows, row_cum, warp)
            row_part = (row_query[0] * row_decay[0], row_query[1] * row_decay[1])
            self.diagonal_block(qk, diagonal, warp)
            for u in cutlass.range_constexpr(3):
                if u < warp:
                    values = [None] * 8
                    for m in cutlass.range_constexpr(2):
                        n = 2 * u + m
                        keys_of = ptx.load_pair(columns + KEY_FACTOR * CHUNK * 4 + n * 32)
                        cums = ptx.load_pair(columns + CUM * CHUNK * 4 + n * 32)
                        for odd in cutlass.range_constexpr(2):
                            column_part = keys_of[odd] * ptx.exp2(reference - cums[odd])
                            for side in cutlass.range_constexpr(2):
                                values[4 * m + 2 * side + odd] = qk[4 * n + 2 * side + odd] * (row_part[side] * column_part)
                    self.keep_block(p_words, u, values)
            values = [None] * 8
            for m in cutlass.range_constexpr(2):
                keys_of = ptx.load_pair(columns + KEY_FACTOR * CHUNK * 4 + warp * 64 + m * 32)
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
            cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
            self.store_blocks(p_base + buffer * TILE_BYTES, tile_row, unit, warp, p_words)
            if thread < CHUNK:
                self.publish_vectors(storage.vectors.data_ptr().toint() + buffer * VECTOR_BYTES, rows, thread)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ready + buffer)

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
    def hand_over_warp(self, storage, length, rank):
        """M, P and the vectors of this block's chunks to the other block of the pair."""
        other = rank ^ 1
        own = storage.ready.data_ptr() + rank
        barrier = ptx.in_block(storage.ready.data_ptr().toint() + rank * 8, other)
        for step in cutlass.range(rank, (length + (CHUNK - 1)) // CHUNK, 2, unroll=1):
            cute.arch.mbarrier_wait(own, step // BUFFERS & 1)
            with cute.arch.elect_one():
                ptx.expect_in_cluster(barrier, Int32((self.parts + 1) * TILE_BYTES + VECTOR_BYTES))
                for field, size in (
                    (storage.m, self.parts * TILE_BYTES), (storage.vectors, VECTOR_BYTES), (storage.p, TILE_BYTES)
                ):  # fmt: skip
                    source = field.data_ptr().toint() + rank * size
                    ptx.copy_in_cluster(ptx.in_block(source, other), source, Int32(size), barrier)

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

    def keep_parts(self, words: Any, rests: Any, u: int, values: Any) -> None:
        """keep_block of M; rests takes what rounding took away."""
        self.keep_block(words, u, values)
        if self.parts == 2:
            differences = []
            for i in range(4):
                low, high = ptx.unpack(self.dtype, words[4 * u + i])
                differences += [values[2 * i] - low, values[2 * i + 1] - high]
            self.keep_block(rests, u, differences)

    def half_words(self, values: Any) -> list[Any]:
        return [ptx.pack(cutlass.Float16, values[2 * i], values[2 * i + 1]) for i in range(4)]

    # ---- gates

    @cute.jit
    def gate_warp(self, storage, g, beta, a_log, dt_bias, begin, length, head, first):
        """Cumulative log2 decays and beta of the chunks that this block prepares."""
        lane = cute.arch.lane_idx()
        gates = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        betas = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        minus_rate, bias = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(self.raw_gate):
            minus_rate = -cute.math.exp(a_log[head])
            bias = dt_bias[head]
        gates_full, gates_free = storage.gates_full.data_ptr(), storage.gates_free.data_ptr()
        self.load_gates(g, beta, gates, betas, begin, first * CHUNK, length, head, lane)
        for step in cutlass.range(first, (length + (CHUNK - 1)) // CHUNK, self.aux_step, unroll=1):
            half = step // self.aux_step % 2
            half_turn = step // self.aux_step // 2 & 1
            rows = storage.rows.data_ptr().toint() + half * AUX_BYTES
            cute.arch.mbarrier_wait(gates_free + half, half_turn ^ 1)
            self.publish_gates(rows, gates, betas, minus_rate, bias, length - step * CHUNK, lane)
            cute.arch.mbarrier_arrive(gates_full + half)
            self.load_gates(g, beta, gates, betas, begin, (step + self.aux_step) * CHUNK, length, head, lane)

    def sync_inverse(self) -> None:
        cute.arch.barrier(barrier_id=INVERSE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def where(self, condition, value, other):
        result = other
        if condition:
            result = value
        return result

    @cute.jit
    def decay(self, exponent):
        """2 ** exponent; above the diagonal, where the result is thrown away, the exponent may be positive."""
        return cute.math.exp2(cute.arch.fmin(exponent, Float32(0.0)), fastmath=True)

    def row_values(self, rows: Any, kind: int, row0: Any) -> tuple[Any, Any]:
        """Of this lane's two rows of the tile."""
        place = rows + kind * CHUNK * 4 + row0 * 4
        return ptx.load_one(place), ptx.load_one(place + 32)

    @cute.jit
    def load_gates(self, g, beta, gates, betas, begin, offset, length, head, lane):
        """Lane l reads tokens 2 l and 2 l + 1 of the chunk."""
        for i in cutlass.range_constexpr(2):
            token = offset + 2 * lane + i
            gates[i] = Float32(0.0)
            betas[i] = Float32(0.0)
            if token < length:
                if cutlass.const_expr(self.has_gate):
                    gates[i] = self.element(g, begin + token, head)
                if cutlass.const_expr(self.has_beta):
                    betas[i] = self.element(beta, begin + token, head)

    @cute.jit
    def element(self, x, token, head):
        offset = Int64(token) * x.stride[0] + Int64(head) * x.stride[1]
        return cute.make_tensor(x.iterator + offset, cute.make_layout(1))[0].to(Float32)

    @cute.jit
    def publish_gates(self, rows, gates, betas, minus_rate, bias, valid, lane):
        """Cumulative log2 decays and beta; tokens past the end have g = 0 and beta = 0."""
        logs = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        strengths = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        for i in cutlass.range_constexpr(2):
            log_decay = gates[i]
            if cutlass.const_expr(self.raw_gate):
                raw = gates[i] + bias
                softplus = raw
                if raw <= SOFTPLUS_THRESHOLD:
                    softplus = cute.math.log1p(cute.math.exp(raw))
                log_decay = minus_rate * softplus
            strength = Float32(1.0)
            if cutlass.const_expr(self.has_beta):
                strength = betas[i]
                if cutlass.const_expr(self.raw_beta):
                    strength = 1.0 / (1.0 + cute.math.exp(-betas[i]))
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
        ptx.store_pair(rows + CUM * CHUNK * 4 + lane * 8, first, first + logs[1])
        ptx.store_pair(rows + BETA * CHUNK * 4 + lane * 8, strengths[0], strengths[1])

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
        factors = []
        for side in range(2):
            sums = [Float32(0.0)] * 2
            for step in range(self.dim // 16):
                for part in range(2):
                    low, high = ptx.unpack(self.dtype, words[4 * step + side + 2 * part])
                    sums[part] = sums[part] + low * low
                    sums[part] = sums[part] + high * high
            total = sums[0] + sums[1]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            factors.append(cute.math.rsqrt(total + NORM_EPS) * scale)
        return factors[0], factors[1]

    @cute.jit
    def key_factors(self, diagonal, rows, row, pair, row0):
        """1 / |k| from the diagonal of K K^T, by the lanes that hold it."""
        first, second = Float32(1.0), Float32(1.0)
        if cutlass.const_expr(self.normalize):
            first = cute.math.rsqrt(self.where(row % 2 == 1, diagonal[1], diagonal[0]) + NORM_EPS)
            second = cute.math.rsqrt(self.where(row % 2 == 1, diagonal[7], diagonal[6]) + NORM_EPS)
        if pair == row // 2:
            place = rows + KEY_FACTOR * CHUNK * 4 + row0 * 4
            ptx.store_one(place, first)
            ptx.store_one(place + 32, second)

    @cute.jit
    def invert_block(
        self, diagonal, inverse, row_scale, columns, lower, scratch, tile_row, unit, warp, lane_column, lane, row, pair
    ):
        """The warp's diagonal block of (I + L)^-1, by forward substitution in float32, a lane per column; to `inverse` and, in
        float16, to `lower`. diagonal: of K K^T; columns: of the block's rows of factors."""
        for m in cutlass.range_constexpr(2):
            keys_of = ptx.load_pair(columns + KEY_FACTOR * CHUNK * 4 + m * 32)
            for i in cutlass.range_constexpr(4):
                side, odd = i // 2, i % 2
                # What lies above the diagonal is stored only where it shares a store's condition, and never read.
                if cutlass.const_expr(m <= side):
                    place = scratch + (8 * m + 2 * pair + odd) * COLUMN_PITCH + (row + 8 * side) * 4
                    ptx.store_one(place, diagonal[4 * m + i] * (row_scale[side] * keys_of[odd]))
        cute.arch.sync_warp()
        x = cute.make_rmem_tensor(cute.make_layout(BLOCK), Float32)
        for i in cutlass.range_constexpr(BLOCK):
            x[i] = ptx.is_equal(lane_column, Float32(i))
        for step in cutlass.range_constexpr(BLOCK - 1):
            for part in cutlass.range_constexpr((step + 1) // 4, BLOCK // 4):
                factors = ptx.load_four(scratch + step * COLUMN_PITCH + part * 16)
                for i in cutlass.range_constexpr(4):
                    if cutlass.const_expr(4 * part + i > step):
                        x[4 * part + i] = x[4 * part + i] + factors[i] * x[step]
        cute.arch.sync_warp()
        if lane < BLOCK:
            for i in cutlass.range_constexpr(BLOCK):
                ptx.store_one(scratch + i * ROW_PITCH + lane * 4, x[i])
        cute.arch.sync_warp()
        for m in cutlass.range_constexpr(2):
            for side in cutlass.range_constexpr(2):
                pairs = ptx.load_pair(scratch + (row + 8 * side) * ROW_PITCH + (8 * m + 2 * pair) * 4)
                inverse[4 * m + 2 * side] = pairs[0]
                inverse[4 * m + 2 * side + 1] = pairs[1]
        self.store_block(lower, tile_row, 2 * warp + unit, cutlass.Float16, inverse)
        cute.arch.sync_warp()  # the next chunk's stores into scratch come after these loads

    @cute.jit
    def publish_vectors(self, vectors, rows, thread):
        cum = ptx.load_one(rows + CUM * CHUNK * 4 + thread * 4)
        total = ptx.load_one(rows + CUM * CHUNK * 4 + (CHUNK - 1) * 4)
        key = ptx.load_one(rows + KEY_FACTOR * CHUNK * 4 + thread * 4)
        query = ptx.load_one(rows + QUERY_FACTOR * CHUNK * 4 + thread * 4)
        grown = cute.math.exp2(cum, fastmath=True)
        ptx.store_one(vectors + STATE_KEY * CHUNK * 4 + thread * 4, grown * key)
        ptx.store_one(vectors + KEY_TO_LAST * CHUNK * 4 + thread * 4, self.decay(total - cum) * key)
        ptx.store_one(vectors + STATE_QUERY * CHUNK * 4 + thread * 4, grown * query)
        if thread == 0:
            ptx.store_one(vectors + VECTORS * CHUNK * 4, cute.math.exp2(total, fastmath=True))
