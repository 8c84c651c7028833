"""Part of a state that a thread of the composing kernels holds, and the shared memory of a block.

A block owns 32 columns of a head's states, a warp 8 of them: with V first a "column" is a row of the tensor. A thread holds 4
entries of K of each of its columns: K first every (K / 4)-th one, since the lanes then read P without bank conflicts; V first
four neighbours, since P is transposed there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

FLOAT_BYTES = 4
BLOCK_COLUMNS = 32
ROWS = 4  # entries of K of a thread
PIECE = 32  # entries of the summed dimension of P that a stage holds
STAGES = 4
UNIT_BYTES = 16  # of a copy
BLOCKS_PER_SM = 2  # that shared memory allows at head dims of 128
_PADDING = 4  # numbers after a row in shared memory, so that 8 lanes that read 16 bytes of 8 rows hit all banks


class Tiles:
    """The tiles of one problem."""

    def __init__(self, problem: Any) -> None:
        K, V = problem.head_k_dim, problem.head_v_dim
        self.K, self.V, self.heads, self.v_first = K, V, problem.num_state_heads, problem.state_v_first
        self.threads = 128
        self.row_lanes = K // ROWS  # lanes that share columns
        self.columns = BLOCK_COLUMNS // (self.threads // 32) * self.row_lanes // 32  # of a thread
        self.values = ROWS * self.columns
        self.h_bytes, self.P_bytes = K * V * FLOAT_BYTES, K * K * FLOAT_BYTES  # of a head
        self.pieces = K // PIECE  # of a P
        self.P_pitch = (K if self.v_first else PIECE + _PADDING) * FLOAT_BYTES
        self.stage_bytes = self.P_pitch * (PIECE if self.v_first else K)
        self.units = K * PIECE * FLOAT_BYTES // UNIT_BYTES // self.threads  # copies of a thread for a piece
        self.x_pitch = (K + _PADDING) * FLOAT_BYTES
        self.fork_words = self.threads * self.values

    def register(self, row: int, column: int) -> int:
        """Register of an entry of a column: what is contiguous in memory runs fastest."""
        return column * ROWS + row if self.v_first else row * self.columns + column

    def accesses(self, width: Any) -> Sequence[tuple[Any, int]]:
        """Accesses of 4 numbers of a thread: distance from its first element, and the first register.

        width: columns of the matrix, which the thread's part is of.
        """
        if self.v_first:
            return [(column * self.K, column * ROWS) for column in range(self.columns)]
        steps = [(row, first) for row in range(ROWS) for first in range(0, self.columns, 4)]
        return [(row * self.row_lanes * width + first, row * self.columns + first) for row, first in steps]

    def first_element(self, place: "Place", block: Any, width: Any) -> Any:
        """Place of a thread's first element in a head's matrix. block: of columns."""
        column = block * BLOCK_COLUMNS + place.column
        if self.v_first:
            return column * self.K + place.row_lane * ROWS
        return place.row_lane * width + column

    def storage(self, has_fork: bool) -> Any:
        """Shared memory of a block."""
        fields: dict[str, Any] = {
            "transitions": cute.struct.Align[cute.struct.MemRange[Float32, STAGES * self.stage_bytes // FLOAT_BYTES], 128],
            "columns": cute.struct.Align[cute.struct.MemRange[Float32, BLOCK_COLUMNS * self.x_pitch // FLOAT_BYTES], 16],
        }
        if has_fork:
            fields["fork"] = cute.struct.MemRange[Float32, self.fork_words]
        return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Place(NamedTuple):
    """A thread within its block."""

    thread: Any
    row_lane: Any  # among the lanes that share columns
    column: Any  # its first column


def place_of(tiles: Tiles, thread: Any) -> Place:
    lane = thread % 32
    column = thread // 32 * (BLOCK_COLUMNS * 32 // tiles.threads) + lane // tiles.row_lanes * tiles.columns
    return Place(Int32(thread), lane % tiles.row_lanes, column)
