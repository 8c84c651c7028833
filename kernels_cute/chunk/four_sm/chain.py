"""The state role of a chain block of the four-SM form: the state of 64 V columns.

The formulas and who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.four_sm.forms import Form
from kernels_cute.chunk.four_sm.shape import SLOTS
from kernels_cute.chunk.operands import load_factors, multiply, multiply_step, smem_operand_b, tiled_mma
from kernels_cute.chunk.rings import chunks_in
from kernels_cute.chunk.roles.copies import zero_rows
from kernels_cute.chunk.roles.state import issue_keys, put_outputs, scale_columns, state_registers, value_address
from kernels_cute.chunk.roles.tile_blocks import lane_of, set_words
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import CHUNK, TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.state_memory import load_state, store_checkpoints, store_state
from kernels_cute.common import ptx


@cute.jit
def chain_warpgroup(spec: ChunkSpec, form: Form, storage: Any, route: Any, params: ChunkParams, work_tile: WorkTile, warp: Int32):
    length, sequence, dim, stages = work_tile.live_length, work_tile.sequence, spec.dim, spec.stages
    free_slot = form.free_slot  # a name of its own, see run_block
    at = lane_of(warp)
    lane, pair = at.lane, at.pair
    by_key, by_token = tiled_mma(spec.dtype, CHUNK), tiled_mma(spec.dtype, dim, True)
    keys = smem_operand_b(by_key, storage.k, operands.by_rows(spec.dtype, CHUNK, dim, stages))
    queries = smem_operand_b(by_key, storage.q, operands.by_rows(spec.dtype, CHUNK, dim, stages))
    z_operand = smem_operand_b(by_token, storage.z, operands.by_columns(spec.dtype, CHUNK, dim, SLOTS))
    p_operand = smem_operand_b(by_key, storage.p, operands.by_rows(spec.dtype, CHUNK, CHUNK, SLOTS))
    registers = state_registers(spec, by_key, by_token)
    state, sums, outputs, state_operand, _, operand, operand_words, _, _ = registers
    values = cute.make_rmem_tensor(cute.make_layout(16), Int32)  # V of the chunk to come
    factors = cute.make_rmem_tensor(cute.make_layout(16), Float32)  # and its factors of K S

    column0 = work_tile.piece * spec.columns  # the warpgroup's first V column
    row0 = column0 + warp * 16 + at.row
    # The barriers are those of the chain that loads for both.
    k_empty = ptx.in_block(storage.k_empty.data_ptr().toint(), Int32(form.key_loader))
    q_empty = ptx.in_block(storage.q_empty.data_ptr().toint(), Int32(form.query_loader))
    load_state(spec, params, state, work_tile, work_tile.head, row0, pair)

    # Products are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor cores
    # work on a step while the next is made ready. Q S fills their pause before S, O is finished while the next U runs. One
    # U too many is issued: it reads whatever is in shared memory and is dropped. Where the loop closes nothing is in
    # flight, else ptxas would serialise every product. U is in a group for every step: with one for all ptxas has each step
    # counted all the same, and a wait that leaves one group in flight leaves one step.
    num_chunks = chunks_in(length)
    if num_chunks > 0:
        cute.arch.mbarrier_wait(storage.k_full.data_ptr(), 0)
    issue_keys(spec, by_key, registers, keys, Int32(0), "in groups")
    expect_chunk(spec, storage, state, values, factors, Int32(0), num_chunks, warp, lane)
    warpgroup.wait_group(0)
    for step in cutlass.range(num_chunks, unroll=1):
        stage, following, slot = step % stages, (step + 1) % stages, step % SLOTS
        valid = cutlass.min(length - step * CHUNK, CHUNK)
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
                    index = 4 * n + 2 * side
                    word = (value0 - factors[2 * n] * sums[index], value1 - factors[2 * n + 1] * sums[index + 1])
                    operand_words[2 * n + side] = ptx.pack(spec.dtype, *word)
            if valid < 16 * (i + 1):
                mask_words(operand_words, i, valid, pair)
            warpgroup.fence()
            multiply_step(by_token, state, operand, z_operand[None, None, None, slot], i, False)
            warpgroup.commit_group()

        # O
        to_query = load_factors(vector_address(storage, slot, pair) + shape.STATE_QUERY)
        warpgroup.wait_group(CHUNK // 16)
        if lane == 0:
            ptx.arrive_in_cluster(q_empty + stage * 8)
        scale_columns(outputs, to_query)
        warpgroup.fence()
        multiply(by_key, outputs, operand, p_operand[None, None, None, slot], False)
        warpgroup.commit_group()
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + following, (step + 1) // stages & 1)
        warpgroup.wait_group(1)
        issue_keys(spec, by_key, registers, keys, following, "in groups")
        warpgroup.wait_group(dim // 16)
        if lane == 0:
            free_slot(route, slot)
        put_outputs(spec, outputs, value_address(storage.v.data_ptr().toint() + stage * TILE_BYTES, warp, lane))
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)
        if cutlass.const_expr(spec.has_checkpoints):
            # Before the state decays to the end of the next chunk.
            warpgroup.wait_group(0)
            if (step + 1) * CHUNK <= length:
                done = work_tile.begin - Int32(params.cu_seqlens[sequence]) + (step + 1) * CHUNK
                store_checkpoints(spec, params, state, sequence, work_tile.head, done, row0, pair)
        expect_chunk(spec, storage, state, values, factors, step + 1, num_chunks, warp, lane)
        warpgroup.wait_group(0)

    store_state(spec, params, state, work_tile, row0, pair)
    zero_rows(params.out, work_tile, column0, warp, lane, length, work_tile.length, 16, work_tile.begin)
    sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
    end = Int32(params.cu_seqlens[sequences])
    zero_rows(params.out, work_tile, column0, warp, lane, end + sequence * 16, cute.size(params.out, mode=[0]), sequences * 16)


@cute.jit
def mask_words(words: cute.Tensor, i: cutlass.Constexpr, valid: Int32, pair: Int32):
    """Zero the columns of k step i from `valid` on. They come from rows of the next sequence and may hold anything."""
    for m in cutlass.range_constexpr(2):
        column = 16 * i + 8 * m + 2 * pair
        for side in cutlass.range_constexpr(2):
            index = 4 * i + 2 * m + side
            if column + 1 >= valid:
                word = words[index] & 0xFFFF
                if column >= valid:
                    word = Int32(0)
                words[index] = word


@cute.jit
def expect_chunk(
    spec: ChunkSpec, storage: Any, state: cute.Tensor, values: cute.Tensor, factors: cute.Tensor, step: Int32, num_chunks: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """Fetch what a chunk needs besides U: V and the factors of K S. Decay the state to the chunk's last token, and wait for Q."""
    stage, slot = step % spec.stages, step % SLOTS
    vector = vector_address(storage, slot, lane % 4)
    if step < num_chunks:
        cute.arch.mbarrier_wait(storage.v_full.data_ptr() + stage, step // spec.stages & 1)
    value_lane = value_address(storage.v.data_ptr().toint() + stage * TILE_BYTES, warp, lane)
    for i in cutlass.range_constexpr(CHUNK // 16):
        loaded = ptx.load_matrices(value_lane + i * 16 * operands.ROW_BYTES, True)
        set_words(values, i, loaded)
    last = Float32(1.0)
    if step < num_chunks:
        cute.arch.mbarrier_wait(storage.ready.data_ptr() + slot, step // SLOTS & 1)
        last = ptx.load_one(vector_address(storage, slot, 0) + shape.LAST_DECAY)
    loaded = load_factors(vector + shape.STATE_KEY)
    for n in cutlass.range_constexpr(CHUNK // 8):
        factors[2 * n], factors[2 * n + 1] = loaded[n][0], loaded[n][1]
    for i in cutlass.range_constexpr(spec.dim // 2):
        state[i] = state[i] * last
    if step < num_chunks:
        cute.arch.mbarrier_wait(storage.q_full.data_ptr() + stage, step // spec.stages & 1)


def vector_address(storage: Any, slot: Any, pair: Any) -> Any:
    return storage.vectors.data_ptr().toint() + slot * shape.VECTOR_BYTES + pair * 8
