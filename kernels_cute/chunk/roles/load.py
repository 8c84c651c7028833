"""The warp of the fused chunk kernel that copies K, Q and V into shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.arguments import partition_tiles
from kernels_cute.chunk.rings import key_stage_of, stage_of
from kernels_cute.chunk.shape import CHUNK


@cute.jit
def copy_warp(spec, storage, copies, item, base):
    begin, length, head, piece = item.begin, item.live_length, item.head, item.piece
    to_q, from_q = partition_tiles(
        spec, storage.q, copies.q_atom, copies.q, spec.dim, spec.stages, begin, head // spec.q_group, 0
    )
    to_k, from_k = partition_tiles(
        spec, storage.k, copies.k_atom, copies.k, spec.dim, spec.key_stages, begin, head // spec.k_group, 0
    )
    v_head = head // spec.v_group
    to_v, from_v = partition_tiles(spec, storage.v, copies.v_atom, copies.v, spec.columns, spec.stages, begin, v_head, piece)
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    num_chunks = (length + (CHUNK - 1)) // CHUNK
    if num_chunks > 0:
        copy_keys(spec, storage, copies.k_atom, from_k, to_k, Int32(0), base)
    for step in cutlass.range(num_chunks, unroll=1):
        if step + 1 < num_chunks:
            copy_keys(spec, storage, copies.k_atom, from_k, to_k, step + 1, base)
        stage, parity = stage_of(spec, base + step)
        cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, spec.key_bytes + spec.value_bytes)
        cute.copy(copies.q_atom, from_q[None, step], to_q[None, stage], tma_bar_ptr=full + stage)
        cute.copy(copies.v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
        if cutlass.const_expr(spec.prefetch > 0):
            if step + spec.prefetch < num_chunks:
                cute.prefetch(copies.k_atom, from_k[None, step + spec.prefetch])
                cute.prefetch(copies.q_atom, from_q[None, step + spec.prefetch])
                cute.prefetch(copies.v_atom, from_v[None, step + spec.prefetch])


@cute.jit
def copy_keys(spec, storage, k_atom, from_k, to_k, step, base):
    stage, parity = key_stage_of(spec, base + step)
    full = storage.keys_full.data_ptr() + stage
    cute.arch.mbarrier_wait(storage.keys_empty.data_ptr() + stage, parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, spec.key_bytes)
    cute.copy(k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full)
