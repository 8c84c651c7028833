"""Numbers that the roles of the dense prefill kernel share: tiles of queries, shared memory, barriers.

A tile is up to `queries` neighbouring query tokens of one sequence with the `group` query heads of one key head, at most 128
rows, row = query * group + head. Tiles are numbered as in sparse prefill (attention/tile.py).
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.attention.dense.shape import ROWS, piece_of
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable
from kernels_cute.common.memory import CUTE_DTYPES

PIECE_BYTES = 128  # of a row in shared memory: the widest swizzle
MATH_WARPS = 8
THREADS = 128 + 32 * MATH_WARPS
COPY_REGISTERS, MATH_REGISTERS = 24, 240  # with 128 + 256 threads: the 168 a thread at launch
# Named barriers: zeros of each math warpgroup are written (two); nobody reads keys, values or queries any more.
ZEROED, PARTS_STORED = 1, 3


def barriers(key_stages: int, value_stages: int) -> BarrierTable:
    """The queries of the block's one tile, and two rings: keys and values. The copy engine ends a phase of x_full."""
    copied, read = Arrivals("copy", "role", what="with the bytes"), Arrivals("math", "warp", what="read")
    return BarrierTable(
        {"copy": 1, "math": MATH_WARPS},
        [
            Barrier("queries_full", 1, (copied,), ("math",)),
            Barrier("keys_full", key_stages, (copied,), ("math",)),
            Barrier("keys_free", key_stages, (read,), ("copy",)),
            Barrier("values_full", value_stages, (copied,), ("math",)),
            Barrier("values_free", value_stages, (read,), ("copy",)),
        ],
    )


class DenseTiles:
    """Compile-time constants of a kernel; sizes, strides and the scale arrive at launch."""

    def __init__(self, problem: Any, config: Any) -> None:
        self.heads, self.kv_heads, self.dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.dtype, self.has_gate = CUTE_DTYPES[problem.dtype], problem.has_gate
        self.group, self.block_size = self.heads // self.kv_heads, problem.block_size
        self.queries = ROWS // self.group
        self.step, self.splits, self.copied_by_threads = config.step, config.splits, False
        self.key_stages, self.value_stages = config.key_stages, config.value_stages
        self.piece = piece_of(self.step, self.block_size)
        self.pieces = self.step // self.piece  # of a step
        self.row_bytes = 2 * self.dim
        self.query_bytes = self.queries * self.group * self.row_bytes
        self.barriers = barriers(self.key_stages, self.value_stages)
        # Boxes of the copy engine: (head, query, dim, key head) and (position, dim, key head, cache block).
        self.query_box = (self.group, self.queries, self.dim, 1)
        self.cache_box = (self.piece, self.dim, 1, 1)

    def storage(self) -> Any:
        fields: dict[str, Any] = {name: cute.struct.MemRange[Int64, one.stages] for name, one in self.barriers.barriers.items()}
        for name, rows in (
            ("queries", ROWS), ("keys", self.key_stages * self.step), ("values", self.value_stages * self.step)
        ):  # fmt: skip
            fields[name] = cute.struct.Align[cute.struct.MemRange[self.dtype, rows * self.dim], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": fields}))

    def _swizzled(self, shape: Any, stride: Any) -> cute.ComposedLayout:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.make_composed_layout(atom.inner, 0, cute.make_layout(shape, stride=stride))

    def query_smem(self) -> cute.ComposedLayout:
        """(head, query, dim, 1): the bytes of an operand of 128 rows."""
        width, pieces = PIECE_BYTES // 2, self.row_bytes // PIECE_BYTES
        shape = (self.group, self.queries, (width, pieces), 1)
        return self._swizzled(shape, (width, self.group * width, (1, ROWS * width), 0))

    def cache_smem(self, stages: int) -> cute.ComposedLayout:
        """(position of a piece, dim, 1, 1, piece, stage): the bytes of an operand of `step` rows; stages 0: one piece alone."""
        width, pieces, rows = PIECE_BYTES // 2, self.row_bytes // PIECE_BYTES, self.step
        shape, stride = (self.piece, (width, pieces), 1, 1), (width, (1, rows * width), 0, 0)
        if stages == 0:
            return self._swizzled(shape, stride)
        return self._swizzled((*shape, self.pieces, stages), (*stride, self.piece * width, rows * self.dim))
