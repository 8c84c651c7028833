"""The top-k kernel: one block per row. A sample of the row bounds the answer, one read of the row lists the scores above,
digits of 12 bits narrow the list to the k-th largest key, and a bit per selected column gives the result in order: see
DESIGN.md.

If the sample was wrong (fewer than k columns passed, or more than the list holds), the whole row is counted, digit by digit until
the list has room for what is above the bound, and then filtered. Where that never happens (many equal scores, large k) the digits
end at the answer itself, and the row is read once more to mark it. With `list_short` a row of at most k columns is not read.

No result depends on the order of arrival, which decides places in the list only; bits and counts are integers.
Columns are counted from the last multiple of 16 bytes at or before the row's range, so that accesses of 16 bytes are aligned.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from gdn.ops.indexer.problem import TopkParams
from kernels_cute.common.build import Kernel
from kernels_cute.common.memory import narrowed
from kernels_cute.topk import ptx
from kernels_cute.topk.narrow import clear_bins, narrow
from kernels_cute.topk.read import filter
from kernels_cute.topk.result import clear_bitmap, mark_listed, mark_ranked, mark_read, num_selected, write, write_rest
from kernels_cute.topk.tiles import ACCESS, FIRST_SHIFT, LAST_COLUMN, LEAST_KEY, Entries, Span, Tiles

# First digit of the list: 4096 bins of two octaves, or, where the sample was counted twice and many scores are close to each
# other, of a quarter of one. 13 would leave a last digit of one bit, and `find` leaves out bins by fours.
LIST_SHIFT = 12
FINE_SHIFT = 9
SAMPLE_BITS = 4  # one piece of sixteen is sampled


class Topk(Kernel, params=TopkParams):
    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.threads = tiles, tiles.threads
        # Percent; without a value the DSL asks a device for its limit.
        self.limits = {"min_blocks_per_mp": tiles.blocks_per_sm, "preferred_smem_carveout": 100}

    def blocks(self, params: TopkParams) -> Any:
        return cute.size(params.logits, mode=[0])

    @cute.kernel
    def kernel(self, params: TopkParams):
        tiles = cutlass.const_expr(self.tiles)
        thread, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage())
        clear_bins(tiles, storage, thread)  # while the range is on its way
        position = Int32(-1)
        if cutlass.const_expr(tiles.ratio > 1):
            position = narrowed(params.positions[row])
        first, end = row_range(params, row)
        if params.list_short != 0 and end - first <= num_selected(tiles, params.out):
            for index in cutlass.range(thread, (end - first) * tiles.ratio, tiles.threads, unroll=1):
                params.out[row, index] = Int32(index)
            write_rest(tiles, params.out, row, (end - first) * tiles.ratio, position, thread)
        else:
            if cutlass.const_expr(tiles.ratio > 1):
                if thread == 0:  # kept out of the registers until the end
                    storage.passed.get_tensor(cute.make_layout(4))[2] = position
            select(tiles, params, storage, row, first, end, thread)


@cute.jit
def select(tiles: cutlass.Constexpr, params, storage, row, first, end, thread):
    k = num_selected(tiles, params.out)
    if cutlass.const_expr(tiles.is_float32 and params.row_starts is None and params.row_ends is None):
        end = Int32(ptx.opaque_uniform(Uint32(end)))  # a launch parameter otherwise, for which ptxas spills other values
    address = params.logits.iterator.toint() + (Int64(row) * params.logits.stride[0] + first) * tiles.element_bytes
    lead = Int32(address & (ACCESS - 1)) // tiles.element_bytes
    base = address - lead * tiles.element_bytes
    stop = lead + (end - first)  # the row is columns [lead, stop) of base
    span = Span(base, lead, stop)
    words = (stop + 31) // 32
    s_passed = storage.passed.get_tensor(cute.make_layout(4))
    if thread == 0:
        s_passed[0], s_passed[1] = Int32(0), Int32(0)
    clear_bitmap(tiles, storage, thread, words)
    cute.arch.sync_threads()

    # The first attempt bounds the answer from a sample, the second from all of the row.
    attempt = Int32(0)
    if stop - lead <= tiles.list_entries or k > tiles.list_entries:
        attempt = Int32(1)
    is_listed, passed = Int32(0), Int32(0)
    lower, tie_key, last_column = Uint32(LEAST_KEY), Uint32(LEAST_KEY), Int32(LAST_COLUMN)
    while attempt < 2:
        # At least `wanted` and at most `room` of the counted entries, one in 2**every_bits, are to be above the bound.
        every_bits, wanted, room = Int32(0), k, Int32(tiles.list_entries)
        if attempt == 0:
            every_bits, wanted = Int32(SAMPLE_BITS), ptx.sample_rank(k, 0.5**SAMPLE_BITS)
            room = Int32(tiles.list_entries * 7 // 8 >> SAMPLE_BITS)
        counted = Entries(False, stop - lead, every_bits)
        lower, tie_key, last_column, above, _, _ = narrow(
            tiles, storage, span, thread, counted, Uint32(LEAST_KEY), Int32(FIRST_SHIFT), wanted, room
        )
        # A bound below all keys is a column among equal keys: the answer is known, and nothing has to be listed.
        if above <= room and lower >= LEAST_KEY:
            filter(tiles, storage, span, thread, lower)
            # Unchanged values, set again so that no register keeps them over the filter.
            tie_key, last_column = lower, Int32(LAST_COLUMN)
            cute.arch.sync_threads()
            passed = s_passed[0]
            if passed <= tiles.list_entries and (passed >= k or lower == LEAST_KEY):
                is_listed, attempt = Int32(1), Int32(1)
            else:
                # The count is reset after all threads have read it.
                cute.arch.sync_threads()
                if thread == 0:
                    s_passed[0] = Int32(0)
                cute.arch.sync_threads()
        attempt = attempt + 1
    if is_listed != 0:
        shift = Int32(LIST_SHIFT)
        if (lower & Uint32((1 << FIRST_SHIFT) - 1)) != Uint32(LEAST_KEY & ((1 << FIRST_SHIFT) - 1)):
            shift = Int32(FINE_SHIFT)  # no edge of a first digit's bin
        if lower == LEAST_KEY:
            shift = Int32(FIRST_SHIFT)
        _, tie_key, last_column, _, wanted, highest = narrow(
            tiles, storage, span, thread, Entries(True, passed, Int32(0)), lower, shift, k, Int32(0)
        )
        if wanted > 0:
            mark_ranked(tiles, storage, thread, passed, tie_key, highest, wanted)
        else:
            mark_listed(tiles, storage, thread, passed, tie_key, last_column)
    else:
        mark_read(tiles, storage, span, thread, tie_key, last_column)
    cute.arch.sync_threads()
    write(tiles, storage, params, row, span, words, thread)


@cute.jit
def row_range(params, row):
    """[first, end) of a row's columns, clamped; first = end where it is empty. See TopkParams."""
    columns = Int32(params.logits.shape[1])
    num_keys, drafts = params.num_keys, params.drafts
    first, end = Int32(0), columns
    if cutlass.const_expr(params.row_starts is not None):
        limit = columns
        if num_keys >= 0:
            limit = num_keys
        first, end = clamped(params.row_starts[row], 0, limit), limit
        if cutlass.const_expr(params.row_ends is not None):
            end = clamped(params.row_ends[row], 0, limit)
        end = cutlass.max(first, end)
        if num_keys >= 0:
            first, end = Int32(0), cutlass.min(end - first, columns)
    elif cutlass.const_expr(params.row_ends is not None):
        end = clamped(params.row_ends[row // drafts], drafts - 1 - row % drafts, columns)
    return first, end


@cute.jit
def clamped(bound, less, most):
    """bound - less, clamped to [0, most] before it is narrowed: an int64 may hold any value."""
    wide = cutlass.min(cutlass.max(Int64(bound), Int64(0)), Int64(most) + less)
    return Int32(cutlass.max(wide - less, Int64(0)))
