"""Tile geometry, feasibility and score epilogue that the ragged and the paged indexer logits share.

Geometry: keys are the rows of the matrix product (64 per warpgroup), queries x heads its columns, so that the sum over
heads runs along accumulator columns and ends in one shuffle reduction over four lanes.
"""

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from gdn.device import H100, DeviceSpec
from gdn.problems import DTYPE_BYTES, LogitsProblem
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load
from kernels_tl.common.ptx import MAXIMUM, maximum

WARPGROUP = 128
MAX_COLUMNS = 256  # of one wgmma
# Accumulator columns worth having: the products of these widths are single instructions.
WIDTHS = (256, 224, 192, 160, 128, 112, 96, 80, 64, 48, 32, 16)

# Every global access is guarded by hand; roles are divergent, so the compiler must not add block-wide barriers.
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_data_race_check": True,
}


def padded_heads(problem: LogitsProblem) -> int:
    """Columns one query takes: its heads of one key head, rounded up so that a query owns whole lanes of a quad."""
    group = problem.num_heads // problem.num_kv_heads
    return 4 if group <= 4 else -(-group // 8) * 8


def is_flat(problem: LogitsProblem) -> bool:
    """Whether the queries of an item are consecutive rows of the product's columns: one copy brings them, none is padded."""
    return problem.num_kv_heads == 1 and problem.num_heads == padded_heads(problem)


def q_shape(problem: LogitsProblem, rows: Any) -> tuple[Any, ...]:
    """Shape of q as the kernel reads it."""
    if is_flat(problem):
        return rows, problem.head_dim
    return rows, problem.num_kv_heads, problem.num_heads // problem.num_kv_heads, problem.head_dim


def refusal(problem: LogitsProblem, default: Callable[[Any, DeviceSpec], Any]) -> str | None:
    """Reason why a logits kernel of this default configuration does not serve the problem, or None."""
    p = problem
    if p.dtype not in ("float8_e4m3fn", "bfloat16"):
        return f"requires q of float8_e4m3fn or bfloat16, got {p.dtype}"
    if p.head_dim not in (64, 128):
        return f"requires head_dim 64 or 128, got {p.head_dim}"
    if p.num_kv_heads < 1 or p.num_heads % p.num_kv_heads:
        return f"requires heads divisible by kv_heads, got {p.num_heads} and {p.num_kv_heads}"
    if not 1 <= p.num_heads <= 64:
        return f"requires 1 to 64 heads, got {p.num_heads}"
    if p.weights_dtype not in (None, "float32", "bfloat16"):
        return f"requires weights of float32 or bfloat16, or none, got {p.weights_dtype}"
    if p.out_dtype not in ("float32", "bfloat16"):
        return f"requires out of float32 or bfloat16, got {p.out_dtype}"
    if p.has_k_scale and p.dtype != "float8_e4m3fn":
        return f"requires float8_e4m3fn keys where key scales are given, got {p.dtype}"
    if default(p, H100) is None:
        sizes = f"{p.num_heads} heads and {p.num_kv_heads} key heads of head_dim {p.head_dim} in {p.dtype}"
        return f"requires queries and keys that fit a block's shared memory, got {sizes}"
    return None


def present(config: Any, problem: LogitsProblem) -> Any:
    """The configuration; ValueError where there is none."""
    if config is None:
        raise ValueError(f"no configuration fits {problem}")
    return config


class Tiles:
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: LogitsProblem, queries: int, config: Any) -> None:
        self.num_heads, self.kv_heads, self.dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
        self.group = self.num_heads // self.kv_heads  # query heads per key head
        self.padded = padded_heads(problem)  # columns of one query in a product
        self.queries = queries  # (or drafts) of a product
        self.columns = queries * self.padded
        self.math_warpgroups, self.stages, self.blocks = config.math_warpgroups, config.stages, config.blocks
        self.keys = 64 * self.math_warpgroups  # of a tile
        self.math_threads = WARPGROUP * self.math_warpgroups
        self.clean, self.relu, self.scaled = problem.clean, problem.relu, problem.has_k_scale
        self.doubles = self.relu and problem.dtype == "float8_e4m3fn"  # relu as x + |x|
        self.weighted, self.weights_dtype = problem.weights_dtype is not None, problem.weights_dtype or "float32"
        self.dtype, self.out_dtype = problem.dtype, problem.out_dtype
        self.value_bytes = DTYPE_BYTES[self.dtype]
        self.flat = is_flat(problem)
        # Columns of a copy that fills part of a tile's rows: one swizzle row of 128 bytes.
        self.copy_columns = min(self.dim, 128 // self.value_bytes)
        # Registers of a thread of the producer warpgroup (setmaxnreg counts in eights). Head counts that are no power of two
        # divide by them, which spilled with 40 (24 and 48 heads, bf16 out, head_dim 64).
        self.loader_registers = 40 if self.flat and self.group & (self.group - 1) == 0 else 56
        # Those of a math thread, after the producer warpgroup gave its own away. The pool is what the launch allots, a multiple
        # of eight for every thread; asking for more than it holds hangs.
        warpgroups = self.math_warpgroups + 1
        pool = warpgroups * min(65536 // (warpgroups * WARPGROUP) // 8 * 8, 168)
        self.math_registers = min(240, (pool - self.loader_registers) // self.math_warpgroups // 8 * 8)

    def tile_bytes(self) -> int:
        """Shared memory of queries, weights, keys, alignment and barriers."""
        queries = 2 * self.kv_heads * self.columns * (self.dim * self.value_bytes + 4)
        return queries + self.stages * self.keys * self.dim * self.value_bytes + 2048

    def fits(self, shared_bytes: int, device: DeviceSpec) -> bool:
        if self.columns > MAX_COLUMNS or self.columns % 8 or shared_bytes > device.shared_bytes_per_block:
            return False
        # Registers that a math thread holds through a tile: 64 rows x columns of sums, weights, and the summed scores. Addresses,
        # masks and loop state take the rest.
        weights = self.columns // 4 if self.weighted else 0
        scores = 2 * max(1, self.queries * min(4, self.padded) // 4) * (2 if self.kv_heads > 1 else 1)
        return self.columns // 2 + weights + scores + 32 <= self.math_registers


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
