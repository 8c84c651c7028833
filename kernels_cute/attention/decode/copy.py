"""A copy warp: rows of keys and values of every `copy_warps`-th tile into the ring, one row a lane."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.attention.problem import SparseDecodeParams
from kernels_cute.attention.decode.places import columns_of, sequence_of
from kernels_cute.attention.decode.sizes import TILE
from kernels_cute.attention.decode.spec import NamedBarrier, Spec, Work
from kernels_cute.common import ptx
from kernels_cute.common.memory import narrowed


@cute.jit
def copy_warp(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, number: Int32):
    """number: of the warp among the copy warps.

    Indices are asked for three of its tiles ahead, table entries two, and none is touched before the tile in between has
    been sent off: a wait for them delays nothing that is known already.
    """
    lane = cute.arch.lane_idx()
    step = cutlass.const_expr(TILE * spec.copy_warps)
    sequence, own = Int32(0), Int32(0)
    if cutlass.const_expr(spec.problem.dense):
        sequence, own = sequence_of(params, work.token)
    first, count = columns_of(spec, params, work, own)
    column, end = first + number * TILE + lane % TILE, first + count
    found = [index_at(spec, params, work, column + ahead * step, end) for ahead in range(3)]
    if cutlass.const_expr(not spec.problem.dense):
        sequence, own = sequence_of(params, work.token)
    index, next_index, third = narrowed(found[0]), narrowed(found[1]), found[2]
    block, next_block = block_at(spec, params, sequence, index), block_at(spec, params, sequence, next_index)
    cute.arch.barrier(barrier_id=NamedBarrier.COPY, number_of_threads=spec.copy_barrier_threads)  # the mbarriers are there

    for tile in cutlass.range(number, (count + (TILE - 1)) // TILE, spec.copy_warps, unroll=1):
        is_valid = (column < end) & (index >= 0) & (index <= own)
        stage = prepare_stage(spec, storage, tile, cute.arch.vote_ballot_sync(is_valid) & ((1 << TILE) - 1))
        if is_valid:
            copy_row(spec, storage, params, work, stage, Int64(block), index % spec.block_size)
        # Maxima that change nothing which is used: moves would be compiled to the start of the next tile, and wait there for what
        # is asked for here.
        index, block = cutlass.max(next_index, -1), cutlass.max(next_block, 0)
        next_index = cutlass.max(narrowed(third), -1)
        next_block = block_at(spec, params, sequence, next_index)
        column += step
        third = index_at(spec, params, work, column + 2 * step, end)


@cute.jit
def index_at(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, column: Int32, end: Int32):
    """Load the index of a column, as wide as it is: narrowing it would wait for it. From `end` on load that of the last column
    before `end`."""
    index = column
    if cutlass.const_expr(not spec.problem.dense):
        last = cutlass.max(cutlass.min(end, cute.size(params.topk_indices, mode=[1])) - 1, 0)
        index = params.topk_indices[work.token, cutlass.min(column, last)]
    return index


@cute.jit
def block_at(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, sequence: Int32, index: Int32):
    """Load the cache block of a position. For a position that is not in the table the result may be anything."""
    last = cute.size(params.block_tables, mode=[1]) - 1
    return params.block_tables[sequence, cutlass.min(cutlass.max(index, 0) // spec.block_size, last)]


@cute.jit
def prepare_stage(spec: cutlass.Constexpr[Spec], storage, tile: Int32, valid: Int32):
    """Wait for a tile's stage, and announce its bytes. Zero the values of positions that do not count: 0 * NaN is NaN. valid: a
    bit for each position."""
    lane = cute.arch.lane_idx()
    stage, parity = tile % spec.stages, tile // spec.stages & 1
    cute.arch.mbarrier_wait(storage.free.data_ptr() + stage, parity ^ 1)
    if (valid != 0) & (valid != (1 << TILE) - 1):
        values = storage.ring.data_ptr().toint() + stage * spec.stage_bytes + TILE * spec.pitch
        for row in cutlass.range(TILE, unroll=1):
            if valid >> row & 1 == 0:
                for first in cutlass.range_constexpr(0, spec.row_bytes, 512):
                    if first + lane * 16 < spec.row_bytes:
                        ptx.store_zeros(values + row * spec.pitch + first + lane * 16)
        # The copy engine writes here again later.
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        ptx.store_word(storage.valid.data_ptr().toint() + stage * 4, valid)
        cute.arch.mbarrier_arrive_and_expect_tx(storage.full.data_ptr() + stage, cute.arch.popc(valid) * (2 * spec.row_bytes))
    cute.arch.sync_warp()
    return stage


@cute.jit
def copy_row(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, stage, block: Int64, offset):
    """Copy the key (lanes 0 to 15) or the value (lanes 16 to 31) of the lane's position."""
    lane = cute.arch.lane_idx()
    gKeys, gValues = params.k_cache, params.v_cache
    head = Int64(work.kv_set * spec.kv_heads)
    base = gKeys.iterator.toint()
    element = block * gKeys.stride[0] + Int64(offset) * gKeys.stride[1] + head * gKeys.stride[2]
    head_stride = gKeys.stride[2]
    if lane >= TILE:
        base = gValues.iterator.toint()
        element = block * gValues.stride[0] + Int64(offset) * gValues.stride[1] + head * gValues.stride[2]
        head_stride = gValues.stride[2]
    target = storage.ring.data_ptr().toint() + stage * spec.stage_bytes + lane * spec.pitch
    full = (storage.full.data_ptr() + stage).toint()
    for piece in cutlass.range_constexpr(spec.pieces):
        source = base + (element + piece * head_stride) * (gKeys.element_type.width // 8)
        ptx.copy_from_global(target + piece * spec.piece_bytes, source, Int32(spec.piece_bytes), full)
