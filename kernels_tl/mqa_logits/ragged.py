"""Ragged indexer logits: out[i, j] = scale * sum_g k_scale[j, g] * sum_{h in g} weights[i, h] * act(q[i, h] . k[j, g]).

The contract of the kernel in ragged_kernel.py: which problems it serves, its configurations, and its launch.
"""

from dataclasses import dataclass
from typing import Any

from gdn.device import H100, DeviceSpec
from gdn.problems import MqaLogitsParams, MqaLogitsProblem
from kernels_tl.common import build
from kernels_tl.mqa_logits import shared as _logits
from kernels_tl.mqa_logits.ragged_kernel import program

ENTRY = "mqa_logits"


@dataclass(frozen=True)
class Config:
    block_queries: int  # queries of an item: block_queries x padded heads accumulator columns, at most 256
    math_warpgroups: int  # 64 key rows of a tile each
    stages: int  # key tiles in flight
    chunk_tiles: int  # most key tiles of an item; fewer where there is little work
    blocks: int  # persistent blocks: the SMs of the device
    ordered: bool  # math warpgroups take turns at the tensor cores, so that their head sums do not coincide


def refusal(problem: MqaLogitsProblem) -> str | None:
    why = _logits.refusal_common(problem)
    if why is None and _default(problem, H100) is None:
        return (
            "requires queries and keys that fit a block's shared memory, got "
            f"{problem.num_heads} heads and {problem.num_kv_heads} key heads of head_dim {problem.head_dim} in {problem.dtype}"
        )
    return why


def shared_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    s = _logits.shape_of(problem)
    columns = config.block_queries * s.columns
    queries = 2 * s.kv_heads * columns * s.dim * s.value_bytes
    keys = config.stages * config.math_warpgroups * 64 * s.dim * s.value_bytes
    weights = 2 * s.kv_heads * columns * 4
    ranges = 2 * (2 * config.block_queries + 8) * 4
    return queries + keys + weights + ranges + 2048  # alignment of the buffers, barriers


def fits(problem: MqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    s = _logits.shape_of(problem)
    columns = config.block_queries * s.columns
    if columns > _logits.MAX_COLUMNS or columns % 8:
        return False
    if shared_bytes(problem, config) > device.shared_bytes_per_block:
        return False
    # Addresses, masks and loop state take the rest of a math thread's registers.
    return _logits.accumulator_registers(config.block_queries, s) + 32 <= _logits.math_registers(config.math_warpgroups, s)


def configs(problem: MqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    s = _logits.shape_of(problem)
    found = [
        Config(width // s.columns, groups, stages, chunk_tiles, device.num_sms, ordered)
        for width in _logits.WIDTHS
        if width % s.columns == 0
        for groups in (2, 3, 4)
        for stages in (6, 4, 3, 2)
        for chunk_tiles, ordered in ((32, True), (64, True), (32, False))
    ]
    return [config for config in found if fits(problem, config, device)]


def default_config(problem: MqaLogitsProblem, device: DeviceSpec) -> Config:
    config = _default(problem, device)
    if config is None:
        raise ValueError(f"no configuration fits {problem}")
    return config


def _default(problem: MqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Widest columns first (fewest shared-memory bytes a product), two math warpgroups, as many stages as fit."""
    s = _logits.shape_of(problem)
    widths = [width for width in _logits.WIDTHS if width % s.columns == 0]
    # Fewer queries than a width holds: the narrowest that takes them all comes first.
    enough = [width for width in widths if width >= problem.num_queries * s.columns]
    for width in enough[-1:] + [width for width in widths if width not in enough] + enough:
        for stages in (4, 3, 2):
            config = Config(width // s.columns, 2, stages, 32, device.num_sms, True)
            if fits(problem, config, device):
                return config
    return None


def workspace_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    return 0


def compile(problem: MqaLogitsProblem, config: Config) -> dict[str, bytes]:
    return {ENTRY: build.library(program(problem, config), pass_configs=_logits.PASS_CONFIGS)}


def chunk_tiles(num_queries: int, num_columns: int, config: Config) -> int:
    """Key tiles of an item: the config's, or fewer, so that every block gets about four items."""
    tiles = -(-num_columns // (64 * config.math_warpgroups))
    query_blocks = -(-num_queries // config.block_queries)
    return max(1, min(config.chunk_tiles, tiles * query_blocks // (4 * config.blocks)))


def launch(compiled: Any, params: MqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, _ = params
    problem = compiled.problem
    shape = _logits.shape_of(problem)
    q = q.view(-1, shape.dim) if _logits.flat(shape) else q.view(-1, shape.kv_heads, shape.group, shape.dim)
    k = k.view(-1, shape.kv_heads * shape.dim)
    optional = [tensor for tensor in (k_scale, weights) if tensor is not None]
    tiles = chunk_tiles(*out.shape, compiled.config)
    compiled.functions[ENTRY](q, k, *optional, cu_seqlen_ks, cu_seqlen_ke, out, scale, tiles)
