"""Tiles of `rows` tokens of packed sequences: tile j of sequence n has the number begin(n) / rows + n + j."""

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32


@cute.jit
def find_sequence(rows: Constexpr, tile: Int32, num_sequences: Int32, cu_seqlens: cute.Tensor):
    """The last sequence whose first tile is numbered at most `tile`: all lanes of a warp search together."""
    lane = cute.arch.lane_idx()
    low = Int32(0)
    size = Int32(num_sequences)
    while size > 1:
        step = (size + 31) // 32
        is_before = Boolean(False)
        if lane * step < size:
            probe = low + lane * step
            is_before = Int32(cu_seqlens[probe]) // rows + probe <= tile
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) - 1
        if passed < 0:
            passed = Int32(0)
        low += passed * step
        size -= passed * step
        if size > step:
            size = step
    return low
