"""The streamed form of the fused decode step with a ring: its launch, and the warps that compute.

A block takes items (a sequence and a key head, with all its value heads) in turn. One warp copies states, in tiles of 32 columns
of V, and entries to shared memory, as far ahead as there is room; eight warps compute, and load the inputs of the next item
before they multiply the states of this one.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gdn.problems import GdnDecodeParams
from kernels_cute.common.init_barriers import init_barriers
from kernels_cute.common.ring import live_entries
from kernels_cute.gdn_decode.spec import Registers
from kernels_cute.gdn_decode.streamed.columns import run_tile
from kernels_cute.gdn_decode.streamed.copies import copy_warp
from kernels_cute.gdn_decode.streamed.inputs import load_inputs, make_registers, store_windows, write_inputs
from kernels_cute.gdn_decode.streamed.items import COUNTS, is_live, item_of, load_counts
from kernels_cute.gdn_decode.streamed.sizes import COLUMNS, DIM, TILES_OF_HEAD, WARPS
from kernels_cute.gdn_decode.streamed.spec import THREADS, WARPS_BARRIER, Item, Spec, shared_of
from kernels_cute.gdn_decode.streamed.weights import weigh

# Of a thread. Registers are given to warpgroups, so three idle warps stand next to the one that copies.
COPY_REGISTERS, MATH_REGISTERS = 56, 224


class StreamedDecode:
    """The kernel of one problem and configuration."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *values):
        """values: GdnDecodeParams, and the stream."""
        spec, params, stream = self.spec, GdnDecodeParams(*values[:-1]), values[-1]
        num_sequences = params.mixed_qkv.shape[0]
        if cutlass.const_expr(spec.has_several_tokens):
            num_sequences = params.cu_seqlens.shape[0] - 1
        total = num_sequences * spec.problem.num_k_heads
        by_head = cute.make_layout((params.out.shape[0], spec.problem.num_v_heads, DIM), stride=(params.out.stride[0], DIM, 1))
        params = params._replace(out=cute.make_tensor(params.out.iterator, by_head))
        # The carveout is given so that the DSL does not ask a device for it while compiling.
        limits = {"min_blocks_per_mp": 1, "preferred_smem_carveout": 100}
        grid, block = [cutlass.min(total, spec.num_blocks), 1, 1], [THREADS + 128, 1, 1]
        self.kernel(params, total).launch(grid=grid, block=block, stream=stream, **limits)

    @cute.kernel
    def kernel(self, params: GdnDecodeParams, total: Int32):
        spec = self.spec
        storage = cutlass.utils.SmemAllocator().allocate(spec.storage())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cute.arch.thread_idx()[0] == 0:
            init_barriers(spec.barriers, storage, 0)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp >= WARPS:
            cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            if warp == WARPS:
                copy_warp(spec, storage, params, total)
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            compute(spec, storage, params, total)


@cute.jit
def compute(spec: Spec, storage, params: GdnDecodeParams, total: Int32):
    """The block's items, by the eight warps."""
    first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    thread, warp = cute.arch.thread_idx()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rCounts = cute.make_rmem_tensor(COUNTS, Int32)
    rNext = cute.make_rmem_tensor(COUNTS, Int32)
    load_counts(spec, params, first, rCounts)
    load_counts(spec, params, cutlass.min(first + step, total - 1), rNext)
    registers = make_registers(spec)
    if is_live(spec, params, rCounts):
        load_inputs(spec, params, item_of(spec, params, first, rCounts), thread, registers)
    norm_weight = Float32(0.0)
    if cutlass.const_expr(spec.has_norm):  # of the column that the lane has in each of its tiles
        norm_weight = params.norm_weight[warp % TILES_OF_HEAD * COLUMNS + thread % 32].to(Float32)
    served = Int32(0)  # live items so far
    for number in cutlass.range(first, total, step, unroll=1):
        if is_live(spec, params, rCounts):
            item = item_of(spec, params, number, rCounts)
            run_item(spec, storage, params, item, (served, (number + step, total)), (warp, thread), rNext, registers, norm_weight)
            served += 1
        else:
            store_zeros(spec, params, rCounts[0], rCounts[0] + rCounts[1], number % spec.problem.num_k_heads, thread)
            load_next(spec, params, (number + step, total), thread, rNext, registers)
        for i in cutlass.range_constexpr(COUNTS):
            rCounts[i] = rNext[i]
        load_counts(spec, params, cutlass.min(number + 2 * step, total - 1), rNext)
    if cutlass.const_expr(spec.has_several_tokens):  # rows beyond the last sequence
        rows = Int32(params.cu_seqlens[params.cu_seqlens.shape[0] - 1])
        for row in cutlass.range(rows + first, params.out.shape[0], step, unroll=1):
            for key_head in cutlass.range(spec.problem.num_k_heads, unroll=1):
                store_zeros(spec, params, row, row + 1, key_head, thread)


@cute.jit
def load_next(
    spec: Spec, params: GdnDecodeParams, next_item: tuple[Int32, Int32], thread: Int32, rNext: cute.Tensor, registers: Registers
):  # fmt: skip
    """Inputs of the next item, if there is one. next_item: its number, and that of all items."""
    number, total = next_item
    if (number < total) & is_live(spec, params, rNext):
        load_inputs(spec, params, item_of(spec, params, number, rNext), thread, registers)


@cute.jit
def run_item(
    spec: Spec, storage, params: GdnDecodeParams, item: Item, numbers: Any, place: tuple[Int32, Int32],
    rNext: cute.Tensor, registers: Registers, norm_weight: Float32,
):  # fmt: skip
    """numbers: live items before this one, and the next item as `load_next` takes it. place: warp and thread."""
    (served, following), (warp, thread) = numbers, place
    buffer, lane = served % spec.buffers, thread % 32
    shared = shared_of(spec, storage, served, warp)
    write_inputs(spec, params, item, thread, registers, shared)
    cute.arch.barrier(barrier_id=WARPS_BARRIER, number_of_threads=THREADS)
    cute.arch.mbarrier_wait(storage.entries_full.data_ptr() + buffer, served // spec.buffers % 2)
    live = live_entries(spec.ring, shared.entries, (item.first, item.committed), params.fold_phase)
    live = live._replace(start=cutlass.min(live.start, live.count))  # of one that turns out to be padding it may be anything
    if live.is_valid:
        store_windows(spec, params, item, thread, registers.line)
    load_next(spec, params, following, thread, rNext, registers)
    weigh(spec, live, thread, shared)
    cute.arch.barrier(barrier_id=WARPS_BARRIER, number_of_threads=THREADS)
    for turn in cutlass.range(-(-spec.item_tiles // WARPS), unroll=1):
        number = warp + turn * WARPS
        if number < spec.item_tiles:
            run_tile(spec, storage, params, item, live, ((served, turn), (warp, lane)), shared, norm_weight)
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.entries_free.data_ptr() + buffer)


@cute.jit
def store_zeros(spec: Spec, params: GdnDecodeParams, first: Int32, end: Int32, key_head: Int32, thread: Int32):
    """Zeros in the rows from first on before end, in the columns of a key head."""
    for row in cutlass.range(first, end, unroll=1):
        for column in cutlass.range(thread, spec.ratio * DIM, THREADS, unroll=1):
            params.out[row, key_head * spec.ratio + column // DIM, column % DIM] = Float32(0.0).to(params.out.element_type)
