"""The first launch of a split call: the summary (h, P) of every segment but a sequence's last.

Both are runs of the chain of fused.py over the segment's chunks without outputs: h from a zero state (segment 0: from the
sequence's own), P with V = 0 from the identity. A segment has only whole chunks here.

    U^T  = S^T K^T
    W^T  = V^T - exp(c) f U^T
    Y^T  = W^T + W^T M^T
    S^T  = exp(c_last) S^T + (Y^T exp(c_last - c) f beta) K

At D = 128 the two blocks of a head and segment are a cluster: block 0 runs h, block 1 runs P, with two state warpgroups of 64
columns each, and block b prepares the chunks of parity b for both. At D = 64 one block has a warpgroup for each. The other
warpgroups: inverse (M, as in the fused kernel), and one whose warps copy K and V in, make the gates, the vectors, and hand over.

    barrier             arrivals                                      waits
    keys_full[stage]    1: the copying lane, with the bytes of K, V   state, inverse
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

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.problems import ChunkParams
from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import TokenCopies, partition_tiles
from kernels_cute.chunk.dispatch import works
from kernels_cute.chunk.operands import exp2_clamped, set_registers
from kernels_cute.chunk.roles.gates import gate_warp
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
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
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.segments import find_segment
from kernels_cute.chunk.split.summary_state import summary_warpgroup
from kernels_cute.common import ptx

STAGES = 5
_STATE_REGISTERS, _INVERSE_REGISTERS, _COPY_REGISTERS = 168, 136, 40  # a thread
STATE_GROUPS = 2


class SummaryChunk:
    """The first launch of a split call. spec: of the second."""

    def __init__(self, spec: ChunkSpec):
        self.spec = spec.with_stages(STAGES)

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, segment_tokens: Int32, split_if_longest_exceeds: Int32):
        if works(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            block, _, _ = cute.arch.block_idx()
            slot = block // (self.spec.sharers * self.spec.heads)
            segment = find_segment(self.spec, params, slot, segment_tokens)
            if segment.is_summarized & (segment.index < segment.count - 1):
                head, rank = block // self.spec.sharers % self.spec.heads, block % 2
                summarize(self.spec, params, copies, head, rank, segment)


def storage_type(spec):
    stages, pieces = spec.stages, spec.dim // 64
    tile = CHUNK * 64

    @cute.struct
    class Storage:
        keys_full: cute.struct.MemRange[Int64, stages]
        empty: cute.struct.MemRange[Int64, stages]
        ready: cute.struct.MemRange[Int64, BUFFERS]
        taken: cute.struct.MemRange[Int64, BUFFERS]
        gates_full: cute.struct.MemRange[Int64, 2]
        factors_full: cute.struct.MemRange[Int64, 2]
        gates_free: cute.struct.MemRange[Int64, 2]
        vectors: cute.struct.Align[cute.struct.MemRange[Float32, BUFFERS * VECTOR_BYTES // 4], 128]
        rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * AUX_BYTES // 4], 128]
        scratch: cute.struct.Align[cute.struct.MemRange[Float32, 4 * SCRATCH_BYTES // 4], 128]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * stages], 1024]
        v: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * stages], 1024]
        zeros: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile], 1024]
        m: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * BUFFERS], 1024]
        lower: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, tile], 1024]

    return Storage


@cute.jit
def summarize(spec, params, copies, head, rank, segment):
    """The whole of a block; rank: in the pair."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = cutlass.utils.SmemAllocator().allocate(storage_type(spec))
    if warp == 0:
        cpasync.prefetch_descriptor(copies.k_atom)
        cpasync.prefetch_descriptor(copies.v_atom)
        with cute.arch.elect_one():
            init_barriers(spec, storage, rank)
    thread, _, _ = cute.arch.thread_idx()
    # Above the diagonal M stays zero.
    for i in cutlass.range(thread, BUFFERS * TILE_BYTES // 16, spec.threads, unroll=1):
        ptx.store_zeros(storage.m.data_ptr().toint() + i * 16)
    for i in cutlass.range(thread, TILE_BYTES // 16, spec.threads, unroll=1):
        ptx.store_zeros(storage.zeros.data_ptr().toint() + i * 16)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(spec.paired):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    begin, length = segment.begin, segment.length
    first = rank if cutlass.const_expr(spec.paired) else Int32(0)
    if warp < 4 * STATE_GROUPS:
        set_registers(spec, _STATE_REGISTERS)
        summary_warpgroup(spec, storage, params, head, segment, rank, warp // 4, warp % 4)
    elif warp < 4 * (STATE_GROUPS + 1):
        set_registers(spec, _INVERSE_REGISTERS)
        inverse_warpgroup(spec, storage, length, first, warp % 4)
    else:
        set_registers(spec, _COPY_REGISTERS)
        copier = warp % 4
        if copier == 0:
            copy_keys_warp(spec, storage, copies, begin, length, head, rank)
        if copier == 1:
            gate_warp(spec, storage, params, begin, length, head, first)
        if copier == 2:
            vector_warp(spec, storage, length, first)
        if cutlass.const_expr(spec.paired):
            if copier == 3:
                hand_m_over_warp(storage, length, rank)
    if cutlass.const_expr(spec.paired):
        # The other block may still write to this one's shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def init_barriers(spec, storage, rank):
    for stage in cutlass.range_constexpr(spec.stages):
        cute.arch.mbarrier_init(storage.keys_full.data_ptr() + stage, 1)
        cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 4 * STATE_GROUPS)
    for buffer in cutlass.range_constexpr(BUFFERS):
        count = Int32(WARPGROUP + 32)
        if cutlass.const_expr(spec.paired):
            if rank != buffer:  # of a pair, block b fills buffer b of both
                count = Int32(1)
        cute.arch.mbarrier_init(storage.ready.data_ptr() + buffer, count)
        cute.arch.mbarrier_init(storage.taken.data_ptr() + buffer, 4 * STATE_GROUPS * spec.sharers)
    for i in cutlass.range_constexpr(2):
        cute.arch.mbarrier_init(storage.gates_full.data_ptr() + i, 32)
        cute.arch.mbarrier_init(storage.factors_full.data_ptr() + i, WARPGROUP)
        cute.arch.mbarrier_init(storage.gates_free.data_ptr() + i, 5)


@cute.jit
def copy_keys_warp(spec, storage, copies, begin, length, head, rank):
    """K, and V where this block runs h."""
    pieces = spec.dim // 64
    to_k, from_k = partition_tiles(
        spec, storage.k, copies.k_atom, copies.k, spec.dim, spec.stages, begin, head // spec.k_group, 0
    )
    layout = layouts.by_rows(spec.dtype, CHUNK, 64, pieces * spec.stages)
    shared = storage.v.get_tensor(layout.outer, swizzle=layout.inner)
    rows = cute.domain_offset((begin, 0), copies.v[None, None, head // spec.v_group])
    to_v, from_v = cpasync.tma_partition(
        copies.v_atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
        cute.group_modes(cute.local_tile(rows, (CHUNK, 64), (None, None)), 0, 2),
    )  # fmt: skip
    full, empty = storage.keys_full.data_ptr(), storage.empty.data_ptr()
    has_values = Boolean(True)
    num_bytes = Int32(2 * spec.key_bytes)
    if cutlass.const_expr(spec.paired):
        if rank == 1:
            has_values = Boolean(False)
            num_bytes = Int32(spec.key_bytes)
    for step in cutlass.range(length // CHUNK, unroll=1):
        stage, parity = step % spec.stages, step // spec.stages & 1
        cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_bytes)
        cute.copy(copies.k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full + stage)
        if has_values:
            for piece in cutlass.range_constexpr(pieces):
                source, target = from_v[None, step, piece], to_v[None, stage * pieces + piece]
                cute.copy(copies.v_atom, source, target, tma_bar_ptr=full + stage)


@cute.jit
def vector_warp(spec, storage, length, first):
    """The factors that the state warpgroups need of the chunks that this block prepares."""
    lane = cute.arch.lane_idx()
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    for step in cutlass.range(first, length // CHUNK, spec.aux_step, unroll=1):
        buffer, turn = step % BUFFERS, step // BUFFERS & 1
        half = step // spec.aux_step % 2
        half_turn = step // spec.aux_step // 2 & 1
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
            ptx.store_one(vectors + KEY_TO_LAST * CHUNK * 4 + token * 4, exp2_clamped(total - cum) * key_beta)
        if lane == 0:
            ptx.store_one(vectors + VECTORS * CHUNK * 4, cute.math.exp2(total, fastmath=True))
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ready + buffer)


@cute.jit
def hand_m_over_warp(storage, length, rank):
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
