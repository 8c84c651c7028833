"""The fused chunk kernel: everything of a sequence, state head and slice of V columns in one block, one such item after the
other (`_chunk_items`).

With c the inclusive cumulative sum of the log decays of a chunk, f the factors of the L2 norms (1 where none are asked for)
and all of M, P and the vectors computed here and never written to memory:

    A    = (I + strict_lower(f_i f_j beta_j k_i . k_j))^-1
    M    = strict_lower(A_ij exp(c_i - c_j))                     16-bit
    P    = lower(scale fq_i f_j beta_j exp(c_i - c_j) q_i . k_j) 16-bit
    U^T  = S^T K^T              O^T = S^T Q^T             S^T rounded to 16 bits, from registers
    W^T  = V^T - exp(c) f U^T                                    float32
    Y^T  = W^T + W^T M^T
    S^T  = exp(c_last) S^T + (Y^T exp(c_last - c) f beta) K
    O^T  = exp(c) fq scale O^T + Y^T P^T

Y is the new values over beta. With beta in the columns of L, the diagonal of A is exactly 1: it is left out of M, the product
adds to W in float32, and 16 bits of M are enough. With beta in the rows, A's columns times beta are what W is multiplied with,
and rounding their diagonal costs more than all the rest.

Roles, a warpgroup each: state (64 V columns of S^T, the chain in registers), inverse (M), score (P and the vectors; neither
depends on the state), and one whose warps copy K, Q, V in, make the gates, copy O out, and hand over. At D = 128 the two
blocks of a head are a cluster: block b prepares the chunks of parity b for both, into buffer b of `ready` and `taken`;
at D = 64 a block prepares every chunk itself, buffers in turn.

    barrier             arrivals                                      waits
    keys_full[stage]    1: the copying lane, with the bytes of K      state, inverse, score
    keys_empty[stage]   4: a lane of a state warp, S done             the copying warp
    full[stage]         1: the copying lane, with those of Q and V    state, score
    stored[stage]       4: a lane of a state warp, O where V was      the storing warp
    empty[stage]        1: the storing warp, O read                   the copying warp
    ready[buffer]       256: inverse and score of this block; or      state; the handing warp
                        1: the other block, with the bytes
    taken[buffer]       4 a block that takes: a lane of a state warp  inverse, score
    gates_full[half]    32: the gate warp                             inverse, score
    factors_full[half]  128: inverse, key factors written             score
    gates_free[half]    8: a lane of each inverse and score warp      the gate warp
    named 1, 2, 3       128 threads: within inverse, score, state
A state warp is done with K of a stage, and waits for what inverse and score made of it, before its `keys_empty`; with Q and V,
likewise, before its `stored`. K has a ring of its own, a stage longer, because M takes longest to make.
`half` alternates over the chunks that a block prepares. Arrivals of the other block on `taken` are relaxed: what they free
has been read by then, and it is refilled by stores that wait for them, or by copies that count bytes.

Stages, buffers, halves and phases follow the count of chunks since the block began, over all of its items, so that copies,
gates, M and P run ahead into the next item while the state ends the last. Both blocks of a pair have the same items.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from gdn.problems import ChunkParams
from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import TokenCopies, packed_params
from kernels_cute.chunk.copies import CopyRoles
from kernels_cute.chunk.dispatch import Choice
from kernels_cute.chunk.scheduler import RECORD_BYTES, RECORDS, SORTED, Items
from kernels_cute.chunk.shape import (
    AUX_BYTES,
    BUFFERS,
    CHUNK,
    KEY_STAGES,
    SCRATCH_BYTES,
    START_BARRIERS,
    TILE_BYTES,
    VECTOR_BYTES,
    WARPGROUP,
)
from kernels_cute.chunk.state import StateRole
from kernels_cute.chunk.tiles import TileRoles
from kernels_cute.common import ptx


class FusedChunk(StateRole, TileRoles, CopyRoles, Items, Choice):
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
        has_checkpoints: bool,
        stages: int,
        prefetch: int,
        registers: tuple[int, int, int, int],
        deals: bool = False,
        decides: bool = False,
    ):
        self.heads, self.q_group, self.k_group, self.v_group = heads, q_group, k_group, v_group
        self.dim, self.dtype = dim, dtype
        self.has_gate, self.raw_gate = has_gate, raw_gate
        self.has_beta, self.raw_beta = has_beta, raw_beta
        self.normalize, self.v_first = normalize, v_first
        self.pooled, self.has_initial, self.has_mask = pooled, has_initial, has_mask
        self.has_final, self.has_final_indices = has_final, has_final_indices
        self.has_checkpoints = has_checkpoints
        self.stages, self.prefetch = stages, prefetch
        self.key_stages = KEY_STAGES
        self.state_registers, self.inverse_registers, self.score_registers, self.copy_registers = registers
        self.deals = deals  # blocks take item after item, else one is all that a block works on
        self.decides = decides  # the call has launches for whole sequences and for segments
        self.columns = 64  # of V, a block
        self.slices = dim // self.columns
        self.paired = dim == 128
        self.sharers = 2 if self.paired else 1  # blocks that take from a `taken`
        self.units = heads * self.slices // self.sharers  # items of a sequence
        self.aux_step = 2 if self.paired else 1  # chunks from one of this block's own to the next
        self.threads = 4 * WARPGROUP
        self.key_bytes = CHUNK * dim * 2
        self.value_bytes = CHUNK * self.columns * 2

    @cute.jit
    def launch(self, *values):
        """values: Params, clusters of the grid at most, split_if_longest_exceeds, stream."""
        params, (max_clusters, split_if_longest_exceeds, stream) = packed_params(values)
        items = (cute.size(params.cu_seqlens, mode=[0]) - 1) * self.units
        self.kernel(params, self.token_copies(params), split_if_longest_exceeds).launch(
            grid=(self.sharers * cutlass.min(items, max_clusters), 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.sharers, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def token_copies(self, params: ChunkParams) -> TokenCopies:
        return TokenCopies(
            *self.copy_in(params.q, self.dim),
            *self.copy_in(params.k, self.dim),
            *self.copy_in(params.v, self.columns),
            *self.copy_out(params.out),
        )

    def copy_in(self, x: Any, columns: int) -> Any:
        """The bulk copy of a chunk's tile of columns into shared memory, and its tensor."""
        layout = layouts.by_rows(self.dtype, CHUNK, columns)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), self.tokens(x), layout, (CHUNK, columns))

    def copy_out(self, x: Any) -> Any:
        layout = layouts.by_rows(self.dtype, CHUNK, 64)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), self.tokens(x), layout, (CHUNK, 64))

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
            keys_full: cute.struct.MemRange[Int64, self.key_stages]
            keys_empty: cute.struct.MemRange[Int64, self.key_stages]
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            stored: cute.struct.MemRange[Int64, stages]
            ready: cute.struct.MemRange[Int64, BUFFERS]
            taken: cute.struct.MemRange[Int64, BUFFERS]
            gates_full: cute.struct.MemRange[Int64, 2]
            factors_full: cute.struct.MemRange[Int64, 2]
            gates_free: cute.struct.MemRange[Int64, 2]
            start: cute.struct.MemRange[Int64, START_BARRIERS]  # of a split call, see _chunk_compose
            dealt: cute.struct.MemRange[Int64, RECORDS]
            noted: cute.struct.MemRange[Int64, RECORDS]
            records: cute.struct.Align[cute.struct.MemRange[Int32, RECORDS * RECORD_BYTES // 4], 16]
            order: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, SORTED], 16]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, BUFFERS * VECTOR_BYTES // 4], 128]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * AUX_BYTES // 4], 128]
            scratch: cute.struct.Align[cute.struct.MemRange[Float32, 4 * SCRATCH_BYTES // 4], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * self.key_stages], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * stages], 1024]
            m: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * BUFFERS], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * BUFFERS], 1024]
            lower: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, tile], 1024]

        return Storage

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, split_if_longest_exceeds: Int32):
        if self.works(params.cu_seqlens, split_if_longest_exceeds):
            self.run(params, copies, None)

    @cute.jit
    def run(self, params, copies, segment):
        """The whole of a block; segment: what a block of a split call works on, None = a sequence."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        block, _, _ = cute.arch.block_idx()
        rank = block % 2  # in the pair
        # The warp that copies in makes the barriers: it need not wait for the others to begin.
        first_copier = 12
        starts_early = self.paired and segment is None
        if warp == first_copier:
            cpasync.prefetch_descriptor(copies.q_atom)
            cpasync.prefetch_descriptor(copies.k_atom)
            cpasync.prefetch_descriptor(copies.v_atom)
            cpasync.prefetch_descriptor(copies.out_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.key_stages):
                    cute.arch.mbarrier_init(storage.keys_full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.keys_empty.data_ptr() + stage, 4)
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(storage.full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.stored.data_ptr() + stage, 4)
                for buffer in cutlass.range_constexpr(BUFFERS):
                    # Of a pair, block b fills buffer b of both.
                    if cutlass.const_expr(self.paired):
                        count = Int32(1)
                        if rank == buffer:
                            count = Int32(2 * WARPGROUP)
                        cute.arch.mbarrier_init(storage.ready.data_ptr() + buffer, count)
                    else:
                        cute.arch.mbarrier_init(storage.ready.data_ptr() + buffer, 2 * WARPGROUP)
                    cute.arch.mbarrier_init(storage.taken.data_ptr() + buffer, 4 * self.sharers)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(storage.gates_full.data_ptr() + i, 32)
                    cute.arch.mbarrier_init(storage.factors_full.data_ptr() + i, WARPGROUP)
                    cute.arch.mbarrier_init(storage.gates_free.data_ptr() + i, 8)
                if cutlass.const_expr(self.deals):
                    for record in cutlass.range_constexpr(RECORDS):
                        cute.arch.mbarrier_init(storage.dealt.data_ptr() + record, 1)
                        # A lane of every warp: of state, inverse, score and the copying ones.
                        cute.arch.mbarrier_init(storage.noted.data_ptr() + record, 14 + self.sharers)
                if cutlass.const_expr(segment is not None):
                    self.init_start(storage)
            cute.arch.sync_warp()
        thread, _, _ = cute.arch.thread_idx()
        is_sorted = Boolean(False)
        cluster = block // self.sharers
        piece = block % self.slices
        head = block // self.slices % self.heads
        if cutlass.const_expr(segment is None):
            # Asked for before the barriers below, which take as long as the answer.
            only = first_item = self.describe(params, cluster // self.units, cluster % self.units, rank)
        else:
            only = self.item_of(segment, head, piece)
        if cutlass.const_expr(self.deals):
            only = None
            is_sorted = self.is_sorted(params.cu_seqlens)
            if is_sorted:
                self.write_keys(storage, params, thread)
        # Above the diagonal, and M on it, they stay zero.
        for i in cutlass.range(thread, BUFFERS * TILE_BYTES // 16, self.threads, unroll=1):
            ptx.store_zeros(storage.m.data_ptr().toint() + i * 16)
        for i in cutlass.range(thread, BUFFERS * TILE_BYTES // 16, self.threads, unroll=1):
            ptx.store_zeros(storage.p.data_ptr().toint() + i * 16)
        if cutlass.const_expr(self.deals):
            if is_sorted:
                cute.arch.sync_threads()
                self.sort(storage, params.cu_seqlens, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.paired):
            # A releasing arrival waits for global memory too; for the other block the fences above are enough.
            cute.arch.fence_acq_rel_cta()
            cute.arch.cluster_arrive_relaxed()
            if cutlass.const_expr(starts_early):
                if warp != first_copier:
                    cute.arch.cluster_wait()
            else:
                cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        # Every role counts items, and the chunks of those before.
        number, base, going = Int32(0), Int32(0), Boolean(True)
        if warp < 4:
            self.set_registers(self.state_registers)
            self.state_warpgroup(storage, params, head, piece, warp % 4, segment, only)
        elif warp < 8:
            self.set_registers(self.inverse_registers)
            while going:
                item = self.take(storage, number, only)
                self.inverse_warpgroup(storage, item.live_length, self.first_own(base, rank), warp % 4, base)
                number, base, going = number + 1, base + self.num_chunks(item.live_length), self.goes_on(item, only)
        elif warp < 12:
            self.set_registers(self.score_registers)
            while going:
                item = self.take(storage, number, only)
                self.score_warpgroup(storage, params.scale, item.live_length, self.first_own(base, rank), warp % 4, base)
                number, base, going = number + 1, base + self.num_chunks(item.live_length), self.goes_on(item, only)
        else:
            self.set_registers(self.copy_registers)
            copier = warp % 4
            if copier == 0:
                if cutlass.const_expr(segment is not None):
                    self.bring_start(storage, head, segment)
                while going:
                    item = self.take(storage, number, only)
                    if cutlass.const_expr(self.deals):
                        if number > 0:
                            self.prefetch_state(params.initial_state, item)
                    self.copy_warp(storage, copies, item, base)
                    number, base, going = number + 1, base + self.num_chunks(item.live_length), self.goes_on(item, only)
                if cutlass.const_expr(starts_early):
                    # Nothing of the other block was touched; the barrier at the end needs this one done.
                    cute.arch.cluster_wait()
            if copier == 1:
                if cutlass.const_expr(self.deals):
                    self.deal_and_gate(storage, params, is_sorted, cluster, rank, first_item)
                else:
                    first = self.first_own(base, rank)
                    self.gate_warp(storage, params, only.begin, only.live_length, only.head, first)
            if copier == 2:
                while going:
                    item = self.take(storage, number, only)
                    self.store_warp(storage, copies, params.out, item, base)
                    number, base, going = number + 1, base + self.num_chunks(item.live_length), self.goes_on(item, only)
            if cutlass.const_expr(self.paired):
                if copier == 3:
                    while going:
                        item = self.take(storage, number, only)
                        self.hand_over_warp(storage, item.live_length, rank, self.first_own(base, rank), base)
                        number, base, going = number + 1, base + self.num_chunks(item.live_length), self.goes_on(item, only)
        if cutlass.const_expr(self.paired):
            # The other block may still write to this one's shared memory; a releasing arrival comes after its last ones.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # Counts of chunks are never negative, which the compiler cannot see where a block has items: its signed divisions would stand
    # in every role's wait. Shifts are the same for both signs.
    def stage_of(self, count: Any) -> tuple[Any, Any]:
        """A chunk's stage, and the parity of that stage's turn."""
        return self.place_in(self.stages, count)

    def key_stage_of(self, count: Any) -> tuple[Any, Any]:
        """The same of K."""
        return self.place_in(self.key_stages, count)

    def keys_full(self, storage: Any) -> Any:
        return storage.keys_full.data_ptr()

    def place_in(self, stages: int, count: Any) -> tuple[Any, Any]:
        if stages & (stages - 1):
            turn = Int32(cutlass.Uint32(count) // cutlass.Uint32(stages))
            return count - turn * stages, turn & 1
        return count & (stages - 1), count >> (stages.bit_length() - 1) & 1

    def half_of(self, count: Any) -> tuple[Any, Any]:
        """The same of `half`."""
        own = count >> (self.aux_step - 1)
        return own & 1, own >> 1 & 1

    def set_registers(self, count: int) -> None:
        """What a thread has at launch is 65536 over the threads, in steps of 8."""
        if count > 65536 // self.threads // 8 * 8:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

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
