"""Sizes of the decode kernel that follow from a problem and its configuration."""

from typing import Any

from gdn.ops.attention.problem import SparseDecodeProblem
from gdn.problem import DTYPE_BYTES

TILE = 16  # positions of a product, and of a stage
COLUMNS = 8  # query heads of one product
VECTOR = 4  # entries of D of a unit of the merge: a thread's at a time
_PADDING = 16  # bytes of a row in shared memory: 8 rows of an ldmatrix are then in different banks
_PART_PADDING = 4  # floats of a head's part of O


class Sizes:
    """Numbers of a kernel that are known when it is compiled, from which also follows what fits."""

    def __init__(self, problem: SparseDecodeProblem, config: Any) -> None:
        self.problem, self.config = problem, config
        self.dim, self.block_size = problem.head_dim, problem.block_size
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
