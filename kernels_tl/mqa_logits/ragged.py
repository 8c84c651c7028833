"""Ragged indexer logits: out[i, j] = scale * sum_g k_scale[j, g] * sum_{h in g} weights[i, h] * act(q[i, h] . k[j, g]).

    q [M, H, D] fp8 | bf16, k [Nk, KH, D], k_scale [Nk, KH] float32, weights [M, H], ranges [M] int32, out [M, W]

Persistent blocks walk items = (block of queries) x (chunk of key tiles), chunks outermost. A product has the keys of a tile as
rows, 64 per math warpgroup, and `block_queries` x padded heads as columns. Math warpgroups do not wait for each other: while
one sums over heads, the tensor cores work for another.

    role                       waits for                     arrives at
    loader warp                q_empty[2], k_empty[stages]   q_full (32 lanes + TMA bytes), k_full (32 lanes + TMA bytes)
    math warpgroups            q_full, k_full                k_empty (every thread), q_empty (every thread)
    fill warps (3)             nothing                       nothing: they write -inf where no tile is computed
    with `ordered`, math warpgroup w also waits at named barrier 1 + w (256 threads) before a product and arrives at its
    successor's after issuing it

The loader puts row ranges and weights of an item next to its queries, two items deep, so math warps read no index from memory.
"""

from dataclasses import dataclass
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import MqaLogitsParams, MqaLogitsProblem
from kernels_tl.common.launch import arguments
from kernels_tl.mqa_logits import tiles as _logits
from kernels_tl.mqa_logits.tiles import RaggedTiles

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
    return _logits.refusal(problem, _default)


def fits(problem: MqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    tiles = RaggedTiles(problem, config)
    ranges = 2 * (2 * tiles.queries + 8) * 4
    return tiles.fits(tiles.tile_bytes() + ranges, device)


def configs(problem: MqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    padded = _logits.padded_heads(problem)
    found = [
        Config(width // padded, groups, stages, chunk_tiles, device.num_sms, ordered)
        for width in _logits.WIDTHS
        if width % padded == 0
        for groups in (2, 3, 4)
        for stages in (6, 4, 3, 2)
        for chunk_tiles, ordered in ((32, True), (64, True), (32, False))
    ]
    return [config for config in found if fits(problem, config, device)]


def default_config(problem: MqaLogitsProblem, device: DeviceSpec) -> Config:
    return _logits.present(_default(problem, device), problem)


def _default(problem: MqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Widest columns first (fewest shared-memory bytes a product), two math warpgroups, as many stages as fit."""
    padded = _logits.padded_heads(problem)
    widths = [width for width in _logits.WIDTHS if width % padded == 0]
    # Fewer queries than a width holds: the narrowest that takes them all comes first.
    enough = [width for width in widths if width >= problem.num_queries * padded]
    for width in enough[-1:] + [width for width in widths if width not in enough] + enough:
        for stages in (4, 3, 2):
            config = Config(width // padded, 2, stages, 32, device.num_sms, True)
            if fits(problem, config, device):
                return config
    return None


def workspace_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    return 0


def compile(problem: MqaLogitsProblem, config: Config) -> dict[str, bytes]:
    from kernels_tl.mqa_logits.ragged_kernel import library

    return {ENTRY: library(problem, config)}


def chunk_tiles(num_queries: int, num_columns: int, config: Config) -> int:
    """Key tiles of an item: the config's, or fewer, so that every block gets about four items."""
    tiles = -(-num_columns // (64 * config.math_warpgroups))
    query_blocks = -(-num_queries // config.block_queries)
    return max(1, min(config.chunk_tiles, tiles * query_blocks // (4 * config.blocks)))


def launch(compiled: Any, params: MqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, _ = params
    q, k = q.view(_logits.q_shape(compiled.problem, -1)), k.view(k.shape[0], -1)
    tiles = chunk_tiles(*out.shape, compiled.config)
    compiled.functions[ENTRY](*arguments(q, k, k_scale, weights), cu_seqlen_ks, cu_seqlen_ke, out, scale, tiles)
