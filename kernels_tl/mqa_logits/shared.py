"""Tile geometry, feasibility and score epilogue that the ragged and the paged indexer logits share.

Geometry: keys are the rows of the matrix product (64 per warpgroup), queries x heads its columns, so that the sum over
heads runs along accumulator columns and ends in one shuffle reduction over four lanes.
"""

from typing import Any

import tilelang.language as T

from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load
from kernels_tl.common.ptx import MAXIMUM, maximum
from kernels_tl.mqa_logits.tiles import Tiles

# Every global access is guarded by hand; roles are divergent, so the compiler must not add block-wide barriers.
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_data_race_check": True,
}


def allocate_shared(tiles: Tiles, **more: Any) -> Any:
    """Shared memory and barriers of a block; `item` describes the item at hand."""
    return build.named(
        q=T.alloc_shared((2 * tiles.kv_heads, tiles.columns, tiles.dim), tiles.dtype),
        k=T.alloc_shared((tiles.stages, tiles.keys, tiles.dim), tiles.dtype),
        weights=T.alloc_shared((2 * tiles.kv_heads, tiles.queries, tiles.padded), "float32"),
        item=T.alloc_shared((2, 8), "int32"),
        q_full=T.alloc_barrier([32] * 2),
        q_empty=T.alloc_barrier([tiles.math_threads] * 2),
        k_full=T.alloc_barrier([32] * tiles.stages),
        k_empty=T.alloc_barrier([tiles.math_threads] * tiles.stages),
        **more,
    )


def allocate_registers(tiles: Tiles) -> Any:
    """Fragments of a math warpgroup."""
    return build.named(
        scores=T.alloc_fragment((tiles.keys, tiles.columns), "float32"),
        product=T.alloc_fragment((tiles.keys, tiles.queries, tiles.padded), "float32"),
        weights=T.alloc_fragment((tiles.queries, tiles.padded), "float32"),
        part=T.alloc_fragment((tiles.keys, tiles.queries), "float32"),  # sums over the heads of a key head
        total=T.alloc_fragment((tiles.keys, tiles.queries), "float32"),  # and of all
    )


@T.macro
def multiply(tiles: Any, shared: Any, count: Any, item: Any, group: Any, scores: Any):
    """Queues the products of a block's count-th key tile and the queries of its item for one key head.

    Macros take counts, not stages: an argument is a variable of its own, of which the compiler knows no range.
    """
    T.wgmma_gemm(
        *(shared.k[count % tiles.stages, :, :], shared.q[(item % 2) * tiles.kv_heads + group, :, :], scores),
        transpose_B=True,
        clear_accum=True,
        policy=T.GemmWarpPolicy.FullRow,
    )


def prelude(tiles: Tiles) -> str | None:
    """Source that `activated` needs."""
    return MAXIMUM if tiles.relu and not tiles.doubles else None


def activated(tiles: Tiles, score: Any) -> Any:
    """The score after the activation; NaN stays NaN, which `T.max` would make 0.

    FP8 scores are finite, so twice the relu is one addition, x + |x|, and `activated_scale` makes up for the factor. A bfloat16
    score may be -inf, which that would make NaN.
    """
    if not tiles.relu:
        return score
    return score + T.abs(score) if tiles.doubles else maximum(score, T.float32(0.0))


def activated_scale(tiles: Tiles, scale: Any) -> Any:
    """The factor of sums of `activated` scores."""
    return scale * 0.5 if tiles.doubles else scale


@T.macro
def sum_heads(tiles: Any, registers: Any):
    """part[j, b] = the sum over heads h of weights[b, h] * activated(scores[j, b, h])."""
    # The product is a buffer of its own, so that the sum fuses to one fma.
    scores = T.reshape(registers.scores, (tiles.keys, tiles.queries, tiles.padded))
    for j, b, h in T.Parallel(tiles.keys, tiles.queries, tiles.padded):
        if tiles.weighted:
            registers.product[j, b, h] = activated(tiles, scores[j, b, h]) * registers.weights[b, h]
        else:
            registers.product[j, b, h] = activated(tiles, scores[j, b, h])
    T.reduce_sum(registers.product, registers.part, dim=-1, clear=True)


@T.macro
def load_weights(tiles: Any, shared: Any, item: Any, group: Any, registers: Any):
    if tiles.weighted:
        T.copy(shared.weights[(item % 2) * tiles.kv_heads + group, :, :], registers.weights)


@T.macro
def publish_weights(tiles: Any, shared: Any, weights: Any, row0: Any, rows: Any, item: Any, lane: Any):
    """Weights of an item's queries as float32, by one warp; padding weighs 0."""
    for e in T.serial((tiles.kv_heads * tiles.columns + 31) // 32):
        # Column x of key head g: query x // padded, head x % padded of the group.
        x = (e * 32 + lane) % tiles.columns
        g = (e * 32 + lane) // tiles.columns
        if e * 32 + lane < tiles.kv_heads * tiles.columns:
            shared.weights[(item % 2) * tiles.kv_heads + g, x // tiles.padded, x % tiles.padded] = 0.0
            if (row0 + x // tiles.padded < rows) & (x % tiles.padded < tiles.group):
                shared.weights[(item % 2) * tiles.kv_heads + g, x // tiles.padded, x % tiles.padded] = T.cast(
                    weights[row0 + x // tiles.padded, g * tiles.group + x % tiles.padded], "float32"
                )


@T.macro
def copy_queries(tiles: Any, shared: Any, q: Any, row0: Any, item: Any):
    """The queries of an item, by one warp; padded heads are read as zeros beyond the head axis."""
    padded, width = tiles.padded, tiles.copy_columns
    if tiles.flat:
        rows = slice(row0 * tiles.num_heads, row0 * tiles.num_heads + tiles.columns)
        bulk_load(q[rows, :], shared.q[item % 2, :, :], shared.q_full[item % 2])
    else:
        for g in T.serial(tiles.kv_heads):
            for b in T.serial(tiles.queries):
                for half in T.unroll(tiles.dim // width):
                    columns = slice(half * width, half * width + width)
                    group, rows = (item % 2) * tiles.kv_heads + g, slice(b * padded, b * padded + padded)
                    bulk_load(q[row0 + b, g, 0:padded, columns], shared.q[group, rows, columns], shared.q_full[item % 2])
