"""Hugging Face Transformers: the Gated DeltaNet layers of a model, or their functions in the whole process, on these kernels.

Serves Qwen3-Next, Qwen3.5 (dense and MoE) and qwen4_exp, and code that subclasses their layers. Calls that need gradients are
left to Transformers: `model.eval()` does not turn them off, `torch.no_grad()` and `generate` do.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gdn
from gdn.integrations import _handle, _hosts, _points, transformers_layers
from gdn.integrations._calls import unserved, unserved_state

_ALIGNMENT = 16  # bytes: of states that are updated in place
_LARGEST_DIM = 256
_CONV_ACTIVATIONS = (None, "silu", "swish")
_GATE_ACTIVATIONS = ("silu", "swish", "sigmoid")
_Result = tuple[Tensor, Tensor | None]


def _unserved_rule(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> str | None:
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value differ in dtype"
    for dim in (query.shape[-1], value.shape[-1]):
        if dim % 4 or dim > _LARGEST_DIM:
            return f"head dim {dim} has no kernel"
    return unserved_state(state)


def _refuse_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    allow_reference: bool = False,
    **kwargs: Any,
) -> str | None:
    if reason := unserved(query, (key, value, g, beta, initial_state), allow_reference):
        return reason
    if query.shape[-1] != value.shape[-1]:
        return "key and value head dims differ"
    if kwargs.get("cu_seqlens") is not None:
        if query.shape[0] != 1:
            return "packed sequences in more than one row"
        if initial_state is not None or output_final_state:
            return "packed sequences with a cache"
    return _unserved_rule(query, key, value, initial_state)


def _chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> _Result:
    return gdn.chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=kwargs.get("cu_seqlens"),
    )


def _refuse_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    allow_reference: bool = False,
    **kwargs: Any,
) -> str | None:
    if reason := unserved(query, (key, value, g, beta, initial_state), allow_reference):
        return reason
    if kwargs.get("cu_seqlens") is not None:
        return "packed sequences with a cache"
    return _unserved_rule(query, key, value, initial_state)


def _recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> _Result:
    """Updates the cache's own state in place where it can: the cache then copies it onto itself."""
    in_place = initial_state is not None and output_final_state and _is_pool(initial_state)
    return gdn.fused_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        inplace_final_state=in_place or None,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        output_final_state=output_final_state,
        disable_state_update=not output_final_state,
    )


def _is_pool(state: Tensor) -> bool:
    """Whether kernels can update these states where they are."""
    return state.is_contiguous() and state[0].numel() * state.element_size() % _ALIGNMENT == 0


def _unserved_conv(
    rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None, allow_reference: bool
) -> str | None:
    if reason := unserved(rows, (weight, bias, state), allow_reference):
        return reason
    if activation not in _CONV_ACTIVATIONS:
        return f"activation {activation!r}"
    return None


def _refuse_conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    allow_reference: bool = False,
    **kwargs: Any,
) -> str | None:
    if reason := _unserved_conv(hidden_states, weight, bias, activation, None, allow_reference):
        return reason
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is None and kwargs.get("seq_idx") is not None:
        return "seq_idx without cu_seq_lens_q"
    if offsets is not None and hidden_states.shape[0] != 1:
        return "packed sequences in more than one row"
    return None


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    batch, dim, length = hidden_states.shape
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is None and batch > 1:
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=hidden_states.device) * length
    rows = hidden_states.transpose(1, 2).reshape(batch * length, dim)
    y = gdn.causal_conv1d_fn(rows, weight, bias, query_start_loc=offsets, activation=activation)
    return y.view(batch, length, dim).transpose(1, 2)


def _refuse_conv_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    allow_reference: bool = False,
) -> str | None:
    if conv_state.shape[-1] != weight.shape[-1]:
        return "the window has not as many columns as the filter"
    return _unserved_conv(hidden_states, weight, bias, activation, conv_state, allow_reference)


def _conv_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    # Transformers keeps w columns, newest last, and never reads the oldest for the next token; w - 1 are the window here.
    return gdn.causal_conv1d_update(hidden_states, conv_state[..., 1:], weight, bias, activation)


def _refuse_norm(self: Any, hidden_states: Tensor, gate: Tensor, *, allow_reference: bool = False) -> str | None:
    if reason := unserved(hidden_states, (gate, self.weight), allow_reference):
        return reason
    if self.activation not in _GATE_ACTIVATIONS:
        return f"activation {self.activation!r}"
    return None


def _norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return gdn.rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)


_FUNCTIONS: dict[str, tuple[Callable[..., str | None], Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": (_refuse_chunk, _chunk),
    "torch_recurrent_gated_delta_rule": (_refuse_recurrent, _recurrent),
    "causal_conv1d_fn": (_refuse_conv, _conv),
    "causal_conv1d_update": (_refuse_conv_update, _conv_update),
}


def enable(
    model: nn.Module | None = None, *, level: str | None = None, strict: bool = False, allow_reference: bool = False
) -> _handle.Handle:
    """Lets Gated DeltaNet layers of Transformers run on the kernels of this project.

    Parameters
    ----------
    model : Module, optional
        A model whose layers are served whole: each layer's `forward` becomes one of this project's (an attribute of the module;
        copy or pickle the model after `disable`). Packed sequences that only `position_ids` tell apart are kept apart without a
        cache, and refused by name with one. None = `level` "functions".
    level : {"layers", "functions"}, optional
        None = "layers" with a model, else "functions": the two forms of the rule, the two convolutions and the gated norm of
        every modeling module, for all models of the process; slower, and for code that subclasses the layers.
    strict : bool
        Raise where a signature is not a recorded one, instead of leaving the function or layer alone.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.

    Returns
    -------
    Handle
        Reports and puts back what Transformers had. A second call with the same options returns the same handle, one for each
        model, which it keeps alive until `disable`.

    Raises
    ------
    TypeError
        If `model` is no module.
    ValueError
        If `level` does not go with `model`, the model has no such layer, or it is enabled with other options.
    RuntimeError
        With strict, if something cannot be replaced.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    expected = "functions" if model is None else "layers"
    if level not in (None, expected):
        raise ValueError(f"level: expected {expected!r} {'without' if model is None else 'with'} a model, got {level!r}")
    options: dict[str, Any] = {"strict": strict, "allow_reference": allow_reference, "options": {"level": expected}}
    if model is None:
        return _handle.enable(_hosts.TRANSFORMERS, _function_points(), **options)
    points = transformers_layers.points(model)
    if not points:
        names = ", ".join(f"{prefix}GatedDeltaNet" for prefix in _hosts.TRANSFORMERS_MODULES.values())
        raise ValueError(f"model: expected one with layers of {names}, got {type(model).__name__} without")
    points.append(_points.Point("position_ids", (), lambda calls: transformers_layers.separate(model)))
    return _handle.enable(_hosts.TRANSFORMERS, points, scope=id(model), **options)


def _function_points() -> list[_points.Point]:
    points = []
    for module, prefix in _hosts.TRANSFORMERS_MODULES.items():
        if importlib.util.find_spec("transformers") is None or importlib.util.find_spec(module.rpartition(".")[0]) is None:
            continue  # a version without this model
        points += [_points.attribute(f"{module}.{name}", *_FUNCTIONS[name]) for name in _hosts.TRANSFORMERS_FUNCTIONS]
        points.append(_points.attribute(f"{module}.{prefix}RMSNormGated.forward", _refuse_norm, _norm))
    return points
