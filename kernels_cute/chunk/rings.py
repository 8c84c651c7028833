"""Place of a chunk in the rings of buffers of a block.

In the fused kernel stages, buffers and phases follow the count of chunks since the block began, over all of its work tiles; in a
block whose warpgroups come in sets each set counts its own chunks.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32

from kernels_cute.chunk.shape import CHUNK

ALL_SETS = "all"


class Sets(NamedTuple):
    """Sets of an inverse and a score warpgroup in blocks that only prepare chunks. Chunk j is of set j // blocks % count of block
    j % blocks."""

    blocks: int
    count: int  # of a block
    key_stages: int  # of a set
    score_barrier: int  # named, of the first set's score warpgroup

    @property
    def round(self) -> int:
        """Chunks from one of a set to its next."""
        return self.blocks * self.count


class PreparedChunks(NamedTuple):
    """Chunks first, first + stride, ... of a work tile: those that a block, or one set of a block, prepares."""

    first: Any
    stride: int
    base: Any = 0  # chunks that the block had before the work tile
    group: Any = None  # the set, or ALL_SETS alternately; None in a block without sets
    sets: Sets | None = None


# Counts of chunks are never negative, which the compiler cannot see where a block has work tiles: its signed divisions would be
# in every role's wait. Shifts are the same for both signs.
def ring_place(stages: int, count: Any) -> tuple[Any, Any]:
    """Stage of chunk number `count` of a ring, and the parity of that stage's turn."""
    if stages & (stages - 1):
        turn = Int32(cutlass.Uint32(count) // cutlass.Uint32(stages))
        return count - turn * stages, turn & 1
    return count & (stages - 1), count >> (stages.bit_length() - 1) & 1


def key_place(spec: Any, prepared: PreparedChunks, step: Any) -> tuple[Any, Any]:
    """Return the stage of chunk `step` in the ring of K, and the parity of that stage's turn."""
    if prepared.group is None:
        return ring_place(spec.key_stages, prepared.base + step)
    turn, stages = step // prepared.sets.round, prepared.sets.key_stages
    return prepared.group * stages + turn % stages, turn // stages & 1


def gate_place(prepared: PreparedChunks, step: Any) -> tuple[Any, Any]:
    """Return the buffer of chunk `step` among the two of gates and factors (`gate_buffer`), and the parity of its turn."""
    if prepared.group is None:
        count = prepared.base + step >> (prepared.stride - 1)
        return count & 1, count >> 1 & 1
    sets = prepared.sets
    turn = step // sets.round
    group = step // sets.blocks % sets.count if prepared.group is ALL_SETS else prepared.group
    return group * 2 + turn % 2, turn // 2 & 1


def chunks_in(length: Any) -> Any:
    return (length + (CHUNK - 1)) // CHUNK


def prepared_chunks(spec: Any, base: Any, rank: Any) -> Any:
    """Chunks of a work tile that this block of a pair prepares; base: chunks before the work tile."""
    return PreparedChunks((rank ^ base) & 1 if spec.paired else Int32(0), spec.aux_step, base)
