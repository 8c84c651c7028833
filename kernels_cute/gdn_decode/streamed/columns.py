"""A tile of the streamed form: 32 columns of a state, which one warp takes from the stage to the rows of the output.

    y_i, o_i = D_i S0^T k_i, D_i S0^T q_i + sum_e w_ei (k_e . k_i, k_e . q_i) u_e          for all tokens, as in `ring_batch`
    u_i      = beta_i (v_i - y_i - sum_(j < i) d_ij (k_j . k_i) u_j)                          in order

Products with the state by the warp as a whole (`products`). Then a lane has a column, and all that remains.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx, ring
from kernels_cute.common.ring import Live, load_columns
from kernels_cute.common.ring_batch import halved
from kernels_cute.gdn_decode.batch import z_of
from kernels_cute.gdn_decode.streamed.fold import fold_tile
from kernels_cute.gdn_decode.streamed.items import block_of
from kernels_cute.gdn_decode.streamed.products import multiply_tile, right_operand
from kernels_cute.gdn_decode.streamed.sizes import COLUMNS, DIM, TILES_OF_HEAD, WARPS
from kernels_cute.gdn_decode.streamed.spec import Item, NamedBarrier, Shared, Spec, of_head, stage_of, tile_number
from kernels_cute.gdn_decode.streamed.tiles import Tile
from kernels_cute.gdn_decode.token import activated


@cute.jit
def add_entries(spec: Spec, tile: Tile, live: Live, lane: Int32, shared: Shared, rSums: cute.Tensor):
    """rSums [vector] = the lane's column of S^T k_i and S^T q_i, before the call's own tokens."""
    vectors, entries = cutlass.const_expr(spec.vectors), of_head(spec, shared.entries, tile.head)
    found = load_columns(shared.sums + lane * (4 * spec.sums_pitch), vectors)
    totals = shared.totals + tile.head * (4 * spec.batch)
    for x in cutlass.range_constexpr(vectors):
        rSums[x] = found[x] * ptx.load_one(totals + x // 2 * 4)
    updates = entries.updates + (tile.head * DIM + tile.first + lane) * 4
    at_once = cutlass.const_expr(2 if spec.turns == 1 else 1)  # with many value heads there are no registers for two
    for entry in cutlass.range(live.start, live.count, unroll=at_once):
        update = ptx.load_one(updates + entry * (4 * spec.ratio * DIM))
        row = load_columns(entries.weights + entry * (4 * vectors), vectors)
        for x in cutlass.range_constexpr(vectors):
            rSums[x] += row[x] * update


def solve(spec: Spec, tile: Tile, live: Live, lane: Any, shared: Shared, registers: Any) -> None:
    """Compute the corrections (rU) and the outputs (rO) of the lane's column, and the factors of the keys (rK). registers: rSums,
    rU, rO, rK."""
    rSums, rU, rO, rK = registers
    batch, vectors, entries = spec.batch, spec.vectors, of_head(spec, shared.entries, tile.head)
    column = (2 + tile.head) * DIM + tile.first + lane
    for j in range(batch):
        row = load_columns(entries.weights + (live.count + j) * (4 * vectors), vectors)
        k_factor, q_factor = ptx.load_pair(shared.factors + 8 * j)
        value = ptx.load_one(shared.tokens + (j * spec.token_floats + column) * 4)
        beta = ptx.load_one(shared.gates + (j * spec.ratio + tile.head) * 8 + 4)
        rK[j] = k_factor
        rU[j] = beta * (value - k_factor * rSums[2 * j])
        weighted = k_factor * rU[j]  # as it stands in every sum
        rO[j] = q_factor * (rSums[2 * j + 1] + row[2 * j + 1] * weighted)
        for x in range(2 * j + 2, vectors):
            rSums[x] += row[x] * weighted


@cute.jit
def run_tile(
    spec: Spec, storage, params: GdnDecodeParams, item: Item, live: Live, place: Any, shared: Shared, norm_weight: Float32
):  # fmt: skip
    """place: live items before this one, and the turn of tiles in it; the thread's warp and lane."""
    (served, turn), (warp, lane) = place
    batch, number = cutlass.const_expr(spec.batch), warp + turn * WARPS
    stage, parity = stage_of(spec, served, warp, turn)
    squares = tile_number(spec, served, warp, turn) % 2  # buffer of the sums of squares
    tile = Tile(number // TILES_OF_HEAD, number % TILES_OF_HEAD * COLUMNS, shared.state + stage * spec.tile_bytes)
    rZ, rU, rO, rK = [cute.make_rmem_tensor(batch, Float32) for _ in range(4)]
    load_gates_of_norm(spec, params, item, tile, lane, rZ)
    right = right_operand(spec, lane, shared)
    cute.arch.mbarrier_wait(storage.state_full.data_ptr() + stage, parity)
    multiply_tile(spec, tile, lane, shared, right)
    if ring.needs_fold(live):
        fold_tile(spec, params, item, live, tile, lane, shared)
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.state_free.data_ptr() + stage)

    cute.arch.mbarrier_wait(storage.weights_full.data_ptr() + served % 2, served // 2 % 2)
    rSums = cute.make_rmem_tensor(spec.vectors, Float32)
    add_entries(spec, tile, live, lane, shared, rSums)
    solve(spec, tile, live, lane, shared, (rSums, rU, rO, rK))
    append(spec, params, item, live, tile, (warp, lane, turn), shared, (rU, rK))
    if number + WARPS >= spec.item_tiles:
        leave(spec, storage, served, lane)
    if cutlass.const_expr(spec.has_norm):
        share_squares(spec, warp, lane, squares, shared, rO)
    else:  # nothing to wait for: without it ptxas mixes what follows into what comes before, and spills
        cute.arch.barrier(barrier_id=NamedBarrier.HEAD + warp // TILES_OF_HEAD, number_of_threads=32 * TILES_OF_HEAD)
    for i in cutlass.range_constexpr(batch):
        value = rO[i]
        if cutlass.const_expr(spec.has_norm):
            gate = activated(spec, rZ[i])
            value = value * inverse_norm(spec, params, warp, squares, i, shared) * norm_weight * gate
        if i < item.count:
            value = cutlass.select_(live.is_valid, value, Float32(0.0))
            head = item.key_head * spec.ratio + tile.head
            params.out[item.begin + i, head, tile.first + lane] = Float32(value).to(params.out.element_type)


@cute.jit
def leave(spec: Spec, storage, served: Int32, lane: Int32):
    """Say that this warp no longer reads an item's entries, nor what has been made ready of it."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.entries_free.data_ptr() + served % spec.buffers)
        cute.arch.mbarrier_arrive(storage.done.data_ptr() + served % 2)


@cute.jit
def load_gates_of_norm(spec: Spec, params: GdnDecodeParams, item: Item, tile: Tile, lane: Int32, rZ: cute.Tensor):
    if cutlass.const_expr(spec.has_norm):
        block = block_of(spec, item.key_head, lane)
        place = block.place._replace(head=block.place.head + tile.head)
        block = block._replace(rank=tile.head, place=place)
        for i in cutlass.range_constexpr(spec.batch):
            token = cutlass.min(item.begin + i, item.begin + item.count - 1)
            rZ[i] = z_of(spec, params, token, block, tile.first + lane)


@cute.jit
def share_squares(spec: Spec, warp: Int32, lane: Int32, buffer: Int32, shared: Shared, rO: cute.Tensor):
    """Write the tile's sums of squared outputs to shared memory, and wait until those of the head's other tiles are there."""
    batch = cutlass.const_expr(spec.batch)
    rSquares = cute.make_rmem_tensor(batch, Float32)
    for i in cutlass.range_constexpr(batch):
        rSquares[i] = rO[i] * rO[i]
    halved(rSquares, batch, 1, lane)
    value = rSquares[0]
    for bit in cutlass.range_constexpr((batch - 1).bit_length(), 5):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
    if lane < batch:
        ptx.store_one(shared.squares + ((buffer * batch + lane) * WARPS + warp) * 4, value)
    cute.arch.barrier(barrier_id=NamedBarrier.HEAD + warp // TILES_OF_HEAD, number_of_threads=32 * TILES_OF_HEAD)


@cute.jit
def inverse_norm(spec: Spec, params: GdnDecodeParams, warp: Int32, buffer: Int32, token: Constexpr, shared: Shared):
    """Return 1 / sqrt(mean of the head's squared outputs + eps) of a token."""
    at = (buffer * spec.batch + token) * WARPS + warp // TILES_OF_HEAD * TILES_OF_HEAD
    four = ptx.load_four(shared.squares + at * 4)
    return cute.math.rsqrt(((four[0] + four[1]) + (four[2] + four[3])) * (1.0 / DIM) + params.eps)


@cute.jit
def append(
    spec: Spec, params: GdnDecodeParams, item: Item, live: Live, tile: Tile, place: Any, shared: Shared, registers: Any
):  # fmt: skip
    """Write the tokens' entries to their rows of the ring: all warps the corrections, warp w the key of token w, warp 0 the log
    decays."""
    (warp, lane, turn), (rU, rK), gRing = place, registers, params.ring
    source = gRing.iterator.toint() + Int64(item.slot) * gRing.stride[0] * 4
    head = item.key_head * spec.ratio + tile.head
    for i in cutlass.range_constexpr(spec.batch):
        if (i < item.count) & live.is_valid:
            row = source + Int64(ring.row_of(spec.ring, live.base, live.count + i)) * gRing.stride[1] * 4
            at = spec.ring.updates_at + head * DIM + tile.first + lane
            ptx.store_global_word(row + at * 4, rU[i].bitcast(Int32))
            if (warp == i) & (turn == 0):
                key = ptx.load_four(shared.tokens + (i * spec.token_floats + DIM) * 4 + lane * 16)
                values = [rK[i] * key[e] for e in range(4)]
                ptx.store_global_four(row + item.key_head * (4 * DIM) + lane * 16, values)
                if lane < spec.ratio:
                    decay = ptx.load_word(shared.gates + (i * spec.ratio + lane) * 8)
                    ptx.store_global_word(row + (spec.ring.decays_at + item.key_head * spec.ratio + lane) * 4, decay)
