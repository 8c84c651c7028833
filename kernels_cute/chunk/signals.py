"""Words of global memory between this kernel and those that run next to it: one that writes the rows of q, k and v while they are
read here, and one that reads the outputs while others are made.

Chunk j of sequence n has the number begin(n) / CHUNK + n + j (unique, whatever the lengths).
    rows_made       [chunks] parts of a chunk's rows that are written: each of its tiles of `row_tile` rows by `row_makers` blocks
    outputs_done    [chunks, heads] blocks that have stored their V columns of a chunk's outputs
Words are zero when either kernel begins. A writer's rows are seen by any thread that has acquired its word; copies of the other
proxy follow an acquire by a fence.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute.chunk.arguments import TokenCopies
from kernels_cute.chunk.scheduler import WorkTile
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx

_POLL_NANOSECONDS = 32


def chunk_number(begin, sequence, step):
    return begin // CHUNK + sequence + step


def word_address(words, number):
    return words + Int64(number) * 4


@cute.jit
def count_release(address: Int64):
    """Add 1 to a word, after everything that this thread has written or has seen written."""
    word = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    cute.arch.atomic_add(word, Int32(1), sem="release", scope="gpu")


@cute.jit
def await_count(address: Int64, count: Int32):
    found = ptx.load_acquire(address)
    while found < count:
        ptx.sleep(_POLL_NANOSECONDS)
        found = ptx.load_acquire(address)


@cute.jit
def await_rows(spec: ChunkSpec, copies: TokenCopies, work_tile: WorkTile, step: Int32):
    """Waits until all of a chunk's rows of q, k and v are there."""
    valid = cutlass.min(work_tile.live_length - step * CHUNK, CHUNK)
    count = (valid + (spec.row_tile - 1)) // spec.row_tile * spec.row_makers
    await_count(word_address(copies.rows_made, chunk_number(work_tile.begin, work_tile.sequence, step)), count)
    cute.arch.fence_proxy("async.global")


@cute.jit
def announce_outputs(spec: ChunkSpec, copies: TokenCopies, work_tile: WorkTile, step: Int32, in_flight: cutlass.Constexpr):
    """Announce this warp's outputs of a chunk once they are in memory. in_flight: how many of its bulk groups, those of later
    chunks, may still be under way."""
    cute.arch.cp_async_bulk_wait_group(in_flight, read=False)
    cute.arch.sync_warp()
    number = chunk_number(work_tile.begin, work_tile.sequence, step)
    if cute.arch.lane_idx() == 0:
        count_release(word_address(copies.outputs_done, number * spec.heads + work_tile.head))
