"""Sizes that the choice of a kernel and the kernel share."""

MOST_NODES = 32  # of a draft tree: a path is a word of bits
