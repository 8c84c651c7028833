"""The smallest configurations that have every cache."""

from typing import Any

from gdn.layers import HybridConfig


def small_config(**changes: Any) -> HybridConfig:
    """One Gated DeltaNet layer and one attention layer with an indexer."""
    fields: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention"),
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "index_topk": 16, "index_n_heads": 2,
        "index_head_dim": 16,
    }  # fmt: skip
    return HybridConfig(**{**fields, **changes})
