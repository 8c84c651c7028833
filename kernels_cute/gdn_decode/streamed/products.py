"""Products of a tile of a state with k and q of all tokens, by small matrix products of a warp in float32 accuracy.

    sums[column, vector] = sum over K of S0[column, K] x[vector, K]       x = k_0, q_0, k_1, ...; eight columns, some twice

A state of bfloat16 is an operand as it is, and a float32 vector is the sum of three of bfloat16. Of a float32 state both operands
are sums of two values of tf32, and the product of the two small ones, below float32's own rounding, is left out. The order of K
within the operands is free as long as both have the same: a lane takes what lies in 16 neighbouring bytes of a column.

Lane 4 g + t has, of 16 columns, rows g and g + 8 of the left operand, column g of the right one, and sums of columns g and g + 8
with vectors 2 t and 2 t + 1.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from kernels_cute.common import ptx
from kernels_cute.gdn_decode.streamed.sizes import COLUMNS, DIM
from kernels_cute.gdn_decode.streamed.spec import Shared, Spec
from kernels_cute.gdn_decode.streamed.tiles import Tile

ROWS = 16  # columns of the state in a product
QUAD = 4  # lanes with the same rows
_BIG = -(1 << 13)  # bits of a float32 that tf32 keeps


def right_operand(spec: Spec, lane: Any, shared: Shared) -> list[tuple[list[Any], ...]]:
    """Split the lane's vector into parts, largest first. Return, for each run of K that the lanes of a quad share, the words of
    both halves."""
    vector = lane // QUAD % spec.vectors
    row = shared.tokens + (vector // 2 * spec.token_floats + (1 - vector % 2) * DIM) * 4
    per_run, found = spec.vector, []
    for first in range(0, DIM, QUAD * per_run):
        values = []
        for n in range(0, per_run, 4):
            values += ptx.load_four(row + (first + n) * 4 + lane % QUAD * (4 * per_run))
        found.append(halves(values) if spec.state_dtype is Float32 else _thirds(values))
    return found


def halves(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the words of the values, whose low bits a product leaves out, and the words of what it leaves out."""
    words = [value.bitcast(Int32) for value in values]
    small = [value - (word & _BIG).bitcast(Float32) for value, word in zip(values, words, strict=True)]
    return words, [value.bitcast(Int32) for value in small]


def _thirds(values: list[Any]) -> tuple[list[Any], ...]:
    """Split the values into three words of bfloat16 pairs each, whose sum is the values."""
    found = []
    for _ in range(3):
        words = [ptx.pack(cutlass.BFloat16, values[n], values[n + 1]) for n in range(0, len(values), 2)]
        rounded = [value for word in words for value in ptx.unpack(cutlass.BFloat16, word)]
        values = [value - other for value, other in zip(values, rounded, strict=True)]
        found.append(words)
    return tuple(found)


def multiply_columns(spec: Spec, tile: Tile, lane: Any, first: Any, right: list[tuple[list[Any], ...]]) -> list[Any]:
    """Return the sums of columns first + g and first + 8 + g of the tile, with two vectors each."""
    size = spec.state_dtype.width // 8
    row = tile.address + (first + lane // QUAD) * (DIM * size) + lane % QUAD * 16
    zero = Float32(0.0)
    total, small = [zero] * 4, [[zero] * 4, [zero] * 4]
    for number, parts in enumerate(right):
        upper, lower = (ptx.load_words(row + offset * (DIM * size) + number * (QUAD * 16)) for offset in (0, ROWS // 2))
        # Sums of a run, so that few roundings follow one another within the products. The small parts have sums of their own,
        # whose roundings do not matter: three products that do not wait for one another.
        sums = [zero] * 4
        for step in range(0, 4, 2):
            left = [upper[step], lower[step], upper[step + 1], lower[step + 1]]
            largest, *others = _pairs(spec, left, parts, step)
            sums = multiply(spec, sums, *largest)
            small = [multiply(spec, one, *other) for one, other in zip(small, others, strict=True)]
        total = [one + other for one, other in zip(total, sums, strict=True)]
    return [one + (other + least) for one, other, least in zip(total, *small, strict=True)]


def _pairs(spec: Spec, left: list[Any], parts: tuple[list[Any], ...], step: int) -> list[tuple[list[Any], list[Any]]]:
    """Operands of the products of a step, largest first."""
    words = [part[step : step + 2] for part in parts]
    if spec.state_dtype is not Float32:
        return [(left, other) for other in words]
    remains = halves([word.bitcast(Float32) for word in left])[1]
    return [(left, words[0]), (left, words[1]), (remains, words[0])]


def multiply(spec: Spec, sums: list[Any], left: list[Any], right: list[Any]) -> list[Any]:
    if spec.state_dtype is Float32:
        return list(ptx.multiply_tf32(sums, left, *right))
    return list(ptx.multiply_small(spec.state_dtype, sums, left, *right))


@cute.jit
def multiply_tile(spec: Spec, tile: Tile, lane: Int32, shared: Shared, right: Constexpr):
    """Sums of all columns to the warp's shared memory."""
    for first in cutlass.range(0, COLUMNS, ROWS, unroll=1):  # both at once take more registers than there are
        sums = multiply_columns(spec, tile, lane, first, right)
        if lane % QUAD < spec.batch:
            target = shared.sums + ((first + lane // QUAD) * spec.sums_pitch + 2 * (lane % QUAD)) * 4
            ptx.store_pair(target, sums[0], sums[1])
            ptx.store_pair(target + ROWS // 2 * spec.sums_pitch * 4, sums[2], sums[3])
    cute.arch.sync_warp()
