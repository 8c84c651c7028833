"""A math warpgroup of the prefill kernel: 64 rows of a tile through all positions of the tile's list (attention/products.py).

Where a loop closes nothing is in flight. A position of the list that a query did not select has p = 0; rows that it spoils
nevertheless are computed once more by themselves (again.py), from the positions that their own queries selected.
"""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.attention import ptx
from kernels_cute.attention.prefill.again import repeat_row
from kernels_cute.attention.prefill.shape import STEP
from kernels_cute.attention.prefill.tiles import ITEM_WORDS
from kernels_cute.attention.products import (
    advance,
    barrier_at,
    by_rows,
    clear,
    end_step,
    issue_outputs,
    issue_scores,
    operands_of,
    put_shares,
    registers_of,
    release,
    soften,
    tensor_of,
)
from kernels_cute.attention.rows import LOG2E, finish


@cute.jit
def math_warpgroup(tiles: cutlass.Constexpr, storage, params, lists, half, warp, lane):
    """half: number of the math warpgroup; warp: within it."""
    queries, keys, values = operands_of(tiles, storage, tensor_of(storage.queries, by_rows(tiles, STEP, 2)))
    operands, registers = (queries[None, None, None, half], keys, values), registers_of(tiles)
    _, rOutputs, _, rMost, rSums = registers
    row = half * 64 + warp * 16 + lane // 4
    bits = (bit_of(tiles, row), bit_of(tiles, row + 8))
    factor = params.scale * LOG2E
    sRecords = storage.records.get_tensor(cute.make_layout(2 * ITEM_WORDS))

    number, going = Int32(0), Boolean(True)
    rings = (Int32(0), Int32(0), Int32(0), Int32(0))  # stage and parity of keys, and of values
    while going:
        cute.arch.mbarrier_wait(barrier_at(storage, "queries_full"), number & 1)
        steps = sRecords[(number & 1) * ITEM_WORDS]
        if steps > 0:
            rings = attend(tiles, storage, operands, registers, (bits, factor, lane), steps, rings)
        else:
            clear(registers)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier_at(storage, "queries_free"))
        going = steps >= 0
        if going:
            # The record keeps until the queries of the next item have been read.
            item = [sRecords[(number & 1) * ITEM_WORDS + word] for word in range(5)]
            repeat = partial(repeat_row, tiles, params, lists, item, lane)
            finish(tiles, params, (rOutputs, rMost, rSums), (item[1], item[2], item[3]), half * 64 + warp * 16, lane, repeat)
        number = number + 1


@cute.jit
def bit_of(tiles: cutlass.Constexpr, row):
    """The bit of a row's query, 0 where there is none."""
    query, bit = row // tiles.group, Uint32(0)
    if query < tiles.queries:
        bit = Uint32(1) << Uint32(query)
    return bit


@cute.jit
def attend(tiles: cutlass.Constexpr, storage, operands, registers, lanes, steps, rings):
    """Compute o, m and the sums of an item. Return the stages and parities that come next in the rings."""
    rScores, lane = registers[0], lanes[2]
    clear(registers)
    stage, parity, value_stage, value_parity = rings
    issue_scores(tiles, storage, operands, rScores, stage, parity)
    warpgroup.wait_group(0)
    weigh(tiles, storage, registers, lanes, stage)
    put_shares(tiles, registers)
    for step in cutlass.range(1, steps, unroll=1):
        stage, parity = advance(stage, parity, tiles.key_stages)
        issue_scores(tiles, storage, operands, rScores, stage, parity)
        issue_outputs(tiles, storage, operands, registers, value_stage, value_parity)
        warpgroup.wait_group(1)
        factors = weigh(tiles, storage, registers, lanes, stage)
        value_stage, value_parity = end_step(
            tiles, storage, registers, factors, (value_stage, value_parity), lane, storage.taken.data_ptr().toint()
        )
    release(storage, "queries_free", Int32(0), lane)
    issue_outputs(tiles, storage, operands, registers, value_stage, value_parity)
    warpgroup.wait_group(0)
    release(storage, "values_free", value_stage, lane)
    stage, parity = advance(stage, parity, tiles.key_stages)
    value_stage, value_parity = advance(value_stage, value_parity, tiles.value_stages)
    return stage, parity, value_stage, value_parity


@cute.jit
def weigh(tiles: cutlass.Constexpr, storage, registers, lanes, stage):
    """Replace the scores by p, update m and the sums, and return the factors of o for the new m. Frees the stage of the keys."""
    rScores, _, _, rMost, rSums = registers
    bits, factor, lane = lanes
    masks = storage.masks.data_ptr().toint() + stage * (STEP * tiles.mask_bytes) + lane % 4 * (2 * tiles.mask_bytes)
    for n in cutlass.range_constexpr(STEP // 8):
        words = column_masks(tiles, masks + n * (8 * tiles.mask_bytes))
        for e in cutlass.range_constexpr(2):
            for side in cutlass.range_constexpr(2):
                i = 4 * n + 2 * side + e
                bit = bits[side] << Uint32(16) if tiles.mask_bytes == 2 and e == 1 else bits[side]
                is_selected = (words[e] & bit) != 0
                rScores[i] = cutlass.select_(is_selected, rScores[i] * factor, Float32(-float("inf")))
    release(storage, "keys_free", stage, lane)
    return soften(tiles, registers)


def column_masks(tiles: Any, address: Any) -> tuple[Any, Any]:
    """Return the words that hold the masks of two neighbouring columns. With 16-bit masks the second one is in the upper half."""
    if tiles.mask_bytes == 2:
        word = Uint32(ptx.load_word(address))
        return word, word
    low, high = ptx.load_pair_of_words(address)
    return Uint32(low), Uint32(high)
