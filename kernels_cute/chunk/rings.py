"""Where chunk number `count` of a block is in its rings of buffers.

Stages, buffers, halves and phases follow the count of chunks since the block began, over all of its work tiles.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.shape import CHUNK


# Counts of chunks are never negative, which the compiler cannot see where a block has items: its signed divisions would stand
# in every role's wait. Shifts are the same for both signs.
def stage_of(spec: Any, count: Any) -> tuple[Any, Any]:
    """A chunk's stage, and the parity of that stage's turn."""
    return ring_place(spec.stages, count)


def key_stage_of(spec: Any, count: Any) -> tuple[Any, Any]:
    """The same of K."""
    return ring_place(spec.key_stages, count)


def ring_place(stages: int, count: Any) -> tuple[Any, Any]:
    if stages & (stages - 1):
        turn = Int32(cutlass.Uint32(count) // cutlass.Uint32(stages))
        return count - turn * stages, turn & 1
    return count & (stages - 1), count >> (stages.bit_length() - 1) & 1


def half_of(spec: Any, count: Any) -> tuple[Any, Any]:
    """The same of `half`."""
    own = count >> (spec.aux_step - 1)
    return own & 1, own >> 1 & 1


def chunks_in(length: Any) -> Any:
    return (length + (CHUNK - 1)) // CHUNK


@cute.jit
def first_own(spec, base, rank):
    """The first chunk of an item that this block prepares; base: chunks before the item."""
    first = Int32(0)
    if cutlass.const_expr(spec.paired):
        first = (rank ^ base) & 1
    return first
