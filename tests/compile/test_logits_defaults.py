"""The analytic choices of the logits kernels: what tuning chose on the H100, and what follows from it elsewhere."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100, H200, DeviceSpec
from gdn.problems import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.runtime import compiled

mqa_logits = pytest.importorskip("kernels_cute.mqa_logits", reason="needs the CuTe DSL")
paged_mqa_logits = pytest.importorskip("kernels_cute.paged_mqa_logits", reason="needs the CuTe DSL")

BF16 = {"dtype": "bfloat16", "has_k_scale": False, "weights_dtype": "bfloat16"}
BARE = {"has_k_scale": False, "weights_dtype": None}


def ragged(num_heads: int, num_queries: int, num_keys: int, **changed: Any) -> MqaLogitsProblem:
    problem = MqaLogitsProblem(
        num_heads, 1, 128, "float8_e4m3fn", True, "float32", True, True, "float32", False, num_queries, num_keys, num_keys
    )  # fmt: skip
    return replace(problem, **changed)


def paged(num_heads: int, batch: int, context: int, next_n: int = 1, **changed: Any) -> PagedMqaLogitsProblem:
    problem = PagedMqaLogitsProblem(
        num_heads, 1, 128, "float8_e4m3fn", True, "float32", True, True, "float32", 64, next_n, False, batch, context
    )  # fmt: skip
    return replace(problem, **changed)


@pytest.mark.parametrize(
    ("problem", "query_stages", "halves", "handoff", "relu_sum", "even", "tiles_per_item"),
    [
        (ragged(64, 8192, 8192), 2, 2, 0, True, 1, 64),
        (ragged(64, 4096, 32768), 2, 2, 0, True, 1, 64),
        (ragged(64, 1024, 131072), 2, 2, 0, True, 1, 64),
        (ragged(64, 2048, 32768, clean=False), 2, 2, 0, True, 1, 64),
        (ragged(32, 4096, 32768), 1, 2, 1, True, 8, 2133),
        (ragged(16, 2048, 32768, clean=False), 1, 2, 1, True, 8, 2133),
        (ragged(16, 4096, 32768, clean=False), 1, 2, 1, True, 8, 2133),
        (ragged(16, 4096, 32768, **BF16), 1, 2, 1, False, 8, 1066),
        (ragged(4, 4096, 8192, **BARE), 2, 1, 1, True, 0, 32),
    ],
)
def test_ragged_defaults_are_what_tuning_chose(
    problem: MqaLogitsProblem, query_stages: int, halves: int, handoff: int, relu_sum: bool, even: int, tiles_per_item: int
) -> None:
    config = mqa_logits.default_config(problem, H100)
    assert (config.query_stages, config.halves, config.handoff) == (query_stages, halves, handoff)
    assert (config.relu_sum, config.even, config.tiles_per_item) == (relu_sum, even, tiles_per_item)
    assert config in mqa_logits.configs(problem, H100)


def test_queries_are_loaded_in_advance_where_a_block_has_many_items() -> None:
    """A block's run of 16384 rows of 16 heads touches four query tiles, one of 4096 rows at most two."""
    assert mqa_logits.default_config(ragged(16, 16384, 4096), H100).query_stages == 2
    assert mqa_logits.default_config(ragged(16, 4096, 4096), H100).query_stages == 1


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (paged(64, 1, 131072), (1, 2, 3, 1)),
        (paged(64, 32, 8192), (1, 2, 3, 1)),
        (paged(64, 128, 8192, next_n=2), (1, 2, 3, 1)),
        (paged(32, 64, 32768), (1, 3, 5, 5)),
        (paged(16, 64, 32768), (1, 3, 5, 5)),
    ],
)
def test_paged_defaults_are_what_tuning_chose(problem: PagedMqaLogitsProblem, expected: tuple[int, ...]) -> None:
    config = paged_mqa_logits.default_config(problem, H100)
    assert (config.math_warpgroups, config.blocks_per_sm, config.key_stages, config.waves) == expected


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


def test_waves_are_no_part_of_the_machine_code() -> None:
    config = paged_mqa_logits.default_config(paged(64, 64, 65536), H100)
    assert compiled.compiled_fields(config) == compiled.compiled_fields(replace(config, waves=1))
    assert compiled.compiled_fields(config) != compiled.compiled_fields(replace(config, key_stages=2))


@pytest.mark.parametrize(
    ("problem", "stages"),
    [
        (paged(64, 32, 8192), 4),
        (paged(64, 128, 8192, next_n=2), 4),
        (paged(64, 64, 32768), 8),
        (paged(16, 64, 32768), 8),
        (paged(16, 64, 32768, **BF16), 4),
    ],
)
def test_tilelang_paged_defaults_are_what_tuning_chose(problem: PagedMqaLogitsProblem, stages: int) -> None:
    tilelang = pytest.importorskip("kernels_tl.paged_mqa_logits", reason="needs TileLang")
    assert tilelang.default_config(problem, H100).stages == stages
