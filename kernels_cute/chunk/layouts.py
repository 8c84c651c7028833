"""Shared-memory tiles of the chunk kernel: all are pieces of 64 columns, 128-byte rows swizzled over 8 rows.

A piece is [rows][64] of 16-bit elements; a wider tile is its pieces one after the other. `address` is the same map for
accesses that state addresses themselves.
"""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

PIECE = 64  # columns of a piece
ROW_BYTES = 128


def by_rows(dtype: Any, rows: int, columns: int, *outer: int) -> cute.ComposedLayout:
    """(rows, columns, *outer): an operand whose contraction runs along columns, and what the copy engine fills."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    shape = (rows, columns, *outer)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def by_columns(dtype: Any, rows: int, columns: int, *outer: int) -> cute.ComposedLayout:
    """(columns, rows, *outer): the same bytes as an operand whose contraction runs along rows."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
    shape = (columns, rows, *outer)
    return cute.tile_to_shape(atom, shape, order=(1, 0, *range(2, len(shape))))


def address(piece: Any, row: Any, unit: Any) -> Any:
    """Of the 16 bytes `unit` (8 columns) of a row; piece: the piece's first byte."""
    return piece + row * ROW_BYTES + ((unit ^ (row & 7)) << 4)
