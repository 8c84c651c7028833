"""A row of o that is not finite, once more: from the positions that its own query selected (attention/rows.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.attention import ptx
from kernels_cute.attention.prefill.shape import STEP
from kernels_cute.attention.prefill.tiles import masks_address, rows_address
from kernels_cute.attention.rows import add_position, begin_again, store_again


@cute.jit
def repeat_row(tiles: cutlass.Constexpr, params, lists, item, lane, row):
    """Compute a row again, in a warp."""
    steps, first, count, kv_head, tile = item
    bit = Int32(1) << (row // tiles.group)
    rows, masks = rows_address(lists, tile), masks_address(tiles, lists, tile)
    again = begin_again(tiles, params, (first, kv_head), row, lane)
    most, total = Float32(-float("inf")), Float32(0.0)
    for entry in cutlass.range(0, steps * STEP, 32, unroll=1):
        if cutlass.const_expr(tiles.mask_bytes == 2):
            mask = ptx.load_global_half(masks + Int64(entry + lane) * 2)
        else:
            mask = ptx.load_global_word(masks + Int64(entry + lane) * 4)
        cache_row = ptx.load_global_word(rows + Int64(entry + lane) * 4)
        cache_row = cutlass.select_((mask & bit) != 0, cache_row, Int32(-1))
        for one in cutlass.range(32, unroll=1):
            found = cute.arch.shuffle_sync(cache_row, one)
            if found >= 0:
                most, total = add_position(tiles, params, again, found, kv_head, lane, most, total)
    store_again(tiles, params, again, (first, kv_head), row, lane, most, total)
