"""Reading the row: quads with its ends cut off, and the filter that lists scores above a bound."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute.topk import ptx
from kernels_cute.topk.tiles import ACCESS


@cute.jit
def load_quads(tiles: cutlass.Constexpr, span, quad_of, scores: cute.Tensor, quads: cutlass.Constexpr):
    """scores = float32 bits of the quads numbered quad_of; NaN for columns outside the row.

    The loads of whole quads come first and travel together; the two quads that the row's ends cut are read by element.
    """
    base, lead, stop = span
    first_whole = (lead + 3) // 4
    num_whole = Uint32(cutlass.max(stop // 4 - first_whole, 0))
    for u in cutlass.range_constexpr(quads):
        quad = quad_of[u]
        is_whole = ptx.as_int(Uint32(quad - first_whole) < num_whole)
        address = base + Int64(quad) * (4 * tiles.element_bytes)
        a, b, c, d = ptx.load_quad(tiles.is_float32, address, is_whole)
        scores[4 * u], scores[4 * u + 1], scores[4 * u + 2], scores[4 * u + 3] = a, b, c, d
    for u in cutlass.range_constexpr(quads):
        quad = quad_of[u]
        is_touched = Uint32(quad - lead // 4) < Uint32((stop + 3) // 4 - lead // 4)
        if Uint32(quad - first_whole) >= num_whole and is_touched:
            for j in cutlass.range_constexpr(4):
                column = quad * 4 + j
                is_inside = ptx.as_int(column >= lead and column < stop)
                address = base + Int64(column) * tiles.element_bytes
                scores[4 * u + j] = ptx.load_one(tiles.is_float32, address, is_inside)


@cute.jit
def prefetch(address, num_bytes, thread):
    """Prefetches these bytes to the L2, widened to whole 16-byte accesses. A hint."""
    if thread == 0:
        first = address & Int64(-ACCESS)
        end = (address + num_bytes + (ACCESS - 1)) & Int64(-ACCESS)
        if num_bytes > 0:
            ptx.prefetch_l2(first, Int32(end - first))


@cute.jit
def load_packed(tiles: cutlass.Constexpr, span, first, words: cute.Tensor, accesses: cutlass.Constexpr):
    """words = the eight bf16 of each of `accesses` accesses, `threads` apart from number `first` on, two a word; NaN for columns
    outside the row."""
    base, lead, stop = span
    first_whole, end_whole, end = (lead + 7) // 8, stop // 8, (stop + 7) // 8
    for u in cutlass.range_constexpr(accesses):
        access = first + u * tiles.threads
        is_whole = ptx.as_int(access >= first_whole and access < end_whole)
        a, b, c, d = ptx.load_access_of_bfloat16(base + Int64(access) * ACCESS, is_whole)
        words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d
    for u in cutlass.range_constexpr(accesses):
        access = first + u * tiles.threads
        if (access < first_whole or access >= end_whole) and access < end:
            for i in cutlass.range_constexpr(4):
                columns = (access * 8 + 2 * i, access * 8 + 2 * i + 1)
                pair = [ptx.load_one(False, base + Int64(one) * 2, ptx.as_int(one >= lead and one < stop)) for one in columns]
                words[4 * u + i] = (pair[0] >> 16) | pair[1]


@cute.jit
def filter(tiles: cutlass.Constexpr, storage, span, thread, lower):
    """Lists scores whose keys are at least `lower`, with their columns, while there is room, and counts all of them.

    An access holds four entries of float32 and eight of bf16, which are compared two at a time; their words are listed unchanged.
    """
    base, lead, stop = span
    passed, list_address = storage.passed.data_ptr().toint(), storage.keys.data_ptr().toint()
    each = cutlass.const_expr(4 if tiles.is_float32 else 8)  # scores of an access
    accesses = cutlass.const_expr((4 * tiles.unroll + each - 1) // each)
    words = cute.make_rmem_tensor(4 * accesses, Uint32)
    quads = cute.make_rmem_tensor(accesses, Int32)
    count, store = ptx.count_two_from, ptx.store_two_from
    if cutlass.const_expr(tiles.is_float32):
        least, count, store = ptx.float_of(lower), ptx.count_from, ptx.store_from
    else:
        bound = ptx.float_of(next_bfloat16(lower))
        least = Uint32(cute.arch.prmt(bound, bound, 0x3232))  # its upper half twice: the bf16
    lane = thread % 32
    first_whole, end_whole, end = (lead + (each - 1)) // each, stop // each, (stop + (each - 1)) // each
    # All lanes of a warp take part in the sums, so the trip count is the warp's.
    for start in cutlass.range(thread - lane, end, tiles.threads * accesses, unroll=1):
        if start >= first_whole and start + ((accesses - 1) * tiles.threads + 32) <= end_whole:
            address = base + Int64(start + lane) * ACCESS
            for u in cutlass.range_constexpr(accesses):
                a, b, c, d = ptx.load_access(address + u * tiles.threads * ACCESS)
                words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d
        else:
            if cutlass.const_expr(tiles.is_float32):
                for u in cutlass.range_constexpr(accesses):
                    quads[u] = start + lane + u * tiles.threads
                load_quads(tiles, span, quads, words, accesses)
            else:
                load_packed(tiles, span, start + lane, words, accesses)
        hits = count(least, [words[i] for i in range(4 * accesses)])
        index = ptx.reserve(passed, hits)
        least_again = ptx.opaque_uniform(least)
        if hits > 0 and index + hits <= tiles.list_entries:
            slot = list_address + index * 8
            for u in cutlass.range_constexpr(accesses):
                column = each * (start + lane + u * tiles.threads)
                slot = store(least_again, [words[4 * u + j] for j in range(4)], column, slot)


@cute.jit
def next_bfloat16(key):
    """The least bf16 key at or above this key. Positive keys have a lower half of zeros, negative ones of ones."""
    rounded = key | Uint32(0xFFFF)
    if key >= Uint32(0x80000000):
        rounded = (key + Uint32(0xFFFF)) & Uint32(0xFFFF0000)
    return rounded
