"""The two warps of the paged logits kernel that write -inf from each row's length on."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from kernels_cute.mqa_logits.paged_schedule import row_length
from kernels_cute.mqa_logits.products import fill_with_minus_infinity


@cute.jit
def fill_warp(tiles, params, lengths, half):
    """Rows are dealt over blocks; where they are few, parts of rows are."""
    out = params.out
    columns = cute.size(out, mode=[1])
    lane = cute.arch.lane_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    rows = lengths.batch * tiles.next_n
    parts = cutlass.max(blocks // rows, 1)
    for unit in cutlass.range(block, rows * parts, blocks, unroll=1):
        row = unit // parts
        length = row_length(tiles, lengths, row // tiles.next_n, row % tiles.next_n)
        line = out.iterator + Int64(row) * out.stride[0]
        first = length + (unit % parts * 2 + half) * 32 + lane
        fill_with_minus_infinity(line, out.element_type, first, columns, parts * 64)
