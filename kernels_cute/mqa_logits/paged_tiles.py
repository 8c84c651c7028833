"""Everything about a paged logits kernel that is known when it is compiled, and what its warp roles share at run time."""

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.mqa_logits import layouts
from kernels_cute.mqa_logits.barriers import Arrival, BarrierTable, Mbarrier, NamedBarrier, Role
from kernels_cute.mqa_logits.constants import KEY_ROWS, QUERIES_PER_GROUP

QUERY_STAGES = 2
TURN_COLUMNS = 160  # from here on the sums of a tile take about as long as a tile's bytes


@dataclass(frozen=True)
class Registers:
    """Registers of a thread. What all threads of a block ask for stays within what it got at launch, else it would hang."""

    launch: int  # an equal part of the multiprocessor's
    copy: int
    math: int


# By (math warpgroups, blocks side by side).
REGISTERS = {
    (1, 2): Registers(128, 56, 200),
    (2, 1): Registers(168, 56, 224),
    (2, 2): Registers(80, 40, 96),
}


@dataclass(frozen=True)
class DraftColumns:
    """How the drafts of a sequence become columns."""

    lanes_per_query: int  # of a quad
    groups: int  # of 4 / lanes_per_query drafts, in one pass
    passes: int  # over a sequence's keys
    columns: int  # queries x heads (odd numbers of a key head's rounded up) of one pass


class Tma(NamedTuple):
    """Descriptors of the copy engine and the tensors that they describe."""

    query_atom: Any
    query_tensor: Any
    key_atom: Any
    key_tensor: Any


class Lengths(NamedTuple):
    """What the list of items follows from."""

    context_lens: Any
    most_keys: Any  # lengths are clamped to it
    batch: Any
    skip_rows_up_to: Any


def barriers(key_stages: int, math_warpgroups: int, takes_turns: bool) -> BarrierTable:
    """Turns are taken only where two warpgroups have enough columns that products and sums must not run in step; both meet the
    same tiles, so turns alternate strictly. Warpgroup 1 hands out the first, warpgroup 0 takes the last."""
    copy, publish, math = Role("copy", 1), Role("publish", 1), Role("math", 4 * math_warpgroups)
    mbarriers = (
        Mbarrier("queries_full", QUERY_STAGES, (Arrival(copy, has_bytes=True), Arrival(publish, lanes=32)), (math,)),
        Mbarrier("queries_free", QUERY_STAGES, (Arrival(math),), (copy, publish)),
        Mbarrier("keys_full", key_stages, (Arrival(copy, has_bytes=True),), (math,)),
        Mbarrier("keys_free", key_stages, (Arrival(math),), (copy,)),
    )
    # The other warpgroup arrives, this one waits, before it issues a tile.
    turn = NamedBarrier("turn", 2, Role("math of the other warpgroup", 4), Role("math of one warpgroup", 4), count=2)
    return BarrierTable(mbarriers, (turn,) if takes_turns else ())


class PagedTiles:
    """Numbers and layouts; sizes, strides and the scale arrive at launch."""

    def __init__(self, problem, config, drafts: DraftColumns, kv_heads_per_round: int):
        self.num_heads, self.num_kv_heads, self.head_dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.lanes_per_query, self.groups, self.passes = drafts.lanes_per_query, drafts.groups, drafts.passes
        self.order = layouts.HeadOrder(self.num_heads, self.num_kv_heads, self.lanes_per_query)
        self.dtype = cutlass.Float8E4M3FN if problem.dtype == "float8_e4m3fn" else cutlass.BFloat16
        self.has_k_scale, self.has_weights = problem.has_k_scale, problem.weights_dtype is not None
        self.relu, self.clean, self.relu_as_add_abs = problem.relu, problem.clean, False
        self.page_size, self.next_n, self.per_draft_lengths = problem.page_size, problem.next_n, problem.per_draft_lengths
        self.group_drafts = QUERIES_PER_GROUP // self.lanes_per_query
        self.drafts = self.groups * self.group_drafts  # of one pass
        self.columns = self.drafts * self.order.columns
        self.product_columns = self.columns // self.num_kv_heads
        self.weight_slots = self.drafts * self.num_heads
        self.lane_heads = self.num_heads // self.lanes_per_query  # of a draft, in one lane
        self.math_warpgroups, self.blocks_per_sm = config.math_warpgroups, config.blocks_per_sm
        self.key_stages = config.key_stages
        self.num_warps = 4 * (1 + self.math_warpgroups)
        self.blocks = config.num_sms * self.blocks_per_sm
        self.registers = REGISTERS[self.math_warpgroups, self.blocks_per_sm]
        self.tile = KEY_ROWS * self.math_warpgroups  # keys; a power of two
        self.piece = gcd(self.page_size, self.tile)
        self.piece_bits = self.piece.bit_length() - 1  # a power of two, as the tile is
        self.pieces = self.tile // self.piece
        self.tiles_per_load = 32 // self.pieces  # tiles whose pages one warp-wide load of the block table covers
        row_bytes = self.head_dim * self.dtype.width // 8
        self.kv_heads_per_round = kv_heads_per_round  # and of a stage of keys
        self.rounds = self.num_kv_heads // kv_heads_per_round  # of a tile
        self.query_bytes = self.columns * row_bytes
        # The scales of all key heads lie together: every round brings them.
        self.piece_bytes = self.piece * (row_bytes * kv_heads_per_round + 4 * self.has_k_scale * self.num_kv_heads)
        self.scale_slots = self.tile * self.num_kv_heads * self.key_stages if self.has_k_scale else 4
        self.k_steps = row_bytes // 32
        self.takes_turns = self.math_warpgroups == 2 and self.columns >= TURN_COLUMNS
        self.barriers = barriers(self.key_stages, self.math_warpgroups, self.takes_turns)

    def query_box(self):
        return (self.order.run, self.group_drafts, self.order.pairs, self.head_dim, 1)

    def query_smem(self):
        """(head in run, draft in group, pair, head_dim, 1, groups, key head of stage)"""
        outer = QUERY_STAGES * self.num_kv_heads
        whole = layouts.query_layout(self.dtype, self.order.slots, self.head_dim, self.groups, outer, self.lanes_per_query)
        shape, stride = whole.outer.shape, whole.outer.stride
        outer = cute.make_layout((*shape[:4], 1, *shape[4:]), stride=(*stride[:4], 0, *stride[4:]))
        return cute.make_composed_layout(whole.inner, 0, outer)

    def query_operand_smem(self):
        """(column, head_dim, key head of stage): the same bytes as the math warps read them."""
        return layouts.operand_layout(self.dtype, self.product_columns, self.head_dim, QUERY_STAGES * self.num_kv_heads)

    def key_smem(self):
        """(key in piece, head_dim, 1, pieces, key head of stage)"""
        return layouts.piece_layout(self.dtype, self.tile, self.piece, self.head_dim, self.key_stages * self.kv_heads_per_round)

    def key_operand_smem(self):
        """(key, head_dim, key head of stage): the same bytes as the math warps read them."""
        return layouts.operand_layout(self.dtype, self.tile, self.head_dim, self.key_stages * self.kv_heads_per_round)

    def storage_type(self):
        query_elements = self.columns * self.head_dim * QUERY_STAGES
        key_elements = self.tile * self.head_dim * self.key_stages * self.kv_heads_per_round

        @cute.struct
        class Storage:
            queries_full: cute.struct.MemRange[Int64, QUERY_STAGES]
            queries_free: cute.struct.MemRange[Int64, QUERY_STAGES]
            keys_full: cute.struct.MemRange[Int64, self.key_stages]
            keys_free: cute.struct.MemRange[Int64, self.key_stages]
            items: cute.struct.MemRange[Int32, 4 * QUERY_STAGES]
            lengths: cute.struct.MemRange[Int32, self.drafts * QUERY_STAGES]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.weight_slots * QUERY_STAGES], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, self.scale_slots], 128]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, query_elements], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, key_elements], 1024]

        return Storage
