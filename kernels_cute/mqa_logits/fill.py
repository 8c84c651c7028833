"""The two warps of a logits kernel that write -inf outside of every row's range."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.indexer.problem import MqaLogitsParams, PagedMqaLogitsParams
from kernels_cute.mqa_logits.orders import KEY_ROWS
from kernels_cute.mqa_logits.paged_schedule import row_length
from kernels_cute.mqa_logits.ragged_schedule import row_range
from kernels_cute.mqa_logits.tiles import Lengths, PagedTiles, RaggedTiles, Work, ranges_of


@cute.jit
def fill(row: cute.Pointer, element_type: cutlass.Constexpr, first: Int32, end: Int32, step: Int32):
    """Write -inf to every step-th column of a row, from first to end."""
    for column in cutlass.range(first, end, step, unroll=4):
        cute.make_tensor(row + column, cute.make_layout(1))[0] = element_type(-Float32.inf)


@cute.jit
def ragged_warp(tiles: RaggedTiles, params: MqaLogitsParams, work: Work, half: Int32):
    """Write -inf to the columns that lie outside of each row's range. Two warps share the rows of a block's parts."""
    ranges = ranges_of(params._replace(skip_rows_up_to=Int32(0)), work)
    out, dtype, lane = params.out, params.out.element_type, cute.arch.lane_idx()
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
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
                            fill(line, dtype, cutlass.max(end - first, column0) + lane, column1, 32)
                        else:
                            fill(line, dtype, column0 + lane, cutlass.min(first, column1), 32)
                            fill(line, dtype, cutlass.max(end, column0) + lane, column1, 32)


@cute.jit
def paged_warp(tiles: PagedTiles, params: PagedMqaLogitsParams, lengths: Lengths, half: Int32):
    """Write -inf from each row's length on. Rows are dealt over blocks; if there are few, parts of rows are."""
    out = params.out
    columns = cute.size(out, mode=[1])
    lane = cute.arch.lane_idx()
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    rows = lengths.batch * tiles.next_n
    parts = cutlass.max(blocks // rows, 1)
    for unit in cutlass.range(block, rows * parts, blocks, unroll=1):
        row = unit // parts
        length = row_length(tiles, lengths, row // tiles.next_n, row % tiles.next_n)
        line = out.iterator + Int64(row) * out.stride[0]
        first = length + (unit % parts * 2 + half) * 32 + lane
        fill(line, out.element_type, first, columns, parts * 64)
