"""A block of the four-SM form: its shared memory, its barriers and which warp does what.

The formulas, the barriers and who waits for whom: kernel.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from gdn.problems import ChunkParams
from kernels_cute.chunk.arguments import TokenCopies
from kernels_cute.chunk.barriers import chain_barriers, chain_storage, maker_barriers, maker_storage
from kernels_cute.chunk.dispatch import works
from kernels_cute.chunk.four_sm import shape
from kernels_cute.chunk.four_sm.chain import chain_warpgroup
from kernels_cute.chunk.four_sm.copies import chain_copy_warp, maker_copy_warp, value_warp
from kernels_cute.chunk.four_sm.shape import MAKERS, ROUND, SETS
from kernels_cute.chunk.operands import set_registers
from kernels_cute.chunk.rings import ALL_SETS, OwnChunks
from kernels_cute.chunk.roles.gates import gate_warp
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
from kernels_cute.chunk.roles.score import score_warpgroup
from kernels_cute.chunk.scheduler import WorkTile, sequence_of
from kernels_cute.chunk.shape import TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx
from kernels_cute.common.barriers import init_barriers

_COPIER = 4 * (shape.WARPGROUPS - 1)  # the warp that loads K and Q


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


# Plain functions: inside a dynamic `if` the DSL takes a call of an object's method for a change of the object.
def _tile_warp(form: Any, *arguments: Any) -> None:
    form.tile_warp(*arguments)


def _hand_over_set(form: Any, *arguments: Any) -> None:
    form.hand_over_set(*arguments)


@cute.jit
def run_block(spec, form, params, copies, first_group):
    """The whole of a block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared_bytes = max(shape.chain_bytes(spec.stages), shape.maker_bytes(spec.parts))
    room = cutlass.utils.SmemAllocator().allocate(shared_bytes, byte_alignment=1024)
    chain_layout, maker_layout = chain_storage(spec), maker_storage(spec, form)
    assert max(chain_layout.size_in_bytes(), maker_layout.size_in_bytes()) <= shared_bytes
    chain, maker = chain_layout(room), maker_layout(room)  # the block's own; and where things are in one of the other kind
    # The number among the form's groups; whether a chain; which of the two.
    own_group, is_chain, number = form.place(chain, params.workspace, warp)
    # Asked for before the barriers below, which take as long as the answer.
    group = first_group + own_group
    head, sequence = group % spec.heads, group // spec.heads
    item = WorkTile(sequence, head, number, None, *sequence_of(spec, params, sequence))
    live_length = item.live_length
    # The warp that copies in makes the barriers: a maker's begins to load before the other blocks are there.
    if warp == _COPIER:
        for atom in (copies.q_atom, copies.k_atom, copies.v_atom, copies.out_atom):
            cpasync.prefetch_descriptor(atom)
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
            set_registers(spec, shape.STATE_REGISTERS)
            chain_warpgroup(spec, form, chain, route, params, item, warp)
        elif warp < 16:
            set_registers(spec, shape.IDLE_REGISTERS)
        else:
            set_registers(spec, shape.COPY_REGISTERS)
            if warp == _COPIER:
                chain_copy_warp(spec, form, chain, copies, item)
            if warp == 17:
                value_warp(spec, chain, copies, params.out, item)
            if warp == 18:
                _tile_warp(form, chain, route, live_length, number)
    else:
        if warp < 8:
            set_registers(spec, shape.INVERSE_REGISTERS)
            own = OwnChunks(number + warp // 4 * MAKERS, ROUND, 0, warp // 4)
            inverse_warpgroup(spec, maker, own, live_length, warp % 4)
        elif warp < 16:
            set_registers(spec, shape.SCORE_REGISTERS)
            own = OwnChunks(number + warp // 4 % 2 * MAKERS, ROUND, 0, warp // 4 % 2)
            score_warpgroup(spec, maker, params.scale, own, live_length, warp % 4)
        else:
            set_registers(spec, shape.COPY_REGISTERS)
            if warp == _COPIER:
                maker_copy_warp(spec, form, maker, copies, item)
                # Nothing of another block was touched; the barrier at the end needs this one done.
                cute.arch.cluster_wait()
            if warp == 17:
                gate_warp(spec, maker, params, item, OwnChunks(number, MAKERS, 0, ALL_SETS))
            if warp >= 18:
                _hand_over_set(form, maker, route, live_length, number, warp - 18)
    # Others may still write to this block's shared memory, or arrive there.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    form.leave(chain)
