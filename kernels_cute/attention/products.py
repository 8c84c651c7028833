"""Products and softmax of a math warpgroup whose 64 rows, a row a (query, head), walk positions a step at a time.

    s = scale log2(e) q k^T, -inf where a query does not see the position      p = 2^(s - m)      o = sum p v / sum p

m is the running maximum of a row. The next step's scores are on the tensor cores before this step's p v, so that the softmax
runs under products. Rows lie in shared memory as pieces of 128 bytes, [piece][row][128 bytes], swizzled over 8 rows. That is the
layout of a K-major operand (queries, keys), and of one whose contraction runs along rows (values).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_cute.attention import ptx


def barrier_at(storage: Any, name: str, stage: Any = 0) -> Any:
    """Pointer to a barrier."""
    return getattr(storage, name).data_ptr() + stage


def by_rows(tiles: Any, rows: int, count: int) -> Any:
    """(rows, dim, count): an operand whose contraction runs along dim."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, tiles.dtype)
    return cute.tile_to_shape(atom, (rows, tiles.dim, count), order=(0, 1, 2))


def by_columns(tiles: Any, count: int) -> Any:
    """(dim, step, count): the bytes of `by_rows`, as an operand whose contraction runs along rows."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, tiles.dtype)
    return cute.tile_to_shape(atom, (tiles.dim, tiles.step, count), order=(1, 0, 2))


def score_mma(tiles: Any) -> Any:
    """64 queries x the keys of a step."""
    major, source = OperandMajorMode.K, warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(tiles.dtype, Float32, (64, tiles.step, 16), source, major, major))


def output_mma(tiles: Any) -> Any:
    """64 queries x dim, with p in registers."""
    source = warpgroup.OperandSource.RMEM
    kinds = (OperandMajorMode.K, OperandMajorMode.MN)
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(tiles.dtype, Float32, (64, tiles.dim, 16), source, *kinds))


def tensor_of(field: Any, layout: Any) -> Any:
    return field.get_tensor(layout.outer, swizzle=layout.inner)


def operands_of(tiles: Any, storage: Any, queries: Any) -> Any:
    """(queries, keys, values) as wgmma reads them. queries: (64 rows, dim, half) in shared memory."""
    thread, output_thread = score_mma(tiles).get_slice(0), output_mma(tiles).get_slice(0)
    keys = tensor_of(storage.keys, by_rows(tiles, tiles.step, tiles.key_stages))
    values = tensor_of(storage.values, by_columns(tiles, tiles.value_stages))
    return (
        thread.make_fragment_A(thread.partition_A(queries)), thread.make_fragment_B(thread.partition_B(keys)),
        output_thread.make_fragment_B(output_thread.partition_B(values)),
    )  # fmt: skip


def registers_of(tiles: Any) -> Any:
    """(scores, outputs, p, m, sum of p) of a thread; m and the sum are those of its two rows, 8 apart."""
    scores, outputs = score_mma(tiles), output_mma(tiles)
    return (
        cute.make_rmem_tensor(scores.partition_shape_C((64, tiles.step)), Float32),
        cute.make_rmem_tensor(outputs.partition_shape_C((64, tiles.dim)), Float32),
        cute.make_rmem_tensor(outputs.partition_shape_A((64, tiles.step)), tiles.dtype),
        cute.make_rmem_tensor(2, Float32),
        cute.make_rmem_tensor(2, Float32),
    )


@cute.jit
def clear(registers):
    """o = 0, without a position so far."""
    _, rOutputs, _, rMost, rSums = registers
    rOutputs.fill(0.0)
    rMost.fill(-float("inf"))
    rSums.fill(0.0)


@cute.jit
def issue_scores(tiles: cutlass.Constexpr, storage, operands, rScores, stage, parity):
    queries, keys, _ = operands
    cute.arch.mbarrier_wait(barrier_at(storage, "keys_full", stage), parity)
    if cutlass.const_expr(tiles.copied_by_threads):
        # What the copy warps' cp.async wrote, the barrier has made visible to this thread; the fence does so to wgmma.
        cute.arch.fence_proxy("async.shared", space="cta")
    warpgroup.fence()
    mma = score_mma(tiles)
    for step in cutlass.range_constexpr(tiles.dim // 16):
        mma.set(warpgroup.Field.ACCUMULATE, step != 0)
        cute.gemm(mma, rScores, queries[None, None, step], keys[None, None, step, stage], rScores)
    warpgroup.commit_group()


@cute.jit
def issue_outputs(tiles: cutlass.Constexpr, storage, operands, registers, stage, parity):
    values, rOutputs, rShares = operands[2], registers[1], registers[2]
    cute.arch.mbarrier_wait(barrier_at(storage, "values_full", stage), parity)
    if cutlass.const_expr(tiles.copied_by_threads):
        cute.arch.fence_proxy("async.shared", space="cta")
    warpgroup.fence()
    mma = output_mma(tiles)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(tiles.step // 16):
        cute.gemm(mma, rOutputs, rShares[None, None, step], values[None, None, step, stage], rOutputs)
    warpgroup.commit_group()


@cute.jit
def release(storage, name: cutlass.Constexpr, stage, lane):
    """A warp is done with a stage."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier_at(storage, name, stage))


@cute.jit
def soften(tiles: cutlass.Constexpr, registers):
    """Replace the masked scores by p, update m and the sums, and return the factors of o for the new m."""
    rScores, _, _, rMost, rSums = registers
    factors = []
    for side in cutlass.range_constexpr(2):
        most = rMost[side]
        for n in cutlass.range_constexpr(tiles.step // 8):
            for e in cutlass.range_constexpr(2):
                most = cute.arch.fmax(most, rScores[4 * n + 2 * side + e])
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 1))
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 2))
        base = cutlass.select_(most == -float("inf"), Float32(0.0), most)  # a row without positions so far: -inf - 0
        # 1 where there was no position before: o and the sum are 0.
        before = cutlass.select_(rMost[side] == -float("inf"), base, rMost[side])
        rescale = ptx.exp2(before - base)
        rMost[side] = most
        total = rSums[side] * rescale
        for n in cutlass.range_constexpr(tiles.step // 8):
            for e in cutlass.range_constexpr(2):
                i = 4 * n + 2 * side + e
                rScores[i] = ptx.exp2(rScores[i] - base)
                total = total + rScores[i]
        rSums[side] = total
        factors.append(rescale)
    return factors[0], factors[1]


@cute.jit
def scale_outputs(tiles: cutlass.Constexpr, rOutputs, factors):
    """Scale o for a new m. After the first steps a row's maximum seldom changes."""
    if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
        for n in cutlass.range_constexpr(tiles.dim // 8):
            for side in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    rOutputs[4 * n + 2 * side + e] = rOutputs[4 * n + 2 * side + e] * factors[side]


@cute.jit
def end_step(tiles: cutlass.Constexpr, storage, registers, factors, value_ring, lane, spare):
    """Wait for P V of the step before, scale o for the new m, and hand over p. Return the stage and parity of the next values.

    spare: an address of shared memory. Nothing is stored there, since sums are not negative; but what the sums are made of so
    stays before the wait, under P V.
    """
    _, rOutputs, _, _, rSums = registers
    ptx.store_if_negative(spare, rSums[0] + rSums[1])
    warpgroup.wait_group(0)
    release(storage, "values_free", value_ring[0], lane)
    value_stage, value_parity = advance(value_ring[0], value_ring[1], tiles.value_stages)
    scale_outputs(tiles, rOutputs, factors)
    put_shares(tiles, registers)
    return value_stage, value_parity


@cute.jit
def put_shares(tiles: cutlass.Constexpr, registers):
    """p, rounded, as the next product's operand."""
    rScores, _, rShares, _, _ = registers
    words = cute.recast_tensor(rShares, Int32)
    for i in cutlass.range_constexpr(tiles.step // 4):
        words[i] = ptx.pack(tiles.dtype, rScores[2 * i], rScores[2 * i + 1])


@cute.jit
def advance(stage, parity, stages: cutlass.Constexpr):
    """Return the stage and parity that come next in a ring."""
    stage = stage + 1
    if stage == stages:
        stage = Int32(0)
        parity = parity ^ 1
    return stage, parity
