"""Whole sequences or segments, decided on the device: a call launches both, and the launches whose turn it is not return at once.

Whole sequences take as long as the longest one, segments as long as all tokens together: which is faster depends on lengths that
the host does not know.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def works(spec, cu_seqlens, split_if_longest_exceeds):
    """Whether it is this launch's turn, in every thread: segments' where a sequence has more tokens."""
    if cutlass.const_expr(not spec.has_both_variants):
        return Boolean(True)
    is_longer = longest_sequence(cu_seqlens) > split_if_longest_exceeds
    if cutlass.const_expr(not spec.is_split):
        return not is_longer
    # Launched before whole sequences are done, which saves microseconds where it then has nothing to do. Their first launch
    # waited for what came before the call, so the lengths may be read; nothing else is touched before this, and what follows
    # in the stream waits for it.
    cute.arch.griddepcontrol_wait()
    return is_longer


@cute.jit
def longest_sequence(cu_seqlens):
    """Tokens of the longest sequence, by each warp for itself."""
    most, count = Int32(0), cute.size(cu_seqlens, mode=[0]) - 1
    for first in cutlass.range(0, count, 32, unroll=1):
        sequence = first + cute.arch.lane_idx()
        if sequence < count:
            most = cutlass.max(most, Int32(cu_seqlens[sequence + 1]) - Int32(cu_seqlens[sequence]))
    return cute.arch.warp_redux_sync(most, "max")
