"""Indices that arrive as int32 or int64.

A kernel reads an index as the caller gave it and compares it in that width, wherever it works with int64 anyway (slots times
strides). Where an int32 is wanted (registers, divisions, positions, which int32 holds), `narrowed` decides first, in 64 bits,
whether there is one. Offsets (cu_seqlens, query_start_loc) are the exception: the caller promises that they are within the
tokens, whose count is an int32, and they are narrowed as they are read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def narrowed(index):
    """An index as an int32, -1 where an int64 is negative or more than an int32 holds."""
    result = index
    if cutlass.const_expr(isinstance(index, Int64)):
        result = Int32(-1)
        if index >= 0 and index < 2**31:
            result = Int32(index)
    return result
