"""A NaN in a query or a key is a NaN score, with relu too: the same scores on every backend, and none of them is selected."""

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.reference import page_views
from tests.gpu import test_mqa_logits, test_paged_mqa_logits

pytestmark = pytest.mark.gpu

QUERY, KEY = 5, 9  # rows that hold a NaN
RAGGED = ("h64-fp8", "h16-bf16", "h16-fp8-unclean", "h4-cast-packed", "h4-bf16-linear-d64", "h16-kv2-fp8-packed")
PAGED = ("h64-fp8-p64", "h16-bf16-p544", "h4-cast-p272-n2", "h4-bf16-linear-p128-n4-d64", "h16-kv2-fp8-p64-n2")


def spoil(x: torch.Tensor, row: int) -> None:
    """One element of a row [..., D] is NaN."""
    place = (row, *[0] * (x.dim() - 2), 3)
    if x.dtype == torch.float8_e4m3fn:
        x.view(torch.uint8)[place] = 0x7F
    else:
        x[place] = torch.nan


def check(got: torch.Tensor, want: torch.Tensor, is_visible: torch.Tensor) -> None:
    is_nan = want.isnan() & is_visible
    assert bool(is_nan.any()) and not bool(is_nan.all())
    assert torch.equal(got.isnan() & is_visible, is_nan)
    picked = gdn.topk_indices(got.masked_fill(~is_visible, -torch.inf), 64)
    assert not bool((is_nan.gather(1, picked.clamp(min=0).long()) & (picked >= 0)).any())


@pytest.mark.parametrize("variant", RAGGED)
@pytest.mark.parametrize("backend", test_mqa_logits.BACKENDS)
def test_ragged(backend: str, variant: str, device: torch.device) -> None:
    problem = test_mqa_logits.problem_of(variant, 40, 300)
    inputs = make_mqa_inputs(problem, device, ranges="full", poison=False)
    spoil(inputs.q, QUERY)
    spoil(inputs.k, KEY)
    got, want = (test_mqa_logits.run(problem, inputs, one) for one in (backend, "reference"))
    check(got, want, torch.ones_like(want, dtype=torch.bool))


@pytest.mark.parametrize("variant", PAGED)
@pytest.mark.parametrize("backend", test_paged_mqa_logits.BACKENDS)
def test_paged(backend: str, variant: str, device: torch.device) -> None:
    problem = test_paged_mqa_logits.problem_of(variant, 6, 300)
    lengths = test_paged_mqa_logits.lengths_of(problem, [300] * 6)
    inputs = make_paged_inputs(problem, device, lengths=lengths)
    spoil(inputs.q[QUERY], 0)
    values, _ = page_views(inputs.cache)
    spoil(values[inputs.block_tables[0, 0]], KEY)
    got, want = (test_paged_mqa_logits.run(problem, inputs, one) for one in (backend, "reference"))
    counts = inputs.context_lens.long()
    if counts.dim() == 1:
        counts = counts[:, None] - problem.next_n + 1 + torch.arange(problem.next_n, device=device)
    check(got, want, torch.arange(want.shape[1], device=device) < counts.reshape(-1, 1))
