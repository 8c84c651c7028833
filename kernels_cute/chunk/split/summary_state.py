"""The state role of the first launch of a split call: 64 columns of a summary (h, P). The formulas: summary.py."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.operands import load_factors, multiply, multiply_step, smem_operand_b, tiled_mma
from kernels_cute.chunk.roles.state import issue_keys
from kernels_cute.chunk.shape import BUFFERS, CHUNK, KEY_TO_LAST, STATE_KEY, TILE_BYTES, VECTOR_BYTES, VECTORS
from kernels_cute.chunk.split.segments import store_summary, summary_address, transition_address
from kernels_cute.chunk.state_memory import load_state
from kernels_cute.common import ptx


@cute.jit
def summary_warpgroup(spec, storage, params, head, segment, rank, half, warp):
    """64 columns of h or of P."""
    lane = cute.arch.lane_idx()
    dim = spec.dim
    by_key = tiled_mma(spec, CHUNK, True)
    by_token = tiled_mma(spec, dim, True, True)
    keys = smem_operand_b(by_key, storage.k, layouts.by_rows(spec.dtype, CHUNK, dim, spec.stages))
    tokens = smem_operand_b(by_token, storage.k, layouts.by_columns(spec.dtype, CHUNK, dim, spec.stages))
    m_operand = smem_operand_b(by_key, storage.m, layouts.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS))

    state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
    state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), spec.dtype)
    sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
    operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), spec.dtype)
    decayed = cute.make_rmem_tensor(by_token.partition_shape_A((64, CHUNK)), spec.dtype)
    state_words = cute.recast_tensor(state_operand, Int32)
    operand_words = cute.recast_tensor(operand, Int32)
    decayed_words = cute.recast_tensor(decayed, Int32)

    row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
    pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
    group = half if cutlass.const_expr(spec.paired) else Int32(0)  # of 64 columns
    is_transition = (rank if cutlass.const_expr(spec.paired) else half) == 1
    row0 = group * 64 + warp * 16 + row
    full, empty = storage.keys_full.data_ptr(), storage.empty.data_ptr()
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    vectors = storage.vectors.data_ptr().toint() + pair * 8
    # Lane l names row l % 8 of matrix l // 8; matrices alternate between the warp's two halves of 8 columns.
    matrix_row = lane % 8 + lane // 16 * 8
    values_base = storage.v.data_ptr().toint() + group * TILE_BYTES
    values_step = Int32(spec.key_bytes)
    if is_transition:
        values_base = storage.zeros.data_ptr().toint()
        values_step = Int32(0)
    value_lane = layouts.address(values_base, matrix_row, warp * 2 + lane // 8 % 2)
    start_summary(spec, params, state, head, segment, is_transition, row0, group, warp, lane)

    # As in the fused kernel: products but M's a k step at a time, nothing in flight where the loop closes. Here one U too
    # many is issued, and dropped.
    num_chunks = segment.length // CHUNK
    cute.arch.mbarrier_wait(full, 0)
    issue_keys(spec, by_key, sums, state, state_operand, state_words, keys, Int32(0))
    warpgroup.wait_group(0)
    for step in cutlass.range(num_chunks, unroll=1):
        stage, following = step % spec.stages, (step + 1) % spec.stages
        buffer, turn = step % BUFFERS, step // BUFFERS & 1
        vector = vectors + buffer * VECTOR_BYTES
        cute.arch.mbarrier_wait(ready + buffer, turn)

        # W and M; W is what the product adds to
        for i in cutlass.range_constexpr(CHUNK // 16):
            values = ptx.load_matrices(value_lane + stage * values_step + i * 16 * layouts.ROW_BYTES, True)
            for m in cutlass.range_constexpr(2):
                n = 2 * i + m
                factors = ptx.load_pair(vector + STATE_KEY * CHUNK * 4 + n * 32)
                for side in cutlass.range_constexpr(2):
                    value0, value1 = ptx.unpack(spec.dtype, values[2 * m + side])
                    place = 4 * n + 2 * side
                    sums[place] = value0 - factors[0] * sums[place]
                    sums[place + 1] = value1 - factors[1] * sums[place + 1]
                    operand_words[2 * n + side] = ptx.pack(spec.dtype, sums[place], sums[place + 1])
        warpgroup.fence()
        multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
        warpgroup.commit_group()
        last = ptx.load_one(vector + VECTORS * CHUNK * 4 - pair * 8)
        for i in cutlass.range_constexpr(dim // 2):
            state[i] = state[i] * last
        factors = load_factors(vector, KEY_TO_LAST)
        warpgroup.wait_group(0)

        # S
        for i in cutlass.range_constexpr(CHUNK // 16):
            for m in cutlass.range_constexpr(2):
                n = 2 * i + m
                for side in cutlass.range_constexpr(2):
                    place = 4 * n + 2 * side
                    decayed_words[2 * n + side] = ptx.pack(
                        spec.dtype, sums[place] * factors[n][0], sums[place + 1] * factors[n][1]
                    )
            warpgroup.fence()
            multiply_step(by_token, state, decayed, tokens[None, None, None, stage], i, False)
        warpgroup.commit_group()
        if lane == 0:
            if cutlass.const_expr(spec.paired):
                ptx.arrive_in_cluster(ptx.in_block(taken.toint() + buffer * 8, buffer))
            else:
                cute.arch.mbarrier_arrive(taken + buffer)
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(full + following, (step + 1) // spec.stages & 1)
        warpgroup.wait_group(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(empty + stage)
        issue_keys(spec, by_key, sums, state, state_operand, state_words, keys, following)
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
            high, higher = ptx.unpack(BFloat16, word)
            rest = ptx.pack(BFloat16, first - high, second - higher)
            ptx.store_global_word(piece + Int64(place + spec.dim * spec.dim * 2), rest)
