"""Steps that the math warps of both logits kernels take: products on the tensor cores and sums over heads."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from kernels_cute.mqa_logits.constants import KEY_ROWS


def mma_op(dtype, columns: int):
    """The wgmma of KEY_ROWS keys and `columns` columns, both from shared memory."""
    k_major = OperandMajorMode.K
    source = warpgroup.OperandSource.SMEM
    if dtype is cutlass.BFloat16:
        return warpgroup.MmaF16BF16Op(dtype, Float32, (KEY_ROWS, columns, 16), source, k_major, k_major)
    return warpgroup.MmaF8Op(dtype, dtype, Float32, (KEY_ROWS, columns, 32), source, k_major, k_major)


@cute.jit
def advance(stage, parity, stages: cutlass.Constexpr):
    """The next place of a ring."""
    stage = stage + 1
    if stage == stages:
        stage = Int32(0)
        parity = parity ^ 1
    return stage, parity


def query_partition(tiles, tma, sQueries, kv_head):
    """(to, from): the boxes of a key head's queries in shared memory and in the tensor map."""
    query_tensor, box = tma.query_tensor, tiles.query_box()
    others = len(box) - 4  # modes after (head in run, query, pair, head_dim)
    if tiles.num_kv_heads > 1:
        query_tensor = cute.domain_offset((0, 0, tiles.order.position(kv_head), 0, *[0] * others), query_tensor)
    gQueries = cute.local_tile(query_tensor, box, (0, None, 0, 0, *[None] * others))
    modes = len(box)
    return cpasync.tma_partition(
        tma.query_atom, 0, cute.make_layout(1), cute.group_modes(sQueries, 0, modes), cute.group_modes(gQueries, 0, modes)
    )


def product_tensor(tiles, mma):
    """Accumulators of one round: one product for each of its key heads."""
    shape = mma.get_slice(0).partition_shape_C((KEY_ROWS, tiles.product_columns))
    if tiles.kv_heads_per_round > 1:
        shape = (*shape, tiles.kv_heads_per_round)
    return cute.make_rmem_tensor(shape, Float32)


@cute.jit
def issue_round(
    tiles, mma, rProducts, keys, queries, key_prefix: cutlass.Constexpr, key_stage, query_stage, first_kv: cutlass.Constexpr,
    commit_steps: cutlass.Constexpr,
):  # fmt: skip
    """Queues the products of one round's key heads; each tensor step is a group of its own, or all of them are one.

    keys, queries: operands; key_prefix: coordinates of the keys before the stage.
    """
    warpgroup.fence()
    for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
        rProduct = rProducts
        if cutlass.const_expr(tiles.kv_heads_per_round > 1):
            rProduct = rProducts[None, None, None, nth]
        for step in cutlass.range_constexpr(tiles.k_steps):
            mma.set(warpgroup.Field.ACCUMULATE, step != 0)
            cute.gemm(
                mma,
                rProduct,
                keys[(None, None, step, *key_prefix, key_stage * tiles.kv_heads_per_round + nth)],
                queries[None, None, step, query_stage * tiles.num_kv_heads + first_kv + nth],
                rProduct,
            )
            last = nth == tiles.kv_heads_per_round - 1 and step == tiles.k_steps - 1
            if cutlass.const_expr(commit_steps or last):
                warpgroup.commit_group()


@cute.jit
def head_sums(tiles, rProducts, rWeights, group: cutlass.Constexpr, first_kv: cutlass.Constexpr, nth: cutlass.Constexpr):
    """Sums over this lane's heads of one query and one key head (the `nth` of a round), for the lane's two keys. Even and odd
    heads run as chains of their own."""
    rParts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)
    rParts.fill(0.0)
    for pair in cutlass.range_constexpr(tiles.order.pairs):
        place = group * tiles.order.pairs + pair + nth * (tiles.product_columns // 8)
        heads = [tiles.order.lane_head(first_kv + nth, odd, pair) for odd in range(2)]
        add_pair(tiles, rParts, rProducts, rWeights, place, group, heads)
    return rParts[0, 0] + rParts[0, 1], rParts[1, 0] + rParts[1, 1]


@cute.jit
def add_pair(tiles, rParts, rProducts, rWeights, place: cutlass.Constexpr, group: cutlass.Constexpr, heads: cutlass.Constexpr):
    """Adds two heads of a query, the place-th eight columns of the products, to its sums; None is no head."""
    for side in cutlass.range_constexpr(2):
        for odd in cutlass.range_constexpr(2):
            if cutlass.const_expr(heads[odd] is not None):
                value = rProducts[odd + 2 * side + 4 * place]
                if cutlass.const_expr(tiles.relu_as_add_abs):
                    value = value + cute.math.absf(value)
                elif cutlass.const_expr(tiles.relu):
                    value = cute.arch.fmax(value, Float32(0.0))
                if cutlass.const_expr(tiles.has_weights):
                    weight = rWeights[group * tiles.lane_heads + heads[odd]]
                    rParts[side, odd] = rParts[side, odd] + value * weight
                else:
                    rParts[side, odd] = rParts[side, odd] + value


@cute.jit
def add_round(tiles, rTotals, rProducts, rWeights, rFactors, group: cutlass.Constexpr, first_kv: cutlass.Constexpr):
    """Adds the sums of a round's key heads, each times its scale, to the totals of a group's query."""
    for nth in cutlass.range_constexpr(tiles.kv_heads_per_round):
        sums = head_sums(tiles, rProducts, rWeights, group, first_kv, nth)
        rTotals[2 * group] = rTotals[2 * group] + sums[0] * rFactors[2 * nth]
        rTotals[2 * group + 1] = rTotals[2 * group + 1] + sums[1] * rFactors[2 * nth + 1]
    return rTotals[2 * group], rTotals[2 * group + 1]


@cute.jit
def fill_with_minus_infinity(row, element_type: cutlass.Constexpr, first, end, step):
    """-inf in every step-th column of a row from first to end."""
    for column in cutlass.range(first, end, step, unroll=4):
        cute.make_tensor(row + column, cute.make_layout(1))[0] = element_type(-Float32.inf)
