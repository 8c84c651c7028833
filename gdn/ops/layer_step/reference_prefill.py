"""The whole prefill step of a Gated DeltaNet layer between its projections, in plain torch."""

from typing import Any

import torch
from torch import Tensor

from gdn.ops.delta_rule.reference import chunk_gated_delta_rule, largest_chunk_operand
from gdn.ops.layer_step.reference import fused_gdn_gating, fused_qkvzba_split_reshape_cat, rms_norm_gated, split_merged
from gdn.ops.layer_step.reference_conv import causal_conv1d_fn
from gdn.reference_modes import inference_only, ranges


@inference_only
def fused_gdn_prefill(
    mixed_qkv: Tensor, z: Tensor | None, b: Tensor, a: Tensor | None, conv_states: Tensor, conv_weight: Tensor, A_log: Tensor,
    dt_bias: Tensor, norm_weight: Tensor | None, ssm_state: Tensor, state_indices: Tensor, *, query_start_loc: Tensor,
    has_initial_state: Tensor | None = None, conv_bias: Tensor | None = None, num_k_heads: int, head_k_dim: int, head_v_dim: int,
    scale: float | None = None, eps: float = 1e-6, activation: str | None = "silu", gate_activation: str = "silu",
    projection_layout: str = "flat", checkpoint_offsets: Tensor | None = None, checkpoint_slots: Tensor | None = None,
    checkpoint_states: Tensor | None = None, checkpoint_windows: Tensor | None = None, state_v_first: bool = False,
    null_slot: int = -1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.fused_gdn_prefill`, as the composition of its steps; intermediate results have the dtype of mixed_qkv."""
    num_v_heads = A_log.shape[0]
    if projection_layout == "interleaved":
        mixed_qkv, z, b, a = fused_qkvzba_split_reshape_cat(mixed_qkv, b, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    elif projection_layout == "merged":
        mixed_qkv, z, b, a = split_merged(mixed_qkv, b, num_v_heads, head_v_dim)
    assert a is not None  # checked by the operator
    both: dict[str, Any] = {"has_initial_state": has_initial_state, "null_slot": null_slot}
    # With a tensor for one kind alone the other kind is not kept.
    checkpoints: dict[str, Any] = {"checkpoint_offsets": checkpoint_offsets, "checkpoint_slots": checkpoint_slots}
    in_pools = checkpoint_states is None and checkpoint_windows is None
    of_windows = checkpoints | {"checkpoint_windows": checkpoint_windows} if in_pools or checkpoint_windows is not None else {}
    of_states = checkpoints | {"checkpoint_states": checkpoint_states} if in_pools or checkpoint_states is not None else {}
    x = causal_conv1d_fn(
        mixed_qkv, conv_weight, conv_bias, conv_states=conv_states, query_start_loc=query_start_loc,
        cache_indices=state_indices, activation=activation, **both, **of_windows,
    )  # fmt: skip
    length = x.shape[0]
    q, k, v = split_heads(x, num_k_heads, head_k_dim, num_v_heads, head_v_dim)
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    o, _ = chunk_gated_delta_rule(
        q, k, v, g[None], beta[None], scale, ssm_state, use_qk_l2norm_in_kernel=True, cu_seqlens=query_start_loc,
        state_v_first=state_v_first, state_indices=state_indices, **both, **of_states,
    )  # fmt: skip
    is_live = torch.zeros(length, dtype=torch.bool, device=mixed_qkv.device)
    for (start, end), slot in zip(ranges(query_start_loc), state_indices.tolist(), strict=False):
        is_live[start:end] = slot > null_slot
    # Rows of padding: z may hold anything there.
    result = o[0].flatten(1)
    if norm_weight is not None:
        assert z is not None  # checked by the operator
        result = rms_norm_gated(o[0], z, norm_weight, eps, gate_activation).flatten(1)
        result[~is_live] = 0
    return result if out is None else out.copy_(result)


def split_heads(x: Tensor, num_k_heads: int, head_k_dim: int, num_v_heads: int, head_v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [1, L, H, K] and v [1, L, HV, V] of the convolution's rows [L, 2 * H * K + HV * V]."""
    keys = num_k_heads * head_k_dim
    parts = x.split([keys, keys, num_v_heads * head_v_dim], dim=1)
    shapes = ((num_k_heads, head_k_dim), (num_k_heads, head_k_dim), (num_v_heads, head_v_dim))
    q, k, v = (part.reshape(1, x.shape[0], *shape) for part, shape in zip(parts, shapes, strict=True))
    return q, k, v


@inference_only
def largest_prefill_operand(
    mixed_qkv: Tensor, b: Tensor, a: Tensor | None, scale: float | None, conv_states: Tensor, conv_weight: Tensor,
    A_log: Tensor, dt_bias: Tensor, ssm_state: Tensor, state_indices: Tensor, *, query_start_loc: Tensor,
    has_initial_state: Tensor | None, conv_bias: Tensor | None, dims: tuple[int, int, int], activation: str | None,
    projection_layout: str, state_v_first: bool, null_slot: int,
) -> tuple[float, str]:  # fmt: skip
    """`largest_chunk_operand` of a prefill step's delta rule. Nothing is written. dims: H, K and V."""
    (num_k_heads, head_k_dim, head_v_dim), num_v_heads = dims, A_log.shape[0]
    if projection_layout == "interleaved":
        mixed_qkv, _, b, a = fused_qkvzba_split_reshape_cat(mixed_qkv, b, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    elif projection_layout == "merged":
        mixed_qkv, _, b, a = split_merged(mixed_qkv, b, num_v_heads, head_v_dim)
    assert a is not None  # checked by the operator
    x = causal_conv1d_fn(
        mixed_qkv, conv_weight, conv_bias, conv_states=conv_states.clone(), query_start_loc=query_start_loc,
        cache_indices=state_indices, activation=activation, has_initial_state=has_initial_state, null_slot=null_slot,
    )  # fmt: skip
    q, k, v = split_heads(x, num_k_heads, head_k_dim, num_v_heads, head_v_dim)
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    return largest_chunk_operand(
        q, k, v, g[None], beta[None], scale, ssm_state, True, query_start_loc, state_v_first=state_v_first,
        state_indices=state_indices, has_initial_state=has_initial_state, null_slot=null_slot,
    )  # fmt: skip
