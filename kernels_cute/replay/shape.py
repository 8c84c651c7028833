"""Sizes that the choice of a kernel and the kernel share."""

MOST_NODES = 32  # of a draft tree: a path is a word of bits
# While a thread moves an accepted path it has UNITS accesses of each of MOVES nodes on their way.
UNITS, MOVES = 2, 4
