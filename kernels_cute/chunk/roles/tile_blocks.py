"""16 x 16 blocks of a 64 x 64 tile, of which a warp has the four of 16 rows: what the inverse and the score role share."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels_cute.chunk import layouts
from kernels_cute.chunk.operands import select
from kernels_cute.chunk.shape import CHUNK, CUM, TILE_BYTES, WARPGROUP
from kernels_cute.common import ptx


def row_decays(rows: Any, row_cum: Any, warp: Any) -> tuple[Any, Any]:
    """Left of the diagonal block exp(c_i - c_j) is a product of two decays, both at most 1: from the row down to the last
    token before the block, and from there to the column. Returns c there and the decays of this lane's two rows."""
    reference = ptx.load_one(rows + CUM * CHUNK * 4 + cutlass.max(warp * 16 - 1, 0) * 4)
    return reference, (ptx.exp2(row_cum[0] - reference), ptx.exp2(row_cum[1] - reference))


def block_decay(row_cum: Any, cums: Any, keeps: Any, m: int, i: int) -> Any:
    """exp(c_i - c_j) in the diagonal block, 0 above the diagonal, for value i of its columns 8 m .."""
    side, odd = i // 2, i % 2
    if m == 1 and side == 0:
        return Float32(0.0)
    gap = ptx.exp2(row_cum[side] - cums[odd])
    return select(keeps[odd], gap, Float32(0.0)) if m == side else gap


def load_rows(spec: Any, tile: Any, words: Any, tile_row: Any, unit: Any) -> None:
    """The warp's 16 rows of Q or K as an operand in registers."""
    for step in range(spec.dim // 16):
        loaded = ptx.load_matrices(layouts.address(tile + step // 4 * TILE_BYTES, tile_row, step % 4 * 2 + unit), False)
        for i in range(4):
            words[4 * step + i] = loaded[i]


@cute.jit
def zero_keys(spec, tile, valid, thread):
    """Rows of K from valid on."""
    for i in cutlass.range(cutlass.max(valid, 0) * 8 + thread, CHUNK * 8, WARPGROUP, unroll=1):
        for part in cutlass.range_constexpr(spec.dim // 64):
            ptx.store_zeros(tile + part * TILE_BYTES + i * 16)


@cute.jit
def diagonal_block(sums, diagonal, warp):
    """The warp's 16 x 16 block on the diagonal out of its 16 rows."""
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for i in cutlass.range_constexpr(8):
                diagonal[i] = sums[8 * w + i]


def store_block(tile: Any, tile_row: Any, unit: Any, dtype: Any, values: Any) -> None:
    """A 16 x 16 block of the warp's rows, rounded."""
    words = [ptx.pack(dtype, values[2 * i], values[2 * i + 1]) for i in range(4)]
    ptx.store_matrices(layouts.address(tile, tile_row, unit), words, False)


@cute.jit
def store_blocks(tile, tile_row, unit, warp, words):
    """A warp's blocks: number u of words is column block u, the last one the diagonal block."""
    for u in cutlass.range_constexpr(3):
        if u < warp:
            ptx.store_matrices(layouts.address(tile, tile_row, 2 * u + unit), [words[4 * u + i] for i in range(4)], False)
    ptx.store_matrices(layouts.address(tile, tile_row, 2 * warp + unit), [words[12 + i] for i in range(4)], False)


def keep_block(spec: Any, words: Any, u: int, values: Any) -> None:
    """A 16 x 16 block, rounded, as number u of words."""
    for i in range(4):
        words[4 * u + i] = ptx.pack(spec.dtype, values[2 * i], values[2 * i + 1])


def half_words(values: Any) -> list[Any]:
    return [ptx.pack(cutlass.Float16, values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]
