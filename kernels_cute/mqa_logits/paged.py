"""Paged indexer logits (decode) on the tensor cores, FP8 or bf16; for draft d of sequence b and key t:

    out[b * next_n + d, t] = scale * sum_g k_scale[t, g] * sum_{h of g} w[b * next_n + d, h] * relu(q[b, d, h] . k[t, g])

and -inf from the draft's length on; the heads of key head g are H / kv_heads neighbours.

    q [B, next_n, H, D] e4m3 or bf16          cache [pages, page_size * kv_heads * (D + 4)] uint8 (a page's values, then its
    weights [B * next_n, H] float32 or bf16   float32 scales) or [pages, page_size * kv_heads * D] as q, any page stride of 16
    context_lens [B] or [B, next_n] int32     block_tables [B, max_pages] int32     out [B * next_n, W] float32 or bf16

The kernel and its warp roles: kernel.py; its barriers: barriers.py; the deal of work over blocks: paged_schedule.py.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import PagedMqaLogitsParams, PagedMqaLogitsProblem
from kernels_cute.common import choice
from kernels_cute.mqa_logits import host
from kernels_cute.mqa_logits.host import MAX_COLUMNS, row_bytes
from kernels_cute.mqa_logits.orders import KEY_ROWS, QUERIES_PER_GROUP, HeadOrder, kv_heads_per_round
from kernels_cute.mqa_logits.shape import PAGED_QUERY_STAGES, REGISTERS, DraftColumns

ENTRY = "gdn_cute_paged_mqa_logits"
workspace_bytes = choice.no_workspace
SPARE_REGISTERS = 32  # of a math thread, next to accumulators and weights
IN_FLIGHT_US = 2.2  # time for which a key tile is on its way
# How near a tuned entry must be (see gdn.runtime.tuned): twice the sequences or their lengths. What gains 1 % with 64 x 32768
# loses 3 % with 1 x 131072.
TUNED_WITHIN = 1.0


@dataclass(frozen=True)
class Config:
    math_warpgroups: int  # 64 keys of a tile each
    blocks_per_sm: int  # resident on a multiprocessor at the same time
    key_stages: int  # key tiles in flight, per block
    num_sms: int  # of the device


def draft_columns(problem: PagedMqaLogitsProblem) -> DraftColumns:
    """The fewest columns in all, then the fewest shuffles."""
    shapes = []
    for lanes in (1, 2, 4):
        order = HeadOrder(problem.num_heads, problem.num_kv_heads, lanes)
        if lanes > 1 and order.slots > order.group:
            continue
        group_drafts = QUERIES_PER_GROUP // lanes
        groups = -(-problem.next_n // group_drafts)
        passes = -(-groups // max(1, MAX_COLUMNS // (group_drafts * order.columns)))
        groups = -(-groups // passes)
        shapes.append(DraftColumns(lanes, groups, passes, groups * group_drafts * order.columns))
    return min(shapes, key=lambda shape: (shape.passes * shape.columns, shape.lanes_per_query))


def _shared_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    shape = draft_columns(problem)
    tile = KEY_ROWS * config.math_warpgroups
    drafts = shape.groups * QUERIES_PER_GROUP // shape.lanes_per_query
    tables = PAGED_QUERY_STAGES * (16 + 16 + drafts * 4 + drafts * problem.num_heads * 4) + 16 * config.key_stages
    scales = 4 * tile * problem.num_kv_heads * config.key_stages if problem.has_k_scale else 16
    key_rows = tile * _kv_heads_per_round(problem, config)
    # Each table may be padded to 128 bytes, and the tiles start at a multiple of 1024.
    tiles = shape.columns * PAGED_QUERY_STAGES + key_rows * config.key_stages
    return tables + scales + 512 + 1024 + tiles * row_bytes(problem)


def _registers(problem: PagedMqaLogitsProblem, per_round: int) -> tuple[int, int]:
    """Registers of a math thread whose rounds take `per_round` key heads: (sums of the products, everything)."""
    shape, kv_heads = draft_columns(problem), problem.num_kv_heads
    sums = shape.columns * per_round // kv_heads // 2
    totals = 2 * shape.groups if per_round < kv_heads else 0  # live from round to round
    weights = shape.groups * problem.num_heads // shape.lanes_per_query if problem.weights_dtype else 0
    scales = 2 * per_round if kv_heads > 1 and problem.has_k_scale else 0
    return sums, sums + totals + weights + scales + SPARE_REGISTERS


def _kv_heads_per_round(problem: PagedMqaLogitsProblem, config: Config) -> int:
    """Key heads of a round: as many as the registers of a math thread hold, one at least."""
    most = kv_heads_per_round(problem.num_kv_heads, row_bytes(problem), KEY_ROWS * config.math_warpgroups)
    room = REGISTERS[config.math_warpgroups, config.blocks_per_sm].math
    counts = [count for count in range(most, 1, -1) if problem.num_kv_heads % count == 0]
    return next((count for count in counts if _registers(problem, count)[1] <= room), 1)


def fits(problem: PagedMqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    registers = REGISTERS.get((config.math_warpgroups, config.blocks_per_sm))
    if registers is None or config.key_stages < 2 or config.num_sms < 1:
        return False
    sums, held = _registers(problem, _kv_heads_per_round(problem, config))
    # The hardware keeps 1 KiB of every block, which the limit of a single block leaves out.
    room = (device.shared_bytes_per_block + 1024) // config.blocks_per_sm - 1024
    # The assembler measures a wgmma's accumulators against the registers at launch, all else against those of math threads.
    accumulates = sums + SPARE_REGISTERS <= registers.launch
    return accumulates and held <= registers.math and _shared_bytes(problem, config) <= room


def _default(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Two small blocks a multiprocessor: while one starts or ends, the other keeps memory busy. How many key tiles are in
    flight follows from Little's law, bytes in flight = bandwidth x time in flight; more only queue (measured: LAB-NOTES.md)."""
    in_flight = IN_FLIGHT_US * 1e3 * device.copy_gbps / device.num_sms
    for (groups, blocks), registers in REGISTERS.items():
        tile_bytes = groups * KEY_ROWS * (row_bytes(problem) + 4 * problem.has_k_scale)
        for stages in range(max(registers.least_stages, ceil(in_flight / (blocks * tile_bytes))), 1, -1):
            config = Config(groups, blocks, stages, device.num_sms)
            if fits(problem, config, device):
                return config
    return None


refusal, default_config = partial(host.refusal, _default), partial(host.chosen, _default)


def configs(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    space = [Config(*block, stages, device.num_sms) for block, stages in product(REGISTERS, (10, 8, 6, 5, 4, 3, 2))]
    return [config for config in space if fits(problem, config, device)]


def compile(problem: PagedMqaLogitsProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.mqa_logits.paged_library import library

    return library(ENTRY, problem, config, draft_columns(problem), _kv_heads_per_round(problem, config))


def launch(compiled: Any, params: PagedMqaLogitsParams) -> None:
    # Python's integers: the keys that a wide block table addresses may exceed 32 bits.
    most_keys = min(params.out.shape[1], params.block_tables.shape[1] * compiled.problem.page_size)
    compiled.functions[ENTRY](*params, most_keys)
