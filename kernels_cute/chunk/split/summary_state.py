"""The state role of the first launch of a split call: 64 columns of a summary (h, P). The formulas: summary.py."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts, shape
from kernels_cute.chunk.operands import load_factors, multiply, smem_operand_b, tiled_mma
from kernels_cute.chunk.roles.state import add_values, arrive_taken, issue_keys, state_registers, value_address
from kernels_cute.chunk.roles.tile_blocks import lane_of
from kernels_cute.chunk.shape import BUFFERS, CHUNK, TILE_BYTES
from kernels_cute.chunk.split.segments import store_summary, summary_address, transition_address
from kernels_cute.chunk.state_memory import load_state
from kernels_cute.common import ptx


@cute.jit
def summary_warpgroup(spec, storage, params, head, segment, rank, half, warp):
    """64 columns of h or of P."""
    at = lane_of(warp)
    lane, pair, dim = at.lane, at.pair, spec.dim
    by_key, by_token = tiled_mma(spec, CHUNK, True), tiled_mma(spec, dim, True, True)
    keys = smem_operand_b(by_key, storage.k, layouts.by_rows(spec.dtype, CHUNK, dim, spec.stages))
    tokens = smem_operand_b(by_token, storage.k, layouts.by_columns(spec.dtype, CHUNK, dim, spec.stages))
    m_operand = smem_operand_b(by_key, storage.m, layouts.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS))
    registers = state_registers(spec, by_key, by_token)
    state, sums, operand, operand_words = registers.state, registers.sums, registers.operand, registers.operand_words

    group = half if cutlass.const_expr(spec.paired) else Int32(0)  # of 64 columns
    is_transition = (rank if cutlass.const_expr(spec.paired) else half) == 1
    row0 = group * 64 + warp * 16 + at.row
    full, empty = storage.k_full.data_ptr(), storage.empty.data_ptr()
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    vectors = storage.vectors.data_ptr().toint() + pair * 8
    values_base, values_step = storage.v.data_ptr().toint() + group * TILE_BYTES, Int32(spec.key_bytes)
    if is_transition:
        values_base, values_step = storage.zeros.data_ptr().toint(), Int32(0)
    value_lane = value_address(values_base, warp, lane)
    start_summary(spec, params, state, head, segment, is_transition, row0, group, warp, lane)

    # As in the fused kernel: products but M's a k step at a time, nothing in flight where the loop closes. Here one U too
    # many is issued, and dropped.
    num_chunks = segment.length // CHUNK
    cute.arch.mbarrier_wait(full, 0)
    issue_keys(spec, by_key, registers, keys, Int32(0))
    warpgroup.wait_group(0)
    for step in cutlass.range(num_chunks, unroll=1):
        stage, following = step % spec.stages, (step + 1) % spec.stages
        buffer, turn = step % BUFFERS, step // BUFFERS & 1
        vector = vectors + buffer * shape.VECTOR_BYTES
        cute.arch.mbarrier_wait(ready + buffer, turn)

        # W and M; W is the accumulator of the product
        for i in cutlass.range_constexpr(CHUNK // 16):
            values = ptx.load_matrices(value_lane + stage * values_step + i * 16 * layouts.ROW_BYTES, True)
            for m in cutlass.range_constexpr(2):
                n = 2 * i + m
                factors = ptx.load_pair(vector + shape.STATE_KEY + n * 32)
                for side in cutlass.range_constexpr(2):
                    value0, value1 = ptx.unpack(spec.dtype, values[2 * m + side])
                    place = 4 * n + 2 * side
                    sums[place] = value0 - factors[0] * sums[place]
                    sums[place + 1] = value1 - factors[1] * sums[place + 1]
                    operand_words[2 * n + side] = ptx.pack(spec.dtype, sums[place], sums[place + 1])
        warpgroup.fence()
        multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
        warpgroup.commit_group()
        last = ptx.load_one(vector + shape.LAST_DECAY - pair * 8)
        for i in cutlass.range_constexpr(dim // 2):
            state[i] = state[i] * last
        factors = load_factors(vector + shape.KEY_TO_LAST)
        warpgroup.wait_group(0)
        add_values(spec, by_token, registers, tokens, stage, factors)
        if lane == 0:
            arrive_taken(spec, taken, buffer)
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(full + following, (step + 1) // spec.stages & 1)
        warpgroup.wait_group(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(empty + stage)
        issue_keys(spec, by_key, registers, keys, following)
        warpgroup.wait_group(0)

    if is_transition:
        if segment.index > 0:
            store_transition(spec, transition_address(spec, segment, segment.index, head), state, row0, pair)
    else:
        store_summary(spec, summary_address(spec, segment, segment.index, head), group, warp, lane, state)


@cute.jit
def start_summary(spec, params, state, head, segment, is_transition, row0, group, warp, lane):
    state.fill(0.0)
    pair = lane % 4
    if is_transition:
        for n in cutlass.range_constexpr(spec.dim // 8):
            for i in cutlass.range_constexpr(4):
                if row0 + i // 2 * 8 == 8 * n + 2 * pair + i % 2:
                    state[4 * n + i] = Float32(1.0)
    elif segment.index == 0:
        load_state(spec, params, state, segment, head, row0, pair)
        store_summary(spec, summary_address(spec, segment, segment.count - 1, head), group, warp, lane, state)


def store_transition(spec: Any, address: Any, state: Any, row0: Any, pair: Any) -> None:
    """This warpgroup's rows of P^T, as summands, in the order of K tiles."""
    tile = address + Int64(row0 // CHUNK * spec.key_bytes)
    row = row0 % CHUNK
    for n in range(spec.dim // 8):
        piece = tile + n // 8 * TILE_BYTES
        for side in range(2):
            place = layouts.address(Int32(0), row + 8 * side, n % 8) + pair * 4
            first, second = state[4 * n + 2 * side], state[4 * n + 2 * side + 1]
            word = ptx.pack(BFloat16, first, second)
            ptx.store_global_word(piece + Int64(place), word)
            high0, high1 = ptx.unpack(BFloat16, word)
            rest = ptx.pack(BFloat16, first - high0, second - high1)
            ptx.store_global_word(piece + Int64(place + spec.dim * spec.dim * 2), rest)
