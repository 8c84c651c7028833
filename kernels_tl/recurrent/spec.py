"""Compile-time constants of the recurrent kernel, and the places and registers that its parts hand to each other."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from gdn.problems import DTYPE_BYTES, RecurrentProblem
from gdn.recurrent_tiles import Tiles, has_pool, k_per_thread, k_vector, k_warps, writes_new_state

# Places in Registers.scalars.
ALPHA, BETA, GATE, Q_FACTOR, K_FACTOR, OUT = range(6)


class Place(NamedTuple):
    """The part of the state that a thread holds."""

    head: Any
    lane: Any  # place among the threads of a column
    v_start: Any  # the thread's first column of V


class Inputs(NamedTuple):
    """Tensors of a launch that every token reads."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class Registers(NamedTuple):
    """A thread's registers."""

    state: Any
    q_next: Any  # inputs of a token as they are loaded
    k_next: Any
    v_next: Any
    g_next: Any
    beta_next: Any
    q: Any  # float32: of the token that is computed
    k: Any
    v: Any
    sums: Any  # S k and S q of column r at 2 * r and 2 * r + 1; k q, k k, q q
    u: Any  # beta * (v - decay * S k)
    scalars: Any


class Exchange(NamedTuple):
    """Shared memory through which warps that share columns exchange sums; 0 where none do."""

    column_sums_shared: Any
    token_sums_shared: Any


@dataclass(frozen=True)
class Spec:
    """A problem, its tiles, and what follows from them."""

    problem: RecurrentProblem
    tiles: Tiles

    @cached_property
    def heads(self) -> int:
        """Number of state heads."""
        return self.problem.num_state_heads

    @cached_property
    def v_blocks(self) -> int:
        """Blocks of a head."""
        return -(-self.problem.head_v_dim // self.tiles.block_v)

    @cached_property
    def vector(self) -> int:
        """Consecutive K entries of a thread."""
        return k_vector(self.problem.state_v_first, self.problem.state_dtype, self.problem.head_k_dim)

    @cached_property
    def entries(self) -> int:
        """K entries of a thread."""
        return k_per_thread(self.problem, self.tiles.threads_per_column)

    @cached_property
    def columns(self) -> int:
        """Columns of V of a thread."""
        return self.tiles.v_per_thread

    @cached_property
    def lanes(self) -> int:
        """Threads of a column."""
        return self.tiles.threads_per_column

    @cached_property
    def chunks(self) -> int:
        """Vectors of K entries in a thread."""
        return self.entries // self.vector

    @cached_property
    def k_warps(self) -> int:
        """Warps that share a column: K first several, so that each reads whole lines of a row of V."""
        return k_warps(self.problem.state_v_first, self.problem.head_v_dim, self.tiles)

    @cached_property
    def warp_lanes(self) -> int:
        """Threads of a column in a warp."""
        return self.lanes // self.k_warps

    @cached_property
    def groups_per_warp(self) -> int:
        return 32 // self.warp_lanes

    @cached_property
    def lane_step(self) -> int:
        """Distance in threads between the lanes of a group. V first they are neighbours, so that a group reads whole lines of one
        column's K entries. K first neighbouring lanes hold neighbouring columns."""
        return 1 if self.problem.state_v_first else self.groups_per_warp

    @cached_property
    def masks_k(self) -> bool:
        return self.chunks * self.lanes * self.vector != self.problem.head_k_dim

    @cached_property
    def masks_v(self) -> bool:
        return self.problem.head_v_dim % self.tiles.block_v != 0

    @cached_property
    def width(self) -> int:
        """Values of an access of the state: 16 bytes where the dims allow."""
        if self.problem.state_v_first:
            return self.vector
        return min(self.columns, 16 // DTYPE_BYTES[self.problem.state_dtype])

    @cached_property
    def has_gate(self) -> bool:
        return self.problem.gate_dtype is not None

    @cached_property
    def use_gate(self) -> bool:
        """Whether g is the raw gate."""
        return self.problem.use_gate and self.has_gate

    @cached_property
    def has_pool(self) -> bool:
        return has_pool(self.problem)

    @cached_property
    def writes_new(self) -> bool:
        return writes_new_state(self.problem)

    @cached_property
    def writes_pool(self) -> bool:
        return self.problem.has_final_state and self.problem.pooled

    @cached_property
    def selects_values(self) -> bool:
        """In the larger code of these, the compiler takes `if lane == r: use u[r]` for u[lane], and keeps u in local memory."""
        return self.problem.has_parent or self.problem.has_rounding or not self.problem.state_v_first

    @cached_property
    def num_sums(self) -> int:
        """S k and S q of each column, k q, and k k, q q for the norms."""
        return 2 * self.columns + (3 if self.problem.use_qk_l2norm else 1)

    @cached_property
    def sum_width(self) -> int:
        return min(2 * self.columns, 4)


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
