"""A head's state in the registers of a block: who holds which element, and the way from and to a slot of the pool.

`threads_per_column` threads share the K entries of `v_per_thread` columns of V each. V first: the threads of a group are
neighbours, so that a group reads whole lines of one column's K entries. K first: neighbouring lanes hold neighbouring columns,
and the threads of a column are spread over `k_warps` warps, so that a warp reads 64 columns of a row, whole lines. Every byte
moves once each way, past L1 and out of L2 first.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Tiles, k_vector, k_warps
from gdn.ops.layer_step.problem import GdnDecodeProblem
from gdn.problem import DTYPE_BYTES
from kernels_cute.common.memory import load, pointer
from kernels_cute.common.ptx import opaque
from kernels_cute.common.rounding import key_of, rounded


class Place(NamedTuple):
    """The part of the state that a thread holds."""

    head: Any  # Int32: state head
    lane: Any  # Int32: place among the threads of a column
    v_start: Any  # Int32: the thread's first column of V


def opaque_place(place: Place) -> Place:
    """Return the place with a head and a lane that the compiler does not know, so that what follows from them is computed
    here."""
    return Place(opaque(place.head), opaque(place.lane), place.v_start)


class StateTile:
    """The tile of a block, known when the kernel is compiled."""

    def __init__(self, problem: RecurrentProblem | GdnDecodeProblem, tiles: Tiles) -> None:
        k, v, state_dtype, v_first = problem.head_k_dim, problem.head_v_dim, problem.state_dtype, problem.state_v_first
        self.head_k_dim, self.head_v_dim, self.state_v_first = k, v, v_first
        self.has_rounding = problem.has_rounding  # stochastic rounding of a bfloat16 state
        self.threads, self.threads_per_column, self.v_per_thread = tiles.threads, tiles.threads_per_column, tiles.v_per_thread
        lanes = tiles.threads_per_column

        self.vector = k_vector(v_first, state_dtype, k)  # consecutive K entries of a thread
        self.chunks = -(-k // (lanes * self.vector))  # vectors of K entries in a thread, some of which may lie beyond the last
        self.k_per_thread = self.chunks * self.vector
        self.values = self.v_per_thread * self.k_per_thread  # of the state in a thread
        self.groups = self.threads // lanes  # groups of threads that share columns, in a block
        self.k_warps = k_warps(v_first, v, tiles)  # warps that share a column
        self.warp_lanes = lanes // self.k_warps  # threads of a column in a warp
        self.groups_per_warp = 32 // self.warp_lanes
        self.lane_step = 1 if v_first else self.groups_per_warp  # distance in threads between the lanes of a group
        self.group_step = lanes if v_first else 1  # distance in threads between groups
        self.masks_k = self.k_per_thread * lanes != k  # some threads hold entries of K that do not exist
        self.masks_v = v % (self.groups * self.v_per_thread) != 0  # some threads hold columns of V that do not exist
        # Elements of an access: 16 bytes where the dims allow.
        self.width = self.vector if v_first else min(self.v_per_thread, 16 // DTYPE_BYTES[state_dtype])

    def lane_and_group(self, thread: Any) -> tuple[Any, Any]:
        """A thread's lane (its K entries of a column) and group (its columns of the block)."""
        if self.state_v_first:
            return thread % self.threads_per_column, thread // self.threads_per_column
        warp = thread // 32
        lane = warp % self.k_warps * self.warp_lanes + thread % 32 // self.groups_per_warp
        return lane, warp // self.k_warps * self.groups_per_warp + thread % self.groups_per_warp

    def at(self, column: int, entry: int) -> int:
        """Register of (column, K entry) of a thread: the dim that is contiguous in memory runs fastest."""
        return column * self.k_per_thread + entry if self.state_v_first else entry * self.v_per_thread + column

    def accesses(self, width: int) -> list[tuple[int, int]]:
        """Accesses of `width` elements of a thread, (r, c): r counts columns and c accesses along K (V first), or r counts K
        entries and c accesses along V."""
        sizes = (self.v_per_thread, self.k_per_thread)
        outer, inner = sizes if self.state_v_first else reversed(sizes)
        return [(r, c) for r in range(outer) for c in range(inner // width)]

    def place_of_access(self, r: int, c: int, width: int) -> tuple[int, int, int]:
        """Offset of access (r, c) from the thread's first element, its first register, its chunk of K."""
        first = c * width
        if self.state_v_first:
            return r * self.head_k_dim + self.step_of(first), r * self.k_per_thread + first, first // self.vector
        return self.step_of(r) * self.head_v_dim + first, r * self.v_per_thread + first, r // self.vector

    def step_of(self, entry: int) -> int:
        """Distance along K of a thread's entry from its first."""
        return entry // self.vector * self.threads_per_column * self.vector + entry % self.vector

    def element_of(self, register: int) -> int:
        """k * V + v of a thread's register, counted from its first."""
        inner = self.k_per_thread if self.state_v_first else self.v_per_thread
        outer, inside = divmod(register, inner)
        column, entry = (outer, inside) if self.state_v_first else (inside, outer)
        return self.step_of(entry) * self.head_v_dim + column


@cute.jit
def is_live(tile: StateTile, place: Place, chunk: Constexpr):
    """Whether a thread's chunk of K and columns of V exist; chunk None: the columns alone."""
    live = Boolean(True)
    if cutlass.const_expr(tile.masks_k and chunk is not None):
        live = (chunk * tile.threads_per_column + place.lane) * tile.vector < tile.head_k_dim
    if cutlass.const_expr(tile.masks_v):
        live = live & (place.v_start < tile.head_v_dim)
    return live


@cute.jit
def load_state(tile: StateTile, slot: Int64, place: Place, gState: cute.Tensor, rState: cute.Tensor):
    source = state_pointer(tile, slot, place, tile.width, gState)
    for r, c in tile.accesses(tile.width):
        step, start, chunk = tile.place_of_access(r, c, tile.width)
        if is_live(tile, place, chunk):
            load(source + step, tile.width, rState, start, True)


@cute.jit
def store_state(
    tile: StateTile, slot: Int64, place: Place, width: Constexpr, gState: cute.Tensor, rState: cute.Tensor, seed: Int32
):
    """seed: mixed, of the stochastic rounding; without it anything."""
    target = state_pointer(tile, slot, place, width, gState)
    key = Int32(0)
    first = Int32(0)
    if cutlass.const_expr(tile.has_rounding):
        key = key_of(seed, slot, place.head)
        first = place.lane * (tile.vector * tile.head_v_dim) + place.v_start  # the thread's first element, K first
    rValues = cute.make_rmem_tensor(width, Float32)
    for r, c in tile.accesses(width):
        step, start, chunk = tile.place_of_access(r, c, width)
        for e in cutlass.range_constexpr(width):
            value = rState[start + e]
            rValues[e] = rounded(value, key, first + tile.element_of(start + e)) if tile.has_rounding else value
        if is_live(tile, place, chunk):
            store_once(rValues, width, target + step)


@cute.jit
def store_kept_state(tile: StateTile, row: Int64, token: Int32, place: Place, gStates: cute.Tensor, rState: cute.Tensor):
    """Stores a state, rounded to nearest, at [row, token] of gStates; the two strides are multiples of 16 bytes."""
    size = cutlass.const_expr(gStates.element_type.width // 8)
    width = cutlass.const_expr(min(tile.width, 16 // size))
    offset = row * gStates.stride[0] + Int64(token) * gStates.stride[1] + offset_in_head(tile, place)
    target = pointer(gStates, offset, width * size)
    rValues = cute.make_rmem_tensor(width, Float32)
    for r, c in tile.accesses(width):
        step, start, chunk = tile.place_of_access(r, c, width)
        for e in cutlass.range_constexpr(width):
            rValues[e] = rState[start + e]
        if is_live(tile, place, chunk):
            store_once(rValues, width, target + step)


@cute.jit
def store_once(rX: cute.Tensor, width: Constexpr, target: cute.Pointer):
    """The width elements at target = rX, rounded to target's dtype, in one streaming access."""
    dtype = target.dtype
    rSlice = cute.make_rmem_tensor(width, dtype)
    for e in cutlass.range_constexpr(width):
        rSlice[e] = rX[e].to(dtype)
    mode, bits = cute.nvgpu.StoreCacheMode.STREAMING, width * dtype.width
    atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=bits, store_cache_mode=mode)
    cute.copy(atom, rSlice, cute.make_tensor(target, cute.make_layout(width)))


@cute.jit
def state_pointer(tile: StateTile, slot: Int64, place: Place, width: Constexpr, gState: cute.Tensor):
    """Pointer to a thread's first element of a head's state, for accesses of `width` elements."""
    return pointer(gState, slot * gState.stride[0] + offset_in_head(tile, place), width * gState.element_type.width // 8)


@cute.jit
def offset_in_head(tile: StateTile, place: Place):
    """Offset of a thread's first element from the first one of a slot."""
    within = place.head * (tile.head_k_dim * tile.head_v_dim)
    if cutlass.const_expr(tile.state_v_first):
        within += place.v_start * tile.head_k_dim + place.lane * tile.vector
    else:
        within += place.lane * (tile.vector * tile.head_v_dim) + place.v_start
    return within
