"""Split, gates and gated norm against direct statements, and the decode step against its parts."""

import math
from functools import partial

import pytest
import torch

from gdn.testing.compare import error, same_bits
from tests.reference import calls
from tests.reference.calls import Arguments
from tests.reference.step_calls import F64, HV, H, K, V, W, flat_call, in_layout
from tests.references import reference

randn = partial(calls.randn, dtype=F64)


def test_gating_by_its_formula() -> None:
    a = torch.tensor([[-40.0, -15.0, 0.0, 25.0], [19.9, 20.1, 3.0, -3.0]], dtype=torch.float32)
    b = randn(2, HV, dtype=torch.float32)
    A_log, dt_bias = randn(HV, seed=1, dtype=torch.float32), torch.zeros(HV)
    g, beta = reference.fused_gdn_gating(A_log, a, b, dt_bias)
    assert g.dtype == beta.dtype == torch.float32 and g.shape == a.shape
    for i in range(2):
        for h in range(HV):
            x = float(a[i, h])
            softplus = math.log1p(math.exp(x)) if x <= 20 else x
            assert float(g[i, h]) == pytest.approx(-math.exp(float(A_log[h])) * softplus, rel=1e-5, abs=0)
            assert float(beta[i, h]) == pytest.approx(1 / (1 + math.exp(-float(b[i, h]))), rel=1e-5)


def test_gating_beta_and_threshold() -> None:
    a, A_log, dt_bias = torch.tensor([[1.0, 3.0]]), torch.zeros(2), torch.tensor([0.0, 1.0])
    g, _ = reference.fused_gdn_gating(A_log, a, a, dt_bias, beta=2.0, threshold=5.0)
    assert g[0].tolist() == pytest.approx([-math.log1p(math.exp(2.0)) / 2, -4.0])


def test_split_by_places() -> None:
    ratio, length = HV // H, 3
    width = 2 * K + 2 * ratio * V
    mixed = torch.arange(length * H * width, dtype=torch.float32).view(length, H * width)
    ba = torch.arange(length * 2 * HV, dtype=torch.float32).view(length, 2 * HV)
    qkv, z, b, a = reference.fused_qkvzba_split_reshape_cat(mixed, ba, H, HV, K, V)
    for t in range(length):
        for h in range(H):
            base = h * width
            assert torch.equal(qkv[t, h * K : (h + 1) * K], mixed[t, base : base + K])
            assert torch.equal(qkv[t, (H + h) * K : (H + h + 1) * K], mixed[t, base + K : base + 2 * K])
            for r in range(ratio):
                head = h * ratio + r
                v_start, z_start = base + 2 * K + r * V, base + 2 * K + (ratio + r) * V
                column = 2 * H * K + head * V
                assert torch.equal(qkv[t, column : column + V], mixed[t, v_start : v_start + V])
                assert torch.equal(z[t, head], mixed[t, z_start : z_start + V])
                assert b[t, head] == ba[t, h * 2 * ratio + r] and a[t, head] == ba[t, h * 2 * ratio + ratio + r]
    assert all(x.is_contiguous() for x in (qkv, z, b, a))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm_by_its_formula(activation: str) -> None:
    x, z, weight = randn(5, HV, V), randn(5, HV, V, seed=1), randn(V, seed=2)
    got = reference.rms_norm_gated(x, z, weight, 1e-3, activation)
    gate = 1 / (1 + (-z).exp()) * (z if activation == "silu" else 1)
    expected = x / ((x * x).mean(-1, keepdim=True) + 1e-3).sqrt() * weight * gate
    assert error(got, expected, groups=2).within(1e-13)
    half = reference.rms_norm_gated(x.bfloat16(), z, weight, 1e-3, activation)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("zero_centred", [True, False])
def test_norm_of_the_residual_sum_by_its_formula(zero_centred: bool) -> None:
    x, residual, weight = randn(5, HV, V), randn(5, HV, V, seed=1), randn(V, seed=2)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-3, zero_centred=zero_centred)
    expected = (x + residual) / ((x + residual).square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + zero_centred)
    assert torch.equal(total, x + residual) and error(normed, expected, groups=2).within(1e-13)
    half = reference.add_rms_norm(x.bfloat16(), residual.bfloat16(), weight, 1e-3, zero_centred=zero_centred)
    assert torch.equal(half[1], (x.bfloat16().float() + residual.bfloat16().float()).bfloat16())
    again = reference.add_rms_norm(half[1], None, weight, 1e-3, zero_centred=zero_centred)
    assert torch.equal(half[0], again[0]) and again[1] is half[1]  # the norm is that of the rounded sum
    scale = randn(V, seed=3)
    scaled = reference.add_rms_norm(x, residual, weight, 1e-3, layer_scale=scale, zero_centred=zero_centred)
    folded = reference.add_rms_norm(x * (1 + scale), residual, weight, 1e-3, zero_centred=zero_centred)
    assert all(map(torch.equal, scaled, folded))
    once = reference.add_rms_norm(x.bfloat16(), residual.bfloat16(), weight, layer_scale=scale.bfloat16())[1]
    exact = residual.bfloat16().float() + x.bfloat16().float() * (1 + scale.bfloat16().float())
    assert torch.equal(once, exact.bfloat16())  # rounded once


def decode_arguments(tokens: int, columns: int = 0) -> Arguments:
    indices = torch.tensor([5, 3, 7, 1], dtype=torch.int32)
    if columns:
        indices = torch.tensor([[5, 6, 8], [3, 4, 2], [7, 0, 1]], dtype=torch.int32)
    return flat_call(tokens, "conv_state", W - 1 + max(columns - 1, 0), state_indices=indices)


def by_hand(arguments: Arguments, n: int, row: int) -> torch.Tensor:
    """The output of one token of sequence n in row `row`, and the effect on its first slot, on copies; [HV, V]."""
    slot = int(arguments["state_indices"][n])
    window = torch.cat([arguments["conv_state"][slot, :, : W - 1], arguments["mixed_qkv"][row, :, None]], dim=1)
    x = torch.nn.functional.silu((window * arguments["conv_weight"]).sum(1))
    q, k, v = x[: H * K].view(H, K), x[H * K : 2 * H * K].view(H, K), x[2 * H * K :].view(HV, V)
    result = torch.zeros(HV, V, dtype=F64)
    for h in range(HV):
        qh, kh = (y[h // (HV // H)] for y in (q, k))
        qh, kh = qh / (qh @ qh + 1e-6).sqrt() * K**-0.5, kh / (kh @ kh + 1e-6).sqrt()
        state = arguments["ssm_state"][slot, h]
        x_gate = arguments["a"][row, h] + arguments["dt_bias"][h]
        state = (-arguments["A_log"][h].exp() * torch.log1p(x_gate.exp())).exp() * state
        u = arguments["b"][row, h].sigmoid() * (v[h] - state.T @ kh)
        state = state + torch.outer(kh, u)
        o = state.T @ qh
        z = arguments["z"][row, h]
        result[h] = o / ((o * o).mean() + 1e-6).sqrt() * arguments["norm_weight"] * z * z.sigmoid()
    return result


def test_decode_by_hand() -> None:
    arguments = decode_arguments(3)
    arguments["state_indices"][1] = -1
    arguments["z"][1] = torch.nan
    expected = [by_hand(arguments, n, n) for n in (0, 2)]
    before = {name: arguments[name].clone() for name in ("conv_state", "ssm_state")}
    got = reference.fused_gdn_decode(**arguments)
    assert got.shape == (3, HV * V)
    assert bool((got[1] == 0).all())
    for row, want in zip((0, 2), expected, strict=True):
        assert error(got[row].view(HV, V), want, groups=1).within(1e-12)
    for name, pool in before.items():
        others = [0, 1, 2, 3, 4, 6, 8]  # slot 1 belongs to a row of the indices that has no token
        assert same_bits(arguments[name][others], pool[others])
    assert torch.equal(arguments["conv_state"][7, :, 2], arguments["mixed_qkv"][2])


@pytest.mark.parametrize("layout", ["interleaved", "merged", "concatenated"])
def test_decode_layouts_agree(layout: str) -> None:
    flat = decode_arguments(4)
    other = in_layout(flat, layout)
    assert torch.equal(reference.fused_gdn_decode(**flat), reference.fused_gdn_decode(**other))
    assert torch.equal(flat["ssm_state"], other["ssm_state"]) and torch.equal(flat["conv_state"], other["conv_state"])


def test_speculative_decode_equals_one_token_at_a_time() -> None:
    """Verify 3 tokens, accept 2 of them, verify 2 more: the same as decoding the accepted four one by one."""
    rows = decode_arguments(5)
    one = {**decode_arguments(1), "state_indices": torch.tensor([3])}
    singles = []
    accepted_rows = [0, 1, 3, 4]
    for row in accepted_rows:
        for name in ("mixed_qkv", "z", "b", "a"):
            one[name] = rows[name][row : row + 1]
        singles.append(reference.fused_gdn_decode(**one))
    spec = decode_arguments(3, columns=3)
    plain = decode_arguments(1)
    spec["conv_state"][3, :, : W - 1] = plain["conv_state"][3]
    spec["ssm_state"][3] = plain["ssm_state"][3]
    spec["state_indices"] = torch.tensor([[3, 4, 2]])
    results = []
    for start, end, accepted in ((0, 3, 1), (3, 5, 2)):
        for name in ("mixed_qkv", "z", "b", "a"):
            spec[name] = rows[name][start:end]
        spec["query_start_loc"] = torch.tensor([0, end - start])
        spec["num_accepted_tokens"] = torch.tensor([accepted], dtype=torch.int32)
        results.append(reference.fused_gdn_decode(**spec))
    got = torch.cat([results[0][:2], results[1]])
    assert error(got, torch.cat(singles), groups=1).within(1e-12)


def test_decode_out() -> None:
    first, second = decode_arguments(2), decode_arguments(2)
    out = torch.full((2, HV * V), torch.nan, dtype=F64)
    result = reference.fused_gdn_decode(**first, out=out)
    assert result is out and torch.equal(out, reference.fused_gdn_decode(**second))
