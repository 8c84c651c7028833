"""Paged indexer logits (decode), for draft d of sequence b and token t:

    out[b * next_n + d, t] = scale * sum_g k_scale[t, g] * sum_{h in g} w[b * next_n + d, h] * act(q[b, d, h] . k[t, g])

The contract of the kernel in paged_kernel.py: which problems it serves, its configurations, and its launch.
"""

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import torch

from gdn.device import H100, DeviceSpec
from gdn.problems import PagedMqaLogitsParams, PagedMqaLogitsProblem
from kernels_tl.common import build
from kernels_tl.mqa_logits import shared as _logits
from kernels_tl.mqa_logits.paged_kernel import program, scale_pitch, scale_words

ENTRY = "paged_mqa_logits"
IN_FLIGHT_US = 2.9  # time for which a key tile is on its way
MIN_STAGES = 3  # of keys, where they fit


@dataclass(frozen=True)
class Config:
    drafts: int  # drafts of a sequence in one pass: drafts x padded heads accumulator columns, at most 256
    math_warpgroups: int  # 64 tokens of a tile each
    stages: int  # key tiles in flight
    blocks: int  # persistent blocks: the SMs of the device


def refusal(problem: PagedMqaLogitsProblem) -> str | None:
    if problem.page_size < 4 or problem.page_size % 4:
        return f"requires a page_size that is a multiple of 4, got {problem.page_size}"
    if problem.next_n < 1:
        return f"requires next_n of at least 1, got {problem.next_n}"
    why = _logits.refusal_common(problem)
    if why is None and _default(problem, H100) is None:
        return (
            "requires queries and keys that fit a block's shared memory, got "
            f"{problem.num_heads} heads and {problem.num_kv_heads} key heads of head_dim {problem.head_dim} in {problem.dtype}"
        )
    return why


def shared_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    s = _logits.shape_of(problem)
    columns = config.drafts * s.columns
    tile = config.math_warpgroups * 64
    queries = 2 * s.kv_heads * columns * s.dim * s.value_bytes
    keys = config.stages * tile * s.dim * s.value_bytes
    piece = gcd(problem.page_size, tile)
    words = scale_words(piece, s.kv_heads)
    scales = config.stages * tile * s.kv_heads // words * scale_pitch(words) * 4
    weights = 2 * s.kv_heads * columns * 4
    ranges = 2 * (config.drafts + 8) * 4
    return queries + keys + scales + weights + ranges + 2048  # alignment of the buffers, barriers


def fits(problem: PagedMqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    s = _logits.shape_of(problem)
    columns = config.drafts * s.columns
    if columns > _logits.MAX_COLUMNS or columns % 8:
        return False
    if shared_bytes(problem, config) > device.shared_bytes_per_block:
        return False
    return _logits.accumulator_registers(config.drafts, s) + 32 <= _logits.math_registers(config.math_warpgroups, s)


def _drafts(problem: PagedMqaLogitsProblem) -> list[int]:
    """Drafts of one pass, the fewest passes first. Columns are a multiple of 8. One key head takes the first; the queries of
    several lie in shared memory at once, and may leave room for fewer drafts only."""
    columns = _logits.shape_of(problem).columns
    most = _logits.MAX_COLUMNS // columns
    found: list[int] = []
    for passes in range(-(-problem.next_n // most), problem.next_n + 1):
        drafts = -(-problem.next_n // passes)
        drafts += drafts * columns % 8 != 0
        if drafts not in found:
            found.append(drafts)
    return found


def configs(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    for drafts in _drafts(problem):
        found = [Config(drafts, groups, stages, device.num_sms) for groups in (1, 2, 3) for stages in (12, 8, 6, 4, 3, 2)]
        fitting = [config for config in found if fits(problem, config, device)]
        if fitting:
            return fitting
    return []


def default_config(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config:
    config = _default(problem, device)
    if config is None:
        raise ValueError(f"no configuration fits {problem}")
    return config


def _default(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Tiles of 128 tokens, of 64 where there are few. How many are in flight follows from Little's law: bytes in flight =
    bandwidth x time in flight; more only queue (measured: LAB-NOTES.md)."""
    few = problem.batch * -(-problem.max_context_len // 128) < 4 * device.num_sms
    in_flight = IN_FLIGHT_US * 1e3 * device.copy_gbps / device.num_sms
    s = _logits.shape_of(problem)
    for drafts in _drafts(problem):
        for groups in (1, 2) if few else (2, 1):
            tile_bytes = groups * 64 * (s.dim * s.value_bytes + 4 * s.scaled)
            for stages in range(max(MIN_STAGES, ceil(in_flight / tile_bytes)), 1, -1):
                config = Config(drafts, groups, stages, device.num_sms)
                if fits(problem, config, device):
                    return config
    return None


def workspace_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    return 0


def compile(problem: PagedMqaLogitsProblem, config: Config) -> dict[str, bytes]:
    return {ENTRY: build.library(program(problem, config), pass_configs=_logits.PASS_CONFIGS)}


def launch(compiled: Any, params: PagedMqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, cache, weights, context_lens, block_tables, out, scale, _ = params
    problem = compiled.problem
    shape = _logits.shape_of(problem)
    q = q.view(-1, shape.dim) if _logits.flat(shape) else q.view(-1, shape.kv_heads, shape.group, shape.dim)
    scales = cache.view(torch.float32) if problem.has_k_scale else None
    values = cache.view(q.dtype) if problem.has_k_scale else cache
    row = shape.kv_heads * shape.dim
    values = values.as_strided((values.shape[0], problem.page_size, row), (values.stride(0), row, 1))
    optional = [tensor for tensor in (scales, weights) if tensor is not None]
    compiled.functions[ENTRY](q, values, *optional, context_lens.view(-1), block_tables, out, scale)
