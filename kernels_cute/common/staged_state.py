"""A block's part of a state in shared memory, where each thread has what `state_tile` gives it: copied there while other work is
done, and read where it is needed.

As registers of loads the values would take their place from the start, and whatever else waits for a load may wait for them too:
a warp counts loads under way in six counters only. A copy has a counter of its own, and a thread reads what it copied itself, so
no barrier is needed.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64

from kernels_cute.common import ptx
from kernels_cute.common.state_tile import Place, StateTile, state_pointer

_ACCESS_BYTES = 16


def is_possible(tile: StateTile) -> bool:
    """Whether all threads hold whole accesses of elements that exist."""
    return tile.state_v_first and not (tile.masks_k or tile.masks_v)


def staged_bytes(tile: StateTile) -> int:
    """Shared memory of a block: an access of `tile.width` elements takes 16 bytes."""
    return tile.threads * tile.values // tile.width * _ACCESS_BYTES


@cute.jit
def copy_state(tile: StateTile, slot: Int64, place: Place, gState: cute.Tensor, address: Int32, thread: Int32):
    """Starts the copies of the thread's part of a slot, a group for `cp_async_wait_group`."""
    size = cutlass.const_expr(gState.element_type.width // 8)
    source = state_pointer(tile, slot, place, tile.width, gState).toint()
    for number, (r, c) in enumerate(tile.accesses(tile.width)):
        step, _, _ = tile.place_of_access(r, c, tile.width)
        ptx.copy_four(address + (number * tile.threads + thread) * _ACCESS_BYTES, source + step * size)
    cute.arch.cp_async_commit_group()


def load_access(tile: StateTile, dtype: Any, address: Any, thread: Any, number: int) -> list[Any]:
    """The `tile.width` values of an access, counted as in `tile.accesses`."""
    at = address + (number * tile.threads + thread) * _ACCESS_BYTES
    if dtype is Float32:
        return list(ptx.load_four(at))
    return [value for word in ptx.load_words(at) for value in ptx.unpack(BFloat16, word)]


@cute.jit
def fill_state(tile: StateTile, dtype: Constexpr, address: Int32, thread: Int32, rState: cute.Tensor):
    """rState = the thread's part."""
    for number, (r, c) in enumerate(tile.accesses(tile.width)):
        _, start, _ = tile.place_of_access(r, c, tile.width)
        values = load_access(tile, dtype, address, thread, number)
        for e in cutlass.range_constexpr(tile.width):
            rState[start + e] = values[e]


@cute.jit
def lay_aside(tile: StateTile, address: Int32, thread: Int32, rState: cute.Tensor):
    """The thread's part as float32 to shared memory, 4 * tile.values bytes a thread."""
    for unit in cutlass.range_constexpr(tile.values // 4):
        values = [rState[4 * unit + e] for e in range(4)]
        ptx.store_where(address + (unit * tile.threads + thread) * 16, values, Int32(1))


@cute.jit
def take_back(tile: StateTile, address: Int32, thread: Int32, rState: cute.Tensor):
    """rState = what `lay_aside` has put there."""
    for unit in cutlass.range_constexpr(tile.values // 4):
        values = ptx.load_four(address + (unit * tile.threads + thread) * 16)
        for e in cutlass.range_constexpr(4):
            rState[4 * unit + e] = values[e]
