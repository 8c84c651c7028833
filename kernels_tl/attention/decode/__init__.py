"""Sparse attention of decode: a few query tokens a sequence, over selected positions of a paged cache; for query token t and the
query heads h of key head g

    s_j = scale * q[t, h] . k[j, g]      lse = log sum_j exp(s_j)      o = sum_j exp(s_j - lse) v[j, g]

over the positions j of its row of indices (-1 = none, anywhere), or over all of them, up to the query's own. With a gate
[tokens, heads, D], o is multiplied by its sigmoid.

    q, out [tokens, heads, D] bf16 | fp16     k_cache, v_cache [blocks, block_size, kv_heads, D], rows at multiples of 16 bytes
    topk_indices [tokens, k] int32 | int64 or None     block_tables [N, max_blocks] int32     lse [tokens, heads] float32

A block serves a query token, one of its key heads and a part of its positions, in tiles of 64 whose rows are gathered by
asynchronous copies through a ring of stages. Where positions are split, a second launch merges the parts in their order. The
kernels: kernel.py, merge.py; why: DESIGN.md.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from gdn.device import DeviceSpec
from gdn.ops.attention.problem import SparseDecodeParams, SparseDecodeProblem
from gdn.problem import DTYPE_BYTES
from kernels_tl.attention.decode.sizes import ROWS, TILE, Spec
from kernels_tl.common.launch import arguments

HEAD_DIMS = (128, 256)
MOST_SPLITS = 64
START_US = 5.0  # of a block, before its first and after its last tile
MERGE_US = 3.0  # of the second launch
MOST_SHARES = 1.5  # of the bandwidth of all SMs that one SM takes
RESERVED_BYTES = 1024  # of a block's shared memory, which the hardware keeps

# All indices are masked by hand, and barriers are where they are needed.
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_data_race_check": True,
}


@dataclass(frozen=True)
class Config:
    splits: int  # blocks that share the positions of a query token and key head; 1 = no second launch
    stages: int  # tiles of 64 positions in shared memory, one of which is computed


def refusal(problem: SparseDecodeProblem) -> str | None:
    heads, kv_heads, dim = problem.num_heads, problem.num_kv_heads, problem.head_dim
    checks = [
        (problem.dtype in ("bfloat16", "float16"), f"q of bfloat16 or float16, got {problem.dtype}"),
        (dim in HEAD_DIMS, f"head_dim 128 or 256, got {dim}"),
        (kv_heads >= 1 and heads % max(kv_heads, 1) == 0, f"a number of heads that key heads divide, got {heads} and {kv_heads}"),
        (1 <= heads // max(kv_heads, 1) <= ROWS, f"1 to {ROWS} query heads a key head, got {heads} and {kv_heads}"),
        (problem.rows_aligned, "cache rows that start at multiples of 16 bytes"),
    ]
    reason = next((text for holds, text in checks if not holds), None)
    return None if reason is None else f"requires {reason}"


def fits(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> bool:
    if not 1 <= config.splits <= MOST_SPLITS or config.stages < 2:
        return False
    return Spec(problem, config).shared_bytes() <= device.shared_bytes_per_block


def _resident(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> int:
    """Blocks on a multiprocessor at the same time."""
    room = device.shared_bytes_per_block + RESERVED_BYTES
    return max(1, min(4, room // (Spec(problem, config).shared_bytes() + RESERVED_BYTES)))


def _splits(problem: SparseDecodeProblem) -> list[int]:
    """Numbers of parts that have a tile each."""
    return [splits for splits in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if splits == 1 or splits * TILE <= problem.k]


def configs(problem: SparseDecodeProblem, device: DeviceSpec) -> list[Config]:
    found = [Config(splits, stages) for splits in _splits(problem) for stages in (2, 3, 4, 6)]
    return [config for config in found if fits(problem, config, device)]


def _microseconds(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> float:
    """Expected time: rounds of blocks, each of which starts and moves its tiles at its share of the bandwidth, and the merge."""
    blocks = max(problem.num_tokens, 1) * problem.num_kv_heads * config.splits
    at_once = device.num_sms * _resident(problem, config, device)
    rounds, running = -(-blocks // at_once), min(blocks, at_once)
    tiles = ceil(ceil(problem.k / TILE) / config.splits)
    tile_bytes = 2 * TILE * problem.head_dim * DTYPE_BYTES[problem.dtype]
    # An SM takes at most MOST_SHARES times its share of the bandwidth, and its blocks share that.
    per_sm = -(-running // device.num_sms)
    gbps = min(device.copy_gbps / running, MOST_SHARES * device.copy_gbps / device.num_sms / per_sm)
    merge_us = 0.0
    if config.splits > 1:
        merge_us = MERGE_US + 2 * workspace_bytes(problem, config) / device.copy_gbps / 1e3
    return rounds * (START_US + tiles * tile_bytes / gbps / 1e3) + merge_us


def default_config(problem: SparseDecodeProblem, device: DeviceSpec) -> Config:
    """The least expected time; among equals few parts."""
    space = [Config(splits, stages) for splits in _splits(problem) for stages in (3, 2)]
    space = [config for config in space if fits(problem, config, device)]
    if not space:
        raise ValueError(f"no configuration of the {problem.op} kernel fits {problem}")
    return min(space, key=lambda config: (round(_microseconds(problem, config, device), 1), config.splits, -config.stages))


def workspace_bytes(problem: SparseDecodeProblem, config: Config) -> int:
    """Float32 sums of values, largest scores and sums of weights of all parts."""
    if config.splits == 1:
        return 0
    return 4 * problem.num_tokens * problem.num_heads * config.splits * (problem.head_dim + 2)


def compile(problem: SparseDecodeProblem, config: Config) -> dict[str, bytes]:
    from kernels_tl.attention.decode.kernel import kernel
    from kernels_tl.attention.decode.merge import merge
    from kernels_tl.common import build

    spec = Spec(problem, config)
    entries = {"sparse_decode": kernel(spec)} | ({"merge_parts": merge(spec)} if config.splits > 1 else {})
    return {name: build.library(function, pass_configs=PASS_CONFIGS) for name, function in entries.items()}


def launch(compiled: Any, params: SparseDecodeParams) -> None:
    p = params
    workspace = None if compiled.config.splits == 1 else p.workspace.view(torch.float32)
    attended = arguments(
        p.q, p.k_cache, p.v_cache, p.topk_indices, p.block_tables, p.query_start_loc, p.seq_lens, p.topk_length,
        p.gate if workspace is None else None, p.out, p.lse, workspace,
    )  # fmt: skip
    compiled.functions["sparse_decode"](*attended, p.scale)
    if workspace is not None:
        compiled.functions["merge_parts"](*arguments(workspace, p.gate, p.out, p.lse))
