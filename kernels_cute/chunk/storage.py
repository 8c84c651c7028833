"""Shared memory of a block (barriers.py) as a struct of the DSL."""

from typing import Any

import cutlass.cute as cute

from kernels_cute.chunk.barriers import Fields
from kernels_cute.common.memory import CUTE_DTYPES


def struct_of(fields: Fields) -> Any:
    arrays = {
        name: cute.struct.Align[cute.struct.MemRange[CUTE_DTYPES[one.dtype], one.count], one.align]
        for name, one in fields.items()
    }
    return cute.struct(type("Storage", (), {"__annotations__": arrays}))
