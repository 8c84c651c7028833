"""A Gated DeltaNet layer's call that is like one before: what `layer.refusal` let pass then is compared, and not asked again."""

from typing import Any

import torch
from torch import Tensor

from gdn.integrations import _indices as indices
from gdn.integrations._calls import Calls
from gdn.integrations._kept import UNALIGNED
from gdn.integrations._transformers.layer import Facts
from gdn.integrations._transformers.packed import Boundaries
from gdn.runtime.guards import view_of


def again(
    facts: Facts, calls: Calls, boundaries: Boundaries, layer: Any, hidden_states: Tensor, cache: Any
) -> Tensor | None:  # fmt: skip
    """`layer.step` of a call without packed sequences and without a mask that is like one that was served; None for others, of
    which nothing has been done.

    Everything that the refusal reads is compared: of tensors the forms, and the rest once more. One function: each one more takes
    as long as two of the comparisons.
    """
    if cache is None or not calls.active or boundaries.current is not None:
        return None
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    try:
        made = cache.layers[facts.layer_idx]
        if not made.is_conv_states_initialized[0] or not made.is_recurrent_states_initialized[0] or made.record_past:
            return None
        windows, pool, has_previous = made.conv_states[0], made.recurrent_states[0], made.has_previous_state[0]
    except (AttributeError, IndexError):  # a layer of another kind, or none
        return None
    parts, own = layer._modules, layer._parameters  # a lookup through nn.Module takes several times as long
    convolution, norm = parts["conv1d"], parts["norm"]
    filters = convolution._parameters
    views = facts.views.kept(windows, filters["weight"], hidden_states, pool)
    if views is None or pool.data_ptr() & UNALIGNED or not hidden_states.is_contiguous():
        return None
    if "_hf_hook" in convolution.__dict__ or "_hf_hook" in norm.__dict__:
        return None
    # Without an argument it tells of CUDA, in a fifth of the time that the name of a device takes.
    if torch.is_autocast_enabled() if hidden_states.is_cuda else torch.is_autocast_enabled("cpu"):
        return None
    batch, length, hidden = hidden_states.shape
    is_decode = length == 1 and has_previous
    if not (facts.fuses_steps if is_decode else facts.fuses_prompts):
        return None

    calls.served += 1
    tokens = view_of(hidden_states, (batch * length, hidden), (hidden, 1))
    if facts.is_interleaved:
        qkv, z, b, a = parts["in_proj_qkvz"](tokens), None, parts["in_proj_ba"](tokens), None
    else:
        qkv, z = parts["in_proj_qkv"](tokens), parts["in_proj_z"](tokens).view(-1, *facts.heads)
        b, a = parts["in_proj_b"](tokens), parts["in_proj_a"](tokens)
    windows, weight = views
    A_log, dt_bias, gain, bias = own["A_log"], own["dt_bias"], norm._parameters["weight"], filters["bias"]
    if is_decode:
        slots = indices.slots(batch, pool.device)
        core = facts.decode(qkv, z, b, a, windows, weight, A_log, dt_bias, gain, pool, slots, bias)
    else:
        slots, offsets, flags = indices.prompts(batch, length, has_previous, pool.device)
        core = facts.prefill(qkv, z, b, a, windows, weight, A_log, dt_bias, gain, pool, slots, offsets, flags, bias)
        made.has_previous_state[0] = True
    result: Tensor = parts["out_proj"](core)
    return result.view(batch, length, -1)
