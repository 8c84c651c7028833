"""How the math warps of the ragged logits kernel write scores.

After the sum over heads a lane has two keys, 8 apart, of one query a group; eight lanes have neighbouring keys. A store
instruction writes `store_width` neighbouring scores of a row:

    8    directly from the accumulators: four rows, a 32-byte sector each
    32   through shared memory, where the four warps of a warpgroup lay their keys side by side: one row, a line of 128 bytes
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from kernels_cute.mqa_logits.barriers import SCORES, wait_named
from kernels_cute.mqa_logits.layouts import KEY_ROWS
from kernels_cute.mqa_logits.ptx import store_between
from kernels_cute.mqa_logits.tiles import PITCH


class Target(NamedTuple):
    """Where the scores of an item go."""

    out: Any
    line: Any  # pointer to this lane's first row of out
    query: Any  # that row's number in the query tile
    stage: Any  # of the item
    half: Any  # math warpgroup
    warp: Any  # in its warpgroup


@cute.jit
def target_of(tiles, out, row0, stage, half, warp):
    query = half * tiles.queries_per_warpgroup
    if cutlass.const_expr(tiles.store_width == 8):
        query = query + cute.arch.lane_idx() % 4
    return Target(out, out.iterator + Int64(row0 + query) * out.stride[0], query, stage, half, warp)


@cute.jit
def begin_tile(tiles, target):
    """Waits, before a tile's first `put`, until the scores of the tile before have been read from shared memory."""
    if cutlass.const_expr(tiles.store_width == 32):
        wait_named(SCORES, target.half)


@cute.jit
def put(tiles, storage, target, tile, group: cutlass.Constexpr, low, high):
    """Scores of this lane's query of a group; its keys are key and key + 8."""
    out, lane = target.out, cute.arch.lane_idx()
    key = tile * KEY_ROWS + 16 * target.warp + lane // 4
    if cutlass.const_expr(tiles.store_width == 8):
        first, end = range_of(tiles, storage, target.stage, target.query + 4 * group)
        start = start_of(tiles, target.line + 4 * group * out.stride[0], first) + key
        store_between(out.element_type, start, low, key, first, end)
        store_between(out.element_type, start + 8, high, key + 8, first, end)
    else:
        sScores = storage.scores.get_tensor(cute.make_layout(tiles.score_words))
        at = (target.query + 4 * group + lane % 4) * PITCH + 16 * target.warp + lane // 4
        sScores[at] = low
        sScores[at + 8] = high


@cute.jit
def finish_tile(tiles, storage, target, tile):
    """Writes, after a tile's last `put`, what went through shared memory."""
    if cutlass.const_expr(tiles.store_width == 32):
        out, lane = target.out, cute.arch.lane_idx()
        sScores = storage.scores.get_tensor(cute.make_layout(tiles.score_words))
        wait_named(SCORES, target.half)
        for step in cutlass.range_constexpr(tiles.queries_per_warpgroup // 4):
            row = 4 * step + target.warp
            first, end = range_of(tiles, storage, target.stage, target.query + row)
            for part in cutlass.range_constexpr(KEY_ROWS // 32):
                key = tile * KEY_ROWS + 32 * part + lane
                start = start_of(tiles, target.line + row * out.stride[0], first) + key
                score = sScores[(target.query + row) * PITCH + 32 * part + lane]
                store_between(out.element_type, start, score, key, first, end)


@cute.jit
def range_of(tiles, storage, stage, query):
    sStarts = storage.starts.get_tensor(cute.make_layout(tiles.slots))
    sEnds = storage.ends.get_tensor(cute.make_layout(tiles.slots))
    return sStarts[stage * tiles.queries + query], sEnds[stage * tiles.queries + query]


@cute.jit
def start_of(tiles, line, first):
    """Address of key 0 in a row."""
    if cutlass.const_expr(tiles.packed):
        line = line - first
    return line
