"""The ragged logits kernel: keys are the M operand (64 rows a tile), queries x heads the N operand.

With several key heads a tile is taken in rounds of `kv_heads_per_round` key heads: one product for each key head, of the query
heads that belong to it. The scores of a tile add up in registers over its rounds.

A block keeps a tile of queries in shared memory (half of them for each math warpgroup) and streams key tiles past it; both
warpgroups read the same key tile, in turns, so that one sums over heads while the tensor cores work for the other.

Warps of the first warpgroup: 0 copies (ragged_copy: queries once an item, keys through a ring), 1 publishes the item
(ragged_publish: ranges and weights in float32), 2 and 3 write -inf outside of every row's range (ragged_fill). Warpgroups 1 and
2 multiply and write the scores (ragged_math, ragged_stores).

An item is (query tile, span of key tiles). Items are dealt round robin, the last of them where wanted in runs that make all
blocks' loads equal (ragged_schedule); warps 0 and 1 derive the same list from the same ranges and pass over items that no
range touches, the others only see what is published; query row END_OF_LIST ends the list. Barriers: ragged_tiles.barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.problems import MqaLogitsParams
from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.barriers import arrive_named, initialise
from kernels_cute.mqa_logits.constants import COPY_WARP, FILL_WARP, KEY_ROWS, PUBLISH_WARP, WARPGROUP
from kernels_cute.mqa_logits.products import mma_op
from kernels_cute.mqa_logits.ragged_copy import copy_warp
from kernels_cute.mqa_logits.ragged_fill import fill_warp
from kernels_cute.mqa_logits.ragged_math import math_warpgroup
from kernels_cute.mqa_logits.ragged_publish import publish_warp
from kernels_cute.mqa_logits.ragged_schedule import clear_costs, head_items, sum_costs
from kernels_cute.mqa_logits.ragged_tiles import NUM_WARPS, RaggedTiles, Tma, Work

FILL_TILES = 32  # key tiles' worth of columns that a warp fills with -inf at a time, at most


class RaggedLogits:
    """The host side of a launch and the kernel that deals warps to roles."""

    def __init__(self, tiles: RaggedTiles):
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values):
        """values: MqaLogitsParams, flat, and the stream."""
        params, stream = MqaLogitsParams(*values[:-1]), values[-1]
        tiles, out = self.tiles, params.out
        mma = cute.make_tiled_mma(mma_op(tiles.dtype, tiles.product_columns // tiles.accumulator_sets))
        num_queries, num_keys = cute.size(params.q, mode=[0]), cute.size(params.k, mode=[0])
        tma = self.descriptors(params, num_queries, num_keys)
        columns = cute.size(out, mode=[1])
        query_tiles = cute.ceil_div(num_queries, tiles.queries)
        # Packed columns count from a row's own first key, so both key tiles and columns must be covered.
        key_tiles = cute.ceil_div(cutlass.max(num_keys, columns), KEY_ROWS)
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
        self.kernel(*tma, params._replace(q=None, k=None), mma, work).launch(
            grid=(blocks, 1, 1), block=(32 * NUM_WARPS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def pieces(self, length, piece):
        """ceil(length / piece). Not the DSL's own: it fails where the compiler finds a piece to be 1."""
        return (length + piece - 1) // piece

    def descriptors(self, params, num_queries, num_keys) -> Tma:
        tiles = self.tiles
        heads, dim = tiles.num_heads, tiles.head_dim
        (in_run, positions), (run_stride, position_stride) = tiles.order.view(dim)
        q_layout = cute.make_layout(
            (in_run, num_queries, positions, dim), stride=(run_stride, heads * dim, position_stride, 1)
        )  # fmt: skip
        q_view = cute.make_tensor(params.q.iterator, q_layout)
        key_row = tiles.num_kv_heads * dim
        k_view = cute.make_tensor(params.k.iterator, cute.make_layout((num_keys, key_row), stride=(key_row, 1)))
        copy = cpasync.CopyBulkTensorTileG2SOp()
        query_smem, key_smem = layouts.leading(tiles.query_smem(), 4), cute.slice_(tiles.key_smem(), (None, None, 0))
        queries = cpasync.make_tiled_tma_atom(copy, q_view, query_smem, tiles.query_box())
        keys = cpasync.make_tiled_tma_atom(copy, k_view, key_smem, (KEY_ROWS, dim))
        return Tma(*queries, *keys)

    @cute.kernel
    def kernel(
        self,
        query_atom: cute.CopyAtom,
        query_tensor: cute.Tensor,
        key_atom: cute.CopyAtom,
        key_tensor: cute.Tensor,
        params: MqaLogitsParams,  # without q and k, which the copy engine reads through its descriptors
        mma: cute.TiledMma,
        work: Work,
    ):
        tiles, tma = self.tiles, Tma(query_atom, query_tensor, key_atom, key_tensor)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage_type())
        if warp == COPY_WARP:
            cpasync.prefetch_descriptor(query_atom)
            cpasync.prefetch_descriptor(key_atom)
            with cute.arch.elect_one():
                initialise(tiles.barriers, storage)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(tiles.balanced_fraction > 0):
            clear_costs(tiles, storage)
        if cutlass.const_expr(tiles.balanced_fraction == 8):
            cute.arch.sync_threads()
            sum_costs(tiles, storage, params, work, warp, NUM_WARPS)
        cute.arch.sync_threads()

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(tiles.copy_registers)
            if warp == COPY_WARP:
                copy_warp(tiles, storage, tma, params, work)
            if warp == PUBLISH_WARP:
                publish_warp(tiles, storage, params, work)
            if cutlass.const_expr(0 < tiles.balanced_fraction < 8):
                if warp >= FILL_WARP:
                    sum_costs(tiles, storage, params, work, warp - FILL_WARP, 2)
                    arrive_named(tiles.barriers.costs)
            if cutlass.const_expr(tiles.clean):
                if warp >= FILL_WARP:
                    fill_warp(tiles, params, work, warp - FILL_WARP)
        else:
            cute.arch.setmaxregister_increase(tiles.math_registers)
            math_warpgroup(tiles, storage, params, mma, warp // 4 - 1, warp % 4)
