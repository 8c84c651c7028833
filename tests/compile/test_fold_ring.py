"""Folds of rings: their shared memory, and rings that do not fit."""

from dataclasses import replace

import pytest

from gdn.device import H100
from kernels_cute.replay import fold_states
from tests.compile.variants.base import example

FOLD = example("fold_states")


@pytest.mark.parametrize(("k", "v"), [(128, 128), (64, 64), (256, 256), (100, 60)])
@pytest.mark.parametrize("rows", [16, 39, 64, 150, 300])
def test_blocks_fit_into_shared_memory(rows: int, k: int, v: int) -> None:
    """What the choice takes for a block's memory is no less than what the kernel asks for."""
    from kernels_cute.replay.fold_states_kernel import Spec  # imports the DSL

    problem = replace(FOLD, ring_rows=rows, head_k_dim=k, head_v_dim=v)
    found = fold_states.configs(problem, H100)
    assert found or rows > 64
    for config in found:
        assert Spec(problem, config).shared_bytes <= fold_states._shared_bytes(problem, config) <= H100.shared_bytes_per_block


def test_a_ring_that_is_too_large_is_refused() -> None:
    assert fold_states.refusal(replace(FOLD, ring_rows=64)) is None
    assert "shared memory, got 2000 rows" in str(fold_states.refusal(replace(FOLD, ring_rows=2000)))
