"""Sums over the K entries of a column: by shuffles where one warp holds all of them, through shared memory where several do.

K first, the warps that share columns each write what they have added up to `parts` and read what the others have. `parts` has
two buffers, for even and odd tokens: a warp writes a buffer again behind the barrier of the token in between, which the others
pass when they have read.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_cute import _decode_ptx as ptx

_SHARED_BYTES_PER_SM = 228 << 10
_RESERVED_BYTES = 1 << 10  # of each block
_SCALARS = 4  # at most three sums that belong to no column, and one word of padding


class StateSums:
    """Part of the recurrent kernels' classes, which are StateTiles too."""

    @property
    def part_floats(self) -> int:
        """Sums of a warp: of every group of columns, and of the token."""
        return self.groups_per_warp * 2 * self.rows + _SCALARS

    def parts_floats(self, buffers: int) -> int:
        return buffers * self.threads // 32 * self.part_floats if self.k_warps > 1 else 0

    @cute.jit
    def add_up(self, rSums: cute.Tensor, count: cutlass.Constexpr, parts: Int32, buffer: Int32, first: cutlass.Constexpr):
        """rSums[:count], S k and S q of a thread's columns and then sums over the token, over all lanes of the columns.

        first: whether the warps may still read the buffer."""
        for step in cutlass.range_constexpr(self.warp_lanes.bit_length() - 1):
            for i in cutlass.range_constexpr(count):
                rSums[i] += cute.arch.shuffle_sync_bfly(rSums[i], offset=self.lane_step << step)
        if cutlass.const_expr(self.k_warps > 1):
            self.exchange(rSums, count, parts, buffer, first)

    @cute.jit
    def exchange(self, rSums: cute.Tensor, count: cutlass.Constexpr, parts: Int32, buffer: Int32, first: cutlass.Constexpr):
        thread, _, _ = cute.arch.thread_idx()
        columns = cutlass.const_expr(2 * self.rows)
        width = cutlass.const_expr(min(columns, 4))
        size = cutlass.const_expr(4 * self.part_floats)
        warp = thread // 32
        column_warp = warp // self.k_warps
        group = thread % self.groups_per_warp
        source = parts + (buffer * (self.threads // 32) + column_warp * self.k_warps) * size
        target = source + warp % self.k_warps * size
        if cutlass.const_expr(first):
            self.wait_for_columns(column_warp)
        is_first = Int32(1) - thread % 32 // self.groups_per_warp  # of the lanes of a group in this warp
        for i in cutlass.range_constexpr(0, columns, width):
            at = target + (i * self.groups_per_warp + group * width) * 4
            if cutlass.const_expr(width == 4):
                ptx.store_four(at, [rSums[i + e] for e in range(4)], is_first)
            else:
                ptx.store_two(at, [rSums[i + e] for e in range(2)], is_first)
        scalars = [rSums[columns + e] if columns + e < count else Float32(0.0) for e in range(_SCALARS)]
        ptx.store_four(target + columns * self.groups_per_warp * 4, scalars, Int32(1) - thread % 32)
        self.wait_for_columns(column_warp)
        rSums.fill(0.0)
        for warp_of_k in cutlass.range_constexpr(self.k_warps):
            part = source + warp_of_k * size
            for i in cutlass.range_constexpr(0, columns, width):
                at = part + (i * self.groups_per_warp + group * width) * 4
                values = ptx.load_four(at) if cutlass.const_expr(width == 4) else ptx.load_pair(at)
                for e in cutlass.range_constexpr(width):
                    rSums[i + e] += values[e]
            values = ptx.load_four(part + columns * self.groups_per_warp * 4)
            for e in cutlass.range_constexpr(count - columns):
                rSums[columns + e] += values[e]

    @cute.jit
    def wait_for_columns(self, column_warp: Int32):
        """For the warps that share columns with this one."""
        if cutlass.const_expr(self.k_warps * 32 == self.threads):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=column_warp + 1, number_of_threads=32 * self.k_warps)


def carveout(shared_bytes: int, blocks: int) -> int:
    """Percent of an SM's memory that `blocks` blocks of so many bytes need."""
    return min(100, -(-100 * blocks * (shared_bytes + _RESERVED_BYTES) // _SHARED_BYTES_PER_SM))


def storage_type(floats: int) -> Any:
    @cute.struct
    class Storage:
        parts: cute.struct.Align[cute.struct.MemRange[Float32, floats], 16]

    return Storage
