"""The gate role: cumulative log2 decays and beta of the chunks that a block prepares; in a persistent grid it schedules, too."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import ChunkParams, ChunkSummaryParams
from kernels_cute.chunk import scheduler
from kernels_cute.chunk.rings import PreparedChunks, chunks_in, gate_place, prepared_chunks
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, CUM, KEY_BETA, LOG2E, LOWEST_LOG_DECAY, SOFTPLUS_THRESHOLD
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx


@cute.jit
def gate_warp(
    spec: ChunkSpec, storage: Any, params: ChunkParams | ChunkSummaryParams, work_tile: WorkTile, prepared: PreparedChunks,
    prefetched: Any = None,
):  # fmt: skip
    """Compute the cumulative log2 decay and beta of every chunk this block prepares. The loads of the next chunk are issued
    first, so the wait for a free buffer hides their latency. prefetched: loads of the first chunk, if they are on their way."""
    begin, length, head = work_tile.begin, work_tile.live_length, work_tile.head
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(prefetched is None):
        prefetched = prefetch_work_tile(spec, params, work_tile, prepared.first, lane)
    heads = []
    for words, log_rate, bias in prefetched:
        minus_rate = -cute.math.exp(log_rate.to(Float32)) if cutlass.const_expr(spec.raw_gate) else log_rate  # of softplus
        heads.append((words, minus_rate, bias.to(Float32)))
    gates_full, gates_free = storage.gates_full.data_ptr(), storage.gates_free.data_ptr()
    for step in cutlass.range(prepared.first, chunks_in(length), prepared.stride, unroll=1):
        gate_buffer, gate_turn = gate_place(prepared, step)
        for i, (words, minus_rate, bias) in enumerate(heads):
            rows = storage.rows.data_ptr().toint() + (gate_buffer * spec.state_heads + i) * AUX_BYTES
            values = make_gates(spec, params, words, minus_rate, bias, length - step * CHUNK, lane)
            prefetch_gates(spec, params, words, begin, (step + prepared.stride) * CHUNK, length, head + i, lane)
            if cutlass.const_expr(i == 0):
                cute.arch.mbarrier_wait(gates_free + gate_buffer, gate_turn ^ 1)
            ptx.store_pair(rows + CUM + lane * 8, values[0], values[1])
            ptx.store_pair(rows + KEY_BETA + lane * 8, values[2], values[3])
        cute.arch.mbarrier_arrive(gates_full + gate_buffer)


@cute.jit
def schedule_and_gate(
    spec: ChunkSpec, storage: Any, params: ChunkParams, is_sorted: Boolean, cluster: Int32, rank: Int32, work_tile: WorkTile
):
    """Do all work of the gate warp in a persistent grid: deal work tiles, and make the gates of each. work_tile: the first one,
    where sequences are not sorted."""
    clusters = scheduler.num_clusters(spec)
    loads = cute.make_rmem_tensor(cute.make_layout(scheduler.load_slots(spec.paired) + 2), Int32)
    if is_sorted:
        sequence = scheduler.sequence_at(storage, is_sorted, cluster // spec.units)
        scheduler.write_record(storage, Int32(0), scheduler.describe(spec, params, sequence, cluster % spec.units, rank))
    else:
        scheduler.write_record(storage, Int32(0), work_tile)
    scheduler.start_loads(spec, storage, loads, params, is_sorted)
    sequences = scheduler.num_dealt(spec, params, is_sorted)
    next_rank, next_unit = clusters // spec.units, clusters % spec.units
    number, base, has_more = Int32(0), Int32(0), Boolean(True)
    while has_more:
        work_tile = scheduler.take_work_tile(storage, number, None)
        has_more = work_tile.sequence >= 0
        number = number + 1
        prepared = prepared_chunks(spec, base, rank)
        prefetched = prefetch_work_tile(spec, params, work_tile, prepared.first, cute.arch.lane_idx())
        if has_more:
            next_rank, next_unit, sequence, unit = scheduler.schedule_next(
                spec, storage, loads, params, is_sorted, sequences, cluster, next_rank, next_unit
            )
            scheduler.write_record(storage, number, scheduler.describe(spec, params, sequence, unit, rank))
        gate_warp(spec, storage, params, work_tile, prepared, prefetched)
        base = base + chunks_in(work_tile.live_length)


def prefetch_work_tile(spec: Any, params: Any, work_tile: Any, first: Any, lane: Any) -> Any:
    """Issue the loads of chunk `first` of a work tile, and of the constants of its heads. Return (words, A_log, dt_bias) of each
    head."""
    prefetched = []
    for i in range(spec.state_heads):
        words, head = cute.make_rmem_tensor(cute.make_layout(4), Int32), work_tile.head + i
        prefetch_gates(spec, params, words, work_tile.begin, first * CHUNK, work_tile.live_length, head, lane)
        prefetched.append((words, *((params.A_log[head], params.dt_bias[head]) if spec.raw_gate else (Float32(0.0),) * 2)))
    return tuple(prefetched)


# Loaded values stay as they are in memory until they are used: a conversion, or a branch around the load, would
# have the warp wait for one answer of the memory after the other.
def prefetch_gates(spec: Any, params: Any, words: Any, begin: Any, offset: Any, length: Any, head: Any, lane: Any) -> None:
    """Issue the loads of g, then beta, of tokens 2 l and 2 l + 1 of a chunk in lane l; 0 past the sequence's end."""
    for i in range(2):
        token = offset + 2 * lane + i
        for kind, x in enumerate((params.g, params.beta)):
            if x is not None:
                element, size = Int64(begin + token) * x.stride[0] + head_offset(x, head), x.element_type.width // 8
                words[2 * kind + i] = ptx.load_global_if(x.iterator.toint() + element * size, size, length - token)


def head_offset(x: Any, head: Any) -> Any:
    """Elements before a head of g or beta, whose heads may be (heads of a group, groups)."""
    if not isinstance(x.stride[1], tuple):
        return Int64(head) * x.stride[1]
    ratio, (inner, outer) = x.shape[1][0], x.stride[1]
    return Int64(head // ratio) * outer + Int64(head % ratio) * inner


@cute.jit
def make_gates(
    spec: ChunkSpec, params: ChunkParams | ChunkSummaryParams, words: cute.Tensor, minus_rate: Float32, bias: Float32,
    valid: Int32, lane: Int32,
):  # fmt: skip
    """Return the cumulative log2 decays and the betas of a lane's two tokens. Tokens past the end have g = 0 and beta = 0."""
    logs, strengths = (cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(2))
    for i in cutlass.range_constexpr(2):
        log_decay = ptx.number(params.g.element_type, words[i]) if cutlass.const_expr(spec.has_gate) else Float32(0.0)
        if cutlass.const_expr(spec.raw_gate):
            raw = log_decay + bias
            softplus = raw
            if raw <= SOFTPLUS_THRESHOLD:
                softplus = cute.math.log1p(cute.math.exp(raw))
            log_decay = minus_rate * softplus
        strength = Float32(1.0)
        if cutlass.const_expr(spec.has_beta):
            strength = ptx.number(params.beta.element_type, words[2 + i])
            if cutlass.const_expr(spec.raw_beta):
                strength = 1.0 / (1.0 + cute.math.exp(-strength))
        if 2 * lane + i >= valid:
            log_decay, strength = Float32(0.0), Float32(0.0)
        # A NaN gate stays NaN.
        if log_decay < LOWEST_LOG_DECAY:
            log_decay = Float32(LOWEST_LOG_DECAY)
        logs[i] = log_decay * LOG2E
        strengths[i] = strength
    total = logs[0] + logs[1]
    for power in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(total, 1 << power, mask_and_clamp=0)
        if lane >= 1 << power:
            total = total + before
    before = cute.arch.shuffle_sync_up(total, 1, mask_and_clamp=0)
    if lane == 0:
        before = Float32(0.0)
    first = before + logs[0]
    return first, first + logs[1], strengths[0], strengths[1]
