"""The warps of the fused chunk kernel that copy: K, Q and V in, O out, tiles to the other block of a pair; and rows of zeros."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.chunk import operands
from kernels_cute.chunk.arguments import TokenCopies, partition_keys, partition_tiles
from kernels_cute.chunk.rings import PreparedChunks, chunks_in, ring_place
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import CHUNK, TILE_BYTES, Z_BUFFERS
from kernels_cute.chunk.signals import announce_outputs, await_rows
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx


@cute.jit
def copy_warp(spec: ChunkSpec, storage: Any, copies: TokenCopies, work_tile: WorkTile, base: Int32):
    """Load K, Q and V into shared memory."""
    if cutlass.const_expr(spec.follows_rows):
        cute.arch.griddepcontrol_wait()
    to_q, from_q, to_k, from_k = partition_keys(spec, storage, copies, work_tile, spec.query_stages, spec.key_stages)
    to_v, from_v = partition_tiles(
        spec,
        storage.v,
        copies.v_atom,
        copies.v,
        spec.columns,
        spec.stages,
        work_tile.begin,
        work_tile.head // spec.v_group,
        work_tile.piece,
    )
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    num_chunks = chunks_in(work_tile.live_length)
    if num_chunks > 0:
        if cutlass.const_expr(spec.row_makers > 0):
            await_rows(spec, copies, work_tile, Int32(0))
        copy_rows(spec, storage, "k", spec.key_stages, copies.k_atom, from_k, to_k, Int32(0), base)
    for step in cutlass.range(num_chunks, unroll=1):
        if step + 1 < num_chunks:
            if cutlass.const_expr(spec.row_makers > 0):
                await_rows(spec, copies, work_tile, step + 1)
            copy_rows(spec, storage, "k", spec.key_stages, copies.k_atom, from_k, to_k, step + 1, base)
        if cutlass.const_expr(spec.has_norm):
            # In a ring of its own: V's place is free long after Q's.
            copy_rows(spec, storage, "q", spec.query_stages, copies.q_atom, from_q, to_q, step, base)
        stage, parity = ring_place(spec.stages, base + step)
        cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
        announced = spec.key_bytes + spec.value_bytes
        if cutlass.const_expr(spec.has_norm):
            announced = spec.value_bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, announced)
        if cutlass.const_expr(not spec.has_norm):
            cute.copy(copies.q_atom, from_q[None, step], to_q[None, stage], tma_bar_ptr=full + stage)
        cute.copy(copies.v_atom, from_v[None, step], to_v[None, stage], tma_bar_ptr=full + stage)
        if cutlass.const_expr(spec.prefetch > 0):
            if step + spec.prefetch < num_chunks:
                for atom, source in ((copies.k_atom, from_k), (copies.q_atom, from_q), (copies.v_atom, from_v)):
                    cute.prefetch(atom, source[None, step + spec.prefetch])


@cute.jit
def copy_rows(
    spec: ChunkSpec, storage: Any, name: cutlass.Constexpr, stages: cutlass.Constexpr, atom: cute.CopyAtom, source: cute.Tensor,
    target: cute.Tensor, step: Int32, base: Int32,
):  # fmt: skip
    """Copy a chunk of K or Q into its own ring. name: "k" or "q"."""
    stage, parity = ring_place(stages, base + step)
    full = getattr(storage, f"{name}_full").data_ptr() + stage
    cute.arch.mbarrier_wait(getattr(storage, f"{name}_empty").data_ptr() + stage, parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, spec.key_bytes)
    cute.copy(atom, source[None, step], target[None, stage], tma_bar_ptr=full)


@cute.jit
def store_normed_warp(spec: ChunkSpec, storage: Any, copies: TokenCopies, out: cute.Tensor, work_tile: WorkTile, base: Int32):
    """Copy the normalised outputs to global memory, and load z two chunks ahead. A z buffer is free once the result of its chunk
    has been written."""
    from_o, to_o = partition_tiles(
        spec, storage.v, copies.out_atom, copies.out, 64, spec.stages, work_tile.begin, work_tile.head, work_tile.piece
    )
    to_z, from_z = partition_tiles(
        spec, storage.z, copies.z_atom, copies.z, 64, Z_BUFFERS, work_tile.begin, work_tile.head, work_tile.piece
    )
    num_chunks = chunks_in(work_tile.live_length)
    for step in cutlass.range(cutlass.min(num_chunks, Z_BUFFERS), unroll=1):
        copy_gates(spec, storage, copies.z_atom, from_z, to_z, step, base)
    for step in cutlass.range(num_chunks, unroll=1):
        stage, parity = ring_place(spec.stages, base + step)
        cute.arch.mbarrier_wait(storage.normed.data_ptr() + stage, parity)
        if step + Z_BUFFERS < num_chunks:
            copy_gates(spec, storage, copies.z_atom, from_z, to_z, step + Z_BUFFERS, base)
        store_outputs(spec, storage, copies.out_atom, from_o[None, stage], to_o[None, step], out, work_tile, step, stage)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(storage.empty.data_ptr() + stage)


@cute.jit
def copy_gates(
    spec: ChunkSpec, storage: Any, z_atom: cute.CopyAtom, from_z: cute.Tensor, to_z: cute.Tensor, step: Int32, base: Int32
):
    buffer, _ = ring_place(Z_BUFFERS, base + step)
    full = storage.z_full.data_ptr() + buffer
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, spec.value_bytes)
    cute.copy(z_atom, from_z[None, step], to_z[None, buffer], tma_bar_ptr=full)


@cute.jit
def store_warp(
    spec: ChunkSpec, storage: Any, copies: TokenCopies, out: cute.Tensor, work_tile: WorkTile, base: Int32, empty: str
):
    """Copy the outputs to global memory, and free their stage: everything else of it has been read by then. empty: name of the
    stage's barriers. The heads of a work tile take turns."""
    owners = [work_tile if i == 0 else work_tile._replace(head=work_tile.head + i) for i in range(spec.state_heads)]
    sides = [
        partition_tiles(spec, storage.v, copies.out_atom, copies.out, 64, spec.value_stages, one.begin, one.head, one.piece)
        for one in owners
    ]
    for step in cutlass.range(chunks_in(work_tile.live_length), unroll=1):
        for i in cutlass.range_constexpr(spec.state_heads):
            from_o, to_o = sides[i]
            stage, parity = ring_place(spec.value_stages, (base + step) * spec.state_heads + i)
            cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, parity)
            store_outputs(spec, storage, copies.out_atom, from_o[None, stage], to_o[None, step], out, owners[i], step, stage)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(getattr(storage, empty).data_ptr() + stage)
        if cutlass.const_expr(spec.row_makers > 0):
            # The chunk before: its stores are done by now, and this warp need not wait for them.
            if step > 0:
                announce_outputs(spec, copies, work_tile, step - 1, 1)
    if cutlass.const_expr(spec.row_makers > 0):
        if work_tile.live_length > 0:
            announce_outputs(spec, copies, work_tile, chunks_in(work_tile.live_length) - 1, 0)


@cute.jit
def store_outputs(
    spec: ChunkSpec, storage: Any, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, out: cute.Tensor,
    work_tile: WorkTile, step: Int32, stage: Int32,
):  # fmt: skip
    """Copy one chunk of O from its stage to global memory, in a bulk group of its own."""
    lane = cute.arch.lane_idx()
    # Here, not in the warps that wrote O: they would wait for it.
    cute.arch.fence_proxy("async.shared", space="cta")
    valid = work_tile.live_length - step * CHUNK
    if valid >= CHUNK:
        cute.copy(atom, source, target)
    else:
        tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
        column = work_tile.piece * spec.columns + lane % 8 * 8
        for row in cutlass.range(lane // 8, valid, 4, unroll=1):
            offset = Int64(work_tile.begin + step * CHUNK + row) * out.stride[0] + Int64(work_tile.head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, ptx.load_words(operands.address(tile, row, lane % 8)))
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def zero_rows(
    out: cute.Tensor, work_tile: WorkTile, column0: Int32, warp: Int32, lane: Int32, first: Int32, last: Int32, step: Int32,
    begin: Any = 0,
):  # fmt: skip
    """Write zeros to 64 columns of rows begin + first to begin + last, 16 rows in every `step`: for a padding sequence, or for
    this sequence's share of the rows after the last one."""
    row, column = warp * 4 + lane // 8, column0 + lane % 8 * 8
    zero = [Int32(0)] * 4
    for i in cutlass.range(first + row, last, step, unroll=1):
        offset = Int64(begin + i) * out.stride[0] + Int64(work_tile.head) * out.stride[1] + column
        ptx.store_global_words(out.iterator.toint() + 2 * offset, zero)


@cute.jit
def hand_over_warp(storage: Any, tiles: Any, prepared: PreparedChunks, length: Int32, rank: Int32):
    """Copy M, the vectors and, where there is one, P of the chunks that this block prepares to the other block. tiles: (field,
    bytes of a buffer)."""
    other = rank ^ 1
    ready = storage.ready.data_ptr() + rank
    barrier = ptx.in_block(storage.ready.data_ptr().toint() + rank * 8, other)
    for step in cutlass.range(prepared.first, chunks_in(length), 2, unroll=1):
        cute.arch.mbarrier_wait(ready, (prepared.base + step) >> 1 & 1)
        with cute.arch.elect_one():
            ptx.expect_in_cluster(barrier, Int32(sum(size for _, size in tiles)))
            for field, size in tiles:
                source = field.data_ptr().toint() + rank * size
                ptx.copy_in_cluster(ptx.in_block(source, other), source, Int32(size), barrier)
