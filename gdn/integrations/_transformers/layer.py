"""The forward of a Gated DeltaNet module: its projections, and one fused operator on the cache's own tensors between them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.integrations import _indices as indices
from gdn.integrations._calls import unserved
from gdn.integrations._kept import LayerViews, bound
from gdn.integrations._transformers import cached, steps

ACTIVATIONS = ("silu", "swish")
GATES = (*ACTIVATIONS, "sigmoid")


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a layer is the same for all calls. Read once: a lookup through `nn.Module` takes longer than a check.

    decode and prefill: the fused operators, for tensors alone; None where no call is served. views: of the cache's windows and of
    the filter, as the operators take them, kept for calls like one that was served. reason and reason_on_gpu: why no call is
    served, on any device and on a GPU; None where calls can be.
    """

    layer_idx: int
    heads: tuple[int, int]  # HV, V
    shapes: cached.Shapes
    options: dict[str, Any]  # of the fused operators
    decode: Any
    prefill: Any
    views: LayerViews
    is_interleaved: bool
    fuses_prompts: bool  # whether the fused operators have a kernel
    fuses_steps: bool
    reason: str | None
    reason_on_gpu: str | None

    @staticmethod
    def of(layer: Any) -> "Facts":
        """Reads a layer of the host."""
        norm, h, hv, k, v = layer.norm, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        width, reason, reason_on_gpu = layer.conv_kernel_size, None, None
        if layer.activation not in ACTIVATIONS:
            reason = f"the activation is {layer.activation}"
        elif norm.activation not in GATES:
            reason = f"the gate's activation is {norm.activation}"
        if k != v or k % 4 or k > 256 or not 2 <= width <= 4 or (2 * h * k + hv * v) % 8:
            reason_on_gpu = f"the operators have no kernel for K={k}, V={v}, w={width}"
        is_interleaved = "in_proj_qkvz" in layer._modules
        options = {
            "num_k_heads": h,
            "head_k_dim": k,
            "head_v_dim": v,
            "eps": norm.variance_epsilon,
            "activation": layer.activation,
            "gate_activation": norm.activation,
            "projection_layout": "interleaved" if is_interleaved else "flat",
        }
        shapes = cached.Shapes((2 * h * k + hv * v, width), (hv, k, v))
        prompts, steps = k == v and k % 8 == 0 and k <= 128, k == v and k % 32 == 0
        operators = [None, None] if reason else [bound(one, **options) for one in (gdn.fused_gdn_decode, gdn.fused_gdn_prefill)]
        return Facts(
            layer.layer_idx, (hv, v), shapes, options, operators[0], operators[1], LayerViews(shapes.operand, _matrix),
            is_interleaved, prompts, steps, reason, reason_on_gpu,
        )  # fmt: skip


def _matrix(weight: Tensor) -> Tensor:
    """The filter [D, w] of a depthwise convolution's weight [D, 1, w]."""
    return weight.squeeze(1)


def has_own_parameters(layer: Any) -> bool:
    """Whether what a call reads, of the modules that it does not call, is where torch keeps parameters."""
    parts, own = layer._modules, layer._parameters
    filters, gain = parts["conv1d"]._parameters, parts["norm"]._parameters
    return "A_log" in own and "dt_bias" in own and "weight" in filters and "bias" in filters and "weight" in gain


def refusal(
    facts: Facts,
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
    facts, layer : Facts, Module
        The host's layer, and what was read of it.
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
    # Walking through the parameters costs as much as all else here, so it is left out where autograd is off.
    parameters = layer.parameters() if torch.is_grad_enabled() else ()
    reason = unserved(hidden_states, parameters, allow_reference) or facts.reason
    device = hidden_states.device
    if reason is None and device.type == "cuda":
        reason = facts.reason_on_gpu
    if reason is not None:
        return reason
    parts = layer._modules
    if "_hf_hook" in parts["conv1d"].__dict__ or "_hf_hook" in parts["norm"].__dict__:
        return "weights of the layer are loaded by a hook (offloading)"
    if not has_own_parameters(layer):
        return "weights of the layer are no parameters of it (pruned, parametrized or flattened)"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    batch, length, _ = hidden_states.shape
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
    return cached.unserved_cache(cache, facts.layer_idx, batch, device, facts.shapes)


def step(
    facts: Facts,
    layer: Any,
    hidden_states: Tensor,
    cache: Any,
    attention_mask: Tensor | None,
    offsets: Tensor | None,
    states: Any = None,
) -> Tensor:
    """One served call: what the host's forward returns, with the cache updated in place.

    Parameters
    ----------
    facts, layer : Facts, Module
        The host's layer, and what was read of it.
    hidden_states : Tensor [B, T, hidden]
        Input of the layer.
    cache : Cache or None
        The host's cache; None = every sequence starts from nothing.
    attention_mask : Tensor [B, T] or None
        0 where a token is padding, which is on the left: its hidden states count as zero.
    offsets : Tensor [N + 1] or None
        Boundaries of packed sequences over the B * T tokens; None = each row is one sequence. Without a cache.
    states : tuple, optional
        Of `cached.made_states`, where the caller has them already. Views of them are kept. None in a compiled call.

    Returns
    -------
    Tensor [B, T, hidden]
        Output of the layer, in the dtype of hidden_states.
    """
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    batch, length, hidden = hidden_states.shape
    tokens, device = hidden_states.reshape(-1, hidden), hidden_states.device
    parts, parameters = layer._modules, layer._parameters  # a lookup through nn.Module takes several times as long
    if facts.is_interleaved:
        qkv, z, b, a = parts["in_proj_qkvz"](tokens), None, parts["in_proj_ba"](tokens), None
    else:
        qkv, z = parts["in_proj_qkv"](tokens), parts["in_proj_z"](tokens).view(-1, *facts.heads)
        b, a = parts["in_proj_b"](tokens), parts["in_proj_a"](tokens)
    count = batch if offsets is None else offsets.shape[0] - 1
    convolution = parts["conv1d"]._parameters
    if states is not None:
        windows, pool, has_previous = states
        like = (windows, convolution["weight"], hidden_states, pool)
        windows, weight = facts.views.kept(*like) or facts.views.make(*like)
    else:
        if cache is None:
            windows, pool, has_previous = cached.states_of_call(count, qkv, facts.shapes)
        else:
            windows, pool, has_previous = cached.states_of(cache, facts.layer_idx, batch, qkv, facts.shapes)
        windows, weight = facts.shapes.operand(windows), _matrix(convolution["weight"])
    is_decode = length == 1 and has_previous
    if is_decode:
        slots, boundaries, flags = indices.rows(count, device), None, None
    elif offsets is None:
        slots, boundaries, flags = indices.prompts(batch, length, has_previous, device)
    else:
        slots, boundaries, flags = indices.slots(count, device), offsets, indices.flags(count, has_previous, device)
    bias, gain = convolution["bias"], parts["norm"]._parameters["weight"]
    fixed = (windows, weight, parameters["A_log"], parameters["dt_bias"], gain, pool, slots)
    is_fused = facts.fuses_steps if is_decode else facts.fuses_prompts
    if not (is_fused or (facts.fuses_prompts and not tokens.is_cuda)):  # the reference serves what either of them does
        boundaries = indices.offsets(batch, length, device) if boundaries is None else boundaries
        core = steps.core((qkv, z, b, a), fixed[1:5], bias, (windows, pool, slots), boundaries, flags, facts.options)
    elif is_decode:
        core = facts.decode(qkv, z, b, a, *fixed, bias)
    else:
        core = facts.prefill(qkv, z, b, a, *fixed, boundaries, flags, bias)
    if cache is not None and not has_previous:
        cached.set_previous_state(cache, facts.layer_idx)
    result: Tensor = parts["out_proj"](core)
    return result.view(batch, length, -1)
