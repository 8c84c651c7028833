"""The Transformers adapter: its four models with and without it, in float32, and every refusal."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gdn.integrations import Handle, _hosts, _points, _records, transformers
from tests.integrations.stand_in import parameters
from tests.layers import hf

TOLERANCE = 5e-5  # of the largest logit
LEVELS = ["layers", "functions"]
QUICK_LEVELS = ["layers", pytest.param("functions", marks=pytest.mark.cover)]
FORMS = ["dynamic", *(pytest.param(form, marks=pytest.mark.cover) for form in ("long", "static", "beams", "short"))]
KINDS = [pytest.param(kind, marks=[] if kind == "qwen3_next" else pytest.mark.cover) for kind in hf.MODELS]
FUNCTIONS = [
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "forward",
]


def test_records_are_those_of_the_installed_version() -> None:
    for name in (*_hosts.TRANSFORMERS.functions, *_hosts.TRANSFORMERS.classes):
        assert _records.judge(_hosts.TRANSFORMERS, name, _points.resolve(name)[2]) == _records.Verdict(), name


def test_the_name_of_the_cache_changed_between_versions() -> None:
    """Records hold several versions, any of which may match: until 5.23 the layers' argument was `cache_params`."""
    name = "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet.forward"
    names = {
        version: [one[0] for one in entries[name]["parameters"]] for version, entries in _records.load("transformers").items()
    }
    assert list(names) == ["5.20.0", "5.23.0", "5.24.0"]
    assert "cache_params" in names["5.23.0"] and "cache" in names["5.24.0"] and names["5.20.0"] == names["5.23.0"]
    assert [one[0] for one in parameters("transformers", name)] == names["5.24.0"]


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    return hf.build(kind, seed=3)


def enable(level: str, kind: str) -> Handle:
    """Both levels, on one of the models."""
    model = None if level == "functions" else model_of(kind)
    return transformers.enable(model, level=level, strict=True, allow_reference=True)


@pytest.fixture
def handle() -> Iterator[Handle]:
    with transformers.enable(strict=True, allow_reference=True) as made:
        yield made


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Ids and mask of prompts padded on the left."""
    torch.manual_seed(5)
    longest = max(lengths)
    ids, mask = torch.randint(1, 131, (len(lengths), longest)), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : longest - length] = 0
    return ids, mask


def served(handle: Handle, kind: str) -> dict[str, int]:
    """Calls served by function (of the module of one model) or layer; nothing is left to the host."""
    points = [one for one in handle.report().points if one.path != "position_ids"]
    found = [one for one in points if f".{kind}." in one.path or one.path.endswith("linear_attn.forward")]
    assert found and all(one.replaced and not one.left for one in found), handle.report()
    if handle.options["level"] == "functions":
        return {one.path.rpartition(".")[2]: one.served for one in found}
    return {one.path: one.served for one in found}


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_forward_pass_with_left_padding(kind: str, level: str) -> None:
    model, (ids, mask) = model_of(kind), prompts((70, 9))
    plain = model(ids, attention_mask=mask).logits
    with enable(level, kind) as handle:
        close(model(ids, attention_mask=mask).logits[mask.bool()], plain[mask.bool()])
        layers = {f"model.layers.{index}.linear_attn.forward": 1 for index in (0, 2)}
        expected = dict(zip(FUNCTIONS, (2, 0, 2, 0, 2), strict=True)) if level == "functions" else layers
        assert served(handle, kind) == expected
    assert torch.equal(model(ids, attention_mask=mask).logits, plain), "disable restores"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_generation(kind: str, form: str, level: str) -> None:
    if form == "static" and kind == "qwen4_exp":
        pytest.skip("its indexer has no static cache")
    steps = 64 if form == "long" else 6
    model, (ids, mask) = model_of(kind), prompts((2, 2) if form == "short" else (20, 7))
    options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"num_beams": 3} if form == "beams" else {"cache_implementation": "static"} if form == "static" else {}
    if form == "static":
        options["disable_compile"] = True
    plain = model.generate(ids, attention_mask=mask, **options)
    with enable(level, kind) as handle:
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), plain)
        counts = served(handle, kind)
    if level == "functions":
        assert counts["torch_recurrent_gated_delta_rule"] == 2 * (steps - 1)
    else:
        assert list(counts.values()) == [steps, steps]


@pytest.mark.parametrize("level", QUICK_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_prompt_in_two_parts(kind: str, level: str) -> None:
    model, (ids, _) = model_of(kind), prompts((30, 30))

    def logits() -> Tensor:
        first = model(ids[:, :17], use_cache=True)
        return model(ids[:, 17:], past_key_values=first.past_key_values).logits

    plain = logits()
    with enable(level, kind):
        close(logits(), plain)


@pytest.mark.parametrize("level", LEVELS)
@torch.no_grad()
def test_packed_sequences_without_a_cache(level: str) -> None:
    layer: Any = model_of("qwen3_next").model.layers[0].linear_attn
    handle = enable(level, "qwen3_next")
    hidden, offsets = torch.randn(1, 80, 64), torch.tensor([0, 3, 70, 80], dtype=torch.int32)
    together = layer(hidden, cu_seq_lens_q=offsets)
    handle.disable()
    alone = [layer(hidden[:, start:end]) for start, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
    close(together, torch.cat(alone, dim=1))


def test_calls_that_need_gradients_are_left_and_keep_them(handle: Handle) -> None:
    model, (ids, _) = model_of("qwen3_next"), prompts((5,))
    model(ids).logits.sum().backward()
    weight = model.model.layers[0].linear_attn.A_log  # type: ignore[union-attr]
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    model.zero_grad()
    (chunk, *_) = handle.report().points
    assert dict(chunk.left) == {"autograd needs gradients, which this project does not record": 2} and chunk.served == 0


@pytest.mark.cover  # the compiler: seconds
@pytest.mark.parametrize("level", LEVELS)
@torch.no_grad()
def test_a_compiled_layer_is_one_graph(level: str) -> None:
    layer: Any = model_of("qwen3_next").model.layers[0].linear_attn
    hidden = torch.randn(2, 20, 64)
    expected = layer(hidden)
    with enable(level, "qwen3_next"):
        close(torch.compile(layer, fullgraph=True, backend="aot_eager")(hidden), expected)
    torch.compiler.reset()


def test_enable_twice_and_wrong_calls(handle: Handle) -> None:
    model = model_of("qwen3_next")
    assert transformers.enable(strict=True, allow_reference=True) is handle
    with enable("layers", "qwen3_next") as layers:
        assert transformers.enable(model, strict=True, allow_reference=True) is layers is not handle
        with pytest.raises(ValueError, match="expected the options of the enabled handle"):
            transformers.enable(model, allow_reference=True)
    for call, message in (
        (lambda: transformers.enable(level="layers"), "level: expected 'functions' without a model, got 'layers'"),
        (lambda: transformers.enable(model, level="functions"), "level: expected 'layers' with a model, got 'functions'"),
        (
            lambda: transformers.enable(torch.nn.Linear(1, 1)),
            "model: expected one with layers of Qwen3NextGatedDeltaNet, .*got Linear",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got str"):
        transformers.enable("qwen3_next")  # type: ignore[arg-type]


@torch.no_grad()
def test_the_cpu_is_left_without_allow_reference(hopper: None) -> None:
    model, (ids, _) = model_of("qwen3_next"), prompts((5,))
    plain = model(ids).logits
    with transformers.enable() as handle:
        assert torch.equal(model(ids).logits, plain)
        assert dict(handle.report().points[0].left) == {"the tokens are on cpu": 2}


def rule(**changes: Any) -> dict[str, Any]:
    q, v = torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 4, 16)
    return {"query": q, "key": q, "value": v, "g": torch.zeros(2, 3, 4), "beta": torch.zeros(2, 3, 4), **changes}


META = torch.empty(2, 3, 2, 16, device="meta")
OFFSETS = torch.tensor([0, 3])
WIDE = {name: torch.zeros(1, 3, 4, 260) for name in ("query", "key", "value")}
RULES: dict[str, dict[str, Any]] = {
    "the tokens are on meta": {"query": META},
    "query, key and value differ in dtype": {"value": torch.zeros(2, 3, 4, 16).bfloat16()},
    "head dim 260 has no kernel": WIDE,
    "the states are float16": {"initial_state": torch.zeros(2, 4, 16, 16).half()},
}
CHUNKS: dict[str, dict[str, Any]] = {
    **RULES,
    "key and value head dims differ": {"value": torch.zeros(2, 3, 4, 32)},
    "packed sequences in more than one row": {"cu_seqlens": OFFSETS},
    "packed sequences with a cache": {"query": torch.zeros(1, 3, 2, 16), "cu_seqlens": OFFSETS, "output_final_state": True},
}
RECURRENTS: dict[str, dict[str, Any]] = {**RULES, "packed sequences with a cache": {"cu_seqlens": OFFSETS}}
CONVS: dict[str, dict[str, Any]] = {
    "the tokens are on meta": {"hidden_states": torch.empty(2, 8, 3, device="meta")},
    "activation 'gelu'": {"activation": "gelu"},
    "seq_idx without cu_seq_lens_q": {"seq_idx": OFFSETS},
    "packed sequences in more than one row": {"cu_seq_lens_q": OFFSETS},
}


@pytest.mark.parametrize("reason", CHUNKS)
def test_refused_chunk_calls(reason: str) -> None:
    assert transformers._refuse_chunk(**rule(**CHUNKS[reason]), allow_reference=True) == reason
    assert transformers._refuse_chunk(**rule(), allow_reference=True) is None


@pytest.mark.parametrize("reason", RECURRENTS)
def test_refused_recurrent_calls(reason: str) -> None:
    assert transformers._refuse_recurrent(**rule(**RECURRENTS[reason]), allow_reference=True) == reason


@pytest.mark.parametrize("reason", CONVS)
def test_refused_convolutions(reason: str) -> None:
    given = {"hidden_states": torch.zeros(2, 8, 3), "weight": torch.zeros(8, 4), **CONVS[reason]}
    assert transformers._refuse_conv(**given, allow_reference=True) == reason


def test_refused_updates_and_norms() -> None:
    x, window, weight = torch.zeros(2, 8, 1), torch.zeros(2, 8, 4), torch.zeros(8, 4)
    assert transformers._refuse_conv_update(x, window, weight, allow_reference=True) is None
    narrow = transformers._refuse_conv_update(x, window[..., 1:], weight, allow_reference=True)
    assert narrow == "the window has not as many columns as the filter"
    assert transformers._refuse_conv_update(x, window, weight, None, "gelu", allow_reference=True) == "activation 'gelu'"
    norm: Any = torch.nn.Module()
    norm.weight, norm.activation = torch.ones(16), "gelu"
    assert transformers._refuse_norm(norm, torch.zeros(1, 16), torch.zeros(1, 16), allow_reference=True) == "activation 'gelu'"
    assert transformers._refuse_norm(norm, torch.zeros(1, 16), torch.zeros(1, 16)) == "the tokens are on cpu"
