"""A value that the compiler must not see through."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32


def opaque(value: Any) -> Any:
    """A copy of an int32 that the compiler takes for another value: what follows from it (an address, a condition) is computed
    after this place, not before a loop around it and kept in registers all along."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
