"""Host side of the two launches of a prefill, and the kernel that deals warps to roles."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.attention import prefill_copy, prefill_math
from kernels_cute.attention.prefill_tiles import COPY_WARPS, PrefillTiles, lists_of
from kernels_cute.attention.unions import Unions
from kernels_cute.common.barriers import init_barriers


class UnionsLaunch(Unions):
    """A block a tile."""

    def __init__(self, tiles: PrefillTiles, params: Any) -> None:
        super().__init__(tiles)
        self.params = params  # the Params type

    @cute.jit
    def __call__(self, *values):
        """values: Params, flat, the first tile of the launch, the number of tiles, and the stream."""
        params, (first_tile, num_tiles, stream) = self.params(*values[:-3]), values[-3:]
        grid, block = [num_tiles, 1, 1], [self.tiles.union_threads, 1, 1]
        self.kernel(params, first_tile, num_tiles).launch(grid=grid, block=block, stream=stream)


class AttendLaunch:
    """Persistent blocks that take items, a tile of one key head each."""

    def __init__(self, tiles: PrefillTiles, params: Any) -> None:
        self.tiles, self.params = tiles, params

    @cute.jit
    def __call__(self, *values):
        """values: as above."""
        params, (first_tile, num_tiles, stream) = self.params(*values[:-3]), values[-3:]
        tiles = self.tiles
        grid, block = [cutlass.min(num_tiles * tiles.kv_heads, Int32(tiles.num_blocks)), 1, 1], [tiles.threads, 1, 1]
        self.kernel(params, first_tile, num_tiles).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def kernel(self, params, first_tile: Int32, num_tiles: Int32):
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
            prefill_copy.copy_warp(tiles, storage, params, lists, warp, lane)
        else:
            cute.arch.setmaxregister_increase(tiles.math_registers)
            prefill_math.math_warpgroup(tiles, storage, params, lists, warp // 4 - 1, warp % 4, lane)
