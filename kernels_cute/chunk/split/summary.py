"""The summaries (h, P) of segments, in the first launch of a split call, and of whole sequences (parts.py).

A split call needs the summary of every segment but a sequence's last. Both h and P are runs of the chain of fused.py over the
chunks without outputs: h from a zero state (segment 0: from the sequence's own), P with V = 0 from the identity.

At D = 128 the two blocks of a head and segment are a cluster: block 0 runs h, block 1 runs P, with two state warpgroups of 64
columns each, and block b prepares the chunks of parity b for both. At D = 64 one block has a warpgroup for each. The other
warpgroups: inverse (M, as in the fused kernel), and one whose warps copy K and V in, make the gates, the vectors, and hand over.

Such a segment has only whole chunks. The last chunk of a sequence may be partial, and the rows after the sequence's end are
another's, NaN perhaps. V of these rows is masked in W. K is zeroed in shared memory: by the inverse role in the block's own
chunks, and by the state warpgroups in the others, whose M comes from the other block.

The barriers: barriers.py. A state warp waits for what inverse made of a stage before it frees the stage.
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from gdn.ops.delta_rule.problem import ChunkParams, ChunkSummaryParams
from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.arguments import TokenCopies, is_selected_launch, partition_tiles
from kernels_cute.chunk.operands import exp2_clamped, load_factors, multiply, set_registers, smem_operand_b, tiled_mma
from kernels_cute.chunk.rings import PreparedChunks, chunks_in
from kernels_cute.chunk.roles.copies import hand_over_warp
from kernels_cute.chunk.roles.gates import gate_warp
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
from kernels_cute.chunk.roles.state import add_values, arrive_released, issue_keys, mask_sums, state_registers, value_address
from kernels_cute.chunk.roles.tile_blocks import lane_of, zero_keys
from kernels_cute.chunk.scheduler import WorkTile, segment_work_tile, sequence_of
from kernels_cute.chunk.shape import BUFFERS, CHUNK, CUM, KEY_BETA, KEY_FACTOR, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.barriers import summary_barriers, summary_fields
from kernels_cute.chunk.split.segments import Segment, find_segment, store_summary, summary_address, transition_address
from kernels_cute.chunk.split.shape import summary_spec
from kernels_cute.chunk.state_memory import load_state, write_state
from kernels_cute.chunk.storage import struct_of
from kernels_cute.common import ptx
from kernels_cute.common.init_barriers import init_barriers

_STATE_REGISTERS, _INVERSE_REGISTERS, _COPY_REGISTERS = 168, 136, 40  # a thread


class Role(IntEnum):
    """First warp of each role of a block; that of COPY loads."""

    STATE = 0  # two warpgroups
    INVERSE = 8
    COPY = 12


class Copier(IntEnum):
    """Warps of the copying warpgroup."""

    LOAD = 0
    GATES = 1
    VECTORS = 2
    HAND_OVER = 3


class SummaryChunk:
    """The first launch of a split call. spec: of the second."""

    def __init__(self, spec: ChunkSpec):
        self.spec = summary_spec(spec)

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, segment_tokens: Int32, split_if_longest_exceeds: Int32):
        if is_selected_launch(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            block, _, _ = cute.arch.block_idx()
            slot = block // (self.spec.sharers * self.spec.heads)
            segment = find_segment(self.spec, params, slot, segment_tokens)
            if segment.is_summarized & (segment.index < segment.count - 1):
                head, rank = block // self.spec.sharers % self.spec.heads, block % 2
                summarize(self.spec, params, copies, segment.sequence, head, rank, segment)


@cute.jit
def summarize(
    spec: ChunkSpec, params: ChunkParams | ChunkSummaryParams, copies: TokenCopies, sequence: Int32, head: Int32, rank: Int32,
    segment: Segment | None = None,
):  # fmt: skip
    """Run a whole block. rank: in the pair; segment: of a split call, None where the summary is of a whole sequence."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = cutlass.utils.SmemAllocator().allocate(struct_of(summary_fields(spec)))
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

    if cutlass.const_expr(segment is not None):
        whole = work_tile = segment_work_tile(segment, head, 0)._replace(live_length=segment.length)
    else:
        work_tile = WorkTile(sequence, head, 0, None, *sequence_of(spec, params, sequence))
        whole = work_tile._replace(length=chunks_in(work_tile.length) * CHUNK)  # for roles that count whole chunks
    prepared = PreparedChunks(rank if cutlass.const_expr(spec.paired) else Int32(0), spec.aux_step)
    if warp < Role.INVERSE:
        set_registers(spec, _STATE_REGISTERS)
        summary_warpgroup(spec, storage, params, work_tile, rank, warp // 4, warp % 4, segment)
    elif warp < Role.COPY:
        set_registers(spec, _INVERSE_REGISTERS)
        inverse_warpgroup(spec, storage, prepared, work_tile.length, warp % 4)
    else:
        set_registers(spec, _COPY_REGISTERS)
        copier = warp % 4
        if copier == Copier.LOAD:
            copy_keys_warp(spec, storage, copies, whole, rank)
        if copier == Copier.GATES:
            gate_warp(spec, storage, params, work_tile, prepared)
        if copier == Copier.VECTORS:
            vector_warp(spec, storage, whole.length, prepared)
        if cutlass.const_expr(spec.paired):
            if copier == Copier.HAND_OVER:
                tiles = ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES))
                hand_over_warp(storage, tiles, prepared, work_tile.length, rank)
    if cutlass.const_expr(spec.paired):
        # The other block may still write to this one's shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def copy_keys_warp(spec: ChunkSpec, storage: Any, copies: TokenCopies, work_tile: WorkTile, rank: Int32):
    """Load K, and V in a block that runs h."""
    pieces, stages, begin = spec.dim // 64, spec.stages, work_tile.begin
    k_head, v_head = work_tile.head // spec.k_group, work_tile.head // spec.v_group
    to_k, from_k = partition_tiles(spec, storage.k, copies.k_atom, copies.k, spec.dim, stages, begin, k_head, 0)
    to_v, from_v = partition_tiles(spec, storage.v, copies.v_atom, copies.v, 64, pieces * stages, begin, v_head, None)
    full, empty = storage.k_full.data_ptr(), storage.empty.data_ptr()
    has_values, num_bytes = Boolean(True), Int32(2 * spec.key_bytes)
    if cutlass.const_expr(spec.paired):
        if rank == 1:
            has_values, num_bytes = Boolean(False), Int32(spec.key_bytes)
    for step in cutlass.range(work_tile.length // CHUNK, unroll=1):
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
def vector_warp(spec: ChunkSpec, storage: Any, length: Int32, prepared: PreparedChunks):
    """Compute the factors that the state warpgroups need of the chunks that this block prepares."""
    lane = cute.arch.lane_idx()
    ready, tile_released = storage.ready.data_ptr(), storage.tile_released.data_ptr()
    for step in cutlass.range(prepared.first, length // CHUNK, prepared.stride, unroll=1):
        buffer, turn = step % BUFFERS, step // BUFFERS & 1
        gate_buffer = step // spec.aux_step % 2
        gate_turn = step // spec.aux_step // 2 & 1
        rows = storage.rows.data_ptr().toint() + gate_buffer * shape.AUX_BYTES
        vectors = storage.vectors.data_ptr().toint() + buffer * VECTOR_BYTES
        cute.arch.mbarrier_wait(storage.gates_full.data_ptr() + gate_buffer, gate_turn)
        cute.arch.mbarrier_wait(storage.factors_full.data_ptr() + gate_buffer, gate_turn)
        cute.arch.mbarrier_wait(tile_released + buffer, turn ^ 1)
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
            cute.arch.mbarrier_arrive(storage.gates_free.data_ptr() + gate_buffer)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ready + buffer)


@cute.jit
def summary_warpgroup(
    spec: ChunkSpec, storage: Any, params: ChunkParams | ChunkSummaryParams, work_tile: WorkTile, rank: Int32, half: Int32,
    warp: Int32, segment: Segment | None,
):  # fmt: skip
    """Compute 64 columns of h or of P."""
    at, may_end_inside = lane_of(warp), segment is None
    lane, pair, dim, head, length = at.lane, at.pair, spec.dim, work_tile.head, work_tile.length
    by_key, by_token = tiled_mma(spec.dtype, CHUNK), tiled_mma(spec.dtype, dim, True)
    keys = smem_operand_b(by_key, storage.k, operands.by_rows(spec.dtype, CHUNK, dim, spec.stages))
    tokens = smem_operand_b(by_token, storage.k, operands.by_columns(spec.dtype, CHUNK, dim, spec.stages))
    m_operand = smem_operand_b(by_key, storage.m, operands.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS))
    registers = state_registers(spec, by_key, by_token)
    state, sums, _, _, _, operand, operand_words, _, _ = registers

    group = half if cutlass.const_expr(spec.paired) else Int32(0)  # of 64 columns
    is_transition = (rank if cutlass.const_expr(spec.paired) else half) == 1
    row0 = group * 64 + warp * 16 + at.row
    full, empty, ready, tile_released = (
        x.data_ptr() for x in (storage.k_full, storage.empty, storage.ready, storage.tile_released)
    )
    vectors = storage.vectors.data_ptr().toint() + pair * 8
    values_base, values_step = storage.v.data_ptr().toint() + group * TILE_BYTES, Int32(spec.key_bytes)
    if is_transition:
        values_base, values_step = storage.zeros.data_ptr().toint(), Int32(0)
    value_lane = value_address(values_base, warp, lane)
    start_summary(spec, params, state, head, segment, is_transition, row0, group, warp, lane)

    # As in the fused kernel: products but M's a k step at a time, nothing in flight where the loop closes. Here one U too
    # many is issued, and dropped.
    if cutlass.const_expr(may_end_inside):
        num_chunks = chunks_in(length)
        if num_chunks > 0:
            cute.arch.mbarrier_wait(full, 0)
    else:
        num_chunks = length // CHUNK
        cute.arch.mbarrier_wait(full, 0)
    issue_keys(spec, by_key, registers, keys, Int32(0))
    warpgroup.wait_group(0)
    for step in cutlass.range(num_chunks, unroll=1):
        stage, following = step % spec.stages, (step + 1) % spec.stages
        buffer, turn = step % BUFFERS, step // BUFFERS & 1
        vector = vectors + buffer * VECTOR_BYTES
        valid = cutlass.min(length - step * CHUNK, CHUNK)
        cute.arch.mbarrier_wait(ready + buffer, turn)

        # W and M; W is the accumulator of the product
        for i in cutlass.range_constexpr(CHUNK // 16):
            values = ptx.load_matrices(value_lane + stage * values_step + i * 16 * operands.ROW_BYTES, True)
            for m in cutlass.range_constexpr(2):
                n = 2 * i + m
                factors = ptx.load_pair(vector + shape.STATE_KEY + n * 32)
                for side in cutlass.range_constexpr(2):
                    value0, value1 = ptx.unpack(spec.dtype, values[2 * m + side])
                    index = 4 * n + 2 * side
                    sums[index] = value0 - factors[0] * sums[index]
                    sums[index + 1] = value1 - factors[1] * sums[index + 1]
        if cutlass.const_expr(may_end_inside):
            if valid < CHUNK:
                mask_sums(sums, valid, pair)
        for i in cutlass.range_constexpr(CHUNK // 4):
            operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
        warpgroup.fence()
        multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
        warpgroup.commit_group()
        if cutlass.const_expr(may_end_inside and spec.paired):
            if valid < CHUNK:
                # Both warpgroups store the same zeros; each waits for its own.
                zero_keys(spec, storage.k.data_ptr().toint() + stage * spec.key_bytes, valid, warp * 32 + lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                operands.sync_warpgroup(shape.NamedBarrier.STATE + half)
        last = ptx.load_one(vector + shape.LAST_DECAY - pair * 8)
        for i in cutlass.range_constexpr(dim // 2):
            state[i] = state[i] * last
        factors = load_factors(vector + shape.KEY_TO_LAST)
        warpgroup.wait_group(0)
        add_values(spec, by_token, registers, tokens, stage, factors)
        if lane == 0:
            arrive_released(spec, tile_released, buffer)
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(full + following, (step + 1) // spec.stages & 1)
        warpgroup.wait_group(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(empty + stage)
        issue_keys(spec, by_key, registers, keys, following)
        warpgroup.wait_group(0)

    if cutlass.const_expr(segment is None):
        if is_transition:
            write_state(spec, params.P, work_tile.read_slot, state, head, row0, pair)
        else:
            write_state(spec, params.h, work_tile.read_slot, state, head, row0, pair)
    elif is_transition:
        if segment.index > 0:
            store_transition(spec, transition_address(spec, segment, segment.index, head), state, row0, pair)
    else:
        store_summary(spec, summary_address(spec, segment, segment.index, head), group, warp, lane, state)


@cute.jit
def start_summary(
    spec: ChunkSpec, params: ChunkParams | ChunkSummaryParams, state: cute.Tensor, head: Int32, segment: Segment | None,
    is_transition: Boolean, row0: Int32, group: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """P starts from the identity, and h from zero, but in segment 0 from the sequence's state."""
    state.fill(0.0)
    pair = lane % 4
    if is_transition:
        for n in cutlass.range_constexpr(spec.dim // 8):
            for i in cutlass.range_constexpr(4):
                if row0 + i // 2 * 8 == 8 * n + 2 * pair + i % 2:
                    state[4 * n + i] = Float32(1.0)
    else:
        if cutlass.const_expr(segment is not None):
            if segment.index == 0:
                load_state(spec, params, state, segment, head, row0, pair)
                store_summary(spec, summary_address(spec, segment, segment.count - 1, head), group, warp, lane, state)


def store_transition(spec: Any, address: Any, state: Any, row0: Any, pair: Any) -> None:
    """Store this warpgroup's rows of P^T, as two bfloat16 summands, in the order of K tiles."""
    tile = address + Int64(row0 // CHUNK * spec.key_bytes)
    row = row0 % CHUNK
    for n in range(spec.dim // 8):
        piece = tile + n // 8 * TILE_BYTES
        for side in range(2):
            offset = operands.address(Int32(0), row + 8 * side, n % 8) + pair * 4
            first, second = state[4 * n + 2 * side], state[4 * n + 2 * side + 1]
            word = ptx.pack(BFloat16, first, second)
            ptx.store_global_word(piece + Int64(offset), word)
            high0, high1 = ptx.unpack(BFloat16, word)
            rest = ptx.pack(BFloat16, first - high0, second - high1)
            ptx.store_global_word(piece + Int64(offset + spec.dim * spec.dim * 2), rest)
