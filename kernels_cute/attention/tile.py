"""Tiles of query tokens: neighbours of one sequence, found from their number on the device.

Tile t belongs to the last sequence s with query_start_loc[s] // queries + s <= t: no two sequences share a number, some numbers
stay empty, and nobody has to add up lengths. Sequence N is the padding after the last one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def tile_of(tiles: cutlass.Constexpr, params, tile):
    """Return a tile's sequence, first token, number of queries and the position of the first; the position of padding is
    negative."""
    num_sequences = Int32(params.seq_lens.shape[0])
    low, high = Int32(0), num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        if Int32(params.query_start_loc[middle]) // tiles.queries + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin, end = Int32(params.query_start_loc[low]), Int32(params.q.shape[0])
    first = begin + (tile - begin // tiles.queries - low) * tiles.queries
    position = Int32(-2 * tiles.queries)
    if low < num_sequences:
        end = Int32(params.query_start_loc[low + 1])
        position = Int32(params.seq_lens[low]) - (end - first)
    count = cutlass.max(cutlass.min(end - first, tiles.queries), 0)
    return low, first, count, position
