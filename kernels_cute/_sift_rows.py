"""A row of the sift's workspace, in words of 32 bits, as the kernels see it.

    0           the bound: float32 bits of the least score that is listed
    1 .. 4      entries of the row's four lists
    5           pieces of the row's query tile that have been given a list (in the tile's first row)
    6           1 = some piece found no list
    8 ..        pairs of score and column: `room` of them, which two lists fill from both ends, then room / 2, likewise

`room` follows from the row's length, HEADER + 3 * room.
"""

from gdn.problems import IndexerSiftProblem

HEADER = IndexerSiftProblem.header_words
SAMPLED = IndexerSiftProblem.sampled  # one key of so many is sampled
BOUND, COUNTS, CLAIMS, FAILED = 0, 1, 5, 6
LISTS = 4
NO_LIST = LISTS  # in place of a list's number: the piece comes too late for one


def room_of(row_words):
    return (row_words - HEADER) // 3
