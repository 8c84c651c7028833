"""Indices of int64 that no int32 holds: none of their low halves counts, in the kernels' reference either."""

import pytest
import torch

from gdn.ops.indexer.reference import visible_lengths
from tests.references import reference

FAR = [2**33 + 5, -(2**33) + 5, 2**40, -(2**40) + 1, 2**31, -(2**31) - 1, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_far_groups_are_none(ratio: int) -> None:
    near = torch.tensor([[7, 0, 2], [1, 4, 9]])
    groups = torch.cat([near[:, :1], torch.tensor([FAR, FAR]), near[:, 1:]], dim=1)
    positions = torch.tensor([41, 43])
    want = reference.expand_topk_groups(near, positions, ratio=ratio)
    found = reference.expand_topk_groups(groups, positions, ratio=ratio)
    assert torch.equal(found[:, : want.shape[1]], want)
    assert bool((found[:, want.shape[1] :] == -1).all())


@pytest.mark.parametrize("position", FAR)
def test_far_positions_have_no_tail(position: int) -> None:
    groups = torch.tensor([[3, -1], [5, 6]])
    want = reference.expand_topk_groups(groups, torch.tensor([-1, 6]))
    assert torch.equal(reference.expand_topk_groups(groups, torch.tensor([position, 6])), want)


@pytest.mark.parametrize("position", FAR)
def test_tokens_at_far_positions_are_skipped(position: int) -> None:
    """The ring and the cache do not change, and the token is nobody's neighbour."""
    ring = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = torch.zeros(3, 16, 64, dtype=torch.bfloat16)
    raw = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for far, slot in ((position, 0), (0, -1)):  # the second: a token of no sequence
        own_ring, own_cache = ring.clone(), cache.clone()
        reference.compress_indexer_keys(
            raw, own_ring, own_cache, torch.tensor([4, 5, 6, 7, far]), torch.ones(9, 32), torch.zeros(64),
            torch.tensor([0, 0, 0, 0, slot]), torch.tensor([1, 1, 1, 1, 9]), rotary_dim=32,
        )  # fmt: skip
        results.append((own_ring, own_cache))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("length", [-(2**63), -(2**63) + 2, -1])
def test_the_most_negative_lengths_are_empty(length: int) -> None:
    assert not visible_lengths(torch.tensor([length, 0]), 2, 4, 300).any()
