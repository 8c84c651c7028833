"""Compile-time constants of a logits kernel, and what its warp roles share at run time."""

from math import gcd
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.barriers import barriers
from kernels_cute.mqa_logits.orders import KEY_ROWS, QUERIES_PER_GROUP, HeadOrder, kv_heads_per_round
from kernels_cute.mqa_logits.shape import PAGED_QUERY_STAGES, PARTS, REGISTERS, DraftColumns, score_words

ROWS_PER_LANE = 8  # ranges one lane reads when a warp looks for work
TURN_COLUMNS = 160  # from here on the sums of a paged tile take about as long as a tile's bytes


class Tma(NamedTuple):
    """Descriptors of the copy engine and the tensors that they describe."""

    query_atom: Any
    query_tensor: Any
    key_atom: Any
    key_tensor: Any


class LogitsTiles:
    """Numbers and layouts of either kernel; sizes, strides and the scale arrive at launch.

    query_sets: math warpgroups with queries of their own; columns: of one of them.
    """

    def __init__(self, problem, config, columns: int, query_stages: int, query_sets: int, lanes_per_query: int = 1):
        self.num_heads, self.num_kv_heads, self.head_dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.dtype, row_bytes = CUTE_DTYPES[problem.dtype], problem.head_dim * CUTE_DTYPES[problem.dtype].width // 8
        self.has_k_scale, self.has_weights = problem.has_k_scale, problem.weights_dtype is not None
        self.relu, self.clean, self.relu_as_add_abs = problem.relu, problem.clean, False
        self.columns, self.query_stages, self.query_sets = columns, query_stages, query_sets
        self.lanes_per_query, self.key_stages = lanes_per_query, config.key_stages
        self.order = HeadOrder(self.num_heads, self.num_kv_heads, lanes_per_query)
        self.lane_heads = self.num_heads // lanes_per_query  # of a query, in one lane
        self.product_columns = columns // self.num_kv_heads
        self.queries_per_warpgroup = self.product_columns // self.order.slots
        self.group_queries = QUERIES_PER_GROUP // lanes_per_query
        self.groups = self.queries_per_warpgroup // self.group_queries
        self.queries = query_sets * self.queries_per_warpgroup
        self.query_box = (self.order.run, self.group_queries, self.order.pairs, self.head_dim)
        self.row_bytes, self.k_steps = row_bytes, row_bytes // 32
        self.query_bytes = query_sets * columns * row_bytes
        self.accumulator_sets = 1

    def set_keys(self, tile: int, kv_heads_per_round: int) -> None:
        """tile: keys of a stage; kv_heads_per_round: key heads of a stage."""
        self.tile, self.kv_heads_per_round = tile, kv_heads_per_round
        self.rounds = self.num_kv_heads // kv_heads_per_round  # of a tile

    def query_smem(self):
        """(head in run, query of group, pair, head_dim, groups, key head of (stage, query set))"""
        outer = self.query_sets * self.query_stages * self.num_kv_heads
        return layouts.query_layout(self.dtype, self.order.slots, self.head_dim, self.groups, outer, self.lanes_per_query)

    def query_operand_smem(self):
        """(column, head_dim, key head of (stage, query set)): the same bytes as the math warps read them."""
        outer = self.query_sets * self.query_stages * self.num_kv_heads
        return layouts.operand_layout(self.dtype, self.product_columns, self.head_dim, outer)

    def key_operand_smem(self):
        """(key, head_dim, key head of stage), as the math warps read it."""
        return layouts.operand_layout(self.dtype, self.tile, self.head_dim, self.key_stages * self.kv_heads_per_round)

    def storage(self, words: dict[str, int], tables: dict[str, tuple[int, int]]):
        """Shared memory: barriers, arrays of Int32 by length, of Float32 by (length, alignment), queries, keys."""
        fields = {name: cute.struct.MemRange[Int64, one.stages] for name, one in self.barriers.barriers.items()}
        fields |= {name: cute.struct.MemRange[Int32, length] for name, length in words.items()}
        queries = self.query_sets * self.columns * self.head_dim * self.query_stages
        keys = self.tile * self.head_dim * self.key_stages * self.kv_heads_per_round
        arrays = {name: (Float32, *table) for name, table in tables.items()}
        arrays |= {"queries": (self.dtype, queries, 1024), "keys": (self.dtype, keys, 1024)}
        for name, (dtype, length, alignment) in arrays.items():
            fields[name] = cute.struct.Align[cute.struct.MemRange[dtype, length], alignment]
        return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Work(NamedTuple):
    """Sizes of a ragged launch, the same for all blocks."""

    num_keys: Any
    query_tiles: Any
    item_tiles: Any  # key tiles of an item
    num_items: Any
    head_items: Any  # items dealt round robin
    fill_tiles: Any  # key tiles' worth of columns that a warp fills at a time
    fill_items: Any


class Ranges(NamedTuple):
    """Numbers that the list of ragged items follows from."""

    params: Any
    work: Work
    num_queries: Any
    num_columns: Any


def ranges_of(params, work: Work) -> Ranges:
    return Ranges(params, work, cute.size(params.out, mode=[0]), cute.size(params.out, mode=[1]))


class RaggedTiles(LogitsTiles):
    num_warps = 12  # copy, publish, two that fill, two math warpgroups
    takes_turns = True

    def __init__(self, problem, config):
        super().__init__(problem, config, config.columns, config.query_stages, query_sets=2)
        self.set_keys(KEY_ROWS, kv_heads_per_round(self.num_kv_heads, self.row_bytes, KEY_ROWS))
        self.packed = problem.packed
        self.accumulator_sets, self.pass_turn_at_issue = config.accumulator_sets, config.pass_turn_at_issue
        self.steps_in_flight_at_turn = config.steps_in_flight_at_turn
        # x + |x| is twice relu(x), exactly, and one FADD, which has twice the rate of FMNMX; the half goes into the scale. An
        # infinity would give NaN, but no product of FP8 values is one.
        self.relu_as_add_abs = config.relu_as_add_abs and self.relu and problem.dtype == "float8_e4m3fn"
        self.balanced_fraction, self.store_width = config.balanced_fraction, config.store_width
        self.tiles_per_item, self.num_blocks = config.tiles_per_item, config.num_blocks
        # Cost of an item beyond its key tiles, in key tiles: more where nothing loads the next queries in advance.
        self.item_cost = 1 if self.query_stages == 2 else 3
        self.load_words = self.num_blocks + PARTS if self.balanced_fraction else 1
        self.slots = self.queries * self.query_stages  # of ranges and weights
        self.score_words = score_words(self.store_width, self.queries)
        # Fewer at once where a division by the number of heads takes registers of its own.
        self.weight_loads = 4 if self.num_heads & (self.num_heads - 1) else 8
        self.item_lanes = 1 << (self.queries // ROWS_PER_LANE - 1).bit_length()
        self.batch = 32 // self.item_lanes  # items whose ranges a warp reads at once
        self.key_bytes = KEY_ROWS * self.row_bytes * self.kv_heads_per_round
        # With 128, 128 and 128 threads: the 168 a thread at launch.
        self.math_registers, self.copy_registers = (216, 72) if self.balanced_fraction else (224, 56)
        self.barriers = barriers(self.query_stages, self.key_stages, math_warps=8)
        self.key_box = (KEY_ROWS, self.head_dim)

    def key_smem(self):
        return self.key_operand_smem()

    def storage_type(self):
        words = {"loads": self.load_words, "items": 4 * self.query_stages, "starts": self.slots, "ends": self.slots}
        return self.storage(words, {"weights": (self.slots * self.num_heads, 16), "scores": (self.score_words, 16)})


class Lengths(NamedTuple):
    """Numbers that the list of paged items follows from."""

    context_lens: Any
    most_keys: Any  # lengths are clamped to it
    batch: Any
    skip_rows_up_to: Any


class PagedTiles(LogitsTiles):
    def __init__(self, problem, config, drafts: DraftColumns, kv_heads_per_round: int):
        super().__init__(problem, config, drafts.columns, PAGED_QUERY_STAGES, 1, drafts.lanes_per_query)
        self.math_warpgroups, self.blocks_per_sm = config.math_warpgroups, config.blocks_per_sm
        self.set_keys(KEY_ROWS * self.math_warpgroups, kv_heads_per_round)  # a power of two of keys
        self.passes = drafts.passes
        self.page_size, self.next_n, self.per_draft_lengths = problem.page_size, problem.next_n, problem.per_draft_lengths
        self.drafts = self.queries  # of one pass
        self.weight_slots = self.drafts * self.num_heads
        self.num_warps = 4 * (1 + self.math_warpgroups)
        self.blocks = config.num_sms * self.blocks_per_sm
        self.registers = REGISTERS[self.math_warpgroups, self.blocks_per_sm]
        self.piece = gcd(self.page_size, self.tile)
        self.piece_bits = self.piece.bit_length() - 1  # a power of two, as the tile is
        self.pieces = self.tile // self.piece
        self.tiles_per_load = 32 // self.pieces  # tiles whose pages one warp-wide load of the block table covers
        # The scales of all key heads lie together: every round brings them.
        self.piece_bytes = self.piece * (self.row_bytes * kv_heads_per_round + 4 * self.has_k_scale * self.num_kv_heads)
        self.scale_slots = self.tile * self.num_kv_heads * self.key_stages if self.has_k_scale else 4
        # Only where two warpgroups have enough columns that products and sums must not run in step.
        self.takes_turns = self.math_warpgroups == 2 and self.columns >= TURN_COLUMNS
        self.barriers = barriers(self.query_stages, self.key_stages, 4 * self.math_warpgroups)
        self.query_box = (*self.query_box, 1)
        self.key_box = (self.piece, self.head_dim, 1)

    def query_smem(self):
        """(head in run, draft in group, pair, head_dim, 1, groups, key head of stage)"""
        whole = super().query_smem()
        shape, stride = whole.outer.shape, whole.outer.stride
        outer = cute.make_layout((*shape[:4], 1, *shape[4:]), stride=(*stride[:4], 0, *stride[4:]))
        return cute.make_composed_layout(whole.inner, 0, outer)

    def key_smem(self):
        """(key in piece, head_dim, 1, pieces, key head of stage)"""
        return layouts.piece_layout(self.dtype, self.tile, self.piece, self.head_dim, self.key_stages * self.kv_heads_per_round)

    def storage_type(self):
        stages = self.query_stages
        words = {"items": 4 * stages, "lengths": self.drafts * stages}
        return self.storage(words, {"weights": (self.weight_slots * stages, 16), "scales": (self.scale_slots, 128)})
