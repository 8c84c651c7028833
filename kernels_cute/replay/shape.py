"""Sizes that the choice of a kernel and the kernel share."""

MOST_NODES = 32  # of a draft tree: a path is a word of bits
BATCH = 4  # accesses of 16 bytes that a thread has on their way while it moves an accepted path
