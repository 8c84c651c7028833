"""The state role of a chain block of the four-SM form: the state of 64 V columns.

The formulas, the barriers and who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.four_sm.shape import SLOTS
from kernels_cute.chunk.operands import load_factors, multiply, multiply_step, smem_operand_b, tiled_mma
from kernels_cute.chunk.roles.store import zero_rows, zero_rows_beyond
from kernels_cute.chunk.shape import CHUNK, STATE_KEY, STATE_QUERY, TILE_BYTES, VECTOR_BYTES, VECTORS
from kernels_cute.chunk.state_memory import load_state, store_checkpoints, store_state
from kernels_cute.common import ptx


@cute.jit
def chain_warpgroup(spec, form, storage, route, params, item, warp):
    begin, length, live_length, sequence = item.begin, item.length, item.live_length, item.sequence
    head, piece = item.head, item.piece
    lane = cute.arch.lane_idx()
    dim, stages = spec.dim, spec.stages
    by_key = tiled_mma(spec, CHUNK, True)
    by_token = tiled_mma(spec, dim, True, True)
    keys = smem_operand_b(by_key, storage.k, layouts.by_rows(spec.dtype, CHUNK, dim, stages))
    queries = smem_operand_b(by_key, storage.q, layouts.by_rows(spec.dtype, CHUNK, dim, stages))
    z_operand = smem_operand_b(by_token, storage.z, layouts.by_columns(spec.dtype, CHUNK, dim, SLOTS))
    p_operand = smem_operand_b(by_key, storage.p, layouts.by_rows(spec.dtype, CHUNK, CHUNK, SLOTS))

    state = cute.make_rmem_tensor(by_token.partition_shape_C((64, dim)), Float32)
    state_operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, dim)), spec.dtype)
    sums = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
    outputs = cute.make_rmem_tensor(by_key.partition_shape_C((64, CHUNK)), Float32)
    operand = cute.make_rmem_tensor(by_key.partition_shape_A((64, CHUNK)), spec.dtype)
    state_words = cute.recast_tensor(state_operand, Int32)
    operand_words = cute.recast_tensor(operand, Int32)
    values = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # V of the chunk to come
    factors = cute.make_rmem_tensor(cute.make_layout(16), Float32)  # and its factors of K S

    row = lane // 4  # this lane's first row of its warp's 16; its second is 8 further
    pair = lane % 4  # its columns: 8 n + 2 pair + {0, 1}
    column0 = piece * spec.columns + warp * 16  # the warp's first V column
    # Of the chain that loads for both.
    k_empty = ptx.in_block(storage.k_empty.data_ptr().toint(), Int32(form.key_loader))
    q_empty = ptx.in_block(storage.q_empty.data_ptr().toint(), Int32(form.query_loader))
    load_state(spec, params, state, item, head, column0 + row, pair)

    # Products are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor cores
    # work on a step while the next is made ready. Q S fills their pause before S, O is finished while the next U runs. One
    # U too many is issued: it reads whatever lies in shared memory and is dropped. Where the loop closes nothing is in
    # flight, else ptxas would serialise every product.
    num_chunks = (live_length + (CHUNK - 1)) // CHUNK
    if num_chunks > 0:
        cute.arch.mbarrier_wait(storage.k_full.data_ptr(), 0)
    issue_keys(spec, by_key, sums, state, state_operand, state_words, keys, Int32(0))
    expect_chunk(spec, storage, state, values, factors, Int32(0), num_chunks, warp, lane)
    warpgroup.wait_group(0)
    for step in cutlass.range(num_chunks, unroll=1):
        stage, following, slot = step % stages, (step + 1) % stages, step % SLOTS
        valid = cutlass.min(live_length - step * CHUNK, CHUNK)
        warpgroup.fence()
        multiply(by_key, outputs, state_operand, queries[None, None, None, stage], True)
        warpgroup.commit_group()
        if lane == 0:
            ptx.arrive_in_cluster(k_empty + stage * 8)

        # W and S
        for i in cutlass.range_constexpr(CHUNK // 16):
            for m in cutlass.range_constexpr(2):
                n = 2 * i + m
                for side in cutlass.range_constexpr(2):
                    value0, value1 = ptx.unpack(spec.dtype, values[4 * i + 2 * m + side])
                    operand_words[2 * n + side] = ptx.pack(
                        spec.dtype,
                        value0 - factors[2 * n] * sums[4 * n + 2 * side],
                        value1 - factors[2 * n + 1] * sums[4 * n + 2 * side + 1],
                    )
            if valid < 16 * (i + 1):
                mask_words(operand_words, i, valid, pair)
            warpgroup.fence()
            multiply_step(by_token, state, operand, z_operand[None, None, None, slot], i, False)
            warpgroup.commit_group()

        # O
        to_query = load_factors(vector_address(storage, slot, pair), STATE_QUERY)
        warpgroup.wait_group(CHUNK // 16)
        if lane == 0:
            ptx.arrive_in_cluster(q_empty + stage * 8)
        for n in cutlass.range_constexpr(CHUNK // 8):
            for side in cutlass.range_constexpr(2):
                for odd in cutlass.range_constexpr(2):
                    outputs[4 * n + 2 * side + odd] = outputs[4 * n + 2 * side + odd] * to_query[n][odd]
        warpgroup.fence()
        multiply(by_key, outputs, operand, p_operand[None, None, None, slot], False)
        warpgroup.commit_group()
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + following, (step + 1) // stages & 1)
        warpgroup.wait_group(1)
        issue_keys(spec, by_key, sums, state, state_operand, state_words, keys, following)
        warpgroup.wait_group(dim // 16)
        if lane == 0:
            _free_slot(form, route, slot)
        store_output(spec, storage, outputs, stage, warp, lane)
        if cutlass.const_expr(spec.has_checkpoints):
            # Before the state decays to the end of the next chunk.
            warpgroup.wait_group(0)
            if (step + 1) * CHUNK <= live_length:
                done = begin - Int32(params.cu_seqlens[sequence]) + (step + 1) * CHUNK
                store_checkpoints(spec, params, state, sequence, head, done, column0 + row, pair)
        expect_chunk(spec, storage, state, values, factors, step + 1, num_chunks, warp, lane)
        warpgroup.wait_group(0)

    store_state(spec, params, state, item, column0 + row, pair)
    zero_rows(params.out, begin, length, live_length, head, piece * spec.columns, warp, lane)
    sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
    end = Int32(params.cu_seqlens[sequences])
    zero_rows_beyond(params.out, end, sequences, sequence, head, piece * spec.columns, warp, lane)


def _free_slot(form: Any, route: Any, slot: Any) -> None:
    """A plain function: inside a dynamic `if` the DSL takes a call of an object's method for a change of the object."""
    form.free_slot(route, slot)


@cute.jit
def mask_words(words, i: cutlass.Constexpr, valid, pair):
    """Zero in columns from valid on of k step i: they come from rows of the next sequence and may be anything."""
    for m in cutlass.range_constexpr(2):
        column = 16 * i + 8 * m + 2 * pair
        for side in cutlass.range_constexpr(2):
            place = 4 * i + 2 * m + side
            if column + 1 >= valid:
                word = words[place] & 0xFFFF
                if column >= valid:
                    word = Int32(0)
                words[place] = word


@cute.jit
def issue_keys(spec, by_key, sums, state, operand, words, keys, stage):
    """U, while the state is being rounded. A group for every step: with one for all ptxas has each step counted all the same,
    and a wait that leaves one group in flight leaves one step."""
    for i in cutlass.range_constexpr(spec.dim // 16):
        for j in cutlass.range_constexpr(4):
            words[4 * i + j] = ptx.pack(spec.dtype, state[8 * i + 2 * j], state[8 * i + 2 * j + 1])
        warpgroup.fence()
        multiply_step(by_key, sums, operand, keys[None, None, None, stage], i, i == 0)
        warpgroup.commit_group()


@cute.jit
def expect_chunk(spec, storage, state, values, factors, step, num_chunks, warp, lane):
    """What a chunk needs besides U: V, the factors of K S, S decayed to its last token, and that Q is there."""
    stage, slot = step % spec.stages, step % SLOTS
    vector = vector_address(storage, slot, lane % 4)
    if step < num_chunks:
        cute.arch.mbarrier_wait(storage.v_full.data_ptr() + stage, step // spec.stages & 1)
    value_lane = value_address(storage, stage, warp, lane)
    for i in cutlass.range_constexpr(CHUNK // 16):
        loaded = ptx.load_matrices(value_lane + i * 16 * layouts.ROW_BYTES, True)
        for j in cutlass.range_constexpr(4):
            values[4 * i + j] = loaded[j]
    last = Float32(1.0)
    if step < num_chunks:
        cute.arch.mbarrier_wait(storage.ready.data_ptr() + slot, step // SLOTS & 1)
        last = ptx.load_one(storage.vectors.data_ptr().toint() + slot * VECTOR_BYTES + VECTORS * CHUNK * 4)
    loaded = load_factors(vector, STATE_KEY)
    for n in cutlass.range_constexpr(CHUNK // 8):
        factors[2 * n], factors[2 * n + 1] = loaded[n][0], loaded[n][1]
    for i in cutlass.range_constexpr(spec.dim // 2):
        state[i] = state[i] * last
    if step < num_chunks:
        cute.arch.mbarrier_wait(storage.q_full.data_ptr() + stage, step // spec.stages & 1)


@cute.jit
def store_output(spec, storage, outputs, stage, warp, lane):
    """O, turned on its way to shared memory, takes the place of the V that this warp has read."""
    value_lane = value_address(storage, stage, warp, lane)
    for i in cutlass.range_constexpr(CHUNK // 16):
        words = [ptx.pack(spec.dtype, outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]) for j in range(4)]
        ptx.store_matrices(value_lane + i * 16 * layouts.ROW_BYTES, words, True)
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)


def value_address(storage: Any, stage: Any, warp: Any, lane: Any) -> Any:
    """Where a lane points when its warp's 16 columns of V or O are moved as matrices: it names row l % 8 of matrix l // 8,
    and matrices alternate between the warp's two halves of 8 columns."""
    tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
    return layouts.address(tile, lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2)


def vector_address(storage: Any, slot: Any, pair: Any) -> Any:
    return storage.vectors.data_ptr().toint() + slot * VECTOR_BYTES + pair * 8
