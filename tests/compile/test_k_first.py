"""K-first states: which warps share columns, that every element and every sum gets where it belongs, and the choice of tiles."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn.device import H100
from gdn.ops.delta_rule import tiles as recurrent_tiles
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Config, Tiles
from gdn.ops.layer_step.problem import GdnDecodeProblem
from kernels_cute import gdn_decode
from kernels_cute.common.state_sums import part_floats, parts_floats
from kernels_cute.common.state_tile import StateTile
from tests.compile import checks
from tests.compile.test_decode_config import DRAFTS as DECODE_DRAFTS
from tests.compile.test_decode_config import MAIN as DECODE
from tests.compile.test_recurrent_prefetch import MAIN

SINGLE = replace(MAIN, state_v_first=False)
DRAFTS = replace(SINGLE, write_every_token=True, has_accepted=True)
BF16: dict[str, Any] = {"state_dtype": "bfloat16"}
QUARTER: dict[str, Any] = {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8}


def _dealt(x: np.ndarray, tile: StateTile, block: int, threads: np.ndarray) -> np.ndarray:
    """[threads, values]: which elements of x (a state as it lies in memory) the threads of a block load; -1 for none."""
    lane, group = tile.lane_and_group(threads)
    v_start = (block * tile.groups + group) * tile.v_per_thread
    first = lane * tile.vector * tile.head_v_dim + v_start
    found = np.full((len(threads), tile.v_per_thread * tile.k_per_thread), -1)
    for r, c in tile.accesses(tile.width):
        step, start, chunk = tile.place_of_access(r, c, tile.width)
        live = ((chunk * tile.threads_per_column + lane) * tile.vector < tile.head_k_dim) & (v_start < tile.head_v_dim)
        for e in range(tile.width):
            found[:, start + e] = np.where(live, first + step + e, -1)
    return found


def _exchanged(tile: StateTile, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`state_sums.exchange_sums`, word by word.

    parts [threads, 2 * columns + 1] -> S k of all columns, S q of the thread's own column, the token's sum."""
    rows, width, groups = tile.v_per_thread, min(tile.v_per_thread, 4), tile.groups_per_warp
    size, step, at_token = part_floats(tile), width * groups, 2 * rows * groups
    memory = np.full(parts_floats(tile, 1), np.nan)
    for thread in range(tile.threads):
        warp, of_group = thread // 32, thread % groups * width
        target = (warp // tile.k_warps * tile.k_warps + warp % tile.k_warps) * size
        if thread % 32 // groups == 0:
            for kind in range(2):
                for c in range(rows // width):
                    at = target + of_group + (kind * (rows // width) + c) * step
                    assert np.isnan(memory[at : at + width]).all(), "written twice"
                    memory[at : at + width] = parts[thread, 2 * c * width + kind : 2 * (c + 1) * width : 2]
        if thread % 32 == 0:
            memory[target + at_token : target + at_token + 4] = [parts[thread, 2 * rows], 0, 0, 0]
    assert not np.isnan(memory).any(), "never written"
    k_sums, q_sums, token_sums = np.zeros((tile.threads, rows)), np.zeros(tile.threads), np.zeros(tile.threads)
    for thread in range(tile.threads):
        lane, _ = tile.lane_and_group(thread)
        own, of_group = min(lane, rows - 1), thread % groups * width
        at_own = rows * groups + own // width * step + of_group + own % width
        for k_warp in range(tile.k_warps):
            part = (thread // 32 // tile.k_warps * tile.k_warps + k_warp) * size
            for c in range(rows // width):
                k_sums[thread, c * width : (c + 1) * width] += memory[part + of_group + c * step :][:width]
            q_sums[thread] += memory[part + at_own]
            token_sums[thread] += memory[part + at_token]
    return k_sums, q_sums, token_sums


TILES = [
    (128, 128, "float32", (128, 8, 4)), (128, 128, "float32", (256, 8, 4)), (128, 128, "float32", (64, 8, 4)),
    (128, 128, "float32", (32, 8, 4)), (128, 128, "bfloat16", (128, 8, 4)), (128, 128, "bfloat16", (256, 16, 8)),
    (128, 128, "bfloat16", (128, 16, 8)), (128, 128, "float32", (64, 8, 2)), (128, 128, "bfloat16", (256, 16, 1)),
    (64, 64, "float32", (64, 4, 4)), (64, 64, "bfloat16", (64, 8, 8)), (256, 256, "float32", (256, 16, 4)),
    (256, 256, "bfloat16", (256, 32, 8)), (96, 160, "float32", (128, 8, 4)), (32, 40, "bfloat16", (64, 4, 4)),
    (20, 12, "float32", (32, 4, 4)), (36, 100, "bfloat16", (128, 8, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("k", "v", "dtype", "shape"), TILES, ids=str)
def test_every_element_and_every_sum(k: int, v: int, dtype: str, shape: tuple[int, int, int]) -> None:
    problem = replace(SINGLE, head_k_dim=k, head_v_dim=v, state_dtype=dtype)
    tile = StateTile(problem, Tiles(*shape, min_threads_per_sm=256))
    source = np.random.default_rng(0)
    state, key, query = source.standard_normal((k, v)), source.standard_normal(k), source.standard_normal(k)
    threads = np.arange(tile.threads)
    lane, group = tile.lane_and_group(threads)
    seen, stored = np.zeros(k * v, int), np.zeros(v, int)
    for block in range(-(-v // (tile.groups * tile.v_per_thread))):
        places = _dealt(state, tile, block, threads)
        np.add.at(seen, places[places >= 0], 1)
        values = np.where(places >= 0, state.ravel()[places], 0.0)
        parts = np.zeros((tile.threads, 2 * tile.v_per_thread + 1))
        for entry in range(tile.k_per_thread):
            at = (
                entry // tile.vector * tile.threads_per_column + lane
            ) * tile.vector + entry % tile.vector  # as q and k are loaded
            k_value = np.where(at < k, key[np.minimum(at, k - 1)], 0.0)
            q_value = np.where(at < k, query[np.minimum(at, k - 1)], 0.0)
            parts[:, 2 * tile.v_per_thread] += k_value * q_value
            for r in range(tile.v_per_thread):
                parts[:, 2 * r] += values[:, tile.at(r, entry)] * k_value
                parts[:, 2 * r + 1] += values[:, tile.at(r, entry)] * q_value
        for step in range(tile.warp_lanes.bit_length() - 1):
            parts = parts + parts[threads // 32 * 32 + (threads % 32 ^ tile.lane_step << step)]
        v_start = (block * tile.groups + group) * tile.v_per_thread
        own = np.minimum(lane, tile.v_per_thread - 1)
        k_sums, q_sums, token_sums = (
            parts[:, 0 : 2 * tile.v_per_thread : 2],
            parts[threads, 2 * own + 1],
            parts[:, 2 * tile.v_per_thread],
        )
        if tile.k_warps > 1:
            k_sums, q_sums, token_sums = _exchanged(tile, parts)
        is_live = v_start < v
        np.testing.assert_allclose(token_sums, key @ query)
        for r in range(tile.v_per_thread):
            np.testing.assert_allclose(k_sums[is_live, r], (key @ state)[v_start[is_live] + r])
        stores = is_live & (lane < tile.v_per_thread)
        np.testing.assert_allclose(q_sums[stores], (query @ state)[v_start[stores] + lane[stores]])
        np.add.at(stored, v_start[stores] + lane[stores], 1)
    assert (seen == 1).all() and (stored == 1).all()


@pytest.mark.parametrize(
    ("v", "shape", "warps", "columns"),
    [
        (128, (128, 8, 4), 4, 64),
        (128, (256, 8, 4), 4, 64),
        (128, (128, 16, 8), 4, 64),
        (128, (256, 16, 8), 4, 64),
        (128, (256, 16, 4), 8, 64),
        (64, (64, 4, 4), 2, 64),
        (128, (64, 8, 4), 2, 32),  # no more warps
        (128, (32, 8, 4), 1, 16),
        (40, (128, 8, 4), 4, 64),  # the power of two from 40 on
        (32, (128, 8, 4), 2, 32),
    ],
)
def test_the_rule(v: int, shape: tuple[int, int, int], warps: int, columns: int) -> None:
    tiles = Tiles(*shape, 512)
    assert recurrent_tiles.k_warps(False, v, tiles) == warps
    assert recurrent_tiles.columns_of_warp(v, tiles) == columns
    assert recurrent_tiles.k_warps(True, v, tiles) == 1


@pytest.mark.parametrize("threads", [32, 64, 128, 256])
@pytest.mark.parametrize("v", [4, 12, 64, 96, 128, 160, 256])
def test_shared_by_whole_warps(v: int, threads: int) -> None:
    for lanes in (4, 8, 16, 32):
        for rows in (r for r in (1, 2, 4, 8) if r <= lanes):
            warps = recurrent_tiles.k_warps(False, v, Tiles(threads, lanes, rows, 256))
            assert lanes % warps == 0 and threads // 32 % warps == 0 and lanes // warps <= 32


@pytest.mark.parametrize(
    ("problem", "batch", "config"),
    [
        (SINGLE, 8, Config(128, 8, 4, 512, prefetch_next_token=False)),
        (SINGLE, 32, Config(128, 8, 4, 384)),
        (SINGLE, 512, Config(128, 8, 4, 384)),
        (replace(SINGLE, **QUARTER), 32, Config(128, 8, 4, 512, prefetch_next_token=False)),
        (replace(SINGLE, **BF16), 8, Config(128, 8, 4, 512, prefetch_next_token=False)),
        (replace(SINGLE, **BF16), 32, Config(256, 8, 4, 512, prefetch_next_token=False)),
        (replace(SINGLE, **BF16), 512, Config(256, 8, 4, 512, prefetch_next_token=False)),
        (replace(SINGLE, **BF16, index_dtype="int64"), 512, Config(256, 16, 8, 512, prefetch_next_token=False)),
        (SINGLE, 1, Config(64, 16, 4, 512, prefetch_next_token=False)),
        (replace(SINGLE, **QUARTER), 8, Config(64, 16, 4, 512, prefetch_next_token=False)),
    ],
)
def test_measured_tiles(problem: RecurrentProblem, batch: int, config: Config) -> None:
    call = replace(problem, num_sequences=batch, num_tokens=batch)
    assert recurrent_tiles.default_config(call, H100) == config
    assert config in recurrent_tiles.configs(call, H100)


@pytest.mark.parametrize(
    ("problem", "batch", "config"),
    [
        (DRAFTS, 128, Config(128, 8, 4, 384)),
        (replace(DRAFTS, **BF16), 8, Config(256, 8, 4, 512, prefetch_next_token=False)),
        (replace(DRAFTS, **BF16), 512, Config(256, 8, 4, 512, prefetch_next_token=False)),
        (replace(DRAFTS, **BF16, **QUARTER), 32, Config(256, 8, 4, 512, prefetch_next_token=False)),
        (replace(DRAFTS, **BF16, **QUARTER), 8, Config(64, 16, 4, 512)),
        (replace(DRAFTS, **BF16), 1, Config(64, 16, 4, 512)),
        (replace(DRAFTS, **QUARTER), 1, Config(64, 16, 4, 512)),
        (replace(DRAFTS, **BF16, write_every_token=False, has_accepted=False), 512, Config(128, 8, 4, 384)),
    ],
)
def test_tiles_of_drafts(problem: RecurrentProblem, batch: int, config: Config) -> None:
    """Whole rows of bfloat16 where every state is stored, and more threads where a call has few columns."""
    call = replace(problem, num_sequences=batch, num_tokens=4 * batch)
    assert recurrent_tiles.default_config(call, H100) == config
    assert config in recurrent_tiles.configs(call, H100)
    assert recurrent_tiles.default_prefetching(call, H100).prefetch_next_token


@pytest.mark.parametrize("changes", [{"state_dtype": "float32"}, {"use_beta_sigmoid": False}, {"has_rounding": True}], ids=str)
def test_drafts_without_prefetch_that_would_spill_do_not_fit(changes: dict[str, Any]) -> None:
    whole = Config(256, 16, 8, 512, prefetch_next_token=False)
    drafts = replace(DRAFTS, **BF16)
    assert recurrent_tiles.fits(drafts, whole, H100)
    assert not recurrent_tiles.fits(replace(drafts, **changes), whole, H100)
    assert not recurrent_tiles.fits(drafts, Config(128, 8, 4, 512, prefetch_next_token=False), H100)


@pytest.mark.parametrize(
    ("problem", "batch", "tiles"),
    [
        (DECODE, 8, (256, 8, 4, 512)),
        (DECODE, 32, (128, 8, 4, 512)),
        (DECODE, 512, (128, 8, 4, 512)),
        (replace(DECODE, **BF16), 8, (256, 16, 8, 512)),
        (replace(DECODE, **BF16), 32, (128, 8, 4, 512)),
        (replace(DECODE, **BF16), 512, (128, 8, 4, 512)),
        (DECODE_DRAFTS, 32, (128, 8, 4, 384)),
        (replace(DECODE_DRAFTS, **BF16), 128, (128, 8, 4, 384)),
    ],
)
def test_measured_tiles_of_decode(problem: GdnDecodeProblem, batch: int, tiles: tuple[int, int, int, int]) -> None:
    call = replace(problem, state_v_first=False, num_sequences=batch, num_tokens=batch)
    assert gdn_decode.default_config(call, H100) == gdn_decode.Config(*tiles)
    assert gdn_decode.Config(*tiles) in gdn_decode.configs(call, H100)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_what_lost_is_no_choice(state_dtype: str) -> None:
    """Warps that read parts of lines, gaps within a line, more warps a column than needed, 256 threads an SM."""
    widest = 16 // {"float32": 4, "bfloat16": 2}[state_dtype]
    many: dict[str, Any] = {"state_dtype": state_dtype, "num_sequences": 128, "num_tokens": 128}
    spaces: list[Any] = [
        recurrent_tiles.configs(replace(SINGLE, **many), H100),
        recurrent_tiles.configs_prefetching(replace(DRAFTS, **many), H100),
        gdn_decode.configs(replace(DECODE, state_v_first=False, **many), H100),
    ]
    for space in spaces:
        assert space
        for config in space:
            warps = recurrent_tiles.k_warps(False, 128, config)
            assert 4 <= config.v_per_thread <= widest and warps == 4 and config.min_threads_per_sm > 256, config
            assert recurrent_tiles.columns_of_warp(128, config) >= 64


# Every kind of code that holds the most of the state a thread K first: the defaults of these calls, and the rest of `configs`.
_LARGE: dict[str, Any] = {"num_sequences": 512, "num_tokens": 512}
_CODE: list[dict[str, Any]] = [
    {},
    BF16,
    BF16 | {"has_rounding": True},
    {"write_every_token": True, "has_accepted": True, "num_tokens": 2048},
    BF16 | {"write_every_token": True, "has_accepted": True, "num_tokens": 2048},
    BF16 | {"write_every_token": True, "has_accepted": True, "has_rounding": True, "num_tokens": 2048},
    BF16 | {"dtype": "float16", "gate_dtype": None, "use_gate": False},
    {"write_every_token": True, "has_accepted": True, "has_parent": True, "num_tokens": 2048},
    {"head_k_dim": 256, "head_v_dim": 256},
]
VARIANTS = [
    (problem, config)
    for changes in _CODE
    for problem in [replace(SINGLE, **(_LARGE | changes))]
    for config in recurrent_tiles.configs(problem, H100)
]
_DECODE_CODE: list[tuple[GdnDecodeProblem, dict[str, Any]]] = [
    (DECODE, {}),
    (DECODE, BF16 | {"has_rounding": True}),
    (DECODE_DRAFTS, {}),
    (DECODE_DRAFTS, BF16 | {"has_rounding": True}),
    (replace(DECODE_DRAFTS, has_columns=False, has_accepted=False), BF16 | {"has_rounding": True}),
]
DECODE_VARIANTS = [
    (problem, config)
    for base, changes in _DECODE_CODE
    for problem in [replace(base, state_v_first=False, **(_LARGE | changes))]
    for config in gdn_decode.configs(problem, H100)
]


@checks.compiles(lambda: checks.tasks_of("kernels_cute.recurrent", VARIANTS))
def test_recurrent_spills_nothing() -> None:
    checks.check("kernels_cute.recurrent", "cute", VARIANTS)


@checks.compiles(lambda: checks.tasks_of("kernels_cute.gdn_decode", DECODE_VARIANTS))
def test_gdn_decode_spills_nothing() -> None:
    checks.check("kernels_cute.gdn_decode", "cute", DECODE_VARIANTS)
