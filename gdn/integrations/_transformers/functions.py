"""The functions of Transformers' modeling modules, with its argument lists: for code that has layers of its own around them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.integrations import _indices as indices
from gdn.integrations._calls import unserved, unserved_state
from gdn.integrations._transformers.layer import ACTIVATIONS, GATES

_LARGEST_HEAD_DIM = 256
_LARGEST_NORM = 1024
_ALIGNMENT = 16  # bytes: of states that are updated in place


def _unserved_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, allow_reference: bool
) -> str | None:
    reason = unserved(query, (key, value, g, beta, initial_state), allow_reference) or unserved_state(initial_state)
    if reason is not None:
        return reason
    k, v = key.shape[-1], value.shape[-1]
    if query.is_cuda and (k != v or k % 4 or k > _LARGEST_HEAD_DIM):
        return f"no kernel for K={k}, V={v}"
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value differ in dtype"
    if value.shape[2] % key.shape[2]:
        return f"{value.shape[2]} value heads are no multiple of {key.shape[2]} key heads"
    return "no tokens" if query.numel() == 0 else None


def chunk_refusal(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, output_final_state: bool,
    others: Mapping[str, Any], allow_reference: bool,
) -> str | None:  # fmt: skip
    if others.get("cu_seqlens") is not None:
        if query.shape[0] != 1:
            return "cu_seqlens with more than one row"
        if initial_state is not None or output_final_state:
            return "packed sequences with a cache"
    return _unserved_rule(query, key, value, g, beta, initial_state, allow_reference)


def chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    return gdn.chunk_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
        cu_seqlens=others.get("cu_seqlens"),
    )


def _is_misaligned(states: Tensor) -> bool:
    """Whether states begin where no kernel takes them. A compiler cannot ask: it sees the host's own tensors, which do not."""
    return not torch.compiler.is_compiling() and bool(states.storage_offset() * states.element_size() % _ALIGNMENT)


def recurrent_refusal(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, output_final_state: bool,
    others: Mapping[str, Any], allow_reference: bool,
) -> str | None:  # fmt: skip
    if others.get("cu_seqlens") is not None:
        return "packed sequences of one token"
    if initial_state is not None and output_final_state:  # it is updated in place
        if not initial_state.is_contiguous() or _is_misaligned(initial_state):
            return f"the states have strides {initial_state.stride()}, or begin at no multiple of {_ALIGNMENT} bytes"
    return _unserved_rule(query, key, value, g, beta, initial_state, allow_reference)


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    # In place on the cache's tensor: the host then copies it onto itself.
    return gdn.fused_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        inplace_final_state=initial_state is not None and bool(output_final_state),
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
        output_final_state=bool(output_final_state),
    )


def conv_refusal(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, others: Mapping[str, Any],
    allow_reference: bool,
) -> str | None:  # fmt: skip
    if activation is not None and activation not in ACTIVATIONS:
        return f"the activation is {activation}"
    boundaries = others.get("cu_seq_lens_q")
    if boundaries is None and others.get("seq_idx") is not None:
        return "packed sequences by seq_idx without cu_seq_lens_q"
    if boundaries is not None and hidden_states.shape[0] != 1:
        return "cu_seq_lens_q with more than one row"
    if hidden_states.numel() == 0:
        return "no tokens"
    return unserved(hidden_states, (weight, bias), allow_reference) or _filter_without_kernel(hidden_states, weight)


def _filter_without_kernel(rows: Tensor, weight: Tensor) -> str | None:
    channels, width = weight.shape
    if width < 2 or (rows.is_cuda and (channels % 8 or width > 4)):
        return f"no kernel for {channels} channels and a filter of {width}"
    return None


def conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    batch, channels, length = hidden_states.shape
    boundaries = others.get("cu_seq_lens_q")
    if boundaries is None:
        boundaries = indices.offsets(batch, length, hidden_states.device)
    rows = hidden_states.transpose(1, 2).reshape(batch * length, channels)
    y = gdn.causal_conv1d_fn(rows, weight, bias, query_start_loc=boundaries, activation=activation)
    return y.view(batch, length, channels).transpose(1, 2)


def update_refusal(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, allow_reference: bool
) -> str | None:
    if activation is not None and activation not in ACTIVATIONS:
        return f"the activation is {activation}"
    if conv_state.shape[-1] != weight.shape[-1]:
        return "the window has another number of columns than the filter"
    if hidden_states.numel() == 0:
        return "no tokens"
    if conv_state.stride(0) == 0 and conv_state.shape[0] > 1:
        return "the windows of several rows share memory"
    return unserved(hidden_states, (conv_state, weight, bias), allow_reference) or _filter_without_kernel(hidden_states, weight)


def update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    # The host keeps w inputs, newest last, and never reads the oldest; the operator reads and writes w - 1.
    return gdn.causal_conv1d_update(hidden_states, conv_state[..., 1:], weight, bias, activation)


def norm_refusal(norm: Any, hidden_states: Tensor, gate: Tensor, allow_reference: bool) -> str | None:
    if norm.activation not in GATES:
        return f"the gate's activation is {norm.activation}"
    size = hidden_states.shape[-1]
    if hidden_states.is_cuda and (size % 4 or size > _LARGEST_NORM):
        return f"no kernel for rows of {size}"
    return unserved(hidden_states, (gate, norm.weight), allow_reference)


def norm(norm: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return gdn.rms_norm_gated(hidden_states, gate, norm.weight, norm.variance_epsilon, norm.activation)
