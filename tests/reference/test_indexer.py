"""Quantisation, cache layout, norm, RoPE and compressed keys against statements written out element by element."""

import math

import pytest
import torch

from gdn.ops.indexer.reference import page_views
from tests.reference.calls import randn
from tests.references import reference

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn


def cos_sin_table(positions, rotary_dim):
    angle = torch.arange(positions)[:, None] / 10000.0 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def norm_and_rotate(x, weight, position, rotary_dim, zero_centred=True, eps=1e-6):
    """One vector, in Python floats: RMS norm, then each pair (i, i + rotary_dim / 2) as a complex number."""
    values = [float(v) for v in x]
    factor = 1.0 / math.sqrt(sum(v * v for v in values) / len(values) + eps)
    values = [v * factor * (float(w) + (1.0 if zero_centred else 0.0)) for v, w in zip(values, weight, strict=True)]
    half = rotary_dim // 2
    for i in range(half):
        pair = complex(values[i], values[i + half])
        angle = position / 10000.0 ** (i / half)
        pair *= complex(math.cos(angle), math.sin(angle))
        values[i], values[i + half] = pair.real, pair.imag
    return torch.tensor(values)


@pytest.mark.parametrize(("dim", "group"), [(64, 128), (128, 128), (256, 128), (96, 32)])
def test_quantize(dim, group):
    x = randn(5, 3, dim) * torch.tensor([1e-6, 1.0, 3e4])[:, None]
    x[0, 1] = 0.0
    values, scale = reference.quantize_fp8(x, group)
    width = min(group, dim)
    assert values.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == (5, 3, dim // width)
    for part in range(dim // width):
        columns = slice(part * width, (part + 1) * width)
        amax = x[..., columns].abs().amax(dim=-1).clamp(min=1e-4)
        assert torch.equal(scale[..., part], amax / 448)
        restored = values[..., columns].float() * scale[..., part, None]
        # Half a unit in the last of 3 mantissa bits; below the smallest normal (2^-6) half of 2^-9.
        bound = torch.maximum(x[..., columns].abs() * 2.0**-4, scale[..., part, None] * 2.0**-10) * (1 + 1e-5)
        assert bool(((restored - x[..., columns]).abs() <= bound).all())
        large = x[..., columns].abs().amax(dim=-1) > 1e-4
        assert bool((values[..., columns].float().abs().amax(dim=-1)[large] == 448).all())


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, FP8, torch.bfloat16])
def test_write_lays_pages_out_as_specified(dtype, kv_heads):
    dim, page_size, pages, pad = 32, 16, 3, 16
    heads = 1 if kv_heads is None else kv_heads
    row = dim + 4 if dtype == torch.uint8 else dim
    item = 2 if dtype == torch.bfloat16 else 1
    page_bytes = page_size * heads * row * item
    storage = torch.full((pages, page_bytes + pad), 0xAB, dtype=torch.uint8)
    shape = (pages, page_size, row) if kv_heads is None else (pages, page_size, heads, row)
    inner = (row, 1) if kv_heads is None else (heads * row, row, 1)
    cache = storage.view(dtype).as_strided(shape, ((page_bytes + pad) // item, *inner))
    k = randn(5, dim) if kv_heads is None else randn(5, heads, dim)
    slots = torch.tensor([17, -1, 0, 47, 31])
    reference.write_indexer_cache(k.bfloat16(), cache, slots)

    untouched = torch.full((page_bytes + pad,), 0xAB, dtype=torch.uint8)
    expected = untouched.repeat(pages, 1)
    keys = k.bfloat16().view(5, heads, dim)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, page_size)
        for head in range(heads):
            at = (offset * heads + head) * dim * item
            if dtype == torch.uint8:
                amax = max(1e-4, float(keys[token, head].float().abs().max()))
                scale = torch.tensor(amax) / 448
                value = (keys[token, head].float() / scale).to(FP8)
                scale_at = page_size * heads * dim + (offset * heads + head) * 4
                expected[page, scale_at : scale_at + 4] = scale[None].view(torch.uint8)
            else:
                value = keys[token, head].to(dtype)
            expected[page, at : at + dim * item] = value.view(torch.uint8)
    assert torch.equal(storage, expected)


def test_write_nothing_touches_nothing():
    cache = torch.full((2, 16, 1, 36), 7, dtype=torch.uint8)
    reference.write_indexer_cache(randn(3, 32), cache, torch.tensor([-1, -1, -1]))
    reference.write_indexer_cache(randn(0, 32), cache, torch.empty(0, dtype=torch.int64))
    assert bool((cache == 7).all())


@pytest.mark.parametrize("dtype", [torch.uint8, FP8, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [None, 40])
def test_gather_gives_back_what_was_written(dtype, num_rows):
    dim, page_size, heads = 32, 16, 2
    cache = torch.zeros(6, page_size, heads, dim + 4 if dtype == torch.uint8 else dim).to(dtype)
    tables = torch.tensor([[5, 2, 0], [3, 9999, -7], [1, 4, 0]], dtype=torch.int32)
    lengths = [20, 0, 17]
    bounds = torch.tensor([0, 20, 20, 37], dtype=torch.int32)
    k = randn(37, heads, dim).bfloat16()
    slots = [int(tables[s, p // page_size]) * page_size + p % page_size for s in range(3) for p in range(lengths[s])]
    reference.write_indexer_cache(k, cache, torch.tensor(slots))
    got, scale = reference.gather_indexer_cache(cache, tables, bounds, num_rows=num_rows)
    assert got.shape == (num_rows or 37, heads, dim)
    assert (scale is None) == (dtype != torch.uint8)
    if dtype == torch.uint8:
        want, want_scale = reference.quantize_fp8(k, dim)
        assert torch.equal(scale[:37], want_scale[..., 0]) and bool((scale[37:] == 0).all())
    else:
        want = k.to(dtype)
    assert got.dtype == want.dtype
    assert torch.equal(got[:37].float(), want.float()) and bool((got[37:].float() == 0).all())


def test_gather_of_no_rows():
    cache = torch.zeros(2, 16, 36, dtype=torch.uint8)
    k, scale = reference.gather_indexer_cache(cache, torch.zeros(1, 0, dtype=torch.int32), torch.tensor([0, 0]))
    assert k.shape == (0, 32) and scale.shape == (0,)


def prepare(q, k, weights, cache, **options):
    tokens, dim = q.shape[0], q.shape[-1]
    positions = torch.tensor([3, 50, 0, 17][:tokens])
    gains = randn(2, dim, seed=9) * 0.1
    table = cos_sin_table(64, 16)
    slots = torch.arange(tokens) if cache is not None else None
    k_norm = gains[1] if k is not None else None
    got = reference.prepare_indexer(q, k, weights, positions, table, gains[0], k_norm, cache, slots, rotary_dim=16, **options)
    return got, positions.tolist(), gains


@pytest.mark.parametrize("zero_centred", [True, False])
def test_prepare_norm_and_rope(zero_centred):
    q, k, weights = randn(4, 3, 32), randn(4, 32, seed=1), randn(4, 3, seed=2)
    cache = torch.zeros(1, 16, 1, 32, dtype=torch.bfloat16)
    (q_out, w_out), positions, gains = prepare(q, k, weights, cache, zero_centred=zero_centred)
    assert w_out is weights
    for token, position in enumerate(positions):
        for head in range(3):
            want = norm_and_rotate(q[token, head], gains[0], position, 16, zero_centred)
            assert torch.allclose(q_out[token, head], want, rtol=1e-5, atol=1e-5)
        want = norm_and_rotate(k[token], gains[1], position, 16, zero_centred)
        assert torch.allclose(cache[0, token, 0].float(), want, rtol=2**-8, atol=1e-5)


def test_prepare_folds_the_scale_only_in_scaled_fp8():
    q, k, weights = randn(4, 3, 32).bfloat16(), randn(4, 32, seed=1).bfloat16(), randn(4, 3, seed=2)
    plain = torch.zeros(1, 16, 1, 32, dtype=torch.bfloat16)
    (rotated, _), *_ = prepare(q, k, weights, plain)
    scaled = torch.zeros(1, 16, 1, 36, dtype=torch.uint8)
    (q_fp8, folded), *_ = prepare(q, k, weights, scaled)
    want, q_scale = reference.quantize_fp8(rotated)
    assert torch.equal(q_fp8.float(), want.float())
    assert torch.allclose(folded, weights * q_scale[..., 0] / math.sqrt(32), rtol=1e-6)
    (_, ones), *_ = prepare(q, k, None, scaled)
    assert torch.allclose(ones, q_scale[..., 0] / math.sqrt(32), rtol=1e-6)
    cast = torch.zeros(1, 16, 1, 32).to(FP8)
    (q_cast, none), *_ = prepare(q, k, None, cast)
    assert none is None and torch.equal(q_cast.float(), rotated.to(FP8).float())
    # Without keys, fp8 and weights decide.
    (alone, alone_weights), *_ = prepare(q, None, weights, None, fp8=True)
    assert torch.equal(alone.float(), q_fp8.float()) and torch.equal(alone_weights, folded)
    (alone, alone_weights), *_ = prepare(q, None, None, None, fp8=True)
    assert torch.equal(alone.float(), q_cast.float()) and alone_weights is None
    (alone, alone_weights), *_ = prepare(q, None, weights, None)
    assert torch.equal(alone, rotated) and alone_weights is weights


def test_fp8_scores_stay_close_to_exact_ones():
    """End to end: prepared FP8 queries and keys against float64 of the unquantised ones."""
    q, k, weights = randn(4, 3, 128), randn(4, 128, seed=1), randn(4, 3, seed=2)
    cache = torch.zeros(1, 16, 1, 132, dtype=torch.uint8)
    (q_fp8, folded), positions, gains = prepare(q, k, weights, cache)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    keys, k_scale = reference.gather_indexer_cache(cache, tables, torch.tensor([0, 4]))
    got = reference.mqa_logits(q_fp8, keys, folded, torch.zeros(4), torch.full((4,), 4), k_scale=k_scale)
    exact_q = torch.stack([norm_and_rotate(h, gains[0], p, 16) for t, p in zip(q, positions, strict=True) for h in t]).view(
        4, 3, 128
    )
    exact_k = torch.stack([norm_and_rotate(t, gains[1], p, 16) for t, p in zip(k, positions, strict=True)])
    want = ((exact_q @ exact_k.T).relu() * weights[..., None]).sum(dim=1) / math.sqrt(128)
    # Rounding to e4m3 moves a value by at most 2^-4 of it, evenly spread: standard deviation 2^-4 / sqrt(3) at most, for q
    # and for k, independent from dim to dim and head to head (and the ReLU only shrinks it).
    products = (exact_q.square() @ exact_k.square().T) * weights[..., None].square()
    deviation = (products.sum(dim=1) * 2 / 3 / 128).sqrt() * 2.0**-4
    error = (got - want) / deviation
    assert 0.1 < float(error.square().mean().sqrt()) < 1.0


def group_keys(raw, gain, ratio, rotary_dim):
    """Keys of all whole groups of one sequence raw [tokens, heads, dim], stated from the whole sequence."""
    keys = []
    for group in range(raw.shape[0] // ratio):
        mean = raw[group * ratio : (group + 1) * ratio].float().mean(dim=0).to(raw.dtype)
        keys.append(torch.stack([norm_and_rotate(head, gain, group * ratio, rotary_dim) for head in mean]))
    return torch.stack(keys)


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("steps", [[23], [1] * 23, [5, 1, 1, 9, 2, 1, 1, 3], [2, 3, 4, 4, 5, 5]])
def test_compressed_keys_over_any_split(steps, ratio):
    """Two sequences fed in pieces (prefill, decode, drafts) leave the group keys of the whole sequence in the cache."""
    dim, heads, rotary_dim, size = 16, 2, 8, 2 * ratio
    raw = [randn(23, heads, dim, seed=s).bfloat16() for s in (1, 2)]
    gain, table = randn(dim, seed=3) * 0.1, cos_sin_table(64, rotary_dim)
    ring = torch.full((3, size, heads, dim), torch.nan).bfloat16()
    cache = torch.full((4, 16, heads, dim), 5.0).bfloat16()
    ring_of, page_of, done = [2, 0], [3, 1], 0
    for step in steps:
        positions = torch.arange(done, done + step)
        raw_k = torch.cat([raw[0][done : done + step], raw[1][done : done + step], torch.ones(1, heads, dim).bfloat16()])
        slots = torch.cat([page_of[s] * 16 + positions // ratio for s in (0, 1)] + [torch.tensor([33])])
        rings = torch.tensor([ring_of[0]] * step + [ring_of[1]] * step + [-1])  # the last token is padding
        reference.compress_indexer_keys(
            raw_k, ring, cache, torch.cat([positions, positions, torch.tensor([ratio - 1])]), table, gain, rings, slots,
            ratio=ratio, rotary_dim=rotary_dim,
        )  # fmt: skip
        done += step
    for s in (0, 1):
        want = group_keys(raw[s], gain, ratio, rotary_dim)
        got = cache[page_of[s], : want.shape[0]].float()
        assert torch.allclose(got, want, rtol=2**-7, atol=2e-3)
        assert bool((cache[page_of[s], want.shape[0] :] == 5.0).all())
        for position in range(23 - size, 23):
            assert torch.equal(ring[ring_of[s], position % size], raw[s][position])
    assert bool((cache[[0, 2]] == 5.0).all())
    assert bool(ring[1].isnan().all())  # nobody's slot


def test_rejected_drafts_are_replaced():
    dim, ratio, size = 16, 4, 8
    raw = randn(8, 1, dim, seed=1).bfloat16()
    draft = randn(3, 1, dim, seed=2).bfloat16()
    gain, table = torch.zeros(dim), cos_sin_table(16, 8)
    ring, cache = torch.zeros(1, size, 1, dim).bfloat16(), torch.zeros(1, 16, 1, dim).bfloat16()

    def feed(keys, start):
        positions = torch.arange(start, start + keys.shape[0])
        reference.compress_indexer_keys(
            keys, ring, cache, positions, table, gain, torch.zeros_like(positions), positions // ratio, ratio=ratio, rotary_dim=8
        )

    feed(raw[:2], 0)
    feed(torch.cat([raw[2:3], draft]), 2)  # positions 2..5, of which 3..5 are rejected
    feed(raw[3:], 3)
    want = group_keys(raw, gain, ratio, 8)
    assert torch.allclose(cache[0, :2].float(), want, rtol=2**-7, atol=2e-3)


def test_null_slot_is_never_written():
    dim = 16
    ring, cache = torch.full((2, 4, dim), 3.0), torch.full((1, 16, dim), 3.0).bfloat16()
    reference.compress_indexer_keys(
        randn(4, dim), ring, cache, torch.arange(4), cos_sin_table(8, 8), torch.zeros(dim), torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int64), rotary_dim=8, null_slot=0,
    )  # fmt: skip
    assert bool((ring == 3).all()) and bool((cache == 3).all())


def test_page_views_are_views():
    cache = torch.zeros(2, 16, 36, dtype=torch.uint8)
    values, scales = page_views(cache)
    scales.fill_(1.0)
    assert bool((cache.view(2, -1)[:, : 16 * 32] == 0).all())
    assert torch.equal(cache.view(2, -1)[:, 16 * 32 :].reshape(-1).view(torch.float32), torch.ones(32))
    assert values.shape == (2, 16, 1, 32)
