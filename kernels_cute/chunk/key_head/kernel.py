"""The chunk kernel with two state heads of a key head a cluster, for batches with more work tiles than clusters run at once.

The formulas: fused.py. A work tile is a (sequence, pair of state heads that share K and Q). Each of the two blocks of a cluster
carries 64 V columns of both heads, and makes M, P and the vectors of both for the chunks of its parity, for both blocks. Always
persistent: scheduler.py. Data flow, registers, shared memory and barriers: DESIGN.md; the table of barriers: barriers.py.
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import scheduler
from kernels_cute.chunk.arguments import TokenCopies, packed_params, token_copies
from kernels_cute.chunk.fused import Copier, launch_shape
from kernels_cute.chunk.key_head import shape
from kernels_cute.chunk.key_head.barriers import key_head_barriers, key_head_fields
from kernels_cute.chunk.key_head.copies import copy_warp
from kernels_cute.chunk.key_head.maker import maker_warpgroup
from kernels_cute.chunk.key_head.spec import key_head_spec
from kernels_cute.chunk.key_head.state import head_chunks, head_sources
from kernels_cute.chunk.operands import set_registers
from kernels_cute.chunk.rings import chunks_in, prepared_chunks
from kernels_cute.chunk.roles.copies import hand_over_warp, store_warp
from kernels_cute.chunk.roles.gates import schedule_and_gate
from kernels_cute.chunk.roles.state import of_head, state_warpgroup
from kernels_cute.chunk.scheduler import has_more_tiles, take_work_tile
from kernels_cute.chunk.shape import BUFFERS, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.state_memory import prefetch_state
from kernels_cute.chunk.storage import struct_of
from kernels_cute.common import ptx
from kernels_cute.common.init_barriers import init_barriers


class Role(IntEnum):
    """First warp of each role of a block; that of COPY loads."""

    STATE = 0  # a warpgroup for each state head
    MAKER = 8
    COPY = 12


class KeyHeadChunk:
    """Whole sequences with two SMs for two state heads."""

    def __init__(self, spec: ChunkSpec):
        self.spec = key_head_spec(spec)

    @cute.jit
    def launch(self, *values: Any):
        """values: Params, clusters of the grid at most, split_if_longest_exceeds (0), stream."""
        params, (max_clusters, _, stream) = packed_params(values)
        work_tiles = (cute.size(params.cu_seqlens, mode=[0]) - 1) * self.spec.units
        self.kernel(params, token_copies(self.spec, params)).launch(
            grid=(self.spec.sharers * cutlass.min(work_tiles, max_clusters), 1, 1), stream=stream, **launch_shape(self.spec)
        )

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies):
        run_block(self.spec, params, copies)


@cute.jit
def run_block(spec: ChunkSpec, params: ChunkParams, copies: TokenCopies):
    """Run a whole block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = cutlass.utils.SmemAllocator().allocate(struct_of(key_head_fields(spec)))
    block, _, _ = cute.arch.block_idx()
    rank, cluster = block % 2, block // spec.sharers
    # The warp that loads makes the barriers: it need not wait for the others to begin.
    if warp == Role.COPY:
        for atom in (copies.q_atom, copies.k_atom, copies.v_atom, copies.out_atom):
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            init_barriers(key_head_barriers(spec), storage, rank)
        cute.arch.sync_warp()
    thread, _, _ = cute.arch.thread_idx()
    # Asked for before the barriers below, which take as long as the answer.
    first_work_tile = scheduler.describe(spec, params, cluster // spec.units, cluster % spec.units, rank)
    # There is something to deal, and there are few enough sequences to order.
    sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
    is_sorted = (scheduler.num_clusters(spec) < sequences * spec.units) & (sequences <= scheduler.SORTED)
    if is_sorted:
        scheduler.write_keys(spec, storage, params, thread)
        cute.arch.sync_threads()
        scheduler.sort_sequences(storage, params.cu_seqlens, thread)
    # Above the diagonal, and M on it, they stay zero.
    for field in (storage.m, storage.p):
        for i in cutlass.range(thread, BUFFERS * spec.state_heads * TILE_BYTES // 16, spec.threads, unroll=1):
            ptx.store_zeros(field.data_ptr().toint() + i * 16)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_init_fence()
    # A releasing arrival waits for global memory too; for the other block the fences above are enough.
    cute.arch.fence_acq_rel_cta()
    cute.arch.cluster_arrive_relaxed()
    if warp != Role.COPY:
        cute.arch.cluster_wait()

    # Every role counts work tiles, and the chunks of those before.
    number, base, has_more = Int32(0), Int32(0), Boolean(True)
    if warp < Role.MAKER:
        set_registers(spec, shape.STATE_REGISTERS)
        state_warpgroup(spec, storage, params, warp % 4, None, None, head_sources, head_chunks, warp // 4)
    elif warp < Role.COPY:
        set_registers(spec, shape.MAKER_REGISTERS)
        while has_more:
            work_tile = take_work_tile(storage, number, None)
            maker_warpgroup(spec, storage, params.scale, prepared_chunks(spec, base, rank), work_tile.live_length, warp % 4)
            number, base = number + 1, base + chunks_in(work_tile.live_length)
            has_more = has_more_tiles(work_tile, None)
    else:
        set_registers(spec, shape.COPY_REGISTERS)
        copier = warp % 4
        if copier == Copier.LOAD:
            while has_more:
                work_tile = take_work_tile(storage, number, None)
                if number > 0:
                    for i in cutlass.range_constexpr(spec.state_heads):
                        prefetch_state(spec, params.initial_state, of_head(work_tile, i))
                copy_warp(spec, storage, copies, work_tile, base)
                number, base = number + 1, base + chunks_in(work_tile.live_length)
                has_more = has_more_tiles(work_tile, None)
            # Nothing of the other block was touched; the barrier at the end needs this one done.
            cute.arch.cluster_wait()
        if copier == Copier.GATES:
            schedule_and_gate(spec, storage, params, is_sorted, cluster, rank, first_work_tile)
        if copier == Copier.STORE:
            while has_more:
                work_tile = take_work_tile(storage, number, None)
                store_warp(spec, storage, copies, params.out, work_tile, base, "v_empty")
                number, base = number + 1, base + chunks_in(work_tile.live_length)
                has_more = has_more_tiles(work_tile, None)
        if copier == Copier.HAND_OVER:
            squares, vectors = spec.state_heads * TILE_BYTES, spec.state_heads * VECTOR_BYTES
            tiles = ((storage.m, squares), (storage.vectors, vectors), (storage.p, squares))
            while has_more:
                work_tile = take_work_tile(storage, number, None)
                hand_over_warp(storage, tiles, prepared_chunks(spec, base, rank), work_tile.live_length, rank)
                number, base = number + 1, base + chunks_in(work_tile.live_length)
                has_more = has_more_tiles(work_tile, None)
    # The other block may still write to this one's shared memory; a releasing arrival comes after its last ones.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
