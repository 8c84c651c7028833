"""A chain of summaries on the columns of a state: X <- P X + h for one P and h (a link) after the other, in float32.

Columns of X do not depend on each other (V first, rows): a block carries its columns through the chain in registers. A link's P
comes to shared memory in pieces, several ahead; X goes there once a link, since every entry of a column needs all others.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.common import ptx
from kernels_cute.common.memory import load, store
from kernels_cute.context.tiles import FLOAT_BYTES, PIECE, ROWS, STAGES, UNIT_BYTES, Place, Tiles

# (target, source): 16 bytes to shared memory, in the thread's group of copies.
_copy_unit = ptx.instruction("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;")


class Run(NamedTuple):
    """Links whose summaries lie at even distances. Addresses: of the first link."""

    first: Any  # Int32: number of its first link in the chain
    h: Any  # Int64: address of the thread's first element
    h_step: Any  # Int64: bytes from link to link
    P: Any  # Int64: address of the head's P
    P_step: Any


class Kept(NamedTuple):
    """States that are stored on the way: before link `first` in row 0, before the next one in row 1, up to `last`."""

    address: Any  # Int64: of the thread's first element in row 0
    step: Any  # Int64: bytes from row to row
    first: Any  # Int32
    last: Any  # Int32


class Shared(NamedTuple):
    """Addresses of a block's shared memory."""

    transitions: Any
    columns: Any
    fork: Any  # None: the chain has no fork


def first_summary(tiles: Tiles, number: Any, segments: Any) -> Any:
    """Number of the matrix of a sequence's first segment, of [N S, HS]. number: of the sequence and head."""
    sequence = number // tiles.heads
    return Int64(sequence) * (segments * tiles.heads) + (number - sequence * tiles.heads)


def segment_run(tiles: Tiles, params: Any, number: Any, first: Any, link: Any) -> Run:
    """Links of a rank's segments. first: element of h that is the thread's; link: number of the first link."""
    row = first_summary(tiles, number, params.num_segments)
    h, P = params.h.iterator.toint() + row * tiles.h_bytes + first * 4, params.P.iterator.toint() + row * tiles.P_bytes
    return Run(link, h, Int64(tiles.heads * tiles.h_bytes), P, Int64(tiles.heads * tiles.P_bytes))


def h_in(tiles: Tiles, message: Any, number: Any) -> Any:
    """Address of h of a sequence and head in the message at an address."""
    return message + Int64(number) * tiles.h_bytes


def P_in(tiles: Tiles, message: Any, number: Any, num_sequences: Any) -> Any:
    """Address of P of a sequence and head in the message at an address: P of all sequences comes after h of all."""
    return message + Int64(num_sequences) * (tiles.heads * tiles.h_bytes) + Int64(number) * tiles.P_bytes


def link_of(runs: Any, link: Any) -> tuple[Any, Any]:
    """Addresses of a link's h, for the thread, and P. The last run that begins at or before the link has it."""
    h, P = Int64(0), Int64(0)
    for run in runs:
        within = Int64(link - run.first)
        h = cutlass.select_(link >= run.first, run.h + within * run.h_step, h)
        P = cutlass.select_(link >= run.first, run.P + within * run.P_step, P)
    return h, P


@cute.jit
def take(tiles: Tiles, dtype: cutlass.Constexpr, address: Int64, width: Any, rX: cute.Tensor):
    """rX = a thread's part of a matrix. address: of its first element."""
    size = cutlass.const_expr(dtype.width // 8)
    for step, register in tiles.accesses(width):
        source = cute.make_ptr(dtype, address + step * size, cute.AddressSpace.gmem, assumed_align=4 * size)
        load(source, 4, rX, register, True)


@cute.jit
def put(tiles: Tiles, dtype: cutlass.Constexpr, address: Int64, width: Any, rX: cute.Tensor):
    """The inverse of `take`, rounded to dtype."""
    size = cutlass.const_expr(dtype.width // 8)
    for step, register in tiles.accesses(width):
        target = cute.make_ptr(dtype, address + step * size, cute.AddressSpace.gmem, assumed_align=4 * size)
        store(rX, register, 4, target)


@cute.jit
def compose(tiles: Tiles, runs: Any, num_links: Int32, adds_h: Any, width: Any, kept: Any, place: Place, shared: Shared, rX):
    """Carries rX through the chain. adds_h: whether h counts, else it is zero; kept: None, or what is stored on the way."""
    for q in cutlass.range_constexpr(STAGES - 1):
        ask(tiles, runs, num_links, Int32(q), place, shared)
    rH = cute.make_rmem_tensor(tiles.values, Float32)
    rSums = cute.make_rmem_tensor(tiles.values, Float32)
    keep(tiles, kept, Int32(0), place, shared, rX)
    for link in cutlass.range(0, num_links, unroll=1):
        share(tiles, place, shared, rX)
        h, _ = link_of(runs, link)
        rH.fill(0.0)
        if adds_h != 0:
            take(tiles, Float32, h, width, rH)
        rSums.fill(0.0)
        for piece in cutlass.range(0, tiles.pieces, unroll=1):
            q = link * tiles.pieces + piece
            cute.arch.cp_async_wait_group(STAGES - 2)
            # Piece q has arrived for all threads, and all are done with the one before, whose place the next one takes.
            cute.arch.sync_threads()
            ask(tiles, runs, num_links, q + (STAGES - 1), place, shared)
            multiply(tiles, q % STAGES, piece, place, shared, rSums)
        for i in cutlass.range_constexpr(tiles.values):
            rX[i] = rSums[i] + rH[i]
        keep(tiles, kept, link + 1, place, shared, rX)


@cute.jit
def ask(tiles: Tiles, runs: Any, num_links: Int32, q: Int32, place: Place, shared: Shared):
    """Starts the copies of piece q of the chain; a group of copies without any after the last one."""
    link = q // tiles.pieces
    piece = q - link * tiles.pieces
    if link < num_links:
        _, P = link_of(runs, link)
        target = shared.transitions + q % STAGES * tiles.stage_bytes
        for u in cutlass.range_constexpr(tiles.units):
            unit = place.thread + u * tiles.threads
            if cutlass.const_expr(tiles.v_first):
                source = P + Int64(piece * tiles.stage_bytes + unit * UNIT_BYTES)
                _copy_unit(target + unit * UNIT_BYTES, source)
            else:
                row, part = unit // (PIECE // 4), unit % (PIECE // 4)
                source = P + Int64(row * (tiles.K * FLOAT_BYTES) + piece * (PIECE * FLOAT_BYTES) + part * UNIT_BYTES)
                _copy_unit(target + row * tiles.P_pitch + part * UNIT_BYTES, source)
    cute.arch.cp_async_commit_group()


@cute.jit
def share(tiles: Tiles, place: Place, shared: Shared, rX: cute.Tensor):
    """X of a warp's columns, for its lanes; the barrier before the first piece makes it visible."""
    cute.arch.sync_warp()  # all lanes have read the last one
    for c in cutlass.range_constexpr(tiles.columns):
        column = shared.columns + (place.column + c) * tiles.x_pitch
        if cutlass.const_expr(tiles.v_first):
            values = [rX[tiles.register(r, c)].bitcast(Int32) for r in range(ROWS)]
            ptx.store_words(column + place.row_lane * (ROWS * FLOAT_BYTES), values)
        else:
            for r in cutlass.range_constexpr(ROWS):
                row = place.row_lane + r * tiles.row_lanes
                ptx.store_one(column + row * FLOAT_BYTES, rX[tiles.register(r, c)])


@cute.jit
def multiply(tiles: Tiles, stage: Int32, piece: Int32, place: Place, shared: Shared, rSums: cute.Tensor):
    """rSums += P X for the entries of the sum that a piece holds, one after the other."""
    transitions = shared.transitions + stage * tiles.stage_bytes
    columns = shared.columns + place.column * tiles.x_pitch + piece * (PIECE * FLOAT_BYTES)
    if cutlass.const_expr(tiles.v_first):
        transitions += place.row_lane * (ROWS * FLOAT_BYTES)
    else:
        transitions += place.row_lane * tiles.P_pitch
    for j in cutlass.range_constexpr(0, PIECE, 4):
        at = cutlass.const_expr(j * FLOAT_BYTES)
        x_of = [ptx.load_four(columns + (c * tiles.x_pitch + at)) for c in range(tiles.columns)]
        if cutlass.const_expr(tiles.v_first):
            p_of = [ptx.load_four(transitions + (j + e) * tiles.P_pitch) for e in range(4)]  # [entry of the sum][row]
        else:
            p_of = [ptx.load_four(transitions + (r * tiles.row_lanes * tiles.P_pitch + at)) for r in range(ROWS)]
        for e in cutlass.range_constexpr(4):
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(tiles.columns):
                    factor = p_of[e][r] if tiles.v_first else p_of[r][e]
                    i = tiles.register(r, c)
                    rSums[i] = fma(factor, x_of[c][e], rSums[i])


# The DSL has no fma; one that every compilation keeps, so that ranks that run different forms have the same bits.
fma = ptx.instruction("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32)


@cute.jit
def keep(tiles: Tiles, kept: Any, link: Int32, place: Place, shared: Shared, rX: cute.Tensor):
    """Stores the state before a link where it is wanted. Where the chain forks, the state before the first of these links is that
    after the last one, too."""
    if cutlass.const_expr(kept is not None):
        if link >= kept.first and link <= kept.last:
            put(tiles, Float32, kept.address + Int64(link - kept.first) * kept.step, tiles.V, rX)
    if cutlass.const_expr(shared.fork is not None):
        own = shared.fork + place.thread * FLOAT_BYTES
        pitch = cutlass.const_expr(tiles.threads * FLOAT_BYTES)
        if link == kept.first:
            for i in cutlass.range_constexpr(tiles.values):
                ptx.store_one(own + i * pitch, rX[i])
        if link == kept.last:
            for i in cutlass.range_constexpr(tiles.values):
                rX[i] = ptx.load_one(own + i * pitch)


def shared_of(tiles: Tiles, storage: Any, has_fork: bool) -> Shared:
    """Addresses of what `Tiles.storage` lays out."""
    fork = storage.fork.data_ptr().toint() if has_fork else None
    return Shared(storage.transitions.data_ptr().toint(), storage.columns.data_ptr().toint(), fork)
