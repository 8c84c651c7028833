"""The warp of the chunk kernels that hands tiles to the other block of a pair."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.rings import chunks_in
from kernels_cute.common import ptx


@cute.jit
def hand_over_warp(storage, tiles, own, length, rank):
    """M, the vectors and, where there is one, P of this block's chunks to the other block. tiles: (field, bytes of a buffer)."""
    other = rank ^ 1
    ready = storage.ready.data_ptr() + rank
    barrier = ptx.in_block(storage.ready.data_ptr().toint() + rank * 8, other)
    for step in cutlass.range(own.first, chunks_in(length), 2, unroll=1):
        cute.arch.mbarrier_wait(ready, (own.base + step) >> 1 & 1)
        with cute.arch.elect_one():
            ptx.expect_in_cluster(barrier, Int32(sum(size for _, size in tiles)))
            for field, size in tiles:
                source = field.data_ptr().toint() + rank * size
                ptx.copy_in_cluster(ptx.in_block(source, other), source, Int32(size), barrier)
