"""The filter of a row whose pieces the copy engine brings, while the row is sampled and after that.

Pieces of 32 KiB go round a ring of stages. Only whole accesses of 16 bytes are copied: the row's ends are read by element.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute.common.ptx import copy_from_global, load_words
from kernels_cute.topk.read import least_of, list_hits, load_ends, whole_accesses
from kernels_cute.topk.shape import PIECE_BYTES
from kernels_cute.topk.tiles import ACCESS

PIECE = PIECE_BYTES // ACCESS  # accesses


@cute.jit
def begin_copies(tiles: cutlass.Constexpr, storage, span, thread):
    """Ask for the first pieces. The barriers are ready, and the block has met since."""
    if thread == 0:
        for stage in cutlass.range(cutlass.min(num_pieces(tiles, span), tiles.stages), unroll=1):
            copy_piece(tiles, storage, span, stage, stage)


@cute.jit
def num_pieces(tiles: cutlass.Constexpr, span):
    _, _, end = whole_accesses(tiles, span)
    return (end + (PIECE - 1)) // PIECE


@cute.jit
def copy_piece(tiles: cutlass.Constexpr, storage, span, piece, stage):
    """Copy the whole accesses of a piece to their places in a stage. One thread."""
    first_whole, end_whole, _ = whole_accesses(tiles, span)
    begin = cutlass.max(piece * PIECE, first_whole)
    num_bytes = cutlass.max(cutlass.min((piece + 1) * PIECE, end_whole) - begin, 0) * ACCESS
    full = storage.full.data_ptr() + stage
    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
    if num_bytes > 0:
        target = storage.pieces.data_ptr().toint() + stage * PIECE_BYTES + (begin - piece * PIECE) * ACCESS
        copy_from_global(target, span.base + Int64(begin) * ACCESS, num_bytes, full.toint())


@cute.jit
def filter_ahead(tiles: cutlass.Constexpr, storage, span, thread, lower):
    """`read.filter` of the pieces."""
    each = cutlass.const_expr(ACCESS // tiles.element_bytes)  # scores of an access
    accesses = cutlass.const_expr(PIECE // tiles.threads)
    words = cute.make_rmem_tensor(4 * accesses, Uint32)
    least = least_of(tiles, lower)
    lane = thread % 32
    first_whole, end_whole, _ = whole_accesses(tiles, span)
    pieces = num_pieces(tiles, span)
    stage, parity = Int32(0), Int32(0)
    for piece in cutlass.range(pieces, unroll=1):
        cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, parity)
        start = piece * PIECE + (thread - lane)
        if start >= first_whole and start + ((accesses - 1) * tiles.threads + 32) <= end_whole:
            address = storage.pieces.data_ptr().toint() + stage * PIECE_BYTES + thread * ACCESS
            for u in cutlass.range_constexpr(accesses):
                four = load_words(address + u * tiles.threads * ACCESS)
                for j in cutlass.range_constexpr(4):
                    words[4 * u + j] = Uint32(four[j])
        else:
            load_ends(tiles, span, start + lane, words, accesses)
        list_hits(tiles, storage, least, words, each * (start + lane), accesses)
        cute.arch.sync_threads()
        if thread == 0 and piece + tiles.stages < pieces:
            copy_piece(tiles, storage, span, piece + tiles.stages, stage)
        stage = stage + 1
        if stage == tiles.stages:
            stage, parity = Int32(0), parity ^ 1


@cute.jit
def end_copies(tiles: cutlass.Constexpr, storage, span):
    """Wait for the first pieces, which nobody filters: a block may not end before its copies have."""
    for stage in cutlass.range(cutlass.min(num_pieces(tiles, span), tiles.stages), unroll=1):
        cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, 0)
