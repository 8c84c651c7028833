"""A row of the sift's workspace, in words of 32 bits, as the kernels see it.

    0           the bound: float32 bits of the least score that is listed
    1           pieces of the row's query tile that have been given a list (in the tile's first row)
    2           1 = some piece found no list
    8 .. 23     entries of the row's lists: of list 0 those of warps 0 to 3, of list 1, of lists 2 and 3
    24 ..       pairs of score and key: a quarter of `room` for each warp, which lists 0 and 1 fill from its two ends, then
                an eighth for each, which lists 2 and 3 fill likewise

`room`, a multiple of 8, follows from the row's length, HEADER + 3 * room. A warp has keys 16 w to 16 w + 15 of each 64.
"""

import cutlass.cute as cute

from gdn.problems import IndexerSiftProblem

HEADER = IndexerSiftProblem.header_words
SAMPLED = IndexerSiftProblem.sampled  # one key of so many is sampled
BOUND, CLAIMS, FAILED, COUNTS = 0, 1, 2, 8
LISTS, WARPS = 4, IndexerSiftProblem.warps
NO_LIST = LISTS  # in place of a list's number: the piece comes too late for one
AT_ONCE = 16  # most entries that a warp lists of a row before it looks whether there is room for more


def room_of(row_words):
    return (row_words - HEADER) // 3


@cute.jit
def part_of(room, list_number, warp):
    """(where in a row, in entries behind its header, the part that a warp has of a list begins; entries it holds), the part being
    that of two lists, which fill it from its two ends."""
    entries = room // WARPS
    first = warp * entries
    if list_number >= 2:
        entries = entries // 2
        first = room + warp * entries
    return first, entries
