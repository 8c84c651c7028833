"""The gated RMS norm of the outputs, in shared memory, by the score warpgroup of a variant for `kernels_cute/gdn_prefill`.

    result = o / sqrt(mean(o * o) + eps) * weight * gate(z)

A block has 64 of the 128 V columns of a row, so the two blocks of a head exchange sums of squares. Chunk n has two parts:

    A(n)    sums of squares of O, which the state has left where V was, to the other block
    B(n)    with z and the other block's sums there: the result in O's place, for the storing warp

They are done in the order A(0), A(1), B(0), A(2), B(1), ..., so that the other block's sums have had time to come. Chunks are
those that the block has had since it began. Before a work tile without chunks, and at the end, all is done that is left: there
may be more such work tiles than records, and no record is free again while the storing warp waits for a result.
kernels_cute/gdn_prefill/DESIGN.md has the order of all roles, and why nobody waits in a circle. Sums have the order of the norm's
own kernels.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.chunk import operands
from kernels_cute.chunk.rings import ring_place
from kernels_cute.chunk.shape import SUM_BUFFERS, TILE_BYTES, Z_BUFFERS
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx
from kernels_cute.common.memory import load, pointer, sigmoid

_VECTOR = 8  # V columns of a lane
_LANES = 64 // _VECTOR  # of a row of the block's tile
_STEPS = 16 * _LANES // 32  # rows of a lane: warps have 16
SUM_BYTES = 64 * 4  # of a chunk


class NormTerms(NamedTuple):
    """Arguments of the launch."""

    weight: Any  # [V]
    eps: Any


class NormLane(NamedTuple):
    """Work of a lane: rows `row` + 4 i of a tile, 16 bytes `unit` of each; sums of row `row` + 4 `unit`, where unit < 4."""

    warp: Any
    row: Any
    unit: Any
    other: Any  # rank of the other block


def norm_lane_of(at: Any, rank: Any) -> NormLane:
    return NormLane(at.warp, at.warp * 16 + at.lane // _LANES, at.lane % _LANES, rank ^ 1)


def sums_address(storage: Any, at: NormLane, count: Any, is_own: bool) -> Any:
    """Return the address of a lane's sum of chunk `count`, of this block or the other one. The sums lie right of the diagonal of
    the tile of L, which nobody else uses (rows up to 31 have blocks in the left half alone)."""
    row = count % SUM_BUFFERS * 4 + at.warp + (16 if is_own else 0)
    unit = 4 + at.unit % 4
    return operands.address(storage.lower.data_ptr().toint(), row, unit) + at.row % 4 * 4


@cute.jit
def norm_chunks(
    spec: ChunkSpec, storage: Any, terms: NormTerms, at: NormLane, first: Int32, last: Int32, chunks: Int32, done: Int32
):
    """Do A(n) and B(n - 1) for n from first to last - 1. chunks: chunks with outputs, of all; done: chunks that `norm_rest` has
    finished."""
    for count in cutlass.range(first, last, unroll=1):
        if count < chunks:
            send_sums(spec, storage, at, count)
        if count > done:
            apply_norm(spec, storage, terms, at, count - 1)


def unfinished(chunks: Any, rank: Any) -> Any:
    """Return the first n that is left when P of all `chunks` is made: the last chunk that this block prepares, none if it has
    none."""
    last = chunks - 1
    return cutlass.max(last - ((last - rank) & 1), 0)


@cute.jit
def send_sums(spec: ChunkSpec, storage: Any, at: NormLane, count: Int32):
    """Do A: send the sums of squares of a chunk's outputs to the other block."""
    stage, parity = ring_place(spec.stages, count)
    cute.arch.mbarrier_wait(storage.stored.data_ptr() + stage, parity)
    tile = storage.v.data_ptr().toint() + stage * TILE_BYTES
    parts = [ptx.load_words(operands.address(tile, at.row + 4 * i, at.unit)) for i in range(_STEPS)]
    own = Float32(0.0)
    for i in cutlass.range_constexpr(_STEPS):
        squares = Float32(0.0)
        for word in cutlass.range_constexpr(_VECTOR // 2):
            for value in ptx.unpack(spec.dtype, parts[i][word]):
                squares += value * value
        for bit in cutlass.range_constexpr(_LANES.bit_length() - 1):
            squares += cute.arch.shuffle_sync_bfly(squares, offset=1 << bit)
        own = operands.select(at.unit == i, squares, own)
    barrier = storage.sums_full.data_ptr() + count % SUM_BUFFERS
    if (at.warp == 0) & (cute.arch.lane_idx() == 0):
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, SUM_BYTES)
    target = ptx.in_block(sums_address(storage, at, count, False), at.other)
    ptx.send(target, own, ptx.in_block(barrier.toint(), at.other), _STEPS - at.unit)
    ptx.store_where(sums_address(storage, at, count, True), [own], _STEPS - at.unit)
    cute.arch.sync_warp()


@cute.jit
def apply_norm(spec: ChunkSpec, storage: Any, terms: NormTerms, at: NormLane, count: Int32):
    """Do B: replace a chunk's outputs by the normalised and gated ones."""
    column = (at.other ^ 1) * 64 + at.unit * _VECTOR
    rWeight = cute.make_rmem_tensor(_VECTOR, Float32)
    align = cutlass.const_expr(min(16, _VECTOR * terms.weight.element_type.width // 8))
    load(pointer(terms.weight, Int64(column), align), _VECTOR, rWeight, 0, False)
    stage, _ = ring_place(spec.stages, count)
    buffer, parity = ring_place(Z_BUFFERS, count)
    sums, sums_parity = ring_place(SUM_BUFFERS, count)
    tile, gates = (field.data_ptr().toint() for field in (storage.v, storage.z))
    cute.arch.mbarrier_wait(storage.z_full.data_ptr() + buffer, parity)
    cute.arch.mbarrier_wait(storage.sums_full.data_ptr() + sums, sums_parity)
    own, other = (ptx.load_one(sums_address(storage, at, count, is_own)) for is_own in (True, False))
    squares = own + other
    factor = cute.math.rsqrt(squares * (1.0 / spec.dim) + terms.eps)
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(_STEPS):
        of_row = cute.arch.shuffle_sync(factor, lane // _LANES * _LANES + i)
        row = at.row + 4 * i
        target = operands.address(tile + stage * TILE_BYTES, row, at.unit)
        outputs, gate_words = (
            ptx.load_words(target),
            ptx.load_words(operands.address(gates + buffer * TILE_BYTES, row, at.unit)),
        )
        ptx.store_words(target, gated_words(spec, outputs, gate_words, of_row, rWeight))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.normed.data_ptr() + stage)


def gated_words(spec: Any, outputs: Any, gates: Any, factor: Any, weight: Any) -> list[Any]:
    """The result in the place of a lane's outputs, both as words. factor: of their row; gates: words of z; weight: of the
    columns."""
    words = []
    for word in range(_VECTOR // 2):
        values = []
        for odd in range(2):
            gate, value = ptx.unpack(spec.dtype, gates[word])[odd], ptx.unpack(spec.dtype, outputs[word])[odd]
            value = value * factor * weight[2 * word + odd] * sigmoid(gate)
            values.append(value if spec.norm_sigmoid else value * gate)
        words.append(ptx.pack(spec.dtype, *values))
    return words


def norm_rest(spec, storage, terms, at, rank, chunks, done):
    """Norm the chunks that are left when P of all `chunks` is made. done: chunks that earlier calls have finished."""
    first = cutlass.max(unfinished(chunks, rank), done)
    norm_chunks(spec, storage, terms, at, first, Int32(chunks) + 1, chunks, done)
