"""Steps that the math warps of both logits kernels take: products on the tensor cores and sums over heads."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from kernels_cute.common.ptx import run
from kernels_cute.mqa_logits.barriers import TURN, arrive, arrive_named, wait, wait_named
from kernels_cute.mqa_logits.orders import KEY_ROWS
from kernels_cute.mqa_logits.tiles import LogitsTiles


@cute.jit
def advance(stage: Int32, parity: Int32, stages: cutlass.Constexpr):
    """Return the stage and parity that come next in a ring."""
    stage = stage + 1
    if stage == stages:
        stage = Int32(0)
        parity = parity ^ 1
    return stage, parity


@cute.jit
def running_sum(value: Int32):
    """Return the sum over a warp's lanes up to and including this one."""
    lane, total = cute.arch.lane_idx(), value
    for power in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << power, mask_and_clamp=0)
        if lane >= 1 << power:
            total = total + other
    return total


def query_partition(tiles, tma, sQueries, kv_head):
    """(to, from): the boxes of a key head's queries in shared memory and in the tensor map."""
    query_tensor, modes = tma.query_tensor, len(tiles.query_box)  # (head in run, query, pair, head_dim) and others
    others = modes - 4
    if tiles.num_kv_heads > 1:
        query_tensor = cute.domain_offset((0, 0, tiles.order.position(kv_head), 0, *[0] * others), query_tensor)
    gQueries = cute.local_tile(query_tensor, tiles.query_box, (0, None, 0, 0, *[None] * others))
    sQueries, gQueries = cute.group_modes(sQueries, 0, modes), cute.group_modes(gQueries, 0, modes)
    return cpasync.tma_partition(tma.query_atom, 0, cute.make_layout(1), sQueries, gQueries)


def tiled_mma(tiles):
    """Make a wgmma that takes KEY_ROWS keys and the columns of one product. Each place that uses one makes it anew, because `set`
    turns it into a value of that place."""
    columns, k_major, source = tiles.product_columns // tiles.accumulator_sets, OperandMajorMode.K, warpgroup.OperandSource.SMEM
    if tiles.dtype is cutlass.BFloat16:
        op = warpgroup.MmaF16BF16Op(tiles.dtype, Float32, (KEY_ROWS, columns, 16), source, k_major, k_major)
    else:
        op = warpgroup.MmaF8Op(tiles.dtype, tiles.dtype, Float32, (KEY_ROWS, columns, 32), source, k_major, k_major)
    return cute.make_tiled_mma(op)


def operands_of(tiles, storage, mma):
    """Return (keys, queries) as wgmma reads them. The mode before the stage is, of paged keys, the math warpgroup; of queries
    with two sets of accumulators, the half of the columns."""
    query_smem, key_smem, thread_mma = tiles.query_operand_smem(), tiles.key_operand_smem(), mma.get_slice(0)
    sQueries = storage.queries.get_tensor(query_smem.outer, swizzle=query_smem.inner)
    sKeys = storage.keys.get_tensor(key_smem.outer, swizzle=key_smem.inner)
    if tiles.query_sets == 1:
        sKeys = cute.local_tile(sKeys, (KEY_ROWS, tiles.head_dim), (None, 0, None))
    if tiles.accumulator_sets == 2:
        sQueries = cute.local_tile(sQueries, (tiles.columns // 2, tiles.head_dim), (None, 0, None))
    return thread_mma.make_fragment_A(thread_mma.partition_A(sKeys)), thread_mma.make_fragment_B(thread_mma.partition_B(sQueries))


def product_tensor(tiles, mma):
    """Accumulators of one round: one product for each of its key heads."""
    shape = mma.get_slice(0).partition_shape_C((KEY_ROWS, tiles.product_columns // tiles.accumulator_sets))
    if tiles.kv_heads_per_round > 1:
        shape = (*shape, tiles.kv_heads_per_round)
    return cute.make_rmem_tensor(shape, Float32)


@cute.jit
def walk_published(tiles: LogitsTiles, storage: Any, half: Int32, take: cutlass.Constexpr):
    """Call key_ring = take((stage, query row, first, end or count), key_ring) for each item that is published, in a math warp.

    half: number of the math warpgroup. With turns, warpgroup 1 hands out the first and warpgroup 0 takes the last.
    """
    sItems = storage.items.get_tensor(cute.make_layout(4 * tiles.query_stages))
    if cutlass.const_expr(tiles.takes_turns):
        if half == 1:
            arrive_named(TURN, 0)
    stage, parity, key_ring = Int32(0), Int32(0), (Int32(0), Int32(0))
    wait(tiles, storage, "queries_full", stage, parity, by="math")
    row0 = sItems[4 * stage]
    while row0 >= 0:
        key_ring = take((stage, row0, sItems[4 * stage + 1], sItems[4 * stage + 2]), key_ring)
        cute.arch.sync_warp()  # the other lanes' reads of ranges, lengths and weights come before the release
        if cute.arch.lane_idx() == 0:
            arrive(tiles, storage, "queries_free", stage, by="math")
        stage, parity = advance(stage, parity, tiles.query_stages)
        wait(tiles, storage, "queries_full", stage, parity, by="math")
        row0 = sItems[4 * stage]
    if cutlass.const_expr(tiles.takes_turns):
        if half == 0:
            wait_named(TURN, 0)


@cute.jit
def release_keys(tiles: LogitsTiles, storage: Any, key_ring: Any):
    """Free a stage of keys that this warp has read. Return the stage and parity that come next."""
    key_stage, key_parity = key_ring
    if cute.arch.lane_idx() == 0:
        arrive(tiles, storage, "keys_free", key_stage, by="math")
    key_stage, key_parity = advance(key_stage, key_parity, tiles.key_stages)
    return key_stage, key_parity


@cute.jit
def issue_products(
    tiles: LogitsTiles, rProducts: cute.Tensor, operands: Any, prefixes: cutlass.Constexpr, stages: Any,
    first_kv: cutlass.Constexpr, commit_steps: cutlass.Constexpr,
):  # fmt: skip
    """Issue the products of one round's key heads. commit_steps: every k step is a group of its own, else all of them are one.

    prefixes, stages: of the keys and of the queries, the coordinates of the operand before the stage, and the stage.
    """
    keys, queries = operands
    mma = tiled_mma(tiles)
    for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
        rProduct = rProducts
        if cutlass.const_expr(tiles.kv_heads_per_round > 1):
            rProduct = rProducts[None, None, None, nth]
        key_place = (*prefixes[0], stages[0] * tiles.kv_heads_per_round + nth)
        query_place = (*prefixes[1], stages[1] * tiles.num_kv_heads + first_kv + nth)
        for step in cutlass.range_constexpr(tiles.k_steps):
            mma.set(warpgroup.Field.ACCUMULATE, step != 0)
            cute.gemm(mma, rProduct, keys[(None, None, step, *key_place)], queries[(None, None, step, *query_place)], rProduct)
            last = nth == tiles.kv_heads_per_round - 1 and step == tiles.k_steps - 1
            if cutlass.const_expr(commit_steps or last):
                warpgroup.commit_group()


@cute.jit
def head_sums(
    tiles: LogitsTiles, rProducts: cute.Tensor, rWeights: cute.Tensor, group: cutlass.Constexpr, first_kv: cutlass.Constexpr,
    nth: cutlass.Constexpr,
):  # fmt: skip
    """Sum over this lane's heads of one query and one key head (the `nth` of a round), for the lane's two keys. Even and odd
    heads are added in two separate chains."""
    rParts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)
    rParts.fill(0.0)
    for pair in cutlass.range_constexpr(tiles.order.pairs):
        column_block = group * tiles.order.pairs + pair + nth * (tiles.product_columns // 8)
        heads = [tiles.order.head(first_kv + nth, odd, pair) for odd in range(2)]
        add_pair(tiles, rParts, rProducts, rWeights, column_block, group, heads, pair == 0)
    return rParts[0, 0] + rParts[0, 1], rParts[1, 0] + rParts[1, 1]


@cute.jit
def add_pair(
    tiles: LogitsTiles, rParts: cute.Tensor, rProducts: cute.Tensor, rWeights: cute.Tensor, column_block: cutlass.Constexpr,
    group: cutlass.Constexpr, heads: cutlass.Constexpr, is_first: cutlass.Constexpr,
):  # fmt: skip
    """Add two heads of a query to its sums: eight columns of the products, number `column_block`. A head of None is left out.

    is_first: the sums are 0. A relu is never -0, so 0 + relu is the relu: the compiler keeps that addition where NaN stays NaN.
    """
    for side in cutlass.range_constexpr(2):
        for odd in cutlass.range_constexpr(2):
            if cutlass.const_expr(heads[odd] is not None):
                value = rProducts[odd + 2 * side + 4 * column_block]
                if cutlass.const_expr(tiles.relu_as_add_abs):
                    value = value + cute.math.absf(value)
                elif cutlass.const_expr(tiles.relu):
                    value = cute.arch.fmax(value, Float32(0.0), nan=True)  # NaN stays NaN, as with the other relu
                if cutlass.const_expr(tiles.has_weights):
                    weight = rWeights[group * tiles.lane_heads + heads[odd]]
                    rParts[side, odd] = rParts[side, odd] + value * weight
                elif cutlass.const_expr(is_first and tiles.relu):
                    rParts[side, odd] = value
                else:
                    rParts[side, odd] = rParts[side, odd] + value


@cute.jit
def add_round(
    tiles: LogitsTiles, rTotals: cute.Tensor, rProducts: cute.Tensor, rWeights: cute.Tensor, rFactors: cute.Tensor,
    group: cutlass.Constexpr, first_kv: cutlass.Constexpr,
):  # fmt: skip
    """Add the sums of a round's key heads, each times its scale, to the totals of a group's query."""
    for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
        sums = head_sums(tiles, rProducts, rWeights, group, first_kv, nth)
        rTotals[2 * group] = rTotals[2 * group] + sums[0] * rFactors[2 * nth]
        rTotals[2 * group + 1] = rTotals[2 * group + 1] + sums[1] * rFactors[2 * nth + 1]
    return rTotals[2 * group], rTotals[2 * group + 1]


# A store that the roles want exactly so.

_RANGE = """{
.reg .pred inside;
setp.ge.s32 inside, {$r2}, {$r3};
setp.lt.and.s32 inside, {$r2}, {$r4}, inside;
%s
}"""
_STORE = {
    cutlass.Float32: "@inside st.global.f32 [{$r0}], {$r1};",
    cutlass.BFloat16: ".reg .b16 short;\ncvt.rn.bf16.f32 short, {$r1};\n@inside st.global.b16 [{$r0}], short;",
}


def store_between(element_type: Any, address: Any, value: Any, key: Any, first: Any, end: Any) -> None:
    """address[0] = value where first <= key < end: a predicated store, where a branch a store would cost more than the sum."""
    run(_RANGE % _STORE[element_type], address, value, key, first, end)
