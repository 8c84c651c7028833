"""Everything about a ragged logits kernel that is known when it is compiled, and what its warp roles share at run time."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.barriers import Arrival, BarrierTable, Mbarrier, NamedBarrier, Role
from kernels_cute.mqa_logits.constants import KEY_ROWS, QUERIES_PER_GROUP

NUM_WARPS = 12  # copy, publish, two that fill, two math warpgroups
PARTS = 32  # of the items that are dealt in runs, one a lane
ROWS_PER_LANE = 8  # ranges one lane reads when a warp looks for work
PITCH = KEY_ROWS + 8  # words between rows of scores: four rows of eight keys then lie in 32 different banks


class Tma(NamedTuple):
    """Descriptors of the copy engine and the tensors that they describe."""

    query_atom: Any
    query_tensor: Any
    key_atom: Any
    key_tensor: Any


class Work(NamedTuple):
    """Sizes of a launch, the same for all blocks."""

    num_keys: Any
    query_tiles: Any
    item_tiles: Any  # key tiles of an item
    num_items: Any
    head_items: Any  # items dealt round robin
    fill_tiles: Any  # key tiles' worth of columns that a warp fills at a time
    fill_items: Any


class Ranges(NamedTuple):
    """What the list of items follows from."""

    starts: Any  # cu_seqlen_ks
    ends: Any  # cu_seqlen_ke
    num_queries: Any
    num_keys: Any
    num_columns: Any
    query_tiles: Any
    item_tiles: Any
    skip_rows_up_to: Any


def ranges_of(params, work: Work) -> Ranges:
    num_queries, num_columns = cute.size(params.out, mode=[0]), cute.size(params.out, mode=[1])
    return Ranges(
        params.cu_seqlen_ks, params.cu_seqlen_ke, num_queries, work.num_keys, num_columns, work.query_tiles, work.item_tiles,
        params.skip_rows_up_to,
    )  # fmt: skip


def score_words(store_width: int, queries: int) -> int:
    """Words of shared memory that both warpgroups' scores of one tile take; at least one, as a field of a struct."""
    return queries * PITCH if store_width == 32 else 1


def barriers(query_stages: int, key_stages: int, has_runs: bool, store_width: int) -> BarrierTable:
    """Both warpgroups meet the same tiles, so the turns alternate strictly; warpgroup 1 hands out the first turn, and
    warpgroup 0 takes the last one when the list has ended."""
    copy, publish = Role("copy", 1), Role("publish", 1)
    math, math_warpgroup, fill, walkers = Role("math", 8), Role("math", 4), Role("fill", 2), Role("copy and publish", 2)
    mbarriers = (
        Mbarrier("queries_full", query_stages, (Arrival(copy, has_bytes=True), Arrival(publish, lanes=32)), (math,)),
        Mbarrier("queries_free", query_stages, (Arrival(math),), (copy, publish)),
        Mbarrier("keys_full", key_stages, (Arrival(copy, has_bytes=True),), (math,)),
        Mbarrier("keys_free", key_stages, (Arrival(math),), (copy,)),
    )
    # The other warpgroup arrives, this one waits, before it issues a tile.
    named = [NamedBarrier("turn", 2, Role("math of the other warpgroup", 4), math_warpgroup, count=2)]
    if store_width == 32:  # of a math warpgroup, twice a tile
        named.append(NamedBarrier("scores", 4, math_warpgroup, math_warpgroup, count=2))
    if has_runs:  # costs are added up; waited for where the runs begin
        named.append(NamedBarrier("costs", 6, fill, walkers))
    return BarrierTable(mbarriers, tuple(named))


class RaggedTiles:
    """Numbers and layouts; sizes, strides and the scale arrive at launch."""

    def __init__(self, problem, config):
        self.num_heads, self.num_kv_heads, self.head_dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.order = layouts.HeadOrder(self.num_heads, self.num_kv_heads)
        self.lane_heads = self.num_heads
        fp8 = problem.dtype == "float8_e4m3fn"
        self.dtype = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
        self.has_k_scale, self.has_weights = problem.has_k_scale, problem.weights_dtype is not None
        self.relu, self.clean, self.packed = problem.relu, problem.clean, problem.packed
        self.bounded = not self.packed  # ranges end with the columns of out, too
        self.columns, self.query_stages, self.key_stages = config.columns, config.query_stages, config.key_stages
        self.accumulator_sets, self.pass_turn_at_issue = config.accumulator_sets, config.pass_turn_at_issue
        self.steps_in_flight_at_turn = config.steps_in_flight_at_turn
        # x + |x| is twice relu(x), exactly, and one FADD, which has twice the rate of FMNMX; the half goes into the scale. An
        # infinity would give NaN, but no product of FP8 values is one.
        self.relu_as_add_abs = config.relu_as_add_abs and self.relu and fp8
        self.balanced_fraction, self.store_width = config.balanced_fraction, config.store_width
        self.tiles_per_item, self.num_blocks = config.tiles_per_item, config.num_blocks
        # Cost of an item beyond its key tiles, in key tiles: more where nothing loads the next queries in advance.
        self.item_cost = 1 if self.query_stages == 2 else 3
        self.load_words = self.num_blocks + PARTS if self.balanced_fraction else 1
        self.product_columns = self.columns // self.num_kv_heads
        self.queries_per_warpgroup = self.product_columns // self.order.slots
        self.groups = self.queries_per_warpgroup // QUERIES_PER_GROUP
        self.queries = 2 * self.queries_per_warpgroup
        self.slots = self.queries * self.query_stages  # of ranges and weights
        self.score_words = score_words(self.store_width, self.queries)
        # Fewer at once where a division by the number of heads takes registers of its own.
        self.weight_loads = 4 if self.num_heads & (self.num_heads - 1) else 8
        self.item_lanes = 1 << (self.queries // ROWS_PER_LANE - 1).bit_length()
        self.batch = 32 // self.item_lanes  # items whose ranges a warp reads at once
        row_bytes = self.head_dim * self.dtype.width // 8
        self.query_bytes = 2 * self.columns * row_bytes
        self.kv_heads_per_round = layouts.kv_heads_per_round(self.num_kv_heads, row_bytes, KEY_ROWS)  # and of a stage of keys
        self.rounds = self.num_kv_heads // self.kv_heads_per_round  # of a tile
        self.key_bytes = KEY_ROWS * row_bytes * self.kv_heads_per_round
        self.k_steps = row_bytes // 32
        # With 128, 128 and 128 threads: the 168 a thread at launch.
        self.math_registers, self.copy_registers = (216, 72) if self.balanced_fraction else (224, 56)
        has_runs = 0 < self.balanced_fraction < 8
        self.barriers = barriers(self.query_stages, self.key_stages, has_runs, self.store_width)

    def query_box(self):
        return (2, QUERIES_PER_GROUP, self.order.pairs, self.head_dim)

    def query_smem(self):
        """(head in run, query, pair, head_dim, groups, key head of (stage, warpgroup))"""
        outer = 2 * self.query_stages * self.num_kv_heads
        return layouts.query_layout(self.dtype, self.order.slots, self.head_dim, self.groups, outer)

    def query_operand_smem(self):
        """(column, head_dim, key head of (stage, warpgroup)): the same bytes as the math warps read them."""
        outer = 2 * self.query_stages * self.num_kv_heads
        return layouts.operand_layout(self.dtype, self.product_columns, self.head_dim, outer)

    def key_smem(self):
        """(key, head_dim, key head of stage)"""
        return layouts.operand_layout(self.dtype, KEY_ROWS, self.head_dim, self.key_stages * self.kv_heads_per_round)

    def storage_type(self):
        query_elements = 2 * self.columns * self.head_dim * self.query_stages
        key_elements = KEY_ROWS * self.head_dim * self.key_stages * self.kv_heads_per_round

        @cute.struct
        class Storage:
            queries_full: cute.struct.MemRange[Int64, self.query_stages]
            queries_free: cute.struct.MemRange[Int64, self.query_stages]
            keys_full: cute.struct.MemRange[Int64, self.key_stages]
            keys_free: cute.struct.MemRange[Int64, self.key_stages]
            loads: cute.struct.MemRange[Int32, self.load_words]
            items: cute.struct.MemRange[Int32, 4 * self.query_stages]
            starts: cute.struct.MemRange[Int32, self.slots]
            ends: cute.struct.MemRange[Int32, self.slots]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.slots * self.num_heads], 16]
            scores: cute.struct.Align[cute.struct.MemRange[Float32, self.score_words], 16]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, query_elements], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, key_elements], 1024]

        return Storage
