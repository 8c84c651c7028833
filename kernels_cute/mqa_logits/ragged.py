"""Ragged indexer logits on the tensor cores, FP8 or bf16.

    score(i, j) = scale * sum_g k_scale[j, g] * sum_{h of g} w[i, h] * relu(q[i, h] . k[j, g])  for ks[i] <= j < ke[i], else -inf

    q [M, H, D] e4m3 or bf16    k [Nk, kv_heads, D] as q    k_scale [Nk, kv_heads] float32    weights [M, H] float32 or bf16
    cu_seqlen_ks, cu_seqlen_ke [M] int32                    out [M, W] float32 or bf16        h of g: H / kv_heads heads each

The kernel and its warp roles: ragged_kernel.py; its barriers: ragged_tiles.py; the order of heads and queries: layouts.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from gdn.device import H100, DeviceSpec
from gdn.problems import DTYPE_BYTES, MqaLogitsParams, MqaLogitsProblem
from kernels_cute.common.build import library
from kernels_cute.mqa_logits.constants import KEY_ROWS
from kernels_cute.mqa_logits.layouts import HeadOrder, kv_heads_per_round
from kernels_cute.mqa_logits.ragged_kernel import RaggedLogits
from kernels_cute.mqa_logits.ragged_tiles import PARTS, RaggedTiles, score_words

ENTRY = "gdn_cute_mqa_logits"
MAX_HEADS = 64  # four queries of them are one instruction's 256 columns, of one key head
HEAD_DIMS = (64, 128)
MAX_COLUMNS = 256
# How near a tuned entry must be (see gdn.runtime.tuned): twice the queries, or 1.4 times the keys and columns. What gains 5 % at
# 8192 x 8192 with 64 heads loses 6 % at 2048 x 8192.
TUNED_WITHIN = 1.0
ACCUMULATOR_SETS = (1, 2)
ROUND_ROBIN, BALANCED_END, BALANCED_ALL = BALANCED_FRACTIONS = (0, 1, 8)  # in eighths of the work
STORE_WIDTHS = (8, 32)
STAGES = ((2, 8), (2, 6), (2, 4), (1, 6), (1, 5), (1, 4), (1, 3), (1, 2))  # of queries and keys: the first that fit
DTYPES: dict[str, Any] = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
}


@dataclass(frozen=True)
class Config:
    columns: int  # queries x heads (odd numbers of a key head's rounded up) of one math warpgroup; a block holds two such
    query_stages: int  # query tiles in shared memory; 2 load the next item's queries during this one
    key_stages: int  # key tiles of 64 rows in flight
    accumulator_sets: (
        int  # sets of accumulators of a math warpgroup, each for its part of the columns; 2: sums overlap with products
    )
    steps_in_flight_at_turn: int  # one set: tensor steps still running when a warpgroup passes the turn, 0 or 1; two sets: 0
    pass_turn_at_issue: bool  # two sets: the turn is passed once both products are queued, not once the first is done
    relu_as_add_abs: bool  # relu as x + |x| (FP8 only): an addition has twice the rate of a maximum
    balanced_fraction: int  # eighths of the work dealt in runs of equal cost: ROUND_ROBIN, BALANCED_END or BALANCED_ALL
    store_width: (
        int  # neighbouring scores of a row that one store instruction writes: 8 (accumulator order) or 32 (shared memory)
    )
    tiles_per_item: int  # most key tiles of one work item; smaller deals more evenly, larger reloads queries less
    num_blocks: int  # persistent blocks: the device's SMs


def refusal(problem: MqaLogitsProblem) -> str | None:
    if not 1 <= problem.num_heads <= MAX_HEADS:
        return f"requires 1 to {MAX_HEADS} indexer heads, got {problem.num_heads}"
    if problem.num_kv_heads < 1 or problem.num_heads % problem.num_kv_heads:
        return f"requires a number of heads that key heads divide, got {problem.num_heads} and {problem.num_kv_heads}"
    if problem.head_dim not in HEAD_DIMS:
        return f"requires head_dim 64 or 128, got {problem.head_dim}"
    if problem.dtype not in ("float8_e4m3fn", "bfloat16"):
        return f"requires float8_e4m3fn or bfloat16 queries and keys, got {problem.dtype}"
    if problem.weights_dtype not in (None, "float32", "bfloat16"):
        return f"requires float32 or bfloat16 weights, or none, got {problem.weights_dtype}"
    if problem.out_dtype not in ("float32", "bfloat16"):
        return f"requires float32 or bfloat16 output, got {problem.out_dtype}"
    if _default(problem, H100) is None:
        return (
            "requires queries and keys that fit a block's shared memory, got "
            f"{problem.num_heads} heads and {problem.num_kv_heads} key heads of {_row_bytes(problem)} bytes"
        )
    return None


def _order(problem: MqaLogitsProblem) -> HeadOrder:
    return HeadOrder(problem.num_heads, problem.num_kv_heads)


def _row_bytes(problem: MqaLogitsProblem) -> int:
    return problem.head_dim * DTYPE_BYTES[problem.dtype]


def _queries(problem: MqaLogitsProblem, columns: int) -> int:
    """Queries of a block: two warpgroups of `columns` columns each."""
    return 2 * columns // _order(problem).columns


def _two_sets(problem: MqaLogitsProblem, columns: int) -> bool:
    """True if the columns can be cut in two: one key head, whole pairs of heads, and halves that wgmma takes."""
    return problem.num_kv_heads == 1 and problem.num_heads % 2 == 0 and columns % 16 == 0


def _columns(problem: MqaLogitsProblem) -> list[int]:
    """Widths that hold whole groups of four queries: one group, two, four, ... and as many as one instruction takes."""
    group = 4 * _order(problem).columns
    most = max(1, MAX_COLUMNS // group)  # four queries of more columns than one instruction's take several turns
    return [group * 2**power for power in range(most.bit_length()) if 2**power < most] + [group * most]


def _shared_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    row_bytes, queries = _row_bytes(problem), _queries(problem, config.columns)
    key_rows = KEY_ROWS * kv_heads_per_round(problem.num_kv_heads, row_bytes, KEY_ROWS)
    tables = config.query_stages * (16 + 16 + queries * (8 + 4 * problem.num_heads)) + 16 * config.key_stages
    tables += 4 * (config.num_blocks + PARTS) * (config.balanced_fraction > 0) + 4 * score_words(config.store_width, queries) + 32
    tiles = (2 * config.columns * config.query_stages + key_rows * config.key_stages) * row_bytes
    return -(-tables // 1024) * 1024 + 1024 + tiles


def fits(problem: MqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    return (
        config.columns in _columns(problem)
        and config.accumulator_sets in ACCUMULATOR_SETS
        and (config.accumulator_sets == 1 or _two_sets(problem, config.columns))
        and config.steps_in_flight_at_turn in ((0, 1) if config.accumulator_sets == 1 else (0,))
        and (not config.pass_turn_at_issue or config.accumulator_sets == 2)
        and (not config.relu_as_add_abs or (problem.relu and problem.dtype == "float8_e4m3fn"))
        and config.balanced_fraction in BALANCED_FRACTIONS
        and config.store_width in STORE_WIDTHS
        and config.query_stages >= 1
        and config.key_stages >= 2
        and config.tiles_per_item >= 1
        and config.num_blocks >= 1
        and _shared_bytes(problem, config) <= device.shared_bytes_per_block
    )


def default_config(problem: MqaLogitsProblem, device: DeviceSpec) -> Config:
    config = _default(problem, device)
    if config is None:
        raise ValueError(f"no configuration of the ragged logits kernel fits {problem}")
    return config


def _default(problem: MqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Measured: LAB-NOTES.md."""
    fp8 = problem.dtype == "float8_e4m3fn"
    # The widest tile reads each key least often; a narrower one serves when it already holds every query, and where the write
    # of the scores is the limit.
    widths = _widths(problem)
    if _few(problem):
        widths = [width for width in widths if width <= 128] or widths
    columns = _enough_columns(problem, widths)
    # Below 16 heads in FP8 the write hides the sums, and two sets read the keys from shared memory twice.
    two = problem.num_heads >= (16 if fp8 else 8) and columns >= 128 and _two_sets(problem, columns)
    for query_stages, key_stages in STAGES:
        balanced_fraction, tiles = _deal(problem, query_stages, device)
        config = Config(
            columns=columns,
            query_stages=query_stages,
            key_stages=key_stages,
            accumulator_sets=2 if two else 1,
            steps_in_flight_at_turn=0 if two else _steps_in_flight_at_turn(problem),
            pass_turn_at_issue=two and _pass_turn_at_issue(problem),
            relu_as_add_abs=fp8 and problem.relu,
            balanced_fraction=balanced_fraction,
            store_width=32 if _few(problem) else 8,
            tiles_per_item=tiles,
            num_blocks=device.num_sms,
        )
        if fits(problem, config, device):
            return config
    return None


def _few(problem: MqaLogitsProblem) -> bool:
    """True if the write of the scores is the limit, and there are heads enough to hide wider stores."""
    return problem.dtype == "float8_e4m3fn" and problem.head_dim == 128 and 4 <= problem.num_heads < 8


def _steps_in_flight_at_turn(problem: MqaLogitsProblem) -> int:
    """Default with one set of accumulators."""
    few = 8 <= problem.num_heads // problem.num_kv_heads < 16
    return 0 if few and problem.dtype == "float8_e4m3fn" else 1


def _pass_turn_at_issue(problem: MqaLogitsProblem) -> bool:
    """Default with two sets of accumulators."""
    return problem.num_heads <= 48 or problem.dtype != "float8_e4m3fn"


def _deal(problem: MqaLogitsProblem, query_stages: int, device: DeviceSpec) -> tuple[int, int]:
    """(balanced_fraction, tiles_per_item). All in runs as long as their keys stay in the L2 cache: queries are then loaded
    least often."""
    if query_stages == 2:  # without a second stage every item waits for its queries
        if 40 < problem.num_heads < MAX_HEADS:
            return BALANCED_END, 64
        if problem.num_heads <= 4 and problem.clean:
            return ROUND_ROBIN, 32
    return BALANCED_ALL, _cached_tiles(problem, device)


def _widths(problem: MqaLogitsProblem) -> list[int]:
    """Widths that make a block's products worth their key tile."""
    widths = _columns(problem)
    return [width for width in widths if width >= 64 or width == widths[-1]]


def _enough_columns(problem: MqaLogitsProblem, widths: list[int]) -> int:
    """The narrowest width that holds every query at once, else the widest."""
    return next((width for width in widths if _queries(problem, width) >= problem.num_queries), widths[-1])


def _cached_tiles(problem: MqaLogitsProblem, device: DeviceSpec) -> int:
    """Key tiles that stay in the L2 cache while blocks anywhere among them read them again and again: a third of it."""
    return max(1, device.l2_bytes // 3 // (KEY_ROWS * _row_bytes(problem) * problem.num_kv_heads))


def configs(problem: MqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    return [config for config in dict.fromkeys(_space(problem, device)) if fits(problem, config, device)]


def _space(problem: MqaLogitsProblem, device: DeviceSpec) -> Iterator[Config]:
    default = _default(problem, device)
    if default is None:
        return
    depths = (8, 5, 4) if problem.num_kv_heads == 1 else (8, 5, 4, 3, 2)  # of several key heads each
    depths = tuple(sorted({default.key_stages, *depths}, reverse=True))
    store_widths = (8,) if problem.num_heads > 8 else STORE_WIDTHS
    # What a block holds, in all combinations; then one thing at a time.
    for columns, query_stages, key_stages in product(_columns(problem)[-2:], (2, 1), depths):
        yield replace(default, columns=columns, query_stages=query_stages, key_stages=key_stages)
    for steps in (0, 1):
        yield replace(default, accumulator_sets=1, steps_in_flight_at_turn=steps, pass_turn_at_issue=False)
    for at_issue in (False, True):
        yield replace(default, accumulator_sets=2, steps_in_flight_at_turn=0, pass_turn_at_issue=at_issue)
    runs = ((BALANCED_ALL, 128), (BALANCED_ALL, _cached_tiles(problem, device)))
    for fraction, tiles in ((ROUND_ROBIN, 32), (BALANCED_END, 32), (BALANCED_END, 64), *runs):
        yield replace(default, balanced_fraction=fraction, tiles_per_item=tiles)
    for width in store_widths:
        yield replace(default, store_width=width)
    yield replace(default, relu_as_add_abs=not default.relu_as_add_abs)


def workspace_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    return 0


def compile(problem: MqaLogitsProblem, config: Config) -> dict[str, bytes]:
    kernel = RaggedLogits(RaggedTiles(problem, config))
    return {ENTRY: library(ENTRY, kernel, *_arguments(problem))}


def _arguments(problem: MqaLogitsProblem) -> MqaLogitsParams:
    """Fake tensors and numbers of a launch."""
    dtype = DTYPES[problem.dtype]
    kv_heads = problem.num_kv_heads
    k_scale = None
    if problem.has_k_scale:
        k_scale = make_fake_tensor(cutlass.Float32, (cute.sym_int(), kv_heads), stride=(cute.sym_int64(), cute.sym_int64()))
    return MqaLogitsParams(
        q=_rows(dtype, problem.num_heads, problem.head_dim),
        k=_rows(dtype, kv_heads, problem.head_dim),
        k_scale=k_scale,
        weights=_matrix(DTYPES[problem.weights_dtype], problem.num_heads) if problem.weights_dtype else None,
        cu_seqlen_ks=_vector(),
        cu_seqlen_ke=_vector(),
        out=_matrix(DTYPES[problem.out_dtype], cute.sym_int()),
        scale=cutlass.Float32(1.0),
        skip_rows_up_to=cutlass.Int32(0),
    )


def _rows(dtype: Any, heads: int, dim: int) -> Any:
    # Contiguous by contract: the strides are not read, and left open because those of extent-1 modes may be anything.
    return make_fake_tensor(dtype, (cute.sym_int(), heads, dim), stride=(cute.sym_int64(), cute.sym_int64(), 1), assumed_align=16)


def _matrix(dtype: Any, columns: Any) -> Any:
    return make_fake_tensor(dtype, (cute.sym_int(), columns), stride=(cute.sym_int64(), 1))


def _vector() -> Any:
    return make_fake_tensor(cutlass.Int32, (cute.sym_int(),), stride=(cute.sym_int64(),))


def launch(compiled: Any, params: MqaLogitsParams) -> None:
    compiled.functions[ENTRY](*params)
