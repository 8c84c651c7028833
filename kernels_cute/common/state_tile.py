"""A head's state in the registers of a block: who holds which element, and the way from and to a slot of the pool.

`threads_per_column` threads share the K entries of `v_per_thread` columns of V each. V first: the threads of a group are
neighbours, so that a group reads whole lines of one column's K entries. K first: neighbouring lanes hold neighbouring columns,
and the threads of a column are spread over `k_warps` warps, so that a warp reads 64 columns of a row, whole lines. Every byte
moves once each way, past L1 and out of L2 first.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from gdn.problems import DTYPE_BYTES
from gdn.recurrent_tiles import Tiles, k_vector, k_warps
from kernels_cute.common.memory import load, pointer
from kernels_cute.common.opaque import opaque
from kernels_cute.common.rounding import key_of, rounded


class Place(NamedTuple):
    """The part of the state that a thread holds."""

    head: Any  # Int32: state head
    lane: Any  # Int32: place among the threads of a column
    v_start: Any  # Int32: the thread's first column of V


def opaque_place(place: Place) -> Place:
    """The same place with a head and a lane that the compiler does not know: what follows from them is computed here."""
    return Place(opaque(place.head), opaque(place.lane), place.v_start)


@dataclass(frozen=True)
class StateTile:
    """The tile of a block, known when the kernel is compiled."""

    head_k_dim: int
    head_v_dim: int
    state_v_first: bool
    state_dtype: str
    threads: int  # threads of a block
    threads_per_column: int
    v_per_thread: int
    has_rounding: bool  # stochastic rounding of a bfloat16 state

    @cached_property
    def vector(self) -> int:
        """Consecutive K entries of a thread."""
        return k_vector(self.state_v_first, self.state_dtype, self.head_k_dim)

    @cached_property
    def k_per_thread(self) -> int:
        """K entries of a thread, some of which may lie beyond the last."""
        return -(-self.head_k_dim // (self.threads_per_column * self.vector)) * self.vector

    @cached_property
    def values(self) -> int:
        """Values of the state in a thread."""
        return self.v_per_thread * self.k_per_thread

    @cached_property
    def chunks(self) -> int:
        """Vectors of K entries in a thread."""
        return self.k_per_thread // self.vector

    @cached_property
    def groups(self) -> int:
        """Groups of threads that share columns, in a block."""
        return self.threads // self.threads_per_column

    @cached_property
    def k_warps(self) -> int:
        """Warps that share a column."""
        tiles = Tiles(self.threads, self.threads_per_column, self.v_per_thread, 0)
        return k_warps(self.state_v_first, self.head_v_dim, tiles)

    @cached_property
    def warp_lanes(self) -> int:
        """Threads of a column in a warp."""
        return self.threads_per_column // self.k_warps

    @cached_property
    def groups_per_warp(self) -> int:
        return 32 // self.warp_lanes

    @cached_property
    def lane_step(self) -> int:
        """Distance in threads between the lanes of a group."""
        return 1 if self.state_v_first else self.groups_per_warp

    @cached_property
    def group_step(self) -> int:
        """Distance in threads between groups."""
        return self.threads_per_column if self.state_v_first else 1

    @cached_property
    def masks_k(self) -> bool:
        """Whether some threads hold entries of K that do not exist."""
        return self.chunks * self.threads_per_column * self.vector != self.head_k_dim

    @cached_property
    def masks_v(self) -> bool:
        """Whether some threads hold columns of V that do not exist."""
        return self.head_v_dim % (self.groups * self.v_per_thread) != 0

    @cached_property
    def width(self) -> int:
        """Elements of an access: 16 bytes where the dims allow."""
        return self.vector if self.state_v_first else min(self.v_per_thread, 16 // DTYPE_BYTES[self.state_dtype])

    def lane_and_group(self, thread: Any) -> tuple[Any, Any]:
        """Which of a column's K entries a thread holds, and of which columns of the block."""
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
        outer, inner = self.v_per_thread, self.k_per_thread
        if not self.state_v_first:
            outer, inner = inner, outer
        return [(r, c) for r in range(outer) for c in range(inner // width)]

    def place_of_access(self, r: int, c: int, width: int) -> tuple[int, int, int]:
        """Offset of access (r, c) from the thread's first element, its first register, its chunk of K."""
        if self.state_v_first:
            chunk, within = c * width // self.vector, c * width % self.vector
            offset = r * self.head_k_dim + chunk * self.threads_per_column * self.vector + within
            return offset, r * self.k_per_thread + c * width, chunk
        chunk, within = r // self.vector, r % self.vector
        entry = chunk * self.threads_per_column * self.vector + within
        return entry * self.head_v_dim + c * width, r * self.v_per_thread + c * width, chunk

    def element_of(self, register: int) -> int:
        """k * V + v of a thread's register, counted from its first."""
        if self.state_v_first:
            column, entry = register // self.k_per_thread, register % self.k_per_thread
        else:
            column, entry = register % self.v_per_thread, register // self.v_per_thread
        step = entry // self.vector * self.threads_per_column * self.vector + entry % self.vector
        return step * self.head_v_dim + column


@cute.jit
def is_live(tile: StateTile, place: Place, chunk: cutlass.Constexpr):
    """Whether a thread's chunk of K and columns of V exist."""
    live = cutlass.Boolean(True)
    if cutlass.const_expr(tile.masks_k):
        live = (chunk * tile.threads_per_column + place.lane) * tile.vector < tile.head_k_dim
    if cutlass.const_expr(tile.masks_v):
        live = live & (place.v_start < tile.head_v_dim)
    return live


@cute.jit
def load_state(tile: StateTile, slot: cutlass.Int64, place: Place, gState: cute.Tensor, rState: cute.Tensor):
    source = state_pointer(tile, slot, place, tile.width, gState)
    for r, c in tile.accesses(tile.width):
        step, start, chunk = tile.place_of_access(r, c, tile.width)
        if cutlass.const_expr(tile.masks_k or tile.masks_v):
            if is_live(tile, place, chunk):
                load(source + step, tile.width, rState, start, True)
        else:
            load(source + step, tile.width, rState, start, True)


@cute.jit
def store_state(
    tile: StateTile,
    slot: cutlass.Int64,
    place: Place,
    width: cutlass.Constexpr,
    gState: cute.Tensor,
    rState: cute.Tensor,
    seed: cutlass.Int32,
):
    """seed: mixed, of the stochastic rounding; without it anything."""
    target = state_pointer(tile, slot, place, width, gState)
    key = cutlass.Int32(0)
    first = cutlass.Int32(0)
    if cutlass.const_expr(tile.has_rounding):
        key = key_of(seed, slot, place.head)
        first = place.lane * (tile.vector * tile.head_v_dim) + place.v_start  # the thread's first element, K first
    rRounded = cute.make_rmem_tensor(width, cutlass.Float32)
    for r, c in tile.accesses(width):
        step, start, chunk = tile.place_of_access(r, c, width)
        if cutlass.const_expr(tile.has_rounding):
            for e in cutlass.range_constexpr(width):
                element = first + tile.element_of(start + e)
                rRounded[e] = rounded(rState[start + e], key, element)
        if cutlass.const_expr(tile.masks_k or tile.masks_v):
            if is_live(tile, place, chunk):
                store_once(tile, rState, start, width, target + step, rRounded)
        else:
            store_once(tile, rState, start, width, target + step, rRounded)


@cute.jit
def store_once(
    tile: StateTile,
    rX: cute.Tensor,
    start: cutlass.Constexpr,
    width: cutlass.Constexpr,
    target: cute.Pointer,
    rRounded: cute.Tensor,
):
    """The width elements at target = rX[start : start + width], rounded to target's dtype, in one streaming access; with
    stochastic rounding rRounded."""
    dtype = target.dtype
    rSlice = cute.make_rmem_tensor(width, dtype)
    for e in cutlass.range_constexpr(width):
        if cutlass.const_expr(tile.has_rounding):
            rSlice[e] = rRounded[e].to(dtype)
        else:
            rSlice[e] = rX[start + e].to(dtype)
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyR2GOp(),
        dtype,
        num_bits_per_copy=width * dtype.width,
        store_cache_mode=cute.nvgpu.StoreCacheMode.STREAMING,
    )
    cute.copy(atom, rSlice, cute.make_tensor(target, cute.make_layout(width)))


@cute.jit
def state_pointer(tile: StateTile, slot: cutlass.Int64, place: Place, width: cutlass.Constexpr, gState: cute.Tensor):
    """Pointer to a thread's first element of a head's state, for accesses of `width` elements."""
    within = place.head * (tile.head_k_dim * tile.head_v_dim)
    if cutlass.const_expr(tile.state_v_first):
        within += place.v_start * tile.head_k_dim + place.lane * tile.vector
    else:
        within += place.lane * (tile.vector * tile.head_v_dim) + place.v_start
    return pointer(gState, slot * gState.stride[0] + within, width * gState.element_type.width // 8)
