"""Host side of the two launches of a prefill, and the kernel that deals warps to roles."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gdn.ops.attention.problem import SparsePrefillParams
from kernels_cute.attention.prefill import unions
from kernels_cute.attention.prefill.copy import copy_warp
from kernels_cute.attention.prefill.math import math_warpgroup
from kernels_cute.attention.prefill.tiles import COPY_WARPS, PrefillTiles, lists_of
from kernels_cute.common.init_barriers import init_barriers


def params_of(values: tuple[Any, ...]) -> tuple[SparsePrefillParams, Any, Any, Any]:
    """A launch's values: Params, flat, the first tile, the number of tiles, the stream."""
    return SparsePrefillParams(*values[:-3]), *values[-3:]


class Unions:
    """The first launch: a block a tile."""

    def __init__(self, tiles: PrefillTiles) -> None:
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values):
        params, first_tile, num_tiles, stream = params_of(values)
        grid, block = [num_tiles, 1, 1], [self.tiles.union_threads, 1, 1]
        # The carveout is given so that the DSL does not ask a device for it while compiling.
        limits = {"min_blocks_per_mp": self.tiles.union_blocks, "preferred_smem_carveout": 100}
        self.kernel(params, first_tile, num_tiles).launch(grid=grid, block=block, stream=stream, **limits)

    @cute.kernel
    def kernel(self, params: SparsePrefillParams, first_tile: Int32, num_tiles: Int32):
        tiles = cutlass.const_expr(self.tiles)
        thread, number = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        storage = cutlass.utils.SmemAllocator().allocate(tiles.union_storage())
        unions.list_tile(tiles, storage, params, lists_of(tiles, params, first_tile, num_tiles), thread, number)


class Attend:
    """The second launch: persistent blocks that take items, a tile of one key head each."""

    def __init__(self, tiles: PrefillTiles) -> None:
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values):
        params, first_tile, num_tiles, stream = params_of(values)
        tiles = self.tiles
        grid, block = [cutlass.min(num_tiles * tiles.kv_heads, tiles.num_blocks), 1, 1], [tiles.threads, 1, 1]
        self.kernel(params, first_tile, num_tiles).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def kernel(self, params: SparsePrefillParams, first_tile: Int32, num_tiles: Int32):
        tiles = cutlass.const_expr(self.tiles)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage())
        lists = lists_of(tiles, params, first_tile, num_tiles)
        if warp == 0:
            with cute.arch.elect_one():
                init_barriers(tiles.barriers, storage, Int32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < COPY_WARPS:
            cute.arch.setmaxregister_decrease(tiles.copy_registers)
            copy_warp(tiles, storage, params, lists, warp, lane)
        else:
            cute.arch.setmaxregister_increase(tiles.math_registers)
            math_warpgroup(tiles, storage, params, lists, warp // 4 - 1, warp % 4, lane)
