"""The ragged logits kernel in another form: of a row's scores it lists those that reach the row's bound, and writes no others.

Products, sums and scores are those of `RaggedLogits`, bit for bit. In place of `out` stands the sift's workspace, a row of it
a query (_sift_rows).

A row's keys are worked on in pieces, by one block or by neighbouring ones, and every piece needs a list of its own: places in it
are counted in shared memory, so that no score waits for device memory. A row has four, and pieces of a query tile take theirs

    0   from the front of the larger part    the piece that is more than half of the tile's keys, if there is one
    1   from the back of it                  of other pieces the first to ask
    2   from the front of the smaller part   the second
    3   from the back of that                the third

Beyond these a piece lists nothing and marks its rows as failed. Whether two lists have met is for the reader to find out, from
their counts; what they wrote over each other is then of no use, but neither left its part of the row.

The number of a list is chance, and so is the order inside. What is selected from a row's lists depends on neither.

A claim of a place (an atomic of shared memory) and the store that needs its answer stand one query group apart, the last
group's over the next tile's products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute import _sift_ptx as ptx
from kernels_cute._logits_deal_even import DONE, KEY_ROWS
from kernels_cute._logits_ragged import END_OF_LIST, RaggedLogits
from kernels_cute._sift_rows import BOUND, CLAIMS, COUNTS, FAILED, HEADER, NO_LIST, room_of

ENTRY_BYTES = 8
NAN = 0x7FFFFFFF


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
            items: cute.struct.MemRange[Int32, 4 * self.query_stages]  # first row, key tiles from and to, list
            cursors: cute.struct.MemRange[Int32, slots]  # byte of its part of the row that a query's next entry goes to
            marks: cute.struct.Align[cute.struct.MemRange[Int32, 4 * slots], 16]  # first key, keys, bound
            weights: cute.struct.Align[cute.struct.MemRange[Float32, slots * self.num_heads], 16]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, query_elements], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, key_elements], 1024]

        return Storage

    # ---- what the math warps do in place of writing scores

    @cute.jit
    def part_of_row(self, out, list_number):
        """(first byte, bytes, byte of the first entry, step) of a list: of the part of the row that it fills, relative to
        the row, and within the part."""
        room = room_of(Int32(cute.size(out, mode=[1])))
        offset, limit, start, step = Int32(4 * HEADER), ENTRY_BYTES * room, Int32(0), Int32(ENTRY_BYTES)
        if list_number >= 2:
            offset, limit = offset + limit, limit // 2
        if list_number % 2 == 1:
            start, step = limit - ENTRY_BYTES, Int32(-ENTRY_BYTES)
        return offset, limit, start, step

    @cute.jit
    def place(self, storage, out, row0, stage, half):
        """Of this lane's first query: address of its part of the row, and of its mark and cursor; of all: the part's bytes, the
        step, and the distance between groups. Then what waits to be stored, and the mark of the group at work."""
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        offset, limit, _, step = self.part_of_row(out, s_items[4 * stage + 3])
        query = half * self.queries_per_warpgroup + cute.arch.lane_idx() % 4
        line = (out.iterator + Int64(row0 + query) * out.stride[0]).toint() + offset
        pitch = Int64(4 * 4) * out.stride[0]
        slot = stage * self.queries + query
        mark_at = storage.marks.data_ptr().toint() + 16 * slot
        cursor_at = storage.cursors.data_ptr().toint() + 4 * slot
        claimed = cute.make_rmem_tensor(3, Int32)  # places of two keys, and the nearer one's column
        claimed.fill(-1)
        scores = cute.make_rmem_tensor(2, Float32)
        scores.fill(0.0)
        mark = cute.make_rmem_tensor(3, Int32)
        return line, pitch, limit, step, mark_at, cursor_at, claimed, scores, mark

    @cute.jit
    def look(self, place, group: cutlass.Constexpr):
        _, _, _, _, mark_at, _, _, _, mark = place
        first, length, bound, _ = ptx.load_four(mark_at + 64 * group)
        mark[0], mark[1], mark[2] = first, length, bound

    @cute.jit
    def put(self, storage, out, place, stage, tile, warp, group: cutlass.Constexpr, low, high):
        _, _, _, step, _, cursor_at, claimed, scores, mark = place
        column = tile * KEY_ROWS + 16 * warp + cute.arch.lane_idx() // 4 - mark[0]
        bound = ptx.as_float(mark[2])
        near = ptx.claim(low, bound, column, mark[1], cursor_at + 16 * group, step)
        far = ptx.claim(high, bound, column + 8, mark[1], cursor_at + 16 * group, step)
        if cutlass.const_expr(group > 0):
            self.store_claimed(place, group - 1)
        claimed[0], claimed[1], claimed[2] = near, far, column
        scores[0], scores[1] = low, high

    @cute.jit
    def store_claimed(self, place, group: cutlass.Constexpr):
        line, pitch, limit, _, _, _, claimed, scores, _ = place
        line = line + group * pitch
        ptx.store_below(claimed[0], limit, line, scores[0], claimed[2])
        ptx.store_below(claimed[1], limit, line, scores[1], claimed[2] + 8)

    @cute.jit
    def begin(self, place, half):
        self.store_claimed(place, self.groups - 1)

    @cute.jit
    def finish(self, storage, out, place, stage, tile, half, warp):
        """What the last group claimed is stored at the next tile's `begin`, or at the end of the item."""

    @cute.jit
    def leave(self, place):
        self.store_claimed(place, self.groups - 1)

    # ---- publishing, and counts of what was listed

    @cute.jit
    def publish_warp(
        self, storage, weights, starts, ends, out, num_keys, query_tiles, item_tiles, num_items, head_items, least
    ):  # fmt: skip
        num_queries, num_columns = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        if cute.arch.lane_idx() == 0:
            for stage_number in cutlass.range_constexpr(self.query_stages):
                s_items[4 * stage_number] = Int32(END_OF_LIST)  # nothing to retire yet
        cute.arch.sync_warp()

        stage, parity = Int32(0), Int32(0)
        ranges = (starts, ends, num_queries, num_keys, num_columns, query_tiles, item_tiles, num_items // query_tiles, least)
        base, stride, limit, position, count, tail = self.first_round(head_items)
        while tail < DONE:
            if tail == 0 and base >= limit:
                base, position, count = self.tail_run(storage, num_items, head_items)
                stride, limit, tail = Int32(1), num_items, Int32(1)
            if base < limit and position < count:
                lane_first, lane_end = self.item_span(ranges, base, stride, limit)
                steps, position = self.skip(lane_first, lane_end, position, tail)
                for step in cutlass.range(steps, unroll=1):
                    tile_first, tile_end, position = self.cut(lane_first, lane_end, step, position, count, tail)
                    row0 = self.first_row(base + step * stride, ranges)
                    stage, parity = self.publish_piece(
                        storage, out, weights, ranges, row0, tile_first, tile_end, stage, parity
                    )
                base = base + self.batch * stride
            else:
                tail = Int32(DONE)
        cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
        self.retire(storage, out, stage)
        if cute.arch.lane_idx() == 0:
            s_items[4 * stage] = Int32(END_OF_LIST)
        cute.arch.mbarrier_arrive(queries_full + stage)
        for _ in cutlass.range_constexpr(self.query_stages - 1):
            stage, parity = self.advance(stage, parity, self.query_stages)
            cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
            self.retire(storage, out, stage)

    @cute.jit
    def publish_piece(self, storage, out, weights, ranges, row0, tile_first, tile_end, stage, parity):
        """`publish_item`, and before it the counts of the item that the stage held."""
        starts, ends, num_queries, num_keys, num_columns, _, _, _, least = ranges
        lane = cute.arch.lane_idx()
        slots = self.queries * self.query_stages
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_marks, s_cursors = storage.marks.get_tensor(cute.make_layout(4 * slots)), storage.cursors.get_tensor(cute.make_layout(slots))
        s_weights = storage.weights.get_tensor(cute.make_layout(slots * self.num_heads))
        if tile_first < tile_end:
            cute.arch.mbarrier_wait(storage.queries_free.data_ptr() + stage, parity ^ 1)
            self.retire(storage, out, stage)
            list_number = self.list_of(out, ranges, row0, tile_end - tile_first)
            _, _, start, _ = self.part_of_row(out, list_number)
            if lane == 0:
                s_items[4 * stage] = row0
                s_items[4 * stage + 1] = tile_first
                s_items[4 * stage + 2] = tile_end
                s_items[4 * stage + 3] = list_number
            slot = stage * self.queries
            for part in cutlass.range_constexpr((self.queries + 31) // 32):
                local = lane + 32 * part
                if local < self.queries:
                    first, end = self.row_range(starts, ends, row0 + local, num_queries, num_keys, num_columns, least)
                    bound = Int32(NAN)
                    if list_number < NO_LIST and row0 + local < num_queries:
                        bound = out[row0 + local, BOUND]
                    s_marks[4 * (slot + local)] = first
                    s_marks[4 * (slot + local) + 1] = end - first
                    s_marks[4 * (slot + local) + 2] = bound
                    s_cursors[slot + local] = start
            if cutlass.const_expr(self.has_weights):
                for local in cutlass.range(lane, self.queries * self.num_heads, 32, unroll=self.weight_loads):
                    row = row0 + local // self.num_heads
                    weight = Float32(0.0)
                    if row < num_queries:
                        offset = Int64(row) * weights.stride[0] + local % self.num_heads
                        weight = Float32(cute.make_tensor(weights.iterator + offset, cute.make_layout(1))[0])
                    s_weights[slot * self.num_heads + local] = weight
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

    @cute.jit
    def retire(self, storage, out, stage):
        """Writes how many entries the item that a stage held has listed of each row."""
        lane = cute.arch.lane_idx()
        slots = self.queries * self.query_stages
        s_items = storage.items.get_tensor(cute.make_layout(4 * self.query_stages))
        s_cursors = storage.cursors.get_tensor(cute.make_layout(slots))
        row0, list_number = s_items[4 * stage], s_items[4 * stage + 3]
        if row0 >= 0:
            _, _, start, step = self.part_of_row(out, list_number)
            for part in cutlass.range_constexpr((self.queries + 31) // 32):
                local = lane + 32 * part
                if local < self.queries and row0 + local < cute.size(out, mode=[0]):
                    if list_number < NO_LIST:
                        moved = s_cursors[stage * self.queries + local] - start
                        if step < 0:
                            moved = -moved
                        out[row0 + local, COUNTS + list_number] = moved // ENTRY_BYTES
                    else:
                        out[row0 + local, FAILED] = Int32(1)
        cute.arch.sync_warp()  # all lanes have read before the stage is written again
