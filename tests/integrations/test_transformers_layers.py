"""Layers of Transformers: refusals, what `enable` leaves alone, the cache's name, packed sequences told apart by positions."""

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from gdn.integrations import transformers, transformers_layers
from tests.integrations.test_transformers import close, enable, model_of

KIND = "qwen3_next"


def layer_of(model: PreTrainedModel, index: int = 0) -> Any:
    return model.model.layers[index].linear_attn  # type: ignore[union-attr]


def cache_of(**changes: Any) -> Any:
    """A cache of one layer, as far as a refusal reads it."""
    states = {"conv_states": {0: torch.zeros(2, 128, 4)}, "recurrent_states": {0: torch.zeros(2, 4, 16, 16)}}
    layer = {"record_past": False, **states, **changes}
    return types.SimpleNamespace(layers=[types.SimpleNamespace(**layer)])


def refusal(module: Any = None, hidden: Tensor | None = None, cache: Any = None, mask: Any = None, **keywords: Any) -> str | None:
    module = layer_of(model_of(KIND)) if module is None else module
    hidden = torch.zeros(2, 3, 64) if hidden is None else hidden
    with torch.no_grad():
        return transformers_layers.refusal(transformers_layers.Layer(module), hidden, cache, mask, keywords, allow_reference=True)


def changed(**attributes: Any) -> Any:
    module = copy.deepcopy(layer_of(model_of(KIND)))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def hooked() -> Any:
    module = changed()
    module.conv1d._hf_hook = object()
    return module


OFFSETS = torch.tensor([0, 3])
REFUSALS: dict[str, Any] = {
    "the tokens are on meta": lambda: refusal(hidden=torch.empty(2, 3, 64, device="meta")),
    "activations 'gelu' and 'silu'": lambda: refusal(changed(activation="gelu")),
    "weights that hooks of accelerate load": lambda: refusal(hooked()),
    "an attention mask that is not [B, T]": lambda: refusal(mask=torch.ones(2, 1, 3, 3)),
    "seq_idx without cu_seq_lens_q": lambda: refusal(seq_idx=torch.zeros(2, 3)),
    "packed sequences in more than one row": lambda: refusal(cu_seq_lens_q=OFFSETS),
    "packed sequences with a cache": lambda: refusal(hidden=torch.zeros(1, 3, 64), cache=cache_of(), cu_seq_lens_q=OFFSETS),
    "a cache that records past inputs (assisted decoding)": lambda: refusal(cache=cache_of(record_past=True)),
    "a window that has not as many columns as the filter": lambda: refusal(
        cache=cache_of(conv_states={0: torch.zeros(2, 128, 3)})
    ),
    "states of the cache on another device": lambda: refusal(cache=cache_of(recurrent_states={0: torch.empty(1, device="meta")})),
    "the states are float16": lambda: refusal(cache=cache_of(recurrent_states={0: torch.zeros(1).half()})),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refused_calls(reason: str) -> None:
    assert REFUSALS[reason]() == reason
    assert refusal() is None and refusal(cache=cache_of()) is None


def test_head_dims_without_a_fused_kernel() -> None:
    assert (
        transformers_layers.unserved_dims(16, 16, "cpu") is None and transformers_layers.unserved_dims(128, 128, "cuda") is None
    )
    for key, value in ((16, 16), (64, 128), (256, 256)):
        assert transformers_layers.unserved_dims(key, value, "cuda") == f"head dims {key} and {value} have no fused kernel"


@torch.no_grad()
def test_a_refused_call_runs_the_layer_s_own_forward() -> None:
    model = model_of(KIND)
    layer, hidden = layer_of(model), torch.randn(1, 5, 64)

    def recording() -> Tensor:
        cache = DynamicCache(config=model.config)
        cache.layers[0].record_past = True
        return layer(hidden, cache)

    plain = recording()
    with enable("layers", KIND) as handle:
        assert torch.equal(recording(), plain)
        (report, *_) = handle.report().points
        assert dict(report.left) == {"a cache that records past inputs (assisted decoding)": 1} and report.served == 0


@torch.no_grad()
def test_the_cache_by_position_by_both_names_and_by_a_wrong_one() -> None:
    model, hidden = model_of(KIND), torch.randn(1, 5, 64)
    layer = layer_of(model)
    plain = layer(hidden, DynamicCache(config=model.config))
    with enable("layers", KIND) as handle:
        for given in ("position", "cache", "cache_params"):
            cache = DynamicCache(config=model.config)
            close(layer(hidden, cache) if given == "position" else layer(hidden, **{given: cache}), plain)
            assert cache.layers[0].has_previous_state[0]
        with pytest.raises(TypeError, match="past: expected a cache as cache or cache_params, got one under this name"):
            layer(hidden, past=DynamicCache(config=model.config))
        assert handle.report().points[0].served == 3


def test_layers_that_are_patched_already_or_have_a_forward_of_their_own() -> None:
    model = copy.deepcopy(model_of(KIND))
    first, second = layer_of(model, 0), layer_of(model, 2)
    first.forward = first.forward  # an attribute of the module
    own = type("Own", (type(second),), {"forward": lambda self, hidden_states, **kwargs: hidden_states})
    second.__class__ = own
    with transformers.enable(model, allow_reference=True) as handle:
        whys = {one.path: one.why for one in handle.report().points if one.why}
        assert list(whys.values()) == ["its forward is patched already", "its class has a forward of its own"]
    with pytest.raises(RuntimeError, match="strict: model.layers.0.linear_attn.forward: its forward is patched already; "):
        transformers.enable(model, allow_reference=True, strict=True)


def test_a_patch_of_someone_else_on_top_is_left_alone() -> None:
    model = copy.deepcopy(model_of(KIND))
    layer = layer_of(model)
    with transformers.enable(model, allow_reference=True) as handle:
        ours = layer.forward
        layer.forward = foreign = lambda *args, **kwargs: ours(*args, **kwargs)
    assert layer.forward is foreign and "forward" not in vars(layer_of(model, 2))
    (report, *_) = handle.report().points
    assert report.why == "patched since by someone else, left alone: model.layers.0.linear_attn.forward"


def packed() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randint(1, 131, (1, 12)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])


@torch.no_grad()
def test_positions_that_restart_are_boundaries_without_a_cache() -> None:
    model, (ids, positions) = model_of(KIND), packed()
    alone = torch.cat([model(part).logits for part in ids.split((4, 5, 3), dim=1)], dim=1)
    mixed = model(ids, position_ids=positions, use_cache=False).logits
    assert (mixed - alone).abs().max() > 1e-2 * alone.abs().max(), "Transformers mixes the sequences"
    with enable("layers", KIND):
        close(model(ids, position_ids=positions, use_cache=False).logits, alone)
    assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, mixed), "disable ends it"


@pytest.mark.parametrize("more", [{}, {"use_cache": True}, {"past_key_values": "a cache", "use_cache": False}])
@torch.no_grad()
def test_positions_that_restart_are_refused_with_a_cache(more: dict[str, Any]) -> None:
    model, (ids, positions) = model_of(KIND), packed()
    with enable("layers", KIND), pytest.raises(ValueError, match="position_ids: expected positions that do not restart"):
        model(ids, position_ids=positions, **more)


@torch.no_grad()
def test_positions_that_do_not_restart_or_have_a_mask_are_none_of_our_business() -> None:
    model, (ids, _) = model_of(KIND), packed()
    padded = torch.tensor([[1, 1, 0, *range(1, 10)]])
    with enable("layers", KIND) as handle:
        model(ids, position_ids=torch.arange(12)[None])
        model(ids, position_ids=padded, attention_mask=(torch.arange(12) > 1).long()[None])
        assert handle.report().points[0].served == 2


def test_calls_that_need_gradients_are_left() -> None:
    model, (ids, _) = model_of(KIND), packed()
    with enable("layers", KIND) as handle:
        model(ids)
        assert dict(handle.report().points[0].left) == {"autograd needs gradients, which this project does not record": 1}


def test_the_slots_are_kept() -> None:
    cpu = torch.device("cpu")
    assert transformers_layers._slots(3, cpu) is transformers_layers._slots(3, cpu)
    assert transformers_layers._slots(3, cpu).tolist() == [0, 1, 2]
