"""Sizes of tiles of queries, and of their lists in the workspace. A tile: tiles.py."""

ROWS = 128  # query rows of a tile, 64 of a math warpgroup
STEP = 64  # positions of a step: their keys and values are a stage
MOST_QUERIES = 32  # of a tile: bits of a mask
HEADER_BYTES = 256  # of the workspace: the counter of items
TILE_WORDS = 4  # of a tile's record in the workspace: first token, queries, steps, sequence


def queries_of_tile(group: int) -> int:
    return min(MOST_QUERIES, ROWS // group)


def mask_bytes(group: int) -> int:
    """Bytes of a position's mask, a bit a query."""
    return 2 if queries_of_tile(group) <= 16 else 4


def capacity(group: int, k: int, context: int) -> int:
    """Most positions of a tile, in whole steps; k: positions of a query, context: the longest sequence's."""
    return -(-min(queries_of_tile(group) * k, context) // STEP) * STEP


def tile_bytes(group: int, k: int, context: int) -> int:
    """Bytes of a tile in the workspace: its record, and for each of its positions a cache row and a mask."""
    return 4 * TILE_WORDS + capacity(group, k, context) * (4 + mask_bytes(group))


def num_tiles(group: int, tokens: int, sequences: int) -> int:
    """Numbers of tiles, empty ones included."""
    return tokens // queries_of_tile(group) + sequences + 1
