"""Host side of dense prefill, and the kernel that deals warps to roles."""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.ops.attention.problem import AttentionPrefillParams
from kernels_cute.attention.dense.copy import Maps, Tile, copy_warp
from kernels_cute.attention.dense.math import math_warpgroup
from kernels_cute.attention.dense.tiles import COPY_REGISTERS, MATH_REGISTERS, THREADS, DenseTiles
from kernels_cute.attention.tile import tile_of
from kernels_cute.common.init_barriers import init_barriers


class Role(IntEnum):
    """First warp of each role of a block."""

    COPY = 0  # one warp of its warpgroup
    MATH = 4


def usable(size: Any, stride: Any) -> Any:
    """A stride for the copy engine, which wants multiples of 16 bytes: that of a dim of one entry may be any, and is not used."""
    return cute.assume(cutlass.select_(size == 1, Int64(8), Int64(stride)), divby=8)


class AttendDensely:
    """A block a (tile, key head), or a cluster of `splits` blocks."""

    def __init__(self, tiles: DenseTiles) -> None:
        self.tiles = tiles

    @cute.jit
    def __call__(self, *values: Any):
        """values: the Params, flat, and the stream."""
        params, stream = AttentionPrefillParams(*values[:-1]), values[-1]
        tiles, tokens = self.tiles, cute.size(params.q, mode=[0])
        shape = (tiles.group, tokens, tiles.dim, tiles.kv_heads)
        stride = (tiles.dim, usable(tokens, params.q.stride[0]), 1, tiles.group * tiles.dim)
        queries = cute.make_tensor(params.q.iterator, cute.make_layout(shape, stride=stride))
        load = cpasync.CopyBulkTensorTileG2SOp()
        maps = Maps(
            *cpasync.make_tiled_tma_atom(load, queries, tiles.query_smem(), tiles.query_box),
            *self.cache_map(params.k_cache),
            *self.cache_map(params.v_cache),
        )
        num_tiles = tokens // tiles.queries + cute.size(params.seq_lens) + 1
        self.kernel(maps, params, num_tiles).launch(
            grid=[num_tiles * tiles.kv_heads * tiles.splits, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream,
            **({"cluster": [tiles.splits, 1, 1]} if tiles.splits > 1 else {}),
        )  # fmt: skip

    def cache_map(self, cache: Any) -> Any:
        tiles, blocks = self.tiles, cute.size(cache, mode=[0])
        shape = (tiles.block_size, tiles.dim, tiles.kv_heads, blocks)
        head = cute.assume(cache.stride[2], divby=8) if tiles.kv_heads > 1 else tiles.dim
        stride = (cute.assume(cache.stride[1], divby=8), 1, head, usable(blocks, cache.stride[0]))
        rows = cute.make_tensor(cache.iterator, cute.make_layout(shape, stride=stride))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, tiles.cache_smem(0), tiles.cache_box)

    @cute.kernel
    def kernel(self, maps: Maps, params: AttentionPrefillParams, num_tiles: Int32):
        tiles = cutlass.const_expr(self.tiles)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage())
        if warp == Role.COPY:
            for atom in (maps.query_atom, maps.key_atom, maps.value_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                init_barriers(tiles.barriers, storage, Int32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Key heads one after the other: blocks that run together share one head's keys and values in L2. The last tiles first:
        # within a sequence they see most.
        item, rank = cute.arch.block_idx()[0], 0
        if cutlass.const_expr(tiles.splits > 1):
            item, rank = item // tiles.splits, item % tiles.splits
        sequence, first, count, position = tile_of(tiles, params, num_tiles - 1 - item % num_tiles)
        limit = cutlass.max(position + count, 0)
        addressed = Int64(params.block_tables.shape[1]) * tiles.block_size
        if addressed < Int64(limit):
            limit = Int32(addressed)
        steps = (limit + (tiles.step - 1)) // tiles.step
        newest, oldest = steps - 1, 0
        if cutlass.const_expr(tiles.splits > 1):
            newest, oldest = newest - rank * steps // tiles.splits, steps - (rank + 1) * steps // tiles.splits
        tile = Tile(sequence, first, count, position, limit, item // num_tiles, rank, newest, oldest)
        if count > 0:
            if warp < Role.MATH:
                cute.arch.setmaxregister_decrease(COPY_REGISTERS)
                if warp == Role.COPY and newest >= oldest:
                    copy_warp(tiles, storage, maps, params, tile, lane)
            else:
                cute.arch.setmaxregister_increase(MATH_REGISTERS)
                math_warpgroup(tiles, storage, params, tile, warp // 4 - 1, warp % 4, lane)
