"""`HybridConfig.from_transformers` of a dict: absent fields, and fields stated twice, mean what Transformers makes of them.

Each dict is read in two ways: by this project, and by the class of Transformers, whose object is then looked at directly and read
by this project too. A dict that Transformers refuses is refused here; what only this project refuses is listed as such.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding
from transformers.models.qwen4_exp import Qwen4ExpConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRotaryEmbedding

from gdn.layers.config import HybridConfig
from gdn.layers.rotary import cos_sin_table
from tests.layers import hf

ROTARY: dict[str, Any] = {
    "qwen3_next": Qwen3NextRotaryEmbedding, "qwen3_5": Qwen3_5TextRotaryEmbedding,
    "qwen3_5_moe": Qwen3_5MoeTextRotaryEmbedding, "qwen4_exp": Qwen4ExpTextRotaryEmbedding,
}  # fmt: skip
COMPOSITES: dict[str, Any] = {"qwen3_5": Qwen3_5Config, "qwen3_5_moe": Qwen3_5MoeConfig, "qwen4_exp": Qwen4ExpConfig}
KINDS = tuple(hf.MODELS)
DEFAULT = {"rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "tie_word_embeddings",
)  # fmt: skip
OF_KIND: dict[str, tuple[str, ...]] = {
    "qwen3_next": (
        "intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "norm_topk_prob", "decoder_sparse_step",
    ),
    "qwen3_5": ("intermediate_size",),
    "qwen3_5_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen4_exp": (
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
        "hc_count", "hc_lowrank",
    ),
}  # fmt: skip


# Heads and experts that fit the defaults of each other.
FITTING: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 1, "linear_num_key_heads": 8, "linear_num_value_heads": 64,
    "num_experts": 12, "indexer_head_dim": 128,
}  # fmt: skip


def least(kind: str) -> dict[str, Any]:
    """What a dict must state: its type, and an indexer with its rotated share where the model here has one."""
    text = "qwen3_next" if kind == "qwen3_next" else f"{kind}_text"
    return {"model_type": text} | (hf.INDEXER | {"partial_rotary_factor": 0.25} if kind == "qwen4_exp" else {})


def full(kind: str) -> dict[str, Any]:
    """Every field of the class, with other values than its defaults where others are served."""
    dense = {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False}
    other = {"norm_topk_prob": False, "output_gate_type": "sigmoid"}
    return {
        **least(kind), **hf.SMALL, **({} if kind == "qwen3_5" else hf.EXPERTS), **(hf.HYPER if kind == "qwen4_exp" else {}),
        **(dense if kind == "qwen3_next" else other if kind == "qwen4_exp" else {}), "rms_norm_eps": 1e-5,
        "linear_conv_kernel_dim": 3, "tie_word_embeddings": True, "hidden_act": "silu", **FITTING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    }  # fmt: skip


def theirs(kind: str, raw: dict[str, Any]) -> PreTrainedConfig:
    """The object that Transformers makes; it may change what it is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf.MODELS[kind][0](**copy.deepcopy(raw))


def assert_resolved(kind: str, raw: dict[str, Any]) -> HybridConfig:
    """Both ways give the same, which is what the object of Transformers says itself."""
    given = copy.deepcopy(raw)
    ours, made = HybridConfig.from_transformers(raw), theirs(kind, raw)
    assert raw == given
    assert ours == HybridConfig.from_transformers(made)
    for name in SAME + OF_KIND[kind]:
        assert getattr(ours, name) == getattr(made, name), name
    assert [one == "linear_attention" for one in ours.layer_types] == [one == "linear_attention" for one in made.layer_types]
    assert ours.mlp_only_layers == tuple(made.mlp_only_layers if kind == "qwen3_next" else ())
    frequencies = ROTARY[kind](made).inv_freq
    table = cos_sin_table(ours.rotary_dim, ours.rope_theta, 2)
    assert torch.equal(table[1], torch.cat([frequencies.cos(), frequencies.sin()]))
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_may_be_absent(kind: str) -> None:
    assert_resolved(kind, least(kind))
    whole = full(kind)
    assert_resolved(kind, whole)
    needed = {"model_type", *(hf.INDEXER if kind == "qwen4_exp" else ())}
    tried = 0
    for name in whole.keys() - needed:
        raw = {key: value for key, value in whole.items() if key != name}
        if name == "num_hidden_layers":
            del raw["layer_types"]  # three of them
        assert_resolved(kind, raw)
        tried += 1
    assert tried > 15


@pytest.mark.parametrize(
    "twice",
    [
        {"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_theta": 1e5},
        {"rope_parameters": DEFAULT, "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.125}, "partial_rotary_factor": 0.5},
        {"rope_parameters": DEFAULT | {"rope_theta": 1e6, "partial_rotary_factor": 0.125}, "rope_scaling": DEFAULT},
        {"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_scaling": DEFAULT, "rope_theta": 1e5},
        {"rope_parameters": YARN, "rope_scaling": DEFAULT | {"rope_theta": 1e6}},
        {"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_scaling": None},
        {"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_scaling": {}},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e6},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "rope_scaling": None, "full_attention_interval": 4},
        {"rope_parameters": {}, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "type": "yarn"}},
        {"rope_parameters": {"rope_theta": 10_000_000, "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
        {"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_theta": None},
        {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": None},
        {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "full_attention_interval": 4},
        {"num_hidden_layers": 6, "full_attention_interval": 3},
        {"num_hidden_layers": 6, "full_attention_interval": 3, "layer_types": None},
        {"num_hidden_layers": 2, "layer_types": ["mamba", "linear_attention"]},
        {"head_dim": 128, "hidden_size": 1024, "num_attention_heads": 4},
        {"hidden_size": 1024, "num_attention_heads": 8},
        {"mlp_only_layers": None, "dtype": "bfloat16", "torch_dtype": "float16"},
        {"num_local_experts": 7, "n_routed_experts": 7, "num_experts_per_token": 3},
        {"layernorm_epsilon": 1e-3, "max_seq_len": 7, "n_layer": 3, "full_attention_interval": 2},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_fields_stated_twice(kind: str, twice: dict[str, Any]) -> None:
    assert_resolved(kind, least(kind) | twice)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_null_rotates_whole_heads(kind: str) -> None:
    raw = least(kind) | {"partial_rotary_factor": None, "head_dim": 128}
    assert assert_resolved(kind, raw).rotary_dim == 128
    made = theirs(kind, least(kind) | {"head_dim": 128})
    made.rope_parameters = {"rope_type": "default", "rope_theta": 1e5}  # of an object: as its model reads it
    assert HybridConfig.from_transformers(made).rotary_dim == 2 * len(ROTARY[kind](made).inv_freq) == 128


# Fields of other types: Transformers' models do not read them, but for Qwen3-Next.
FOREIGN = {
    "num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "intermediate_size": 24,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_the_model_ignores(kind: str) -> None:
    """Which layers have experts, their number and widths, as Transformers builds them."""
    raw = {**least(kind), **hf.SMALL, **FOREIGN, **({"hc_lowrank": 12} if kind == "qwen4_exp" else {})}
    with torch.device("meta"):
        model = hf.MODELS[kind][1](theirs(kind, raw))
    ours = HybridConfig.from_transformers(raw)
    for number, layer in enumerate(model.model.layers):
        assert ours.is_moe(number) == hasattr(layer.mlp, "experts")
        if ours.is_moe(number):
            assert ours.num_experts == layer.mlp.experts.num_experts
            assert ours.norm_topk_prob == getattr(layer.mlp.gate, "norm_topk_prob", True)
            assert ours.moe_intermediate_size == layer.mlp.experts.intermediate_dim
        else:
            assert ours.intermediate_size == layer.mlp.intermediate_size


SCALED: list[dict[str, Any]] = [
    {"rope_parameters": DEFAULT | {"rope_theta": 1e7}, "rope_scaling": YARN},
    {"rope_parameters": DEFAULT | {"rope_theta": 1e7}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6},
    {"rope_scaling": {"type": "default", "rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": YARN, "rope_scaling": None},
]


@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("kind", KINDS)
def test_scaled_frequencies_are_refused_wherever_they_are_stated(kind: str, scaled: dict[str, Any]) -> None:
    raw = full(kind) | scaled
    assert theirs(kind, raw).rope_parameters["rope_type"] in ("yarn", "linear")
    for config in (raw, theirs(kind, raw)):
        with pytest.raises(ValueError, match="^rope_(scaling|parameters): expected rope_type 'default'"):
            HybridConfig.from_transformers(config)


# What Transformers refuses while it makes the configuration or the rotary embedding of its model.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_parameters": DEFAULT | {"rope_theta": None}}, "rope_theta"),
    ({"rope_parameters": DEFAULT | {"rope_theta": "1e6"}}, "rope_theta"),
    ({"rope_parameters": DEFAULT | {"partial_rotary_factor": None}}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": None}}, "rope_parameters"),
    ({"rope_parameters": {"full_attention": DEFAULT | {"rope_theta": 1e6}, "linear_attention": None}}, "rope_parameters"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"full_attention_interval": None}, "full_attention_interval"),
    ({"full_attention_interval": 0}, "full_attention_interval"),
    ({"layer_types": []}, "layer_types"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"head_dim": None}, "head_dim"),
    ({"hidden_act": None}, "hidden_act"),
    ({"rms_norm_eps": None}, "rms_norm_eps"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ({"attention_bias": None}, "attention_bias"),
]
BAD_OF_KIND: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen3_next": [({"mlp_only_layers": 3}, "mlp_only_layers"), ({"norm_topk_prob": None}, "norm_topk_prob")],
    "qwen4_exp": [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"partial_rotary_factor": 1.0}, "indexer_head_dim"),
        ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.75}}, "indexer_head_dim"),
        ({"num_experts": 0}, "num_experts"),
        ({"layer_types": ["attention"] * 40}, "layer_types"),
        ({"indexer_budget": None}, "indexer_budget"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_refuses_is_refused_by_name(kind: str) -> None:
    for changes, field in BAD + BAD_OF_KIND.get(kind, []):
        raw = least(kind) | changes
        with pytest.raises(Exception) as caught, torch.device("meta"):  # many kinds of errors
            ROTARY[kind](theirs(kind, raw))
        assert not isinstance(caught.value, AssertionError)
        with pytest.raises((TypeError, ValueError), match=f"^{field}: expected"):
            HybridConfig.from_transformers(raw)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_types_are_refused(kind: str) -> None:
    """Transformers makes some of these without attention, or with another one."""
    for one in ("sliding_attention", "conv", "hybrid", *(() if kind == "qwen4_exp" else ("indexed_attention",))):
        with pytest.raises(ValueError, match=f"^layer_types: expected one of 'linear_attention'.* got '{one}'"):
            HybridConfig.from_transformers(least(kind) | {"layer_types": [one] * 2, "num_hidden_layers": 2})


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_fields_of_their_own_are_refused(kind: str) -> None:
    raw = least(kind) | {"per_layer_config": {"0": {"attention_bias": True}}}
    for config in (raw, theirs(kind, raw)):
        with pytest.raises(ValueError, match="^per_layer_config: expected none"):
            HybridConfig.from_transformers(config)


@pytest.mark.parametrize("kind", COMPOSITES)
def test_composite_configurations(kind: str) -> None:
    def both(raw: dict[str, Any]) -> HybridConfig:
        """Both ways; the text model is what the class has inside."""
        made = COMPOSITES[kind](**copy.deepcopy(raw))
        ours = HybridConfig.from_transformers(raw)
        assert ours == HybridConfig.from_transformers(made)
        tied = made.tie_word_embeddings or made.text_config.tie_word_embeddings
        text = HybridConfig.from_transformers(made.text_config)
        assert vars(ours) == vars(text) | {"tie_word_embeddings": tied}
        return ours

    whole, nothing = full(kind), least(kind)
    del nothing["model_type"]  # the class decides, not what is inside
    both({"model_type": kind, "text_config": whole})
    both({"model_type": kind, "text_config": nothing})
    both({"model_type": kind, "text_config": theirs(kind, whole).to_dict()})
    if kind != "qwen4_exp":  # whose default has no indexer
        assert both({"model_type": kind, "text_config": None}) == both({"model_type": kind})
    assert both({"model_type": kind, "text_config": nothing, "tie_word_embeddings": True}).tie_word_embeddings
    assert both({"model_type": kind, "text_config": whole, "tie_word_embeddings": False}).tie_word_embeddings
    both({"model_type": kind, "text_config": whole, "hidden_size": whole["hidden_size"]})  # some programs write it there too
    outside: dict[str, Any] = {"rope_scaling": YARN, "hidden_size": 128, "layer_types": ["mamba"]}
    for field, value in outside.items():
        with pytest.raises(ValueError, match=f"^{field}: expected .* as text_config has it, got"):
            HybridConfig.from_transformers({"model_type": kind, "text_config": whole, field: value})
    with pytest.raises(ValueError, match="^text_config.model_type: expected one of"):
        HybridConfig.from_transformers({"model_type": kind, "text_config": whole | {"model_type": "qwen3_next"}})
    with pytest.raises(TypeError, match="^text_config: expected a configuration of Transformers or a dict, got list"):
        HybridConfig.from_transformers({"model_type": kind, "text_config": [1]})
