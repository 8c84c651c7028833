"""Exact, deterministic top-k of rows of logits.

    Row i: the k largest scores in columns [row_starts[i], row_ends[i]), smaller columns first among equal scores, as
    column - row_starts[i], in ascending order or by descending score, then -1. NaN and -inf are never selected; -0.0 equals 0.0.
    With a ratio the result lists the tokens of these columns, then those of the query's unfinished group, then -1.

    logits [rows, n] float32 or bf16        row_starts, row_ends, positions [rows] int32 or int64
    out [rows, k * ratio + ratio - 1] int32

The kernel is in kernel.py, described in DESIGN.md.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import TopkParams, TopkProblem
from kernels_cute.common.choice import no_workspace
from kernels_cute.topk.shape import BINS, MOST_COLUMNS, SPARE_WORDS

workspace_bytes = no_workspace
ENTRY = "gdn_cute_topk"
ANY_ENTRY = "gdn_cute_topk_any"  # for rows that are longer than the configuration's
MOST_RATIO = 1 << 10  # tokens of a column: token numbers are int32
MOST_SORTED = 4096  # entries of the list that are sorted by score: a power of two


@dataclass(frozen=True)
class Config:
    threads: int  # threads per block, which works on one row
    unroll: int  # quads of scores that a thread has in flight
    blocks_per_sm: int  # blocks that fit on an SM: caps the registers of a thread
    list_entries: int  # capacity of the list of scores above the sampled bound (8 bytes each); more scores cost further reads
    max_columns: int  # longest row, a bit of shared memory per column; longer rows run with ANY_SIZE


ANY_SIZE = Config(1024, 4, 1, 8192, MOST_COLUMNS)


def refusal(problem: TopkProblem) -> str | None:
    if problem.dtype not in ("float32", "bfloat16"):
        return f"requires float32 or bfloat16 logits, got {problem.dtype}"
    if problem.num_columns > MOST_COLUMNS:
        return f"requires at most {MOST_COLUMNS} columns, got {problem.num_columns}"
    if problem.ratio > MOST_RATIO:
        return f"requires groups of at most {MOST_RATIO} tokens, got {problem.ratio}"
    if problem.ratio > 1 > min(problem.k, problem.num_columns):
        return f"requires k and columns of at least 1 where columns are groups, got {problem.k} and {problem.num_columns}"
    if problem.sorted_by == "score" and problem.k > MOST_SORTED:
        return f"requires k up to {MOST_SORTED} where sorted by score, got {problem.k}"
    return None


def _shared_bytes(config: Config) -> int:
    return 8 * config.list_entries + 4 * BINS + config.max_columns // 8 + 4 * SPARE_WORDS + 4 * 40 + 64


def fits(problem: TopkProblem, config: Config, device: DeviceSpec) -> bool:
    return (
        config.threads in (256, 512, 1024)
        and config.unroll in (1, 2, 4, 8)
        and config.blocks_per_sm >= 1
        and _registers_suffice(problem, config, device)
        and config.list_entries % 2048 == 0
        # The list also holds the entries that are sorted.
        and config.list_entries >= min(MOST_SORTED, max(2048, config.max_columns))
        and config.max_columns % 32 == 0
        and config.max_columns <= MOST_COLUMNS
        and config.blocks_per_sm * (_shared_bytes(config) + 1024) <= device.shared_bytes_per_block + 1024
    )


def _registers_suffice(problem: TopkProblem, config: Config, device: DeviceSpec) -> bool:
    """64 registers are enough for every variant, 32 if the scores in flight take at most 16; with 40, ptxas spills in some."""
    registers = device.registers_per_sm // (config.threads * config.blocks_per_sm) // 8 * 8
    most_quads = 8 if _are_words_pairs(problem) else 4
    return registers >= 64 or (registers == 32 and config.unroll <= most_quads)


def _are_words_pairs(problem: TopkProblem) -> bool:
    """Whether 8 quads in flight take 16 registers and nothing else does: a word holds two scores, and no tokens are listed."""
    return problem.dtype == "bfloat16" and problem.ratio == 1


def default_config(problem: TopkProblem, device: DeviceSpec) -> Config:
    # About 1.5 k entries pass a sampled bound. Blocks, threads and unrolling are measured (DESIGN.md).
    entries = 4096 if problem.k <= 2048 else 8192
    if problem.num_columns <= 2048:
        return Config(256, 2, 4, 2048, 2048)
    capacity = next((one for one in (8192, 32768, 65536, 131072) if problem.num_columns <= one), None)
    if capacity is None:
        return ANY_SIZE
    if problem.num_rows <= device.num_sms or capacity > 32768:
        return Config(1024, 8, 1, 8192 if entries > 4096 else 6144, capacity)
    if entries > 4096:
        return Config(512, 4, 2, entries, capacity)
    if capacity <= 8192:
        return Config(512, 4, 4, entries, capacity)
    if problem.dtype == "bfloat16":
        return Config(512, 8 if _are_words_pairs(problem) else 4, 4, entries, capacity)
    return Config(512, 8, 2, entries, capacity)


def configs(problem: TopkProblem, device: DeviceSpec) -> list[Config]:
    default = default_config(problem, device)
    lists = sorted({default.list_entries, 6144, 8192})
    space = [Config(*values, default.max_columns) for values in product((256, 512, 1024), (2, 4, 8), (1, 2, 3, 4), lists)]
    return [default] + [config for config in space if config != default and fits(problem, config, device)]


def suits(problem: TopkProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether tiles tuned at other sizes may be chosen here. Not for longer rows, which `ANY_SIZE` would serve, nor for a k with
    little room in the list, which takes counts of whole rows: both are slow. A sample's rank of k/16 + 4 sqrt(k/16) + 4 must be
    within 7/8 of the list's share of it."""
    is_roomy = problem.num_columns <= config.list_entries or 8 * problem.k <= 5 * config.list_entries
    return problem.num_columns <= config.max_columns and is_roomy


def compile(problem: TopkProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.topk.library import libraries

    entries = {ENTRY: config} if config == ANY_SIZE else {ENTRY: config, ANY_ENTRY: ANY_SIZE}
    return libraries(problem, entries)


def launch(compiled: Any, params: TopkParams) -> None:
    num_columns = params.logits.shape[1]
    if num_columns == 0:  # no address to pass
        params.out.fill_(-1)
        return
    config = compiled.config
    entry = ANY_ENTRY if num_columns > config.max_columns and config != ANY_SIZE else ENTRY
    compiled.functions[entry](*params)
