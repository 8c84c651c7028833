"""Configurations of published hybrid models by name, for runs without a checkpoint.

The heads of models whose operators are explained and tuned are those of `gdn.models`. The other numbers are the defaults of
Transformers 5.23: Qwen3NextConfig, Qwen3_5MoeTextConfig and Qwen4ExpTextConfig. Those leave out the indexers: the token-wise
one of Qwen3-Next and the compressed one of Qwen3.8-Flash-Next have the sizes of their sparse variants (16 heads, respectively 4
heads over groups of 4 tokens; 2048 tokens each).
"""

from dataclasses import replace
from typing import Any

from gdn.layers.config import HybridConfig
from gdn.models import QWEN3_NEXT_80B, TINY, ModelShape


def first_layers(config: HybridConfig, layers: int) -> HybridConfig:
    """The same model with its first layers alone.

    Raises
    ------
    ValueError
        Where there are not as many.
    """
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"layers: expected 1 to {config.num_hidden_layers}, got {layers}")
    return replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])


def _types(layers: int) -> dict[str, Any]:
    """Every fourth layer is full attention."""
    types = tuple("linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers))
    return {"num_hidden_layers": layers, "layer_types": types}


def _of_shape(shape: ModelShape) -> dict[str, Any]:
    """Fields that a model's shapes give."""
    return {
        "hidden_size": shape.hidden_size, "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "partial_rotary_factor": shape.index_rotary_dim / shape.head_dim,
        "linear_num_key_heads": shape.num_k_heads, "linear_num_value_heads": shape.num_v_heads,
        "linear_key_head_dim": shape.head_k_dim, "linear_value_head_dim": shape.head_v_dim,
        "linear_conv_kernel_dim": shape.conv_width, "index_n_heads": shape.index_num_heads,
        "index_head_dim": shape.index_head_dim, "index_topk": shape.index_topk,
    }  # fmt: skip


_QWEN3_NEXT: dict[str, Any] = {
    **_of_shape(QWEN3_NEXT_80B), **_types(48), "vocab_size": 151_936, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5632,
    "projection_layout": "interleaved",
}  # fmt: skip
# Qwen3.5 and Qwen3.8-Flash-Next share these heads and widths.
_LATER: dict[str, Any] = {**_QWEN3_NEXT, **_types(40), "vocab_size": 248_320, "intermediate_size": 0, "projection_layout": "flat"}
_TINY: dict[str, Any] = {
    **_of_shape(TINY), **_types(8), "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "max_position_embeddings": 2048,
}  # fmt: skip

NAMED: dict[str, HybridConfig] = {
    QWEN3_NEXT_80B.name: HybridConfig(**_QWEN3_NEXT),
    "qwen3.5-35b": HybridConfig(**{**_LATER, "num_experts": 256, "num_experts_per_tok": 8, "index_topk": 0, "index_n_heads": 0}),
    "qwen3.8-flash-next": HybridConfig(
        **{**_LATER, "residual": "hyper", "hc_count": 4, "hc_lowrank": 320, "index_n_heads": 4, "index_ratio": 4}
    ),
    TINY.name: HybridConfig(**_TINY),
}
