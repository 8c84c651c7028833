"""The wide chunk kernel: four SMs for a sequence and state head of D = 128, where the fused kernel would leave SMs idle.

With c the inclusive cumulative sum of the log decays of a chunk, f the factors of the L2 norms, M and P as in `_chunk_fused`,

    Z    = (exp(c_last - c) f M)^T K          16-bit, of M in `parts` 16-bit summands; so is P M
    U^T  = S^T K^T      O^T = S^T Q^T         S^T rounded to 16 bits, from registers
    W^T  = V^T - exp(c) f U^T
    S^T  = exp(c_last) S^T + W^T Z
    O^T  = exp(c) fq scale O^T + W^T (P M)^T

so that the chain from state to state is two products, U and W Z. Z, P M and the vectors do not depend on the state: a pair of
blocks makes them, another pair runs the chain on 64 V columns each; a pair is a cluster. Tiles go from one to the other through
a ring in the workspace, see `_chunk_wide_ring`.

Chain block: warpgroup 0 is the state role; of warpgroup 4 warp 0 loads K and Q, 1 loads V and stores O, 2 loads the tiles.
Maker block: two sets of an inverse (M) and a score warpgroup (P, then Z and P M) and a copying warpgroup: a warp loads K and Q,
one makes the gates, one for each set hands over. Chunk j is made by set j // 2 % 2 of maker j % 2.

    chain block's       arrivals                                      waits
    k_full[stage]       1: the copying lane, with K                   state; the other chain's copying warp
    k_empty[stage]      8: a lane of a state warp of either chain     the copying warp of the chain that loads K and Q
    q_full, q_empty     the same for Q
    v_full[stage]       1: the value warp, with V                     state
    stored[stage]       4: a lane of a state warp, O where V was      the value warp, which stores O, then loads V
    ready[slot]         1: the tile warp, with Z, P M and vectors     state; the other chain's tile warp
    free[slot]          8: a lane of a state warp of either chain     the tile warp of the chain that loads tiles
    maker block's
    k_full[set, stage]  1: the copying lane, with K                   inverse, score
    k_empty[set, stage] 4: a lane of a score warp, Z done             the copying warp
    q_full[set]         1: the copying lane, with Q                   score
    q_empty[set]        4: a lane of a score warp, Q in registers     the copying warp
    m_full[set]         128: inverse                                  score
    m_free[set]         4: a lane of a score warp, M in registers     inverse
    made[set]           128: score                                    the handing warp
    taken[set]          1: the handing lane, Z and the rest read      score
    gates_full[set, h]  32: the gate warp                             inverse, score
    factors_full[set,h] 128: inverse, key factors written             score
    gates_free[set, h]  8: a lane of an inverse and a score warp      the gate warp
    named 1, 2 | 3, 4   128 threads: within inverse, score of a set

One chain loads K and Q for both, the other the tiles: a block arms its own barrier for what the other loads once the last fill
of that stage is there. `empty` and `free` of another block are relaxed arrivals: what they free has been read by then, and is
refilled by copies that count bytes. Of a pair of chains neither leaves before the other is done.

Pairs take their work from a counter as they begin: the makers of the first group, its chains, the makers of the second, ...
So what has begun is a part of this list without gaps, whatever the order in which blocks are placed on SMs, and of the groups
that have begun at most the last one waits for blocks that have not.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels_cute import _chunk_layouts as layouts
from kernels_cute import _chunk_ptx as ptx
from kernels_cute._chunk_fused import FusedChunk
from kernels_cute._chunk_shape import AUX_BYTES, CHUNK, SCRATCH_BYTES, TILE_BYTES, VECTOR_BYTES, WARPGROUP
from kernels_cute._chunk_wide_chain import ChainRoles
from kernels_cute._chunk_wide_copies import MakerCopies
from kernels_cute._chunk_wide_ring import CLEAR_THREADS, Ring
from kernels_cute._chunk_wide_shape import (
    BLOCKS,
    CHAINS,
    COPY_REGISTERS,
    DIM,
    IDLE_REGISTERS,
    INVERSE_REGISTERS,
    KEY_STAGES,
    PAIR,
    SCORE_REGISTERS,
    SETS,
    SLOTS,
    STATE_REGISTERS,
    WARPGROUPS,
    WORDS_BYTES,
    chain_bytes,
    maker_bytes,
)
from kernels_cute._chunk_wide_tiles import MakerRoles


class WideChunk(ChainRoles, MakerRoles, MakerCopies, Ring, FusedChunk):
    """options: FusedChunk's; `paired` and `registers` are not used."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        assert self.dim == DIM and self.num_state == 1
        self.threads = WARPGROUPS * WARPGROUP
        self.overlaps = False

    @cute.jit
    def launch(
        self, q, k, v, g, beta, a_log, dt_bias, initial, indices, mask, final, final_indices, offsets, targets, bounds, out,
        workspace, scale: Float32, null_slot: Int64, stream,
    ):  # fmt: skip
        q_atom, q_tensor = self.copy_in(q, self.dim)
        k_atom, k_tensor = self.copy_in(k, self.dim)
        v_atom, v_tensor = self.copy_in(v, self.columns)
        out_atom, out_tensor = self.copy_out(out)
        groups = self.heads * (cute.size(bounds, mode=[0]) - 1)
        words_bytes = (groups + 1) * WORDS_BYTES
        cleared = 16 * CLEAR_THREADS  # by a block
        self.clear(workspace, words_bytes).launch(
            grid=((words_bytes + (cleared - 1)) // cleared, 1, 1), block=(CLEAR_THREADS, 1, 1), stream=stream
        )
        self.kernel(
            out_atom, out_tensor, q_atom, q_tensor, k_atom, k_tensor, v_atom, v_tensor, g, beta, a_log, dt_bias, initial,
            indices, mask, final, final_indices, offsets, targets, bounds, out, workspace, scale, null_slot,
        ).launch(
            grid=(BLOCKS * groups, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(PAIR, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=self.overlaps,
            stream=stream,
        )  # fmt: skip

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
    def kernel(
        self,
        out_atom: cute.CopyAtom,
        out_tensor: cute.Tensor,
        q_atom: cute.CopyAtom,
        q_tensor: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tensor: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tensor: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        mask: cute.Tensor,
        final: cute.Tensor,
        final_indices: cute.Tensor,
        offsets: cute.Tensor,
        targets: cute.Tensor,
        bounds: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        scale: Float32,
        null_slot: Int64,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared_bytes = max(chain_bytes(self.stages), maker_bytes(self.parts))
        room = cutlass.utils.SmemAllocator().allocate(shared_bytes, byte_alignment=1024)
        chain_type, maker_type = self.chain_type(), self.maker_type()
        assert max(chain_type.size_in_bytes(), maker_type.size_in_bytes()) <= shared_bytes
        chain, maker = chain_type(room), maker_type(room)  # it is one of them
        block, _, _ = cute.arch.block_idx()
        rank = block % PAIR
        ticket_place = chain.ticket.data_ptr().toint()
        if warp == 0:
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(v_atom)
            cpasync.prefetch_descriptor(out_atom)
            if rank == 0:
                if cutlass.const_expr(self.overlaps):
                    cute.arch.griddepcontrol_wait()
                with cute.arch.elect_one():
                    ptx.store_word(ticket_place, ptx.count_up(workspace.iterator.toint()))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        ticket = cute.arch.make_warp_uniform(ptx.load_from_block(ptx.in_block(ticket_place, Int32(0))))
        group, is_chain = ticket // 2, ticket % 2 == 1
        if warp == 0:
            with cute.arch.elect_one():
                if is_chain:
                    self.init_chain(chain)
                else:
                    self.init_maker(maker)
        if ticket % 2 == 0:
            # Above the diagonal M stays zero.
            thread, _, _ = cute.arch.thread_idx()
            for i in cutlass.range(thread, SETS * (1 + self.parts) * TILE_BYTES // 16, self.threads, unroll=1):
                ptx.store_zeros(maker.plain.data_ptr().toint() + i * 16)
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        head = group % self.heads
        sequence = group // self.heads
        words = self.words_of(workspace, group)
        slots = self.slots_of(workspace, group, self.heads * (cute.size(bounds, mode=[0]) - 1))
        begin = Int32(bounds[sequence])
        length = cutlass.max(Int32(bounds[sequence + 1]) - begin, 0)
        read_slot = Int64(sequence)
        live_length = length
        if cutlass.const_expr(self.pooled):
            read_slot = Int64(indices[sequence])
            if read_slot <= null_slot:
                live_length = Int32(0)

        if is_chain:
            if warp < 4:
                self.set_registers(STATE_REGISTERS)
                self.chain_warpgroup(
                    chain, initial, mask, final, final_indices, offsets, targets, bounds, out, null_slot, begin,
                    length, live_length, sequence, head, rank, read_slot, warp,
                )  # fmt: skip
            elif warp < 16:
                self.set_registers(IDLE_REGISTERS)
            else:
                self.set_registers(COPY_REGISTERS)
                if warp == 16:
                    self.chain_copy_warp(chain, q_atom, q_tensor, k_atom, k_tensor, begin, live_length, head, rank)
                if warp == 17:
                    self.value_warp(chain, v_atom, v_tensor, out_atom, out_tensor, out, begin, live_length, head, rank)
                if warp == 18:
                    self.tile_warp(chain, words, slots, live_length, rank)
        else:
            if warp < 8:
                self.set_registers(INVERSE_REGISTERS)
                self.wide_inverse_warpgroup(maker, live_length, rank, warp // 4, warp % 4)
            elif warp < 16:
                self.set_registers(SCORE_REGISTERS)
                self.wide_score_warpgroup(maker, scale, live_length, rank, warp // 4 % 2, warp % 4)
            else:
                self.set_registers(COPY_REGISTERS)
                if warp == 16:
                    self.maker_copy_warp(maker, q_atom, q_tensor, k_atom, k_tensor, begin, live_length, head, rank)
                if warp == 17:
                    self.maker_gate_warp(maker, g, beta, a_log, dt_bias, begin, live_length, head, rank)
                if warp >= 18:
                    self.hand_over_warp(maker, words, slots, live_length, rank, warp - 18)
        # The other chain may still write to this block's shared memory, or arrive there.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

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
            cute.arch.mbarrier_init(storage.taken.data_ptr() + group, 1)
        for i in range(SETS * 2):
            cute.arch.mbarrier_init(storage.gates_full.data_ptr() + i, 32)
            cute.arch.mbarrier_init(storage.factors_full.data_ptr() + i, WARPGROUP)
            cute.arch.mbarrier_init(storage.gates_free.data_ptr() + i, 8)
