"""Paged indexer logits (decode), for draft d of sequence b and token t:

    out[b * next_n + d, t] = scale * sum_g k_scale[t, g] * sum_{h in g} w[b * next_n + d, h] * act(q[b, d, h] . k[t, g])

    q [B, next_n, H, D] fp8 | bf16, cache [pages, page_size * KH * (D + 4)] uint8 (values, then float32 scales) or
    [pages, page_size * KH * D], weights [B * next_n, H], context_lens [B] or [B, next_n] int32,
    block_tables [B, max_pages] int32, out [B * next_n, W]

Key tiles of all sequences form one line; block i of the persistent grid takes the i-th equal part of it, found from the lengths
on the device by a scan over sequences. A tile has keys as rows (64 per math warpgroup) and drafts x padded heads as columns, and
is gathered from pages in pieces of gcd(page_size, tile) tokens. A sequence with more drafts than fit takes several passes.

    role                   waits for                     arrives at
    loader warp            q_empty[2], k_empty[stages]   q_full (32 lanes + TMA bytes), k_full (32 lanes + TMA bytes)
    math warpgroups        q_full, k_full                k_empty (every thread), q_empty (every thread)
    fill warps (3)         nothing                       nothing: they write -inf from each row's length on

The loader posts each item (a run of tiles of one sequence) next to its queries; an item of no tiles ends the math warpgroups.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import PagedMqaLogitsParams, PagedMqaLogitsProblem
from kernels_tl.common.launch import arguments, as_line
from kernels_tl.mqa_logits import tiles as _logits
from kernels_tl.mqa_logits.tiles import PagedTiles

ENTRY = "paged_mqa_logits"
LINE_ENTRY = "paged_mqa_logits_by_line"  # of a kernel that takes the scales as one line: TileLang 0.1.12
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
    return _logits.refusal(problem, _default)


def fits(problem: PagedMqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    tiles = PagedTiles(problem, config)
    scales = tiles.stages * tiles.pieces * tiles.copies * tiles.pitch * 4
    lengths = 2 * (tiles.queries + 8) * 4
    return tiles.fits(tiles.tile_bytes() + scales + lengths, device)


def _drafts(problem: PagedMqaLogitsProblem) -> list[int]:
    """Drafts of one pass, the fewest passes first. Columns are a multiple of 8. One key head takes the first; the queries of
    several lie in shared memory at once, and may leave room for fewer drafts only."""
    padded = _logits.padded_heads(problem)
    most = _logits.MAX_COLUMNS // padded
    found = [-(-problem.next_n // passes) for passes in range(-(-problem.next_n // most), problem.next_n + 1)]
    return list(dict.fromkeys(drafts + (drafts * padded % 8 != 0) for drafts in found))


def configs(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    for drafts in _drafts(problem):
        found = [Config(drafts, groups, stages, device.num_sms) for groups in (1, 2, 3) for stages in (12, 8, 6, 4, 3, 2)]
        fitting = [config for config in found if fits(problem, config, device)]
        if fitting:
            return fitting
    return []


def default_config(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config:
    return _logits.present(_default(problem, device), problem)


def _default(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Tiles of 128 tokens, of 64 where there are few. How many are in flight follows from Little's law: bytes in flight =
    bandwidth x time in flight; more only queue (measured: LAB-NOTES.md)."""
    few = problem.batch * -(-problem.max_context_len // 128) < 4 * device.num_sms
    in_flight = IN_FLIGHT_US * 1e3 * device.copy_gbps / device.num_sms
    for drafts in _drafts(problem):
        for groups in (1, 2) if few else (2, 1):
            tiles = PagedTiles(problem, Config(drafts, groups, MIN_STAGES, device.num_sms))
            tile_bytes = tiles.keys * (tiles.dim * tiles.value_bytes + 4 * tiles.scaled)
            for stages in range(max(MIN_STAGES, ceil(in_flight / tile_bytes)), 1, -1):
                config = Config(drafts, groups, stages, device.num_sms)
                if fits(problem, config, device):
                    return config
    return None


def workspace_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    return 0


def compile(problem: PagedMqaLogitsProblem, config: Config) -> dict[str, bytes]:
    from kernels_tl.mqa_logits.paged_kernel import library

    return library(problem, config, ENTRY, LINE_ENTRY)


def launch(compiled: Any, params: PagedMqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, cache, weights, context_lens, block_tables, out, scale, _ = params
    problem = compiled.problem
    q = q.view(_logits.q_shape(problem, -1))
    ((entry, function),) = compiled.functions.items()
    scales = cache.view(torch.float32) if problem.has_k_scale else None
    if scales is not None and entry == LINE_ENTRY:
        scales = as_line(scales)
    values = cache.view(q.dtype) if problem.has_k_scale else cache
    row = problem.num_kv_heads * problem.head_dim
    values = values.as_strided((values.shape[0], problem.page_size, row), (values.stride(0), row, 1))
    optional = arguments(scales, weights)
    function(q, values, *optional, context_lens.view(-1), block_tables, out, scale)
