"""A row of o that is not finite, once more: from all positions up to its own (attention/rows.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from kernels_cute.attention.rows import add_position, begin_again, store_again


@cute.jit
def repeat_row(tiles: cutlass.Constexpr, params, tile, lane, row):
    """Compute a row again, in a warp."""
    origin = (tile.first, tile.kv_head)
    again = begin_again(tiles, params, origin, row, lane)
    line = params.block_tables.iterator + Int64(tile.sequence) * params.block_tables.stride[0]
    seen = cutlass.min(tile.position + row // tiles.group + 1, tile.limit)
    most, total = Float32(-float("inf")), Float32(0.0)
    for position in cutlass.range(seen, unroll=1):
        block = cute.make_tensor(line + position // tiles.block_size, cute.make_layout(1))[0]
        cache_row = block * tiles.block_size + position % tiles.block_size
        most, total = add_position(tiles, params, again, cache_row, tile.kv_head, lane, most, total)
    store_again(tiles, params, again, origin, row, lane, most, total)
