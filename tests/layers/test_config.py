"""`HybridConfig.from_transformers`: what is read, and what is refused by name."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen4_exp import Qwen4ExpConfig, Qwen4ExpTextConfig

from gdn.layers import DecoderLayer, RotaryEmbedding
from gdn.layers.config import HybridConfig
from gdn.layers.named import NAMED, first_layers
from tests.layers import hf

ROTARY = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
INDEXER: dict[str, Any] = {**hf.INDEXER, "rope_parameters": ROTARY}


def test_qwen3_next() -> None:
    config = HybridConfig.from_transformers(Qwen3NextConfig(mlp_only_layers=[0], decoder_sparse_step=2))
    assert config.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.num_linear_layers, config.num_full_layers, config.place(7), config.place(6)) == (36, 12, 1, 5)
    assert (config.linear_num_key_heads, config.linear_num_value_heads, config.conv_dim) == (16, 32, 8192)
    assert (config.projection_layout, config.residual, config.index_topk) == ("interleaved", "plain", 0)
    assert (config.rotary_dim, config.rope_theta) == (64, 10_000.0)
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, False, True]


def test_qwen4_exp() -> None:
    text = Qwen4ExpTextConfig(output_gate_type="sigmoid", num_hidden_layers=4, **INDEXER)
    config = HybridConfig.from_transformers(text)
    assert (config.layer_types[3], config.gdn_gate_activation) == ("full_attention", "sigmoid")
    assert (config.residual, config.hc_count, config.hc_lowrank) == ("hyper", 4, 320)
    assert (config.index_topk, config.index_ratio, config.index_n_heads) == (2048, 4, 4)
    assert config == HybridConfig.from_transformers(Qwen4ExpConfig(text_config=text.to_dict()))


def test_token_wise_indexer_by_the_names_of_vllm() -> None:
    raw = Qwen3NextConfig().to_dict() | {"index_topk": 2048, "index_n_heads": 16, "index_head_dim": 128}
    config = HybridConfig.from_transformers(SimpleNamespace(**raw))
    assert (config.index_topk, config.index_n_heads, config.index_kv_heads, config.index_ratio) == (2048, 16, 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen3_5VisionConfig(), "model_type: expected one of .*got 'qwen3_5_vision'"),
        ({"model_type": "llama"}, "model_type: expected one of 'qwen3_next'.*got 'llama'"),
        ({"num_layers": 3}, "model_type: expected one of .*got None"),
        (
            Qwen4ExpTextConfig(ple_layer_ids=[1], eos_token_id=0, ngram_vocab_size_base=100, **INDEXER),
            r"ple_layer_ids: expected none: per-layer embeddings are not served, got \[1\]",
        ),
        (Qwen4ExpTextConfig(), "indexer_n_heads: expected a positive number"),
        (Qwen3NextConfig(attention_bias=True), "attention_bias"),
        (Qwen3NextConfig(hidden_act="gelu"), "expected one of 'silu'"),
    ],
)
def test_what_is_not_served_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridConfig.from_transformers(config)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"linear_num_value_heads": 30}, "linear_num_value_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"layer_types": ("linear_attention",)}, "layer_types"),
        ({"layer_types": ("mamba",) * 48}, "layer_types"),
        ({"num_experts_per_tok": 600}, "num_experts_per_tok"),
        ({"residual": "hyper"}, "hc_count, hc_lowrank"),
        ({"index_topk": 6, "index_ratio": 4, "index_n_heads": 4}, "index_topk"),
        ({"partial_rotary_factor": 0.001}, "partial_rotary_factor"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"num_key_value_heads": 0}, "num_attention_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], field: str) -> None:
    config = HybridConfig.from_transformers(Qwen3NextConfig())
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize(("field", "value"), [("head_dim", "128"), ("vocab_size", None), ("num_experts", True)])
def test_sizes_that_are_no_numbers_are_refused(field: str, value: Any) -> None:
    config = HybridConfig.from_transformers(Qwen3NextConfig())
    with pytest.raises(TypeError, match=f"^{field}: expected an int, got {type(value).__name__}"):
        dataclasses.replace(config, **{field: value})


def test_a_layer_that_the_model_has_not_is_refused() -> None:
    config = dataclasses.replace(first_layers(NAMED["tiny"], 1), num_experts=0)
    with pytest.raises(ValueError, match=r"^layer: expected 0 to 0 \(num_hidden_layers\), got 1"):
        DecoderLayer(config, 1, RotaryEmbedding(config))
    for layer in ("0", 0.0, True):
        with pytest.raises(TypeError, match="^layer: expected an int"):
            DecoderLayer(config, layer, RotaryEmbedding(config))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^intermediate_size: expected at least 1, got 0"):
        DecoderLayer(config, 0, RotaryEmbedding(config))


def test_ranks_are_counted_with_ints() -> None:
    with pytest.raises(TypeError, match="^size: expected an int, got float"):
        NAMED["tiny"].per_rank(2.0)  # type: ignore[arg-type]


def test_a_field_without_a_default_is_named() -> None:
    """An indexer of vLLM's names needs all of them; Transformers has no defaults for it."""
    raw = Qwen3NextConfig().to_dict() | {"index_topk": 2048, "index_head_dim": 128}
    with pytest.raises(ValueError, match="^index_n_heads: expected a value, got no such field"):
        HybridConfig.from_transformers(raw)


def test_numbers_and_flags_of_another_kind_are_refused() -> None:
    config = NAMED["tiny"]
    for field, value in (("rms_norm_eps", "1e-6"), ("rope_theta", None), ("tie_word_embeddings", 1), ("layer_scale", "no")):
        with pytest.raises(TypeError, match=f"^{field}: expected a (number|bool), got {type(value).__name__}"):
            dataclasses.replace(config, **{field: value})
    for field, number in (("rms_norm_eps", 0.0), ("rope_theta", float("nan")), ("partial_rotary_factor", -0.5)):
        with pytest.raises(ValueError, match=f"^{field}: expected a finite number above 0"):
            dataclasses.replace(config, **{field: number})
