"""Items of the CuTe chunk kernel, as far as they need no GPU: how many clusters, and what they compile."""

from dataclasses import replace

import pytest

from gdn.device import H100
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import compiled
from tests.compile.variants.delta_rule import chunk_of

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")


def problem_of(num_sequences: int, head_dim: int = 128) -> ChunkProblem:
    return chunk_of((16, 32), 8192, num_sequences, head_dim)


@pytest.mark.parametrize(("head_dim", "clusters"), [(128, 66), (64, 132)])
def test_a_cluster_for_every_place(head_dim: int, clusters: int) -> None:
    problem = problem_of(8, head_dim)
    config = chunk.default_config(problem, H100)
    assert config.num_persistent_clusters == clusters
    for wrong in (-1, 1000):
        assert not chunk.fits(problem, replace(config, num_persistent_clusters=wrong), H100)


def test_a_cluster_an_item_where_all_have_room() -> None:
    problem = problem_of(1)
    assert chunk.default_config(replace(problem, num_tokens=0), H100).num_persistent_clusters == 0
    full, more = (replace(problem, num_sequences=count) for count in (2, 3))
    assert [chunk.default_config(one, H100).num_persistent_clusters for one in (full, more)] == [0, 66]
    assert chunk.default_config(replace(more, num_tokens=1 << 20), H100).prefetch == 0


def test_configurations_fill_the_device() -> None:
    problem = problem_of(8)
    found = {config.num_persistent_clusters for config in chunk.configs(problem, H100) if not config.num_four_sm_clusters}
    assert found == {0, 66}


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stages_are_fixed(stages: int) -> None:
    problem = problem_of(8)
    assert not chunk.fits(problem, replace(chunk.default_config(problem, H100), stages=stages), H100)


def test_places_compile_nothing_new() -> None:
    problem = problem_of(8)
    config = chunk.default_config(problem, H100)
    keys = {
        compiled.entry_key("chunk", "cute", chunk, problem, replace(config, num_persistent_clusters=count))
        for count in (1, 3, 66)
    }
    assert len(keys) == 1
    assert compiled.entry_key("chunk", "cute", chunk, problem, replace(config, num_persistent_clusters=0)) not in keys
