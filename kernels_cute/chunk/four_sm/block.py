"""A block of the four-SM form: its shared memory, its barriers and which warp does what.

The formulas, the barriers and who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.problems import ChunkParams
from kernels_cute.chunk.arguments import TokenCopies
from kernels_cute.chunk.barriers import chain_barriers, maker_barriers
from kernels_cute.chunk.dispatch import works
from kernels_cute.chunk.four_sm.chain import chain_warpgroup
from kernels_cute.chunk.four_sm.chain_copies import chain_copy_warp, value_warp
from kernels_cute.chunk.four_sm.copies import maker_copy_warp, maker_gate_warp
from kernels_cute.chunk.four_sm.inverse import maker_inverse_warpgroup
from kernels_cute.chunk.four_sm.score import maker_score_warpgroup
from kernels_cute.chunk.four_sm.shape import (
    COPY_REGISTERS,
    IDLE_REGISTERS,
    INVERSE_REGISTERS,
    SCORE_REGISTERS,
    SET_KEY_STAGES,
    SETS,
    SLOTS,
    STATE_REGISTERS,
    WARPGROUPS,
    chain_bytes,
    maker_bytes,
)
from kernels_cute.chunk.operands import set_registers
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, SCRATCH_BYTES, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx
from kernels_cute.common.barriers import init_barriers

_COPIER = 4 * (WARPGROUPS - 1)  # the warp that loads K and Q


class FourSmBlock:
    """Blocks of one form, ClusterForm or RingForm, which says where a block belongs and how tiles go from makers to chains:

    cluster_blocks, first_maker     blocks of a cluster, and the rank of its first maker
    key_loader, query_loader        the chain that loads K, Q for both
    taken_arrivals                  on a maker's `taken`
    place, route                    what the block is; what its roles need to know of the others
    free_slot, hand_over_set, tile_warp, leave
    """

    def __init__(self, spec: ChunkSpec, form: Any):
        self.spec, self.form = spec, form

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, first_group: Int32, split_if_longest_exceeds: Int32):
        if works(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            run_block(self.spec, self.form, params, copies, first_group)


def chain_type(spec):
    stages, pieces, tile = spec.stages, spec.dim // 64, CHUNK * 64

    @cute.struct
    class Chain:
        ticket: cute.struct.MemRange[Int32, 4]
        k_full: cute.struct.MemRange[Int64, stages]
        k_empty: cute.struct.MemRange[Int64, stages]
        q_full: cute.struct.MemRange[Int64, stages]
        q_empty: cute.struct.MemRange[Int64, stages]
        v_full: cute.struct.MemRange[Int64, stages]
        stored: cute.struct.MemRange[Int64, stages]
        ready: cute.struct.MemRange[Int64, SLOTS]
        free: cute.struct.MemRange[Int64, SLOTS]
        vectors: cute.struct.Align[cute.struct.MemRange[Float32, SLOTS * VECTOR_BYTES // 4], 128]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * stages], 1024]
        q: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * stages], 1024]
        z: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * SLOTS], 1024]
        p: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * SLOTS], 1024]
        v: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * stages], 1024]

    return Chain


def maker_type(spec):
    pieces, tile = spec.dim // 64, CHUNK * 64

    @cute.struct
    class Maker:
        ticket: cute.struct.MemRange[Int32, 4]  # where a chain block has it
        k_full: cute.struct.MemRange[Int64, SETS * SET_KEY_STAGES]
        k_empty: cute.struct.MemRange[Int64, SETS * SET_KEY_STAGES]
        q_full: cute.struct.MemRange[Int64, SETS]
        q_empty: cute.struct.MemRange[Int64, SETS]
        m_full: cute.struct.MemRange[Int64, SETS]
        m_free: cute.struct.MemRange[Int64, SETS]
        made: cute.struct.MemRange[Int64, SETS]
        taken: cute.struct.MemRange[Int64, SETS]
        gates_full: cute.struct.MemRange[Int64, SETS * 2]
        factors_full: cute.struct.MemRange[Int64, SETS * 2]
        gates_free: cute.struct.MemRange[Int64, SETS * 2]
        vectors: cute.struct.Align[cute.struct.MemRange[Float32, SETS * VECTOR_BYTES // 4], 128]
        rows: cute.struct.Align[cute.struct.MemRange[Float32, SETS * 2 * AUX_BYTES // 4], 128]
        scratch: cute.struct.Align[cute.struct.MemRange[Float32, SETS * 4 * SCRATCH_BYTES // 4], 128]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * SETS * SET_KEY_STAGES], 1024]
        q: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * SETS], 1024]
        z: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * pieces * SETS], 1024]
        p: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * SETS], 1024]
        plain: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * SETS], 1024]
        m: cute.struct.Align[cute.struct.MemRange[spec.dtype, tile * spec.parts * SETS], 1024]
        lower: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, tile * SETS], 1024]

    return Maker


# Plain functions: inside a dynamic `if` the DSL takes a call of an object's method for a change of the object.
def _tile_warp(form: Any, *arguments: Any) -> None:
    form.tile_warp(*arguments)


def _hand_over_set(form: Any, *arguments: Any) -> None:
    form.hand_over_set(*arguments)


@cute.jit
def run_block(spec, form, params, copies, first_group):
    """The whole of a block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared_bytes = max(chain_bytes(spec.stages), maker_bytes(spec.parts))
    room = cutlass.utils.SmemAllocator().allocate(shared_bytes, byte_alignment=1024)
    chain_layout, maker_layout = chain_type(spec), maker_type(spec)
    assert max(chain_layout.size_in_bytes(), maker_layout.size_in_bytes()) <= shared_bytes
    chain, maker = chain_layout(room), maker_layout(room)  # the block's own; and where things are in one of the other kind
    # The number among the form's groups; whether a chain; which of the two.
    own_group, is_chain, number = form.place(chain, params.workspace, warp)
    # Asked for before the barriers below, which take as long as the answer.
    group = first_group + own_group
    head = group % spec.heads
    sequence = group // spec.heads
    begin = Int32(params.cu_seqlens[sequence])
    length = cutlass.max(Int32(params.cu_seqlens[sequence + 1]) - begin, 0)
    read_slot = Int64(sequence)
    live_length = length
    if cutlass.const_expr(spec.pooled):
        read_slot = Int64(params.state_indices[sequence])
        if read_slot <= params.null_slot:
            live_length = Int32(0)
    item = WorkTile(sequence, head, number, None, begin, length, live_length, read_slot)
    # The warp that copies in makes the barriers: a maker's begins to load before the other blocks are there.
    if warp == _COPIER:
        cpasync.prefetch_descriptor(copies.q_atom)
        cpasync.prefetch_descriptor(copies.k_atom)
        cpasync.prefetch_descriptor(copies.v_atom)
        cpasync.prefetch_descriptor(copies.out_atom)
        with cute.arch.elect_one():
            if is_chain == 1:
                init_barriers(chain_barriers(spec), chain, 0)
            else:
                init_barriers(maker_barriers(form), maker, 0)
        cute.arch.sync_warp()
    if is_chain == 0:
        # Above the diagonal M stays zero.
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(thread, SETS * (1 + spec.parts) * TILE_BYTES // 16, spec.threads, unroll=1):
            ptx.store_zeros(maker.plain.data_ptr().toint() + i * 16)
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    if (warp != _COPIER) | (is_chain == 1):
        cute.arch.cluster_wait()

    route = form.route(chain, maker, params.workspace, own_group)
    if is_chain == 1:
        if warp < 4:
            set_registers(spec, STATE_REGISTERS)
            chain_warpgroup(spec, form, chain, route, params, item, warp)
        elif warp < 16:
            set_registers(spec, IDLE_REGISTERS)
        else:
            set_registers(spec, COPY_REGISTERS)
            if warp == _COPIER:
                chain_copy_warp(spec, form, chain, copies, item)
            if warp == 17:
                value_warp(spec, chain, copies, params.out, item)
            if warp == 18:
                _tile_warp(form, chain, route, live_length, number)
    else:
        if warp < 8:
            set_registers(spec, INVERSE_REGISTERS)
            maker_inverse_warpgroup(spec, maker, live_length, number, warp // 4, warp % 4)
        elif warp < 16:
            set_registers(spec, SCORE_REGISTERS)
            maker_score_warpgroup(spec, maker, params.scale, live_length, number, warp // 4 % 2, warp % 4)
        else:
            set_registers(spec, COPY_REGISTERS)
            if warp == _COPIER:
                maker_copy_warp(spec, form, maker, copies, item)
                # Nothing of another block was touched; the barrier at the end needs this one done.
                cute.arch.cluster_wait()
            if warp == 17:
                maker_gate_warp(spec, maker, params, item)
            if warp >= 18:
                _hand_over_set(form, maker, route, live_length, number, warp - 18)
    # Others may still write to this block's shared memory, or arrive there.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    form.leave(chain)
