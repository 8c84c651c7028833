"""A head's state in the registers of a block, and its way from and to a slot of the pool.

`lanes` threads share the K entries of `rows` columns of V each. V first: the lanes of a group are neighbours, so that a
group reads whole lines of one column's K entries. K first: neighbouring lanes hold neighbouring columns, and a column's lanes
are spread over `k_warps` warps, so that a warp reads 64 columns of a row, whole lines. Every byte moves once each way, past L1
and out of L2 first.
"""

from typing import Any

import cutlass
import cutlass.cute as cute

from gdn.problems import DTYPE_BYTES
from gdn.recurrent_tiles import Tiles, k_vector, k_warps
from kernels_cute.common.rounding import key_of, rounded


class StateTile:
    """Attributes are compile-time constants."""

    def __init__(
        self,
        head_k_dim: int,
        head_v_dim: int,
        state_v_first: bool,
        state_dtype: str,
        threads: int,
        lanes: int,
        rows: int,
        rounds: bool,
    ) -> None:
        self.K, self.V, self.v_first = head_k_dim, head_v_dim, state_v_first
        self.threads, self.lanes, self.rows, self.rounds = threads, lanes, rows, rounds
        self.vec = k_vector(state_v_first, state_dtype, head_k_dim)
        self.entries = -(-head_k_dim // (lanes * self.vec)) * self.vec  # K entries of a thread
        self.chunks = self.entries // self.vec
        self.groups = threads // lanes
        self.k_warps = k_warps(state_v_first, head_v_dim, Tiles(threads, lanes, rows, 0))
        self.warp_lanes = lanes // self.k_warps
        self.groups_per_warp = 32 // self.warp_lanes
        # Distances in threads: between the lanes of a group, and between groups.
        self.lane_step = 1 if state_v_first else self.groups_per_warp
        self.group_step = lanes if state_v_first else 1
        self.mask_k = self.chunks * lanes * self.vec != head_k_dim
        self.mask_v = head_v_dim % (self.groups * rows) != 0
        self.width = self.vec if state_v_first else min(rows, 16 // DTYPE_BYTES[state_dtype])

    def lane_and_group(self, thread: Any) -> tuple[Any, Any]:
        """Which of a column's K entries a thread holds, and of which columns of the block."""
        if self.v_first:
            return thread % self.lanes, thread // self.lanes
        warp = thread // 32
        lane = warp % self.k_warps * self.warp_lanes + thread % 32 // self.groups_per_warp
        return lane, warp // self.k_warps * self.groups_per_warp + thread % self.groups_per_warp

    def at(self, row: int, entry: int) -> int:
        """Place of (column row, K entry) in a thread's state: the dim that is contiguous in memory runs fastest."""
        return row * self.entries + entry if self.v_first else entry * self.rows + row

    @cute.jit
    def is_live(self, lane: cutlass.Int32, chunk: cutlass.Constexpr, v_start: cutlass.Int32):
        """Whether a thread's chunk of K and columns of V exist."""
        live = cutlass.Boolean(True)
        if cutlass.const_expr(self.mask_k):
            live = (chunk * self.lanes + lane) * self.vec < self.K
        if cutlass.const_expr(self.mask_v):
            live = live & (v_start < self.V)
        return live

    @cute.jit
    def pointer(self, gX: cute.Tensor, offset: cutlass.Int64, align: cutlass.Constexpr):
        """gX + offset elements, known to be a multiple of align bytes."""
        dtype = gX.element_type
        address = gX.iterator.toint() + offset * (dtype.width // 8)
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)

    @cute.jit
    def load(
        self,
        source: cute.Pointer,
        width: cutlass.Constexpr,
        streaming: cutlass.Constexpr,
        rX: cute.Tensor,
        start: cutlass.Constexpr,
    ):
        """rX[start : start + width] = the width elements at source, one access."""
        dtype = source.dtype
        rSlice = cute.make_rmem_tensor(width, dtype)
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE if streaming else cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyG2ROp(), dtype, num_bits_per_copy=width * dtype.width, l1c_evict_priority=priority
        )
        cute.copy(atom, cute.make_tensor(source, cute.make_layout(width)), rSlice)
        for e in cutlass.range_constexpr(width):
            rX[start + e] = rSlice[e].to(rX.element_type)

    @cute.jit
    def store(
        self,
        rX: cute.Tensor,
        start: cutlass.Constexpr,
        width: cutlass.Constexpr,
        target: cute.Pointer,
        rRounded: cute.Tensor,
    ):
        """The width elements at target = rX[start : start + width], rounded to target's dtype, one access; with stochastic
        rounding rRounded."""
        dtype = target.dtype
        rSlice = cute.make_rmem_tensor(width, dtype)
        for e in cutlass.range_constexpr(width):
            if cutlass.const_expr(self.rounds):
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
    def load_state(
        self,
        slot: cutlass.Int64,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        gState: cute.Tensor,
        rState: cute.Tensor,
    ):
        source = self.state_pointer(slot, head, lane, v_start, self.width, gState)
        for r in cutlass.range_constexpr(self.rows if self.v_first else self.entries):
            for c in cutlass.range_constexpr(self.entries // self.width if self.v_first else self.rows // self.width):
                step, start, chunk = self.state_place(r, c, self.width)
                if cutlass.const_expr(self.mask_k or self.mask_v):
                    if self.is_live(lane, chunk, v_start):
                        self.load(source + step, self.width, True, rState, start)
                else:
                    self.load(source + step, self.width, True, rState, start)

    @cute.jit
    def store_state(
        self,
        slot: cutlass.Int64,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        width: cutlass.Constexpr,
        gState: cute.Tensor,
        rState: cute.Tensor,
        seed: cutlass.Int32,
    ):
        """seed: mixed, of the stochastic rounding; without it anything."""
        target = self.state_pointer(slot, head, lane, v_start, width, gState)
        key = cutlass.Int32(0)
        first = cutlass.Int32(0)
        if cutlass.const_expr(self.rounds):
            key = key_of(seed, slot, head)
            first = lane * (self.vec * self.V) + v_start  # the thread's first element, K first
        rRounded = cute.make_rmem_tensor(width, cutlass.Float32)
        for r in cutlass.range_constexpr(self.rows if self.v_first else self.entries):
            for c in cutlass.range_constexpr(self.entries // width if self.v_first else self.rows // width):
                step, start, chunk = self.state_place(r, c, width)
                if cutlass.const_expr(self.rounds):
                    for e in cutlass.range_constexpr(width):
                        element = first + self.element_of(start + e)
                        rRounded[e] = rounded(rState[start + e], key, element)
                if cutlass.const_expr(self.mask_k or self.mask_v):
                    if self.is_live(lane, chunk, v_start):
                        self.store(rState, start, width, target + step, rRounded)
                else:
                    self.store(rState, start, width, target + step, rRounded)

    def element_of(self, place: int) -> int:
        """k * V + v of a place in a thread's registers, counted from its first."""
        row, entry = (place // self.entries, place % self.entries) if self.v_first else (place % self.rows, place // self.rows)
        return (entry // self.vec * self.lanes * self.vec + entry % self.vec) * self.V + row

    @cute.jit
    def state_pointer(
        self,
        slot: cutlass.Int64,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        width: cutlass.Constexpr,
        gState: cute.Tensor,
    ):
        """A thread's first element of a head's state."""
        within = head * (self.K * self.V)
        if cutlass.const_expr(self.v_first):
            within += v_start * self.K + lane * self.vec
        else:
            within += lane * (self.vec * self.V) + v_start
        return self.pointer(gState, slot * gState.stride[0] + within, width * gState.element_type.width // 8)

    def state_place(self, r: int, c: int, width: int) -> tuple[int, int, int]:
        """Of access (r, c) of `width` elements: offset from the thread's first one, place in registers, chunk of K."""
        if self.v_first:
            chunk, within = c * width // self.vec, c * width % self.vec
            return r * self.K + chunk * self.lanes * self.vec + within, r * self.entries + c * width, chunk
        chunk, within = r // self.vec, r % self.vec
        return (chunk * self.lanes * self.vec + within) * self.V + c * width, r * self.rows + c * width, chunk
