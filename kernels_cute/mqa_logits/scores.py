"""How the math warps of the ragged logits kernel write scores.

After the sum over heads a lane has two keys, 8 apart, of one query a group; eight lanes have neighbouring keys. A store
instruction writes `store_width` neighbouring scores of a row:

    8    directly from the accumulators: four rows, a 32-byte sector each
    32   through shared memory, where the four warps of a warpgroup lay their keys side by side: one row, a line of 128 bytes
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from kernels_cute.mqa_logits.ptx import store_between

KEY_ROWS, WARPGROUP = 64, 128  # as in _logits_ragged
SCORES_BARRIER = 4  # named barriers 4 and 5: one a math warpgroup
PITCH = KEY_ROWS + 8  # words between rows: four rows of eight keys then lie in 32 different banks


def score_words(store_width: int, queries: int) -> int:
    """Words of shared memory that both warpgroups' scores of one tile take; at least one, as a field of a struct."""
    return queries * PITCH if store_width == 32 else 1


class Scores:
    """Methods of RaggedLogits."""

    @cute.jit
    def place(self, storage, out, row0, stage, half):
        """The pointer to this lane's first row of out, and that row's number in the query tile."""
        query = half * self.queries_per_warpgroup
        if cutlass.const_expr(self.store_width == 8):
            query = query + cute.arch.lane_idx() % 4
        return out.iterator + Int64(row0 + query) * out.stride[0], query

    @cute.jit
    def begin(self, place, half):
        """Before a tile's first `put`: what the tile before left in shared memory has been read."""
        if cutlass.const_expr(self.store_width == 32):
            cute.arch.barrier(barrier_id=SCORES_BARRIER + half, number_of_threads=WARPGROUP)

    @cute.jit
    def look(self, place, group: cutlass.Constexpr):
        """Before a group's sums: what its `put` needs from shared memory can be asked for."""

    @cute.jit
    def leave(self, place):
        """After an item's last tile."""

    @cute.jit
    def put(self, storage, out, place, stage, tile, warp, group: cutlass.Constexpr, low, high):
        """Scores of this lane's query of a group; its keys are key and key + 8."""
        line, query = place
        lane = cute.arch.lane_idx()
        key = tile * KEY_ROWS + 16 * warp + lane // 4
        if cutlass.const_expr(self.store_width == 8):
            first, end = self.range_of(storage, stage, query + 4 * group)
            start = self.start_of(line + 4 * group * out.stride[0], first) + key
            store_between(out.element_type, start, low, key, first, end)
            store_between(out.element_type, start + 8, high, key + 8, first, end)
        else:
            s_scores = storage.scores.get_tensor(cute.make_layout(self.score_words))
            at = (query + 4 * group + lane % 4) * PITCH + 16 * warp + lane // 4
            s_scores[at] = low
            s_scores[at + 8] = high

    @cute.jit
    def finish(self, storage, out, place, stage, tile, half, warp):
        """After a tile's last `put`."""
        if cutlass.const_expr(self.store_width == 32):
            line, query = place
            lane = cute.arch.lane_idx()
            s_scores = storage.scores.get_tensor(cute.make_layout(self.score_words))
            cute.arch.barrier(barrier_id=SCORES_BARRIER + half, number_of_threads=WARPGROUP)
            for step in cutlass.range_constexpr(self.queries_per_warpgroup // 4):
                row = 4 * step + warp
                first, end = self.range_of(storage, stage, query + row)
                for part in cutlass.range_constexpr(KEY_ROWS // 32):
                    key = tile * KEY_ROWS + 32 * part + lane
                    start = self.start_of(line + row * out.stride[0], first) + key
                    store_between(out.element_type, start, s_scores[(query + row) * PITCH + 32 * part + lane], key, first, end)

    @cute.jit
    def range_of(self, storage, stage, query):
        slots = self.queries * self.query_stages
        s_starts, s_ends = storage.starts.get_tensor(cute.make_layout(slots)), storage.ends.get_tensor(cute.make_layout(slots))
        return s_starts[stage * self.queries + query], s_ends[stage * self.queries + query]

    @cute.jit
    def start_of(self, line, first):
        """Where key 0 would stand in a row."""
        if cutlass.const_expr(self.packed):
            line = line - first
        return line
