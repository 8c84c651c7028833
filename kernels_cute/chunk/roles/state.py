"""The state role of the fused chunk kernel: one warpgroup carries S^T of 64 V columns through a sequence.

The formulas and who waits for whom: fused.py. The state roles of segments' summaries and of the four-SM form use its parts.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands, shape
from kernels_cute.chunk.rings import chunks_in, ring_place
from kernels_cute.chunk.roles.copies import zero_rows
from kernels_cute.chunk.roles.tile_blocks import Lane, lane_of, zero_keys
from kernels_cute.chunk.scheduler import WorkTile, note_record, read_record
from kernels_cute.chunk.shape import BUFFERS, CHUNK
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.segments import Segment, start_of_segment
from kernels_cute.chunk.state_memory import fetch_state, settle_state, store_checkpoints, store_state
from kernels_cute.common import ptx


def state_registers(spec: Any, by_key: Any, by_token: Any) -> tuple[Any, ...]:
    """Return the registers of a state role. Accumulators: S^T [64, D]; U, W and Y [64, 64]; O [64, 64]. Rounded operands, each
    with its words: S^T; W or Y; Y decayed to the last token, for the product with K."""
    return (
        *(operands.accumulators(by_token, spec.dim), operands.accumulators(by_key, CHUNK), operands.accumulators(by_key, CHUNK)),
        *operands.register_operand(spec.dtype, by_key, spec.dim),
        *operands.register_operand(spec.dtype, by_key, CHUNK),
        *operands.register_operand(spec.dtype, by_token, CHUNK),
    )


def token_operands(spec: Any, storage: Any, by_key: Any, by_token: Any) -> tuple[Any, ...]:
    """K and Q as the operands of U and Q S, and K as that of the state's update."""
    dim = spec.dim
    return (
        operands.smem_operand_b(by_key, storage.k, operands.by_rows(spec.dtype, CHUNK, dim, spec.key_stages)),
        operands.smem_operand_b(by_key, storage.q, operands.by_rows(spec.dtype, CHUNK, dim, spec.query_stages)),
        operands.smem_operand_b(by_token, storage.k, operands.by_columns(spec.dtype, CHUNK, dim, spec.key_stages)),
    )


def state_sources(spec: Any, storage: Any, by_key: Any, by_token: Any, at: Any, head: Any) -> tuple[Any, ...]:
    """Operands and addresses of state_chunks."""
    of_tokens, square = token_operands(spec, storage, by_key, by_token), operands.by_rows(spec.dtype, CHUNK, CHUNK, BUFFERS)
    m_operand, p_operand = (operands.smem_operand_b(by_key, field, square) for field in (storage.m, storage.p))
    value_lane = value_address(storage.v.data_ptr().toint(), at.warp, at.lane)
    vectors = storage.vectors.data_ptr().toint() + at.pair * 8
    return by_key, by_token, *of_tokens, m_operand, p_operand, value_lane, vectors


def of_head(work_tile: Any, head: Any) -> Any:
    """A work tile as the warpgroup of its state head number `head` sees it; None = it has one."""
    return work_tile if head is None else work_tile._replace(head=work_tile.head + head)


@cute.jit
def state_warpgroup(
    spec: ChunkSpec, storage: Any, params: ChunkParams, warp: Int32, segment: Segment | None, single_tile: WorkTile | None,
    make_sources: Any, go_through: Any, head: Int32 | None = None,
):  # fmt: skip
    """Run the state role over all work tiles of this block.

    single_tile: the block's only tile; None reads tiles from the scheduler's records. make_sources: makes the operands and
    addresses; go_through: takes the state through the chunks of a work tile. head: number of the warpgroup's state head, None
    where the block has one.
    """
    at = lane_of(warp)
    lane, pair, dim = at.lane, at.pair, spec.dim
    by_key, by_token = operands.tiled_mma(spec.dtype, CHUNK), operands.tiled_mma(spec.dtype, dim, True)
    sources = make_sources(spec, storage, by_key, by_token, at, head)
    registers = state_registers(spec, by_key, by_token)
    state, initial = registers[0], params.initial_state
    block_row = warp * 16 + at.row  # this lane's first V row of the block's
    if cutlass.const_expr(segment is None):
        fetched = cute.make_rmem_tensor(state.layout, Float32)
        first = of_head(read_record(storage, Int32(0)) if cutlass.const_expr(single_tile is None) else single_tile, head)
        first_row = first.piece * spec.columns + block_row
        fetch_state(spec, initial, fetched, first.starts, first.read_slot, first.head, first_row, pair)
        settle_state(spec, initial, fetched, state, pair)
    else:
        start_of_segment(spec, storage, params, state, single_tile.head, segment, single_tile.piece, warp, lane)
    sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
    end = Int32(0)  # of all sequences
    if cutlass.const_expr(single_tile is None):
        # Once for all work tiles; with one it is read when needed, or registers do not suffice.
        end = Int32(params.cu_seqlens[sequences])

    number, base, has_more = Int32(0), Int32(0), Boolean(True)
    while has_more:
        work_tile = of_head(read_record(storage, number) if cutlass.const_expr(single_tile is None) else single_tile, head)
        num_chunks = chunks_in(work_tile.live_length)
        column0 = work_tile.piece * spec.columns  # of the warpgroup
        row0 = work_tile.piece * spec.columns + block_row  # of this lane
        go_through(spec, storage, params, sources, registers, at, work_tile, base, segment)
        if cutlass.const_expr(head is not None):
            # Not kept in registers meanwhile.
            work_tile, at = of_head(read_record(storage, number), head), lane_of(warp, ptx.opaque(cute.arch.lane_idx()))
            lane, pair, block_row = at.lane, at.pair, warp * 16 + at.row
            row0, column0 = work_tile.piece * spec.columns + block_row, work_tile.piece * spec.columns
        is_first, is_last = Boolean(True), Boolean(True)
        if cutlass.const_expr(single_tile is None):
            # The next work tile's state is on its way while this one's goes.
            next_work_tile = of_head(read_record(storage, number + 1), head)
            has_more = next_work_tile.sequence >= 0
            next_row = next_work_tile.piece * spec.columns + block_row
            fetch_state(
                spec, initial, fetched, next_work_tile.starts, next_work_tile.read_slot, next_work_tile.head, next_row, pair
            )
        else:
            has_more = Boolean(False)
            if cutlass.const_expr(segment is not None):
                is_first, is_last = segment.index == 0, segment.index == segment.count - 1
        if is_last:
            store_state(spec, params, state, work_tile, row0, pair)
        zero_rows(params.out, work_tile, column0, warp, lane, work_tile.live_length, work_tile.length, 16, work_tile.begin)
        if is_first:
            if cutlass.const_expr(single_tile is not None):
                end = Int32(params.cu_seqlens[sequences])
            rows = cute.size(params.out, mode=[0])
            zero_rows(params.out, work_tile, column0, warp, lane, end + work_tile.sequence * 16, rows, sequences * 16)
        if cutlass.const_expr(single_tile is None):
            note_record(storage, number)
            settle_state(spec, initial, fetched, state, pair)
        number, base = number + 1, base + num_chunks


@cute.jit
def state_chunks(
    spec: ChunkSpec, storage: Any, params: ChunkParams, sources: Any, registers: Any, at: Lane, work_tile: WorkTile, base: Int32,
    segment: Segment | None,
):  # fmt: skip
    """Take S^T through the chunks of a work tile. base: chunks before the work tile; sources: of state_sources.

    Products but M's are issued a k step at a time, as soon as 16 columns of their register operand are rounded: the tensor cores
    work on a step while the next is made ready. Q S is not urgent and fills their pauses, half before M and half after. U of the
    next chunk is issued before this chunk's output is finished. Where the loop closes nothing is in flight, or ptxas would
    serialise every product.
    """
    by_key, by_token, keys, queries, tokens, m_operand, p_operand, value_lane, vectors = sources
    state, sums, outputs, state_operand, state_words, operand, operand_words, _, _ = registers
    lane, pair, warp = at.lane, at.pair, at.warp
    full, k_full, ready, tile_released = (
        x.data_ptr() for x in (storage.full, storage.k_full, storage.ready, storage.tile_released)
    )
    num_chunks, half_steps = chunks_in(work_tile.live_length), spec.dim // 32
    first_stage, first_parity = ring_place(spec.key_stages, base)
    if num_chunks > 0:
        cute.arch.mbarrier_wait(k_full + first_stage, first_parity)
    issue_keys(spec, by_key, registers, keys, first_stage, "rounded before")
    warpgroup.wait_group(0)
    for step in cutlass.range(num_chunks, unroll=1):
        count = base + step
        stage, parity = ring_place(spec.stages, count)
        key_stage, _ = ring_place(spec.key_stages, count)
        following, following_parity = ring_place(spec.key_stages, count + 1)
        buffer, turn = count & 1, count >> 1 & 1
        valid = cutlass.min(work_tile.live_length - step * CHUNK, CHUNK)
        vector = vectors + buffer * shape.VECTOR_BYTES
        # What the next steps need is asked for before the products that keep this warp waiting are issued.
        cute.arch.mbarrier_wait(full + stage, parity)
        query_stage = stage
        if cutlass.const_expr(spec.has_norm):
            query_stage, query_parity = ring_place(spec.query_stages, count)
            cute.arch.mbarrier_wait(storage.q_full.data_ptr() + query_stage, query_parity)
        values = [ptx.load_matrices(value_lane + stage * spec.value_bytes + i * 16 * operands.ROW_BYTES, True) for i in range(4)]
        warpgroup.fence()
        for i in cutlass.range_constexpr(half_steps):
            operands.multiply_step(by_key, outputs, state_operand, queries[None, None, None, query_stage], i, i == 0)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(ready + buffer, turn)
        factors = operands.load_factors(vector + shape.STATE_KEY)

        # W and M; W itself is the accumulator of the product
        subtract_keys(spec, sums, values, factors)
        if valid < CHUNK:
            mask_sums(sums, valid, pair)
        for i in cutlass.range_constexpr(CHUNK // 4):
            operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
        warpgroup.fence()
        operands.multiply(by_key, sums, operand, m_operand[None, None, None, buffer], False)
        warpgroup.commit_group()
        for i in cutlass.range_constexpr(half_steps, 2 * half_steps):
            operands.multiply_step(by_key, outputs, state_operand, queries[None, None, None, query_stage], i, False)
        warpgroup.commit_group()
        last = ptx.load_one(vector + shape.LAST_DECAY - pair * 8)
        if cutlass.const_expr(spec.paired):
            if valid < CHUNK:
                # The block whose turn it was has done this for its own tile alone.
                zero_keys(spec, storage.k.data_ptr().toint() + key_stage * spec.key_bytes, valid, warp * 32 + lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                operands.sync_warpgroup(shape.NamedBarrier.STATE)
        factors = operands.load_factors(vector + shape.KEY_TO_LAST)
        for i in cutlass.range_constexpr(spec.dim // 2):
            state[i] = state[i] * last
        warpgroup.wait_group(1)

        add_values(spec, by_token, registers, tokens, key_stage, factors)

        # O
        factors = operands.load_factors(vector + shape.STATE_QUERY)
        for i in cutlass.range_constexpr(CHUNK // 4):
            operand_words[i] = ptx.pack(spec.dtype, sums[2 * i], sums[2 * i + 1])
        warpgroup.wait_group(1)
        scale_columns(outputs, factors)
        warpgroup.fence()
        operands.multiply(by_key, outputs, operand, p_operand[None, None, None, buffer], False)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.k_empty.data_ptr() + key_stage)
            if cutlass.const_expr(spec.has_norm):
                cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + query_stage)
        if step + 1 < num_chunks:
            cute.arch.mbarrier_wait(k_full + following, following_parity)
            issue_keys(spec, by_key, registers, keys, following)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        put_outputs(spec, outputs, value_lane + stage * spec.value_bytes)
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.stored.data_ptr() + stage)
            arrive_released(spec, tile_released, buffer)
        warpgroup.wait_group(0)
        if cutlass.const_expr(spec.has_checkpoints):
            if (step + 1) * CHUNK <= work_tile.live_length:
                # A segment knows the tokens before it: the address of its sequence's offset, kept from where the segment was
                # looked up, would be two registers too many.
                is_whole = cutlass.const_expr(segment is None)
                before = work_tile.begin - Int32(params.cu_seqlens[work_tile.sequence]) if is_whole else segment.before
                done = before + (step + 1) * CHUNK
                row0 = work_tile.piece * spec.columns + (warp * 16 + at.row)
                store_checkpoints(spec, params, state, work_tile.sequence, work_tile.head, done, row0, pair)


def issue_keys(spec: Any, by_key: Any, registers: Any, keys: Any, stage: Any, order: str = "by steps") -> None:
    """Issue U. order: "by steps" rounds the state one k step ahead of the products, which are one group; "in groups" does so with
    a group for each step; "rounded before" rounds all of the state first."""
    state, sums, _, operand, words, _, _, _, _ = registers
    if order == "rounded before":
        for i in range(spec.dim // 4):
            words[i] = ptx.pack(spec.dtype, state[2 * i], state[2 * i + 1])
        warpgroup.fence()
    for i in range(spec.dim // 16):
        if order != "rounded before":
            for j in range(4):
                words[4 * i + j] = ptx.pack(spec.dtype, state[8 * i + 2 * j], state[8 * i + 2 * j + 1])
            warpgroup.fence()
        operands.multiply_step(by_key, sums, operand, keys[None, None, None, stage], i, i == 0)
        if order == "in groups":
            warpgroup.commit_group()
    if order != "in groups":
        warpgroup.commit_group()


def add_values(spec: Any, by_token: Any, registers: Any, tokens: Any, stage: Any, factors: Any) -> None:
    """S^T += (Y^T factors) K, a k step at a time."""
    state, sums, _, _, _, _, _, decayed, words = registers
    for i in range(CHUNK // 16):
        for m in range(2):
            n = 2 * i + m
            for side in range(2):
                index = 4 * n + 2 * side
                words[2 * n + side] = ptx.pack(spec.dtype, sums[index] * factors[n][0], sums[index + 1] * factors[n][1])
        warpgroup.fence()
        operands.multiply_step(by_token, state, decayed, tokens[None, None, None, stage], i, False)
    warpgroup.commit_group()


def subtract_keys(spec: Any, sums: Any, values: Any, factors: Any) -> None:
    """Compute W^T = V^T - factors U^T in U's registers. values: V as loaded, 16 tokens an entry."""
    for i in range(CHUNK // 16):
        for m in range(2):
            n = 2 * i + m
            for side in range(2):
                value0, value1 = ptx.unpack(spec.dtype, values[i][2 * m + side])
                index = 4 * n + 2 * side
                sums[index] = value0 - factors[n][0] * sums[index]
                sums[index + 1] = value1 - factors[n][1] * sums[index + 1]


def scale_columns(sums: Any, factors: Any) -> None:
    for n in range(CHUNK // 8):
        for i in range(4):
            sums[4 * n + i] = sums[4 * n + i] * factors[n][i % 2]


@cute.jit
def put_outputs(spec: ChunkSpec, outputs: cute.Tensor, value_lane: Int32):
    """Store O, transposed on its way, where the V that this warp has read was."""
    for i in cutlass.range_constexpr(CHUNK // 16):
        words = [ptx.pack(spec.dtype, outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]) for j in range(4)]
        ptx.store_matrices(value_lane + i * 16 * operands.ROW_BYTES, words, True)
    cute.arch.sync_warp()


def arrive_released(spec: Any, tile_released: Any, buffer: Any) -> None:
    """Arrives at the block that fills the buffer."""
    if spec.paired:
        ptx.arrive_in_cluster(ptx.in_block(tile_released.toint() + buffer * 8, buffer))
    else:
        cute.arch.mbarrier_arrive(tile_released + buffer)


@cute.jit
def mask_sums(sums: cute.Tensor, valid: Int32, pair: Int32):
    """Zero the columns from `valid` on. They come from rows of the next sequence and may hold anything."""
    for n in cutlass.range_constexpr(CHUNK // 8):
        for odd in cutlass.range_constexpr(2):
            if 8 * n + 2 * pair + odd >= valid:
                for side in cutlass.range_constexpr(2):
                    sums[4 * n + 2 * side + odd] = Float32(0.0)


def value_address(tile: Any, warp: Any, lane: Any) -> Any:
    """Return the address that a lane names when its warp's 16 columns of V or O are moved as matrices: row l % 8 of matrix l //
    8. Matrices alternate between the warp's two halves of 8 columns."""
    return operands.address(tile, lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2)
