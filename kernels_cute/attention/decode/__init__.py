"""Sparse attention of decode: a few query tokens a sequence, over selected positions of a paged cache; for query token t and the
query heads h of key head g

    s_j = scale * q[t, h] . k[j, g]      lse = log sum_j exp(s_j)      o = sum_j exp(s_j - lse) v[j, g]

over the positions j of its row of indices (-1 = none, anywhere), or over all of them, up to the query's own. With a gate
[tokens, heads, D], o is multiplied by its sigmoid.

    q, out [tokens, heads, D] bf16 | fp16     k_cache, v_cache [blocks, block_size, kv_heads, D], rows at multiples of 16 bytes
    topk_indices [tokens, k] int32 | int64 or None     block_tables [N, max_blocks] int32     lse [tokens, heads] float32

A cluster serves a query token and `kv_heads` of its key heads; its blocks share the positions and merge their parts through
distributed shared memory. The kernel: kernel.py; copies, products and the merge: copy.py, math.py, merge.py; why: DESIGN.md.
"""

from dataclasses import dataclass
from itertools import product

from gdn.device import H100, DeviceSpec
from gdn.ops.attention.problem import SparseDecodeProblem
from kernels_cute.attention.decode.sizes import Sizes
from kernels_cute.common import choice
from kernels_cute.common.choice import HALF_DTYPES, INDEX_DTYPES, unserved

launch, workspace_bytes = choice.launch, choice.no_workspace

ENTRY = "gdn_cute_sparse_attention_decode"
HEAD_DIMS = (128, 256)
MOST_GROUP = 16  # query heads of a key head: two math warps share its tiles
# Blocks of a cluster -> clusters that are on the device at once, with one block an SM: SMs are in groups of 16 to 18 (H100).
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 14, 16: 7}
MOST_STAGES = 16
NEAR = 1.15  # times the least expected time: what the tuner measures
WARPS = (1, 2, 3, 4, 6, 8)  # readers, and copy warps
COPY_WARPS = (2, 3, 4)  # worth measuring: one never was
MIN_POSITIONS = 64  # of a block, where a row of indices is split
ROW_OVERHEAD_BYTES = 64  # short rows take longer than their bytes
START_US = 5.0  # of a block, before the first and after the last byte
MOST_SHARES = 1.5  # times its share of the bandwidth that a block takes at most


@dataclass(frozen=True)
class Config:
    splits: int  # blocks of a cluster: they share the positions of a query token
    kv_heads: int  # key heads of a block
    stages: int  # tiles of 16 positions in shared memory
    readers: int  # math warps of 8 query heads of a key head: they take tiles in turns
    copy_warps: int  # they take tiles in turns
    blocks_per_sm: int  # resident on a multiprocessor at the same time


def refusal(problem: SparseDecodeProblem) -> str | None:
    heads, kv_heads, dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
    if (reason := unserved({HALF_DTYPES: {"q": problem.dtype}, INDEX_DTYPES: {"topk_indices": problem.index_dtype}})) is not None:
        return reason
    checks = [
        (dim in HEAD_DIMS, f"head_dim 128 or 256, got {dim}"),
        (kv_heads >= 1 and heads % max(kv_heads, 1) == 0, f"a number of heads that key heads divide, got {heads} and {kv_heads}"),
        (1 <= heads // max(kv_heads, 1) <= MOST_GROUP, f"1 to {MOST_GROUP} query heads a key head, got {heads} and {kv_heads}"),
        (problem.rows_aligned, "cache rows that start at multiples of 16 bytes"),
    ]
    reason = next((text for holds, text in checks if not holds), None)
    return None if reason is None else f"requires {reason}"


def fits(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> bool:
    if config.splits not in CLUSTERS_AT_ONCE or config.blocks_per_sm not in (1, 2):
        return False
    if config.kv_heads not in (1, 2, 4) or problem.num_kv_heads % config.kv_heads:
        return False
    if config.readers not in WARPS or config.copy_warps not in WARPS or config.stages < 2:
        return False
    # The fills of a stage are all of one copy warp and all read by the same math warps, in turn: nobody waits for a phase of a
    # barrier while the one before it may still be open, whose parity would let it pass.
    if config.stages % config.readers or config.stages % config.copy_warps:
        return False
    sizes = Sizes(problem, config)
    # The hardware keeps 1 KiB of every block, which the limit of a single block leaves out.
    room = (device.shared_bytes_per_block + 1024) // config.blocks_per_sm - 1024
    registers = min(255, device.registers_per_sm // (sizes.threads * config.blocks_per_sm) // 8 * 8)
    return sizes.threads <= 512 and sizes.registers <= registers and sizes.shared_bytes <= room


def _stages(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> Config | None:
    """The configuration with as many stages as fit; None where not even four do."""
    for stages in range(MOST_STAGES, 3, -1):
        deeper = Config(config.splits, config.kv_heads, stages, config.readers, config.copy_warps, config.blocks_per_sm)
        if fits(problem, deeper, device):
            return deeper
    return None


def configs(problem: SparseDecodeProblem, device: DeviceSpec) -> list[Config]:
    """Configurations whose expected time is near the least, with the most stages for each shape of block."""
    space = product(CLUSTERS_AT_ONCE, (1, 2, 4), (0,), (1, 2, 4), COPY_WARPS, (1, 2))
    found = [config for values in space if (config := _stages(problem, Config(*values), device)) is not None]
    expected = [_microseconds(problem, config, device) for config in found]
    return [config for config, us in zip(found, expected, strict=True) if us <= NEAR * min(expected)]


def _positions(problem: SparseDecodeProblem, config: Config) -> int:
    """Positions of a block, at most."""
    return -(-problem.k // config.splits)


def _microseconds(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> float:
    """Return the expected time: rounds of blocks, each of which starts, moves its rows at its share of the bandwidth, and
    merges."""
    clusters = max(problem.num_tokens, 1) * (problem.num_kv_heads // config.kv_heads)
    at_once = CLUSTERS_AT_ONCE[config.splits] * config.blocks_per_sm * device.num_sms // H100.num_sms
    rounds = -(-clusters // at_once)
    running = min(clusters, at_once) * config.splits  # blocks
    row_bytes = Sizes(problem, config).row_bytes + ROW_OVERHEAD_BYTES
    gbps = min(device.copy_gbps / running, MOST_SHARES * device.copy_gbps / device.num_sms)
    moved_us = 2 * row_bytes * _positions(problem, config) / gbps / 1e3
    merge_us = 0.0 if config.splits == 1 else 0.8 + 0.05 * config.splits
    return rounds * (START_US + moved_us + merge_us)


def default_config(problem: SparseDecodeProblem, device: DeviceSpec) -> Config:
    """The least expected time."""
    space = []
    for splits, kv_heads, blocks in product(CLUSTERS_AT_ONCE, (4, 2, 1), (1, 2)):
        if splits > 1 and problem.k < splits * MIN_POSITIONS:
            continue
        readers = max(1, (4 // blocks) // kv_heads)
        found = [_stages(problem, Config(splits, kv_heads, 0, readers, warps, blocks), device) for warps in COPY_WARPS]
        space += [config for config in found if config is not None]
    if not space:
        raise ValueError(f"no configuration of the {problem.op} kernel fits {problem}")
    # Among equals the most rows in flight, whole rows, few blocks.
    return min(
        space,
        key=lambda config: (
            round(_microseconds(problem, config, device), 1), -config.kv_heads, config.splits, -config.stages, -config.copy_warps
        ),
    )  # fmt: skip


def compile(problem: SparseDecodeProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.attention.decode.library import library

    return library(ENTRY, problem, config)
