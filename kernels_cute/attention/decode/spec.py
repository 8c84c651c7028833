"""Compile-time constants of the decode kernel, its shared memory, its barriers, and the work of a block."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.problems import DTYPE_BYTES, SparseDecodeProblem
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable
from kernels_cute.common.memory import CUTE_DTYPES

TILE = 16  # positions of a product, and of a stage
COLUMNS = 8  # query heads of one product
# Largest score of no position: the least number, not -inf, whose difference to itself is NaN. A score may be -inf.
LOWEST = -3.4028234663852886e38
# Named barriers: a bar.sync has to be the same instruction for all that wait at it, so each role has its own.
MATH_BARRIER = 1  # all math warps
COPY_BARRIER = 2  # the copy warps wait for the first math warp, which arrives
VECTOR = 4  # entries of D of a unit of the merge: a thread's at a time
_PADDING = 16  # bytes of a row in shared memory: 8 rows of an ldmatrix are then in different banks
_PART_PADDING = 4  # floats of a head's part of O


class Work(NamedTuple):
    """Work of a block."""

    token: Any  # Int32: the query token
    kv_set: Any  # Int32: which key heads
    rank: Any  # Int32: of the block in its cluster: which part of the positions


class Spec:
    def __init__(self, problem: SparseDecodeProblem, config: Any) -> None:
        self.problem, self.config = problem, config
        self.dtype, self.dim, self.block_size = CUTE_DTYPES[problem.dtype], problem.head_dim, problem.block_size
        self.splits, self.kv_heads, self.stages = config.splits, config.kv_heads, config.stages
        self.readers, self.copy_warps = config.readers, config.copy_warps
        self.group = problem.num_heads // problem.num_kv_heads
        self.heads = self.kv_heads * self.group  # query heads of a block
        self.kv_sets = problem.num_kv_heads // config.kv_heads
        self.parts = -(-self.group // COLUMNS)  # math warps of a key head that share a tile, 8 query heads each
        self.sharers = self.kv_heads * self.parts  # math warps that read the same tiles
        self.steps = self.dim // 16  # products along D

        self.head_bytes = self.dim * DTYPE_BYTES[problem.dtype]
        self.row_bytes = self.kv_heads * self.head_bytes  # keys of one position
        self.pitch = self.row_bytes + _PADDING
        self.stage_bytes = 2 * TILE * self.pitch  # keys, then values
        # Pieces of a row in memory: one, or one a head.
        self.pieces = 1 if problem.heads_adjacent else self.kv_heads
        self.piece_bytes = self.row_bytes // self.pieces

        self.math_warps = self.readers * self.sharers
        self.math_threads = 32 * self.math_warps
        self.copy_barrier_threads = 32 * (1 + self.copy_warps)
        self.warps = self.math_warps + self.copy_warps
        self.threads = 32 * self.warps
        self.units = self.heads * (self.dim // VECTOR)  # of a block's heads
        self.units_each = -(-self.units // self.splits)  # that a block of the cluster writes
        self.gate_words = 2 * -(-self.units_each // self.threads)  # of a thread
        # After the last tile the ring holds each math warp's part of O, and the block's.
        self.part_pitch = self.dim + _PART_PADDING
        self.part_floats = COLUMNS * self.part_pitch
        self.parts_bytes = 4 * (self.math_warps * self.part_floats + self.heads * self.dim)
        self.ring_bytes = max(self.stages * self.stage_bytes, self.parts_bytes)
        # Two floats a column of every math warp, then of every head of the block.
        self.sums_floats = 2 * (self.math_warps * COLUMNS + self.heads)
        self.shared_bytes = self.ring_bytes + 4 * self.sums_floats + 20 * self.stages + 1024
        # Accumulators and queries stay in registers; the estimate of the rest is from compiled variants.
        self.registers = 6 * self.steps + 64

        # A stage is read by the warps of one turn.
        self.barriers = BarrierTable(
            {"copy": 1, "math": self.sharers},
            [
                Barrier("full", self.stages, (Arrivals("copy", "role", what="with the bytes"),), ("math",)),
                Barrier("free", self.stages, (Arrivals("math", "warp", what="read"),), ("copy",)),
            ],
        )

    def storage(self) -> Any:
        stages, num_sums, num_words = self.stages, self.sums_floats, self.ring_bytes // 4

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            free: cute.struct.MemRange[Int64, stages]
            valid: cute.struct.MemRange[Int32, stages]  # a bit for each position of the tile
            sums: cute.struct.Align[cute.struct.MemRange[Float32, num_sums], 16]
            ring: cute.struct.Align[cute.struct.MemRange[Int32, num_words], 128]

        return Storage
