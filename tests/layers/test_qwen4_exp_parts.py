"""Attention layer and gated residual streams against Transformers' modules of qwen4_exp, and of Qwen3-Next (no indexer)."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from gdn.layers import hyper, indexer, sparse_attention
from gdn.layers.config import HybridConfig
from tests.layers import hf
from tests.layers.attention_cases import deviation, prompts
from tests.layers.paged import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 2e-5
NEAR_TIES = 1e-5
LEFT_OUT: tuple[int, ...] = ()  # seeds with a smaller gap between scores
LENGTHS = [300, 1, 17, 77]

SMALL: dict[str, object] = dict(
    indexer_budget=32, hc_count=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
)  # fmt: skip
# What differs from it.
CONFIGS: dict[str, dict[str, object]] = {
    "as it is": {},
    "budget 16, groups of 2": dict(indexer_budget=16, indexer_compress_ratio=2, num_key_value_heads=1),
    "budget 64, groups of 4": dict(indexer_budget=64, num_attention_heads=6),
    "budget 16, one head": dict(indexer_budget=16, indexer_n_heads=1, indexer_head_dim=16),
}


def loaded(layer: nn.Module, theirs: nn.Module) -> None:
    """Tensors of one whole attention layer, by the tables of the modules."""
    state = theirs.state_dict()
    below = {f"indexer.{name}": tuple((f"indexer.{t}", cut) for t, cut in parts) for name, parts in indexer.TENSORS.items()}
    tables = sparse_attention.TENSORS | below
    made = {name: torch.cat([state[t] for t, _ in tables[name]]) for name in layer.state_dict()}
    assert {t for name in made for t, _ in tables[name]} == set(state)
    layer.load_state_dict(made)


def run_theirs(module: nn.Module, rotary: nn.Module, hidden: Tensor) -> Tensor:
    tokens = len(hidden)
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
    embeddings = rotary(hidden[None], torch.arange(tokens)[None])
    with torch.inference_mode():
        return module(hidden[None], embeddings, mask)[0][0]


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_of_qwen4_exp(name: str) -> None:
    theirs_config = hf.configuration("qwen4_exp", **SMALL | CONFIGS[name])
    config = HybridConfig.from_transformers(theirs_config)
    seed = next(seed for seed in range(9) if seed not in LEFT_OUT)
    theirs = qwen4_exp.Qwen4ExpTextAttention(theirs_config, 1)
    hf.randomise(theirs, seed)
    layer = sparse_attention.SparseAttention(config)
    loaded(layer, theirs)
    rows = prompts(LENGTHS, config.hidden_size, seed)
    with hf.exact_ties() as gaps:
        want = [run_theirs(theirs, qwen4_exp.Qwen4ExpTextRotaryEmbedding(theirs_config), one) for one in rows]
    assert min(gaps) >= NEAR_TIES, "a near tie: add the seed to LEFT_OUT"
    for got, expected in zip(Batch(layer, config, len(rows), 304).step(rows), want, strict=True):
        assert deviation(got, expected) < LIMIT
    decoded = Batch(layer, config, len(rows), 304)
    heads = [one[: len(one) - min(32, len(one) - 1)] for one in rows]
    parts = [[one] for one in decoded.step(heads)]
    for _ in range(32):
        new = [one[old : old + 1] for one, old in zip(rows, decoded.lengths, strict=True)]
        new = [one if len(one) else torch.zeros(1, config.hidden_size) for one in new]  # past the end: not compared
        for kept, one in zip(parts, decoded.step(new, on_host=False), strict=True):
            kept.append(one)
    for kept, expected in zip(parts, want, strict=True):
        assert deviation(torch.cat(kept)[: len(expected)], expected) < LIMIT


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_qwen3_next(kv_heads: int) -> None:
    theirs_config = qwen3_next.Qwen3NextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=32, num_hidden_layers=4, vocab_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, attn_implementation="eager",
    )  # fmt: skip
    config = HybridConfig.from_transformers(theirs_config)
    theirs = qwen3_next.Qwen3NextAttention(theirs_config, 3)
    hf.randomise(theirs, 0)
    layer = sparse_attention.SparseAttention(config)
    loaded(layer, theirs)
    rows = prompts([90, 1, 33], config.hidden_size)
    for got, one in zip(Batch(layer, config, 3, 96).step(rows), rows, strict=True):
        want = run_theirs(theirs, qwen3_next.Qwen3NextRotaryEmbedding(theirs_config), one)
        assert deviation(got, want) < LIMIT


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("injects", [True, False])
def test_gated_residual(streams: int, injects: bool) -> None:
    theirs_config = hf.configuration("qwen4_exp", hc_count=streams)
    theirs = qwen4_exp.Qwen4ExpTextGatedResidual(theirs_config, use_combine=injects)
    hf.randomise(theirs, 0)
    ours = hyper.HyperConnection(HybridConfig.from_transformers(theirs_config), injects=injects)
    names = [name for name in hyper.TENSORS if injects or "inject" not in name]
    ours.load_state_dict({name: theirs.state_dict()[hyper.TENSORS[name][0][0]] for name in names})
    x = torch.randn(11, theirs_config.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden = ours.split(x)
    assert torch.equal(hidden, torch.cat([x] * streams, dim=1))
    hidden = hidden + torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    found = theirs(hidden)
    mixed, weights = ours(hidden)
    if not injects:
        assert weights is None and deviation(mixed, found) < 1e-6
        return
    want, kept, injection = found
    assert deviation(mixed, want) < 1e-6 and deviation(weights, injection) < 1e-6
    assert deviation(ours.inject(hidden, x, weights), kept + (x.unsqueeze(-2) * injection.unsqueeze(-1)).flatten(-2)) < 1e-6
