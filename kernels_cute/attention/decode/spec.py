"""Compile-time constants of the decode kernel, its shared memory, its barriers, and the work of a block."""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.attention.problem import SparseDecodeProblem
from kernels_cute.attention.decode.sizes import Sizes
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable
from kernels_cute.common.memory import CUTE_DTYPES

# Largest score of no position: the least number, not -inf, whose difference to itself is NaN. A score may be -inf.
LOWEST = -3.4028234663852886e38


class NamedBarrier(IntEnum):
    """A bar.sync has to be the same instruction for all that wait at it, so each role has its own. 0 is the whole block's."""

    MATH = 1  # all math warps
    COPY = 2  # the copy warps wait for the first math warp, which arrives


class Work(NamedTuple):
    """Work of a block."""

    token: Any  # Int32: the query token
    kv_set: Any  # Int32: which key heads
    rank: Any  # Int32: of the block in its cluster: which part of the positions


class Spec(Sizes):
    def __init__(self, problem: SparseDecodeProblem, config: Any) -> None:
        super().__init__(problem, config)
        self.dtype = CUTE_DTYPES[problem.dtype]
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
