"""A fold of the streamed form: a tile of the state takes in committed entries, and goes to the pool.

    S [column, K] = exp(sum of g) S0 [column, K] + sum over entries e of exp(sum of the g after e) u_e [column] k_e [K]

The sum over the entries is a product of a warp in float32 accuracy, as `products` has those with the state: 16 columns by eight
entries by eight K. Columns and K lie in its fragments such that a lane reads its values of a row together. Lane 4 g + t has of 16
columns 2 g and 2 g + 1, and of 32 K two runs of four, where accesses of the state have eight: number j of both in product j.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.ring import Entries, Live, log_decays
from kernels_cute.common.rounding import key_of, mixed_seed, rounded
from kernels_cute.gdn_decode.streamed.products import QUAD, ROWS, halves
from kernels_cute.gdn_decode.streamed.sizes import COLUMNS, DIM
from kernels_cute.gdn_decode.streamed.spec import Item, Shared, Spec, of_head
from kernels_cute.gdn_decode.streamed.tiles import Tile, load_state

_AT_ONCE = 8  # entries of a product
_SPAN = 32  # K of four products
_SPANS = DIM // _SPAN
_RUN = 4  # K of a lane that lie next to each other, twice in a span


def run_at(spec: Spec, part: Any, half: Any) -> Any:
    """First K in a span of a lane's run. part: the lane in its quad."""
    return (part * 2 + half) * _RUN if spec.vector > _RUN else part * _RUN + half * (QUAD * _RUN)


@cute.jit
def fold_tile(spec: Spec, params: GdnDecodeParams, item: Item, live: Live, tile: Tile, lane: Int32, shared: Shared):
    """Of the entries from live.start on before live.target."""
    entries = of_head(spec, shared.entries, tile.head)
    rTails = cute.make_rmem_tensor(spec.ring.chunks, Float32)
    total = cute.math.exp(log_decays(spec.ring, entries, (live.start, live.target, live.count), None, lane, rTails))
    factor = cute.math.exp(rTails[0])  # of entry `lane`
    rSums = cute.make_rmem_tensor(_SPANS * _RUN * 4, Float32)
    for first in cutlass.range(0, COLUMNS, ROWS, unroll=1):
        rSums.fill(0.0)
        for entry in cutlass.range(live.start, live.target, _AT_ONCE, unroll=1):
            add_products(spec, tile, (first, entry, live.target), factor, lane, entries, rSums)
        for row in cutlass.range_constexpr(2):
            column = first + lane // QUAD * 2 + row
            for span in cutlass.range_constexpr(_SPANS):
                sums = [rSums[(span * _RUN + j) * 4 + 2 * row + half] for half in range(2) for j in range(_RUN)]
                store_span(spec, params, item, tile, (column, span, lane % QUAD), (total, sums))


def add_products(spec: Spec, tile: Tile, at: Any, factor: Any, lane: Any, entries: Entries, rSums: Any) -> None:
    """The sums of 16 columns + eight entries'. at: first column in the tile, first entry, the first that is none.

    Places beyond the last entry have the last one's key, and 0 for what it is multiplied with.
    """
    first, entry, end = at
    columns, left, keys = tile.head * DIM + tile.first + first + lane // QUAD * 2, [], []
    key_at = entries.keys + run_at(spec, lane // QUAD // 2, lane // QUAD % 2) * 4
    for half in range(2):
        own = entry + half * QUAD + lane % QUAD
        found = cutlass.min(own, end - 1)
        weight = cute.arch.shuffle_sync(factor, found)
        pair = ptx.load_pair(entries.updates + (found * (spec.ratio * DIM) + columns) * 4)
        left += [Float32(cutlass.select_(own < end, weight * value, Float32(0.0))) for value in pair]
        keys.append(key_at + found * (4 * DIM))
    left, small = halves(left)
    for span in range(_SPANS):
        fours = [ptx.load_four(key + span * (4 * _SPAN)) for key in keys]
        rights = [halves([four[j] for four in fours]) for j in range(_RUN)]
        # The three products of a sum follow one another: those of other sums come between them.
        for own, size in ((left, 1), (small, 0), (left, 0)):
            for j in range(_RUN):
                place = (span * _RUN + j) * 4
                sums = ptx.multiply_tf32([rSums[place + n] for n in range(4)], own, *rights[j][size])
                for n in range(4):
                    rSums[place + n] = sums[n]


def store_span(spec: Spec, params: GdnDecodeParams, item: Item, tile: Tile, at: Any, values: Any) -> None:
    """Store a lane's part of a span of a column to the pool, rounded once. at: column in the tile, span, lane in the quad;
    values: factor of the state, and the entries' sums of both runs."""
    (column, span, part), (total, sums) = at, values
    gState, size, head = params.ssm_state, spec.state_dtype.width // 8, item.key_head * spec.ratio + tile.head
    row = gState.iterator.toint() + (Int64(item.slot) * gState.stride[0] + Int64((head * DIM + tile.first + column) * DIM)) * size
    for n in range(0, 2 * _RUN, spec.vector):
        place = span * _SPAN + run_at(spec, part, n // _RUN)
        state = load_state(spec, tile.address + (column * DIM + place) * size)
        found = [total * state[i] + sums[n + i] for i in range(spec.vector)]
        if spec.problem.has_rounding:
            key = key_of(mixed_seed(params.rounding_seed), item.slot, head)
            found = [rounded(value, key, (place + i) * DIM + tile.first + column) for i, value in enumerate(found)]
        target = row + place * size
        if spec.vector == _RUN:
            ptx.store_global_four(target, found)
        else:
            words = [ptx.pack(spec.state_dtype, found[i], found[i + 1]) for i in range(0, spec.vector, 2)]
            ptx.store_global_words(target, words)
