"""A fold of the streamed form: a tile of the state takes in committed entries, and goes to the pool."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.problems import GdnDecodeParams
from kernels_cute.common import ptx
from kernels_cute.common.ring import TEAM, Live, log_decays
from kernels_cute.common.rounding import key_of, mixed_seed, rounded
from kernels_cute.gdn_decode.streamed.sizes import COLUMNS, DIM
from kernels_cute.gdn_decode.streamed.spec import Item, Shared, Spec, of_head
from kernels_cute.gdn_decode.streamed.tiles import PER_LANE, TEAMS, Tile, entry_at, state_values

_AT_ONCE = 4  # columns of a lane


@cute.jit
def fold_tile(spec: Spec, params: GdnDecodeParams, item: Item, live: Live, tile: Tile, lane: Int32, shared: Shared):
    """S = exp(sum of g) S0 + sum of exp(sum of the g after e) k_e u_e^T, of the entries from live.start on before live.target."""
    part, group, entries = lane % TEAM, lane // TEAM, of_head(spec, shared.entries, tile.head)
    rTails = cute.make_rmem_tensor(spec.ring.chunks, Float32)
    total = cute.math.exp(log_decays(spec.ring, entries, (live.start, live.target, live.count), None, lane, rTails))
    factor = cute.math.exp(rTails[0])  # of entry `lane`
    rState = cute.make_rmem_tensor(_AT_ONCE * PER_LANE, Float32)
    rU = cute.make_rmem_tensor(_AT_ONCE, Float32)
    for first in cutlass.range(group, COLUMNS, _AT_ONCE * TEAMS, unroll=1):
        for c in cutlass.range_constexpr(_AT_ONCE):
            values = state_values(spec, tile, first + c * TEAMS, part)
            for n in cutlass.range_constexpr(PER_LANE):
                rState[c * PER_LANE + n] = total * values[n]
        updates = entries.updates + (tile.head * DIM + tile.first + first) * 4
        for entry in cutlass.range(live.start, live.target, unroll=1):
            weight = cute.arch.shuffle_sync(factor, entry)
            for c in cutlass.range_constexpr(_AT_ONCE):
                rU[c] = weight * ptx.load_one(updates + (entry * (spec.ratio * DIM) + c * TEAMS) * 4)
            for n in cutlass.range_constexpr(0, PER_LANE, 4):
                key = ptx.load_four(entries.keys + (entry * DIM + entry_at(spec, part, n)) * 4)
                for e in cutlass.range_constexpr(4):
                    for c in cutlass.range_constexpr(_AT_ONCE):
                        rState[c * PER_LANE + n + e] += key[e] * rU[c]
        for c in cutlass.range_constexpr(_AT_ONCE):
            store_column(spec, params, item, tile, first + c * TEAMS, part, [rState[c * PER_LANE + n] for n in range(PER_LANE)])


def store_column(spec: Spec, params: GdnDecodeParams, item: Item, tile: Tile, column: Any, part: Any, values: list[Any]) -> None:
    """A lane's entries of a column to the pool, rounded once."""
    gState, size, head = params.ssm_state, spec.state_dtype.width // 8, item.key_head * spec.ratio + tile.head
    at = tile.first + column
    row = gState.iterator.toint() + (Int64(item.slot) * gState.stride[0] + Int64((head * DIM + at) * DIM)) * size
    if spec.problem.has_rounding:
        key = key_of(mixed_seed(params.rounding_seed), item.slot, head)
        values = [rounded(value, key, entry_at(spec, part, n) * DIM + at) for n, value in enumerate(values)]
    for n in range(0, PER_LANE, spec.vector):
        target = row + entry_at(spec, part, n) * size
        if spec.vector == 4:
            ptx.store_global_four(target, values[n : n + 4])
        else:
            pairs = zip(values[n : n + 8 : 2], values[n + 1 : n + 8 : 2], strict=True)
            ptx.store_global_words(target, [ptx.pack(spec.state_dtype, low, high) for low, high in pairs])
