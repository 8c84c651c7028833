"""Positions that a block has: the sequence of its query token, and its columns of the row of indices."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gdn.ops.attention.problem import SparseDecodeParams
from kernels_cute.attention.decode.sizes import TILE
from kernels_cute.attention.decode.spec import Spec, Work

_AT_ONCE = 4  # offsets that a lane asks for before it compares any


@cute.jit
def sequence_of(params: SparseDecodeParams, token: Int32):
    """Return the sequence of a query token and its position there, (-1) outside of all sequences. A whole warp calls it.

    It counts the offsets up to the token, which is one trip to memory; a binary search takes one a step.
    """
    offsets, lane = params.query_start_loc, cute.arch.lane_idx()
    count = cute.size(offsets, mode=[0])
    upto = Int32(0)
    for base in cutlass.range(0, count, 32 * _AT_ONCE, unroll=1):
        for part in cutlass.range_constexpr(_AT_ONCE):
            number = base + 32 * part + lane
            offset = offsets[cutlass.min(number, count - 1)]
            if number < count and offset <= token:
                upto += 1
    sequence = cute.arch.warp_redux_sync(upto, "add") - 1
    near = cutlass.max(cutlass.min(sequence, count - 2), 0)
    position = params.seq_lens[near] - (offsets[near + 1] - token)
    if sequence != near:
        position = Int32(-1)
    return near, position


@cute.jit
def columns_of(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, position: Int32):
    """Return the block's first column and the number of its columns. Dense attention has positions as columns, up to the query's
    own, `position`."""
    total = position + 1
    if cutlass.const_expr(not spec.problem.dense):
        total = cute.size(params.topk_indices, mode=[1])
    total = cutlass.max(Int32(total), 0)
    each = (total + (spec.splits * TILE - 1)) // (spec.splits * TILE) * TILE
    if cutlass.const_expr(spec.problem.has_topk_length):
        # After `each`: a row's split does not depend on its length.
        total = cutlass.min(total, params.topk_length[work.token])
    first = work.rank * each
    return first, cutlass.max(cutlass.min(total - first, each), 0)
