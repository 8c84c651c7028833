"""The state role of the fused chunk kernel: one warpgroup carries S^T of 64 V columns through a sequence.

The formulas, the barriers and who waits for whom: fused.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.operands import load_factors, multiply, multiply_step, smem_operand_b, tiled_mma
from kernels_cute.chunk.rings import chunks_in, key_stage_of, stage_of
from kernels_cute.chunk.roles.store import zero_rows, zero_rows_beyond
from kernels_cute.chunk.roles.tile_blocks import zero_keys
from kernels_cute.chunk.scheduler import note_record, read_record
from kernels_cute.chunk.shape import (
    BUFFERS,
    CHUNK,
    KEY_TO_LAST,
    STATE_BARRIER,
    STATE_KEY,
    STATE_QUERY,
    VECTOR_BYTES,
    VECTORS,
    WARPGROUP,
)
from kernels_cute.chunk.split.start import start_of_segment
from kernels_cute.chunk.state_memory import fetch_item, settle_state, store_checkpoints, store_state
from kernels_cute.common import ptx


@cute.jit
def state_warpgroup(spec, storage, params, head, piece, warp, segment, only):
    lane = cute.arch.lane_idx()
    dim = spec.dim
    by_key = tiled_mma(spec, CHUNK, True)
    by_token = tiled_mma(spec, dim, True, True)
    keys = smem_operand_b(by_key, storage.k, layouts.by_rows(spec.dtype, CHUNK, dim, spec.key_stages))
    queries = smem_operand_b(by_key, storage.q, layouts.by_rows(spec.dtype, CHUNK, dim, spec.stages))
    token_layout = layouts.by_columns(spec.dtype, CHUNK, dim, spec.key_stages)
    tokens = smem_operand_b(by_token, storage.k, token_layout)
    m_operand = smem_operand_b(by_key, storage.m, layouts.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS))
    p_operand = smem_operand_b(by_key, storage.p, layouts.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS))

    state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
    state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), spec.dtype)
    sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
    outputs = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
    operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), spec.dtype)
    decayed = cute.make_rmem_tensor(by_token.partition_shape_A((64, CHUNK)), spec.dtype)
    state_words = cute.recast_tensor(state_operand, Int32)
    operand_words = cute.recast_tensor(operand, Int32)
    decayed_words = cute.recast_tensor(decayed, Int32)

    row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
    pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
    column0 = warp * 16  # the warp's first V column of the block's
    full, keys_full = storage.full.data_ptr(), storage.keys_full.data_ptr()
    ready, taken = storage.ready.data_ptr(), storage.taken.data_ptr()
    vectors = storage.vectors.data_ptr().toint() + pair * 8
    # Lane l names row l % 8 of matrix l // 8; matrices alternate between the warp's two halves of 8 columns.
    matrix_row = lane % 8 + lane // 16 * 8
    value_lane = layouts.address(storage.v.data_ptr().toint(), matrix_row, warp * 2 + lane // 8 % 2)
    if cutlass.const_expr(segment is None):
        fetched = cute.make_rmem_tensor(state.layout, Float32)
        first_item = only
        if cutlass.const_expr(only is None):
            first_item = read_record(storage, Int32(0))
        fetch_item(spec, params.initial_state, fetched, first_item, column0 + row, pair)
        settle_state(spec, params.initial_state, fetched, state, pair)
    else:
        start_of_segment(spec, storage, params, state, head, segment, piece, warp, lane)
    sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
    end = Int32(0)  # of all sequences
    if cutlass.const_expr(only is None):
        # Once for all items; with one it is read when needed, or registers do not suffice.
        end = Int32(params.cu_seqlens[sequences])

    # Products but M's are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor
    # cores work on a step while the next is made ready. Q S has no hurry and fills their pauses, half before M and half
    # after; U of the next chunk goes ahead of this one's output. Where the loop closes nothing is in flight, else ptxas
    # would serialise every product.
    number, base, going = Int32(0), Int32(0), Boolean(True)
    while going:
        item = only
        if cutlass.const_expr(only is None):
            item = read_record(storage, number)
        num_chunks = chunks_in(item.live_length)
        first_column = item.piece * spec.columns  # of the warpgroup
        row0 = item.piece * spec.columns + column0 + row  # of this lane
        first_stage, first_parity = key_stage_of(spec, base)
        if num_chunks > 0:
            cute.arch.mbarrier_wait(keys_full + first_stage, first_parity)
        issue_keys(spec, by_key, sums, state, state_operand, state_words, keys, first_stage, False)
        warpgroup.wait_group(0)
        for step in cutlass.range(num_chunks, unroll=1):
            count = base + step
            stage, parity = stage_of(spec, count)
            key_stage, _ = key_stage_of(spec, count)
            following, following_parity = key_stage_of(spec, count + 1)
            buffer, turn = count & 1, count >> 1 & 1
            valid = cutlass.min(item.live_length - step * CHUNK, CHUNK)
            vector = vectors + buffer * VECTOR_BYTES
            half_steps = dim // 32
            # What the next steps need is asked for before the products that keep this warp waiting are issued.
            cute.arch.mbarrier_wait(full + stage, parity)
            values = [
                ptx.load_matrices(value_lane + stage * spec.value_bytes + i * 16 * layouts.ROW_BYTES, True) for i in range(4)
            ]
            warpgroup.fence()
            for i in cutlass.range_constexpr(half_steps):
                multiply_step(by_key, outputs, state_operand, queries[None, None, None, stage], i, i == 0)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(ready + buffer, turn)
            factors = load_factors(vector, STATE_KEY)

            # W and M; W itself is what the product adds to
            for i in cutlass.range_constexpr(CHUNK // 16):
                for m in cutlass.range_constexpr(2):
                    n = 2 * i + m
                    for side in cutlass.range_constexpr(2):
                        value0, value1 = ptx.unpack(spec.dtype, values[i][2 * m + side])
                        place = 4 * n + 2 * side
                        sums[place] = value0 - factors[n][0] * sums[place]
                        sums[place + 1] = value1 - factors[n][1] * sums[place + 1]
            if valid < CHUNK:
                mask_sums(sums, valid, pair)
            for i in cutlass.range_constexpr(CHUNK // 16):
                for j in cutlass.range_constexpr(4):
                    operand_words[4 * i + j] = ptx.pack(spec.dtype, sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1])
            warpgroup.fence()
            multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
            warpgroup.commit_group()
            for i in cutlass.range_constexpr(half_steps, 2 * half_steps):
                multiply_step(by_key, outputs, state_operand, queries[None, None, None, stage], i, False)
            warpgroup.commit_group()
            last = ptx.load_one(vector + VECTORS * CHUNK * 4 - pair * 8)
            if cutlass.const_expr(spec.paired):
                if valid < CHUNK:
                    # The block whose turn it was has done this for its own tile alone.
                    zero_keys(spec, storage.k.data_ptr().toint() + key_stage * spec.key_bytes, valid, warp * 32 + lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=STATE_BARRIER, number_of_threads=WARPGROUP)
            factors = load_factors(vector, KEY_TO_LAST)
            for i in cutlass.range_constexpr(dim // 2):
                state[i] = state[i] * last
            warpgroup.wait_group(1)

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
                multiply_step(by_token, state, decayed, tokens[None, None, None, key_stage], i, False)
            warpgroup.commit_group()

            # O
            factors = load_factors(vector, STATE_QUERY)
            for i in cutlass.range_constexpr(CHUNK // 4):
                operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
            warpgroup.wait_group(1)
            for n in cutlass.range_constexpr(CHUNK // 8):
                for side in cutlass.range_constexpr(2):
                    for odd in cutlass.range_constexpr(2):
                        outputs[4 * n + 2 * side + odd] = outputs[4 * n + 2 * side + odd] * factors[n][odd]
            warpgroup.fence()
            for i in cutlass.range_constexpr(CHUNK // 16):
                multiply_step(by_key, outputs, operand, p_operand[None, None, None, buffer], i, False)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.keys_empty.data_ptr() + key_stage)
            if step + 1 < num_chunks:
                cute.arch.mbarrier_wait(keys_full + following, following_parity)
                issue_keys(spec, by_key, sums, state, state_operand, state_words, keys, following)
                warpgroup.wait_group(1)
            else:
                warpgroup.wait_group(0)
            # O, turned on its way to shared memory, takes the place of the V that this warp has read.
            for i in cutlass.range_constexpr(CHUNK // 16):
                words = [ptx.pack(spec.dtype, outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]) for j in range(4)]
                ptx.store_matrices(value_lane + (stage * spec.value_bytes + i * 16 * layouts.ROW_BYTES), words, True)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)
                if cutlass.const_expr(spec.paired):
                    ptx.arrive_in_cluster(ptx.in_block(storage.taken.data_ptr().toint() + buffer * 8, buffer))
                else:
                    cute.arch.mbarrier_arrive(taken + buffer)
            warpgroup.wait_group(0)
            if cutlass.const_expr(spec.has_checkpoints):
                if (step + 1) * CHUNK <= item.live_length:
                    done = tokens_before(item, segment, params.cu_seqlens) + (step + 1) * CHUNK
                    store_checkpoints(spec, params, state, item.sequence, item.head, done, row0, pair)

        if cutlass.const_expr(only is None):
            # The next item's state is on its way while this one's goes.
            next_item = read_record(storage, number + 1)
            going = next_item.sequence >= 0
            fetch_item(spec, params.initial_state, fetched, next_item, column0 + row, pair)
            store_state(spec, params, state, item, row0, pair)
            zero_rows(params.out, item.begin, item.length, item.live_length, item.head, first_column, warp, lane)
            zero_rows_beyond(params.out, end, sequences, item.sequence, item.head, first_column, warp, lane)
            note_record(storage, number)
            settle_state(spec, params.initial_state, fetched, state, pair)
        else:
            going = Boolean(False)
            is_first, is_last = Boolean(True), Boolean(True)
            if cutlass.const_expr(segment is not None):
                is_first, is_last = segment.index == 0, segment.index == segment.count - 1
            if is_last:
                store_state(spec, params, state, item, row0, pair)
            zero_rows(params.out, item.begin, item.length, item.live_length, item.head, first_column, warp, lane)
            if is_first:
                end = Int32(params.cu_seqlens[sequences])
                zero_rows_beyond(params.out, end, sequences, item.sequence, item.head, first_column, warp, lane)
        number, base = number + 1, base + num_chunks


@cute.jit
def issue_keys(spec, by_key, sums, state, operand, words, keys, stage, by_steps: cutlass.Constexpr = True):
    """U, by steps while the state is being rounded."""
    if cutlass.const_expr(not by_steps):
        for i in cutlass.range_constexpr(spec.dim // 4):
            words[i] = ptx.pack(spec.dtype, state[2 * i], state[2 * i + 1])
        warpgroup.fence()
    for i in cutlass.range_constexpr(spec.dim // 16):
        if cutlass.const_expr(by_steps):
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = ptx.pack(spec.dtype, state[8 * i + 2 * j], state[8 * i + 2 * j + 1])
            warpgroup.fence()
        multiply_step(by_key, sums, operand, keys[None, None, None, stage], i, i == 0)
    warpgroup.commit_group()


@cute.jit
def mask_sums(sums, valid, pair):
    """Zero in columns from valid on: they come from rows of the next sequence and may be anything."""
    for n in cutlass.range_constexpr(CHUNK // 8):
        for odd in cutlass.range_constexpr(2):
            if 8 * n + 2 * pair + odd >= valid:
                for side in cutlass.range_constexpr(2):
                    sums[4 * n + 2 * side + odd] = Float32(0.0)


def tokens_before(item: Any, segment: Any, cu_seqlens: Any) -> Any:
    """Tokens of the sequence in front of an item. A segment knows them: the address of its sequence's offset, kept from where
    the segment was looked up, would be two registers too many."""
    return item.begin - Int32(cu_seqlens[item.sequence]) if segment is None else segment.before
