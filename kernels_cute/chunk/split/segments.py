"""Segments of sequences, for calls that split sequences; the summaries that carry a state across them; and the work of blocks of
segments before their first chunk, which composes the state that a segment starts from (compose.py).

A segment is `segment_tokens` tokens of a sequence (its last one what is left; a sequence without tokens has one). Segment s of
sequence n has the slot

    cu_seqlens[n] // segment_tokens + n + s

so blocks find theirs from cu_seqlens alone, and nothing depends on the rest of the batch but the slot's number. With
a = cu_seqlens[n] / segment_tokens and b the sequence's length in segments: floor(a) + max(ceil(b), 1) <= floor(a + b) + 1, so the
slots of n end before n + 1's begin, and the last one is below floor(num_tokens / segment_tokens) + sequences. Slots in between
may have no segment.

Where short sequences are another launch's (`ChunkSpec.skipped_tokens`) only the longer ones count: with n the number of those in
front of a sequence the same holds, and the last slot is below floor(num_tokens / segment_tokens) + longer sequences. A block
finds its sequence by a pass over all of them. The host does not know how many there are, and makes slots for as many as it
expects; if there are more, whole sequences are computed instead (`is_selected_launch`).

The workspace holds per slot and state head a summary, 8 D^2 bytes: with S_s the state before segment s,
S_(s+1) = P_s S_s + h_s.
    h  float32, in the order of a state warpgroup's registers: [64 V columns][n = 8 K columns][warp][lane][4]
    P  transposed, as two bfloat16 summands (hi, lo), each D / 64 tiles of 64 rows in the swizzled order of a K tile: byte for
       byte as in shared memory later
A sequence's last segment needs no summary: its h is the state before the whole sequence, which the blocks of the last segment
may overwrite in the pool before those of the first one have read it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands
from kernels_cute.chunk.operands import accumulators, register_operand, tiled_mma
from kernels_cute.chunk.scheduler import sequence_of
from kernels_cute.chunk.shape import CHUNK, START_BUFFERS
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.shape import summary_bytes
from kernels_cute.chunk.state_memory import load_state
from kernels_cute.common import ptx


class Segment(NamedTuple):
    """The segment that a block works on. Scalars of the kernel; the same in both blocks of a pair."""

    exists: Any  # the slot has a segment
    is_summarized: Any  # of several in a live sequence: its state goes through summaries
    sequence: Any
    index: Any  # in the sequence
    count: Any  # segments of the sequence
    first: Any  # slot of segment 0
    before: Any  # tokens of the sequence in front of it
    begin: Any  # first token
    length: Any  # tokens
    live_length: Any  # 0 in a padding sequence
    read_slot: Any  # of the pool, or the sequence
    workspace: Any


@cute.jit
def find_segment(spec: ChunkSpec, params: ChunkParams, slot: Int32, segment_tokens: Int32):
    if cutlass.const_expr(spec.skipped_tokens > 0):
        found, first = find_longer(slot, params.cu_seqlens, segment_tokens, spec.skipped_tokens)
        sequence = cutlass.max(found, 0)
        start, length, _, read_slot = sequence_of(spec, params, sequence)
        if found < 0:
            first, length = slot - 1, Int32(0)  # no segment has this slot: it is beyond the only one of no tokens
    else:
        sequence = find_sequence(slot, params.cu_seqlens, segment_tokens)
        start, length, _, read_slot = sequence_of(spec, params, sequence)
        first = start // segment_tokens + sequence
    index = slot - first
    count = cutlass.max((length + (segment_tokens - 1)) // segment_tokens, 1)
    before = index * segment_tokens
    segment_length = cutlass.max(cutlass.min(length - before, segment_tokens), 0)
    live_length, is_live = segment_length, Boolean(True)
    if cutlass.const_expr(spec.pooled):
        is_live = read_slot > params.null_slot
        if read_slot <= params.null_slot:
            live_length = Int32(0)
    return Segment(
        index < count, is_live & (count > 1), sequence, index, count, first, before, start + before, segment_length,
        live_length, read_slot, params.workspace,
    )  # fmt: skip


@cute.jit
def find_sequence(slot: Int32, cu_seqlens: cute.Tensor, segment_tokens: Int32):
    """Return the last sequence whose first slot is not beyond `slot`. A warp narrows the range 32-fold in each step."""
    lane = cute.arch.lane_idx()
    low = Int32(0)
    span = Int32(cute.size(cu_seqlens, mode=[0]) - 1)
    while span > 1:
        stride = (span + 31) // 32
        is_before = Boolean(False)
        if lane * stride < span:
            sequence = low + lane * stride
            is_before = Int32(cu_seqlens[sequence]) // segment_tokens + sequence <= slot
        found = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) - 1, 0) * stride
        low = low + found
        span = cutlass.min(stride, span - found)
    return low


@cute.jit
def find_longer(slot: Int32, cu_seqlens: cute.Tensor, segment_tokens: Int32, skipped: cutlass.Constexpr):
    """Return the last sequence of more than `skipped` tokens whose first slot is not beyond `slot`, and that slot; -1 and -1
    where there is none. Each warp finds it for itself."""
    lane, count = cute.arch.lane_idx(), cute.size(cu_seqlens, mode=[0]) - 1
    lower = (Int32(1) << lane) - 1
    found, first, before = Int32(-1), Int32(-1), Int32(0)
    for begin in cutlass.range(0, count, 32, unroll=1):
        sequence, start, is_longer = begin + lane, Int32(0), Boolean(False)
        if sequence < count:
            start = Int32(cu_seqlens[sequence])
            is_longer = Int32(cu_seqlens[sequence + 1]) - start > skipped
        longer = cute.arch.vote_ballot_sync(is_longer)
        own = start // segment_tokens + before + cute.arch.popc(longer & lower)
        if is_longer & (own <= slot):
            found, first = sequence, own
        before = before + cute.arch.popc(longer)
    return cute.arch.warp_redux_sync(found, "max"), cute.arch.warp_redux_sync(first, "max")


def summary_address(spec: Any, segment: Segment, index: Any, head: Any) -> Any:
    """First byte of the summary of segment `index` of the sequence."""
    number = Int64(segment.first + index) * spec.heads + head
    return segment.workspace.iterator.toint() + number * summary_bytes(spec.dim)


def transition_address(spec: Any, segment: Segment, index: Any, head: Any) -> Any:
    return summary_address(spec, segment, index, head) + summary_bytes(spec.dim) // 2


def load_summary(spec: Any, address: Any, group: Any, warp: Any, lane: Any, sums: Any) -> None:
    """h of 64 V columns; sums: the accumulators of a state warpgroup."""
    for n in range(spec.dim // 8):
        values = ptx.load_global_four(summary_access(spec, address, group, n, warp, lane))
        for i in range(4):
            sums[4 * n + i] = values[i]


def store_summary(spec: Any, address: Any, group: Any, warp: Any, lane: Any, sums: Any) -> None:
    for n in range(spec.dim // 8):
        ptx.store_global_four(summary_access(spec, address, group, n, warp, lane), [sums[4 * n + i] for i in range(4)])


def summary_access(spec: Any, address: Any, group: Any, n: int, warp: Any, lane: Any) -> Any:
    return address + Int64(((group * (spec.dim // 8) + n) * 4 + warp) * 512 + lane * 16)


@cute.jit
def bring_start(spec: ChunkSpec, storage: Any, head: Int32, segment: Segment):
    """Load the P of the segments before this one, in the copying warp, before its first chunk."""
    if segment.is_summarized & (segment.index > 1):
        size = spec.transition_tiles * spec.key_bytes
        for i in cutlass.range(1, segment.index, unroll=1):
            buffer, turn = (i - 1) % START_BUFFERS, (i - 1) // START_BUFFERS & 1
            cute.arch.mbarrier_wait(storage.used.data_ptr() + buffer, turn ^ 1)
            with cute.arch.elect_one():
                brought = storage.brought.data_ptr() + buffer
                cute.arch.mbarrier_arrive_and_expect_tx(brought, size)
                source = transition_address(spec, segment, i, head)
                target = storage.k.data_ptr().toint() + buffer * size
                for tile in cutlass.range_constexpr(spec.transition_tiles):
                    offset = tile * spec.key_bytes
                    ptx.copy_from_global(target + offset, source + offset, Int32(spec.key_bytes), brought.toint())
        cute.arch.mbarrier_wait(storage.composed.data_ptr(), 0)


@cute.jit
def start_of_segment(
    spec: ChunkSpec, storage: Any, params: ChunkParams, state: cute.Tensor, head: Int32, segment: Segment, group: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """Set `state` to S^T before the segment, in the 64 V columns `group`."""
    if segment.is_summarized:
        first = Int32(0)
        if segment.index == 0:
            first = segment.count - 1  # the place of the state before the sequence
        load_summary(spec, summary_address(spec, segment, first, head), group, warp, lane, state)
        if segment.index > 1:
            compose(spec, storage, state, head, segment, group, warp, lane)
    else:
        row0 = group * spec.columns + warp * 16 + lane // 4
        load_state(spec, params, state, segment, head, row0, lane % 4)


@cute.jit
def compose(
    spec: ChunkSpec, storage: Any, state: cute.Tensor, head: Int32, segment: Segment, group: Int32, warp: Int32, lane: Int32
):
    """Compute S_1 to S_s of the V columns `group`, with s = segment.index > 1."""
    dim, steps = spec.dim, CHUNK // 16
    mma = tiled_mma(BFloat16, dim, True)
    # K stages, then Q stages: 2 buffers of hi and lo, whatever the dtype of the tokens.
    layout = operands.by_columns(BFloat16, CHUNK, dim, START_BUFFERS * spec.transition_tiles)
    tensor = storage.k.get_tensor(layout.outer, swizzle=layout.inner, dtype=BFloat16)
    tiles = mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))
    high, high_words = register_operand(BFloat16, mma, dim)
    low, low_words = register_operand(BFloat16, mma, dim)
    sums = accumulators(mma, dim)
    for i in cutlass.range(1, segment.index, unroll=1):
        buffer, turn = (i - 1) % START_BUFFERS, (i - 1) // START_BUFFERS & 1
        load_summary(spec, summary_address(spec, segment, i, head), group, warp, lane, sums)
        cute.arch.mbarrier_wait(storage.brought.data_ptr() + buffer, turn)
        tile = buffer * spec.transition_tiles
        for step in cutlass.range_constexpr(dim // 16):
            for j in cutlass.range_constexpr(4):
                index = 4 * step + j
                high_words[index] = ptx.pack(BFloat16, state[2 * index], state[2 * index + 1])
                first, second = ptx.unpack(BFloat16, high_words[index])
                low_words[index] = ptx.pack(BFloat16, state[2 * index] - first, state[2 * index + 1] - second)
            warpgroup.fence()
            rows, inner = step // steps, step % steps
            of_high = tiles[None, None, inner, tile + rows]
            of_low = tiles[None, None, inner, tile + dim // 64 + rows]
            mma.set(warpgroup.Field.ACCUMULATE, True)
            for left, right in ((low, of_high), (high, of_low), (high, of_high)):
                cute.gemm(mma, sums, left[None, None, step], right, sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for index in cutlass.range_constexpr(dim // 2):
            state[index] = sums[index]
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.used.data_ptr() + buffer)
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.composed.data_ptr())
