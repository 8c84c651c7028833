"""16 x 16 blocks of a 64 x 64 tile, of which a warp has the four of 16 rows: what the inverse and the score role share."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_cute.chunk import operands
from kernels_cute.chunk.operands import select
from kernels_cute.chunk.shape import CHUNK, CUM, TILE_BYTES, WARPGROUP
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx


class Lane(NamedTuple):
    """A lane of a warpgroup whose warps have 16 rows each of a tile."""

    warp: Any
    lane: Any
    thread: Any
    row: Any  # its first accumulators' row of the warp's 16; its second is 8 further
    pair: Any  # their columns: 8 n + 2 pair + {0, 1}
    tile_row: Any  # where it points when the warp's rows are moved as matrices: row of the tile,
    unit: Any  # and 8 columns
    row0: Any  # `row` among the tile's


def lane_of(warp: Any, lane: Any = None) -> Lane:
    """Describe this lane of warp `warp`. lane: its number, where the caller has it."""
    lane = cute.arch.lane_idx() if lane is None else lane
    row = lane // 4
    return Lane(warp, lane, warp * 32 + lane, row, lane % 4, warp * 16 + lane % 16, lane // 16, warp * 16 + row)


def row_values(row: Any, row0: Any) -> tuple[Any, Any]:
    """Load the values of this lane's two rows of the tile, from a row of 64 at an address."""
    return ptx.load_one(row + row0 * 4), ptx.load_one(row + row0 * 4 + 32)


def store_row_values(row: Any, row0: Any, first: Any, second: Any) -> None:
    ptx.store_one(row + row0 * 4, first)
    ptx.store_one(row + row0 * 4 + 32, second)


def row_decays(rows: Any, row_cum: Any, warp: Any) -> tuple[Any, Any]:
    """Split exp(c_i - c_j) left of the diagonal block into two factors, both at most 1: from row i down to the last token before
    the block, and from there to column j. Return c of that token and the first factors of this lane's two rows."""
    reference = ptx.load_one(rows + CUM + cutlass.max(warp * 16 - 1, 0) * 4)
    return reference, (ptx.exp2(row_cum[0] - reference), ptx.exp2(row_cum[1] - reference))


def block_decay(row_cum: Any, cums: Any, keeps: Any, m: int, i: int) -> Any:
    """Return exp(c_i - c_j) in the diagonal block, 0 above the diagonal, for value i of the columns from 8 m on."""
    side, odd = i // 2, i % 2
    if m == 1 and side == 0:
        return Float32(0.0)
    gap = ptx.exp2(row_cum[side] - cums[odd])
    return select(keeps[odd], gap, Float32(0.0)) if m == side else gap


def load_rows(spec: Any, at: Lane, tile: Any, words: Any) -> None:
    """Load the warp's 16 rows of Q or K as an operand in registers."""
    for step in range(spec.dim // 16):
        set_words(words, step, load_words(at, tile, step))


def load_words(at: Lane, tile: Any, step: int) -> Any:
    """The operand of one k step."""
    address = operands.address(tile + step // 4 * TILE_BYTES, at.tile_row, step % 4 * 2 + at.unit)
    return ptx.load_matrices(address, False)


def set_words(words: Any, number: int, values: Any) -> None:
    """words[4 number : 4 number + 4] = values."""
    for i in range(4):
        words[4 * number + i] = values[i]


@cute.jit
def zero_keys(spec: ChunkSpec, tile: Int32, valid: Int32, thread: Int32):
    """Zero the rows of K from `valid` on."""
    for i in cutlass.range(cutlass.max(valid, 0) * 8 + thread, CHUNK * 8, WARPGROUP, unroll=1):
        for part in cutlass.range_constexpr(spec.dim // 64):
            ptx.store_zeros(tile + part * TILE_BYTES + i * 16)


@cute.jit
def diagonal_block(sums: cute.Tensor, diagonal: cute.Tensor, warp: Int32):
    """Take the warp's 16 x 16 block on the diagonal out of its 16 rows."""
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for i in cutlass.range_constexpr(8):
                diagonal[i] = sums[8 * w + i]


def packed(dtype: Any, values: Any) -> list[Any]:
    return [ptx.pack(dtype, values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def half_words(values: Any) -> list[Any]:
    return packed(cutlass.Float16, values)


def square_address(tile: Any, row: Any, u: Any, unit: Any) -> Any:
    """Address of the 16 bytes `unit` (0 or 1) of a row of column block u in a square tile."""
    return operands.address(tile, row, 2 * u + unit)


def store_block(tile: Any, at: Lane, u: Any, words: Any, address: Any = square_address) -> None:
    """Store the words of one 16 x 16 block, columns 16 u to 16 u + 15 of the warp's rows."""
    ptx.store_matrices(address(tile, at.tile_row, u, at.unit), words, False)


@cute.jit
def store_blocks(tile: Int32, at: Lane, words: cute.Tensor, address: Any = square_address):
    """Store a warp's blocks. Words 4 u to 4 u + 3 are column block u, the last four the diagonal block."""
    for u in cutlass.range_constexpr(3):
        if u < at.warp:
            store_block(tile, at, u, [words[4 * u + i] for i in range(4)], address)
    store_block(tile, at, at.warp, [words[12 + i] for i in range(4)], address)
