"""The warps of a chain block of the four-SM form that bring K, Q and V, and take O.

The barriers and who waits for whom: kernel.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import partition_tiles
from kernels_cute.chunk.four_sm.copies import copy_multicast
from kernels_cute.chunk.four_sm.shape import CHAINS, KEY_BYTES
from kernels_cute.chunk.shape import CHUNK, TILE_BYTES
from kernels_cute.common import ptx


@cute.jit
def chain_copy_warp(spec, form, storage, copies, item):
    """K and Q: one chain loads for both, the other arms its own barriers."""
    begin, length, head, rank = item.begin, item.live_length, item.head, item.piece
    to_q, from_q = partition_tiles(
        spec, storage.q, copies.q_atom, copies.q, spec.dim, spec.stages, begin, head // spec.q_group, 0
    )
    to_k, from_k = partition_tiles(
        spec, storage.k, copies.k_atom, copies.k, spec.dim, spec.stages, begin, head // spec.k_group, 0
    )
    for step in cutlass.range((length + (CHUNK - 1)) // CHUNK, unroll=1):
        stage, parity = step % spec.stages, step // spec.stages & 1
        bring(copies.k_atom, from_k[None, step], to_k[None, stage], storage.k_full.data_ptr() + stage,
                   storage.k_empty.data_ptr() + stage, parity, rank, form.key_loader)  # fmt: skip
        bring(copies.q_atom, from_q[None, step], to_q[None, stage], storage.q_full.data_ptr() + stage,
                   storage.q_empty.data_ptr() + stage, parity, rank, form.query_loader)  # fmt: skip


@cute.jit
def bring(atom, source, target, full, empty, parity, rank, loader: cutlass.Constexpr):
    """Arms `full`, and loads where it is this block that does so. The other block's copy may come before `full` is armed: a
    phase does not end without its arrival."""
    if rank == loader:
        cute.arch.mbarrier_wait(empty, parity ^ 1)
    else:
        cute.arch.mbarrier_wait(full, parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
    if rank == loader:
        copy_multicast(atom, source, target, full, Int32((1 << CHAINS) - 1))


@cute.jit
def value_warp(spec, storage, copies, out, item):
    """V in, and O out of the same places; once an O is read, the place takes another V."""
    begin, length, head, piece = item.begin, item.live_length, item.head, item.piece
    lane = cute.arch.lane_idx()
    v_head = head // spec.v_group
    to_v, from_v = partition_tiles(spec, storage.v, copies.v_atom, copies.v, spec.columns, spec.stages, begin, v_head, piece)
    from_o, to_o = partition_tiles(spec, storage.v, copies.out_atom, copies.out, spec.columns, spec.stages, begin, head, piece)
    num_chunks = (length + (CHUNK - 1)) // CHUNK
    for step in cutlass.range(cutlass.min(num_chunks, spec.stages), unroll=1):
        load_values(spec, storage, copies.v_atom, from_v, to_v, step, num_chunks)
    for step in cutlass.range(num_chunks, unroll=1):
        stage = step % spec.stages
        cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, step // spec.stages & 1)
        # Here rather than in the warps that wrote O: they would wait for it.
        cute.arch.fence_proxy("async.shared", space="cta")
        valid = length - step * CHUNK
        if valid >= CHUNK:
            cute.copy(copies.out_atom, from_o[None, stage], to_o[None, step])
        else:
            tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
            column = piece * spec.columns + lane % 8 * 8
            for row in cutlass.range(lane // 8, valid, 4, unroll=1):
                offset = Int64(begin + step * CHUNK + row) * out.stride[0] + Int64(head) * out.stride[1] + column
                words = ptx.load_words(layouts.address(tile, row, lane % 8))
                ptx.store_global_words(out.iterator.toint() + 2 * offset, words)
        cute.arch.cp_async_bulk_commit_group()
        if step + spec.stages < num_chunks:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            load_values(spec, storage, copies.v_atom, from_v, to_v, step + spec.stages, num_chunks)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def load_values(spec, storage, v_atom, from_v, to_v, step, num_chunks):
    stage, full = step % spec.stages, storage.v_full.data_ptr()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
    cute.copy(v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
    if cutlass.const_expr(spec.prefetch > 0):
        if step + spec.prefetch < num_chunks:
            cute.prefetch(v_atom, from_v[None, step + spec.prefetch])
