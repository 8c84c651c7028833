"""Shared memory of the blocks of the chunk kernels (barriers.py) as structs of the DSL."""

from typing import Any

import cutlass.cute as cute

from kernels_cute.chunk.barriers import Fields, block_fields, chain_fields, key_head_fields, maker_fields, summary_fields
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.memory import CUTE_DTYPES


def struct_of(fields: Fields) -> Any:
    arrays = {
        name: cute.struct.Align[cute.struct.MemRange[CUTE_DTYPES[one.dtype], one.count], one.align]
        for name, one in fields.items()
    }
    return cute.struct(type("Storage", (), {"__annotations__": arrays}))


def block_storage(spec: ChunkSpec) -> Any:
    return struct_of(block_fields(spec))


def key_head_storage(spec: ChunkSpec) -> Any:
    return struct_of(key_head_fields(spec))


def summary_storage(spec: ChunkSpec) -> Any:
    return struct_of(summary_fields(spec))


def chain_storage(spec: ChunkSpec) -> Any:
    return struct_of(chain_fields(spec))


def maker_storage(spec: ChunkSpec, form: Any) -> Any:
    return struct_of(maker_fields(spec, form))
