"""The two warps of the ragged logits kernel that write -inf outside of every row's range."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.mqa_logits.constants import KEY_ROWS
from kernels_cute.mqa_logits.products import fill_with_minus_infinity
from kernels_cute.mqa_logits.ragged_schedule import row_range
from kernels_cute.mqa_logits.ragged_tiles import ranges_of


@cute.jit
def fill_warp(tiles, params, work, half):
    """-inf in the columns of a part that lie outside a row's range; two warps share the rows."""
    ranges = ranges_of(params, work)._replace(skip_rows_up_to=Int32(0))
    out = params.out
    lane = cute.arch.lane_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    for part_of_all in cutlass.range(block, work.fill_items, blocks, unroll=1):
        row0 = (part_of_all % work.query_tiles) * tiles.queries
        column0 = part_of_all // work.query_tiles * work.fill_tiles * KEY_ROWS
        column1 = cutlass.min(column0 + work.fill_tiles * KEY_ROWS, ranges.num_columns)
        if column0 < ranges.num_columns:
            for part in cutlass.range_constexpr((tiles.queries + 31) // 32):
                part_rows = cutlass.const_expr(min(32, tiles.queries - 32 * part))
                # One load a lane; the rows' ranges are then handed round.
                lane_first, lane_end = row_range(tiles, ranges, row0 + 32 * part + lane)
                for step in cutlass.range(part_rows // 2, unroll=1):
                    local = 2 * step + half
                    first = cute.arch.shuffle_sync(lane_first, local)
                    end = cute.arch.shuffle_sync(lane_end, local)
                    row = row0 + 32 * part + local
                    if row < ranges.num_queries:
                        line = out.iterator + Int64(row) * out.stride[0]
                        if cutlass.const_expr(tiles.packed):
                            fill(line, out.element_type, cutlass.max(end - first, column0), column1, lane)
                        else:
                            fill(line, out.element_type, column0, cutlass.min(first, column1), lane)
                            fill(line, out.element_type, cutlass.max(end, column0), column1, lane)


def fill(line, element_type, first, end, lane):
    fill_with_minus_infinity(line, element_type, first + lane, end, 32)
