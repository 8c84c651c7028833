"""Policies of the L2 cache, and accesses with one."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int64

EVICT_FIRST = 0x12F0000000000000  # gone first when room is needed


@cute.jit
def load(source: cute.Pointer, width: Constexpr, rX: cute.Tensor, start: Constexpr, policy: Constexpr):
    """rX[start : start + width] = the width elements at source, 16 bytes at once, past L1."""
    dtype = source.dtype
    step = cutlass.const_expr(min(width, 128 // dtype.width))
    priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), dtype, num_bits_per_copy=step * dtype.width, l1c_evict_priority=priority)
    for first in cutlass.range_constexpr(0, width, step):
        rSlice = cute.make_rmem_tensor(step, dtype)
        cute.copy(atom, cute.make_tensor(source + first, cute.make_layout(step)), rSlice, cache_policy=Int64(policy))
        for e in cutlass.range_constexpr(step):
            rX[start + first + e] = rSlice[e].to(rX.element_type)


@cute.jit
def store(rX: Any, start: Constexpr, width: Constexpr, target: cute.Pointer, policy: Constexpr):
    """The width elements at target = rX[start : start + width], rounded to target's dtype, 16 bytes at once."""
    dtype = target.dtype
    step = cutlass.const_expr(min(width, 128 // dtype.width))
    atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=step * dtype.width)
    for first in cutlass.range_constexpr(0, width, step):
        rSlice = cute.make_rmem_tensor(step, dtype)
        for e in cutlass.range_constexpr(step):
            rSlice[e] = rX[start + first + e].to(dtype)
        cute.copy(atom, rSlice, cute.make_tensor(target + first, cute.make_layout(step)), cache_policy=Int64(policy))
