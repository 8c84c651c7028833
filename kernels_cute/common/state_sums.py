"""Sums over the K entries of a column: by shuffles where one warp holds all of them, through shared memory where several do.

K first, each of the warps that share columns writes what its lanes have added up to its place in `parts`, passes one barrier
with the others, and reads the places of all. Why one barrier a token is enough, with two buffers for even and odd tokens:

    token t      write buffer t % 2     barrier t      read buffer t % 2
    token t + 1  write the other one    barrier t + 1  read the other one
    token t + 2  write buffer t % 2     ...

- What is read has been written: a warp reads after barrier t, at which every warp arrives after its writes of token t.
- What is still to be read is not overwritten: a warp writes buffer t % 2 again at token t + 2, after barrier t + 1. Every warp
  arrives at barrier t + 1 after its reads of token t, which come before it in the program. With one buffer the writes of
  token t + 1 would have only barrier t before them, which a slow warp has passed without having read.
- All warps that share columns run the same tokens: the loop's bounds are those of the block's sequence.

A call of one token a sequence needs one buffer. The walks of a draft tree have one too, and a second barrier before the writes
(`waits_first`): from node to node and from ancestor to node no parity alternates.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_cute.common import ptx
from kernels_cute.common.state_tile import StateTile

_SHARED_BYTES_PER_SM = 228 << 10
_RESERVED_BYTES = 1 << 10  # of each block
_SCALARS = 4  # at most three sums that belong to no column, and one word of padding


class Exchange(NamedTuple):
    """The shared memory through which warps exchange the sums of a token."""

    parts: Any  # Int32: address of the first buffer
    buffer: Any  # Int32: 0 or 1
    waits_first: bool = False  # whether a barrier is needed before the buffer is written, since other warps may still read it


def part_floats(tile: StateTile) -> int:
    """Number of sums of a warp: those of every group of columns, and those of the token."""
    return tile.groups_per_warp * 2 * tile.v_per_thread + _SCALARS


def parts_floats(tile: StateTile, num_buffers: int) -> int:
    """Number of floats of all buffers; 0 where no warps share columns."""
    return num_buffers * tile.threads // 32 * part_floats(tile) if tile.k_warps > 1 else 0


@cute.jit
def add_up(tile: StateTile, rSums: cute.Tensor, count: cutlass.Constexpr, exchange: Exchange):
    """rSums[:count], S k and S q of a thread's columns and then sums over the token, over all lanes of the columns."""
    for step in cutlass.range_constexpr(tile.warp_lanes.bit_length() - 1):
        for i in cutlass.range_constexpr(count):
            rSums[i] += cute.arch.shuffle_sync_bfly(rSums[i], offset=tile.lane_step << step)
    if cutlass.const_expr(tile.k_warps > 1):
        exchange_sums(tile, rSums, count, exchange)


@cute.jit
def exchange_sums(tile: StateTile, rSums: cute.Tensor, count: cutlass.Constexpr, exchange: Exchange):
    """Fills rSums: S k of every column at 2 * r, S q of the lane's own column at 1, and the token's sums."""
    thread, _, _ = cute.arch.thread_idx()
    columns = cutlass.const_expr(tile.v_per_thread)
    width = cutlass.const_expr(min(columns, 4))
    size = cutlass.const_expr(4 * part_floats(tile))
    step = cutlass.const_expr(4 * width * tile.groups_per_warp)  # bytes of `width` columns of every group
    warp = thread // 32
    column_warp = warp // tile.k_warps
    source = exchange.parts + (exchange.buffer * (tile.threads // 32) + column_warp * tile.k_warps) * size
    target = source + warp % tile.k_warps * size
    at_group = thread % tile.groups_per_warp * (4 * width)
    at_token = cutlass.const_expr(8 * columns * tile.groups_per_warp)
    if cutlass.const_expr(exchange.waits_first):
        wait_for_columns(tile, column_warp)
    is_first = Int32(1) - thread % 32 // tile.groups_per_warp  # among the lanes of a group in this warp
    for kind in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(columns // width):
            values = [rSums[2 * (c * width + e) + kind] for e in range(width)]
            ptx.store_where(target + at_group + (kind * (columns // width) + c) * step, values, is_first)
    scalars = [rSums[2 * columns + e] if 2 * columns + e < count else Float32(0.0) for e in range(_SCALARS)]
    ptx.store_where(target + at_token, scalars, Int32(1) - thread % 32)
    wait_for_columns(tile, column_warp)
    lane, _ = tile.lane_and_group(thread)
    own = cutlass.min(lane, columns - 1)
    at_own = 4 * columns * tile.groups_per_warp + own // width * step + at_group + own % width * 4
    rSums.fill(0.0)
    for k_warp in cutlass.range_constexpr(tile.k_warps):
        part = source + k_warp * size
        for c in cutlass.range_constexpr(columns // width):
            values = load_some(part + at_group + c * step, width)
            for e in cutlass.range_constexpr(width):
                rSums[2 * (c * width + e)] += values[e]
        rSums[1] += ptx.load_one(part + at_own)
    # One word a lane: whole, the token's sums of all warps would be in flight with those of the columns, and spill.
    word = thread % 32
    value = ptx.load_one(source + word // _SCALARS % tile.k_warps * size + at_token + word % _SCALARS * 4)
    for bit in cutlass.range_constexpr(tile.k_warps.bit_length() - 1):
        value += cute.arch.shuffle_sync_bfly(value, offset=_SCALARS << bit)
    for e in cutlass.range_constexpr(count - 2 * columns):
        rSums[2 * columns + e] = cute.arch.shuffle_sync(value, e)


@cute.jit
def wait_for_columns(tile: StateTile, column_warp: Int32):
    """Waits for the warps that share columns with this one."""
    if cutlass.const_expr(tile.k_warps * 32 == tile.threads):
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=column_warp + 1, number_of_threads=32 * tile.k_warps)


def load_some(address: Any, width: int) -> Any:
    """Loads one, two or four neighbouring values."""
    found = {1: ptx.load_one, 2: ptx.load_pair, 4: ptx.load_four}[width](address)
    return found if width > 1 else (found,)


def carveout(shared_bytes: int, num_blocks: int) -> int:
    """Percent of an SM's memory that `num_blocks` blocks of `shared_bytes` need."""
    return min(100, -(-100 * num_blocks * (shared_bytes + _RESERVED_BYTES) // _SHARED_BYTES_PER_SM))


def storage_type(num_floats: int) -> Any:
    @cute.struct
    class Storage:
        parts: cute.struct.Align[cute.struct.MemRange[Float32, num_floats], 16]

    return Storage
