"""The warp that copies K, Q and the V of several state heads in."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.arguments import TokenCopies, partition_keys, partition_tiles
from kernels_cute.chunk.rings import chunks_in, ring_place
from kernels_cute.chunk.roles.copies import copy_rows
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.spec import ChunkSpec


@cute.jit
def copy_warp(spec: ChunkSpec, storage: Any, copies: TokenCopies, work_tile: WorkTile, base: Int32):
    """Load K, one chunk ahead of Q and of the V of every head."""
    to_q, from_q, to_k, from_k = partition_keys(spec, storage, copies, work_tile, spec.stages, spec.key_stages)
    sides = []
    for i in cutlass.range_constexpr(spec.state_heads):
        head = (work_tile.head + i) // spec.v_group
        sides.append(
            partition_tiles(
                spec, storage.v, copies.v_atom, copies.v, 64, spec.value_stages, work_tile.begin, head, work_tile.piece
            )
        )
    q_full, q_empty, v_full, v_empty = (
        field.data_ptr() for field in (storage.q_full, storage.q_empty, storage.v_full, storage.v_empty)
    )
    num_chunks = chunks_in(work_tile.live_length)
    if num_chunks > 0:
        copy_rows(spec, storage, "k", spec.key_stages, copies.k_atom, from_k, to_k, Int32(0), base)
    for step in cutlass.range(num_chunks, unroll=1):
        if step + 1 < num_chunks:
            copy_rows(spec, storage, "k", spec.key_stages, copies.k_atom, from_k, to_k, step + 1, base)
        stage, parity = ring_place(spec.stages, base + step)
        copy_tile(q_full, q_empty, copies.q_atom, from_q[None, step], to_q, stage, parity, spec.key_bytes)
        for i in cutlass.range_constexpr(spec.state_heads):
            to_v, from_v = sides[i]
            value_stage, value_parity = ring_place(spec.value_stages, (base + step) * spec.state_heads + i)
            copy_tile(v_full, v_empty, copies.v_atom, from_v[None, step], to_v, value_stage, value_parity, spec.value_bytes)
        if cutlass.const_expr(spec.prefetch > 0):
            if step + spec.prefetch < num_chunks:
                for atom, source in (
                    (copies.k_atom, from_k),
                    (copies.q_atom, from_q),
                    *((copies.v_atom, one[1]) for one in sides),
                ):
                    cute.prefetch(atom, source[None, step + spec.prefetch])


@cute.jit
def copy_tile(
    full: cute.Pointer, empty: cute.Pointer, atom: cute.CopyAtom, source: cute.Tensor, targets: cute.Tensor, stage: Int32,
    parity: Int32, size: cutlass.Constexpr,
):  # fmt: skip
    """Copy one tile into its stage, as soon as the stage is free."""
    cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
    cute.copy(atom, source, targets[None, stage], tma_bar_ptr=full + stage)
