"""The TileLang chunk kernel in one launch, in two, or in both: which the default takes, what is compiled, what does not fit."""

import dataclasses
import importlib
from typing import Any

import pytest

from gdn.device import H100
from gdn.ops.delta_rule.problem import ChunkProblem
from tests.compile import checks
from tests.compile.variants.delta_rule import chunk_of

chunk = pytest.importorskip("kernels_tl.chunk", reason="needs TileLang")


def _problem(num_k_heads: int, num_v_heads: int, *sizes: int, **changes: Any) -> ChunkProblem:
    return chunk_of((num_k_heads, num_v_heads), *sizes, **changes)


@pytest.mark.parametrize(
    ("sizes", "cluster_size", "split_chunks"),
    [
        ((16, 32, 1024), 3, 0), ((16, 32, 8192), 3, 0), ((16, 32, 32768), 3, 0),  # SMs to spare for the tiles
        ((11, 33, 8192), 2, 0),  # a cluster of three might be one too many
        ((4, 8, 512), 4, 0),  # few chunks are not worth two launches
        ((4, 8, 8192, 64), 2, 0),
        ((16, 32, 8192, 8), 2, 0), ((16, 32, 16384, 8), 2, 0), ((16, 32, 8192, 64), 2, 0), ((16, 64, 8192), 2, 0),
        ((4, 8, 8192), None, 16), ((4, 8, 32768), None, 64), ((2, 4, 32768), None, 32),  # few heads: in segments
        ((16, 32, 8192, 8, 64), None, 0),  # not served
    ],
)  # fmt: skip
def test_default(sizes: tuple[int, ...], cluster_size: int | None, split_chunks: int) -> None:
    """cluster None: not in one launch."""
    config = chunk.default_config(_problem(*sizes), H100)
    assert (config.cluster_size, config.split_chunks) == (cluster_size or chunk.CHAINS, split_chunks)


def test_one_launch_is_compiled_for_whole_sequences_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(function: Any, **options: Any) -> bytes:
        return b""

    monkeypatch.setattr(importlib.import_module("kernels_tl.common.build"), "library", script)
    two = {"chunk_prepare", "chunk_chain"}
    assert set(chunk.compile(_problem(4, 8, 8192), chunk.Config(split_chunks=0))) == {"chunk_fused"}
    assert set(chunk.compile(_problem(4, 8, 8192), chunk.Config(split_chunks=16))) > two
    assert set(chunk.compile(_problem(4, 8, 8192, 1, 64), chunk.Config(split_chunks=0))) == two


def test_one_launch_has_no_workspace_and_needs_room() -> None:
    problem = _problem(16, 32, 8192)
    config = chunk.Config(split_chunks=0, cluster_size=3)
    assert chunk.workspace_bytes(problem, config) == 0 and chunk.fits(problem, config, H100)
    small = dataclasses.replace(H100, shared_bytes_per_block=chunk.FUSED_BYTES - 1)
    assert not chunk.fits(problem, config, small)
    assert not chunk.fits(_problem(16, 32, 8192, 1, 64), config, H100)
    assert not chunk.fits(problem, dataclasses.replace(config, cluster_size=chunk.MOST_MAKERS + 1), H100)
    assert not chunk.fits(problem, dataclasses.replace(config, split_chunks=16), H100)


def test_clusters_are_what_few_sms_hold() -> None:
    """Fewer clusters of three or four blocks run at once than SMs would do for: they lie within groups of SMs."""
    few = dataclasses.replace(H100, num_sms=64)
    assert chunk.default_config(_problem(16, 16, 8192), few).cluster_size == 3
    assert chunk.default_config(_problem(16, 32, 8192), few).cluster_size == chunk.CHAINS


def test_configs_hold_every_cluster_of_the_one_launch() -> None:
    for problem, clusters in (
        (_problem(16, 32, 8192), {2, 3, 4}),
        (_problem(4, 8, 8192), {2, 3, 4}),
        (_problem(4, 8, 8192, 1, 64), {2}),
    ):
        assert {config.cluster_size for config in chunk.configs(problem, H100) if config.split_chunks == 0} == clusters


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 8, 8192), (16, 32, 8192),  # the length of a sequence alone is known
        (16, 32, 16384, 2), (16, 32, 8192, 8), (4, 8, 1000, 4),  # no SM idle, or too short
        (4, 8, 16384, 4, 64),  # the one launch has no heads of 64
    ],
)  # fmt: skip
def test_nothing_to_decide(sizes: tuple[int, ...]) -> None:
    assert chunk.default_config(_problem(*sizes), H100).split_if_longest_exceeds == 0


def test_what_of_both_does_not_fit() -> None:
    problem = _problem(4, 8, 16384, 4)
    config = chunk.default_config(problem, H100)
    for changes in ({"split_if_longest_exceeds": -1}, {"split_chunks": 0}, {"cluster_size": 1}, {"cluster_size": 5}):
        assert not chunk.fits(problem, dataclasses.replace(config, **changes), H100)


def test_workspace_of_both_is_what_segments_need() -> None:
    problem = _problem(4, 8, 16384, 4)
    config = chunk.default_config(problem, H100)
    cut = dataclasses.replace(config, cluster_size=chunk.CHAINS, split_if_longest_exceeds=0)
    assert chunk.workspace_bytes(problem, config) == chunk.workspace_bytes(problem, cut) > 0


# More than the tables hold. Checkpoints take the most registers.
_CHECKPOINTS = _problem(4, 8, 16384, 4, dtype="float16", cu_seqlens_dtype="int64", index_dtype="int32", has_checkpoints=True)
VARIANTS = [(_CHECKPOINTS, chunk.default_config(_CHECKPOINTS, H100))]


@checks.compiles(lambda: checks.tasks_of("kernels_tl.chunk", VARIANTS))
def test_both_ways_compile() -> None:
    assert all(config.split_chunks and config.split_if_longest_exceeds for _, config in VARIANTS)
    checks.check("kernels_tl.chunk", "tilelang", VARIANTS)
