"""Draft trees in the recurrent kernel: every node continues the state after its parent.

The starting state stays in registers next to the current one. A node whose parent is the node before it goes on from
there; otherwise its path is computed again from the start, ancestor by ancestor: their q, k, v are few and in cache, while
the states between are not kept anywhere that is sure to be written, or in full precision.
"""

import tilelang.language as T


def parent_of(node, begin, parents):
    """The parent of a node, -1 for the start. Always less than the node, whatever the tensor holds: every walk ends."""
    return T.min(parents[begin + node], node - 1)


@T.macro
def ancestor(node, steps, begin, parents, found: T.Ref):
    """found = the node `steps` above `node`."""
    found = node
    for _ in T.serial(steps):
        found = parent_of(found, begin, parents)


@T.macro
def start_path(node, begin, parents, start, state, above: T.Ref, walker: T.Ref):
    """above = how far above the node its path must begin, with state as it is there. walker: scratch."""
    walker = parent_of(node, begin, parents)
    above = 0
    if walker != node - 1:
        while walker >= 0:
            above = above + 1
            walker = parent_of(walker, begin, parents)
        for i in T.unroll(start.shape[0]):
            state[i] = start[i]
