"""The warps of blocks of the four-SM form that bring K, Q and V, and take O.

The barriers: barriers.py; who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from kernels_cute.chunk.arguments import TokenCopies, partition_keys, partition_tiles
from kernels_cute.chunk.four_sm.forms import Form
from kernels_cute.chunk.four_sm.shape import CHAINS, KEY_BYTES, MAKERS, ROUND, SET_KEY_STAGES, SETS
from kernels_cute.chunk.rings import chunks_in
from kernels_cute.chunk.roles.copies import store_outputs
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec


@cute.jit
def maker_copy_warp(spec: ChunkSpec, form: Form, storage: Any, copies: TokenCopies, work_tile: WorkTile):
    """Load K and Q of this block's chunks, for either set. K comes first: M is made from it, and takes longest."""
    number, num_chunks = work_tile.piece, chunks_in(work_tile.live_length)
    to_q, from_q, to_k, from_k = partition_keys(spec, storage, copies, work_tile, SETS, spec.key_stages)
    here = Int32(1) << (number + form.first_maker)  # a bit for every rank that gets a tile
    for step in cutlass.range(number, num_chunks, MAKERS, unroll=1):
        group, turn = step // MAKERS % SETS, step // ROUND
        stage = group * SET_KEY_STAGES + turn % SET_KEY_STAGES
        full = storage.k_full.data_ptr() + stage
        cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + stage, turn // SET_KEY_STAGES & 1 ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
        cute.copy(copies.k_atom, from_k[None, step], to_k[None, stage], tma_bar_ptr=full, mcast_mask=Int16(here))
        full = storage.q_full.data_ptr() + group
        cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + group, turn & 1 ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
        cute.copy(copies.q_atom, from_q[None, step], to_q[None, group], tma_bar_ptr=full, mcast_mask=Int16(here))
        if cutlass.const_expr(spec.prefetch > 0):
            if step + ROUND < num_chunks:
                cute.prefetch(copies.k_atom, from_k[None, step + ROUND])
                cute.prefetch(copies.q_atom, from_q[None, step + ROUND])


@cute.jit
def chain_copy_warp(spec: ChunkSpec, form: Form, storage: Any, copies: TokenCopies, work_tile: WorkTile):
    """Load K and Q of a chain block. One chain loads for both; the other only arms its own barriers."""
    to_q, from_q, to_k, from_k = partition_keys(spec, storage, copies, work_tile, spec.stages, spec.stages)
    k_full, k_empty, q_full, q_empty = (x.data_ptr() for x in (storage.k_full, storage.k_empty, storage.q_full, storage.q_empty))
    for step in cutlass.range(chunks_in(work_tile.live_length), unroll=1):
        stage, parity = step % spec.stages, step // spec.stages & 1
        for atom, source, target, full, empty, loader in (
            (copies.k_atom, from_k, to_k, k_full, k_empty, form.key_loader),
            (copies.q_atom, from_q, to_q, q_full, q_empty, form.query_loader),
        ):
            bring(atom, source[None, step], target[None, stage], full + stage, empty + stage, parity, work_tile.piece, loader)


@cute.jit
def bring(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, empty: cute.Pointer, parity: Int32,
    rank: Int32, loader: cutlass.Constexpr,
):  # fmt: skip
    """Arm `full`, and load if this block is the one that loads. The other block's copy may arrive before `full` is armed; the
    phase still ends only after the arrival here."""
    if rank == loader:
        cute.arch.mbarrier_wait(empty, parity ^ 1)
    else:
        cute.arch.mbarrier_wait(full, parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, KEY_BYTES)
    if rank == loader:
        cute.copy(atom, source, target, tma_bar_ptr=full, mcast_mask=Int16(Int32((1 << CHAINS) - 1)))


@cute.jit
def value_warp(spec: ChunkSpec, storage: Any, copies: TokenCopies, out: cute.Tensor, work_tile: WorkTile):
    """Load V and store O, which lies where V was. A stage takes the next V once its O has been read."""
    begin, head, piece, stages = work_tile.begin, work_tile.head, work_tile.piece, spec.stages
    v_head = head // spec.v_group
    to_v, from_v = partition_tiles(spec, storage.v, copies.v_atom, copies.v, spec.columns, stages, begin, v_head, piece)
    from_o, to_o = partition_tiles(spec, storage.v, copies.out_atom, copies.out, spec.columns, stages, begin, head, piece)
    num_chunks = chunks_in(work_tile.live_length)
    for step in cutlass.range(cutlass.min(num_chunks, stages), unroll=1):
        load_values(spec, storage, copies.v_atom, from_v, to_v, step, num_chunks)
    for step in cutlass.range(num_chunks, unroll=1):
        stage = step % stages
        cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, step // stages & 1)
        store_outputs(spec, storage, copies.out_atom, from_o[None, stage], to_o[None, step], out, work_tile, step, stage)
        if step + stages < num_chunks:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            load_values(spec, storage, copies.v_atom, from_v, to_v, step + stages, num_chunks)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def load_values(
    spec: ChunkSpec, storage: Any, v_atom: cute.CopyAtom, from_v: cute.Tensor, to_v: cute.Tensor, step: Int32, num_chunks: Int32
):
    stage, full = step % spec.stages, storage.v_full.data_ptr()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
    cute.copy(v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
    if cutlass.const_expr(spec.prefetch > 0):
        if step + spec.prefetch < num_chunks:
            cute.prefetch(v_atom, from_v[None, step + spec.prefetch])
