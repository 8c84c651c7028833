"""Transformers' qwen4_exp for comparison: small configurations, random weights, and its top-k with ties to the smaller index."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

_BASE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=6, num_experts_per_tok=2,
    hc_count=4, hc_lowrank=12, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=32,
    indexer_compress_ratio=4, ple_layer_ids=[], rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
)  # fmt: skip


def text_config(**changes: Any) -> Qwen4ExpTextConfig:
    config = Qwen4ExpTextConfig(**_BASE | changes)
    config._attn_implementation = "eager"
    return config


def randomise(module: nn.Module, seed: int) -> None:
    """Random weights that keep the size of what goes through; norms with gains that are not 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(noise * 0.5)
            elif parameter.dim() == 1:
                parameter.copy_((1.0 if "linear_attn.norm" in name else 0.0) + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * (0.5 if "conv1d" in name else parameter.shape[-1] ** -0.5))


@dataclass
class Margins:
    """Smallest gap seen between a selected and a left out score, by where it was."""

    indexer: float = float("inf")
    router: float = float("inf")

    @property
    def least(self) -> float:
        return min(self.indexer, self.router)


@contextlib.contextmanager
def stable_topk() -> Iterator[Margins]:
    """The indexer's top-k (a method of 1-D scores) takes the smaller index where scores are equal; margins are recorded.

    Exactly equal scores, such as the zeros after the ReLU, have no margin: the rule decides them on both sides.
    """
    method, function, margins = Tensor.topk, torch.topk, Margins()

    def gap(values: Tensor, k: int) -> float:
        ordered = values.sort(dim=-1, descending=True).values
        if k >= ordered.shape[-1]:
            return float("inf")
        gaps = ordered[..., k - 1] - ordered[..., k]
        gaps = gaps[gaps > 0]
        return float(gaps.min()) if gaps.numel() else float("inf")

    def indexer_topk(self: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if self.dim() != 1:
            return method(self, k, dim=dim, **options)
        margins.indexer = min(margins.indexer, gap(self, k))
        values, order = self.sort(dim=0, descending=True, stable=True)
        return torch.return_types.topk((values[:k], order[:k]))

    def router_topk(self: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        margins.router = min(margins.router, gap(self, k))
        return function(self, k, dim=dim, **options)

    Tensor.topk, torch.topk = indexer_topk, router_topk  # type: ignore[method-assign,assignment]
    try:
        yield margins
    finally:
        Tensor.topk, torch.topk = method, function  # type: ignore[method-assign]
