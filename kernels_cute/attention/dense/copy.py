"""The warp that copies: the queries of the block's tile, then keys and values of its steps, from the last position to the first.

A step is gathered from cache blocks in pieces that lie in one block each. Pieces beyond the last position that the tile sees are
left out: they may have no block.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels_cute.attention.products import advance, barrier_at


class Maps(NamedTuple):
    """Tensor maps: what the copy engine reads."""

    query_atom: Any
    queries: Any
    key_atom: Any
    keys: Any
    value_atom: Any
    values: Any


class Tile(NamedTuple):
    """The block's tile of queries."""

    sequence: Any
    first: Any  # token
    count: Any  # of query tokens
    position: Any  # of the first
    limit: Any  # positions that its last query sees
    kv_head: Any
    rank: Any  # of the block in its cluster
    newest: Any  # this block's steps, from the last one...
    oldest: Any  # ...to the first one


def box_partition(atom, smem, layout, tensor, box):
    """(to, from): places in shared memory and boxes of a tensor map."""
    sX = smem.get_tensor(layout.outer, swizzle=layout.inner)
    gX = cute.local_tile(tensor, box, (None,) * len(box))
    sX, gX = cute.group_modes(sX, 0, len(box)), cute.group_modes(gX, 0, len(box))
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), sX, gX)


@cute.jit
def copy_warp(tiles: cutlass.Constexpr, storage, maps, params, tile, lane):
    keys = box_partition(maps.key_atom, storage.keys, tiles.cache_smem(tiles.key_stages), maps.keys, tiles.cache_box)
    values = box_partition(maps.value_atom, storage.values, tiles.cache_smem(tiles.value_stages), maps.values, tiles.cache_box)
    copy_queries(tiles, storage, maps, tile)
    line = params.block_tables.iterator + Int64(tile.sequence) * params.block_tables.stride[0]
    ahead = blocks_of(tiles, line, tile.newest, tile.limit, lane)
    before, pieces_before = ahead, Int32(0)  # of the step whose keys came last: its values come next
    stage, parity, value_stage, value_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    for number in cutlass.range(tile.newest - tile.oldest + 2, unroll=1):
        step = tile.newest - number
        block, pieces = ahead, Int32(0)
        if step >= tile.oldest:
            pieces = cutlass.min((tile.limit - step * tiles.step + (tiles.piece - 1)) // tiles.piece, tiles.pieces)
            ahead = blocks_of(tiles, line, cutlass.max(step - 1, 0), tile.limit, lane)
            place = (storage, "keys", stage, parity)
            copy_step(tiles, place, (maps.key_atom, *keys), tile.kv_head, step, block, pieces)
            stage, parity = advance(stage, parity, tiles.key_stages)
        if number > 0:
            place = (storage, "values", value_stage, value_parity)
            copy_step(tiles, place, (maps.value_atom, *values), tile.kv_head, step + 1, before, pieces_before)
            value_stage, value_parity = advance(value_stage, value_parity, tiles.value_stages)
        before, pieces_before = block, pieces


@cute.jit
def copy_queries(tiles: cutlass.Constexpr, storage, maps, tile):
    """Copy the rows of the tile. Tokens after the sequence's last come too, and rows after the last token are zeros."""
    queries = cute.domain_offset((0, tile.first, 0, 0), maps.queries)
    to, source = box_partition(maps.query_atom, storage.queries, tiles.query_smem(), queries, tiles.query_box)
    full = barrier_at(storage, "queries_full")
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, tiles.query_bytes)
    cute.copy(maps.query_atom, source[None, 0, 0, 0, tile.kv_head], to, tma_bar_ptr=full)


@cute.jit
def blocks_of(tiles: cutlass.Constexpr, line, step, limit, lane):
    """Load the cache blocks of a step's pieces, one a lane. Lanes beyond the last position repeat its block."""
    position = cutlass.max(cutlass.min(step * tiles.step + lane * tiles.piece, limit - 1), 0)
    return cute.make_tensor(line + position // tiles.block_size, cute.make_layout(1))[0]


@cute.jit
def copy_step(tiles: cutlass.Constexpr, place, boxes, kv_head, step, block, pieces):
    """Copy the pieces of a step into a stage, once it is free. block: of piece `lane`."""
    storage, ring, stage, parity = place
    atom, to, source = boxes
    full = barrier_at(storage, f"{ring}_full", stage)
    cute.arch.mbarrier_wait(barrier_at(storage, f"{ring}_free", stage), parity ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, pieces * (tiles.piece * tiles.row_bytes))
    for piece in cutlass.range(pieces, unroll=1):
        row = (step * tiles.step + piece * tiles.piece) % tiles.block_size // tiles.piece
        own = cute.arch.shuffle_sync(block, piece)
        cute.copy(atom, source[None, row, 0, kv_head, own], to[None, piece, stage], tma_bar_ptr=full)
