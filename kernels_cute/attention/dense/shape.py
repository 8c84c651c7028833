"""Sizes of a tile of queries, and of the boxes that the copy engine brings."""

from math import gcd

ROWS = 128  # query rows of a tile, 64 of a math warpgroup
PAGE_MULTIPLE = 16  # of a cache block: a box has that many positions at least


def piece_of(step: int, block_size: int) -> int:
    """Positions of a box: they lie in one cache block and in one step."""
    return gcd(step, block_size)
