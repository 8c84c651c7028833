"""Shared-memory tiles of the logits kernels and the order of their rows.

The wgmma accumulator gives lane t of a warp the columns 8j + 2(t % 4) + {0, 1}. Query rows are therefore stored so that
column n of a group of four queries is

    n = 8 * (head // 2) + 2 * query + head % 2        query in 0..3

and one lane holds every head of its query: the sum over heads never leaves its registers. `query_layout` is that order as a
layout (head % 2, query, head // 2), which the copy engine fills with one 4-D box a group.

Where queries are few (decode), four of them a group would be padding. A query may then take 2 or 4 lanes of the quad, each
with the heads of its own residue, and the sum ends in one or two shuffles:

    n = 8 * (head // (2 * lanes)) + 2 * (lanes * query + head % (2 * lanes) // 2) + head % 2        query in 0..4 / lanes - 1

With several key heads every one has a product of its own with the query heads that belong to it; `head` then counts those.
`HeadOrder` says which query head is at which column, an odd number of them included.
"""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.mqa_logits.orders import QUERIES_PER_GROUP

BOX_BYTES = 128  # widest row of a swizzled tile


def row_elements(dtype: Any, head_dim: int) -> int:
    """Elements of one stored row: head_dim, cut at the widest swizzle."""
    return min(head_dim, BOX_BYTES * 8 // dtype.width)


def swizzle_atom(dtype: Any, head_dim: int) -> cute.ComposedLayout:
    kinds = {1024: warpgroup.SmemLayoutAtomKind.K_SW128, 512: warpgroup.SmemLayoutAtomKind.K_SW64}
    return warpgroup.make_smem_layout_atom(kinds[row_elements(dtype, head_dim) * dtype.width], dtype)


def operand_layout(dtype: Any, rows: int, head_dim: int, *outer: int) -> cute.ComposedLayout:
    """(rows, head_dim, *outer), K-major, as wgmma wants it: pieces of one swizzle width, all rows of a piece first."""
    shape = (rows, head_dim, *outer)
    return cute.tile_to_shape(swizzle_atom(dtype, head_dim), shape, order=tuple(range(len(shape))))


def query_layout(dtype: Any, num_heads: int, head_dim: int, groups: int, outer: int, lanes_per_query: int = 1) -> Any:
    """(head % 2, query, head // 2, head_dim, groups, outer): the bytes of operand_layout(rows of all groups) by query; with
    several lanes a query the first and the third mode count head % (2 * lanes) and head // (2 * lanes)."""
    width = row_elements(dtype, head_dim)
    queries, run = QUERIES_PER_GROUP // lanes_per_query, 2 * lanes_per_query
    rows = groups * queries * num_heads
    shape = (run, queries, num_heads // run, (width, head_dim // width), groups, outer)
    stride = (width, run * width, 8 * width, (1, rows * width), queries * num_heads * width, rows * head_dim)
    layout = cute.make_layout(shape, stride=stride)
    return cute.make_composed_layout(swizzle_atom(dtype, head_dim).inner, 0, layout)


def leading(layout: cute.ComposedLayout, modes: int) -> cute.ComposedLayout:
    """First modes of the layout, at the start of the others. (The DSL's slice of a swizzled layout aborts for some strides.)"""
    outer = cute.make_layout(layout.outer.shape[:modes], stride=layout.outer.stride[:modes])
    return cute.make_composed_layout(layout.inner, 0, outer)


def piece_layout(dtype: Any, rows: int, piece: int, head_dim: int, outer: int) -> cute.ComposedLayout:
    """(row in piece, head_dim, 1, pieces, outer): the bytes of operand_layout(rows) by runs of `piece` rows."""
    width = row_elements(dtype, head_dim)
    shape = (piece, (width, head_dim // width), 1, rows // piece, outer)
    layout = cute.make_layout(shape, stride=(width, (1, rows * width), 0, piece * width, rows * head_dim))
    return cute.make_composed_layout(swizzle_atom(dtype, head_dim).inner, 0, layout)
