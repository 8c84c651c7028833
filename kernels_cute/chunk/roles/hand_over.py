"""The warp of the fused chunk kernel that hands tiles to the other block of a pair."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.shape import CHUNK, TILE_BYTES, VECTOR_BYTES
from kernels_cute.common import ptx


@cute.jit
def hand_over_warp(storage, length, rank, first, base=0):
    """M, P and the vectors of this block's chunks to the other block of the pair."""
    other = rank ^ 1
    own = storage.ready.data_ptr() + rank
    barrier = ptx.in_block(storage.ready.data_ptr().toint() + rank * 8, other)
    for step in cutlass.range(first, (length + (CHUNK - 1)) // CHUNK, 2, unroll=1):
        cute.arch.mbarrier_wait(own, (base + step) >> 1 & 1)
        with cute.arch.elect_one():
            ptx.expect_in_cluster(barrier, Int32(2 * TILE_BYTES + VECTOR_BYTES))
            for field, size in ((storage.m, TILE_BYTES), (storage.vectors, VECTOR_BYTES), (storage.p, TILE_BYTES)):
                source = field.data_ptr().toint() + rank * size
                ptx.copy_in_cluster(ptx.in_block(source, other), source, Int32(size), barrier)
