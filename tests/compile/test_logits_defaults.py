"""The analytic choices of the logits kernels: what was measured on the H100, and what follows from it elsewhere."""

from typing import Any

import pytest

from gdn.device import H100, H200, DeviceSpec
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from tests.compile.variants.base import example

mqa_logits = pytest.importorskip("kernels_cute.mqa_logits.ragged", reason="needs the CuTe DSL")
paged_mqa_logits = pytest.importorskip("kernels_cute.mqa_logits.paged", reason="needs the CuTe DSL")

BF16 = {"dtype": "bfloat16", "has_k_scale": False, "weights_dtype": "bfloat16"}
BARE = {"has_k_scale": False, "weights_dtype": None}


def ragged(num_heads: int, num_queries: int, num_keys: int, **changed: Any) -> MqaLogitsProblem:
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "num_columns": num_keys}
    problem: MqaLogitsProblem = example("mqa_logits", num_heads=num_heads, **sizes, **changed)
    return problem


def paged(num_heads: int, batch: int, context: int, next_n: int = 1, **changed: Any) -> PagedMqaLogitsProblem:
    sizes = {"next_n": next_n, "batch": batch, "max_context_len": context}
    problem: PagedMqaLogitsProblem = example("paged_mqa_logits", num_heads=num_heads, **sizes, **changed)
    return problem


# (accumulator_sets, steps in flight when the turn is passed, balanced_fraction, tiles_per_item, columns): the fastest, or within
# 2.3 % of it where nothing else is said
RAGGED = [
    (ragged(64, 4096, 32768), (2, 0, 8, 2133, 256)),
    (ragged(64, 1024, 131072), (2, 0, 8, 2133, 256)),
    (ragged(64, 2048, 32768, clean=False), (2, 0, 8, 2133, 256)),
    (ragged(64, 2048, 8192), (2, 0, 8, 2133, 256)),
    (ragged(64, 8192, 8192), (2, 0, 8, 2133, 256)),  # 4.8 % off: the table has another
    (ragged(64, 4096, 8192, **BF16), (2, 1, 8, 1066, 256)),
    (ragged(56, 1024, 131072), (2, 0, 1, 64, 224)),
    (ragged(48, 4096, 16384, weights_dtype="bfloat16"), (2, 1, 1, 64, 192)),
    (ragged(48, 4096, 32768), (2, 1, 1, 64, 192)),
    (ragged(40, 3000, 20000), (2, 1, 8, 2133, 160)),
    (ragged(40, 7000, 4096), (2, 1, 8, 2133, 160)),
    (ragged(32, 4096, 32768), (2, 1, 8, 2133, 256)),
    (ragged(24, 4096, 16384, out_dtype="bfloat16"), (2, 1, 8, 2133, 192)),
    (ragged(16, 4096, 32768), (2, 1, 8, 2133, 256)),
    (ragged(16, 4096, 16384, **BF16), (2, 1, 8, 1066, 256)),
    (ragged(8, 4096, 32768), (1, 0, 8, 2133, 256)),
    (ragged(6, 4096, 16384), (1, 1, 8, 2133, 96)),
    (ragged(4, 4096, 8192, **BARE), (1, 1, 0, 32, 128)),
    (ragged(4, 8192, 32768, **BARE), (1, 1, 0, 32, 128)),
    (ragged(4, 8192, 32768, clean=False, **BARE), (1, 1, 8, 2133, 128)),  # 2.8 % off: one stage of queries is faster there
    (ragged(4, 4096, 16384, **BF16), (1, 1, 8, 1066, 256)),
    (ragged(4, 4096, 16384, head_dim=64), (1, 1, 0, 32, 256)),
    (ragged(8, 4096, 16384, head_dim=64), (1, 0, 8, 4266, 256)),
    (ragged(16, 4096, 16384, head_dim=64), (2, 1, 8, 4266, 256)),
    (ragged(64, 4096, 16384, head_dim=64), (2, 0, 8, 4266, 256)),
    (ragged(16, 4096, 16384, num_kv_heads=2), (1, 0, 8, 1066, 256)),
    (ragged(64, 2048, 16384, num_kv_heads=4), (1, 1, 8, 533, 256)),
]


@pytest.mark.parametrize(("problem", "expected"), RAGGED)
def test_ragged_defaults_are_what_was_measured(problem: MqaLogitsProblem, expected: tuple[int, ...]) -> None:
    config = mqa_logits.default_config(problem, H100)
    in_flight = config.steps_in_flight_at_turn + config.pass_turn_at_issue
    assert (config.accumulator_sets, in_flight, config.balanced_fraction, config.tiles_per_item, config.columns) == expected
    assert config.relu_as_add_abs == (problem.dtype == "float8_e4m3fn")
    assert config.store_width == (32 if config.columns <= 128 else 8)
    assert config in mqa_logits.configs(problem, H100)


def test_queries_are_loaded_in_advance_where_they_fit() -> None:
    """24 heads took 377 us with one stage of queries and 343 with two."""
    for num_heads in (4, 8, 12, 16, 24, 32, 40, 48, 64):
        config = mqa_logits.default_config(ragged(num_heads, 4096, 16384), H100)
        assert (config.query_stages, config.key_stages) == (2, 8)
    assert mqa_logits.default_config(ragged(16, 4096, 16384, **BF16), H100).query_stages == 1


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (paged(64, 1, 131072), (1, 2, 3)),
        (paged(64, 32, 8192), (1, 2, 3)),
        (paged(64, 128, 8192, next_n=2), (1, 2, 3)),
        (paged(16, 64, 32768), (1, 2, 3)),
        (paged(64, 64, 65536), (1, 2, 3)),
        (paged(64, 64, 32768, next_n=4), (2, 1, 4)),
        (paged(64, 32, 16384, next_n=4), (2, 1, 4)),
        (paged(16, 64, 32768, **BF16), (1, 2, 3)),
        (paged(64, 32, 16384, next_n=2, **BF16), (1, 2, 2)),
        (paged(32, 16, 32768, head_dim=64), (1, 2, 6)),
    ],
)
def test_paged_defaults_are_what_was_measured(problem: PagedMqaLogitsProblem, expected: tuple[int, ...]) -> None:
    config = paged_mqa_logits.default_config(problem, H100)
    assert (config.math_warpgroups, config.blocks_per_sm, config.key_stages) == expected
    assert config in paged_mqa_logits.configs(problem, H100)


@pytest.mark.parametrize("device", [H100, H200])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_heads", [16, 24, 48, 64])
def test_keys_in_flight_cover_the_latency(device: DeviceSpec, head_dim: int, num_heads: int) -> None:
    """Little's law: the faster memory has more bytes on their way."""
    for batch, context in ((1, 8192), (32, 8192), (256, 32768)):
        problem = paged(num_heads, batch, context, head_dim=head_dim)
        config = paged_mqa_logits.default_config(problem, device)
        tile_bytes = 64 * config.math_warpgroups * (head_dim + 4)
        in_flight = config.key_stages * config.blocks_per_sm * tile_bytes * device.num_sms
        assert in_flight >= 2.0 * 1e3 * device.copy_gbps


@pytest.mark.parametrize(
    ("problem", "stages"),
    [
        (paged(64, 1, 131072), 4),
        (paged(64, 32, 8192), 4),
        (paged(64, 128, 8192, next_n=2), 4),
        (paged(16, 64, 32768, **BF16), 3),
    ],
)
def test_tilelang_paged_defaults_are_what_was_measured(problem: PagedMqaLogitsProblem, stages: int) -> None:
    tilelang = pytest.importorskip("kernels_tl.mqa_logits.paged", reason="needs TileLang")
    assert tilelang.default_config(problem, H100).stages == stages


def test_no_configuration_that_was_never_the_fastest() -> None:
    """Three blocks of one math warpgroup, two of two, and a turn passed with two steps on their way: none was worth it."""
    for problem in (paged(64, 64, 65536), paged(24, 16, 65536, page_size=16), paged(32, 64, 65536, head_dim=64)):
        blocks = {(config.math_warpgroups, config.blocks_per_sm) for config in paged_mqa_logits.configs(problem, H100)}
        assert blocks == {(1, 2), (2, 1)}
    for problem in (ragged(4, 4096, 16384, **BF16), ragged(16, 4096, 16384, **BF16)):
        assert {config.steps_in_flight_at_turn for config in mqa_logits.configs(problem, H100)} == {0, 1}
