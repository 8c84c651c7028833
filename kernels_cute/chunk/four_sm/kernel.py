"""The wide chunk kernel: four SMs for a sequence and state head of D = 128, where the fused kernel would leave SMs idle.

With c the inclusive cumulative sum of the log decays of a chunk, f the factors of the L2 norms, P as in fused.py and M so
too, but with its diagonal of ones,

    Z    = (exp(c_last - c) f beta M)^T K     16-bit, of the scaled M in `parts` 16-bit summands; P M is 16-bit, too
    U^T  = S^T K^T      O^T = S^T Q^T         S^T rounded to 16 bits, from registers
    W^T  = V^T - exp(c) f U^T
    S^T  = exp(c_last) S^T + W^T Z
    O^T  = exp(c) fq scale O^T + W^T (P M)^T

so that the chain from state to state is two products, U and W Z. Z, P M and the vectors do not depend on the state: two makers
make them, two chains carry the state of 64 V columns each. Makers hand over in one of two ways (forms.py):

    clusters of four    ClusterForm: copies between shared memories. A device has less room for those than for blocks:
                        30 on an H100 of 132 SMs, where not all GPCs have a multiple of four
    clusters of two     RingForm: through a ring in the workspace, that is through the L2 cache, for the sequences and
                        heads that find no such room, in a launch of its own on the SMs that are left

The second launch begins as soon as all blocks of the first have (they say so at once, programmatic dependent launch): not
before, or its pairs might take the places of fours. It needs nothing of the first; that the counts of its ring are zero it knows
from the first, which waits for that launch. Its last blocks wait for the end of the first launch, so that whatever follows in
the stream sees both. Results are the same bits either way.

Chain block: warpgroup 0 is the state role; of warpgroup 4 warp 0 loads K and Q, 1 loads V and stores O, 2 loads the tiles.
Maker block: two sets of an inverse (M) and a score warpgroup (P, then Z and P M) and a copying warpgroup: a warp loads K and Q,
one makes the gates, one for each set hands over. Chunk j is made by set j // 2 % 2 of maker j % 2.

The barriers: barriers.py. One chain loads K for both, one Q (which ones, a form says); with a ring the other one loads the tiles:
a block arms its own barrier for what the other loads once the last fill of that stage is there. Arrivals on `empty`, `free` and
`tile_released` of another block are relaxed: what they free has been read by then, and is refilled by copies that count bytes, or
by stores that wait for them. No block of a cluster leaves before all are done.
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk.arguments import TokenCopies, is_selected_launch, packed_params, token_copies
from kernels_cute.chunk.four_sm import shape
from kernels_cute.chunk.four_sm.barriers import chain_barriers, chain_fields, maker_barriers, maker_fields
from kernels_cute.chunk.four_sm.chain import chain_warpgroup
from kernels_cute.chunk.four_sm.copies import chain_copy_warp, maker_copy_warp, value_warp
from kernels_cute.chunk.four_sm.forms import CLEAR_THREADS, ClusterForm, Form, RingForm
from kernels_cute.chunk.four_sm.shape import BLOCKS, MAKERS, ROUND, SET_KEY_STAGES, SETS, WARPGROUPS
from kernels_cute.chunk.operands import set_registers
from kernels_cute.chunk.rings import ALL_SETS, PreparedChunks, Sets
from kernels_cute.chunk.roles.gates import gate_warp
from kernels_cute.chunk.roles.inverse import inverse_warpgroup
from kernels_cute.chunk.roles.score import score_warpgroup
from kernels_cute.chunk.scheduler import WorkTile, sequence_of
from kernels_cute.chunk.shape import TILE_BYTES, WARPGROUP
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.storage import struct_of
from kernels_cute.common import ptx
from kernels_cute.common.init_barriers import init_barriers

_SETS = Sets(MAKERS, SETS, SET_KEY_STAGES, shape.NamedBarrier.SCORE)


class ChainRole(IntEnum):
    """First warp of each role of a chain block."""

    STATE = 0
    IDLE = 4
    LOAD = 16  # K and Q
    VALUES = 17
    TILES = 18


class MakerRole(IntEnum):
    """First warp of each role of a maker block."""

    INVERSE = 0  # a warpgroup for each set
    SCORE = 8
    LOAD = 16  # K and Q
    GATES = 17
    HAND_OVER = 18  # a warp for each set


class FourSmChunk:
    """Whole sequences with four SMs a head."""

    def __init__(self, spec: ChunkSpec, parts: int):
        self.spec = spec = spec.changed(threads=WARPGROUPS * WARPGROUP, key_stages=SETS * SET_KEY_STAGES, parts=parts)
        self.ring_form = RingForm()
        self.four, self.ring = FourSmBlock(spec, ClusterForm()), FourSmBlock(spec, self.ring_form)

    @cute.jit
    def launch(self, *values: Any):
        """values: Params, groups of the L2 ring (the last ones), split_if_longest_exceeds, stream."""
        params, (ring_groups, split_if_longest_exceeds, stream) = packed_params(values)
        copies = token_copies(self.spec, params, multicast=True)
        first_ring_group = self.spec.heads * (cute.size(params.cu_seqlens, mode=[0]) - 1) - ring_groups
        words_bytes = (ring_groups + 1) * shape.WORDS_BYTES
        cleared = 16 * CLEAR_THREADS  # by a block
        options = {"block": (self.spec.threads, 1, 1), "min_blocks_per_mp": 1, "stream": stream}
        if ring_groups > 0:
            self.ring_form.clear(params.workspace, words_bytes).launch(
                grid=((words_bytes + (cleared - 1)) // cleared, 1, 1), block=(CLEAR_THREADS, 1, 1), stream=stream
            )
        self.four.kernel(params, copies, Int32(0), split_if_longest_exceeds).launch(
            grid=(BLOCKS * first_ring_group, 1, 1), cluster=(self.four.form.cluster_blocks, 1, 1), **options
        )
        if ring_groups > 0:
            self.ring.kernel(params, copies, first_ring_group, split_if_longest_exceeds).launch(
                grid=(BLOCKS * ring_groups, 1, 1), cluster=(self.ring.form.cluster_blocks, 1, 1), use_pdl=True, **options
            )


class FourSmBlock:
    """Blocks of one form, ClusterForm or RingForm, which says where a block belongs and how tiles go from makers to chains:

    cluster_blocks, first_maker     blocks of a cluster, and the rank of its first maker
    key_loader, query_loader        the chain that loads K, Q for both
    released_arrivals               on a maker's `tile_released`
    place, route                    the block's place in its group; addresses in other blocks that its roles need
    free_slot, hand_over_set, tile_warp, leave
    """

    def __init__(self, spec: ChunkSpec, form: Form):
        self.spec, self.form = spec, form

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, first_group: Int32, split_if_longest_exceeds: Int32):
        if is_selected_launch(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            run_block(self.spec, self.form, params, copies, first_group)


@cute.jit
def run_block(spec: ChunkSpec, form: Form, params: ChunkParams, copies: TokenCopies, first_group: Int32):
    """Run a whole block, of either kind."""
    # Names of their own: inside a dynamic `if` the DSL takes a call of an object's method for a change of the object.
    tile_warp, hand_over_set = form.tile_warp, form.hand_over_set
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared_bytes = max(shape.chain_bytes(spec.stages), shape.maker_bytes(spec.parts))
    room = cutlass.utils.SmemAllocator().allocate(shared_bytes, byte_alignment=1024)
    chain_layout, maker_layout = struct_of(chain_fields(spec)), struct_of(maker_fields(spec, form))
    assert max(chain_layout.size_in_bytes(), maker_layout.size_in_bytes()) <= shared_bytes
    chain, maker = chain_layout(room), maker_layout(room)  # the block's own; and where things are in one of the other kind
    # The number among the form's groups; whether a chain; which of the two.
    own_group, is_chain, number = form.place(chain, params.workspace, warp)
    # Asked for before the barriers below, which take as long as the answer.
    group = first_group + own_group
    head, sequence = group % spec.heads, group // spec.heads
    work_tile = WorkTile(sequence, head, number, None, *sequence_of(spec, params, sequence))
    live_length = work_tile.live_length
    # The warp that loads makes the barriers: a maker's begins to load before the other blocks are there.
    if warp == ChainRole.LOAD:
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
    if (warp != ChainRole.LOAD) | (is_chain == 1):
        cute.arch.cluster_wait()

    route = form.route(chain, maker, params.workspace, own_group)
    if is_chain == 1:
        if warp < ChainRole.IDLE:
            set_registers(spec, shape.STATE_REGISTERS)
            chain_warpgroup(spec, form, chain, route, params, work_tile, warp)
        elif warp < ChainRole.LOAD:
            set_registers(spec, shape.IDLE_REGISTERS)
        else:
            set_registers(spec, shape.COPY_REGISTERS)
            if warp == ChainRole.LOAD:
                chain_copy_warp(spec, form, chain, copies, work_tile)
            if warp == ChainRole.VALUES:
                value_warp(spec, chain, copies, params.out, work_tile)
            if warp == ChainRole.TILES:
                tile_warp(chain, route, live_length, number)
    else:
        if warp < MakerRole.SCORE:
            set_registers(spec, shape.INVERSE_REGISTERS)
            prepared = PreparedChunks(number + warp // 4 * MAKERS, ROUND, 0, warp // 4, _SETS)
            inverse_warpgroup(spec, maker, prepared, live_length, warp % 4)
        elif warp < MakerRole.LOAD:
            set_registers(spec, shape.SCORE_REGISTERS)
            prepared = PreparedChunks(number + warp // 4 % 2 * MAKERS, ROUND, 0, warp // 4 % 2, _SETS)
            score_warpgroup(spec, maker, params.scale, prepared, live_length, warp % 4)
        else:
            set_registers(spec, shape.COPY_REGISTERS)
            if warp == MakerRole.LOAD:
                maker_copy_warp(spec, form, maker, copies, work_tile)
                # Nothing of another block was touched; the barrier at the end needs this one done.
                cute.arch.cluster_wait()
            if warp == MakerRole.GATES:
                gate_warp(spec, maker, params, work_tile, PreparedChunks(number, MAKERS, 0, ALL_SETS, _SETS))
            if warp >= MakerRole.HAND_OVER:
                hand_over_set(maker, route, live_length, number, warp - MakerRole.HAND_OVER)
    # Others may still write to this block's shared memory, or arrive there.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    form.leave(chain)
