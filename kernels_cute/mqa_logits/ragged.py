"""Ragged indexer logits on the tensor cores, FP8 or bf16.

    score(i, j) = scale * sum_g k_scale[j, g] * sum_{h of g} w[i, h] * relu(q[i, h] . k[j, g])  for ks[i] <= j < ke[i], else -inf

    q [M, H, D] e4m3 or bf16    k [Nk, kv_heads, D] as q    k_scale [Nk, kv_heads] float32    weights [M, H] float32 or bf16
    cu_seqlen_ks, cu_seqlen_ke [M] int32                    out [M, W] float32 or bf16        h of g: H / kv_heads heads each

The kernel and its warp roles: kernel.py; its barriers: barriers.py; the order of heads and queries: layouts.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import MqaLogitsProblem
from kernels_cute.common import choice
from kernels_cute.mqa_logits import host
from kernels_cute.mqa_logits.host import MAX_COLUMNS, MAX_HEADS, row_bytes
from kernels_cute.mqa_logits.orders import KEY_ROWS, HeadOrder, kv_heads_per_round
from kernels_cute.mqa_logits.shape import PARTS, score_words

ENTRY = "gdn_cute_mqa_logits"
launch, workspace_bytes = choice.launch, choice.no_workspace
# How near a tuned entry must be (see gdn.runtime.tuned): twice the queries, or 1.4 times the keys and columns. What gains 5 % at
# 8192 x 8192 with 64 heads loses 6 % at 2048 x 8192.
TUNED_WITHIN = 1.0
ACCUMULATOR_SETS = (1, 2)
ROUND_ROBIN, BALANCED_END, BALANCED_ALL = BALANCED_FRACTIONS = (0, 1, 8)  # in eighths of the work
STORE_WIDTHS = (8, 32)
STAGES = ((2, 8), (2, 6), (2, 4), (1, 6), (1, 5), (1, 4), (1, 3), (1, 2))  # of queries and keys: the first that fit


@dataclass(frozen=True)
class Config:
    columns: int  # queries x heads (odd numbers of a key head's rounded up) of one math warpgroup; a block holds two such
    query_stages: int  # query tiles in shared memory; 2 load the next item's queries during this one
    key_stages: int  # key tiles of 64 rows in flight
    # Sets of accumulators of a math warpgroup, each for its part of the columns; 2: sums overlap with products.
    accumulator_sets: int
    steps_in_flight_at_turn: int  # one set: tensor steps still running when a warpgroup passes the turn, 0 or 1; two sets: 0
    pass_turn_at_issue: bool  # two sets: the turn is passed once both products are queued, not once the first is done
    relu_as_add_abs: bool  # relu as x + |x| (FP8 only): an addition has twice the rate of a maximum
    balanced_fraction: int  # eighths of the work dealt in runs of equal cost: ROUND_ROBIN, BALANCED_END or BALANCED_ALL
    # Neighbouring scores of a row that one store instruction writes: 8 (accumulator order) or 32 (through shared memory).
    store_width: int
    tiles_per_item: int  # most key tiles of one work item; smaller deals more evenly, larger reloads queries less
    num_blocks: int  # persistent blocks: the device's SMs


def _order(problem: MqaLogitsProblem) -> HeadOrder:
    return HeadOrder(problem.num_heads, problem.num_kv_heads)


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
    queries = _queries(problem, config.columns)
    key_rows = KEY_ROWS * kv_heads_per_round(problem.num_kv_heads, row_bytes(problem), KEY_ROWS)
    tables = config.query_stages * (16 + 16 + queries * (8 + 4 * problem.num_heads)) + 16 * config.key_stages
    tables += 4 * (config.num_blocks + PARTS) * (config.balanced_fraction > 0) + 4 * score_words(config.store_width, queries) + 32
    tiles = (2 * config.columns * config.query_stages + key_rows * config.key_stages) * row_bytes(problem)
    return -(-tables // 1024) * 1024 + 1024 + tiles


def fits(problem: MqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    two = config.accumulator_sets == 2
    return (
        config.columns in _columns(problem)
        and config.accumulator_sets in ACCUMULATOR_SETS
        and (not two or _two_sets(problem, config.columns))
        and config.steps_in_flight_at_turn in ((0,) if two else (0, 1))
        and (two or not config.pass_turn_at_issue)
        and (not config.relu_as_add_abs or (problem.relu and problem.dtype == "float8_e4m3fn"))
        and config.balanced_fraction in BALANCED_FRACTIONS
        and config.store_width in STORE_WIDTHS
        and min(config.query_stages, config.key_stages - 1, config.tiles_per_item, config.num_blocks) >= 1
        and _shared_bytes(problem, config) <= device.shared_bytes_per_block
    )


def _default(problem: MqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Measured: LAB-NOTES.md."""
    fp8 = problem.dtype == "float8_e4m3fn"
    # The widest tile reads each key least often, of those that make a block's products worth their key tile; a narrower one
    # serves when it already holds every query, and where the write of the scores is the limit.
    widths = _columns(problem)
    widths = [width for width in widths if width >= 64 or width == widths[-1]]
    if _few(problem):
        widths = [width for width in widths if width <= 128] or widths
    columns = next((width for width in widths if _queries(problem, width) >= problem.num_queries), widths[-1])
    # Below 16 heads in FP8 the write hides the sums, and two sets read the keys from shared memory twice.
    two = problem.num_heads >= (16 if fp8 else 8) and columns >= 128 and _two_sets(problem, columns)
    in_flight = not (fp8 and 8 <= problem.num_heads // problem.num_kv_heads < 16)
    for query_stages, key_stages in STAGES:
        balanced_fraction, tiles = _deal(problem, query_stages, device)
        config = Config(
            columns,
            query_stages,
            key_stages,
            accumulator_sets=2 if two else 1,
            steps_in_flight_at_turn=int(in_flight and not two),
            pass_turn_at_issue=two and (problem.num_heads <= 48 or not fp8),
            relu_as_add_abs=fp8 and problem.relu,
            balanced_fraction=balanced_fraction,
            store_width=32 if _few(problem) else 8,
            tiles_per_item=tiles,
            num_blocks=device.num_sms,
        )
        if fits(problem, config, device):
            return config
    return None


refusal, default_config = partial(host.refusal, _default), partial(host.chosen, _default)


def _few(problem: MqaLogitsProblem) -> bool:
    """True if the write of the scores is the limit, and there are heads enough to hide wider stores."""
    return problem.dtype == "float8_e4m3fn" and problem.head_dim == 128 and 4 <= problem.num_heads < 8


def _deal(problem: MqaLogitsProblem, query_stages: int, device: DeviceSpec) -> tuple[int, int]:
    """(balanced_fraction, tiles_per_item). All in runs as long as their keys stay in the L2 cache: queries are then loaded
    least often."""
    if query_stages == 2:  # without a second stage every item waits for its queries
        if 40 < problem.num_heads < MAX_HEADS:
            return BALANCED_END, 64
        if problem.num_heads <= 4 and problem.clean:
            return ROUND_ROBIN, 32
    return BALANCED_ALL, _cached_tiles(problem, device)


def _cached_tiles(problem: MqaLogitsProblem, device: DeviceSpec) -> int:
    """Key tiles that stay in the L2 cache while blocks anywhere among them read them again and again: a third of it."""
    return max(1, device.l2_bytes // 3 // (KEY_ROWS * row_bytes(problem) * problem.num_kv_heads))


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


def compile(problem: MqaLogitsProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.mqa_logits.ragged_library import library

    return library(ENTRY, problem, config)
