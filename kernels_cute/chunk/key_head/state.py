"""The state role where a block has two state heads: a warpgroup each carries S^T of 64 V columns of its head.

What one waits for, the other fills: nothing of a chunk is issued ahead, which leaves registers for two warpgroups. The formulas:
fused.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.rings import chunks_in, ring_place
from kernels_cute.chunk.roles import state as common
from kernels_cute.chunk.roles.tile_blocks import Lane, zero_keys
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import BUFFERS, CHUNK, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.segments import Segment
from kernels_cute.chunk.state_memory import store_checkpoints
from kernels_cute.common import ptx

_GROUPS = 1  # of the products with the state in flight


def head_sources(spec: Any, storage: Any, by_key: Any, by_token: Any, at: Any, head: Any) -> tuple[Any, ...]:
    """Operands and addresses of head_chunks."""
    square = operands.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS * spec.state_heads)
    m_operand, p_operand = (operands.smem_operand_b(by_key, field, square) for field in (storage.m, storage.p))
    value_lane = common.value_address(storage.v.data_ptr().toint(), at.warp, at.lane)
    vectors = storage.vectors.data_ptr().toint() + head * VECTOR_BYTES + at.pair * 8
    token_operands = common.token_operands(spec, storage, by_key, by_token)
    return by_key, by_token, *token_operands, m_operand, p_operand, value_lane, vectors, head


@cute.jit
def head_chunks(
    spec: ChunkSpec, storage: Any, params: ChunkParams, sources: Any, registers: Any, at: Lane, work_tile: WorkTile, base: Int32,
    segment: Segment | None,
):  # fmt: skip
    """Take S^T of one head through the chunks of a work tile. base: chunks before the work tile; segment: None."""
    by_key, by_token, keys, queries, tokens, m_operand, p_operand, value_lane, vectors, head = sources
    state, sums, outputs, _, _, operand, operand_words, _, _ = registers
    lane, pair, warp = at.lane, at.pair, at.warp
    k_full, q_full, ready, tile_released = (
        x.data_ptr() for x in (storage.k_full, storage.q_full, storage.ready, storage.tile_released)
    )
    num_chunks = chunks_in(work_tile.live_length)
    first_stage, first_parity = ring_place(spec.stages, base)
    first_key_stage, first_key_parity = ring_place(spec.key_stages, base)
    if num_chunks > 0:
        cute.arch.mbarrier_wait(k_full + first_key_stage, first_key_parity)
        cute.arch.mbarrier_wait(q_full + first_stage, first_parity)
    multiply_state(spec, by_key, registers, keys[None, None, None, first_key_stage], queries[None, None, None, first_stage], 0)
    warpgroup.wait_group(0)
    if num_chunks > 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + first_stage)
    for step in cutlass.range(num_chunks, unroll=1):
        count = base + step
        key_stage, _ = ring_place(spec.key_stages, count)
        next_stage, next_parity = ring_place(spec.stages, count + 1)
        next_key_stage, next_key_parity = ring_place(spec.key_stages, count + 1)
        buffer, turn = count & 1, count >> 1 & 1
        value_stage, value_parity = ring_place(spec.value_stages, count * spec.state_heads + head)
        tile = buffer * spec.state_heads + head
        valid = cutlass.min(work_tile.live_length - step * CHUNK, CHUNK)
        vector = vectors + buffer * (spec.state_heads * VECTOR_BYTES)
        cute.arch.mbarrier_wait(ready + buffer, turn)  # before V: shape.py
        cute.arch.mbarrier_wait(storage.v_full.data_ptr() + value_stage, value_parity)
        value_tile = value_lane + value_stage * spec.value_bytes
        values = [ptx.load_matrices(value_tile + i * 16 * operands.ROW_BYTES, True) for i in range(4)]
        common.subtract_keys(spec, sums, values, operands.load_factors(vector + shape.STATE_KEY))
        if valid < CHUNK:
            common.mask_sums(sums, valid, pair)
        for i in cutlass.range_constexpr(CHUNK // 4):
            operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
        warpgroup.fence()
        operands.multiply(by_key, sums, operand, m_operand[None, None, None, tile], False)
        warpgroup.commit_group()
        last = ptx.load_one(vector + shape.LAST_DECAY - pair * 8)
        if valid < CHUNK:
            # The block whose turn it was has done this for its own tile alone.
            zero_keys(spec, storage.k.data_ptr().toint() + key_stage * spec.key_bytes, valid, warp * 32 + lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            operands.sync_warpgroup(shape.NamedBarrier.STATE + head)
        for i in cutlass.range_constexpr(spec.dim // 2):
            state[i] = state[i] * last
        common.scale_columns(outputs, operands.load_factors(vector + shape.STATE_QUERY))
        factors = operands.load_factors(vector + shape.KEY_TO_LAST)
        warpgroup.wait_group(0)
        if lane == 0:
            common.arrive_released(spec, storage.m_tile_released.data_ptr(), buffer)

        common.add_values(spec, by_token, registers, tokens, key_stage, factors)
        # Not while the next product runs: all operands in flight at a time do not fit.
        warpgroup.wait_group(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.k_empty.data_ptr() + key_stage)
        for i in cutlass.range_constexpr(CHUNK // 4):
            operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
        warpgroup.fence()
        operands.multiply(by_key, outputs, operand, p_operand[None, None, None, tile], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if lane == 0:
            common.arrive_released(spec, tile_released, buffer)
        common.put_outputs(spec, outputs, value_tile)
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.stored.data_ptr() + value_stage)
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(k_full + next_key_stage, next_key_parity)
            cute.arch.mbarrier_wait(q_full + next_stage, next_parity)
            multiply_state(spec, by_key, registers, keys[None, None, None, next_key_stage], queries[None, None, None, next_stage])
        warpgroup.wait_group(0)
        if (lane == 0) & (step + 1 < num_chunks):
            cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + next_stage)
        if cutlass.const_expr(spec.has_checkpoints):
            if (step + 1) * CHUNK <= work_tile.live_length:
                done = work_tile.begin - Int32(params.cu_seqlens[work_tile.sequence]) + (step + 1) * CHUNK
                row0 = work_tile.piece * spec.columns + (warp * 16 + at.row)
                store_checkpoints(spec, params, state, work_tile.sequence, work_tile.head, done, row0, pair)


def multiply_state(spec: Any, by_key: Any, registers: Any, keys: Any, queries: Any, in_flight: int = _GROUPS) -> None:
    """Issue U and Q S from one rounding of the state, in groups of k steps of which at most `in_flight` are under way: not all
    operands fit next to both results. Before a loop none may be in flight while the state is read, or ptxas serialises the
    products."""
    state, sums, outputs, operand, words, _, _, _, _ = registers
    steps = spec.dim // 16 // (_GROUPS + 1)  # of a group
    for group in range(_GROUPS + 1):
        if group >= in_flight:
            warpgroup.wait_group(max(in_flight - 1, 0))
        for i in range(4 * steps * group, 4 * steps * (group + 1)):
            words[i] = ptx.pack(spec.dtype, state[2 * i], state[2 * i + 1])
        warpgroup.fence()
        for step in range(steps * group, steps * (group + 1)):
            operands.multiply_step(by_key, sums, operand, keys, step, step == 0)
            operands.multiply_step(by_key, outputs, operand, queries, step, step == 0)
        warpgroup.commit_group()
