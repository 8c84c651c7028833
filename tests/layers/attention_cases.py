"""Small attention layers with random weights, and the forms of the indexer that the tests go through."""

import torch
from torch import Tensor

from gdn.layers.config import HybridConfig
from gdn.layers.sparse_attention import SparseAttention

_BASE = dict(
    vocab_size=64, hidden_size=48, num_hidden_layers=1, layer_types=("full_attention",), num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=8,
    linear_value_head_dim=8, max_position_embeddings=512, partial_rotary_factor=0.5,
)  # fmt: skip
_TOKEN_WISE = dict(index_topk=16, index_n_heads=4, index_head_dim=32)
_COMPRESSED = dict(index_topk=32, index_n_heads=4, index_head_dim=32, index_ratio=4)

CASES: dict[str, dict[str, object]] = {
    "no indexer": {},
    "no indexer, no gate": dict(attn_output_gate=False, num_attention_heads=3, num_key_value_heads=1),
    "token-wise": _TOKEN_WISE,
    "token-wise, no gate": _TOKEN_WISE | dict(attn_output_gate=False, index_topk=40),
    "token-wise, two key heads": _TOKEN_WISE | dict(index_kv_heads=2, index_topk=33),
    "token-wise, few rotated dims": _TOKEN_WISE | dict(index_head_dim=8, index_n_heads=8, index_topk=48),
    "compressed": _COMPRESSED,
    "compressed, no gate": _COMPRESSED | dict(attn_output_gate=False, index_topk=16, index_n_heads=2),
    "compressed, two key heads": _COMPRESSED | dict(index_kv_heads=2),
    "compressed, groups of 2": _COMPRESSED | dict(index_ratio=2, index_topk=48),
}


def config(case: str) -> HybridConfig:
    return HybridConfig(**_BASE | CASES[case])  # type: ignore[arg-type]


def layer_of(made: HybridConfig, seed: int = 0, use_fp8: bool | None = None) -> SparseAttention:
    """A layer whose weights keep the size of what goes through."""
    generator = torch.Generator().manual_seed(seed)
    layer = SparseAttention(made, use_fp8_indexer=use_fp8)
    for name, parameter in layer.named_parameters():
        scale = 0.3 if "norm" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return layer


def prompts(lengths: list[int], hidden: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, hidden, generator=generator) for length in lengths]


def deviation(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest element of what is wanted."""
    assert got.shape == want.shape
    return float((got - want).detach().abs().max() / want.detach().abs().max()) if got.numel() else 0.0
