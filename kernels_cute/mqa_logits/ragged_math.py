"""A math warpgroup of the ragged logits kernel, with one set of accumulators or two.

With two sets, each for half of the columns, a warpgroup sums the first half over heads while the tensor cores are at the second
one, so that only the second half's sums, half an epilogue, must fit into the other warpgroup's turn. With one set a whole
epilogue must, and from 32 heads down it does not. The price is N = 128 a product in place of 256: keys are read from shared
memory twice.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.mqa_logits.barriers import arrive, arrive_named, wait, wait_named
from kernels_cute.mqa_logits.constants import KEY_ROWS
from kernels_cute.mqa_logits.products import add_pair, add_round, advance, head_sums, issue_round, mma_op, product_tensor
from kernels_cute.mqa_logits.ragged_stores import begin_tile, finish_tile, put, target_of


@cute.jit
def math_warpgroup(tiles, storage, params, mma, half, warp):
    """half: number of the math warpgroup; warp: within it."""
    lane, barriers = cute.arch.lane_idx(), tiles.barriers
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))
    sWeights = storage.weights.get_tensor(cute.make_layout(tiles.slots * tiles.num_heads))
    operands = operands_of(tiles, storage, mma)
    rWeights = cute.make_rmem_tensor(cute.make_layout(tiles.groups * tiles.num_heads), Float32)  # of this lane's queries
    scale = params.scale * 0.5 if tiles.relu_as_add_abs else params.scale
    key_lane = 16 * warp + lane // 4  # this lane's first key row in a tile; its second is 8 further
    query_lane = half * tiles.queries_per_warpgroup + lane % 4
    if cutlass.const_expr(tiles.accumulator_sets == 2):
        shape = mma.get_slice(0).partition_shape_C((KEY_ROWS, tiles.columns // 2))
        rFirst, rSecond = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        rParts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)  # sums of a query
        registers = (rFirst, rSecond, rWeights, rParts)
    else:
        rTotals = cute.make_rmem_tensor(cute.make_layout(2 * tiles.groups), Float32)  # over the key heads of a tile
        registers = (product_tensor(tiles, mma), rWeights, rTotals)
    if half == 1:
        arrive_named(barriers.turn, 0)

    stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    wait(barriers.queries_full, storage, stage, parity, by="math")
    row0 = sItems[4 * stage]
    while row0 >= 0:
        tile_first, tile_end = sItems[4 * stage + 1], sItems[4 * stage + 2]
        slot = stage * tiles.queries + query_lane
        target = target_of(tiles, params.out, row0, stage, half, warp)
        if cutlass.const_expr(tiles.has_weights):
            for group in cutlass.range_constexpr(tiles.groups):
                for head in cutlass.range_constexpr(tiles.num_heads):
                    rWeights[group * tiles.num_heads + head] = sWeights[(slot + 4 * group) * tiles.num_heads + head]
        for tile in cutlass.range(tile_first, tile_end, unroll=1):
            key = tile * KEY_ROWS + key_lane
            scales = (params.k_scale, key, scale)
            if cutlass.const_expr(tiles.accumulator_sets == 2):
                key_stage, key_parity = tile_with_two_sets(
                    tiles, storage, operands, registers, scales, target, tile, key_stage, key_parity
                )
            else:
                key_stage, key_parity = tile_with_one_set(
                    tiles, storage, operands, registers, scales, target, tile, key_stage, key_parity
                )
        cute.arch.sync_warp()  # the other lanes' reads of ranges and weights come before the release
        if lane == 0:
            arrive(barriers.queries_free, storage, stage, by="math")
        stage, parity = advance(stage, parity, tiles.query_stages)
        wait(barriers.queries_full, storage, stage, parity, by="math")
        row0 = sItems[4 * stage]
    if half == 0:
        wait_named(barriers.turn, 0)


def operands_of(tiles, storage, mma):
    """(keys, queries) as wgmma reads them; with two sets the queries have a mode for the half of the columns."""
    query_smem, key_smem = tiles.query_operand_smem(), tiles.key_smem()
    sQueries = storage.queries.get_tensor(query_smem.outer, swizzle=query_smem.inner)
    sKeys = storage.keys.get_tensor(key_smem.outer, swizzle=key_smem.inner)
    if tiles.accumulator_sets == 2:
        sQueries = cute.local_tile(sQueries, (tiles.columns // 2, tiles.head_dim), (None, 0, None))
    thread_mma = mma.get_slice(0)
    return mma.make_fragment_A(thread_mma.partition_A(sKeys)), mma.make_fragment_B(thread_mma.partition_B(sQueries))


@cute.jit
def key_factors(tiles, scales, first_kv: cutlass.Constexpr):
    """Scales of this lane's two keys for the key heads of a round. Asked for before the products, they cost no wait."""
    k_scale, key, _ = scales
    rFactors = cute.make_rmem_tensor(cute.make_layout(2 * tiles.kv_heads_per_round), Float32)
    rFactors.fill(1.0)
    if cutlass.const_expr(tiles.has_k_scale):
        num_keys = cute.size(k_scale, mode=[0])
        gScales = cute.make_tensor(k_scale.iterator, cute.make_layout(num_keys * tiles.num_kv_heads))
        for side in cutlass.range_constexpr(2):
            if key + 8 * side < num_keys:
                for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
                    row = (key + 8 * side) * tiles.num_kv_heads
                    rFactors[2 * nth + side] = gScales[row + first_kv + nth]
    return rFactors


@cute.jit
def tile_with_one_set(tiles, storage, operands, registers, scales, target, tile, key_stage, key_parity):
    """The scores of one key tile; the next place of the ring of keys."""
    keys, queries = operands
    rProducts, rWeights, rTotals = registers
    barriers, half, lane = tiles.barriers, target.half, cute.arch.lane_idx()
    mma = cute.make_tiled_mma(mma_op(tiles.dtype, tiles.product_columns))  # of its own: `set` makes it a value of this place
    if cutlass.const_expr(tiles.num_kv_heads > 1):
        rTotals.fill(0.0)
    for kv_round in cutlass.range_constexpr(tiles.rounds):
        first_kv = kv_round * tiles.kv_heads_per_round
        is_last = kv_round == tiles.rounds - 1
        rFactors = key_factors(tiles, scales, first_kv)
        wait(barriers.keys_full, storage, key_stage, key_parity, by="math")
        wait_named(barriers.turn, half)
        issue_round(tiles, mma, rProducts, keys, queries, (), key_stage, target.stage * 2 + half, first_kv, True)
        # While the last products are still on their way the other warpgroup may queue its own after them.
        warpgroup.wait_group(tiles.steps_in_flight_at_turn)
        arrive_named(barriers.turn, 1 - half)
        warpgroup.wait_group(0)
        if lane == 0:
            arrive(barriers.keys_free, storage, key_stage, by="math")
        key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
        for one in cutlass.range_constexpr(2 * tiles.kv_heads_per_round):
            rFactors[one] = rFactors[one] * scales[2]
        if cutlass.const_expr(is_last):
            begin_tile(tiles, target)
        for group in cutlass.range_constexpr(tiles.groups):
            low, high = Float32(0.0), Float32(0.0)
            if cutlass.const_expr(tiles.num_kv_heads == 1):
                sums = head_sums(tiles, rProducts, rWeights, group, 0, 0)
                low, high = sums[0] * rFactors[0], sums[1] * rFactors[1]
            else:
                low, high = add_round(tiles, rTotals, rProducts, rWeights, rFactors, group, first_kv)
            if cutlass.const_expr(is_last):
                put(tiles, storage, target, tile, group, low, high)
        if cutlass.const_expr(is_last):
            finish_tile(tiles, storage, target, tile)
    return key_stage, key_parity


@cute.jit
def tile_with_two_sets(tiles, storage, operands, registers, scales, target, tile, key_stage, key_parity):
    """The scores of one key tile; the next place of the ring of keys."""
    rFirst, rSecond, rWeights, rParts = registers
    barriers, half, lane = tiles.barriers, target.half, cute.arch.lane_idx()
    rFactors = key_factors(tiles, scales, 0)
    wait(barriers.keys_full, storage, key_stage, key_parity, by="math")
    wait_named(barriers.turn, half)
    warpgroup.fence()
    issue_half(tiles, rFirst, operands, 0, key_stage, target.stage * 2 + half)
    issue_half(tiles, rSecond, operands, 1, key_stage, target.stage * 2 + half)
    # While the second half is still on its way the other warpgroup may queue its own after it.
    if cutlass.const_expr(tiles.pass_turn_at_issue):
        arrive_named(barriers.turn, 1 - half)
    warpgroup.wait_group(1)
    if cutlass.const_expr(not tiles.pass_turn_at_issue):
        arrive_named(barriers.turn, 1 - half)
    begin_tile(tiles, target)
    half_sums(tiles, storage, (rFirst, rWeights, rParts), 0, rFactors, scales[2], target, tile)
    warpgroup.wait_group(0)
    if lane == 0:
        arrive(barriers.keys_free, storage, key_stage, by="math")
    key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
    half_sums(tiles, storage, (rSecond, rWeights, rParts), 1, rFactors, scales[2], target, tile)
    finish_tile(tiles, storage, target, tile)
    return key_stage, key_parity


@cute.jit
def issue_half(tiles, rProducts, operands, column_half: cutlass.Constexpr, key_stage, query_stage):
    """Queues the products of one half of the columns, as one group."""
    keys, queries = operands
    mma = cute.make_tiled_mma(mma_op(tiles.dtype, tiles.columns // 2))  # of its own: `set` makes it a value of this place
    for step in cutlass.range_constexpr(tiles.k_steps):
        mma.set(warpgroup.Field.ACCUMULATE, step != 0)
        cute.gemm(
            mma,
            rProducts,
            keys[None, None, step, key_stage],
            queries[None, None, step, column_half, query_stage],
            rProducts,
        )
    warpgroup.commit_group()


@cute.jit
def half_sums(tiles, storage, registers, column_half: cutlass.Constexpr, rFactors, scale, target, tile):
    """Sums a half of the columns, eight of them (two heads of four queries) at a time, and stores the queries that end in it.
    rParts: the sums of a query that the first half left unfinished."""
    rProducts, rWeights, rParts = registers
    blocks, pairs = tiles.columns // 16, tiles.num_heads // 2
    for block in cutlass.range_constexpr(blocks):
        group, pair = (column_half * blocks + block) // pairs, (column_half * blocks + block) % pairs
        if cutlass.const_expr(pair == 0):
            rParts.fill(0.0)
        add_pair(tiles, rParts, rProducts, rWeights, block, group, [2 * pair, 2 * pair + 1])
        if cutlass.const_expr(pair == pairs - 1):
            low = (rParts[0, 0] + rParts[0, 1]) * (rFactors[0] * scale)
            high = (rParts[1, 0] + rParts[1, 1]) * (rFactors[1] * scale)
            put(tiles, storage, target, tile, group, low, high)
