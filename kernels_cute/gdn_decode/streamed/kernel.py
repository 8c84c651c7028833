"""The streamed form of the fused decode step with a ring: its launch, and the warps that multiply states.

A block takes items (a sequence and a key head, with all its value heads) in turn. One warp copies states, in tiles of 32 columns
of V, and one entries to shared memory, as far ahead as there is room; four warps make an item ready, while eight multiply the
states of the one before it.
"""

from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common.init_barriers import init_barriers
from kernels_cute.common.memory import heads_of
from kernels_cute.gdn_decode.projections import flat_views
from kernels_cute.gdn_decode.streamed.columns import leave, run_tile
from kernels_cute.gdn_decode.streamed.copies import copy_warp
from kernels_cute.gdn_decode.streamed.handover import key_head_of, published
from kernels_cute.gdn_decode.streamed.prepare import prepare_warps
from kernels_cute.gdn_decode.streamed.sizes import COLUMNS, DIM, PREPARE_WARPS, TILES_OF_HEAD, WARPS
from kernels_cute.gdn_decode.streamed.spec import Spec, shared_of


class Role(IntEnum):
    """First warp of each role of a block."""

    MULTIPLY = 0
    PREPARE = WARPS
    COPY_STATES = WARPS + PREPARE_WARPS
    COPY_ENTRIES = WARPS + PREPARE_WARPS + 1


class Registers(NamedTuple):
    """Registers of a thread of each role; together they are those of an SM. Warpgroups get them, so two idle warps stand next to
    the two that copy."""

    math: int
    prepare: int
    copy: int


def registers_of(spec: Spec) -> Registers:
    """Return the registers of each role. Threads that prepare take more if they have further channels, threads that multiply if
    the state is float32."""
    return Registers(168, 152, 24) if spec.turns > 1 and spec.state_dtype is not Float32 else Registers(176, 136, 24)


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
        params = flat_views(spec.problem, params)._replace(out=heads_of(params.out, 0, spec.problem.num_v_heads, DIM))
        # The carveout is given so that the DSL does not ask a device for it while compiling.
        limits = {"min_blocks_per_mp": 1, "preferred_smem_carveout": 100}
        grid, block = [cutlass.min(total, spec.num_blocks), 1, 1], [32 * (WARPS + PREPARE_WARPS + 4), 1, 1]
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
        if warp < Role.PREPARE:
            cute.arch.setmaxregister_increase(registers_of(spec).math)
            multiply_warps(spec, storage, params)
        elif warp < Role.COPY_STATES:
            cute.arch.setmaxregister_increase(registers_of(spec).prepare)
            prepare_warps(spec, storage, params, total, cute.arch.thread_idx()[0] - 32 * Role.PREPARE)
        else:
            cute.arch.setmaxregister_decrease(registers_of(spec).copy)
            if warp == Role.COPY_STATES:
                copy_warp(spec, storage, params, total, has_states=True)
            if warp == Role.COPY_ENTRIES:
                copy_warp(spec, storage, params, total, has_states=False)


@cute.jit
def multiply_warps(spec: Spec, storage, params: GdnDecodeParams):
    """Compute the block's live items."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    norm_weight = Float32(0.0)
    if cutlass.const_expr(spec.has_norm):  # of the column that the lane has in each of its tiles
        norm_weight = params.norm_weight[warp % TILES_OF_HEAD * COLUMNS + lane].to(Float32)
    served = Int32(0)
    while is_there(spec, storage, served):
        multiply_item(spec, storage, params, served, (warp, lane), norm_weight)
        served += 1


@cute.jit
def is_there(spec: Spec, storage, served: Int32) -> Boolean:
    """Wait for the tokens of live item `served`, and return whether there is one."""
    cute.arch.mbarrier_wait(storage.tokens_full.data_ptr() + served % 2, served // 2 % 2)
    return key_head_of(shared_of(spec, storage, served)) >= 0


@cute.jit
def multiply_item(
    spec: Spec, storage, params: GdnDecodeParams, served: Int32, place: tuple[Int32, Int32], norm_weight: Float32
):  # fmt: skip
    """place: warp and lane."""
    warp, lane = place
    buffer, shared = served % spec.buffers, shared_of(spec, storage, served)
    shared = shared._replace(sums=shared.sums + warp * (4 * COLUMNS * spec.sums_pitch))
    item, live = published(shared)
    cute.arch.mbarrier_wait(storage.entries_full.data_ptr() + buffer, served // spec.buffers % 2)
    for turn in cutlass.range(-(-spec.item_tiles // WARPS), unroll=1):
        if warp + turn * WARPS < spec.item_tiles:
            run_tile(spec, storage, params, item, live, ((served, turn), place), shared, norm_weight)
    if cutlass.const_expr(spec.item_tiles < WARPS) and warp >= spec.item_tiles:
        leave(spec, storage, served, lane)
