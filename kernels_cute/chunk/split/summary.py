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

The barriers: barriers.py. A state warp waits for what inverse made of a stage before it frees the stage.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from gdn.problems import ChunkParams
from kernels_cute.chunk import shape
from kernels_cute.chunk.arguments import TokenCopies, partition_tiles
from kernels_cute.chunk.barriers import summary_barriers, summary_storage
from kernels_cute.chunk.dispatch import works
from kernels_cute.chunk.operands import exp2_clamped, set_registers
from kernels_cute.chunk.rings import OwnChunks
from kernels_cute.chunk.roles.gates import gate_warp
from kernels_cute.chunk.roles.hand_over import hand_over_warp
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
from kernels_cute.chunk.scheduler import segment_work_tile
from kernels_cute.chunk.shape import BUFFERS, CHUNK, CUM, KEY_BETA, KEY_FACTOR, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.segments import find_segment
from kernels_cute.chunk.split.summary_state import summary_warpgroup
from kernels_cute.common import ptx
from kernels_cute.common.barriers import init_barriers

STAGES = 5
_STATE_REGISTERS, _INVERSE_REGISTERS, _COPY_REGISTERS = 168, 136, 40  # a thread
STATE_GROUPS = 2


class SummaryChunk:
    """The first launch of a split call. spec: of the second."""

    def __init__(self, spec: ChunkSpec):
        self.spec = spec.changed(stages=STAGES, key_stages=STAGES)

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, segment_tokens: Int32, split_if_longest_exceeds: Int32):
        if works(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            block, _, _ = cute.arch.block_idx()
            slot = block // (self.spec.sharers * self.spec.heads)
            segment = find_segment(self.spec, params, slot, segment_tokens)
            if segment.is_summarized & (segment.index < segment.count - 1):
                head, rank = block // self.spec.sharers % self.spec.heads, block % 2
                summarize(self.spec, params, copies, head, rank, segment)


@cute.jit
def summarize(spec, params, copies, head, rank, segment):
    """The whole of a block; rank: in the pair."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = cutlass.utils.SmemAllocator().allocate(summary_storage(spec))
    if warp == 0:
        cpasync.prefetch_descriptor(copies.k_atom)
        cpasync.prefetch_descriptor(copies.v_atom)
        with cute.arch.elect_one():
            init_barriers(summary_barriers(spec), storage, rank)
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

    item = segment_work_tile(segment, head, 0)._replace(live_length=segment.length)
    own = OwnChunks(rank if cutlass.const_expr(spec.paired) else Int32(0), spec.aux_step)
    if warp < 4 * STATE_GROUPS:
        set_registers(spec, _STATE_REGISTERS)
        summary_warpgroup(spec, storage, params, head, segment, rank, warp // 4, warp % 4)
    elif warp < 4 * (STATE_GROUPS + 1):
        set_registers(spec, _INVERSE_REGISTERS)
        inverse_warpgroup(spec, storage, own, item.length, warp % 4)
    else:
        set_registers(spec, _COPY_REGISTERS)
        copier = warp % 4
        if copier == 0:
            copy_keys_warp(spec, storage, copies, item, rank)
        if copier == 1:
            gate_warp(spec, storage, params, item, own)
        if copier == 2:
            vector_warp(spec, storage, item.length, own)
        if cutlass.const_expr(spec.paired):
            if copier == 3:
                tiles = ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES))
                hand_over_warp(storage, tiles, own, item.length, rank)
    if cutlass.const_expr(spec.paired):
        # The other block may still write to this one's shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def copy_keys_warp(spec, storage, copies, item, rank):
    """K, and V where this block runs h."""
    pieces, stages, begin = spec.dim // 64, spec.stages, item.begin
    k_head, v_head = item.head // spec.k_group, item.head // spec.v_group
    to_k, from_k = partition_tiles(spec, storage.k, copies.k_atom, copies.k, spec.dim, stages, begin, k_head, 0)
    to_v, from_v = partition_tiles(spec, storage.v, copies.v_atom, copies.v, 64, pieces * stages, begin, v_head, None)
    full, empty = storage.k_full.data_ptr(), storage.empty.data_ptr()
    has_values = Boolean(True)
    num_bytes = Int32(2 * spec.key_bytes)
    if cutlass.const_expr(spec.paired):
        if rank == 1:
            has_values = Boolean(False)
            num_bytes = Int32(spec.key_bytes)
    for step in cutlass.range(item.length // CHUNK, unroll=1):
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
def vector_warp(spec, storage, length, own):
    """The factors that the state warpgroups need of the chunks that this block prepares."""
    lane = cute.arch.lane_idx()
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    for step in cutlass.range(own.first, length // CHUNK, own.stride, unroll=1):
        buffer, turn = step % BUFFERS, step // BUFFERS & 1
        half = step // spec.aux_step % 2
        half_turn = step // spec.aux_step // 2 & 1
        rows = storage.rows.data_ptr().toint() + half * shape.AUX_BYTES
        vectors = storage.vectors.data_ptr().toint() + buffer * VECTOR_BYTES
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + half, half_turn)
        cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + half, half_turn)
        cute.arch.mbarrier_wait(taken + buffer, turn ^ 1)
        total = ptx.load_one(rows + shape.LAST_CUM)
        for i in cutlass.range_constexpr(CHUNK // 32):
            token = lane + 32 * i
            cum, key, key_beta = (ptx.load_one(rows + kind + token * 4) for kind in (CUM, KEY_FACTOR, KEY_BETA))
            ptx.store_one(vectors + shape.STATE_KEY + token * 4, cute.math.exp2(cum, fastmath=True) * key)
            ptx.store_one(vectors + shape.KEY_TO_LAST + token * 4, exp2_clamped(total - cum) * key_beta)
        if lane == 0:
            ptx.store_one(vectors + shape.LAST_DECAY, cute.math.exp2(total, fastmath=True))
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ready + buffer)
