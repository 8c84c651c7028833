"""A copy warp: rows of keys and values of its windows of positions, one position a lane, into the ring."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.problems import SparseDecodeParams
from kernels_cute.attention.decode.places import columns_of, sequence_of
from kernels_cute.attention.decode.spec import TILE, WINDOW, Spec, Work
from kernels_cute.common import ptx
from kernels_cute.common.memory import narrowed


@cute.jit
def copy_warp(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, number: Int32):
    """number: of the warp among the copy warps. Indices are read two of its windows ahead, table entries one."""
    lane = cute.arch.lane_idx()
    step = cutlass.const_expr(WINDOW * spec.copy_warps)
    sequence, own = Int32(0), Int32(0)
    if cutlass.const_expr(spec.problem.dense):
        sequence, own = sequence_of(params, work.token)
    first, count = columns_of(spec, params, work, own)
    column = first + number * WINDOW + lane
    index = index_at(spec, params, work, column)
    next_index = index_at(spec, params, work, column + step)
    if cutlass.const_expr(not spec.problem.dense):
        sequence, own = sequence_of(params, work.token)
    block = block_at(spec, params, sequence, index)
    cute.arch.sync_threads()  # the barriers are there

    end = first + count
    tiles = (count + (TILE - 1)) // TILE
    windows = (count + (WINDOW - 1)) // WINDOW
    for window in cutlass.range(number, windows, spec.copy_warps, unroll=1):
        after_next = index_at(spec, params, work, column + 2 * step)
        next_block = block_at(spec, params, sequence, next_index)
        is_valid = (column < end) & (index >= 0) & (index <= own)
        valid = cute.arch.vote_ballot_sync(is_valid)
        offset = index % spec.block_size
        for half in cutlass.range_constexpr(WINDOW // TILE):
            tile = window * (WINDOW // TILE) + half
            if tile < tiles:
                stage = prepare_stage(spec, storage, tile, valid >> (TILE * half) & ((1 << TILE) - 1))
                if is_valid & (lane // TILE == half):
                    copy_rows(spec, storage, params, work, stage, lane % TILE, Int64(block), offset)
        index, next_index, block = next_index, after_next, next_block
        column += step
    cute.arch.sync_threads()  # the ring is read


@cute.jit
def index_at(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, column: Int32):
    """Position in a column; after the last column anything."""
    index = column
    if cutlass.const_expr(not spec.problem.dense):
        last = cute.size(params.topk_indices, mode=[1]) - 1
        index = narrowed(params.topk_indices[work.token, cutlass.min(column, last)])
    return index


@cute.jit
def block_at(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, sequence: Int32, index: Int32):
    """Cache block of a position; of one that is not in the table anything."""
    last = cute.size(params.block_tables, mode=[1]) - 1
    return params.block_tables[sequence, cutlass.min(cutlass.max(index, 0) // spec.block_size, last)]


@cute.jit
def prepare_stage(spec: cutlass.Constexpr[Spec], storage, tile: Int32, valid: Int32):
    """Waits for the stage of a tile, announces its bytes; the values of positions that do not count become 0, since 0 * NaN is
    not. valid: a bit for each position."""
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
def copy_rows(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, stage, row, block: Int64, offset):
    """Key and value of a position, by its lane."""
    full = (storage.full.data_ptr() + stage).toint()
    keys = storage.ring.data_ptr().toint() + stage * spec.stage_bytes + row * spec.pitch
    for gCache, target in ((params.k_cache, keys), (params.v_cache, keys + TILE * spec.pitch)):
        place = block * gCache.stride[0] + Int64(offset) * gCache.stride[1]
        for piece in cutlass.range_constexpr(spec.pieces):
            head = Int64(work.kv_set * spec.kv_heads + piece) * gCache.stride[2]
            source = gCache.iterator.toint() + (place + head) * (gCache.element_type.width // 8)
            ptx.copy_from_global(target + piece * spec.piece_bytes, source, Int32(spec.piece_bytes), full)
