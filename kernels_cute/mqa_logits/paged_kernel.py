"""The paged logits kernel: keys are the M operand (64 rows a math warpgroup), drafts x heads of one sequence the N operand.

With several key heads a tile is taken in turns of `kv_heads_at_once` key heads: so many products, one a key head, each of the
query heads that belong to it. The scores of a tile add up in registers over its turns.

A block streams the key tiles of its run (_logits_deal.py) through a ring; a tile is gathered from pages in pieces of
gcd(page_size, tile) keys, each a box of the copy engine, its scales a plain bulk copy (whose place needs 16 bytes only).

Warps of the first warpgroup: 0 copies (queries once an item, keys through the ring), 1 publishes the item (lengths and
weights in float32), 2 prefetches the block's likely first table entries, 2 and 3 write -inf beyond every row's length. The
other warpgroups multiply and write the scores.

An item is a run of tiles of one job. Warps 0 and 1 derive the same items from the same lengths; the others only see what is
published; row -1 ends the list.

    barrier        arrivals                                            waits
    queries_full   33: warp 0 once, with the bytes; warp 1, 32 lanes   math warps
    queries_free   one lane of each math warp, item done               warps 0 and 1
    keys_full       1: warp 0, with the bytes                          math warps
    keys_free      one lane of each math warp, products done           warp 0
    turn 0 / 1     named, 256 threads: the other warpgroup arrives, this one waits, before it issues a tile
Turns are taken only where two warpgroups have so many columns that products and sums must not both run in step; both meet
the same tiles, so turns alternate strictly. Warpgroup 1 hands out the first, warpgroup 0 takes the last.
"""

from dataclasses import dataclass
from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from gdn.problems import PagedMqaLogitsParams
from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.deal import Deal
from kernels_cute.mqa_logits.ptx import copy_bulk, prefetch, store_between

KEY_ROWS = 64  # of a math warpgroup in a tile: M of wgmma
WARPGROUP = 128
QUERY_STAGES = 2
FILL_WARP = 2  # first of the two warps that write -inf
END_OF_LIST = -1
TURN_BARRIER = 2  # named barriers 2 and 3; 0 is the block's, 1 stays free
TURN_COLUMNS = 160  # from here on the sums of a tile take about as long as a tile's bytes


@dataclass(frozen=True)
class Registers:
    """Of a thread. What all threads of a block ask for stays within what it got at launch, else it would hang."""

    launch: int  # an equal part of the multiprocessor's
    copy: int
    math: int


# By (math warpgroups, blocks side by side).
REGISTERS = {
    (1, 2): Registers(128, 56, 200),
    (2, 1): Registers(168, 56, 224),
    (2, 2): Registers(80, 40, 96),
}


class PagedLogits:
    """Everything here is known at compile time; sizes, strides and the scale arrive at launch."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        kv_heads_at_once: int,
        head_dim: int,
        fp8: bool,
        has_k_scale: bool,
        has_weights: bool,
        relu: bool,
        clean: bool,
        page_size: int,
        next_n: int,
        per_draft_lengths: bool,
        lanes_per_query: int,
        groups: int,
        passes: int,
        math_warpgroups: int,
        blocks_per_sm: int,
        key_stages: int,
        num_sms: int,
    ):
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.order = layouts.HeadOrder(num_heads, num_kv_heads, lanes_per_query)
        self.dtype = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
        self.has_k_scale, self.has_weights = has_k_scale, has_weights
        self.relu, self.clean = relu, clean
        self.page_size, self.next_n = page_size, next_n
        self.lanes_per_query, self.groups, self.passes = lanes_per_query, groups, passes
        self.group_drafts = layouts.QUERIES_PER_GROUP // lanes_per_query
        self.drafts = groups * self.group_drafts  # of one pass
        self.columns = self.drafts * self.order.columns
        self.product_columns = self.columns // num_kv_heads
        self.weight_slots = self.drafts * num_heads
        self.lane_heads = num_heads // lanes_per_query  # of a draft, in one lane
        self.math_warpgroups, self.blocks_per_sm, self.key_stages = math_warpgroups, blocks_per_sm, key_stages
        self.math_warps = 4 * math_warpgroups
        self.num_threads = WARPGROUP * (1 + math_warpgroups)
        self.blocks = num_sms * blocks_per_sm
        self.registers = REGISTERS[math_warpgroups, blocks_per_sm]
        self.tile = KEY_ROWS * math_warpgroups
        self.piece = gcd(page_size, self.tile)
        self.piece_bits = self.piece.bit_length() - 1  # a power of two, as the tile is
        self.pieces = self.tile // self.piece
        self.tiles_per_load = 32 // self.pieces  # tiles whose pages one warp-wide load of the block table covers
        row_bytes = head_dim * self.dtype.width // 8
        self.kv_turn = kv_heads_at_once  # key heads of a turn and of a stage of keys
        self.kv_turns = num_kv_heads // self.kv_turn  # of a tile
        self.query_bytes = self.columns * row_bytes
        # The scales of all key heads lie together: every turn brings them.
        self.piece_bytes = self.piece * (row_bytes * self.kv_turn + 4 * has_k_scale * num_kv_heads)
        self.k_steps = head_dim * self.dtype.width // 256
        self.turns = math_warpgroups == 2 and self.columns >= TURN_COLUMNS
        self.deal = Deal(self.tile, self.drafts, passes, next_n, per_draft_lengths, self.blocks, clean)

    # ---- host

    @cute.jit
    def __call__(self, *values):
        """values: PagedMqaLogitsParams, flat, the most keys that a draft can see, and the stream."""
        params, limit, stream = PagedMqaLogitsParams(*values[:-2]), values[-2], values[-1]
        q, cache = params.q, params.cache
        mma = cute.make_tiled_mma(self._mma_op())
        heads, dim = self.num_heads, self.head_dim
        (in_run, positions), (run_stride, position_stride) = self.order.view(dim)
        q_view = cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (in_run, self.next_n, positions, dim, cute.size(q, mode=[0])),
                stride=(run_stride, heads * dim, position_stride, 1, self.next_n * heads * dim),
            ),
        )
        values = cache.iterator
        if cutlass.const_expr(self.has_k_scale):
            values = cute.recast_ptr(values, dtype=self.dtype)
        page_stride = cute.assume(cache.stride[0], divby=128 // self.dtype.width)
        key_row = self.num_kv_heads * dim
        k_view = cute.make_tensor(
            values, cute.make_layout((self.page_size, key_row, cute.size(cache, mode=[0])), stride=(key_row, 1, page_stride))
        )
        copy = cpasync.CopyBulkTensorTileG2SOp()
        query_atom, query_tensor = cpasync.make_tiled_tma_atom(
            copy, q_view, layouts.leading(self.query_smem(), 5), self.query_box()
        )
        key_atom, key_tensor = cpasync.make_tiled_tma_atom(
            copy, k_view, cute.slice_(self.key_smem(), (None, None, None, 0, 0)), (self.piece, dim, 1)
        )
        self.kernel(
            query_atom, query_tensor, key_atom, key_tensor, params._replace(q=None), mma, limit, cute.size(q, mode=[0]),
        ).launch(
            grid=(self.blocks, 1, 1),
            block=(self.num_threads, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,  # given so that the DSL does not ask a device for it while compiling
            stream=stream,
        )  # fmt: skip

    def _mma_op(self):
        k_major = OperandMajorMode.K
        source = warpgroup.OperandSource.SMEM
        if self.dtype is cutlass.BFloat16:
            return warpgroup.MmaF16BF16Op(self.dtype, Float32, (KEY_ROWS, self.product_columns, 16), source, k_major, k_major)
        shape = (KEY_ROWS, self.product_columns, 32)
        return warpgroup.MmaF8Op(self.dtype, self.dtype, Float32, shape, source, k_major, k_major)

    def query_box(self):
        return (self.order.run, self.group_drafts, self.order.pairs, self.head_dim, 1)

    def query_smem(self):
        """(head in run, draft in group, pair, head_dim, 1, groups, key head of stage)"""
        outer = QUERY_STAGES * self.num_kv_heads
        whole = layouts.query_layout(self.dtype, self.order.slots, self.head_dim, self.groups, outer, self.lanes_per_query)
        shape, stride = whole.outer.shape, whole.outer.stride
        outer = cute.make_layout((*shape[:4], 1, *shape[4:]), stride=(*stride[:4], 0, *stride[4:]))
        return cute.make_composed_layout(whole.inner, 0, outer)

    def key_smem(self):
        """(key in piece, head_dim, 1, pieces, key head of stage)"""
        return layouts.piece_layout(self.dtype, self.tile, self.piece, self.head_dim, self.key_stages * self.kv_turn)

    def scale_slots(self):
        return self.tile * self.num_kv_heads * self.key_stages if self.has_k_scale else 4

    def storage_type(self):
        query_elements = self.columns * self.head_dim * QUERY_STAGES
        key_elements = self.tile * self.head_dim * self.key_stages * self.kv_turn
        scale_slots = self.scale_slots()

        @cute.struct
        class Storage:
            queries_full: cute.struct.MemRange[Int64, QUERY_STAGES]
            queries_free: cute.struct.MemRange[Int64, QUERY_STAGES]
            keys_full: cute.struct.MemRange[Int64, self.key_stages]
            keys_free: cute.struct.MemRange[Int64, self.key_stages]
            items: cute.struct.MemRange[Int32, 4 * QUERY_STAGES]
            lengths: cute.struct.MemRange[Int32, self.drafts * QUERY_STAGES]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.weight_slots * QUERY_STAGES], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, scale_slots], 128]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, query_elements], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, key_elements], 1024]

        return Storage

    # ---- device

    @cute.kernel
    def kernel(
        self,
        query_atom: cute.CopyAtom,
        query_tensor: cute.Tensor,
        key_atom: cute.CopyAtom,
        key_tensor: cute.Tensor,
        params: PagedMqaLogitsParams,  # without q, which the copy engine reads through its descriptor
        mma: cute.TiledMma,
        limit: Int32,
        batch: Int32,
    ):
        _, cache, weights, lengths, tables, out, scale, least = params
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type())
        if warp == 0:
            cpasync.prefetch_descriptor(query_atom)
            cpasync.prefetch_descriptor(key_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(QUERY_STAGES):
                    cute.arch.mbarrier_init(storage.queries_full.data_ptr() + stage, 33)
                    cute.arch.mbarrier_init(storage.queries_free.data_ptr() + stage, self.math_warps)
                for stage in cutlass.range_constexpr(self.key_stages):
                    cute.arch.mbarrier_init(storage.keys_full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.keys_free.data_ptr() + stage, self.math_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.registers.copy)
            if warp == 0:
                self.copy_warp(
                    storage, query_atom, query_tensor, key_atom, key_tensor, cache, lengths, tables, limit, batch, least
                )
            if warp == 1:
                self.publish_warp(storage, weights, lengths, limit, batch, least)
            if warp == FILL_WARP:
                self.prefetch_pages(tables, limit, batch)
            if cutlass.const_expr(self.clean):
                if warp >= FILL_WARP:
                    self.fill_warp(lengths, out, limit, batch, warp - FILL_WARP)
        else:
            cute.arch.setmaxregister_increase(self.registers.math)
            self.math_warpgroup(storage, out, scale, mma, warp // 4 - 1, warp % 4)

    @cute.jit
    def prefetch_pages(self, tables, limit, batch):
        """Table entries of this block's first keys, if sequences are as long as they can be. Lengths, table entries and keys
        come from memory one after the other, which is most of a short launch: here two of them travel together."""
        lane = cute.arch.lane_idx()
        job, tile = self.deal.likely_first(limit, batch * self.passes)
        page = cutlass.min((tile * self.tile + lane * self.piece) // self.page_size, cute.size(tables, mode=[1]) - 1)
        prefetch(tables.iterator + Int64(job // self.passes) * tables.stride[0] + page)

    @cute.jit
    def copy_warp(
        self, storage, query_atom, query_tensor, key_atom, key_tensor, cache, lengths, tables, limit, batch, least
    ):  # fmt: skip
        query_layout, key_layout = self.query_smem(), self.key_smem()
        s_queries = storage.queries.get_tensor(query_layout.outer, swizzle=query_layout.inner)
        s_keys = storage.keys.get_tensor(key_layout.outer, swizzle=key_layout.inner)
        g_keys = cute.local_tile(key_tensor, (self.piece, self.head_dim, 1), (None, None, None))
        single = cute.make_layout(1)
        to_keys, from_keys = cpasync.tma_partition(
            key_atom, 0, single, cute.group_modes(s_keys, 0, 3), cute.group_modes(g_keys, 0, 3)
        )
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        keys_full, keys_free = storage.keys_full.data_ptr(), storage.keys_free.data_ptr()
        scales_at = storage.scales.data_ptr()
        lane = cute.arch.lane_idx()
        jobs = batch * self.passes

        stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        job, tile, left = self.deal.first_work(lengths, limit, least, jobs)
        base = job
        lane_length = self.deal.job_length(lengths, limit, least, base + lane, jobs)
        while left > 0:
            if job - base == 32:
                base = job
                lane_length = self.deal.job_length(lengths, limit, least, base + lane, jobs)
            length = cute.arch.shuffle_sync(lane_length, job - base)
            tiles = cutlass.min(self.deal.tiles(length) - tile, left)
            if tiles > 0:
                sequence = job // self.passes
                line = tables.iterator + Int64(sequence) * tables.stride[0]
                first = tile * self.tile  # key of the item
                ahead = self.page_numbers(line, first, length, lane)
                cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(queries_full + stage, self.query_bytes)
                for kv_head in cutlass.range(self.num_kv_heads, unroll=1):
                    to_queries, from_queries = self.query_partition(query_atom, query_tensor, s_queries, kv_head)
                    for group in cutlass.range_constexpr(self.groups):
                        cute.copy(
                            query_atom,
                            from_queries[None, job % self.passes * self.groups + group, sequence],
                            to_queries[None, group, stage * self.num_kv_heads + kv_head],
                            tma_bar_ptr=queries_full + stage,
                        )
                stage, parity = self.advance(stage, parity, QUERY_STAGES)
                page = ahead
                for step in cutlass.range(tiles, unroll=1):
                    slot = step % self.tiles_per_load
                    key = first + step * self.tile
                    if slot == 0:
                        # The next entries are asked for a load ahead of their use.
                        page = ahead
                        ahead = self.page_numbers(line, key + self.tiles_per_load * self.tile, length, lane)
                    # Pieces beyond the last key are left out: no table entry stands for them, and no score is stored.
                    pieces = cutlass.min((length - key + (self.piece - 1)) >> self.piece_bits, self.pieces)
                    for turn in cutlass.range(self.kv_turns, unroll=1):
                        cute.arch.mbarrier_wait(keys_free + key_stage, key_parity ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(keys_full + key_stage, pieces * self.piece_bytes)
                        for piece in cutlass.range(pieces, unroll=1):
                            piece_page = cute.arch.shuffle_sync(page, slot * self.pieces + piece)
                            row = (key + piece * self.piece) % self.page_size
                            for nth in cutlass.range_constexpr(self.kv_turn):
                                cute.copy(
                                    key_atom,
                                    from_keys[None, row >> self.piece_bits, turn * self.kv_turn + nth, piece_page],
                                    to_keys[None, piece, key_stage * self.kv_turn + nth],
                                    tma_bar_ptr=keys_full + key_stage,
                                )
                            if cutlass.const_expr(self.has_k_scale):
                                scale_bytes = 4 * self.num_kv_heads  # of a key
                                in_page = self.page_size * self.num_kv_heads * self.head_dim + row * scale_bytes
                                source = cache.iterator + (Int64(piece_page) * cache.stride[0] + in_page)
                                place = (key_stage * self.tile + piece * self.piece) * self.num_kv_heads
                                with cute.arch.elect_one():
                                    copy_bulk(
                                        (scales_at + place).toint(),
                                        source.toint(),
                                        Int32(self.piece * scale_bytes),
                                        (keys_full + key_stage).toint(),
                                    )
                        key_stage, key_parity = self.advance(key_stage, key_parity, self.key_stages)
                left = left - tiles
            job = job + 1
            tile = Int32(0)
        # The end mark carries no bytes: only the arrival that queries_full counts.
        cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(queries_full + stage)

    def query_partition(self, query_atom, query_tensor, s_queries, kv_head):
        """Where the boxes of a key head's queries go and come from."""
        if self.num_kv_heads > 1:
            query_tensor = cute.domain_offset((0, 0, self.order.position(kv_head), 0, 0), query_tensor)
        g_queries = cute.local_tile(query_tensor, self.query_box(), (0, None, 0, 0, None))
        return cpasync.tma_partition(
            query_atom, 0, cute.make_layout(1), cute.group_modes(s_queries, 0, 5), cute.group_modes(g_queries, 0, 5)
        )

    @cute.jit
    def page_numbers(self, line, key, length, lane):
        """Table entries of the next 32 pieces from `key` on, one a lane; those beyond the last key repeat its entry."""
        index = cutlass.min(key + lane * self.piece, length - 1) // self.page_size
        return cute.make_tensor(line + index, cute.make_layout(1))[0]

    @cute.jit
    def publish_warp(self, storage, weights, lengths, limit, batch, least):
        lane = cute.arch.lane_idx()
        s_items = storage.items.get_tensor(cute.make_layout(4 * QUERY_STAGES))
        s_lengths = storage.lengths.get_tensor(cute.make_layout(self.drafts * QUERY_STAGES))
        s_weights = storage.weights.get_tensor(cute.make_layout(self.weight_slots * QUERY_STAGES))
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        jobs = batch * self.passes

        stage, parity = Int32(0), Int32(0)
        job, tile, left = self.deal.first_work(lengths, limit, least, jobs)
        base = job
        lane_length = self.deal.job_length(lengths, limit, least, base + lane, jobs)
        while left > 0:
            if job - base == 32:
                base = job
                lane_length = self.deal.job_length(lengths, limit, least, base + lane, jobs)
            length = cute.arch.shuffle_sync(lane_length, job - base)
            tiles = cutlass.min(self.deal.tiles(length) - tile, left)
            if tiles > 0:
                sequence = job // self.passes
                draft0 = job % self.passes * self.drafts
                cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
                if lane == 0:
                    s_items[4 * stage] = sequence * self.next_n + draft0
                    s_items[4 * stage + 1] = tile * self.tile
                    s_items[4 * stage + 2] = tiles
                for local in cutlass.range(lane, self.drafts, 32, unroll=1):
                    own = Int32(0)  # of a draft beyond the last: nothing is stored
                    if draft0 + local < self.next_n:
                        own = self.deal.row_length(lengths, limit, sequence, draft0 + local)
                    s_lengths[stage * self.drafts + local] = own
                if cutlass.const_expr(self.has_weights):
                    for column in cutlass.range(lane, self.weight_slots, 32, unroll=4):
                        draft = draft0 + column // self.num_heads
                        weight = Float32(0.0)
                        if draft < self.next_n:
                            offset = (Int64(sequence) * self.next_n + draft) * weights.stride[0] + column % self.num_heads
                            weight = Float32(cute.make_tensor(weights.iterator + offset, cute.make_layout(1))[0])
                        s_weights[stage * self.weight_slots + column] = weight
                cute.arch.mbarrier_arrive(queries_full + stage)
                stage, parity = self.advance(stage, parity, QUERY_STAGES)
                left = left - tiles
            job = job + 1
            tile = Int32(0)
        cute.arch.mbarrier_wait(queries_free + stage, parity ^ 1)
        if lane == 0:
            s_items[4 * stage] = Int32(END_OF_LIST)
        cute.arch.mbarrier_arrive(queries_full + stage)

    @cute.jit
    def fill_warp(self, lengths, out, limit, batch, half):
        """-inf from each row's length on. Rows are dealt over blocks; where they are few, parts of rows are."""
        columns = cute.size(out, mode=[1])
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rows = batch * self.next_n
        parts = cutlass.max(blocks // rows, 1)
        for unit in cutlass.range(block, rows * parts, blocks, unroll=1):
            row = unit // parts
            length = self.deal.row_length(lengths, limit, row // self.next_n, row % self.next_n)
            line = out.iterator + Int64(row) * out.stride[0]
            first = length + (unit % parts * 2 + half) * 32 + lane
            for column in cutlass.range(first, columns, parts * 64, unroll=4):
                cute.make_tensor(line + column, cute.make_layout(1))[0] = out.element_type(-Float32.inf)

    @cute.jit
    def math_warpgroup(self, storage, out, scale, mma, half, warp):
        lane = cute.arch.lane_idx()
        query_layout = layouts.operand_layout(self.dtype, self.product_columns, self.head_dim, QUERY_STAGES * self.num_kv_heads)
        key_layout = layouts.operand_layout(self.dtype, self.tile, self.head_dim, self.key_stages * self.kv_turn)
        s_queries = storage.queries.get_tensor(query_layout.outer, swizzle=query_layout.inner)
        s_keys = storage.keys.get_tensor(key_layout.outer, swizzle=key_layout.inner)
        s_items = storage.items.get_tensor(cute.make_layout(4 * QUERY_STAGES))
        s_lengths = storage.lengths.get_tensor(cute.make_layout(self.drafts * QUERY_STAGES))
        s_weights = storage.weights.get_tensor(cute.make_layout(self.weight_slots * QUERY_STAGES))
        s_scales = storage.scales.get_tensor(cute.make_layout(self.scale_slots()))
        queries_full, queries_free = storage.queries_full.data_ptr(), storage.queries_free.data_ptr()
        keys_full, keys_free = storage.keys_full.data_ptr(), storage.keys_free.data_ptr()

        thread_mma = mma.get_slice(0)
        halves = cute.local_tile(s_keys, (KEY_ROWS, self.head_dim), (None, 0, None))
        keys_operand = mma.make_fragment_A(thread_mma.partition_A(halves))
        queries_operand = mma.make_fragment_B(thread_mma.partition_B(s_queries))
        product_shape = thread_mma.partition_shape_C((KEY_ROWS, self.product_columns))
        if cutlass.const_expr(self.kv_turn > 1):
            product_shape = (*product_shape, self.kv_turn)
        products = cute.make_rmem_tensor(product_shape, Float32)
        held = cute.make_rmem_tensor(cute.make_layout(self.groups * self.lane_heads), Float32)  # weights of this lane
        ends = cute.make_rmem_tensor(cute.make_layout(self.groups), Int32)  # lengths of this lane's drafts
        totals = cute.make_rmem_tensor(cute.make_layout(2 * self.groups), Float32)  # over the key heads of a tile

        lanes = self.lanes_per_query
        part, draft = lane % lanes, lane % 4 // lanes  # of the quad: which heads of which draft
        key_lane = KEY_ROWS * half + 16 * warp + lane // 4  # this lane's first key in a tile; its second is 8 further
        store_lane = key_lane  # the key that this lane stores, where a draft's lanes share its two
        if cutlass.const_expr(lanes > 1):
            store_lane = key_lane + lane % 2 * 8

        if cutlass.const_expr(self.turns):
            if half == 1:
                self.pass_turn(0)

        stage, parity, key_stage, key_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(queries_full + stage, parity)
        row0 = s_items[4 * stage]
        while row0 >= 0:
            first, tiles = s_items[4 * stage + 1], s_items[4 * stage + 2]
            line = out.iterator + Int64(row0 + draft) * out.stride[0]
            for group in cutlass.range_constexpr(self.groups):
                local = stage * self.drafts + group * self.group_drafts + draft
                ends[group] = s_lengths[local]
                if cutlass.const_expr(lanes == 4):
                    if lane % 4 >= 2:  # lanes 2 and 3 end with the same sums as 0 and 1
                        ends[group] = Int32(0)
                if cutlass.const_expr(self.has_weights):
                    for head in cutlass.range_constexpr(self.lane_heads):
                        at = head // 2 * (2 * lanes) + head % 2
                        held[group * self.lane_heads + head] = s_weights[local * self.num_heads + 2 * part + at]
            for step in cutlass.range(tiles, unroll=1):
                key = first + step * self.tile + store_lane
                if cutlass.const_expr(self.num_kv_heads > 1):
                    totals.fill(0.0)
                for turn in cutlass.range_constexpr(self.kv_turns):
                    first_kv = turn * self.kv_turn
                    cute.arch.mbarrier_wait(keys_full + key_stage, key_parity)
                    if cutlass.const_expr(self.turns):
                        cute.arch.barrier(barrier_id=TURN_BARRIER + half, number_of_threads=2 * WARPGROUP)
                    warpgroup.fence()
                    for nth in cutlass.range_constexpr(self.kv_turn):
                        product = products
                        if cutlass.const_expr(self.kv_turn > 1):
                            product = products[None, None, None, nth]
                        for k_step in cutlass.range_constexpr(self.k_steps):
                            mma.set(warpgroup.Field.ACCUMULATE, k_step != 0)
                            cute.gemm(
                                mma,
                                product,
                                keys_operand[None, None, k_step, half, key_stage * self.kv_turn + nth],
                                queries_operand[None, None, k_step, stage * self.num_kv_heads + first_kv + nth],
                                product,
                            )
                            last = nth == self.kv_turn - 1 and k_step == self.k_steps - 1
                            if cutlass.const_expr(self.turns or last):
                                warpgroup.commit_group()
                    # Scales of the keys whose sums this lane ends with; with several key heads each sum is scaled before
                    # lanes exchange, so both keys'.
                    sides = cutlass.const_expr(1 if lanes > 1 and self.num_kv_heads == 1 else 2)
                    scale_lane = key_lane if self.num_kv_heads > 1 else store_lane
                    factor = cute.make_rmem_tensor(cute.make_layout(sides * self.kv_turn), Float32)
                    for nth in cutlass.range_constexpr(self.kv_turn):
                        for side in cutlass.range_constexpr(sides):
                            factor[nth * sides + side] = scale
                            if cutlass.const_expr(self.has_k_scale):
                                row = (key_stage * self.tile + scale_lane + 8 * side) * self.num_kv_heads
                                factor[nth * sides + side] = scale * s_scales[row + first_kv + nth]
                    if cutlass.const_expr(self.turns):
                        warpgroup.wait_group(1)  # while the last products run, the other warpgroup may queue its own
                        self.pass_turn(1 - half)
                    warpgroup.wait_group(0)
                    cute.arch.sync_warp()  # every lane's scales are read
                    if lane == 0:
                        cute.arch.mbarrier_arrive(keys_free + key_stage)
                    key_stage, key_parity = self.advance(key_stage, key_parity, self.key_stages)
                    for group in cutlass.range_constexpr(self.groups):
                        place = line + self.group_drafts * group * out.stride[0] + key
                        low, high = Float32(0.0), Float32(0.0)
                        if cutlass.const_expr(self.num_kv_heads == 1):
                            low, high = self.head_sums(products, held, group, 0, 0)
                        else:
                            for nth in cutlass.range_constexpr(self.kv_turn):
                                sums = self.head_sums(products, held, group, first_kv, nth)
                                totals[2 * group] = totals[2 * group] + sums[0] * factor[2 * nth]
                                totals[2 * group + 1] = totals[2 * group + 1] + sums[1] * factor[2 * nth + 1]
                            low, high = totals[2 * group], totals[2 * group + 1]
                        if cutlass.const_expr(turn == self.kv_turns - 1):
                            if cutlass.const_expr(self.num_kv_heads == 1 and lanes == 1):
                                low, high = low * factor[0], high * factor[1]
                            if cutlass.const_expr(lanes == 1):
                                store_between(out.element_type, place, low, key, 0, ends[group])
                                store_between(out.element_type, place + 8, high, key + 8, 0, ends[group])
                            else:
                                total = self.lane_sums(low, high, lane)
                                if cutlass.const_expr(self.num_kv_heads == 1):
                                    total = total * factor[0]
                                store_between(out.element_type, place, total, key, 0, ends[group])
            cute.arch.sync_warp()  # the other lanes' reads of lengths and weights come before the release
            if lane == 0:
                cute.arch.mbarrier_arrive(queries_free + stage)
            stage, parity = self.advance(stage, parity, QUERY_STAGES)
            cute.arch.mbarrier_wait(queries_full + stage, parity)
            row0 = s_items[4 * stage]
        if cutlass.const_expr(self.turns):
            if half == 0:
                cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, half):
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + half, number_of_threads=2 * WARPGROUP)

    def held_head(self, kv_head: int, odd: int, pair: int):
        """Which of a lane's heads stands at a slot; None for one that is to be left out."""
        if self.lanes_per_query == 1:
            return self.order.head(kv_head, odd, pair)
        return 2 * (kv_head * self.order.pairs + pair) + odd

    @cute.jit
    def head_sums(self, products, held, group: cutlass.Constexpr, first_kv: cutlass.Constexpr, nth: cutlass.Constexpr):
        """The two keys' sums over this lane's heads of one draft and one key head (the `nth`-th of a turn). Even and odd
        heads run as chains of their own."""
        parts = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)
        parts.fill(0.0)
        pairs = self.order.pairs
        for pair in cutlass.range_constexpr(pairs):
            for side in cutlass.range_constexpr(2):
                for odd in cutlass.range_constexpr(2):
                    head = self.held_head(first_kv + nth, odd, pair)
                    if cutlass.const_expr(head is not None):
                        value = products[odd + 2 * side + 4 * (group * pairs + pair) + nth * (self.product_columns // 2)]
                        if cutlass.const_expr(self.relu):
                            value = cute.arch.fmax(value, Float32(0.0))
                        if cutlass.const_expr(self.has_weights):
                            weight = held[group * self.lane_heads + head]
                            parts[side, odd] = parts[side, odd] + value * weight
                        else:
                            parts[side, odd] = parts[side, odd] + value
        return parts[0, 0] + parts[0, 1], parts[1, 0] + parts[1, 1]

    @cute.jit
    def lane_sums(self, low, high, lane):
        """The whole sum over heads of one of the two keys: even lanes take the first, odd lanes the second."""
        odd = lane % 2 != 0
        kept, given = low, high
        if odd:
            kept, given = high, low
        total = kept + cute.arch.shuffle_sync_bfly(given, 1)
        if cutlass.const_expr(self.lanes_per_query == 4):
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
        return total

    @cute.jit
    def advance(self, stage, parity, stages: cutlass.Constexpr):
        stage = stage + 1
        if stage == stages:
            stage = Int32(0)
            parity = parity ^ 1
        return stage, parity
