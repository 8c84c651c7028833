"""Sparse attention against dense attention of each query alone, in float64."""

import importlib
import math

import pytest
import torch

from tests.references import reference

pytestmark = pytest.mark.usefixtures("one_thread")

reference_attention = importlib.import_module("gdn.ops.attention.reference")  # the package has a function of this name


def case(heads=4, kv_heads=2, dim=16, k=12, block_size=4, seed=0):
    """Three sequences: prefill with a cached prefix, one of no new tokens, decode; and two padding rows."""
    generator = torch.Generator().manual_seed(seed)
    new, lengths = [6, 0, 1], [11, 9, 14]
    tokens = sum(new) + 2
    tables = torch.full((3, 5), -99, dtype=torch.int32)
    order = torch.randperm(20, generator=generator)
    for s, length in enumerate(lengths):
        pages = -(-length // block_size)
        tables[s, :pages] = order[s * 5 : s * 5 + pages].int()
    packed = torch.randn(20, block_size, 2, kv_heads, dim, generator=generator)
    k_cache, v_cache = packed[:, :, 0], packed[:, :, 1]  # K and V in one row: odd token strides
    q = torch.randn(tokens, heads, dim, generator=generator)
    indices = torch.full((tokens, k), -1, dtype=torch.int32)
    for token in range(tokens):
        chosen = torch.randperm(14, generator=generator)[: k - token % 4].int()
        places = torch.randperm(k, generator=generator)[: chosen.numel()]
        indices[token, places] = chosen  # -1 anywhere, and positions beyond the query's own
    start = torch.tensor([0, 6, 6, 7], dtype=torch.int32)
    return q, (k_cache, v_cache), indices, tables, start, torch.tensor(lengths, dtype=torch.int32)


def dense(q, kv_cache, indices, tables, start, lengths, scale, topk_length=None):
    """Gathers whole sequences, and attends over the set of allowed positions, one query and head at a time."""
    k_cache, v_cache = kv_cache
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    o = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for s in range(len(lengths)):
        length = int(lengths[s])
        pages = tables[s, : -(-length // block_size)].long()
        keys = k_cache[pages].flatten(0, 1)[:length].double()
        values = v_cache[pages].flatten(0, 1)[:length].double()
        first, last = int(start[s]), int(start[s + 1])
        for token in range(first, last):
            position = length - (last - token)
            row = indices[token].tolist()
            row = row if topk_length is None else row[: int(topk_length[token])]
            allowed = sorted({j for j in row if 0 <= j <= position})
            if not allowed:
                continue
            for head in range(q.shape[1]):
                kv = head // (q.shape[1] // kv_heads)
                score = keys[allowed, kv] @ q[token, head].double() * scale
                lse[token, head] = score.logsumexp(dim=0)
                o[token, head] = score.softmax(dim=0) @ values[allowed, kv]
    return o, lse


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (16, 1), (6, 3)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_against_dense(heads, kv_heads, scale):
    arguments = case(heads, kv_heads)
    o, lse = reference.sparse_attention(*arguments, scale=scale, return_lse=True)
    want, want_lse = dense(*arguments, 16**-0.5 if scale is None else scale)
    assert torch.allclose(o.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-6)
    assert bool((o[7:] == 0).all()) and bool((lse[7:] == -math.inf).all())  # padding rows


def test_all_positions_are_plain_causal_attention():
    q, kv_cache, _, tables, start, lengths = case()
    every = torch.arange(14, dtype=torch.int32).expand(q.shape[0], 14)
    o = reference.sparse_attention(q, kv_cache, every, tables, start, lengths)
    keys, values = (c[tables[0, :3].long()].flatten(0, 1)[:11].transpose(0, 1).repeat_interleave(2, dim=0) for c in kv_cache)
    mask = torch.arange(11) <= torch.arange(5, 11)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(q[:6].transpose(0, 1), keys, values, attn_mask=mask)
    assert torch.allclose(o[:6], want.transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gate(dtype):
    """Rounded to the dtype before it and after; a row without a position stays 0, whatever its gate is."""
    q, kv_cache, indices, tables, start, lengths = case()
    arguments = (q.to(dtype), tuple(cache.to(dtype) for cache in kv_cache), indices, tables, start, lengths)
    gate = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate[7, 0], gate[7, 1], gate[0, 0] = torch.nan, torch.inf, -torch.inf
    plain, lse = reference.sparse_attention(*arguments, return_lse=True)
    o, gated_lse = reference.sparse_attention(*arguments, return_lse=True, gate=gate)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = (plain.to(wide) * torch.sigmoid(gate.to(wide))).to(dtype)
    want[7] = 0
    torch.testing.assert_close(o, want, equal_nan=True)
    assert torch.equal(lse, gated_lse)
    assert not o[7].any() and not o[8].any() and not o[0, 0].any()
    assert bool(plain[0, 0].any())


def test_topk_length_blocks_out_and_stacked_cache(monkeypatch):
    q, kv_cache, indices, tables, start, lengths = case()
    topk_length = torch.arange(q.shape[0]) % 7  # 0 among them
    stacked = torch.stack(kv_cache)
    monkeypatch.setattr(reference_attention, "BLOCK_BYTES", 1)  # one token at a time
    out = torch.full_like(q, torch.nan)
    got = reference.sparse_attention(q, stacked, indices, tables, start, lengths, topk_length=topk_length, out=out)
    assert got is out
    want, _ = dense(q, kv_cache, indices, tables, start, lengths, 0.25, topk_length)
    assert torch.allclose(out.double(), want, rtol=1e-5, atol=1e-6)
    assert bool((out[0] == 0).all())


def test_poison_outside_the_selection_stays_outside():
    q, (k_cache, v_cache), indices, tables, start, lengths = case()
    clean = reference.sparse_attention(q, (k_cache, v_cache), indices, tables, start, lengths)
    used = torch.zeros(20, 4, dtype=torch.bool)
    sequence_of = [0] * 6 + [2]
    for token, s in enumerate(sequence_of):
        position = int(lengths[s]) - (int(start[s + 1]) - token)
        for j in indices[token].tolist():
            if 0 <= j <= position:
                used[int(tables[s, j // 4]), j % 4] = True
    k_cache[~used], v_cache[~used] = torch.nan, torch.nan
    assert torch.equal(reference.sparse_attention(q, (k_cache, v_cache), indices, tables, start, lengths), clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    q, kv_cache, *rest = case(dim=32)
    q, kv_cache = q.to(dtype), tuple(c.to(dtype) for c in kv_cache)
    o = reference.sparse_attention(q, kv_cache, *rest)
    want, _ = dense(q, kv_cache, *rest, 32**-0.5)
    assert o.dtype == dtype
    assert torch.allclose(o.double(), want, rtol=2**-8, atol=1e-5)


def test_nothing_to_attend():
    q, kv_cache, indices, tables, start, lengths = case()
    o, lse = reference.sparse_attention(q, kv_cache, indices[:, :0], tables, start, lengths, return_lse=True)
    assert bool((o == 0).all()) and bool((lse == -math.inf).all())
    o = reference.sparse_attention(q[:0], kv_cache, indices[:0], tables, torch.zeros(4, dtype=torch.int32), lengths)
    assert o.shape == (0, 4, 16)
