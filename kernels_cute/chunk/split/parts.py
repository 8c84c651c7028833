"""Summaries (h, P) of whole sequences, for sequences whose tokens lie on several devices: S' = P S + h.

Block roles, registers, shared memory and barriers are those of the first launch of a split call (summary.py); what differs: every
sequence is one segment, whatever its length, h starts from zero, and both leave as float32 matrices instead of a workspace's
tiles. A sequence without tokens gets h = 0 and P = 1.

The last chunk may be partial. Its rows from the sequence's end on are another's, NaN perhaps: V of them is masked in W, K is
zeroed in shared memory by the inverse role in its own chunks, and by the state warpgroups in the others, whose M comes from the
other block.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from gdn.ops.delta_rule.problem import ChunkSummaryParams
from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.arguments import TokenCopies, token_tensor
from kernels_cute.chunk.fused import launch_shape
from kernels_cute.chunk.operands import load_factors, multiply, set_registers, smem_operand_b, tiled_mma
from kernels_cute.chunk.rings import PreparedChunks, chunks_in
from kernels_cute.chunk.roles.copies import hand_over_warp
from kernels_cute.chunk.roles.gates import gate_warp
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
from kernels_cute.chunk.roles.state import add_values, arrive_released, issue_keys, mask_sums, state_registers, value_address
from kernels_cute.chunk.roles.tile_blocks import lane_of, zero_keys
from kernels_cute.chunk.scheduler import WorkTile, sequence_of
from kernels_cute.chunk.shape import BUFFERS, CHUNK, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split import summary
from kernels_cute.chunk.split.barriers import summary_barriers, summary_fields
from kernels_cute.chunk.split.shape import summary_spec
from kernels_cute.chunk.state_memory import write_state
from kernels_cute.chunk.storage import struct_of
from kernels_cute.common import ptx
from kernels_cute.common.init_barriers import init_barriers
from kernels_cute.common.memory import without_batch

_STATE_REGISTERS, _INVERSE_REGISTERS, _COPY_REGISTERS = 168, 136, 40  # a thread
_PER_TOKEN = ("k", "v", "g", "beta")


class PartSummaries:
    """The launch: a pair of blocks, at D = 64 one block, for every sequence and state head."""

    def __init__(self, spec: ChunkSpec):
        self.spec = summary_spec(spec)

    @cute.jit
    def launch(self, *values):
        """values: Params, stream."""
        params, stream = ChunkSummaryParams(*values[:-1]), values[-1]
        present = [name for name in _PER_TOKEN if getattr(params, name) is not None]
        tensors = without_batch(*[getattr(params, name) for name in present])
        params = params._replace(**dict(zip(present, tensors, strict=True)))
        spec, load = self.spec, cpasync.CopyBulkTensorTileG2SOp()
        found: list[Any] = []
        for x, columns in ((params.k, spec.dim), (params.v, spec.columns)):
            layout = operands.by_rows(spec.dtype, CHUNK, columns)
            found += cpasync.make_tiled_tma_atom(load, token_tensor(x), layout, (CHUNK, columns))
        sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
        self.kernel(params, TokenCopies(None, None, *found)).launch(
            grid=(spec.sharers * spec.heads * sequences, 1, 1), stream=stream, **launch_shape(spec)
        )

    @cute.kernel
    def kernel(self, params: ChunkSummaryParams, copies: TokenCopies):
        block, _, _ = cute.arch.block_idx()
        sharers, heads = self.spec.sharers, self.spec.heads
        run_block(self.spec, params, copies, block // (sharers * heads), block // sharers % heads, block % 2)


@cute.jit
def run_block(spec, params, copies, sequence, head, rank):
    """The whole of a block; rank: in the pair."""
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

    work_tile = WorkTile(sequence, head, 0, None, *sequence_of(spec, params, sequence))
    # For the roles that only count chunks, and do that in whole ones.
    whole = work_tile._replace(length=chunks_in(work_tile.length) * CHUNK)
    prepared = PreparedChunks(rank if cutlass.const_expr(spec.paired) else Int32(0), spec.aux_step)
    if warp < 4 * summary.STATE_GROUPS:
        set_registers(spec, _STATE_REGISTERS)
        part_warpgroup(spec, storage, params, work_tile, rank, warp // 4, warp % 4)
    elif warp < 4 * (summary.STATE_GROUPS + 1):
        set_registers(spec, _INVERSE_REGISTERS)
        inverse_warpgroup(spec, storage, prepared, work_tile.length, warp % 4)
    else:
        set_registers(spec, _COPY_REGISTERS)
        copier = warp % 4
        if copier == 0:
            summary.copy_keys_warp(spec, storage, copies, whole, rank)
        if copier == 1:
            gate_warp(spec, storage, params, work_tile, prepared)
        if copier == 2:
            summary.vector_warp(spec, storage, whole.length, prepared)
        if cutlass.const_expr(spec.paired):
            if copier == 3:
                tiles = ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES))
                hand_over_warp(storage, tiles, prepared, work_tile.length, rank)
    if cutlass.const_expr(spec.paired):
        # The other block may still write to this one's shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def part_warpgroup(spec, storage, params, work_tile, rank, half, warp):
    """64 columns of h or of P."""
    at = lane_of(warp)
    lane, pair, dim, length = at.lane, at.pair, spec.dim, work_tile.length
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
    start(spec, state, is_transition, row0, pair)

    # As in summary.py: products but M's a k step at a time, nothing in flight where the loop closes, one U too many.
    num_chunks = chunks_in(length)
    if num_chunks > 0:
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
                    place = 4 * n + 2 * side
                    sums[place] = value0 - factors[0] * sums[place]
                    sums[place + 1] = value1 - factors[1] * sums[place + 1]
        if valid < CHUNK:
            mask_sums(sums, valid, pair)
        for i in cutlass.range_constexpr(CHUNK // 4):
            operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
        warpgroup.fence()
        multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
        warpgroup.commit_group()
        if cutlass.const_expr(spec.paired):
            if valid < CHUNK:
                # Both warpgroups store the same zeros; each waits for its own.
                zero_keys(spec, storage.k.data_ptr().toint() + stage * spec.key_bytes, valid, warp * 32 + lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                operands.sync_warpgroup(shape.STATE_BARRIER + half)
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

    if is_transition:
        write_state(spec, params.P, work_tile.read_slot, state, work_tile.head, row0, pair)
    else:
        write_state(spec, params.h, work_tile.read_slot, state, work_tile.head, row0, pair)


@cute.jit
def start(spec, state, is_transition, row0, pair):
    """Zero, or the identity."""
    state.fill(0.0)
    if is_transition:
        for n in cutlass.range_constexpr(spec.dim // 8):
            for i in cutlass.range_constexpr(4):
                if row0 + i // 2 * 8 == 8 * n + 2 * pair + i % 2:
                    state[4 * n + i] = Float32(1.0)
