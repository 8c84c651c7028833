"""Norms, rotary embedding, MLPs, and what a model refuses."""

from dataclasses import replace

import pytest
import torch

from gdn.layers import HybridConfig, HybridModel, RMSNorm, RotaryEmbedding, mlp
from gdn.layers.loading import load
from gdn.layers.mlp import MoE
from gdn.layers.random_weights import RandomTensors, fill_randomly
from tests.layers import hf
from tests.layers.serving import Server


def config_of(kind: str = "qwen3_next", **changes: int) -> HybridConfig:
    return HybridConfig.from_transformers(hf.build(kind, 0, **changes).config)


def norm_of(weight: torch.Tensor) -> RMSNorm:
    norm = RMSNorm(len(weight), dtype=weight.dtype)
    norm.weight.copy_(weight)
    return norm


def test_norm_of_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight, scale = (torch.randn(*shape, generator=generator) for shape in ((5, 64), (5, 64), (64,), (64,)))
    for layer_scale, total in ((None, x + residual), (scale, x * (1 + scale) + residual)):
        wide = total.double()
        wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
        normed, found = norm_of(weight).add(x, residual, layer_scale)
        torch.testing.assert_close(found, total)
        torch.testing.assert_close(normed, wanted.float())
    half = norm_of(weight.bfloat16())(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), norm_of(weight)(x), rtol=3e-2, atol=3e-2)


def test_first_layer_has_no_residual() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(8, generator=generator)
    normed, residual = norm_of(weight).add(x, None)
    assert torch.equal(normed, norm_of(weight)(x)) and residual is x
    torch.testing.assert_close(normed, norm_of(weight).add(x, torch.zeros(3, 8))[0])


def test_rotary_embedding_turns_pairs_by_the_distance() -> None:
    rotary = RotaryEmbedding(config_of())
    q, k = torch.randn(2, 1, 4, 32, generator=torch.Generator().manual_seed(0))

    def product(first: int, second: int) -> torch.Tensor:
        return (rotary(q[None, 0], torch.tensor([first])) * rotary(k[None, 0], torch.tensor([second]))).sum(-1)

    torch.testing.assert_close(product(7, 3), product(107, 103), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(product(7, 3), product(8, 3))
    turned = rotary(q, torch.tensor([5]))
    assert torch.equal(turned[..., 8:], q[..., 8:]) and not torch.allclose(turned[..., :8], q[..., :8])


def test_rotary_positions_are_in_the_table() -> None:
    """A negative position is not the last row's, and one after the table is named."""
    rotary, q = RotaryEmbedding(config_of()), torch.zeros(2, 1, 32)
    rows = rotary.cos_sin.shape[0]
    for position, expected in ((-1, "positions >= 0"), (rows, f"positions below {rows} .cos_sin has {rows} rows.")):
        with pytest.raises(ValueError, match=rf"positions: expected {expected}, got {position} at \[1\]"):
            rotary(q, torch.tensor([0, position]))
    rotary(q, torch.tensor([0, rows - 1]))


def test_rotary_table_stays_float32() -> None:
    rotary = RotaryEmbedding(config_of())
    table = rotary.cos_sin.clone()
    assert torch.equal(rotary.to(torch.bfloat16).cos_sin, table)
    assert torch.equal(RotaryEmbedding(config_of(), device="meta").to_empty(device="cpu").cos_sin, table)


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_experts_grouped_and_plain_are_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(num_experts=11, num_experts_per_tok=3)
    moe = MoE(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    hidden = torch.randn(tokens, config.hidden_size, generator=generator)
    weights, experts = moe.route(hidden)
    torch.testing.assert_close(weights.sum(-1), torch.ones(tokens))
    # In bfloat16, as on a GPU: the products round alike, only the order of the sum over experts differs.
    moe, hidden, weights = moe.bfloat16(), hidden.bfloat16(), weights.bfloat16()
    grouped, plain = moe._grouped(hidden, weights, experts), moe._every_expert(hidden, weights, experts)
    torch.testing.assert_close(grouped, plain, rtol=3e-2, atol=3e-2)
    monkeypatch.setattr(mlp, "_MOST_ELEMENTS", 7 * 11 * config.hidden_size)  # seven tokens at a time
    torch.testing.assert_close(moe._every_expert(hidden, weights, experts), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_expert_that_overflows_reaches_the_tokens_that_select_it_alone(dtype: torch.dtype) -> None:
    config = config_of(num_experts=8, num_experts_per_tok=2)
    moe = MoE(config, dtype=dtype)
    fill_randomly(moe)
    hidden = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, experts = moe.route(hidden)
    wanted, forms = moe(hidden), [moe] if dtype != torch.bfloat16 else [moe, lambda one: moe._grouped(one, *moe.route(one))]
    moe.gate_up_proj[3] = torch.finfo(dtype).max / 2
    selects = (experts == 3).any(dim=-1)
    assert 0 < int(selects.sum()) < 40
    for form in forms:
        found = form(hidden)
        assert found[~selects].isfinite().all() and not found[selects].isfinite().any(dim=-1).all()
    assert torch.equal(moe(hidden)[~selects], wanted[~selects])


def test_image_positions_are_refused() -> None:
    model = HybridModel(config_of("qwen3_5"), dtype=torch.float32)
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"positions: expected shape \[4\].*image positions are not served.*\[3, 4\]"):
        model(ids, ids.expand(3, 4), None, None)
    with pytest.raises(ValueError, match=r"input_ids: expected shape \[tokens\]"):
        model(ids[None], ids[None], None, None)


def test_random_weights_keep_signals_and_states_near_one() -> None:
    model = HybridModel(config_of(), dtype=torch.float32)
    fill_randomly(model, seed=3)
    again = HybridModel(config_of(), dtype=torch.float32)
    fill_randomly(again, seed=3)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    server = Server(model, model.config, 1, 90)
    logits = server.step([list(range(90))])[0]
    assert 0.3 < float(logits.std()) < 3.0
    states = server.caches.gdn.ssm_states[0][server.slots[0]]
    assert 0.01 < float(states.abs().max()) < 10.0


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen4_exp"])
def test_a_random_checkpoint(kind: str) -> None:
    """The same tensors at every look-up, others with another seed or name, and the scales of `fill_randomly`."""
    config = replace(config_of(kind), layer_scale=kind == "qwen3_5")
    tensors = RandomTensors(config, seed=3)
    assert all(torch.equal(tensors[name], tensors[name]) for name in tensors)
    assert not any(torch.equal(one, RandomTensors(config, seed=4)[name]) for name, one in tensors.items())
    first, third = (tensors[f"layers.{layer}.linear_attn.out_proj.weight"] for layer in (0, 2))
    assert first.shape == third.shape and not torch.equal(first, third)
    drawn, filled = (HybridModel(config, dtype=torch.float32) for _ in range(2))
    load(drawn, tensors, config)
    fill_randomly(filled, seed=3)
    for (name, one), other in zip(drawn.named_parameters(), filled.parameters(), strict=True):
        if one.numel() >= 64:
            assert float(one.std()) == pytest.approx(float(other.std()), rel=0.4), name
            assert float((one.mean() - other.mean()).abs()) < float(other.std()), name


def test_layer_scale_is_a_factor_of_each_part() -> None:
    config = replace(config_of("qwen3_5"), layer_scale=True)
    scaled, folded = (HybridModel(one, dtype=torch.float32) for one in (config, replace(config, layer_scale=False)))
    fill_randomly(scaled, seed=1)
    folded.load_state_dict({name: value for name, value in scaled.state_dict().items() if "layer_scale" not in name})
    with torch.no_grad():
        for layer, other in zip(scaled.layers, folded.layers, strict=True):
            mixer = other.linear_attn.out_proj if layer.layer_type == "linear_attention" else other.self_attn.o_proj.weight
            mixer.mul_(1 + layer.attn_layer_scale[:, None])
            other.mlp.down_proj.mul_(1 + layer.mlp_layer_scale[:, None])
    found, wanted = (Server(one, one.config, 1, 30).step([list(range(30))])[0] for one in (scaled, folded))
    assert hf.error(found, wanted) < hf.TOLERANCE
