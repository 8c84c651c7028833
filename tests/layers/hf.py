"""Small models of Transformers with random weights, run on left-padded batches: what `HybridModel` must agree with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from gdn.layers import loading
from gdn.layers.config import HybridConfig
from gdn.layers.model import HybridModel

TOLERANCE = 2e-5  # of the largest logit, float32
MODELS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen4_exp": (Qwen4ExpTextConfig, Qwen4ExpForCausalLM),
}
SMALL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
HYPER = {
    "hc_count": 3, "hc_lowrank": 12, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
# Of published checkpoints: the class of qwen4_exp has no defaults for them.
INDEXER: dict[str, Any] = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
}  # fmt: skip


def configuration(kind: str, **changes: Any) -> Any:
    config = MODELS[kind][0](**SMALL | (EXPERTS if kind != "qwen3_5" else {}) | (HYPER if kind == "qwen4_exp" else {}) | changes)
    config._attn_implementation = "eager"
    return config


def build(kind: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A model in float32 whose every parameter is random: the initial ones have norms without effect and equal decay biases."""
    model = MODELS[kind][1](configuration(kind, **changes)).eval()
    randomise(model, seed)
    return model


def randomise(module: nn.Module, seed: int) -> None:
    """Random weights that keep the size of what goes through."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                value = (value.sigmoid() * 15 + 0.1).log()
            elif parameter.dim() == 1:
                value = value * 0.2 + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
            elif "conv1d" in name:
                value = value * 0.5
            elif "embed_tokens" not in name:
                value = value * parameter.shape[-1] ** -0.5
            parameter.copy_(value)


@contextmanager
def exact_ties() -> Iterator[list[float]]:
    """The indexer's top-k, a method of a tensor of scores, takes the smaller index on ties, as the operators do.

    Yields a list for the gaps between the last selected score and the next one. Equal scores, of which zero is a frequent one,
    have none: the rule decides them on both sides.
    """
    original, gaps = Tensor.topk, list[float]()

    def topk(scores: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if scores.dim() != 1:
            return original(scores, k, dim, **options)
        values, order = scores.sort(descending=True, stable=True)
        if k < len(scores) and values[k - 1] > values[k]:
            gaps.append(float(values[k - 1] - values[k]))
        return torch.return_types.topk((values[:k], order[:k]))

    Tensor.topk = topk  # type: ignore[method-assign,assignment]
    try:
        yield gaps
    finally:
        Tensor.topk = original  # type: ignore[method-assign]


@dataclass
class LeftPadded:
    """A batch of sequences of a model of Transformers, padded on the left."""

    model: PreTrainedModel

    def __post_init__(self) -> None:
        # Smallest gap of a real token between the last selected expert, or group of the indexer, and the next one.
        self.margin = float("inf")
        self._real: Tensor | None = None
        for name, module in self.model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._watch)

    def _watch(self, module: Any, _: Any, output: Any) -> None:
        ranked = output[0].softmax(-1).sort(dim=-1, descending=True).values
        if module.top_k == ranked.shape[1]:
            return
        gaps = (ranked[:, module.top_k - 1] - ranked[:, module.top_k])[self._real]
        self.margin = min(self.margin, float(gaps.min()))

    def prefill(self, prompts: list[list[int]]) -> list[Tensor]:
        """Logits [length, vocab] of each prompt."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        self._mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self._cache = DynamicCache(config=self.model.config)
        logits = self._run(ids, (self._mask.cumsum(1) - 1).clamp(min=0), self._mask)
        return [row[longest - len(prompt) :] for row, prompt in zip(logits, prompts, strict=True)]

    def decode(self, tokens: list[int]) -> Tensor:
        """Logits [sequences, vocab] of one new token each."""
        ones = torch.ones(len(tokens), 1, dtype=torch.int64)
        self._mask = torch.cat([self._mask, ones], dim=1)
        return self._run(torch.tensor(tokens)[:, None], self._mask.sum(1, keepdim=True) - 1, ones)[:, 0]

    def _run(self, ids: Tensor, positions: Tensor, real: Tensor) -> Tensor:
        self._real = real.bool().flatten()
        with torch.inference_mode(), exact_ties() as gaps:
            result = self.model(
                input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache, use_cache=True
            )
        self.margin = min([self.margin, *gaps])
        return result.logits


def model_of(reference: Any) -> tuple[HybridModel, HybridConfig]:
    """Our model with the tensors of a model of Transformers."""
    config = HybridConfig.from_transformers(reference.config)
    model = HybridModel(config, dtype=torch.float32)
    loading.load(model, reference.state_dict(), config)
    return model, config


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())
