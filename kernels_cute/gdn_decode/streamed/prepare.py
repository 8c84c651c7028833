"""The warps of the streamed form that make an item ready: its inputs, its gates, weights of its entries.

While they have an item, the warps that multiply states have the one before it. What they write for an item has two buffers. The
inputs of the item after it are loaded before its weights are computed.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common.ring import live_entries
from kernels_cute.gdn_decode.spec import Registers
from kernels_cute.gdn_decode.streamed.handover import publish, publish_end
from kernels_cute.gdn_decode.streamed.inputs import finish_inputs, load_inputs, make_registers, write_channels, write_gates
from kernels_cute.gdn_decode.streamed.items import COUNTS, is_live, item_of, load_counts
from kernels_cute.gdn_decode.streamed.sizes import DIM
from kernels_cute.gdn_decode.streamed.spec import THREADS, Item, NamedBarrier, Spec, shared_of
from kernels_cute.gdn_decode.streamed.weights import weigh


@cute.jit
def prepare_warps(spec: Spec, storage, params: GdnDecodeParams, total: Int32, thread: Int32):
    """Prepare the block's items: those whose number is the block's plus a multiple of the number of blocks. thread: among these
    warps."""
    first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    rCounts = cute.make_rmem_tensor(COUNTS, Int32)
    rNext = cute.make_rmem_tensor(COUNTS, Int32)
    load_counts(spec, params, first, rCounts)
    load_counts(spec, params, cutlass.min(first + step, total - 1), rNext)
    registers = make_registers(spec)
    if is_live(spec, params, rCounts):
        load_inputs(spec, params, item_of(spec, params, first, rCounts), thread, registers)
    served = Int32(0)  # live items so far
    for number in cutlass.range(first, total, step, unroll=1):
        if is_live(spec, params, rCounts):
            item = item_of(spec, params, number, rCounts)
            prepare_item(spec, storage, params, item, (served, (number + step, total)), thread, rNext, registers)
            served += 1
        else:
            store_zeros(spec, params, rCounts[0], rCounts[0] + rCounts[1], number % spec.problem.num_k_heads, thread)
            load_next(spec, params, (number + step, total), thread, rNext, registers)
        for i in cutlass.range_constexpr(COUNTS):
            rCounts[i] = rNext[i]
        load_counts(spec, params, cutlass.min(number + 2 * step, total - 1), rNext)
    wait_for_buffers(storage, served)
    if thread == 0:
        publish_end(shared_of(spec, storage, served))
    arrive(storage.tokens_full.data_ptr() + served % 2, thread)
    if cutlass.const_expr(spec.has_several_tokens):  # rows beyond the last sequence
        rows = Int32(params.cu_seqlens[params.cu_seqlens.shape[0] - 1])
        for row in cutlass.range(rows + first, params.out.shape[0], step, unroll=1):
            for key_head in cutlass.range(spec.problem.num_k_heads, unroll=1):
                store_zeros(spec, params, row, row + 1, key_head, thread)


@cute.jit
def load_next(
    spec: Spec, params: GdnDecodeParams, next_item: tuple[Int32, Int32], thread: Int32, rNext: cute.Tensor, registers: Registers
):  # fmt: skip
    """Load the inputs of the next item, if there is one. next_item: its number, and the number of all items."""
    number, total = next_item
    if (number < total) & is_live(spec, params, rNext):
        load_inputs(spec, params, item_of(spec, params, number, rNext), thread, registers)


@cute.jit
def prepare_item(
    spec: Spec, storage, params: GdnDecodeParams, item: Item, numbers: Any, thread: Int32, rNext: cute.Tensor,
    registers: Registers,
):  # fmt: skip
    """Prepare one item. numbers: live items before this one, and the next item as `load_next` takes it."""
    served, following = numbers
    buffer, shared = served % spec.buffers, shared_of(spec, storage, served)
    wait_for_buffers(storage, served)
    write_gates(spec, params, item, thread, registers.gates, shared)
    write_channels(spec, thread, registers, shared)
    cute.arch.mbarrier_wait(storage.entries_full.data_ptr() + buffer, served // spec.buffers % 2)
    live = live_entries(spec.ring, shared.entries, (item.first, item.committed), params.fold_phase)
    finish_inputs(spec, params, item, live, thread, registers, shared)
    if thread == 0:
        publish(item, live, shared)
    arrive(storage.tokens_full.data_ptr() + served % 2, thread)  # products with the state begin
    load_next(spec, params, following, thread, rNext, registers)
    cute.arch.barrier(barrier_id=NamedBarrier.PREPARE, number_of_threads=THREADS)
    weigh(spec, live, thread, params.scale, shared)
    arrive(storage.weights_full.data_ptr() + served % 2, thread)


@cute.jit
def wait_for_buffers(storage, served: Int32):
    """Wait until all warps that multiply have left the item two before this one."""
    cute.arch.mbarrier_wait(storage.done.data_ptr() + served % 2, served // 2 % 2 ^ 1)


@cute.jit
def arrive(barrier: cute.Pointer, thread: Int32):
    """A warp has written its part of an item."""
    cute.arch.sync_warp()
    if thread % 32 == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def store_zeros(spec: Spec, params: GdnDecodeParams, first: Int32, end: Int32, key_head: Int32, thread: Int32):
    """Zero the rows from first to end - 1 in the columns of a key head."""
    for row in cutlass.range(first, end, unroll=1):
        for column in cutlass.range(thread, spec.ratio * DIM, THREADS, unroll=1):
            params.out[row, key_head * spec.ratio + column // DIM, column % DIM] = Float32(0.0).to(params.out.element_type)
