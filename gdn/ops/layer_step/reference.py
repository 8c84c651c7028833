"""The steps around the recurrence in plain torch: split, gates, gated norm, and one whole decode step."""

from typing import Any

import torch
from torch import Tensor

from gdn.ops.delta_rule.reference import fused_recurrent_gated_delta_rule
from gdn.ops.delta_rule.reference_replay import Ring
from gdn.ops.layer_step.reference_conv import causal_conv1d_update
from gdn.reference_modes import compute_dtype, inference_only, ranges


@inference_only
def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), beta_output = sigmoid(b); a, b [..., HV] -> float32 of their shape, contiguous."""
    dtype = compute_dtype(a)
    softplus = torch.nn.functional.softplus(a.to(dtype) + dt_bias.to(dtype), beta=beta, threshold=threshold)
    g, beta_output = -A_log.to(dtype).exp() * softplus, b.to(dtype).sigmoid()
    return g.contiguous(), beta_output.contiguous()  # an elementwise result takes the strides of its input


@inference_only
def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits [q | k | v (r heads) | z (r heads)] and [b (r) | a (r)] per key-head group into mixed_qkv, z, b, a: new tensors."""
    ratio = num_heads_v // num_heads_qk
    length = mixed_qkvz.shape[0]
    groups = mixed_qkvz.reshape(length, num_heads_qk, mixed_qkvz.shape[1] // num_heads_qk)
    q, k, v, z = groups.split([head_qk, head_qk, ratio * head_v, ratio * head_v], dim=2)
    mixed_qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    b, a = mixed_ba.reshape(length, num_heads_qk, 2 * ratio).split(ratio, dim=2)

    def new(part: Tensor, *shape: int) -> Tensor:
        # Not contiguous(): for one token or one group that is a view of the input.
        return part.reshape(length, *shape).clone(memory_format=torch.contiguous_format)

    return mixed_qkv, new(z, num_heads_v, head_v), new(b, num_heads_v), new(a, num_heads_v)


def split_merged(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_v_heads: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mixed_qkv, z, b and a as views of [q | k | v | z] and [b | a]."""
    values = num_v_heads * head_v_dim
    mixed_qkv, z = mixed_qkvz.split_with_sizes([mixed_qkvz.shape[1] - values, values], 1)
    b, a = mixed_ba.split_with_sizes([num_v_heads, num_v_heads], 1)
    return mixed_qkv, z.unflatten(1, (num_v_heads, head_v_dim)), b, a


@inference_only
def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * activation(z) over the last dim; the dtype of x, contiguous."""
    dtype = compute_dtype(x)
    wide, gate = x.to(dtype), z.to(dtype)
    gate = gate.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(gate)
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(dtype) * gate).to(x.dtype).contiguous()


@inference_only
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    layer_scale: Tensor | None = None,
    zero_centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """s = residual + x * (1 + layer_scale), rounded to their dtype, and s / sqrt(mean(s^2) + eps) * (1 + weight); contiguous.

    Without a residual s is x itself.
    """
    dtype, total = compute_dtype(x), x
    if residual is not None:
        scaled = x.to(dtype) if layer_scale is None else x.to(dtype) * (1 + layer_scale.to(dtype))
        total = (scaled + residual.to(dtype)).to(x.dtype).contiguous()
    wide, gain = total.to(dtype), weight.to(dtype)
    if zero_centred:
        gain = gain + 1
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain).to(x.dtype).contiguous(), total


@inference_only
def fused_gdn_decode(
    mixed_qkv: Tensor, z: Tensor | None, b: Tensor | None, a: Tensor | None, conv_state: Tensor, conv_weight: Tensor,
    A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor | None, ssm_state: Tensor, state_indices: Tensor, *,
    conv_bias: Tensor | None = None, query_start_loc: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    num_k_heads: int, head_k_dim: int, head_v_dim: int, scale: float | None = None, eps: float = 1e-6,
    activation: str | None = "silu", gate_activation: str = "silu", projection_layout: str = "flat",
    rounding_seed: Tensor | None = None, intermediate_states: Tensor | None = None, intermediate_indices: Tensor | None = None,
    ring: Tensor | None = None, state_tokens: Tensor | None = None, num_computed_tokens: Tensor | None = None,
    fold_every: int | None = None, fold_phase: int = 0, parent_token: Tensor | None = None, state_v_first: bool = False,
    null_slot: int = -1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.fused_gdn_decode`, as the composition of its steps; intermediate results have the dtype of mixed_qkv.

    A sequence that is padding in one step is padding in all of them.
    """
    num_v_heads = A_log.shape[0]
    if projection_layout == "interleaved":
        assert b is not None  # checked by the operator, as below
        mixed_qkv, z, b, a = fused_qkvzba_split_reshape_cat(mixed_qkv, b, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    elif projection_layout == "merged":
        assert b is not None
        mixed_qkv, z, b, a = split_merged(mixed_qkv, b, num_v_heads, head_v_dim)
    elif projection_layout == "concatenated":
        gates_at = 2 * num_k_heads * head_k_dim + 2 * num_v_heads * head_v_dim
        gates = mixed_qkv[:, gates_at : gates_at + 2 * num_v_heads]
        mixed_qkv, z, b, a = split_merged(mixed_qkv[:, :gates_at], gates, num_v_heads, head_v_dim)
    assert b is not None and a is not None
    length = mixed_qkv.shape[0]
    if query_start_loc is None:  # one token each; indices may have more rows than there are tokens
        query_start_loc = torch.arange(length + 1, dtype=torch.int32, device=mixed_qkv.device)
    if state_indices.dim() == 2:
        state_indices = _without_padding(state_indices, num_accepted_tokens, query_start_loc.shape[0] - 1, null_slot)

    replay: dict[str, Any] = {}
    if ring is not None:
        assert state_tokens is not None and num_computed_tokens is not None and fold_every is not None
        integers = Ring(
            ring, state_tokens, num_computed_tokens, num_accepted_tokens, fold_every, fold_phase, num_k_heads, null_slot
        )
        lengths = [end - start for start, end in ranges(query_start_loc)]
        most = conv_state.shape[2] - conv_weight.shape[1] + 2
        is_live = [place is not None for place in integers.places(state_indices.tolist(), lengths, most)]
        live = torch.tensor(is_live, dtype=torch.bool, device=state_indices.device)
        state_indices = state_indices[: len(lengths)].masked_fill(~live, null_slot)
        replay = {"ring": ring, "state_tokens": state_tokens, "num_computed_tokens": num_computed_tokens}
        replay |= {"fold_every": fold_every, "fold_phase": fold_phase}
    slots: dict[str, Any] = {"num_accepted_tokens": num_accepted_tokens, "null_slot": null_slot}
    if intermediate_states is not None:
        conv_state = conv_state.clone()  # the pools stay as they are
    window: dict[str, Any] = {"conv_state_indices": state_indices, "query_start_loc": query_start_loc}
    x = causal_conv1d_update(mixed_qkv, conv_state, conv_weight, conv_bias, activation, **window, **slots)
    keys = num_k_heads * head_k_dim
    parts = x.split([keys, keys, num_v_heads * head_v_dim], dim=1)
    shapes = ((num_k_heads, head_k_dim), (num_k_heads, head_k_dim), (num_v_heads, head_v_dim))
    q, k, v = (part.reshape(1, length, *shape) for part, shape in zip(parts, shapes, strict=True))
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    state: dict[str, Any] = {"ssm_state_indices": state_indices, "state_v_first": state_v_first, "rounding_seed": rounding_seed}
    o, _ = fused_recurrent_gated_delta_rule(
        q, k, v, g[None], beta[None], scale, ssm_state, None, query_start_loc, use_qk_l2norm_in_kernel=True,
        intermediate_states=intermediate_states, intermediate_indices=intermediate_indices, **state, **slots, **replay,
    )  # fmt: skip
    o = o[0]
    if norm_weight is not None:
        assert z is not None
        is_padding = (o == 0).all(-1, keepdim=True)  # z may hold anything there
        o = rms_norm_gated(o, z, norm_weight, eps, gate_activation).masked_fill(is_padding, 0)
    result = o.reshape(length, num_v_heads * head_v_dim)
    return result if out is None else out.copy_(result)


def _without_padding(state_indices: Tensor, num_accepted_tokens: Tensor | None, count: int, null_slot: int) -> Tensor:
    """Rows of the sequences, entirely null where the slot of the window (column 0) or of the state is null."""
    used = state_indices[:count]
    column = torch.zeros(count, dtype=torch.int64, device=used.device)
    if num_accepted_tokens is not None:
        column = num_accepted_tokens[:count].long() - 1
    read = used.gather(1, column.clamp(0, used.shape[1] - 1)[:, None])
    is_padding = (used[:, :1] <= null_slot) | (read <= null_slot)
    return used.masked_fill(is_padding, null_slot)
