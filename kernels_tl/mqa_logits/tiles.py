"""Tile geometry and feasibility that the ragged and the paged indexer logits share."""

from collections.abc import Callable
from math import gcd
from typing import Any

from gdn.device import H100, DeviceSpec
from gdn.ops.indexer.problem import LogitsProblem, MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.problem import DTYPE_BYTES

WARPGROUP = 128
MAX_COLUMNS = 256  # of one wgmma
# Accumulator columns worth having: the products of these widths are single instructions.
WIDTHS = (256, 224, 192, 160, 128, 112, 96, 80, 64, 48, 32, 16)


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


class RaggedTiles(Tiles):
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: MqaLogitsProblem, config: Any) -> None:
        super().__init__(problem, config.block_queries, config)
        self.packed = problem.packed
        self.ordered = config.ordered and config.math_warpgroups > 1


class PagedTiles(Tiles):
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: PagedMqaLogitsProblem, config: Any) -> None:
        super().__init__(problem, config.drafts, config)
        self.page_size, self.next_n, self.per_draft = problem.page_size, problem.next_n, problem.per_draft_lengths
        self.passes = -(-self.next_n // self.queries)
        self.piece = gcd(self.page_size, self.keys)  # tokens of one copy: never across a page
        self.pieces = self.keys // self.piece
        # Scales of one copy: those of a whole piece where a box side, at most 256 words, holds them.
        self.words = self.piece * self.kv_heads if self.piece * self.kv_heads <= 256 else self.piece
        self.copies = self.piece * self.kv_heads // self.words  # of a piece's scales
        # Words between two copies of scales: a bulk copy's place in shared memory is a multiple of 128 bytes.
        self.pitch = -(-self.words // 32) * 32
        self.tiles_per_load = 32 // self.pieces  # tiles whose pages one warp-wide load of the block table covers
        self.scale_offset = self.page_size * self.kv_heads * self.dim // 4  # float32 words of a page before its scales

    def scale_column(self, token: Any, group: Any) -> Any:
        """Word of a tile's scale: copies of scales are `pitch` words apart."""
        if self.pitch == self.words:
            return token * self.kv_heads + group
        word = token % self.piece * self.kv_heads + group
        return (token // self.piece * self.copies + word // self.words) * self.pitch + word % self.words
