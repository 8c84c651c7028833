"""The warp of the fused chunk kernel that copies O out; and rows of zeros."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels_cute.chunk import layouts
from kernels_cute.chunk.rings import stage_of
from kernels_cute.chunk.shape import CHUNK, TILE_BYTES
from kernels_cute.common import ptx


@cute.jit
def store_warp(spec, storage, copies, out, item, base):
    """Outputs from shared memory to their rows; then the stage is free, for everything else of it has been read."""
    begin, length, head, piece = item.begin, item.live_length, item.head, item.piece
    lane = cute.arch.lane_idx()
    layout = layouts.by_rows(spec.dtype, CHUNK, 64, spec.stages)
    shared = storage.v.get_tensor(layout.outer, swizzle=layout.inner)
    rows = cute.domain_offset((begin, 0), copies.out[None, None, head])
    source, target = cpasync.tma_partition(
        copies.out_atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
        cute.group_modes(cute.local_tile(rows, (CHUNK, 64), (None, None)), 0, 2),
    )  # fmt: skip
    for step in cutlass.range((length + (CHUNK - 1)) // CHUNK, unroll=1):
        stage, parity = stage_of(spec, base + step)
        cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, parity)
        # Here, not in the warps that wrote O: they would wait for it.
        cute.arch.fence_proxy("async.shared", space="cta")
        valid = length - step * CHUNK
        if valid >= CHUNK:
            cute.copy(copies.out_atom, source[None, stage], target[None, step, piece])
        else:
            tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
            column = piece * spec.columns + lane % 8 * 8
            for row in cutlass.range(lane // 8, valid, 4, unroll=1):
                offset = Int64(begin + step * CHUNK + row) * out.stride[0] + Int64(head) * out.stride[1] + column
                words = ptx.load_words(layouts.address(tile, row, lane % 8))
                ptx.store_global_words(out.iterator.toint() + 2 * offset, words)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.empty.data_ptr() + stage)


@cute.jit
def zero_rows(out, begin, length, live_length, head, column0, warp, lane):
    """Rows of a padding sequence."""
    row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
    zero = [Int32(0)] * 4
    for i in cutlass.range(live_length + row, length, 16, unroll=1):
        offset = Int64(begin + i) * out.stride[0] + Int64(head) * out.stride[1] + column
        ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)


@cute.jit
def zero_rows_beyond(out, end, sequences, sequence, head, column0, warp, lane):
    """A sequence's share of the rows from `end` on, which are beyond the last sequence."""
    row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
    zero = [Int32(0)] * 4
    for i in cutlass.range(end + sequence * 16 + row, cute.size(out, mode=[0]), sequences * 16, unroll=1):
        offset = Int64(i) * out.stride[0] + Int64(head) * out.stride[1] + column
        ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)
