"""A block of the wide chunk kernel, of either form: its shared memory, its barriers and which warp does what.

The maths, the barriers and who waits for whom stand in `_chunk_wide`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from gdn.problems import ChunkParams
from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import TokenCopies
from kernels_cute.chunk.four_sm.chain import ChainRoles
from kernels_cute.chunk.four_sm.copies import MakerCopies
from kernels_cute.chunk.four_sm.shape import (
    CHAINS,
    COPY_REGISTERS,
    DIM,
    IDLE_REGISTERS,
    INVERSE_REGISTERS,
    KEY_STAGES,
    SCORE_REGISTERS,
    SETS,
    SLOTS,
    STATE_REGISTERS,
    WARPGROUPS,
    chain_bytes,
    maker_bytes,
    scaled_parts,
)
from kernels_cute.chunk.four_sm.tiles import MakerRoles
from kernels_cute.chunk.fused import FusedChunk
from kernels_cute.chunk.scheduler import Item
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, SCRATCH_BYTES, TILE_BYTES, VECTOR_BYTES, WARPGROUP
from kernels_cute.common import ptx

_COPIER = 4 * (WARPGROUPS - 1)  # the warp that loads K and Q


class WideBlock(ChainRoles, MakerRoles, MakerCopies, FusedChunk):
    """options: FusedChunk's; `registers` is not used. A form (`_chunk_wide_cluster`, `_chunk_wide_ring`) says
    where a block belongs and how tiles go from makers to chains:

    cluster_blocks, first_maker     blocks of a cluster, and the rank of its first maker
    key_loader, query_loader        the chain that loads K, Q for both
    taken_arrivals                  on a maker's `taken`
    place, route                    what the block is; what its roles need to know of the others
    free_slot, hand_over_set, tile_warp, leave
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        assert self.dim == DIM
        self.threads = WARPGROUPS * WARPGROUP
        self.parts = scaled_parts(self.dtype is cutlass.BFloat16)

    def copy_in(self, x: Any, columns: int) -> Any:
        if columns != self.dim:
            return super().copy_in(x, columns)
        layout = layouts.by_rows(self.dtype, CHUNK, columns)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SMulticastOp(), self.tokens(x), layout, (CHUNK, columns))

    def chain_type(self):
        stages, pieces, tile = self.stages, self.dim // 64, CHUNK * 64

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
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * stages], 1024]
            z: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * SLOTS], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * SLOTS], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * stages], 1024]

        return Chain

    def maker_type(self):
        pieces, tile = self.dim // 64, CHUNK * 64

        @cute.struct
        class Maker:
            ticket: cute.struct.MemRange[Int32, 4]  # where a chain block has it
            k_full: cute.struct.MemRange[Int64, SETS * KEY_STAGES]
            k_empty: cute.struct.MemRange[Int64, SETS * KEY_STAGES]
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
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * SETS * KEY_STAGES], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * SETS], 1024]
            z: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * pieces * SETS], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * SETS], 1024]
            plain: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * SETS], 1024]
            m: cute.struct.Align[cute.struct.MemRange[self.dtype, tile * self.parts * SETS], 1024]
            lower: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, tile * SETS], 1024]

        return Maker

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, first_group: Int32, split_if_longest_exceeds: Int32):
        if self.works(params.cu_seqlens, split_if_longest_exceeds):
            self.run_block(params, copies, first_group)

    @cute.jit
    def run_block(self, params, copies, first_group):
        """The whole of a block."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared_bytes = max(chain_bytes(self.stages), maker_bytes(self.parts))
        room = cutlass.utils.SmemAllocator().allocate(shared_bytes, byte_alignment=1024)
        chain_type, maker_type = self.chain_type(), self.maker_type()
        assert max(chain_type.size_in_bytes(), maker_type.size_in_bytes()) <= shared_bytes
        chain, maker = chain_type(room), maker_type(room)  # the block's own; and where things are in one of the other kind
        # The number among the form's groups; whether a chain; which of the two.
        own_group, is_chain, number = self.place(chain, params.workspace, warp)
        # Asked for before the barriers below, which take as long as the answer.
        group = first_group + own_group
        head = group % self.heads
        sequence = group // self.heads
        begin = Int32(params.cu_seqlens[sequence])
        length = cutlass.max(Int32(params.cu_seqlens[sequence + 1]) - begin, 0)
        read_slot = Int64(sequence)
        live_length = length
        if cutlass.const_expr(self.pooled):
            read_slot = Int64(params.state_indices[sequence])
            if read_slot <= params.null_slot:
                live_length = Int32(0)
        item = Item(sequence, head, number, None, begin, length, live_length, read_slot)
        # The warp that copies in makes the barriers: a maker's begins to load before the other blocks are there.
        if warp == _COPIER:
            cpasync.prefetch_descriptor(copies.q_atom)
            cpasync.prefetch_descriptor(copies.k_atom)
            cpasync.prefetch_descriptor(copies.v_atom)
            cpasync.prefetch_descriptor(copies.out_atom)
            with cute.arch.elect_one():
                if is_chain == 1:
                    self.init_chain(chain)
                else:
                    self.init_maker(maker)
            cute.arch.sync_warp()
        if is_chain == 0:
            # Above the diagonal M stays zero.
            thread, _, _ = cute.arch.thread_idx()
            for i in cutlass.range(thread, SETS * (1 + self.parts) * TILE_BYTES // 16, self.threads, unroll=1):
                ptx.store_zeros(maker.plain.data_ptr().toint() + i * 16)
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        if (warp != _COPIER) | (is_chain == 1):
            cute.arch.cluster_wait()

        route = self.route(chain, maker, params.workspace, own_group)
        if is_chain == 1:
            if warp < 4:
                self.set_registers(STATE_REGISTERS)
                self.chain_warpgroup(chain, route, params, item, warp)
            elif warp < 16:
                self.set_registers(IDLE_REGISTERS)
            else:
                self.set_registers(COPY_REGISTERS)
                if warp == _COPIER:
                    self.chain_copy_warp(chain, copies, item)
                if warp == 17:
                    self.value_warp(chain, copies, params.out, item)
                if warp == 18:
                    self.tile_warp(chain, route, live_length, number)
        else:
            if warp < 8:
                self.set_registers(INVERSE_REGISTERS)
                self.wide_inverse_warpgroup(maker, live_length, number, warp // 4, warp % 4)
            elif warp < 16:
                self.set_registers(SCORE_REGISTERS)
                self.wide_score_warpgroup(maker, params.scale, live_length, number, warp // 4 % 2, warp % 4)
            else:
                self.set_registers(COPY_REGISTERS)
                if warp == _COPIER:
                    self.maker_copy_warp(maker, copies, item)
                    # Nothing of another block was touched; the barrier at the end needs this one done.
                    cute.arch.cluster_wait()
                if warp == 17:
                    self.maker_gate_warp(maker, params, item)
                if warp >= 18:
                    self.hand_over_set(maker, route, live_length, number, warp - 18)
        # Others may still write to this block's shared memory, or arrive there.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        self.leave(chain)

    def init_chain(self, storage: Any) -> None:
        for stage in range(self.stages):
            cute.arch.mbarrier_init(storage.k_full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.k_empty.data_ptr() + stage, 4 * CHAINS)
            cute.arch.mbarrier_init(storage.q_full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.q_empty.data_ptr() + stage, 4 * CHAINS)
            cute.arch.mbarrier_init(storage.v_full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.stored.data_ptr() + stage, 4)
        for slot in range(SLOTS):
            cute.arch.mbarrier_init(storage.ready.data_ptr() + slot, 1)
            cute.arch.mbarrier_init(storage.free.data_ptr() + slot, 4 * CHAINS)

    def init_maker(self, storage: Any) -> None:
        for stage in range(SETS * KEY_STAGES):
            cute.arch.mbarrier_init(storage.k_full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.k_empty.data_ptr() + stage, 4)
        for group in range(SETS):
            cute.arch.mbarrier_init(storage.q_full.data_ptr() + group, 1)
            cute.arch.mbarrier_init(storage.q_empty.data_ptr() + group, 4)
            cute.arch.mbarrier_init(storage.m_full.data_ptr() + group, WARPGROUP)
            cute.arch.mbarrier_init(storage.m_free.data_ptr() + group, 4)
            cute.arch.mbarrier_init(storage.made.data_ptr() + group, WARPGROUP)
            cute.arch.mbarrier_init(storage.taken.data_ptr() + group, self.taken_arrivals)
        for i in range(SETS * 2):
            cute.arch.mbarrier_init(storage.gates_full.data_ptr() + i, 32)
            cute.arch.mbarrier_init(storage.factors_full.data_ptr() + i, WARPGROUP)
            cute.arch.mbarrier_init(storage.gates_free.data_ptr() + i, 8)
