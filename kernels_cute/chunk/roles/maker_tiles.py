"""Tiles that a set of warpgroups of a maker block makes of M and P: the scaled M, Z and P M. The formulas: four_sm/kernel.py."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.chunk import operands
from kernels_cute.chunk.operands import accumulators, multiply, register_operand, smem_operand_b, tiled_mma
from kernels_cute.chunk.roles import tile_blocks as blocks
from kernels_cute.chunk.roles.tile_blocks import Lane
from kernels_cute.chunk.shape import CHUNK, TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx


def store_scaled(spec: Any, at: Any, plain: Any, m_tile: Any, u: Any, values: Any, to_last: Any) -> None:
    """Store block u of M as it is, and scaled, in parts: the second part is what rounding took from the first."""
    blocks.store_block(plain, at, u, blocks.packed(spec.dtype, values))
    scaled = [values[i] * to_last[i // 2 % 2] for i in range(8)]
    words = blocks.packed(spec.dtype, scaled)
    blocks.store_block(m_tile, at, u, words)
    if spec.parts == 2:
        rests = []
        for i in range(4):
            low, high = ptx.unpack(spec.dtype, words[i])
            rests.append(ptx.pack(spec.dtype, scaled[2 * i] - low, scaled[2 * i + 1] - high))
        blocks.store_block(m_tile + TILE_BYTES, at, u, rests)


@cute.jit
def fold_tiles(
    spec: ChunkSpec, storage: Any, at: Lane, p_words: cute.Tensor, stage: Int32, group: Int32, sets: cutlass.Constexpr,
    parity: Int32,
):  # fmt: skip
    """Compute Z = (M exp(c_last - c) f beta)^T K and P M, the tiles that the state is multiplied with, from M of the inverse
    warpgroup.

    sets: number of them in the block.
    """
    pieces, warp, lane = spec.dim // 64, at.warp, at.lane
    mma = tiled_mma(spec.dtype, 64, True)
    keys = smem_operand_b(mma, storage.k, operands.by_columns(spec.dtype, CHUNK, 64, pieces * spec.key_stages))
    plain = smem_operand_b(mma, storage.plain, operands.by_columns(spec.dtype, CHUNK, CHUNK, sets))
    left, words = register_operand(spec.dtype, mma, CHUNK * spec.parts)
    p_left, p_left_words = register_operand(spec.dtype, mma, CHUNK)
    sums = accumulators(mma, 64)
    for x in cutlass.range_constexpr(4):
        for i in cutlass.range_constexpr(4):
            p_left_words[4 * x + i] = cutlass.Int32(0)
            if warp == x:
                p_left_words[4 * x + i] = p_words[12 + i]
            if cutlass.const_expr(x < 3):
                if warp > x:
                    p_left_words[4 * x + i] = p_words[4 * x + i]
    cute.arch.mbarrier_wait(storage.m_full.data_ptr() + group, parity)
    warpgroup.fence()
    multiply(mma, sums, p_left, plain[None, None, None, group], True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    m_base = storage.m.data_ptr().toint() + group * (spec.parts * TILE_BYTES)
    m_lane = operands.address(m_base, lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2)
    for part in cutlass.range_constexpr(spec.parts):
        for x in cutlass.range_constexpr(4):
            loaded = ptx.load_matrices(m_lane + (part * TILE_BYTES + x * 16 * operands.ROW_BYTES), True)
            blocks.set_words(words, 4 * part + x, loaded)
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.m_free.data_ptr() + group)
    cute.arch.mbarrier_wait(storage.tile_released.data_ptr() + group, parity ^ 1)
    store_tile_rows(spec, at, storage.p.data_ptr().toint() + group * TILE_BYTES, sums)
    for piece in cutlass.range_constexpr(pieces):
        warpgroup.fence()
        for part in cutlass.range_constexpr(spec.parts):
            for step in cutlass.range_constexpr(4):
                mma.set(warpgroup.Field.ACCUMULATE, step + part > 0)
                right = keys[None, None, step, stage * pieces + piece]
                cute.gemm(mma, sums, left[None, None, 4 * part + step], right, sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        store_tile_rows(spec, at, storage.z.data_ptr().toint() + group * spec.key_bytes + piece * TILE_BYTES, sums)


def store_tile_rows(spec: Any, at: Any, tile: Any, sums: Any) -> None:
    """The warp's 16 rows of a tile, rounded."""
    for x in range(4):
        blocks.store_block(tile, at, x, blocks.packed(spec.dtype, [sums[8 * x + i] for i in range(8)]))
