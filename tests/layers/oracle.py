"""Attention of one sequence in float64 with a dense mask: what the attention layer must give, written without any cache.

The token-wise indexer and the ungated form, which Transformers lacks, have no other model to be compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.layers.config import HybridConfig


@dataclass(frozen=True)
class Result:
    """Output [tokens, hidden], selected positions as a mask [tokens, tokens], and the smallest gap between a selected and a left
    out score (infinite where all are selected, or where both are exactly equal and the smaller index wins)."""

    out: Tensor
    mask: Tensor
    margin: float


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def rotate(x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """x [tokens, heads, D]: dimension i turns with dimension i + rotary_dim / 2."""
    half = rotary_dim // 2
    angle = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    x1, x2 = x[..., :half], x[..., half:rotary_dim]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., rotary_dim:]], dim=-1)


def scaled_e4m3(x: Tensor) -> Tensor:
    """Values of e4m3 rows with one float32 scale each."""
    scale = (x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).float()
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


def plain_e4m3(x: Tensor) -> Tensor:
    """Values cast to e4m3."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()


def scores(
    weights: dict[str, Tensor], hidden: Tensor, config: HybridConfig, rounded: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """Scores [tokens, keys] of the indexer: of tokens (token-wise) or of whole groups. rounded: applied to queries and keys."""
    weights, hidden = {name: value.double() for name, value in weights.items()}, hidden.double()
    heads, kv_heads, dim, ratio = config.index_n_heads, config.index_kv_heads, config.index_head_dim, config.index_ratio
    name = "index_qkw_proj" if ratio == 1 else "index_qk_proj"
    projected = hidden @ weights[f"indexer.{name}.weight"].T
    q = projected[:, : heads * dim].unflatten(-1, (heads, dim))
    k = projected[:, heads * dim : (heads + kv_heads) * dim].unflatten(-1, (kv_heads, dim))
    w = projected[:, (heads + kv_heads) * dim :] if ratio == 1 else projected.new_ones(len(hidden), heads)
    count = len(hidden) // ratio
    k = k[: count * ratio].unflatten(0, (count, ratio)).mean(1)
    rotary = (config.index_rotary_dim, config.rope_theta)
    places = torch.arange(len(hidden), device=hidden.device)
    q = rotate(norm(q, weights["indexer.q_layernorm.weight"], config.rms_norm_eps), places, *rotary)
    k = rotate(norm(k, weights["indexer.k_layernorm.weight"], config.rms_norm_eps), places[:count] * ratio, *rotary)
    q, k = rounded(q), rounded(k).repeat_interleave(heads // kv_heads, dim=1)
    products = torch.einsum("thd,shd->ths", q, k).relu()
    return torch.einsum("ths,th->ts", products, w) * dim**-0.5


def select(score: Tensor, config: HybridConfig) -> tuple[Tensor, float]:
    """Mask [tokens, tokens] of the selected positions, and the smallest margin."""
    tokens, ratio, budget = len(score), config.index_ratio, config.index_topk // config.index_ratio
    mask, margin = torch.zeros(tokens, tokens, dtype=torch.bool), float("inf")
    for token in range(tokens):
        groups = (token + 1) // ratio
        order = sorted(range(groups), key=lambda j: (-float(score[token, j]), j))
        for group in order[:budget]:
            mask[token, group * ratio : (group + 1) * ratio] = True
        mask[token, groups * ratio : token + 1] = True
        if groups > budget:
            gap = float(score[token, order[budget - 1]] - score[token, order[budget]])
            margin = min(margin, gap) if gap > 0 else margin
    return mask, margin


def attention(weights: dict[str, Tensor], hidden: Tensor, config: HybridConfig, selected: Tensor | None = None) -> Result:
    """The whole layer on one sequence from its first token on: hidden [tokens, hidden], weights by the names of the layer.

    selected: mask [tokens, tokens] to attend under, instead of the indexer's.
    """
    weights = {name: value.double() for name, value in weights.items()}
    hidden = hidden.double()
    tokens, dim, heads, kv_heads = len(hidden), config.head_dim, config.num_attention_heads, config.num_key_value_heads
    q_width = heads * dim * (2 if config.attn_output_gate else 1)
    q, k, v = (hidden @ weights["qkv_proj.weight"].T).split([q_width, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim))
    gate = q[..., dim:]
    positions, rotary = torch.arange(tokens, device=hidden.device), (config.rotary_dim, config.rope_theta)
    q = rotate(norm(q[..., :dim], weights["q_norm.weight"], config.rms_norm_eps), positions, *rotary)
    k = rotate(norm(k, weights["k_norm.weight"], config.rms_norm_eps), positions, *rotary)
    mask, margin = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).tril(), float("inf")
    if selected is not None:
        mask = selected
    elif config.index_topk:
        mask, margin = select(scores(weights, hidden, config), config)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
    share = score.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("hts,shd->thd", share, v)
    if config.attn_output_gate:
        out = out * gate.sigmoid()
    return Result(out.flatten(1) @ weights["o_proj.weight"].T, mask, margin)
