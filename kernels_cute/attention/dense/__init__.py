"""Dense causal attention of many query tokens a sequence on the tensor cores, straight from the paged cache.

    o[t, h] = softmax(scale * q[t, h] k[j, g]) v[j, g] over the positions j up to the query's own, g the key head of h
              with a gate times sigmoid(gate[t, h])

q, gate, out [tokens, heads, D] bfloat16 | float16    caches [num_blocks, block_size, kv_heads, D]

Lengths are read on the device: one launch serves every batch, and a captured graph serves other lengths. Data flow, registers,
shared memory and barriers: DESIGN.md.
"""

from dataclasses import dataclass
from math import ceil

from gdn.device import DeviceSpec
from gdn.ops.attention.problem import AttentionPrefillProblem
from kernels_cute.attention.dense.shape import PAGE_MULTIPLE, ROWS
from kernels_cute.common import choice
from kernels_cute.common.choice import HALF_DTYPES, unserved

ENTRY = "gdn_cute_attention_prefill"
HEAD_DIMS = (128, 256)
SPLITS = (1, 2, 4, 8)
TABLE_BYTES = 1024  # at most, of shared memory, for barriers
# Bounds of the default's clusters, from an H200 (LAB-NOTES.md). All blocks have a multiprocessor at once: clusters lie within
# groups of 16 to 18 of these, so that some stay idle (32 clusters of 4 took two turns on 132; 64 clusters of 2 take one). Every
# block has enough steps to be worth its part of the merge. Two are the fastest or within 8 % of it, but the context may be half
# as long as the host knows.
BUSY_SHARES = {1: 1.0, 2: 1.0, 4: 0.75, 8: 0.75}  # of the multiprocessors, by splits
LEAST_STEPS = 3  # of a block
workspace_bytes, launch = choice.no_workspace, choice.launch


@dataclass(frozen=True)
class Config:
    step: int  # positions whose scores a math warpgroup computes at a time; their keys are a stage, their values another
    key_stages: int  # stages of keys in shared memory, in use or on their way
    value_stages: int  # the same of values
    splits: int  # blocks of a cluster, to which the steps of a tile are dealt


def refusal(problem: AttentionPrefillProblem) -> str | None:
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    if reason := unserved({HALF_DTYPES: {"q": problem.dtype}}):
        return reason
    if problem.head_dim not in HEAD_DIMS:
        return f"requires head_dim 128 or 256, got {problem.head_dim}"
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= ROWS:
        return f"requires 1 to {ROWS} query heads for each key head, got {heads} and {kv_heads}"
    if problem.block_size % PAGE_MULTIPLE:
        return f"requires cache blocks of a multiple of {PAGE_MULTIPLE} positions, got {problem.block_size}"
    if not problem.rows_aligned:
        return "requires cache rows at multiples of 16 bytes"
    return None


def _steps(problem: AttentionPrefillProblem) -> tuple[int, ...]:
    """Positions of a step: as many as the registers of a math thread hold next to its outputs, and at D = 128 fewer too."""
    return (80,) if problem.head_dim == 256 else (128, 96)


def fits(problem: AttentionPrefillProblem, config: Config, device: DeviceSpec) -> bool:
    rows = ROWS + (config.key_stages + config.value_stages) * config.step
    shared = TABLE_BYTES + rows * 2 * problem.head_dim
    is_known = config.step in _steps(problem) and min(config.key_stages, config.value_stages) >= 2 and config.splits in SPLITS
    return is_known and shared <= device.shared_bytes_per_block


def _blocks(problem: AttentionPrefillProblem) -> int:
    """Tiles of all key heads, as if sequences had equal numbers of new tokens."""
    sequences = max(problem.num_sequences, 1)
    queries = ROWS // (problem.num_heads // problem.num_kv_heads)  # of a tile
    return problem.num_kv_heads * sequences * ceil(ceil(problem.num_tokens / sequences) / queries)


def default_config(problem: AttentionPrefillProblem, device: DeviceSpec) -> Config:
    """A cluster a tile where the tiles are few: the largest one of which all blocks run at once, each with enough steps.

    Lengths may be known on the device only. max_context_len bounds them by what the host knows: the longest sequence, a bound
    of the caller, or the width of the block tables.
    """
    blocks, step = _blocks(problem), _steps(problem)[0]
    useful = problem.max_context_len // (LEAST_STEPS * step)  # blocks to which the steps of a tile may be dealt
    splits = max((n for n in SPLITS if blocks * n <= BUSY_SHARES[n] * device.num_sms and n <= useful), default=1)
    return Config(step, 2, 2, splits)


def configs(problem: AttentionPrefillProblem, device: DeviceSpec) -> list[Config]:
    stages = ((2, 2), (3, 2), (3, 3))
    space = [Config(step, *count, splits) for step in _steps(problem) for count in stages for splits in SPLITS]
    return [config for config in space if fits(problem, config, device)]


def compile(problem: AttentionPrefillProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.attention.dense.library import library_of

    return library_of(ENTRY, problem, config)
