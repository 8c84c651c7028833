"""An empty batch of every layer has empty results, and touches no cache."""

import pytest
import torch

from gdn.layers import CacheAllocator, HyperConnection, MoE, RMSNorm, RotaryEmbedding
from gdn.layers.mlp import MLP
from tests.layers.empty_steps import CASES, VARIANTS, Idle, steps
from tests.layers.small import small_config

STEPS = list(steps(small_config(), "cpu"))
# With compressed keys and without a slot for a sequence, rows of padding are refused: their ring has no row.
NEEDS_A_RING = "^ring: expected at least one sequence, got shape "


@pytest.mark.parametrize(("variant", "use_fp8", "has_pages"), CASES)
def test_nothing_happens(variant: str, use_fp8: bool, has_pages: bool) -> None:
    idle = Idle(variant, "cpu", torch.float32, use_fp8=use_fp8)
    for name, step in steps(idle.config, "cpu").items():
        try:
            if step.rows and not has_pages and idle.config.index_ratio > 1:
                with pytest.raises(ValueError, match=NEEDS_A_RING):
                    idle.check(step, idle.caches(has_pages=False))
            else:
                idle.check(step, idle.caches(has_pages=has_pages))
        except Exception as error:
            error.add_note(name)
            raise


def test_parts_without_a_row() -> None:
    config = small_config(intermediate_size=16, residual="hyper", hc_count=2, hc_lowrank=8, **VARIANTS["experts"])
    nothing = torch.empty(0, config.hidden_size)
    assert MLP(config.hidden_size, 16)(nothing).shape == nothing.shape
    assert MoE(config)(nothing).shape == nothing.shape
    norm = RMSNorm(config.hidden_size)
    assert norm(nothing).shape == nothing.shape
    assert [x.shape for x in norm.add(nothing, nothing.clone())] == [nothing.shape] * 2
    heads = torch.empty(0, 2, config.head_dim)
    assert RotaryEmbedding(config)(heads, torch.empty(0, dtype=torch.int64)).shape == heads.shape
    connection = HyperConnection(config)
    streams = connection.split(nothing)
    mixed, injection = connection(streams)
    assert injection is not None
    assert mixed.shape == nothing.shape and streams.shape == (0, 2 * config.hidden_size)
    assert connection.inject(streams, mixed, injection).shape == streams.shape


def test_no_new_token_takes_no_block() -> None:
    idle = Idle("compressed keys", "cpu", torch.float32, use_fp8=False)
    allocator = CacheAllocator(idle.caches(has_pages=True))
    free = allocator.num_free_blocks
    sequence = allocator.add(0)
    allocator.extend(sequence, 0)
    allocator.extend_all([], [])
    assert allocator.add_prompts([]) == [] and allocator.num_free_blocks == free
    allocator.truncate(sequence, 0)
    allocator.free(sequence)
    assert allocator.num_free_blocks == free
