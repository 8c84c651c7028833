"""The ragged logits kernel in another form: of a row's scores it lists those that reach the row's bound, and writes no others.

Products, sums and scores are those of `RaggedLogits`, bit for bit. In place of `out` stands the sift's workspace, a row of it
a query (_sift_rows).

A row's keys are worked on in pieces, by one block or by neighbouring ones, and every piece needs a list of its own, of which each
of the four warps that see the row has a quarter: so places are counted in registers, and no score waits for a counter in memory.
A row has four lists. Pieces of a query tile take

    0   from the front of the larger part    the piece that is more than half of the tile's keys, if there is one
    1   from the back of it                  of other pieces the first to ask
    2   from the front of the smaller part   the second
    3   from the back of that                the third

Beyond these a piece lists nothing and marks its rows as failed. Whether two lists have met is for the reader to find out, from
their counts; what they wrote over each other is then of no use, but neither left its part of the row.

Which list a piece takes is chance. What is selected from a row's lists depends on all of their entries, and not on that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels_cute import _sift_ptx as ptx
from kernels_cute._logits_deal_even import KEY_ROWS
from kernels_cute._logits_ragged import RaggedLogits
from kernels_cute._sift_rows import AT_ONCE, BOUND, CLAIMS, COUNTS, FAILED, HEADER, NO_LIST, WARPS, part_of, room_of
from kernels_cute._topk_ptx import as_float, load_four

ENTRY_BYTES = 8
NAN = 0x7FFFFFFF
GROUPS_HELD = 4  # whose bounds stay in registers; more are read for every tile
MOST_KEY = 1 << 17
TILE_BITS = 12  # of a key tile's number
TILE_MASK = (1 << TILE_BITS) - 1


class SiftLogits(RaggedLogits):
    """With two sets of accumulators and everything dealt in runs."""

    def __init__(self, **fields):
        super().__init__(clean=False, packed=False, halves=2, even=8, segment=8, rows_first=False, **fields)
        self.bounded = False  # the columns of out are none

    def storage_type(self):
        query_elements = 2 * self.columns * self.head_dim * self.query_stages
        key_elements = KEY_ROWS * self.head_dim * self.key_stages
        slots = self.queries * self.query_stages

        @cute.struct
        class Storage:
            queries_full: cute.struct.MemRange[Int64, self.query_stages]
            queries_free: cute.struct.MemRange[Int64, self.query_stages]
            keys_full: cute.struct.MemRange[Int64, self.key_stages]
            keys_free: cute.struct.MemRange[Int64, self.key_stages]
            loads: cute.struct.MemRange[Int32, self.load_words]
            items: cute.struct.MemRange[Int32, 4 * self.query_stages]  # first row, key tiles from and to, `packed`
            marks: cute.struct.Align[cute.struct.MemRange[Int32, 4 * slots], 16]  # of a query: first key, keys, bound
            weights: cute.struct.Align[cute.struct.MemRange[Float32, slots * self.num_heads], 16]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, query_elements], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, key_elements], 1024]

        return Storage

    # ---- what the math warps do in place of writing scores

    @cute.jit
    def part_of_row(self, out, list_number, warp):
        """(where in a row, in entries, the part that a warp has of a list begins; 1 or -1 to the next entry; most of them)"""
        first, entries = part_of(room_of(Int32(cute.size(out, mode=[1]))), list_number, warp)
        sign = Int32(1)
        if list_number % 2 == 1:
            first, sign = first + entries - 1, Int32(-1)
        return HEADER * 4 // ENTRY_BYTES + first, sign, entries - AT_ONCE

    @cute.jit
    def place(self, storage, out, row0, stage, half):
        """What an item needs all the time: address of its first entry of this lane's first row, 1 or -1 to the next entry,
        where this lane's mark stands, what else concerns the lane; of each group how many entries it has, how many lie
        between rows of groups, and most of them; the bounds; key tiles that all see whole, the first and how many, and
        the lane's first key in a tile. Last what `leave` needs."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_marks = storage.marks.get_tensor(cute.make_layout(4 * self.queries * self.query_stages))
        packed = s_items[4 * stage + 3]
        list_number, inner, inner_tiles = packed & 7, (packed >> 3) & TILE_MASK, packed >> (3 + TILE_BITS)
        first, sign, limit = self.part_of_row(out, list_number, warp)
        query = half * self.queries_per_warpgroup + lane % 4
        offset = Int32(Int64(row0 + query) * out.stride[0] * 4 // ENTRY_BYTES) + first
        pitch = Int32(out.stride[0]) * (4 * 4 // ENTRY_BYTES)  # entries between rows of neighbouring groups
        mark_at = storage.marks.data_ptr().toint() + 16 * (stage * self.queries + query)
        counts, bounds = cute.make_rmem_tensor(self.groups, Int32), cute.make_rmem_tensor(self.groups, Float32)
        for group in cutlass.range_constexpr(self.groups):
            counts[group] = Int32(0)
            if cutlass.const_expr(self.groups <= GROUPS_HELD):
                bounds[group] = as_float(s_marks[4 * (stage * self.queries + query + 4 * group) + 2])
        return (
            ptx.kept_address(out.iterator.toint(), offset), ptx.kept(sign), ptx.kept(mark_at), ptx.lane_masks(lane), counts,
            ptx.kept(pitch), ptx.kept(limit), bounds, (inner, inner_tiles, ptx.kept(16 * warp + lane // 4)),
            (out, row0 + query, list_number, warp),
        )  # fmt: skip

    @cute.jit
    def look(self, place, group: cutlass.Constexpr):
        if cutlass.const_expr(self.groups > GROUPS_HELD):
            mark_at, bounds = place[2], place[7]
            _, _, bound, _ = load_four(mark_at + 64 * group)
            bounds[group] = as_float(bound)

    @cute.jit
    def put(self, storage, out, place, stage, tile, warp, group: cutlass.Constexpr, low, high):
        line, sign, mark_at, masks, counts, pitch, limit, bounds, (inner, inner_tiles, key_lane), _ = place
        key = tile * KEY_ROWS + key_lane
        if Uint32(tile - inner) >= Uint32(inner_tiles):
            # Not all queries see all of these keys. What is not seen is not a number, and so below every bound.
            seen, length, _, _ = load_four(mark_at + 64 * group)
            if Uint32(key - seen) >= Uint32(length):
                low = Float32(float("nan"))
            if Uint32(key + 8 - seen) >= Uint32(length):
                high = Float32(float("nan"))
        first = group * pitch
        counts[group] = ptx.list_two(low, high, bounds[group], key, masks, counts[group], sign, limit, line, first)

    @cute.jit
    def begin(self, place, half):
        """Nothing is shared with the other warps."""

    @cute.jit
    def finish(self, storage, out, place, stage, tile, half, warp):
        """Nothing waits to be written."""

    @cute.jit
    def leave(self, place):
        """Writes how many entries the item has listed of each row: too many, where that is all that may be."""
        counts, (out, row, list_number, warp) = place[4], place[9]
        if cute.arch.lane_idx() < 4:
            for group in cutlass.range_constexpr(self.groups):
                if row + 4 * group < cute.size(out, mode=[0]):
                    if list_number < NO_LIST:
                        out[row + 4 * group, COUNTS + list_number * WARPS + warp] = counts[group]
                    else:
                        out[row + 4 * group, FAILED] = Int32(1)

    # ---- publishing

    @cute.jit
    def publish_item(self, storage, weights, ranges, row0, tile_first, tile_end, stage, parity):
        """Tells the math warps of one item, where it holds anything: its place, its list, marks and weights."""
        starts, ends, num_queries, num_keys, num_columns, _, _, _, least, out = ranges
        lane = cute.arch.lane_idx()
        slots = self.queries * self.query_stages
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_marks = storage.marks.get_tensor(cute.make_layout(4 * slots))
        s_weights = storage.weights.get_tensor(cute.make_layout(slots * self.num_heads))
        if tile_first < tile_end:
            list_number = self.list_of(out, ranges, row0, tile_end - tile_first)
            cute.arch.mbarrier_wait(storage.queries_free.data_ptr() + stage, parity ^ 1)
            slot = stage * self.queries
            latest, earliest = Int32(0), Int32(MOST_KEY)
            for part in cutlass.range_constexpr((self.queries + 31) // 32):
                local = lane + 32 * part
                if local < self.queries:
                    first, end = self.row_range(starts, ends, row0 + local, num_queries, num_keys, num_columns, least)
                    bound = Int32(NAN)  # of a row that sees nothing, too: no tile need be looked at for its sake
                    if list_number < NO_LIST and first < end:
                        bound = out[row0 + local, BOUND]
                    s_marks[4 * (slot + local)] = first
                    s_marks[4 * (slot + local) + 1] = end - first
                    s_marks[4 * (slot + local) + 2] = bound
                    if first < end:
                        latest, earliest = cutlass.max(latest, first), cutlass.min(earliest, end)
            inner = (cute.arch.warp_redux_sync(latest, "max") + (KEY_ROWS - 1)) // KEY_ROWS
            inner_tiles = cutlass.max(cute.arch.warp_redux_sync(earliest, "min") // KEY_ROWS - inner, 0)
            if lane == 0:
                s_items[4 * stage] = row0
                s_items[4 * stage + 1] = tile_first
                s_items[4 * stage + 2] = tile_end
                s_items[4 * stage + 3] = list_number + (inner << 3) + (inner_tiles << (3 + TILE_BITS))
            if cutlass.const_expr(self.has_weights):
                self.publish_weights(s_weights, weights, row0, num_queries, slot)
            cute.arch.mbarrier_arrive(storage.queries_full.data_ptr() + stage)
            stage, parity = self.advance(stage, parity, self.query_stages)
        return stage, parity

    @cute.jit
    def list_of(self, out, ranges, row0, tiles):
        """The list that a piece of so many key tiles takes, the same in all lanes."""
        low, high = self.seen(ranges, row0 // self.queries, row0 >= 0)
        list_number = Int32(0)
        if 2 * tiles <= (high + (KEY_ROWS - 1)) // KEY_ROWS - low // KEY_ROWS:
            before = Int32(0)
            if cute.arch.lane_idx() == 0:
                before = ptx.add_global((out.iterator + Int64(row0) * out.stride[0] + CLAIMS).toint(), Int32(1))
            list_number = cutlass.min(cute.arch.shuffle_sync(before, 0) + 1, NO_LIST)
        return list_number
