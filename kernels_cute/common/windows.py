"""Windows of a causal convolution in a pool [slots, channels, columns]: neighbouring channels of one column, for a thread."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int64

from kernels_cute.common.memory import ACCESS_BYTES, load, pointer, store


def window_offset(gWindows: Any, slot: Any, column: Any, channel: Any) -> Any:
    return slot * gWindows.stride[0] + Int64(column) * gWindows.stride[2] + Int64(channel) * gWindows.stride[1]


@cute.jit
def load_channels(
    gWindows: cute.Tensor, offset: Int64, is_contiguous: Constexpr, count: Constexpr, rX: cute.Tensor, start: Constexpr
):
    """rX[start : start + count] = neighbouring channels from an offset on."""
    size = cutlass.const_expr(gWindows.element_type.width // 8)
    if cutlass.const_expr(is_contiguous):
        load(pointer(gWindows, offset, min(ACCESS_BYTES, count * size)), count, rX, start, True)
    else:
        # Neighbouring columns share a sector, which L1 keeps.
        for c in cutlass.range_constexpr(count):
            load(pointer(gWindows, offset + c * gWindows.stride[1], size), 1, rX, start + c, False)


@cute.jit
def store_channels(
    rX: cute.Tensor, start: Constexpr, count: Constexpr, gWindows: cute.Tensor, offset: Int64, is_contiguous: Constexpr
):
    size = cutlass.const_expr(gWindows.element_type.width // 8)
    if cutlass.const_expr(is_contiguous):
        store(rX, start, count, pointer(gWindows, offset, min(ACCESS_BYTES, count * size)))
    else:
        for c in cutlass.range_constexpr(count):
            store(rX, start + c, 1, pointer(gWindows, offset + c * gWindows.stride[1], size))
