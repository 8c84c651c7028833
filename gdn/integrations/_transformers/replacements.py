"""The functions that take the place of a layer's forward. They keep its argument names, which differ by version."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn.integrations._calls import Calls
from gdn.integrations._transformers import cached, layer, packed, qsa
from gdn.integrations._transformers.again import Again

_OLD_NAME = "the cache has its old name"
_UNREAD = ("use_cache", "output_router_logits", "output_hidden_states", "output_attentions")  # by any layer of these
_ABSENT: Any = object()


def _cache_type() -> type:
    """The host's class of caches. By name: a type checker that follows an import reads all of the host, for half a minute."""
    found: type = importlib.import_module("transformers.cache_utils").Cache
    return found


def layer_forward(
    calls: Calls, facts: layer.Facts, original: Callable[..., Any], cache_name: str, boundaries: packed.Boundaries
) -> Callable[..., Any]:
    """The forward of a Gated DeltaNet layer. cache_name is the host's name of its second argument."""
    cache_type, again = _cache_type(), Again(facts, calls, boundaries)

    def left(self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> Any:
        # The host's wrapper takes the old name beside no other: a cache that was not given must not be passed as None.
        given = others if cache is None else {cache_name: cache, **others}
        return original(self, hidden_states, attention_mask=attention_mask, **given)

    def forward(self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> Any:
        reason = given = order = None
        if others:
            reason = named_otherwise(others, cache_name, "cache_params", cache_type)
            given, order = others.get("cu_seq_lens_q"), others.get("seq_idx")
        if not calls.active:
            return left(self, hidden_states, cache, attention_mask, others)
        # Dynamo traces no reads of the model's positions, so there are no boundaries.
        is_compiling = torch.compiler.is_compiling()
        derived = None if is_compiling else boundaries.current
        offsets, states = derived if given is None else given, None
        if offsets is None and order is None and cache is not None and not is_compiling:
            states = cached.made_states(cache, facts.layer_idx)
        if reason is None:
            reason = layer.refusal(facts, self, hidden_states, cache, others, derived, calls.allow_reference)
        if not calls.serves(reason):
            return left(self, hidden_states, cache, attention_mask, others)
        return layer.step(facts, self, hidden_states, cache, attention_mask, offsets, states)

    if cache_name == "cache":

        def replacement(
            self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, *,
            use_cache: Any = _ABSENT, output_router_logits: Any = _ABSENT, output_hidden_states: Any = _ABSENT,
            output_attentions: Any = _ABSENT, **others: Any,
        ) -> Any:  # fmt: skip
            if attention_mask is None and not others:
                result = again.call(self, hidden_states, cache)
                if result is not None:
                    return result
            passed_on = _given(use_cache, output_router_logits, output_hidden_states, output_attentions)
            return forward(self, hidden_states, cache, attention_mask, others | passed_on)

        return replacement

    def replacement_of_old_name(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, *,
        use_cache: Any = _ABSENT, output_router_logits: Any = _ABSENT, output_hidden_states: Any = _ABSENT,
        output_attentions: Any = _ABSENT, **others: Any,
    ) -> Any:  # fmt: skip
        if attention_mask is None and not others:
            result = again.call(self, hidden_states, cache_params)
            if result is not None:
                return result
        passed_on = _given(use_cache, output_router_logits, output_hidden_states, output_attentions)
        return forward(self, hidden_states, cache_params, attention_mask, others | passed_on)

    return replacement_of_old_name


def _given(*values: Any) -> dict[str, Any]:
    """Arguments that no layer reads, as far as they were given. Named in a signature they need not be looked up in each call."""
    return {name: value for name, value in zip(_UNREAD, values, strict=True) if value is not _ABSENT}


def attention_forward(
    calls: Calls, rotate: Callable[..., Any], original: Callable[..., Any], cache_name: str, boundaries: packed.Boundaries
) -> Callable[..., Any]:
    """The forward of an attention layer with an indexer. rotate is the host's `apply_rotary_pos_emb`."""
    cache_type = _cache_type()

    def replacement(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        *further: Any,
        **others: Any,
    ) -> Any:
        given = (hidden_states, position_embeddings, attention_mask, *further)
        reason = named_otherwise(others, cache_name, "past_key_values", cache_type)
        if calls.active and reason is None:
            reason = qsa.refusal(self, hidden_states, attention_mask, boundaries.unserved_mask, calls.allow_reference)
        if not calls.active or not calls.serves(reason):
            return original(self, *given, **others)
        cache = further[0] if further else others.get(cache_name)
        return qsa.step(self, rotate, hidden_states, position_embeddings, attention_mask, cache)

    return replacement


def named_otherwise(others: dict[str, Any], cache_name: str, old_name: str, cache_type: type) -> str | None:
    """Why a call is left to the host whose cache has its old name, which the host takes with a warning; TypeError for any other
    name: the host would run without the cache, and generate wrong tokens."""
    reason = None
    for name in others:
        if isinstance(others[name], cache_type) and name != cache_name:
            if name != old_name:
                raise TypeError(f"{name}: expected the cache under the name {cache_name!r}, got it under this one")
            reason = _OLD_NAME
    return reason
