"""The forward of a Gated DeltaNet module: its projections, and one fused operator on the cache's own tensors between them."""

from typing import Any

import torch
from torch import Tensor, nn

import gdn
from gdn.integrations._calls import unserved
from gdn.integrations._transformers import cached, indices

ACTIVATIONS = ("silu", "swish")
GATES = (*ACTIVATIONS, "sigmoid")


def shapes_of(layer: Any) -> cached.Shapes:
    """Shapes of the layer's window and state in the host's cache."""
    heads, k, v = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    return cached.Shapes((2 * layer.num_k_heads * k + heads * v, layer.conv_kernel_size), (heads, k, v))


def unserved_layer(layer: Any, device: torch.device) -> str | None:
    """Why no call of this layer is served; None where it can be."""
    if layer.activation not in ACTIVATIONS:
        return f"the activation is {layer.activation}"
    if layer.norm.activation not in GATES:
        return f"the gate's activation is {layer.norm.activation}"
    if hasattr(layer.conv1d, "_hf_hook") or hasattr(layer.norm, "_hf_hook"):
        return "weights of the layer are loaded by a hook (offloading)"
    k, v, width = layer.head_k_dim, layer.head_v_dim, layer.conv_kernel_size
    if device.type == "cuda" and (k != v or k % 32 or k > 128 or not 2 <= width <= 4):
        return f"the fused operators have no kernel for K={k}, V={v}, w={width}"
    return None


def refusal(
    layer: Any,
    hidden_states: Tensor,
    cache: Any,
    packed: dict[str, Any],
    boundaries: Tensor | None,
    allow_reference: bool = False,
) -> str | None:
    """Why a call of a Gated DeltaNet layer is left to the host; None where it is served.

    Parameters
    ----------
    layer : Module
        The host's layer.
    hidden_states : Tensor [B, T, hidden]
        Input of the layer.
    cache : Cache or None
        The host's cache.
    packed : dict
        Further keywords of the call.
    boundaries : Tensor [N + 1] or None
        Offsets of packed sequences that `position_ids` told apart.
    allow_reference : bool
        Serve tensors on the CPU.
    """
    reason = unserved(hidden_states, layer.parameters(), allow_reference)
    if reason is None:
        reason = unserved_layer(layer, hidden_states.device)
    if reason is not None:
        return reason
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "autocast is on"
    batch, length = hidden_states.shape[:2]
    if batch == 0 or length == 0:
        return "no tokens"
    given = packed.get("cu_seq_lens_q")
    if given is None and packed.get("seq_idx") is not None:
        return "packed sequences by seq_idx without cu_seq_lens_q"
    if given is not None and batch != 1:
        return "cu_seq_lens_q with more than one row"
    if cache is None:
        return None
    if given is not None or boundaries is not None:
        return "packed sequences with a cache"
    return cached.unserved_cache(cache, layer.layer_idx, batch, hidden_states.device, shapes_of(layer))


def step(layer: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """One served call: what the host's forward returns, with the cache updated in place.

    Parameters
    ----------
    layer : Module
        The host's layer.
    hidden_states : Tensor [B, T, hidden]
        Input of the layer.
    cache : Cache or None
        The host's cache; None = every sequence starts from nothing.
    attention_mask : Tensor [B, T] or None
        0 where a token is padding, which is on the left: its hidden states count as zero.
    offsets : Tensor [N + 1] or None
        Boundaries of packed sequences over the B * T tokens; None = each row is one sequence. Without a cache.

    Returns
    -------
    Tensor [B, T, hidden]
        Output of the layer, in the dtype of hidden_states.
    """
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    batch, length, hidden = hidden_states.shape
    tokens, device = hidden_states.reshape(batch * length, hidden), hidden_states.device
    parts = layer._modules  # a lookup through nn.Module takes several times as long
    projections = _project(layer, parts, tokens)
    shapes = shapes_of(layer)
    count = batch if offsets is None else offsets.shape[0] - 1
    if cache is None:
        states = cached.states_of_call(count, projections[0], shapes)
    else:
        states = cached.states_of(cache, layer.layer_idx, batch, projections[0], shapes)
    convolution, norm, parameters = parts["conv1d"]._parameters, parts["norm"], layer._parameters
    arguments = (
        *projections, states.windows, convolution["weight"].squeeze(1), parameters["A_log"], parameters["dt_bias"],
        norm._parameters["weight"], states.states, indices.slots(count, device),
    )  # fmt: skip
    options: dict[str, Any] = {
        "conv_bias": convolution["bias"],
        "num_k_heads": layer.num_k_heads,
        "head_k_dim": layer.head_k_dim,
        "head_v_dim": layer.head_v_dim,
        "eps": norm.variance_epsilon,
        "activation": layer.activation,
        "gate_activation": norm.activation,
        "projection_layout": "flat" if projections[1] is not None else "interleaved",
    }
    if length == 1 and states.has_previous:
        core = gdn.fused_gdn_decode(*arguments, **options)
    else:
        core = gdn.fused_gdn_prefill(
            *arguments,
            query_start_loc=indices.offsets(batch, length, device) if offsets is None else offsets,
            has_initial_state=indices.flags(count, states.has_previous, device),
            **options,
        )
    if cache is not None:
        cached.set_previous_state(cache, layer.layer_idx)
    result: Tensor = parts["out_proj"](core)
    return result.view(batch, length, -1)


def _project(layer: Any, parts: dict[str, nn.Module], tokens: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """mixed_qkv, z, b and a as the fused operators take them, of tokens [B * T, hidden]."""
    if "in_proj_qkvz" in parts:
        return parts["in_proj_qkvz"](tokens), None, parts["in_proj_ba"](tokens), None
    z = parts["in_proj_z"](tokens).view(-1, layer.num_v_heads, layer.head_v_dim)
    return parts["in_proj_qkv"](tokens), z, parts["in_proj_b"](tokens), parts["in_proj_a"](tokens)
