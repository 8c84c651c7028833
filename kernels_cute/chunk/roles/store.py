"""The warp of the fused chunk kernel that copies O out; and rows of zeros."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import partition_tiles
from kernels_cute.chunk.rings import chunks_in, ring_place
from kernels_cute.chunk.shape import CHUNK, TILE_BYTES
from kernels_cute.common import ptx


@cute.jit
def store_warp(spec, storage, copies, out, item, base):
    """Outputs from shared memory to their rows; then the stage is free, for everything else of it has been read."""
    from_o, to_o = partition_tiles(
        spec, storage.v, copies.out_atom, copies.out, 64, spec.stages, item.begin, item.head, item.piece
    )
    for step in cutlass.range(chunks_in(item.live_length), unroll=1):
        stage, parity = ring_place(spec.stages, base + step)
        cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, parity)
        store_outputs(spec, storage, copies.out_atom, from_o[None, stage], to_o[None, step], out, item, step, stage)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(storage.empty.data_ptr() + stage)


@cute.jit
def store_outputs(spec, storage, atom, source, target, out, item, step, stage):
    """A chunk of O from its stage to memory, in a bulk group of its own."""
    lane = cute.arch.lane_idx()
    # Here, not in the warps that wrote O: they would wait for it.
    cute.arch.fence_proxy("async.shared", space="cta")
    valid = item.live_length - step * CHUNK
    if valid >= CHUNK:
        cute.copy(atom, source, target)
    else:
        tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
        column = item.piece * spec.columns + lane % 8 * 8
        for row in cutlass.range(lane // 8, valid, 4, unroll=1):
            offset = Int64(item.begin + step * CHUNK + row) * out.stride[0] + Int64(item.head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, ptx.load_words(layouts.address(tile, row, lane % 8)))
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def zero_rows(out, item, column0, warp, lane, first, last, step, begin=0):
    """Zeros in 64 columns of rows begin + first up to begin + last, 16 of every `step`: those of a padding sequence, or a
    sequence's share of those beyond the last sequence."""
    row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
    zero = [Int32(0)] * 4
    for i in cutlass.range(first + row, last, step, unroll=1):
        offset = Int64(begin + i) * out.stride[0] + Int64(item.head) * out.stride[1] + column
        ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)
