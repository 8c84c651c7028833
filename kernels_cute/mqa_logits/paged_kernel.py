"""The paged logits kernel: keys are the M operand (64 rows a math warpgroup), drafts x heads of one sequence the N operand.

With several key heads a tile is taken in rounds of `kv_heads_per_round` key heads: one product for each key head, of the query
heads that belong to it. The scores of a tile add up in registers over its rounds.

A block streams the key tiles of its run (paged_schedule) through a ring; a tile is gathered from pages in pieces of
gcd(page_size, tile) keys, each a box of the copy engine, its scales a plain bulk copy (whose destination needs 16 bytes only).

Warps of the first warpgroup: 0 copies (paged_copy: queries once an item, keys through the ring), 1 publishes the item
(paged_publish: lengths and weights in float32), 2 prefetches the block's likely first table entries, 2 and 3 write -inf beyond
every row's length (paged_fill). The other warpgroups multiply and write the scores (paged_math).

An item is a run of tiles of one job. Warps 0 and 1 derive the same items from the same lengths; the others only see what is
published; row END_OF_LIST ends the list. Barriers: paged_tiles.barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from gdn.problems import PagedMqaLogitsParams
from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.barriers import initialise
from kernels_cute.mqa_logits.constants import COPY_WARP, FILL_WARP, PUBLISH_WARP, WARPGROUP
from kernels_cute.mqa_logits.paged_copy import copy_warp, prefetch_pages
from kernels_cute.mqa_logits.paged_fill import fill_warp
from kernels_cute.mqa_logits.paged_math import math_warpgroup
from kernels_cute.mqa_logits.paged_publish import publish_warp
from kernels_cute.mqa_logits.paged_tiles import Lengths, PagedTiles, Tma
from kernels_cute.mqa_logits.products import mma_op


class PagedLogits:
    """The host side of a launch and the kernel that deals warps to roles."""

    def __init__(self, tiles: PagedTiles):
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values):
        """values: PagedMqaLogitsParams, flat, the most keys that a draft can see, and the stream."""
        params, most_keys, stream = PagedMqaLogitsParams(*values[:-2]), values[-2], values[-1]
        tiles = self.tiles
        mma = cute.make_tiled_mma(mma_op(tiles.dtype, tiles.product_columns))
        batch = cute.size(params.q, mode=[0])
        self.kernel(*self.descriptors(params, batch), params._replace(q=None), mma, most_keys, batch).launch(
            grid=(tiles.blocks, 1, 1),
            block=(32 * tiles.num_warps, 1, 1),
            min_blocks_per_mp=tiles.blocks_per_sm,
            preferred_smem_carveout=100,  # given so that the DSL does not ask a device for it while compiling
            stream=stream,
        )

    def descriptors(self, params, batch) -> Tma:
        tiles = self.tiles
        heads, dim, next_n = tiles.num_heads, tiles.head_dim, tiles.next_n
        (in_run, positions), (run_stride, position_stride) = tiles.order.view(dim)
        q_layout = cute.make_layout(
            (in_run, next_n, positions, dim, batch), stride=(run_stride, heads * dim, position_stride, 1, next_n * heads * dim)
        )
        values = params.cache.iterator
        if tiles.has_k_scale:
            values = cute.recast_ptr(values, dtype=tiles.dtype)
        page_stride = cute.assume(params.cache.stride[0], divby=128 // tiles.dtype.width)
        key_row = tiles.num_kv_heads * dim
        pages = cute.size(params.cache, mode=[0])
        k_layout = cute.make_layout((tiles.page_size, key_row, pages), stride=(key_row, 1, page_stride))
        copy = cpasync.CopyBulkTensorTileG2SOp()
        query_smem, key_smem = layouts.leading(tiles.query_smem(), 5), tiles.key_smem()
        q_view, k_view = cute.make_tensor(params.q.iterator, q_layout), cute.make_tensor(values, k_layout)
        queries = cpasync.make_tiled_tma_atom(copy, q_view, query_smem, tiles.query_box())
        key_smem = cute.slice_(key_smem, (None, None, None, 0, 0))
        return Tma(*queries, *cpasync.make_tiled_tma_atom(copy, k_view, key_smem, (tiles.piece, dim, 1)))

    @cute.kernel
    def kernel(
        self,
        query_atom: cute.CopyAtom,
        query_tensor: cute.Tensor,
        key_atom: cute.CopyAtom,
        key_tensor: cute.Tensor,
        params: PagedMqaLogitsParams,  # without q, which the copy engine reads through its descriptor
        mma: cute.TiledMma,
        most_keys: Int32,
        batch: Int32,
    ):
        tiles, tma = self.tiles, Tma(query_atom, query_tensor, key_atom, key_tensor)
        lengths = Lengths(params.context_lens, most_keys, batch, params.skip_rows_up_to)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage_type())
        if warp == COPY_WARP:
            cpasync.prefetch_descriptor(query_atom)
            cpasync.prefetch_descriptor(key_atom)
            with cute.arch.elect_one():
                initialise(tiles.barriers, storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(tiles.registers.copy)
            if warp == COPY_WARP:
                copy_warp(tiles, storage, tma, params, lengths)
            if warp == PUBLISH_WARP:
                publish_warp(tiles, storage, params, lengths)
            if warp == FILL_WARP:
                prefetch_pages(tiles, params, lengths)
            if cutlass.const_expr(tiles.clean):
                if warp >= FILL_WARP:
                    fill_warp(tiles, params, lengths, warp - FILL_WARP)
        else:
            cute.arch.setmaxregister_increase(tiles.registers.math)
            math_warpgroup(tiles, storage, params, mma, warp // 4 - 1, warp % 4)
