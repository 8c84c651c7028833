"""What the ragged and the paged indexer logits share: tile geometry, feasibility and the score epilogue.

Geometry: keys are the rows of the matrix product (64 per warpgroup), queries x heads its columns, so that the sum over
heads runs along accumulator columns and ends in one shuffle reduction over four lanes.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from gdn.problems import DTYPE_BYTES, LogitsProblem

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


def padded_heads(heads: int) -> int:
    """Columns one query takes: its heads of one key head, rounded up so that a query owns whole lanes of a quad."""
    return 4 if heads <= 4 else -(-heads // 8) * 8


@dataclass(frozen=True)
class Shape:
    """The static numbers of a problem that both kernels use."""

    heads: int  # all query heads
    kv_heads: int
    group: int  # query heads per key head
    columns: int  # padded heads per key head: accumulator columns of one query
    dim: int
    dtype: str
    weights_dtype: str | None
    out_dtype: str
    relu: bool
    scaled: bool
    clean: bool

    @property
    def value_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def shape_of(problem: LogitsProblem) -> Shape:
    group = problem.num_heads // problem.num_kv_heads
    return Shape(
        heads=problem.num_heads,
        kv_heads=problem.num_kv_heads,
        group=group,
        columns=padded_heads(group),
        dim=problem.head_dim,
        dtype=problem.dtype,
        weights_dtype=problem.weights_dtype,
        out_dtype=problem.out_dtype,
        relu=problem.relu,
        scaled=problem.has_k_scale,
        clean=problem.clean,
    )


def refusal_common(problem: LogitsProblem) -> str | None:
    """Why neither logits kernel serves the problem, or None."""
    if problem.dtype not in ("float8_e4m3fn", "bfloat16"):
        return f"requires q of float8_e4m3fn or bfloat16, got {problem.dtype}"
    if problem.head_dim not in (64, 128):
        return f"requires head_dim 64 or 128, got {problem.head_dim}"
    if problem.num_kv_heads < 1 or problem.num_heads % problem.num_kv_heads:
        return f"requires heads divisible by kv_heads, got {problem.num_heads} and {problem.num_kv_heads}"
    if not 1 <= problem.num_heads <= 64:
        return f"requires 1 to 64 heads, got {problem.num_heads}"
    if problem.weights_dtype not in (None, "float32", "bfloat16"):
        return f"requires weights of float32 or bfloat16, or none, got {problem.weights_dtype}"
    if problem.out_dtype not in ("float32", "bfloat16"):
        return f"requires out of float32 or bfloat16, got {problem.out_dtype}"
    if problem.has_k_scale and problem.dtype != "float8_e4m3fn":
        return f"requires float8_e4m3fn keys where key scales are given, got {problem.dtype}"
    return None


def copy_columns(shape: Shape) -> int:
    """Columns of a copy that fills part of a tile's rows: one swizzle row of 128 bytes."""
    return min(shape.dim, 128 // shape.value_bytes)


def accumulator_registers(queries: int, shape: Shape) -> int:
    """Registers a math thread holds through a tile: 64 rows x columns of sums, weights, and the summed scores."""
    width = queries * shape.columns
    weights = width // 4 if shape.weights_dtype is not None else 0
    scores = 2 * max(1, queries * min(4, shape.columns) // 4) * (2 if shape.kv_heads > 1 else 1)
    return width // 2 + weights + scores


def flat(shape: Shape) -> bool:
    """Queries of an item are consecutive rows of the product's columns: one copy brings them, none is padded."""
    return shape.kv_heads == 1 and shape.group == shape.columns


def loader_registers(shape: Shape) -> int:
    """Registers of a thread of the producer warpgroup (setmaxnreg counts in eights).

    Head counts that are no power of two divide by them, which spilled with 40 (24 and 48 heads, bf16 out, head_dim 64).
    """
    return 40 if flat(shape) and shape.group & (shape.group - 1) == 0 else 56


def math_registers(math_groups: int, shape: Shape) -> int:
    """Registers a math thread may have after the producer warpgroup gave its own away.

    The pool is what the launch allots, a multiple of eight for every thread; asking for more than it holds hangs.
    """
    groups = math_groups + 1
    pool = groups * min(65536 // (groups * WARPGROUP) // 8 * 8, 168)
    return min(240, (pool - loader_registers(shape)) // math_groups // 8 * 8)


class Tiles:
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: LogitsProblem, queries: int, math_warpgroups: int, stages: int, blocks: int) -> None:
        shape = shape_of(problem)
        self.num_heads, self.kv_heads, self.group, self.dim = shape.heads, shape.kv_heads, shape.group, shape.dim
        self.padded = shape.columns  # columns of one query in a product
        self.queries = queries  # (or drafts) of a product
        self.columns = queries * self.padded
        self.math_warpgroups, self.stages, self.blocks = math_warpgroups, stages, blocks
        self.keys = 64 * math_warpgroups  # of a tile
        self.math_threads = WARPGROUP * math_warpgroups
        self.clean, self.relu, self.scaled, self.weighted = shape.clean, shape.relu, shape.scaled, shape.weights_dtype is not None
        self.dtype, self.out_dtype = shape.dtype, shape.out_dtype
        self.flat = flat(shape)  # the queries of an item are consecutive rows of `columns`
        self.copy_columns = copy_columns(shape)
        self.math_registers, self.loader_registers = math_registers(math_warpgroups, shape), loader_registers(shape)


@T.macro
def multiply(tiles: Any, buffers: Any, count: Any, item: Any, group: Any, scores: Any):
    """Queues the products of a block's count-th key tile and the queries of its item for one key head.

    Macros take counts, not stages: an argument is a variable of its own, of which the compiler knows no range.
    """
    T.wgmma_gemm(
        buffers.k[count % tiles.stages, :, :],
        buffers.q[(item % 2) * tiles.kv_heads + group, :, :],
        scores,
        transpose_B=True,
        clear_accum=True,
        policy=T.GemmWarpPolicy.FullRow,
    )


@T.macro
def activate(tiles: Any, product: Any, scores: Any, weights: Any):
    """product[j, b, h] = weights[b, h] * act(scores[j, b, h]); a buffer of its own, so that the sum fuses to one fma."""
    for j, b, h in T.Parallel(tiles.keys, tiles.queries, tiles.padded):
        if tiles.relu:
            if tiles.weighted:
                product[j, b, h] = T.max(scores[j, b, h], 0.0) * weights[b, h]
            else:
                product[j, b, h] = T.max(scores[j, b, h], 0.0)
        else:
            if tiles.weighted:
                product[j, b, h] = scores[j, b, h] * weights[b, h]
            else:
                product[j, b, h] = scores[j, b, h]


@T.macro
def publish_weights(tiles: Any, buffers: Any, weights: Any, row0: Any, rows: Any, item: Any, lane: Any):
    """Weights of an item's queries as float32, by one warp; padding weighs 0."""
    for e in T.serial((tiles.kv_heads * tiles.columns + 31) // 32):
        # Column x of key head g: query x // padded, head x % padded of the group.
        x = (e * 32 + lane) % tiles.columns
        g = (e * 32 + lane) // tiles.columns
        if e * 32 + lane < tiles.kv_heads * tiles.columns:
            buffers.weights[(item % 2) * tiles.kv_heads + g, x // tiles.padded, x % tiles.padded] = 0.0
            if (row0 + x // tiles.padded < rows) & (x % tiles.padded < tiles.group):
                buffers.weights[(item % 2) * tiles.kv_heads + g, x // tiles.padded, x % tiles.padded] = T.cast(
                    weights[row0 + x // tiles.padded, g * tiles.group + x % tiles.padded], "float32"
                )


@T.macro
def copy_queries(tiles: Any, buffers: Any, q: Any, row0: Any, item: Any):
    """The queries of an item, by one warp; padded heads are read as zeros beyond the head axis."""
    if tiles.flat:
        T.tma_copy(
            q[row0 * tiles.num_heads : row0 * tiles.num_heads + tiles.columns, :],
            buffers.q[item % 2, :, :],
            barrier=buffers.q_full[item % 2],
            leader_scope_threads=32,
        )
    else:
        for g in T.serial(tiles.kv_heads):
            for b in T.serial(tiles.queries):
                for half in T.unroll(tiles.dim // tiles.copy_columns):
                    T.tma_copy(
                        q[
                            row0 + b,
                            g,
                            0 : tiles.padded,
                            half * tiles.copy_columns : half * tiles.copy_columns + tiles.copy_columns,
                        ],
                        buffers.q[
                            (item % 2) * tiles.kv_heads + g,
                            b * tiles.padded : b * tiles.padded + tiles.padded,
                            half * tiles.copy_columns : half * tiles.copy_columns + tiles.copy_columns,
                        ],
                        barrier=buffers.q_full[item % 2],
                        leader_scope_threads=32,
                    )
