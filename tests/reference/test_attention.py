"""Sparse attention in plain torch: what drawn calls next to a float64 oracle (tests/ops/test_drawn_attention.py) leave open.

They allow half precision several roundings, draw no float64 and no gate that is not finite, and fit into one part.
"""

import importlib
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.drawn_attention import check
from tests.references import reference

pytestmark = pytest.mark.usefixtures("one_thread")

reference_attention = importlib.import_module("gdn.ops.attention.reference")  # the package has a function of this name
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5, torch.float64: 1e-12}
NEW, LENGTH = 6, 11  # tokens of the one sequence; a row of padding follows


def case(dtype: torch.dtype) -> tuple[Any, ...]:
    """All positions of a sequence in three pages, and two positions after it."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(4, 4, 2, 2, 16, generator=generator).to(dtype)  # K and V in one row: odd token strides
    q = torch.randn(NEW + 1, 4, 16, generator=generator).to(dtype)
    every, tables = torch.arange(LENGTH + 2, dtype=torch.int32).expand(NEW + 1, -1), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    return q, (packed[:, :, 0], packed[:, :, 1]), every, tables, torch.tensor([0, NEW]), torch.tensor([LENGTH])


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_all_positions_are_plain_causal_attention(dtype: torch.dtype, scale: float | None) -> None:
    """Computed in float32 or more, and rounded once."""
    q, kv_cache, _, tables, *_ = arguments = case(dtype)
    o = reference.sparse_attention(*arguments, scale=scale)
    keys, values = (c[tables[0].long()].flatten(0, 1)[:LENGTH].transpose(0, 1).repeat_interleave(2, 0).double() for c in kv_cache)
    mask = torch.arange(LENGTH) <= torch.arange(LENGTH - NEW, LENGTH)[:, None]
    want = scaled_dot_product_attention(q[:NEW].transpose(0, 1).double(), keys, values, attn_mask=mask, scale=scale)
    torch.testing.assert_close(o[:NEW].double(), want.transpose(0, 1), rtol=ROUNDING[dtype], atol=min(1e-6, ROUNDING[dtype] / 10))
    assert o.dtype == dtype and not o[NEW:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gate(dtype: torch.dtype) -> None:
    """Rounded to the dtype before it and after; a row without a position stays 0, whatever its gate is."""
    q, kv_cache, every, *rest = case(dtype)
    chosen = every.clone()
    chosen[1] = -1
    gate = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate[1, 0], gate[1, 1], gate[NEW], gate[0, 0] = torch.nan, torch.inf, torch.nan, -torch.inf
    plain = reference.sparse_attention(q, kv_cache, chosen, *rest)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = (plain.to(wide) * torch.sigmoid(gate.to(wide))).to(dtype)
    want[[1, NEW]] = 0
    assert torch.equal(reference.sparse_attention(q, kv_cache, chosen, *rest, gate=gate), want)
    assert bool(plain[0, 0].any()) and not want[0, 0].any()


def test_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_attention, "BLOCK_BYTES", 1)
    for seed in range(30):
        check(seed, "cpu", "sparse_attention")
