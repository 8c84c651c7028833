"""Shared-memory tiles of the logits kernels and the order of their rows.

The wgmma accumulator gives lane t of a warp the columns 8j + 2(t % 4) + {0, 1}. Query rows are therefore stored so that
column n of a group of four queries is

    n = 8 * (head // 2) + 2 * query + head % 2        query in 0..3

and one lane holds every head of its query: the sum over heads never leaves its registers. `query_layout` is that order as a
layout (head % 2, query, head // 2), which the copy engine fills with one 4-D box a group.

Where queries are few (decode), four of them a group would be padding. A query may then take 2 or 4 lanes of the quad, each
with the heads of its own residue, and the sum ends in one or two shuffles:

    n = 8 * (head // (2 * lanes)) + 2 * (lanes * query + head % (2 * lanes) // 2) + head % 2        query in 0..4 / lanes - 1
"""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

QUERIES_PER_GROUP = 4  # lanes of a quad: one query each
BOX_BYTES = 128  # widest row of a swizzled tile


def row_elements(dtype: Any, head_dim: int) -> int:
    """Elements of one stored row: head_dim, cut at the widest swizzle."""
    return min(head_dim, BOX_BYTES * 8 // dtype.width)


def swizzle_atom(dtype: Any, head_dim: int) -> cute.ComposedLayout:
    bits = row_elements(dtype, head_dim) * dtype.width
    kind = {
        1024: warpgroup.SmemLayoutAtomKind.K_SW128,
        512: warpgroup.SmemLayoutAtomKind.K_SW64,
    }[bits]
    return warpgroup.make_smem_layout_atom(kind, dtype)


def operand_layout(dtype: Any, rows: int, head_dim: int, *outer: int) -> cute.ComposedLayout:
    """(rows, head_dim, *outer), K-major, as wgmma wants it: pieces of one swizzle width, all rows of a piece first."""
    shape = (rows, head_dim, *outer)
    return cute.tile_to_shape(swizzle_atom(dtype, head_dim), shape, order=tuple(range(len(shape))))


def query_layout(
    dtype: Any, num_heads: int, head_dim: int, groups: int, outer: int, lanes_per_query: int = 1
) -> cute.ComposedLayout:
    """(head % 2, query, head // 2, head_dim, groups, outer): the bytes of operand_layout(rows of all groups) by query; with
    several lanes a query the first and the third mode count head % (2 * lanes) and head // (2 * lanes)."""
    width = row_elements(dtype, head_dim)
    queries, run = QUERIES_PER_GROUP // lanes_per_query, 2 * lanes_per_query
    group_rows = queries * num_heads
    rows = groups * group_rows
    layout = cute.make_layout(
        (run, queries, num_heads // run, (width, head_dim // width), groups, outer),
        stride=(width, run * width, 8 * width, (1, rows * width), group_rows * width, rows * head_dim),
    )
    return cute.make_composed_layout(swizzle_atom(dtype, head_dim).inner, 0, layout)


def piece_layout(dtype: Any, rows: int, piece: int, head_dim: int, outer: int) -> cute.ComposedLayout:
    """(row in piece, head_dim, 1, pieces, outer): the bytes of operand_layout(rows) by runs of `piece` rows."""
    width = row_elements(dtype, head_dim)
    layout = cute.make_layout(
        (piece, (width, head_dim // width), 1, rows // piece, outer),
        stride=(width, (1, rows * width), 0, piece * width, rows * head_dim),
    )
    return cute.make_composed_layout(swizzle_atom(dtype, head_dim).inner, 0, layout)
