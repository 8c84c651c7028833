"""The fused chunk kernel: everything of a sequence, state head and slice of V columns in one block, one such work tile after the
other (scheduler.py).

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

Y is the new values over beta. With beta in the columns of L, the matrix that multiplies W has a diagonal of exactly 1: it is
left out of M, the product adds to W in float32, and 16 bits of M are enough. With beta in the rows, A's columns times beta are
what W is multiplied with, and rounding their diagonal costs more than all the rest.

Roles, a warpgroup each: state (64 V columns of S^T, the chain in registers), inverse (M), score (P and the vectors; neither
depends on the state), and one whose warps copy K, Q, V in, make the gates, copy O out, and hand over. At D = 128 the two
blocks of a head are a cluster: block b prepares the chunks of parity b for both, into buffer b of `ready` and `tile_released`;
at D = 64 a block prepares every chunk itself, in alternating buffers.

The barriers: barriers.py. A state warp arrives on `k_empty` only after it has read K and has waited for the M, P and vectors
computed from that K; it arrives on `stored` likewise for Q and V. K has a ring of its own, a stage longer, because M takes the
longest to make. `gate_buffer` alternates over the chunks that a block prepares. Arrivals of the other block on `tile_released`
are relaxed: what they free has been read by then, and is refilled by stores that wait for them, or by copies that count bytes.

Stages, buffers and phases follow the count of chunks since the block began, over all of its work tiles, so that copies, gates, M
and P run ahead into the next work tile while the state ends the last. Both blocks of a pair have the same work tiles.
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import scheduler, shape
from kernels_cute.chunk.arguments import TokenCopies, is_selected_launch, packed_params, token_copies
from kernels_cute.chunk.barriers import block_barriers, block_fields
from kernels_cute.chunk.operands import set_registers
from kernels_cute.chunk.rings import chunks_in, prepared_chunks
from kernels_cute.chunk.roles.copies import copy_warp, hand_over_warp, store_normed_warp, store_warp
from kernels_cute.chunk.roles.gates import gate_warp, schedule_and_gate
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
from kernels_cute.chunk.roles.norm import NormTerms, norm_lane_of, norm_rest
from kernels_cute.chunk.roles.score import score_warpgroup
from kernels_cute.chunk.roles.state import state_chunks, state_sources, state_warpgroup
from kernels_cute.chunk.roles.tile_blocks import lane_of
from kernels_cute.chunk.scheduler import has_more_tiles, take_work_tile
from kernels_cute.chunk.shape import BUFFERS, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.segments import Segment, bring_start
from kernels_cute.chunk.state_memory import prefetch_state
from kernels_cute.chunk.storage import struct_of
from kernels_cute.common import ptx
from kernels_cute.common.init_barriers import init_barriers


class Role(IntEnum):
    """First warp of each role of a block; that of COPY loads."""

    STATE = 0
    INVERSE = 4
    SCORE = 8
    COPY = 12


class Copier(IntEnum):
    """Warps of the copying warpgroup."""

    LOAD = 0
    GATES = 1
    STORE = 2
    HAND_OVER = 3


def launch_shape(spec: ChunkSpec) -> dict[str, Any]:
    """Blocks and clusters of a launch."""
    return {"block": (spec.threads, 1, 1), "cluster": (spec.sharers, 1, 1), "min_blocks_per_mp": 1}


class FusedChunk:
    """Whole sequences with two SMs a head, at D = 64 one."""

    def __init__(self, spec: ChunkSpec):
        self.spec = spec

    @cute.jit
    def launch(self, *values: Any):
        """values: Params, clusters of the grid at most, split_if_longest_exceeds, stream."""
        params, (max_clusters, split_if_longest_exceeds, stream) = packed_params(values)
        work_tiles = (cute.size(params.cu_seqlens, mode=[0]) - 1) * self.spec.units
        self.kernel(params, token_copies(self.spec, params), split_if_longest_exceeds).launch(
            grid=(self.spec.sharers * cutlass.min(work_tiles, max_clusters), 1, 1), stream=stream, **launch_shape(self.spec)
        )

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, split_if_longest_exceeds: Int32):
        if cutlass.const_expr(self.spec.row_makers > 0):
            # What reads the outputs may begin once all blocks of this launch have.
            cute.arch.griddepcontrol_launch_dependents()
        if is_selected_launch(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            run_block(self.spec, params, copies, None)
        if cutlass.const_expr(self.spec.row_makers > 0):
            # The launch that makes the rows may end after them; what follows in the stream waits for this launch alone.
            block, _, _ = cute.arch.block_idx()
            if block == 0:
                cute.arch.griddepcontrol_wait()


@cute.jit
def run_block(spec: ChunkSpec, params: ChunkParams, copies: TokenCopies, segment: Segment | None, terms: NormTerms | None = None):
    """Run a whole block. segment: the block's segment in a split call, None where it has whole sequences; terms: of the gated
    norm, None without it."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = cutlass.utils.SmemAllocator().allocate(struct_of(block_fields(spec)))
    block, _, _ = cute.arch.block_idx()
    rank = block % 2  # in the pair
    # The warp that loads makes the barriers: it need not wait for the others to begin.
    starts_early = spec.paired and segment is None
    if warp == Role.COPY:
        for atom in (copies.q_atom, copies.k_atom, copies.v_atom, copies.out_atom, copies.z_atom):
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            init_barriers(block_barriers(spec), storage, rank)
        cute.arch.sync_warp()
    thread, _, _ = cute.arch.thread_idx()
    is_sorted = Boolean(False)
    cluster = block // spec.sharers
    if cutlass.const_expr(segment is None):
        # Asked for before the barriers below, which take as long as the answer.
        single_tile = first_work_tile = scheduler.describe(spec, params, cluster // spec.units, cluster % spec.units, rank)
    else:
        single_tile = scheduler.segment_work_tile(segment, block // spec.slices % spec.heads, block % spec.slices)
    if cutlass.const_expr(spec.is_persistent):
        single_tile = None
    if cutlass.const_expr(spec.sorts_sequences):
        # There is something to deal, and there are few enough sequences to order.
        sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
        is_sorted = (scheduler.num_clusters(spec) < sequences * spec.units) & (sequences <= scheduler.SORTED)
        if is_sorted:
            scheduler.write_keys(spec, storage, params, thread)
    # Above the diagonal, and M on it, they stay zero.
    for field in (storage.m, storage.p):
        for i in cutlass.range(thread, BUFFERS * TILE_BYTES // 16, spec.threads, unroll=1):
            ptx.store_zeros(field.data_ptr().toint() + i * 16)
    if cutlass.const_expr(spec.sorts_sequences):
        if is_sorted:
            cute.arch.sync_threads()
            scheduler.sort_sequences(storage, params.cu_seqlens, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(spec.paired):
        # A releasing arrival waits for global memory too; for the other block the fences above are enough.
        cute.arch.fence_acq_rel_cta()
        cute.arch.cluster_arrive_relaxed()
        if (warp != Role.COPY) | Boolean(not starts_early):
            cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    # Every role counts work tiles, and the chunks of those before.
    number, base, has_more = Int32(0), Int32(0), Boolean(True)
    if warp < Role.INVERSE:
        set_registers(spec, shape.STATE_REGISTERS)
        state_warpgroup(spec, storage, params, warp % 4, segment, single_tile, state_sources, state_chunks)
    elif warp < Role.SCORE:
        set_registers(spec, shape.INVERSE_REGISTERS)
        while has_more:
            work_tile = take_work_tile(storage, number, single_tile)
            inverse_warpgroup(spec, storage, prepared_chunks(spec, base, rank), work_tile.live_length, warp % 4)
            number, base = number + 1, base + chunks_in(work_tile.live_length)
            has_more = has_more_tiles(work_tile, single_tile)
    elif warp < Role.COPY:
        set_registers(spec, shape.SCORE_REGISTERS)
        norm, done = None, Int32(0)
        if cutlass.const_expr(terms is not None):
            norm = (terms, norm_lane_of(lane_of(warp % 4), rank))
        while has_more:
            work_tile = take_work_tile(storage, number, single_tile)
            score_warpgroup(
                spec, storage, params.scale, prepared_chunks(spec, base, rank), work_tile.live_length, warp % 4, norm, done
            )
            number, base = number + 1, base + chunks_in(work_tile.live_length)
            has_more = has_more_tiles(work_tile, single_tile)
            if cutlass.const_expr(terms is not None):
                if (work_tile.live_length == 0) | (not has_more):
                    norm_rest(spec, storage, norm[0], norm[1], rank, base, done)
                    done = base
    else:
        set_registers(spec, shape.COPY_REGISTERS)
        copier = warp % 4
        if copier == Copier.LOAD:
            if cutlass.const_expr(segment is not None):
                bring_start(spec, storage, single_tile.head, segment)
            while has_more:
                work_tile = take_work_tile(storage, number, single_tile)
                if cutlass.const_expr(spec.is_persistent):
                    if number > 0:
                        prefetch_state(spec, params.initial_state, work_tile)
                copy_warp(spec, storage, copies, work_tile, base)
                number, base = number + 1, base + chunks_in(work_tile.live_length)
                has_more = has_more_tiles(work_tile, single_tile)
            if cutlass.const_expr(starts_early):
                # Nothing of the other block was touched; the barrier at the end needs this one done.
                cute.arch.cluster_wait()
        if copier == Copier.GATES:
            if cutlass.const_expr(spec.is_persistent):
                schedule_and_gate(spec, storage, params, is_sorted, cluster, rank, first_work_tile)
            else:
                gate_warp(spec, storage, params, single_tile, prepared_chunks(spec, base, rank))
        if copier == Copier.STORE:
            while has_more:
                work_tile = take_work_tile(storage, number, single_tile)
                if cutlass.const_expr(terms is not None):
                    store_normed_warp(spec, storage, copies, params.out, work_tile, base)
                else:
                    store_warp(spec, storage, copies, params.out, work_tile, base, "empty")
                number, base = number + 1, base + chunks_in(work_tile.live_length)
                has_more = has_more_tiles(work_tile, single_tile)
        if cutlass.const_expr(spec.paired):
            if copier == Copier.HAND_OVER:
                tiles = ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES), (storage.p, TILE_BYTES))
                while has_more:
                    work_tile = take_work_tile(storage, number, single_tile)
                    hand_over_warp(storage, tiles, prepared_chunks(spec, base, rank), work_tile.live_length, rank)
                    number, base = number + 1, base + chunks_in(work_tile.live_length)
                    has_more = has_more_tiles(work_tile, single_tile)
    if cutlass.const_expr(spec.paired):
        # The other block may still write to this one's shared memory; a releasing arrival comes after its last ones.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
