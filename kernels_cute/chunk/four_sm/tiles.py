"""Tiles that makers of the four-SM form hand to chains."""

from typing import Any

from kernels_cute.chunk.four_sm.shape import KEY_BYTES
from kernels_cute.chunk.shape import TILE_BYTES, VECTOR_BYTES


def handed(storage: Any) -> tuple[tuple[Any, int, int], ...]:
    """Tiles that makers hand to chains: field, bytes of a chunk, and bytes before it in a slot of the L2 ring."""
    fields = ((storage.z, KEY_BYTES), (storage.p, TILE_BYTES), (storage.vectors, VECTOR_BYTES))
    return tuple((field, size, sum(before for _, before in fields[:i])) for i, (field, size) in enumerate(fields))
