"""Whole Gated DeltaNet layers of a model of Transformers: two to four projections, one operator, the output projection.

The operator works on the cache's own tensors. They are fetched on every call, since beams and offloading replace them.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gdn
from gdn.integrations import _hosts, _points
from gdn.integrations._calls import Calls, unserved, unserved_state

_ACTIVATIONS = ("silu", "swish")
_GATE_ACTIVATIONS = ("silu", "swish", "sigmoid")
_NO_CACHES = (Tensor, bool, int, float, str, tuple, list, dict)
_CACHE_NAMES = ("cache", "cache_params")  # of the layers' argument: from 5.24 on, before


def points(model: nn.Module) -> list[_points.Point]:
    """One point for each Gated DeltaNet layer of the model."""
    return [_layer_point(name, module, guard) for name, module, guard in _layers(model)]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name of each layer in the model, the layer, and the recorded name of its forward."""
    recorded = {f"{module}.{prefix}GatedDeltaNet" for module, prefix in _hosts.TRANSFORMERS_MODULES.items()}
    for name, module in model.named_modules():
        bases = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
        if (found := next((base for base in bases if base in recorded), None)) is not None:
            yield name, module, f"{found}.forward"


def _layer_point(name: str, module: nn.Module, guard: str) -> _points.Point:
    def install(calls: Calls) -> _points.Undo:
        if "forward" in vars(module):
            raise _points.Unreplaced("its forward is patched already")
        if type(module).forward is not _points.resolve(guard)[2]:
            raise _points.Unreplaced("its class has a forward of its own")
        forward = _forward_of(Layer(module), calls)
        module.forward = forward

        def undo() -> str | None:
            if vars(module).get("forward") is not forward:
                return f"patched since by someone else, left alone: {name}.forward"
            del module.forward
            return None

        return undo

    layer, module_name = guard.rpartition(".")[0], guard.rpartition(".")[0].rpartition(".")[0]
    masking = f"{module_name}.apply_mask_to_padding_states"
    guards = (guard, layer, masking, _hosts.TRANSFORMERS_CACHE, _hosts.TRANSFORMERS_INITIALIZATION)
    return _points.Point(f"{name}.forward", guards, install)


class Layer:
    """A layer, and what of it no call changes: looked up once, since attributes of a module cost the host a microsecond each.

    Submodules and parameters are fetched on every call: adapters such as LoRA replace them.
    """

    __slots__ = ("index", "module", "modules", "options", "reasons", "shape", "width")

    def __init__(self, module: Any) -> None:
        self.module = module
        self.modules: dict[str, Any] = module._modules
        self.index: int = module.layer_idx
        self.width: int = module.conv_kernel_size
        self.shape: tuple[int, int, int] = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        layout = "interleaved" if hasattr(module, "in_proj_qkvz") else "flat"
        self.options: dict[str, Any] = {
            "num_k_heads": module.num_k_heads,
            "head_k_dim": module.head_k_dim,
            "head_v_dim": module.head_v_dim,
            "eps": module.norm.variance_epsilon,
            "activation": module.activation,
            "gate_activation": module.norm.activation,
            "projection_layout": layout,
        }
        self.reasons = {device: _unserved_layer(module, device) for device in ("cpu", "cuda")}


def _unserved_layer(module: Any, device_type: str) -> str | None:
    """Why no call of a layer is served on a device."""
    if module.activation not in _ACTIVATIONS or module.norm.activation not in _GATE_ACTIVATIONS:
        return f"activations {module.activation!r} and {module.norm.activation!r}"
    return unserved_dims(module.head_k_dim, module.head_v_dim, device_type)


def _forward_of(layer: Layer, calls: Calls) -> Callable[..., Tensor]:
    """The forward of one layer: ours, or that of its class where the call is refused."""
    module, original = layer.module, type(layer.module).forward
    cache_name = next(name for name in _CACHE_NAMES if name in inspect.signature(original).parameters)
    mask_padding = sys.modules[original.__module__].apply_mask_to_padding_states

    @functools.wraps(original)
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip((cache_name, "attention_mask"), args, strict=False)) | kwargs
        cache, attention_mask = _cache_of(given), given.pop("attention_mask", None)
        reason = refusal(layer, hidden_states, cache, attention_mask, given, calls.allow_reference)
        if calls.active and calls.serves(reason):
            if attention_mask is not None:
                hidden_states = mask_padding(hidden_states, attention_mask)
            return _serve(layer, hidden_states, cache, given.get("cu_seq_lens_q"))
        result: Tensor = original(module, hidden_states, *args, **kwargs)
        return result

    return forward


def _cache_of(given: dict[str, Any]) -> Any:
    """Takes the cache out of the arguments, whichever of its names it came under.

    A cache under another name would be ignored, and the model would generate wrong tokens: it is an error.
    """
    cache = given.pop("cache", None)
    if "cache_params" in given:
        older = given.pop("cache_params")
        cache = older if cache is None else cache
    for name, value in given.items():
        if not (value is None or isinstance(value, _NO_CACHES)) and hasattr(value, "get_seq_length"):
            raise TypeError(f"{name}: expected a cache as {' or '.join(_CACHE_NAMES)}, got one under this name")
    return cache


def refusal(
    layer: Layer,
    hidden_states: Tensor,
    cache: Any,
    attention_mask: Tensor | None,
    keywords: dict[str, Any],
    allow_reference: bool,
) -> str | None:
    """Why a call of a layer is left to Transformers; None where it is served."""
    module = layer.module
    if reason := unserved(hidden_states, module.parameters() if torch.is_grad_enabled() else (), allow_reference):
        return reason
    if reason := layer.reasons[hidden_states.device.type]:
        return reason
    if "_hf_hook" in module.__dict__ or "_hf_hook" in layer.modules["conv1d"].__dict__:
        return "weights that hooks of accelerate load"
    if attention_mask is not None and attention_mask.dim() != 2:
        return "an attention mask that is not [B, T]"
    offsets = keywords.get("cu_seq_lens_q")
    if offsets is None:
        if keywords.get("seq_idx") is not None:
            return "seq_idx without cu_seq_lens_q"
    elif hidden_states.shape[0] != 1:
        return "packed sequences in more than one row"
    elif cache is not None:
        return "packed sequences with a cache"
    return None if cache is None else _unserved_cache(layer, hidden_states, cache)


def unserved_dims(head_k_dim: int, head_v_dim: int, device_type: str) -> str | None:
    """Why the fused operators have no kernel for these head dims; None on the CPU, where the reference serves all."""
    if device_type != "cuda" or (head_k_dim == head_v_dim and head_k_dim % 32 == 0 and head_k_dim <= 128):
        return None
    return f"head dims {head_k_dim} and {head_v_dim} have no fused kernel"


def _unserved_cache(layer: Layer, hidden_states: Tensor, cache: Any) -> str | None:
    kept = cache.layers[layer.index]
    if kept.record_past:
        return "a cache that records past inputs (assisted decoding)"
    window, state = kept.conv_states[0], kept.recurrent_states[0]
    if window is None or state is None:
        return None
    if window.shape[-1] != layer.width:
        return "a window that has not as many columns as the filter"
    if not window.device == state.device == hidden_states.device:
        return "states of the cache on another device"
    return unserved_state(state)


def _serve(layer: Layer, hidden_states: Tensor, cache: Any, offsets: Tensor | None) -> Tensor:
    batch, length, _ = hidden_states.shape
    mixed, z, b, a = _projected(layer, hidden_states.flatten(0, 1))
    kept = None if cache is None else cache.layers[layer.index]
    is_first = kept is None or not kept.has_previous_state[0]
    count = batch if offsets is None else offsets.shape[0] - 1
    window, state = _states(layer, hidden_states, kept, count)
    module, conv, gain = layer.module, layer.modules["conv1d"], layer.modules["norm"].weight
    weight, A_log, dt_bias, slots = conv.weight.squeeze(1), module.A_log, module.dt_bias, _slots(count, hidden_states.device)
    options = layer.options
    if length == 1 and not is_first:
        core = gdn.fused_gdn_decode(
            mixed, z, b, a, window, weight, A_log, dt_bias, gain, state, slots, conv_bias=conv.bias, **options
        )
    else:
        starts = _slots(batch + 1, hidden_states.device) * length if offsets is None else offsets
        fresh = torch.zeros(count, dtype=torch.bool, device=hidden_states.device) if is_first else None
        forms: dict[str, Any] = {"query_start_loc": starts, "has_initial_state": fresh, "conv_bias": conv.bias, **options}
        core = gdn.fused_gdn_prefill(mixed, z, b, a, window, weight, A_log, dt_bias, gain, state, slots, **forms)
    if is_first and kept is not None:
        kept.has_previous_state[0] = True
    result: Tensor = layer.modules["out_proj"](core.view(batch, length, -1))
    return result


def _projected(layer: Layer, rows: Tensor) -> tuple[Any, Any, Any, Any]:
    """mixed_qkv, z, b and a of the fused operators."""
    modules = layer.modules
    if layer.options["projection_layout"] == "interleaved":
        return modules["in_proj_qkvz"](rows), None, modules["in_proj_ba"](rows), None
    heads, _, head_v_dim = layer.shape
    z = modules["in_proj_z"](rows).view(-1, heads, head_v_dim)
    return modules["in_proj_qkv"](rows), z, modules["in_proj_b"](rows), modules["in_proj_a"](rows)


def _states(layer: Layer, hidden_states: Tensor, kept: Any, count: int) -> tuple[Tensor, Tensor]:
    """Windows [N, channels, w - 1] and states [N, HV, K, V]: the cache's own tensors, or zeros for this call."""
    width = layer.width
    if kept is None:
        window = hidden_states.new_zeros(count, layer.module.conv_dim, width - 1)
        return window, _new_state(layer, hidden_states, count)
    if not kept.is_conv_states_initialized[0]:
        like = hidden_states.new_empty(count, layer.module.conv_dim, width)
        kept.lazy_initialization(conv_states=like, state_idx=0, conv_kernel_size=width)
    if not kept.is_recurrent_states_initialized[0]:
        kept.lazy_initialization(recurrent_states=_new_state(layer, hidden_states, count), state_idx=0)
    # Transformers keeps w inputs, newest last; the oldest is none of the next token's.
    return kept.conv_states[0][..., 1:], kept.recurrent_states[0]


def _new_state(layer: Layer, hidden_states: Tensor, count: int) -> Tensor:
    dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
    return hidden_states.new_zeros(count, *layer.shape, dtype=dtype)


def _slots(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... of int32; kept, since making it is a kernel of its own."""
    if torch.compiler.is_compiling():
        return torch.arange(count, dtype=torch.int32, device=device)
    return _kept_slots(count, device)


@functools.lru_cache(maxsize=64)
def _kept_slots(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def separate(model: nn.Module) -> _points.Undo:
    """Watches for packed sequences that only `position_ids` tell apart, which Transformers mixes silently in these layers.

    Without a cache the boundaries are handed to the layers; with one the call is refused by name. Looking at the positions waits
    for the device: only a call of more than one token with `position_ids` and without a mask does. Returns what ends it.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positions = kwargs.get("position_ids")
        if positions is None or positions.dim() != 2 or positions.shape[1] < 2 or torch.compiler.is_compiling():
            return None
        if kwargs.get("attention_mask") is not None or kwargs.get("cu_seq_lens_q") is not None:
            return None
        restarts = positions[:, 1:] < positions[:, :-1]
        if not bool(restarts.any()):
            return None
        caches = (*_CACHE_NAMES, "past_key_values")
        if (
            positions.shape[0] != 1
            or kwargs.get("use_cache") is not False
            or any(kwargs.get(name) is not None for name in caches)
        ):
            expected = "positions that do not restart within a row (packed sequences: one row, use_cache=False and no cache)"
            raise ValueError(f"position_ids: expected {expected}, got some that do")
        length = positions.shape[1]
        inner = restarts[0].nonzero()[:, 0] + 1
        offsets = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), length)]).to(torch.int32)
        return args, {**kwargs, "cu_seq_lens_q": offsets}

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    return lambda: handle.remove()
