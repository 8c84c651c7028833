"""Pair of logits kernels: keys are the M operand (64 rows a math warpgroup), queries x heads the N operand (paged: the drafts of
one sequence x heads). Data flow, rounds of several key heads, deal of items: DESIGN.md.

Warps of the first warpgroup: 0 copies (copy: queries once an item, keys through a ring), 1 publishes the item (publish: ranges or
lengths, and weights in float32), 2 and 3 write -inf outside of every row's range (fill). The other warpgroups multiply and write
the scores (ragged_math, paged_math). Warps 0 and 1 derive the same list of items from the same ranges or
lengths, the others only see what is published; query row END_OF_LIST ends the list.

An item is, ragged, a query tile (half of it for each math warpgroup, which both read the same key tiles) and a span of key tiles;
items that no range touches are passed over. Paged it is a run of tiles of one job (paged_schedule); a tile is gathered from pages
in pieces of gcd(page_size, tile) keys.
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.ops.indexer.problem import MqaLogitsParams, PagedMqaLogitsParams
from kernels_cute.mqa_logits import copy, fill, layouts, paged_math, publish, ragged_math
from kernels_cute.mqa_logits.barriers import COSTS, arrive_named, initialise
from kernels_cute.mqa_logits.orders import KEY_ROWS
from kernels_cute.mqa_logits.products import tiled_mma
from kernels_cute.mqa_logits.ragged_schedule import clear_costs, head_items, sum_costs
from kernels_cute.mqa_logits.tiles import Lengths, LogitsTiles, PagedTiles, RaggedTiles, Tma, Work

FILL_TILES = 32  # key tiles' worth of columns that a warp fills with -inf at a time, at most


class Role(IntEnum):
    """First warp of each role of a block."""

    COPY = 0
    PUBLISH = 1
    FILL = 2  # two warps
    MATH = 4


def descriptors(tiles, q, query_rows, batches, k_view) -> Tma:
    """query_rows: of a batch; batches: an empty tuple, or their number."""
    heads, dim = tiles.num_heads, tiles.head_dim
    (in_run, positions), (run_stride, position_stride) = tiles.order.view(dim)
    shape = (in_run, query_rows, positions, dim, *batches)
    stride = (run_stride, heads * dim, position_stride, 1, *[query_rows * heads * dim] * len(batches))
    q_view = cute.make_tensor(q.iterator, cute.make_layout(shape, stride=stride))
    copy_op, key_smem = cpasync.CopyBulkTensorTileG2SOp(), tiles.key_smem()
    key_modes = (None,) * len(tiles.key_box) + (0,) * (cute.rank(key_smem) - len(tiles.key_box))
    queries = cpasync.make_tiled_tma_atom(copy_op, q_view, layouts.leading(tiles.query_smem(), len(shape)), tiles.query_box)
    return Tma(*queries, *cpasync.make_tiled_tma_atom(copy_op, k_view, cute.slice_(key_smem, key_modes), tiles.key_box))


@cute.jit
def begin(tiles: LogitsTiles, storage: Any, tma: Tma, warp: Int32):
    """Prepare, in the copying warp, descriptors and barriers; the caller synchronises."""
    if warp == Role.COPY:
        cpasync.prefetch_descriptor(tma.query_atom)
        cpasync.prefetch_descriptor(tma.key_atom)
        with cute.arch.elect_one():
            initialise(tiles.barriers, storage)
    cute.arch.mbarrier_init_fence()


class RaggedLogits:
    """The host side of a ragged launch and the kernel that deals warps to roles."""

    def __init__(self, tiles: RaggedTiles):
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values: Any):
        """values: MqaLogitsParams, flat, and the stream."""
        params, stream = MqaLogitsParams(*values[:-1]), values[-1]
        tiles = self.tiles
        num_queries, num_keys = cute.size(params.q, mode=[0]), cute.size(params.k, mode=[0])
        key_row = tiles.num_kv_heads * tiles.head_dim
        k_view = cute.make_tensor(params.k.iterator, cute.make_layout((num_keys, key_row), stride=(key_row, 1)))
        tma = descriptors(tiles, params.q, num_queries, (), k_view)
        query_tiles = cute.ceil_div(num_queries, tiles.queries)
        # Packed columns count from a row's own first key, so both key tiles and columns must be covered.
        key_tiles = cute.ceil_div(cutlass.max(num_keys, cute.size(params.out, mode=[1])), KEY_ROWS)
        all_tiles = Int64(query_tiles) * key_tiles
        # Enough items for equal loads, none so small that loading its queries shows.
        wanted = Int32(all_tiles // (tiles.num_blocks * 8))
        item_tiles = cutlass.max(cutlass.min(wanted, tiles.tiles_per_item), min(4, tiles.tiles_per_item))
        fill_tiles = item_tiles
        most_blocks = Int64(tiles.num_blocks)
        if cutlass.const_expr(tiles.balanced_fraction == 8):
            # Nothing but runs: an item needs no end but where its keys would leave the L2 cache.
            fill_tiles = cutlass.max(cutlass.min(wanted, FILL_TILES), 4)
            item_tiles = cutlass.max(cutlass.min(key_tiles, tiles.tiles_per_item), 1)
        num_items = query_tiles * self.pieces(key_tiles, item_tiles)
        fill_items = query_tiles * self.pieces(key_tiles, fill_tiles)
        if cutlass.const_expr(tiles.balanced_fraction > 0):
            blocks = cutlass.max(Int32(cutlass.min(all_tiles, most_blocks)), 1)
        else:
            blocks = cutlass.max(cutlass.min(num_items, tiles.num_blocks), 1)
        first_items = head_items(tiles, all_tiles, num_items, blocks)
        work = Work(num_keys, query_tiles, item_tiles, num_items, first_items, fill_tiles, fill_items)
        self.kernel(tma, params._replace(q=None, k=None), tiled_mma(tiles), work).launch(
            grid=(blocks, 1, 1), block=(32 * tiles.num_warps, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def pieces(self, length, piece):
        """ceil(length / piece). Not the DSL's own: it fails where the compiler finds a piece to be 1."""
        return (length + piece - 1) // piece

    @cute.kernel
    def kernel(self, tma: Tma, params: MqaLogitsParams, mma: cute.TiledMma, work: Work):
        """params: without q and k, which the copy engine reads through its descriptors."""
        tiles = self.tiles
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage_type())
        begin(tiles, storage, tma, warp)
        if cutlass.const_expr(tiles.balanced_fraction > 0):
            clear_costs(tiles, storage)
        if cutlass.const_expr(tiles.balanced_fraction == 8):
            cute.arch.sync_threads()
            sum_costs(tiles, storage, params, work, warp, tiles.num_warps)
        cute.arch.sync_threads()

        if warp < Role.MATH:
            cute.arch.setmaxregister_decrease(tiles.copy_registers)
            if warp == Role.COPY:
                copy.ragged_warp(tiles, storage, tma, params, work)
            if warp == Role.PUBLISH:
                publish.ragged_warp(tiles, storage, params, work)
            if cutlass.const_expr(0 < tiles.balanced_fraction < 8):
                if warp >= Role.FILL:
                    sum_costs(tiles, storage, params, work, warp - Role.FILL, 2)
                    arrive_named(COSTS)
            if cutlass.const_expr(tiles.clean):
                if warp >= Role.FILL:
                    fill.ragged_warp(tiles, params, work, warp - Role.FILL)
        else:
            cute.arch.setmaxregister_increase(tiles.math_registers)
            ragged_math.math_warpgroup(tiles, storage, params, mma, warp // 4 - 1, warp % 4)


class PagedLogits:
    """The host side of a paged launch and the kernel that deals warps to roles."""

    def __init__(self, tiles: PagedTiles):
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values: Any):
        """values: PagedMqaLogitsParams, flat, the most keys that a draft can see, and the stream."""
        params, most_keys, stream = PagedMqaLogitsParams(*values[:-2]), values[-2], values[-1]
        tiles, cache = self.tiles, params.cache
        batch = cute.size(params.q, mode=[0])
        keys = cute.recast_ptr(cache.iterator, dtype=tiles.dtype) if tiles.has_k_scale else cache.iterator
        page_stride = cute.assume(cache.stride[0], divby=128 // tiles.dtype.width)
        key_row, pages = tiles.num_kv_heads * tiles.head_dim, cute.size(cache, mode=[0])
        k_view = cute.make_tensor(keys, cute.make_layout((tiles.page_size, key_row, pages), stride=(key_row, 1, page_stride)))
        tma = descriptors(tiles, params.q, tiles.next_n, (batch,), k_view)
        grid, block = (tiles.blocks, 1, 1), (32 * tiles.num_warps, 1, 1)
        # The carveout is given so that the DSL does not ask a device for it while compiling.
        limits = {"min_blocks_per_mp": tiles.blocks_per_sm, "preferred_smem_carveout": 100}
        kernel = self.kernel(tma, params._replace(q=None), tiled_mma(tiles), most_keys, batch)
        kernel.launch(grid=grid, block=block, stream=stream, **limits)

    @cute.kernel
    def kernel(self, tma: Tma, params: PagedMqaLogitsParams, mma: cute.TiledMma, most_keys: Int32, batch: Int32):
        """params: without q, which the copy engine reads through its descriptor."""
        tiles = self.tiles
        lengths = Lengths(params.context_lens, most_keys, batch, params.skip_rows_up_to)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage_type())
        begin(tiles, storage, tma, warp)
        cute.arch.sync_threads()

        if warp < Role.MATH:
            cute.arch.setmaxregister_decrease(tiles.registers.copy)
            if warp == Role.COPY:
                copy.paged_warp(tiles, storage, tma, params, lengths)
            if warp == Role.PUBLISH:
                publish.paged_warp(tiles, storage, params, lengths)
            if warp == Role.FILL:
                copy.prefetch_pages(tiles, params, lengths)
            if cutlass.const_expr(tiles.clean):
                if warp >= Role.FILL:
                    fill.paged_warp(tiles, params, lengths, warp - Role.FILL)
        else:
            cute.arch.setmaxregister_increase(tiles.registers.math)
            paged_math.math_warpgroup(tiles, storage, params, mma, warp // 4 - 1, warp % 4)
