"""The warp of the fused chunk kernel that copies K, Q and V into shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.arguments import partition_keys, partition_tiles
from kernels_cute.chunk.rings import chunks_in, ring_place


@cute.jit
def copy_warp(spec, storage, copies, item, base):
    to_q, from_q, to_k, from_k = partition_keys(spec, storage, copies, item, spec.stages, spec.key_stages)
    to_v, from_v = partition_tiles(
        spec, storage.v, copies.v_atom, copies.v, spec.columns, spec.stages, item.begin, item.head // spec.v_group, item.piece
    )
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    num_chunks = chunks_in(item.live_length)
    if num_chunks > 0:
        copy_keys(spec, storage, copies.k_atom, from_k, to_k, Int32(0), base)
    for step in cutlass.range(num_chunks, unroll=1):
        if step + 1 < num_chunks:
            copy_keys(spec, storage, copies.k_atom, from_k, to_k, step + 1, base)
        stage, parity = ring_place(spec.stages, base + step)
        cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, spec.key_bytes + spec.value_bytes)
        cute.copy(copies.q_atom, from_q[None, step], to_q[None, stage], tma_bar_ptr=full + stage)
        cute.copy(copies.v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
        if cutlass.const_expr(spec.prefetch > 0):
            if step + spec.prefetch < num_chunks:
                for atom, source in ((copies.k_atom, from_k), (copies.q_atom, from_q), (copies.v_atom, from_v)):
                    cute.prefetch(atom, source[None, step + spec.prefetch])


@cute.jit
def copy_keys(spec, storage, k_atom, from_k, to_k, step, base):
    stage, parity = ring_place(spec.key_stages, base + step)
    full = storage.k_full.data_ptr() + stage
    cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + stage, parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, spec.key_bytes)
    cute.copy(k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full)
