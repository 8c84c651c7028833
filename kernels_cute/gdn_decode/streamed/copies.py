"""The copy warps of the streamed form: one has the states of every item of the block, one the entries, each as far ahead as there
is room.

An item's stages become free long before its entries, so neither warp waits for the other; only at the start does the warp of the
states wait, until the first entries have been asked for. Otherwise they would come after all of its states. A barrier counts what
has been copied, and the counts of an item are loaded while the one before it is copied.

Of states only so many bytes are on their way at once as keep the memory busy (`Sizes.in_flight`). More of them would only stand
in front of the small pieces that the other warps wait for.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.ring import row_of
from kernels_cute.gdn_decode.streamed.items import COUNTS, is_live, item_of, load_counts
from kernels_cute.gdn_decode.streamed.sizes import DIM, WARPS
from kernels_cute.gdn_decode.streamed.spec import Item, NamedBarrier, Spec, entries_of, stage_of


@cute.jit
def copy_warp(spec: Spec, storage, params: GdnDecodeParams, total: Int32, has_states: Constexpr):
    """Copy the states, or the entries, of the block's items: those whose number is the block's plus a multiple of the number of
    blocks."""
    first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    rCounts = cute.make_rmem_tensor(COUNTS, Int32)
    rNext = cute.make_rmem_tensor(COUNTS, Int32)
    load_counts(spec, params, first, rNext)
    served = Int32(0)  # live items so far
    for number in cutlass.range(first, total, step, unroll=1):
        for i in cutlass.range_constexpr(COUNTS):
            rCounts[i] = rNext[i]
        load_counts(spec, params, cutlass.min(number + step, total - 1), rNext)
        if is_live(spec, params, rCounts):
            item = item_of(spec, params, number, rCounts)
            if cutlass.const_expr(has_states):
                if number == first:
                    cute.arch.barrier(barrier_id=NamedBarrier.START, number_of_threads=64)
                copy_states(spec, storage, params, item, served)
            else:
                copy_entries(spec, storage, params, item, served)
                if number == first:
                    cute.arch.barrier_arrive(barrier_id=NamedBarrier.START, number_of_threads=64)
            served += 1


@cute.jit
def copy_entries(spec: Spec, storage, params: GdnDecodeParams, item: Item, served: Int32):
    """Copy the entries that may be live, one a lane, and the slot's count."""
    lane, ring, gRing, ratio = cute.arch.lane_idx(), spec.ring, params.ring, cutlass.const_expr(spec.ratio)
    buffer = served % spec.buffers
    cute.arch.mbarrier_wait(storage.entries_free.data_ptr() + buffer, served // spec.buffers % 2 ^ 1)
    full = storage.entries_full.data_ptr() + buffer
    entries, count = entries_of(spec, storage, served), item.committed - item.first
    if lane < count:
        number = row_of(ring, Int32(Uint32(item.first) % ring.rows), lane)
        row = gRing.iterator.toint() + (Int64(item.slot) * gRing.stride[0] + Int64(number) * gRing.stride[1]) * 4
        bytes_of_key, bytes_of_updates = cutlass.const_expr(4 * DIM), cutlass.const_expr(4 * ratio * DIM)
        ptx.copy_from_global(
            entries.keys + lane * bytes_of_key, row + item.key_head * bytes_of_key, Int32(bytes_of_key), full.toint()
        )
        updates = row + 4 * ring.updates_at + item.key_head * bytes_of_updates
        ptx.copy_from_global(entries.updates + lane * bytes_of_updates, updates, Int32(bytes_of_updates), full.toint())
        decays = row + 4 * (ring.decays_at + item.key_head * ratio)
        # Several at once are an address in two registers each, of the few that this warp has.
        for head in cutlass.range(ratio, unroll=cutlass.const_expr(ratio if ratio <= 2 else 1)):
            ptx.copy_one(entries.decays + (head * spec.decay_pitch + lane) * 4, decays + 4 * head)
    if lane == 31:
        gWritten = params.state_tokens
        ptx.copy_one(entries.written, gWritten.iterator.toint() + Int64(item.slot) * gWritten.stride[0] * 4)
    # Bytes that have come before they are announced count below zero: the phase ends with the last arrival, which is of the lane
    # whose single words have come last.
    if lane == 0:
        cute.arch.mbarrier_expect_tx(full, count * (4 * (1 + ratio) * DIM))
    cute.arch.cp_async_mbarrier_arrive_noinc(full)


@cute.jit
def copy_states(spec: Spec, storage, params: GdnDecodeParams, item: Item, served: Int32):
    """Copy all tiles of the key head's states."""
    gState, size = params.ssm_state, cutlass.const_expr(spec.tile_bytes)
    if cute.arch.lane_idx() == 0:
        source = gState.iterator.toint() + Int64(item.slot) * gState.stride[0] * (gState.element_type.width // 8)
        source += Int64(item.key_head) * (spec.item_tiles * size)
        for tile in cutlass.range(spec.item_tiles, unroll=1):
            wait_for_earlier(spec, storage, served, tile)
            stage, parity = stage_of(spec, served, tile % WARPS, tile // WARPS)
            full = storage.state_full.data_ptr() + stage
            cute.arch.mbarrier_wait(storage.state_free.data_ptr() + stage, parity ^ 1)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            target = storage.state.data_ptr().toint() + stage * size
            ptx.copy_from_global(target, source + Int64(tile) * size, Int32(size), full.toint())
    cute.arch.sync_warp()


@cute.jit
def wait_for_earlier(spec: Spec, storage, served: Int32, tile: Int32):
    """Wait until the tile that was asked for `in_flight` tiles before this one is there."""
    number = served * spec.item_tiles + tile - spec.in_flight
    if number >= 0:
        item, earlier = number // spec.item_tiles, number % spec.item_tiles
        stage, parity = stage_of(spec, item, earlier % WARPS, earlier // WARPS)
        cute.arch.mbarrier_wait(storage.state_full.data_ptr() + stage, parity)
