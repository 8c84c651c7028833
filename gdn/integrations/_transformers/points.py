"""What `enable` replaces: the forward of a model's Gated DeltaNet layers, or the functions of the modeling modules."""

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gdn.integrations import _hosts, _points
from gdn.integrations._calls import Calls, unserved
from gdn.integrations._transformers import functions, layer, packed

_CACHE = "transformers.cache_utils.LinearAttentionLayer"
_GONE = "the model is gone"


def of_functions() -> list[_points.Point]:
    """The functions of all four modeling modules, and the forward of their gated norms."""
    found = []
    for kind, prefix, _ in _hosts.TRANSFORMERS_MODELS:
        module = f"transformers.models.{kind}.modeling_{kind}"
        found += [
            _points.attribute(f"{module}.torch_chunk_gated_delta_rule", functions.chunk_refusal, functions.chunk),
            _points.attribute(f"{module}.torch_recurrent_gated_delta_rule", functions.recurrent_refusal, functions.recurrent),
            _points.attribute(f"{module}.causal_conv1d_fn", functions.conv_refusal, functions.conv),
            _points.attribute(f"{module}.causal_conv1d_update", functions.update_refusal, functions.update),
            _points.attribute(f"{module}.{prefix}RMSNormGated.forward", functions.norm_refusal, functions.norm),
        ]
    return found


def of_model(model: nn.Module) -> list[_points.Point]:
    """The Gated DeltaNet layers of a model, and its text models, where packed sequences are told apart; empty without layers."""
    layers, texts = [], []
    boundaries = packed.Boundaries()
    for name, module in model.named_modules():
        path = f"{type(model).__name__}.{name}" if name else type(model).__name__
        for kind, prefix, text in _hosts.TRANSFORMERS_MODELS:
            modeling = f"transformers.models.{kind}.modeling_{kind}"
            if (host_class := _base(module, modeling, f"{prefix}GatedDeltaNet")) is not None:
                guards = [f"{modeling}.{one}" for one in (f"{prefix}GatedDeltaNet", f"{prefix}RMSNormGated")]
                guards = [*(f"{one}.forward" for one in guards), *guards, f"{_CACHE}.lazy_initialization", _CACHE]
                install = _layer_installer(module, host_class, f"{prefix}RMSNormGated", boundaries)
                layers.append(_points.Point(path, tuple(guards), install))
            elif (host_class := _base(module, modeling, text)) is not None:
                install = _text_installer(module, boundaries)
                texts.append(_points.Point(f"{path} (position_ids)", (f"{modeling}.{text}.forward",), install))
    return [*layers, *texts] if layers else []


def gdn_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are Gated DeltaNet layers of the host."""
    found = []
    for module in model.modules():
        for kind, prefix, _ in _hosts.TRANSFORMERS_MODELS:
            if _base(module, f"transformers.models.{kind}.modeling_{kind}", f"{prefix}GatedDeltaNet") is not None:
                found.append(module)
    return found


def _base(module: Any, modeling: str, name: str) -> type | None:
    """The host's class of this name that the module is of, without importing the host."""
    return next((one for one in type(module).__mro__ if one.__module__ == modeling and one.__name__ == name), None)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _require_own(module: Any, host_class: type) -> None:
    """Raises LeftAlone where the module's forward is not that of the host's class."""
    if "forward" in vars(module):
        raise _points.LeftAlone("someone else replaced its forward")
    if type(module).forward is not host_class.forward:  # type: ignore[attr-defined]
        raise _points.LeftAlone(f"{type(module).__name__} has a forward of its own")


def _layer_installer(
    module: nn.Module, host_class: type, norm_name: str, boundaries: packed.Boundaries
) -> Callable[[Calls], _points.Undo]:
    reference = weakref.ref(module)  # a handle must not keep a model in memory

    def install(calls: Calls) -> _points.Undo:
        target: Any = reference()
        assert target is not None
        _require_own(target, host_class)
        norm_class = _base(target.norm, host_class.__module__, norm_name)
        if norm_class is None:
            raise _points.LeftAlone(f"its norm is a {type(target.norm).__name__}")
        _require_own(target.norm, norm_class)
        cache_name = _parameters(host_class.forward)[2]  # type: ignore[attr-defined]
        function = layer_forward(calls, layer.Facts.of(target), target.forward.__func__, cache_name, boundaries)
        replacement = types.MethodType(function, target)
        target.forward = replacement

        def undo() -> str | None:
            module = reference()
            if module is None:
                return _GONE
            if getattr(vars(module).get("forward"), "__func__", None) is not function:
                return "patched since by someone else, left alone"
            del module.forward
            return None

        return undo

    return install


def layer_forward(
    calls: Calls, facts: layer.Facts, original: Callable[..., Any], cache_name: str, boundaries: packed.Boundaries
) -> Callable[..., Any]:
    """The forward of a Gated DeltaNet layer. cache_name is the host's name of its second argument."""
    from transformers.cache_utils import Cache

    def left(self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> Any:
        # The host's wrapper takes the old name beside no other: a cache that was not given must not be passed as None.
        given = others if cache is None else {cache_name: cache, **others}
        return original(self, hidden_states, attention_mask=attention_mask, **given)

    def forward(self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> Any:
        reason = None
        for name in others:
            if isinstance(others[name], Cache):
                if name != "cache_params":  # the host takes its old name too, and warns
                    raise TypeError(f"{name}: expected the cache under the name {cache_name!r}, got it under this one")
                reason = "the cache has its old name"
        if not calls.active:
            return left(self, hidden_states, cache, attention_mask, others)
        # Dynamo traces no reads of the model's positions, so there are no boundaries.
        derived = None if torch.compiler.is_compiling() else boundaries.current
        if reason is None:
            reason = layer.refusal(facts, self, hidden_states, cache, others, derived, calls.allow_reference)
        if not calls.serves(reason):
            return left(self, hidden_states, cache, attention_mask, others)
        given = others.get("cu_seq_lens_q")
        return layer.step(facts, self, hidden_states, cache, attention_mask, derived if given is None else given)

    if cache_name == "cache":

        def replacement(
            self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **others: Any
        ) -> Any:
            return forward(self, hidden_states, cache, attention_mask, others)

        return replacement

    def replacement_of_old_name(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **others: Any
    ) -> Any:
        return forward(self, hidden_states, cache_params, attention_mask, others)

    return replacement_of_old_name


def _text_installer(module: nn.Module, boundaries: packed.Boundaries) -> Callable[[Calls], _points.Undo]:
    reference = weakref.ref(module)

    def install(calls: Calls) -> _points.Undo:
        target = reference()
        assert target is not None
        names = _parameters(target.forward)

        def before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            derived = None
            tokens = next(_tensors(args, kwargs), None)
            if calls.active and tokens is not None:
                reason = unserved(tokens, model.parameters(), calls.allow_reference)  # the layers are then left to the host too
                if reason is None:
                    derived = packed.boundaries_of(names, args, kwargs, getattr(model.config, "use_cache", False))
            if not torch.compiler.is_compiling():
                boundaries.current = derived
                if derived is not None:
                    calls.served += 1

        def after(model: Any, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling():
                boundaries.current = None

        hooks = (
            target.register_forward_pre_hook(before, with_kwargs=True),
            target.register_forward_hook(after, always_call=True),
        )

        def undo() -> str | None:
            for hook in hooks:
                hook.remove()
            return None

        return undo

    return install


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
