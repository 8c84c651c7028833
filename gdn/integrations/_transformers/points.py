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
from gdn.integrations._transformers import functions, layer, packed, replacements

_CACHE = "transformers.cache_utils.LinearAttentionLayer"
_GONE = "the model is gone"
_OWNER = "_gdn_owner"  # attribute of a replaced forward: a weak reference to its module
_ATTENTION, _INDEXER, _ROTATE = "Qwen4ExpTextAttention", "Qwen4ExpTextQSAIndexer", "apply_rotary_pos_emb"


def of_functions() -> list[_points.Point]:
    """The functions of all four modeling modules, and the forward of their gated norms."""
    found = []
    for kind, prefix, _ in _hosts.TRANSFORMERS_MODELS:
        module = _hosts.modeling(kind)
        found += [
            _points.attribute(f"{module}.torch_chunk_gated_delta_rule", functions.chunk_refusal, functions.chunk),
            _points.attribute(f"{module}.torch_recurrent_gated_delta_rule", functions.recurrent_refusal, functions.recurrent),
            _points.attribute(f"{module}.causal_conv1d_fn", functions.conv_refusal, functions.conv),
            _points.attribute(f"{module}.causal_conv1d_update", functions.update_refusal, functions.update),
            _points.attribute(f"{module}.{prefix}RMSNormGated.forward", functions.norm_refusal, functions.norm),
        ]
    return found


def of_model(model: nn.Module) -> list[_points.Point]:
    """Layers of a model, and its text models, where packed sequences are told apart; empty without Gated DeltaNet layers.

    Layers are those of Gated DeltaNet, and attention with an indexer.
    """
    layers, texts = [], []
    boundaries = packed.Boundaries()
    for name, module in model.named_modules():
        path = f"{type(model).__name__}.{name}" if name else type(model).__name__
        for kind, prefix, text in _hosts.TRANSFORMERS_MODELS:
            modeling = _hosts.modeling(kind)
            if (host_class := _base(module, modeling, f"{prefix}GatedDeltaNet")) is not None:
                guards = [f"{modeling}.{one}" for one in (f"{prefix}GatedDeltaNet", f"{prefix}RMSNormGated")]
                guards = [*(f"{one}.forward" for one in guards), *guards, f"{_CACHE}.lazy_initialization", _CACHE]
                install = _layer_installer(module, host_class, f"{prefix}RMSNormGated", boundaries)
                layers.append(_points.Point(path, tuple(guards), install))
            elif (host_class := _base(module, modeling, _ATTENTION)) is not None:
                guards = [f"{modeling}.{one}" for one in (_ATTENTION, _INDEXER)]
                guards = [*(f"{one}.forward" for one in guards), *guards, f"{modeling}.{_ROTATE}"]
                layers.append(_points.Point(path, tuple(guards), _attention_installer(module, host_class, boundaries)))
            elif (host_class := _base(module, modeling, text)) is not None:
                install = _text_installer(module, boundaries)
                texts.append(_points.Point(f"{path} (position_ids)", (f"{modeling}.{text}.forward",), install))
    return [*layers, *texts] if layers else []


def gdn_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are Gated DeltaNet layers of the host."""
    names = [(_hosts.modeling(kind), f"{prefix}GatedDeltaNet") for kind, prefix, _ in _hosts.TRANSFORMERS_MODELS]
    return [module for module in model.modules() if any(_base(module, *name) is not None for name in names)]


def _base(module: Any, modeling: str, name: str) -> type | None:
    """The host's class of this name that the module is of, without importing the host."""
    return next((one for one in type(module).__mro__ if one.__module__ == modeling and one.__name__ == name), None)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _require_own(module: Any, host_class: type) -> None:
    """Raises Unreplaced where the module's forward is not that of the host's class.

    A copy of an enabled module loses the one that came with it.
    """
    if (own := vars(module).get("forward")) is not None:
        owner = getattr(own, _OWNER, None)
        if owner is None or owner() is module:
            raise _points.Unreplaced("someone else replaced its forward" if owner is None else "it is enabled already")
        del module.forward
    if type(module).forward is not host_class.forward:  # type: ignore[attr-defined]
        raise _points.Unreplaced(f"{type(module).__name__} has a forward of its own")


def _layer_installer(
    module: nn.Module, host_class: type, norm_name: str, boundaries: packed.Boundaries
) -> Callable[[Calls], _points.Undo]:
    def make(calls: Calls, target: Any) -> Callable[..., Any]:
        norm_class = _base(target.norm, host_class.__module__, norm_name)
        if norm_class is None:
            raise _points.Unreplaced(f"its norm is a {type(target.norm).__name__}")
        _require_own(target.norm, norm_class)
        facts, cache_name = layer.Facts.of(target), _parameters(type(target).forward)[2]
        return replacements.layer_forward(calls, facts, target.forward.__func__, cache_name, boundaries)

    return _installer(module, host_class, make)


def _attention_installer(module: nn.Module, host_class: type, boundaries: packed.Boundaries) -> Callable[[Calls], _points.Undo]:
    def make(calls: Calls, target: Any) -> Callable[..., Any]:
        indexer_class = _base(target.indexer, host_class.__module__, _INDEXER)
        if indexer_class is None:
            raise _points.Unreplaced(f"its indexer is a {type(target.indexer).__name__}")
        _require_own(target.indexer, indexer_class)
        rotate, cache_name = _points.resolve(f"{host_class.__module__}.{_ROTATE}")[2], _parameters(type(target).forward)[4]
        return replacements.attention_forward(calls, rotate, target.forward.__func__, cache_name, boundaries)

    return _installer(module, host_class, make)


def _installer(
    module: nn.Module, host_class: type, make: Callable[[Calls, Any], Callable[..., Any]]
) -> Callable[[Calls], _points.Undo]:
    """Puts what `make` makes of a module in the place of its forward, as an attribute of the module."""
    reference = weakref.ref(module)  # a handle must not keep a model in memory

    def install(calls: Calls) -> _points.Undo:
        target: Any = reference()
        assert target is not None
        _require_own(target, host_class)
        function = make(calls, target)
        setattr(function, _OWNER, reference)
        target.forward = types.MethodType(function, target)

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


def _text_installer(module: nn.Module, boundaries: packed.Boundaries) -> Callable[[Calls], _points.Undo]:
    reference = weakref.ref(module)

    def install(calls: Calls) -> _points.Undo:
        target = reference()
        assert target is not None
        names = _parameters(target.forward)

        def before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            derived: Tensor | None = None
            mask: str | None = packed.OUTSIDE
            tokens = next(_tensors(args, kwargs), None)
            if calls.active and tokens is not None:
                reason = unserved(tokens, model.parameters(), calls.allow_reference)  # the layers are then left to the host too
                if reason is None:
                    given = packed.arguments_of(names, args, kwargs)
                    derived = packed.boundaries_of(given, getattr(model.config, "use_cache", False))
                    if derived is not None and packed.has_compiled_part(model):
                        raise ValueError(packed.IN_PARTS)
                    reason = packed.unserved_mask(given, derived, model.config)
                mask = reason
            if not torch.compiler.is_compiling():
                boundaries.current, boundaries.unserved_mask = derived, mask
                boundaries.mode = None if tokens is None or derived is not None else packed.Mode.now(tokens.device)
                if derived is not None:
                    calls.served += 1

        def after(model: Any, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling():
                boundaries.leave()

        _drop_copied_hooks(target)
        for hook in (before, after):
            setattr(hook, _OWNER, reference)
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


def _drop_copied_hooks(module: nn.Module) -> None:
    """Takes away the hooks that came with a copy of an enabled model."""
    before = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    after = (module._forward_hooks, module._forward_hooks_always_called)
    for hooks, kinds in (before, after):
        for key, hook in list(hooks.items()):
            if (owner := getattr(hook, _OWNER, None)) is not None and owner() is not module:
                del hooks[key]
                kinds.pop(key, None)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
