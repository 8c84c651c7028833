"""Hybrid models of three layers with random weights, small but with head dims that the kernels serve."""

from typing import Any

import torch

from gdn.layers import HybridConfig, HybridModel
from gdn.layers.random_weights import fill_randomly

FORMS: dict[str, dict[str, Any]] = {
    "token-wise": {"index_n_heads": 16},
    "compressed": {"index_n_heads": 4, "index_ratio": 4},
    "dense": {"index_topk": 0},
}


def small_model(form: str, device: torch.device) -> HybridModel:
    """A model in bfloat16. form: of its attention, one of `FORMS`."""
    fields: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 256,
        "layer_types": ("linear_attention", "full_attention", "linear_attention"), "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "index_topk": 128, "index_head_dim": 128,
    }  # fmt: skip
    model = HybridModel(HybridConfig(**{**fields, **FORMS[form]}), device=device, dtype=torch.bfloat16)
    fill_randomly(model)
    return model
