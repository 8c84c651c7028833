"""Numbers and addresses that the two prefill kernels share: tiles of queries, the lists of their positions in the workspace,
shared memory, barriers.

A tile is up to `queries` neighbouring query tokens of one sequence with the `group` query heads of one key head: 128 rows, row =
query * group + head. Tile t of a launch belongs to the last sequence s with query_start_loc[s] // queries + s <= t: no two
sequences share a number, some numbers stay empty, and nobody has to add up lengths. Sequence N is the padding after the last.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute.attention.prefill.shape import (
    HEADER_BYTES,
    STEP,
    TILE_WORDS,
    mask_bytes,
    queries_of_tile,
)
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable
from kernels_cute.common.memory import CUTE_DTYPES

PIECE_BYTES = 128  # of a row in shared memory: the widest swizzle
COPY_WARPS, MATH_WARPS = 4, 8
COPY_THREADS = 32 * COPY_WARPS
COPY_BARRIER = 1  # named: the copy warps meet where they take an item
ITEM_WORDS = 8  # of an item's record in shared memory: steps, first token, queries, key head, tile


def barriers(key_stages: int, value_stages: int) -> BarrierTable:
    """Make three rings: an item's queries with its record (one stage), keys with their masks, and values. A thread arrives once
    on x_full when its copies complete. The dealer is the first copy warp, which takes the items."""
    copied, read = Arrivals("copy", "thread", what="copied"), Arrivals("math", "warp", what="read")
    record = Arrivals("dealer", "role", what="record")
    return BarrierTable(
        {"copy": COPY_WARPS, "dealer": 1, "math": MATH_WARPS},
        [
            Barrier("queries_full", 1, (copied, record), ("math",)),
            Barrier("queries_free", 1, (read,), ("copy",)),
            Barrier("keys_full", key_stages, (copied,), ("math",)),
            Barrier("keys_free", key_stages, (read,), ("copy",)),
            Barrier("values_full", value_stages, (copied,), ("math",)),
            Barrier("values_free", value_stages, (read,), ("copy",)),
        ],
    )


class PrefillTiles:
    """Compile-time constants of a pair of kernels; sizes, strides and the scale arrive at launch."""

    def __init__(self, problem: Any, config: Any) -> None:
        self.heads, self.kv_heads, self.dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.dtype, self.has_gate = CUTE_DTYPES[problem.dtype], problem.has_gate
        self.group, self.block_size = self.heads // self.kv_heads, problem.block_size
        self.queries, self.mask_bytes = queries_of_tile(self.group), mask_bytes(self.group)
        self.step, self.copied_by_threads = STEP, True
        self.row_bytes = 2 * self.dim
        self.units = self.row_bytes // 16  # of a row: 16 bytes, a lane's copy
        self.lane_rows = 32 // self.units  # rows that a warp copies with one instruction
        self.stage_bytes = STEP * self.row_bytes
        self.key_stages, self.value_stages, self.num_blocks = config.key_stages, config.value_stages, config.num_blocks
        self.window, self.union_threads = config.window, config.union_threads
        # Blocks of the first launch that fit on a multiprocessor: caps the registers of a thread.
        self.union_blocks = max(1, min(1536 // self.union_threads, 227 * 1024 // (self.window * self.mask_bytes + 1280)))
        self.threads = COPY_THREADS + 32 * MATH_WARPS
        # With 128 + 256 threads: the 168 a thread at launch.
        self.copy_registers, self.math_registers = 56, 224
        self.barriers = barriers(self.key_stages, self.value_stages)

    def storage(self) -> Any:
        fields: dict[str, Any] = {name: cute.struct.MemRange[Int64, one.stages] for name, one in self.barriers.barriers.items()}
        fields["records"] = cute.struct.MemRange[Int32, 2 * ITEM_WORDS]
        fields["taken"] = cute.struct.MemRange[Int32, 2 * ITEM_WORDS]
        fields["masks"] = cute.struct.Align[cute.struct.MemRange[Uint32, self.key_stages * STEP * self.mask_bytes // 4], 128]
        step = STEP * self.dim
        for name, count in (("queries", 2), ("keys", self.key_stages), ("values", self.value_stages)):
            fields[name] = cute.struct.Align[cute.struct.MemRange[self.dtype, count * step], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": fields}))

    def union_storage(self) -> Any:
        fields = {
            "table": cute.struct.Align[cute.struct.MemRange[Uint32, self.window * self.mask_bytes // 4], 16],
            "sums": cute.struct.MemRange[Int32, 32],
        }
        return cute.struct(type("UnionStorage", (), {"__annotations__": fields}))


class Lists(NamedTuple):
    """The workspace of a launch."""

    base: Any  # address
    capacity: Any  # positions of a tile
    first_tile: Any  # of the launch
    num_tiles: Any


@cute.jit
def lists_of(tiles: cutlass.Constexpr, params, first_tile, num_tiles):
    context = Int64(params.block_tables.shape[1]) * tiles.block_size
    most = Int64(params.topk_indices.shape[1]) * tiles.queries
    if context < most:
        most = context
    return Lists(params.workspace.iterator.toint(), (Int32(most) + (STEP - 1)) // STEP * STEP, first_tile, num_tiles)


def record_address(lists: Any, number: Any) -> Any:
    """Record of a tile; number: of the tile in the launch."""
    return lists.base + (HEADER_BYTES + Int64(number) * (4 * TILE_WORDS))


def rows_address(lists: Any, number: Any) -> Any:
    """Cache rows (block * block_size + row in it) of a tile's positions, int32."""
    return lists.base + (HEADER_BYTES + Int64(lists.num_tiles) * (4 * TILE_WORDS) + Int64(number) * lists.capacity * 4)


def masks_address(tiles: Any, lists: Any, number: Any) -> Any:
    """Masks of a tile's positions, mask_bytes each."""
    before = Int64(lists.num_tiles) * lists.capacity * 4 + Int64(number) * lists.capacity * tiles.mask_bytes
    return lists.base + (HEADER_BYTES + Int64(lists.num_tiles) * (4 * TILE_WORDS) + before)
