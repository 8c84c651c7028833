"""Items of the CuTe chunk kernel, as far as they need no GPU: how many clusters, and what they compile."""

from dataclasses import replace

import pytest

from gdn.device import H100
from gdn.runtime import compiled
from gdn.testing.inputs import chunk_problem

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")


@pytest.mark.parametrize(("head_dim", "places"), [(128, 66), (64, 132)])
def test_a_cluster_for_every_place(head_dim: int, places: int) -> None:
    problem = chunk_problem(head_k_dim=head_dim, head_v_dim=head_dim, dtype="bfloat16", num_tokens=8192, num_sequences=8)
    config = chunk.default_config(problem, H100)
    assert config.places == places
    for wrong in (0, 1000):
        assert not chunk.fits(problem, replace(config, places=wrong), H100)


def test_configurations_fill_the_device() -> None:
    problem = chunk_problem(head_k_dim=128, head_v_dim=128, dtype="bfloat16", num_tokens=8192, num_sequences=8)
    assert {(config.paired, config.places) for config in chunk.configs(problem, H100)} == {(True, 66), (False, 132)}


def test_places_compile_nothing_new() -> None:
    problem = chunk_problem(head_k_dim=128, head_v_dim=128, dtype="bfloat16", num_tokens=8192, num_sequences=8)
    config = chunk.default_config(problem, H100)
    keys = {compiled.entry_key("chunk", "cute", chunk, problem, replace(config, places=places)) for places in (1, 3, 66)}
    assert len(keys) == 1
