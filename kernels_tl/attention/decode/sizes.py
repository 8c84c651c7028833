"""Compile-time numbers of sparse decode attention."""

from typing import Any

from gdn.ops.attention.problem import SparseDecodeProblem
from gdn.problem import DTYPE_BYTES

THREADS = 128
TILE = 64  # positions of a tile
ROWS = 16  # query heads of a product: the rows of one mma instruction
VECTOR = 8  # elements of a 16-byte access


class Spec:
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: SparseDecodeProblem, config: Any) -> None:
        self.problem, self.config = problem, config
        self.heads, self.kv_heads, self.dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.group = self.heads // self.kv_heads
        self.block_size, self.dtype, self.dense = problem.block_size, problem.dtype, problem.dense
        self.stages, self.splits = config.stages, config.splits
        self.gates_sums = problem.has_gate and self.splits == 1  # else the merge takes the gate

    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring of keys and values, queries, weights, places of rows; and alignment."""
        ring = self.stages * TILE * (2 * self.dim * DTYPE_BYTES[self.dtype] + 16)
        return ring + ROWS * (self.dim + TILE) * DTYPE_BYTES[self.dtype] + 2048
