"""Compile-time constants of the recurrent kernel, and the part of the state that a thread holds."""

from typing import Any, NamedTuple

from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Tiles, has_pool, k_per_thread, k_vector, k_warps, writes_new_state
from gdn.problem import DTYPE_BYTES

# Places in the registers' scalars.
ALPHA, BETA, GATE, Q_FACTOR, K_FACTOR, OUT = range(6)


class Place(NamedTuple):
    """The part of the state that a thread holds."""

    head: Any
    lane: Any  # place among the threads of a column
    v_start: Any  # the thread's first column of V


class Spec:
    """A problem, its tiles, and what follows from them."""

    def __init__(self, problem: RecurrentProblem, tiles: Tiles) -> None:
        p = self.problem = problem
        self.tiles = tiles
        self.heads = p.num_state_heads
        self.v_blocks = -(-p.head_v_dim // tiles.block_v)  # of a head
        self.vector = k_vector(p.state_v_first, p.state_dtype, p.head_k_dim)  # consecutive K entries of a thread
        self.entries = k_per_thread(p, tiles.threads_per_column)  # all K entries of a thread
        self.columns = tiles.v_per_thread  # of V of a thread
        self.lanes = tiles.threads_per_column
        self.chunks = self.entries // self.vector  # vectors of K entries in a thread
        # Warps that share a column: K first several, so that each reads whole lines of a row of V.
        self.k_warps = k_warps(p.state_v_first, p.head_v_dim, tiles)
        self.warp_lanes = self.lanes // self.k_warps  # threads of a column in a warp
        self.groups_per_warp = 32 // self.warp_lanes
        # Distance in threads between the lanes of a group. V first they are neighbours, so that a group reads whole lines of one
        # column's K entries. K first neighbouring lanes hold neighbouring columns.
        self.lane_step = 1 if p.state_v_first else self.groups_per_warp
        self.masks_k = self.chunks * self.lanes * self.vector != p.head_k_dim
        self.masks_v = p.head_v_dim % tiles.block_v != 0
        # Values of an access of the state: 16 bytes where the dims allow.
        self.width = self.vector if p.state_v_first else min(self.columns, 16 // DTYPE_BYTES[p.state_dtype])
        self.has_gate = p.gate_dtype is not None
        self.use_gate = p.use_gate and self.has_gate  # g is the raw gate
        self.has_pool, self.writes_new = has_pool(p), writes_new_state(p)
        self.writes_pool = p.has_final_state and p.pooled
        # In the larger code of these, the compiler takes `if lane == r: use u[r]` for u[lane], and keeps u in local memory.
        self.selects_values = p.has_parent or p.has_rounding or not p.state_v_first
        # S k and S q of each column, k q, and k k, q q for the norms.
        self.num_sums = 2 * self.columns + (3 if p.use_qk_l2norm else 1)
        self.sum_width = min(2 * self.columns, 4)
        self.has_one_buffer = p.has_parent and p.ring_rows is None  # for the sums that warps exchange


def register(spec: Spec, column: Any, entry: Any) -> Any:
    """Register of (column, K entry): the dim that is contiguous in memory runs fastest."""
    return column * spec.entries + entry if spec.problem.state_v_first else entry * spec.columns + column


def first_entry(spec: Spec, chunk: Any, lane: Any) -> Any:
    """First K entry of a thread's chunk."""
    return (chunk * spec.lanes + lane) * spec.vector


def k_exists(spec: Spec, entry: Any) -> Any:
    return entry < spec.problem.head_k_dim if spec.masks_k else True


def v_exists(spec: Spec, v_start: Any) -> Any:
    return v_start < spec.problem.head_v_dim if spec.masks_v else True
