"""Work tiles of the blocks of the fused chunk kernel, and which cluster takes which.

A work tile is a (sequence, state head), or with blocks alone a (sequence, state head, 64 V columns). The grid has at most as many
clusters as run side by side, and cluster c begins with work tile c. The rest is dealt, the longest sequence first, each work tile
to the cluster that has the least so far. Sequences beyond SORTED are dealt in their own order, and so are all where another
kernel makes the rows at the same time (`spec.sorts_sequences`). Every block computes the deal for itself, from cu_seqlens alone:
nothing is exchanged, and no workspace holds a counter.

The gate warp deals, a work tile ahead of its own gates, and leaves work tiles for all warps in a ring of records. A record
without a sequence ends the block's work. All other barriers of the kernel know nothing of work tiles: chunks are counted on from
one to the next.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gdn.ops.delta_rule.problem import ChunkParams, ChunkSummaryParams
from kernels_cute.chunk.deal import RECORD_BYTES, RECORDS, SORTED, load_slots
from kernels_cute.chunk.rings import chunks_in
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.state_memory import starts_from_initial
from kernels_cute.common import ptx

_TAKEN = 0x7FFFFFFF  # the load of a cluster that is not there
# Units of a cluster's load, in quarters of a chunk's time: a work tile's end and start take 0.75 of a chunk.
_CHUNK_COST, _TILE_COST = 4, 3


class WorkTile(NamedTuple):
    """Scalars of the kernel; sequence < 0: there is none."""

    sequence: Any
    head: Any
    piece: Any  # 64 V columns
    starts: Any  # from its initial state, not from zero
    begin: Any  # first token
    length: Any  # tokens
    live_length: Any  # 0 in a padding sequence
    read_slot: Any  # of the pool, or the sequence


def num_clusters(spec: Any) -> Any:
    blocks, _, _ = cute.arch.grid_dim()
    return blocks // spec.sharers


@cute.jit
def sequence_of(spec: ChunkSpec, params: ChunkParams | ChunkSummaryParams, sequence: Int32):
    """Return a sequence's first token, its tokens, its tokens or 0 if it is padding, and the slot of its initial state."""
    begin = Int32(params.cu_seqlens[sequence])
    length = cutlass.max(Int32(params.cu_seqlens[sequence + 1]) - begin, 0)
    live_length, read_slot = length, Int64(sequence)
    if cutlass.const_expr(spec.pooled):
        read_slot = Int64(params.state_indices[sequence])
        if read_slot <= params.null_slot:
            live_length = Int32(0)
    if cutlass.const_expr(spec.skipped_tokens > 0):
        if live_length <= spec.skipped_tokens:
            length, live_length = Int32(0), Int32(0)
    return begin, length, live_length, read_slot


@cute.jit
def chunks_of(spec: ChunkSpec, params: ChunkParams, sequence: Int32):
    """Chunks of a sequence, 0 in a padding sequence."""
    _, _, live_length, _ = sequence_of(spec, params, sequence)
    return chunks_in(live_length)


@cute.jit
def write_keys(spec: ChunkSpec, storage: Any, params: ChunkParams, thread: Int32):
    """Write the sort keys of the sequences in the place of L. All differ; sequences with larger keys come earlier."""
    if thread < SORTED:
        key = Int32(-1)
        if thread < cute.size(params.cu_seqlens, mode=[0]) - 1:
            key = chunks_of(spec, params, thread) * SORTED + (SORTED - 1 - thread)
        ptx.store_word(storage.lower.data_ptr().toint() + thread * 4, key)


@cute.jit
def sort_sequences(storage: Any, cu_seqlens: cute.Tensor, thread: Int32):
    """Set order[rank] = sequence. A sequence's rank is the number of keys larger than its own."""
    sequences = cute.size(cu_seqlens, mode=[0]) - 1
    keys = storage.lower.data_ptr().toint()
    if thread < sequences:
        own, rank = ptx.load_word(keys + thread * 4), Int32(0)
        for i in cutlass.range((sequences + 3) // 4, unroll=1):
            others = ptx.load_words(keys + i * 16)
            for j in cutlass.range_constexpr(4):
                if others[j] > own:
                    rank = rank + 1
        ptx.store_byte(storage.order.data_ptr().toint() + rank, thread)


@cute.jit
def sequence_at(storage: Any, is_sorted: Boolean, rank: Int32):
    sequence = rank
    if is_sorted:
        sequence = ptx.load_byte(storage.order.data_ptr().toint() + rank)
    return sequence


@cute.jit
def cost_at(spec: ChunkSpec, storage: Any, params: ChunkParams, is_sorted: Boolean, rank: Int32):
    """Return the sequence at a rank and the cost of one of its work tiles; (-1, 0) beyond the last sequence."""
    sequence, cost = Int32(-1), Int32(0)
    if rank < cute.size(params.cu_seqlens, mode=[0]) - 1:
        sequence = sequence_at(storage, is_sorted, rank)
        cost = chunks_of(spec, params, sequence) * _CHUNK_COST + _TILE_COST
    return sequence, cost


@cute.jit
def start_loads(spec: ChunkSpec, storage: Any, loads: cute.Tensor, params: ChunkParams, is_sorted: Boolean):
    """Fill `loads`: the loads of clusters lane + 32 i after the work tiles that they begin with, then the sequence at this lane's
    rank, of 32 ranks, and the cost of one of its work tiles."""
    clusters = num_clusters(spec)
    for i in cutlass.range_constexpr(load_slots(spec.paired)):
        cluster = cute.arch.lane_idx() + 32 * i
        load = Int32(_TAKEN)
        if cluster < clusters:
            _, load = cost_at(spec, storage, params, is_sorted, cluster // spec.units)
        loads[i] = load
    load_ranks(spec, storage, loads, params, is_sorted, clusters // spec.units // 32 * 32)


@cute.jit
def load_ranks(spec: ChunkSpec, storage: Any, loads: cute.Tensor, params: ChunkParams, is_sorted: Boolean, first: Int32):
    sequence, cost = cost_at(spec, storage, params, is_sorted, first + cute.arch.lane_idx())
    loads[load_slots(spec.paired)], loads[load_slots(spec.paired) + 1] = sequence, cost


@cute.jit
def num_dealt(spec: ChunkSpec, params: ChunkParams, is_sorted: Boolean):
    """Return how many sequences are dealt. Where some are skipped and the longest come first, those with work."""
    sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
    dealt = sequences
    if cutlass.const_expr(spec.skipped_tokens > 0):
        if is_sorted:
            dealt = Int32(0)
            for first in cutlass.range(0, sequences, 32, unroll=1):
                sequence, has_work = first + cute.arch.lane_idx(), Boolean(False)
                if sequence < sequences:
                    has_work = chunks_of(spec, params, sequence) > 0
                dealt = dealt + cute.arch.popc(cute.arch.vote_ballot_sync(has_work))
    return dealt


@cute.jit
def schedule_next(
    spec: ChunkSpec, storage: Any, loads: cute.Tensor, params: ChunkParams, is_sorted: Boolean, sequences: Int32, cluster: Int32,
    rank: Int32, unit: Int32,
):  # fmt: skip
    """Deal work tiles, from unit `unit` of the sequence at `rank` on, until this cluster gets one. Return the rank and unit to go
    on from, and the sequence (or -1) and unit that this cluster got. All clusters with the least load take a unit of the sequence
    at the same time. Where some sequences are skipped, nobody gets those. sequences: of num_dealt."""
    # In one function: next to row makers the values of a loop in another one are too many for the registers of its warp.
    slots = load_slots(spec.paired)
    own_sequence, own_unit = Int32(-1), Int32(0)
    before_lane, before_own = (Int32(1) << cute.arch.lane_idx()) - 1, (Int32(1) << cluster % 32) - 1
    while (own_sequence < 0) & (rank < sequences):
        sequence, cost = (cute.arch.shuffle_sync(loads[slots + i], rank % 32) for i in range(2))
        least = loads[0]
        for i in cutlass.range_constexpr(1, slots):
            least = cutlass.min(least, loads[i])
        least = cute.arch.warp_redux_sync(least, "min")
        left, taken = spec.units - unit, Int32(0)
        if cutlass.const_expr(spec.skipped_tokens > 0):
            if cost == _TILE_COST:
                left = Int32(0)
        for i in cutlass.range_constexpr(slots):
            load = loads[i]
            mask = cute.arch.vote_ballot_sync(load == least)
            if (load == least) & (taken + cute.arch.popc(mask & before_lane) < left):
                load = least + cost
            loads[i] = load
            position = taken + cute.arch.popc(mask & before_own)
            if (cluster // 32 == i) & ((mask >> cluster % 32) & 1 == 1) & (position < left):
                own_sequence, own_unit = sequence, unit + position
            taken = taken + cute.arch.popc(mask)
        unit = unit + cutlass.min(taken, left)
        if cutlass.const_expr(spec.skipped_tokens > 0):
            if cost == _TILE_COST:
                unit = Int32(spec.units)
        if unit == spec.units:
            rank, unit = rank + 1, Int32(0)
            if rank % 32 == 0:
                load_ranks(spec, storage, loads, params, is_sorted, rank)
    return rank, unit, own_sequence, own_unit


@cute.jit
def describe(spec: ChunkSpec, params: ChunkParams, sequence: Int32, unit: Int32, rank: Int32):
    """Return a unit of a sequence as a work tile. rank: of the block in the pair."""
    begin, length, live_length, head, piece = (Int32(0),) * 5
    read_slot, starts = Int64(sequence), Boolean(False)
    if sequence >= 0:
        begin, length, live_length, read_slot = sequence_of(spec, params, sequence)
        starts = starts_from_initial(spec, params.has_initial_state, sequence, live_length)
        head, piece = unit, rank
        if cutlass.const_expr(spec.state_heads > 1):
            head = unit * spec.state_heads
        if cutlass.const_expr(not spec.paired):
            head, piece = unit // spec.slices, unit % spec.slices
    return WorkTile(sequence, head, piece, starts, begin, length, live_length, read_slot)


@cute.jit
def write_record(storage: Any, number: Int32, work_tile: WorkTile):
    record = number % RECORDS
    starts = Int32(0)
    if work_tile.starts:
        starts = Int32(1)
    cute.arch.mbarrier_wait(storage.work_empty.data_ptr() + record, number // RECORDS & 1 ^ 1)
    if cute.arch.lane_idx() == 0:
        address = storage.records.data_ptr().toint() + record * RECORD_BYTES
        ptx.store_words(address, (work_tile.sequence, work_tile.head, 2 * work_tile.piece + starts, work_tile.begin))
        slot = work_tile.read_slot
        ptx.store_words(address + 16, (work_tile.length, work_tile.live_length, Int32(slot), Int32(slot >> 32)))
        cute.arch.mbarrier_arrive(storage.work_full.data_ptr() + record)


@cute.jit
def read_record(storage: Any, number: Int32):
    """Wait until the block's work tile `number` is dealt, and return it."""
    record = number % RECORDS
    cute.arch.mbarrier_wait(storage.work_full.data_ptr() + record, number // RECORDS & 1)
    address = storage.records.data_ptr().toint() + record * RECORD_BYTES
    first, second = ptx.load_words(address), ptx.load_words(address + 16)
    read_slot = (Int64(second[3]) << 32) | (Int64(second[2]) & 0xFFFFFFFF)
    return WorkTile(first[0], first[1], first[2] >> 1, (first[2] & 1) == 1, first[3], second[0], second[1], read_slot)


@cute.jit
def note_record(storage: Any, number: Int32):
    """Say that this warp needs the record no longer."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(storage.work_empty.data_ptr() + number % RECORDS)


@cute.jit
def take_work_tile(storage: Any, number: Int32, single_tile: WorkTile | None):
    """Return the block's work tile `number`. single_tile: the block's only tile; None reads tiles from the records."""
    work_tile = single_tile
    if cutlass.const_expr(single_tile is None):
        work_tile = read_record(storage, number)
        note_record(storage, number)
    return work_tile


@cute.jit
def has_more_tiles(work_tile: WorkTile, single_tile: WorkTile | None):
    """Whether there may be another work tile after this one."""
    has_more = Boolean(False)
    if cutlass.const_expr(single_tile is None):
        has_more = work_tile.sequence >= 0
    return has_more


def segment_work_tile(segment: Any, head: Any, piece: Any) -> WorkTile:
    return WorkTile(segment.sequence, head, piece, None, segment.begin, segment.length, segment.live_length, segment.read_slot)
