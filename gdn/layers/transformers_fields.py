"""Fields of `HybridConfig` from a configuration of Transformers, resolved as Transformers 5 resolves them.

A `config.json` may leave out a field, or state it twice. What counts:

    field                  rule
    any                    absent: the default of the model type's class in Transformers; null is no default, but a wrong value
    rope_parameters        a `rope_scaling` that is not empty replaces it as a whole
    rope_theta,            in these parameters; else at the top level; else 10000 and the factor of the model type
    partial_rotary_factor
    rope_type              before its old name `type`; else "default", the only one that is served
    layer_types            before `full_attention_interval`; old names of the types are renamed
    text_config            of a composite model: before the same field outside of it, which must not say another value
    tie_word_embeddings    of a composite model: outside and inside; one of them is enough (which one Transformers reads depends
                           on its model class), because a checkpoint with a head of its own keeps it: `gdn.layers.loading`
    model_type             decides which fields are read: one that the type's model in Transformers ignores is ignored here

An object, which Transformers or another program has resolved already, goes through the same rules.
"""

from collections.abc import Mapping
from typing import Any

from gdn.layers.host_arrays import at_least, one_of, positive, refuse

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
COMPOSITE_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")  # a text model next to a vision model

_MISSING: Any = object()
_ALL: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_WITH_EXPERTS: dict[str, Any] = {
    "hidden_size": 2048, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
# Model type -> fields with the same name and meaning here that its model in Transformers reads, with their defaults there.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_ALL, **_WITH_EXPERTS, "vocab_size": 151_936, "num_hidden_layers": 48, "intermediate_size": 5632,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "qwen3_5_text": {
        **_ALL, "vocab_size": 248_320, "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "intermediate_size": 12_288,
    },
    "qwen3_5_moe_text": {
        **_ALL, **_WITH_EXPERTS, "vocab_size": 248_320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    },
    "qwen4_exp_text": {
        **_ALL, **_WITH_EXPERTS, "vocab_size": 248_320, "num_hidden_layers": 40, "norm_topk_prob": True, "hc_count": 4,
        "hc_lowrank": 320,
    },
}  # fmt: skip
_ROTARY_FACTORS = {"qwen3_next": 0.25, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25, "qwen4_exp_text": 1.0}
# Fields that vLLM's configurations of these models have and Transformers' lack; None = not stated.
_OF_VLLM = ("attn_output_gate", "layer_scale", "index_topk", "index_n_heads", "index_kv_heads", "index_head_dim")
# Fields with another form here.
_OTHERS = (
    "layer_types", "full_attention_interval", "mlp_only_layers", "output_gate_type", "ple_layer_ids", "attention_bias",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "indexer_n_heads", "indexer_kv_heads",
    "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip
_LAYER_TYPES = {
    "linear_attention": "linear_attention", "full_attention": "full_attention", "indexed_attention": "indexed_attention",
    "mamba": "linear_attention", "attention": "full_attention", "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}  # fmt: skip


class Reader:
    """Fields that a configuration object or dict states."""

    def __init__(self, name: str, config: Any) -> None:
        if isinstance(config, str | bytes) or not (isinstance(config, Mapping) or hasattr(config, "__dict__")):
            raise TypeError(f"{name}: expected a configuration of Transformers or a dict, got {type(config).__name__}")
        self.is_mapping = isinstance(config, Mapping)
        self._config = config

    def __call__(self, name: str, default: Any = _MISSING) -> Any:
        """Value of a field, or the default where it is not stated; ValueError where it has neither."""
        value = self._config.get(name, default) if self.is_mapping else getattr(self._config, name, default)
        if value is _MISSING:
            refuse(name, "a value", "no such field")
        return value


def read_fields(config: Any) -> dict[str, Any]:
    """Arguments of `HybridConfig` for a configuration object or dict of Transformers; errors are named after the field."""
    outer = read = Reader("config", config)
    model_type = read("model_type", None)
    one_of("model_type", model_type, (*MODEL_TYPES, *COMPOSITE_TYPES))
    if model_type in COMPOSITE_TYPES:
        model_type = f"{model_type}_text"
        text = outer("text_config", None)
        read = Reader("text_config", {} if text is None else text)
        one_of("text_config.model_type", read("model_type", model_type), (model_type,))
        _refuse_what_is_not_served(read)
        _refuse_other_values(outer, read, model_type)
    _refuse_what_is_not_served(outer)
    fields = {name: read(name, default) for name, default in _DEFAULTS[model_type].items()}
    fields |= {name: value for name in ("attn_output_gate", "layer_scale") if (value := read(name, None)) is not None}
    for name in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if name in fields:  # Transformers' layer has experts in each of these types
            at_least(name, fields[name], 0 if name == "num_experts" and model_type == "qwen3_next" else 1)
    fields |= _layers(read, model_type, fields["num_hidden_layers"], fields["hidden_act"])
    fields |= _rotary(read, model_type)
    fields |= _indexer(read, model_type)
    if model_type == "qwen4_exp_text":
        at_least("head_dim", fields["head_dim"], 1)
        at_least("indexer_head_dim", fields["index_head_dim"], int(fields["head_dim"] * fields["partial_rotary_factor"]))
    return fields | {"tie_word_embeddings": any(_flag(one, "tie_word_embeddings") for one in (outer, read))}


def _refuse_other_values(outer: Reader, read: Reader, model_type: str) -> None:
    """Transformers ignores fields of the text model outside of `text_config`: one with another value is a mistake."""
    defaults = _DEFAULTS[model_type] | dict.fromkeys((*_OF_VLLM, *_OTHERS))
    for name, default in defaults.items():
        stated, inside = outer(name, None), read(name, default)
        if stated is not None and stated != inside:
            refuse(name, f"{inside!r}, as text_config has it", f"{stated!r} outside of it")


def _refuse_what_is_not_served(read: Reader) -> None:
    # An object of Transformers always has a view of its layers as `per_layer_config`.
    if isinstance(read("per_layer_config", None), Mapping) or read("is_heterogeneous", False):
        refuse("per_layer_config", "none: layers with fields of their own are not served", "some")
    if read("ple_layer_ids", None):
        refuse("ple_layer_ids", "none: per-layer embeddings are not served", read("ple_layer_ids"))
    if read("attention_bias", False) is not False:
        refuse("attention_bias", "False: biases in attention are not served", repr(read("attention_bias")))


def _flag(read: Reader, name: str) -> bool:
    value = read(name, False)
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    return value


def _layers(read: Reader, model_type: str, count: int, hidden_act: str) -> dict[str, Any]:
    """Fields that say what each layer is."""
    is_hyper = model_type == "qwen4_exp_text"
    given = read("layer_types", None)
    if given is None:
        period = read("full_attention_interval", 4)
        at_least("num_hidden_layers", count, 1)
        at_least("full_attention_interval", period, 1)
        given = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    _list("layer_types", given)
    for one in given:  # Transformers names attention with an indexer before it renames old types
        allowed = [name for name, new in _LAYER_TYPES.items() if is_hyper or new != "indexed_attention"]
        one_of("layer_types", one, tuple(name for name in allowed if not (is_hyper and name == "attention")))
    types = tuple("linear_attention" if _LAYER_TYPES[one] == "linear_attention" else "full_attention" for one in given)
    fields: dict[str, Any] = {
        "layer_types": types,
        "projection_layout": "interleaved" if model_type == "qwen3_next" else "flat",
        "gdn_gate_activation": hidden_act,
    }
    if is_hyper:
        fields |= {"residual": "hyper", "gdn_gate_activation": read("output_gate_type", None) or hidden_act}
    if model_type == "qwen3_next" and (dense := read("mlp_only_layers", None)) is not None:
        _list("mlp_only_layers", dense)
        fields["mlp_only_layers"] = tuple(dense)
    return fields


def _list(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}: expected a list, got {type(value).__name__}")


def _rotary(read: Reader, model_type: str) -> dict[str, Any]:
    """Fields of the rotary embedding. The sections of mrope matter for image positions alone, which are not served."""
    given, scaling = read("rope_parameters", None), read("rope_scaling", None)
    is_replaced = bool(scaling) and scaling is not given  # an object of Transformers has one value with two names
    name, parameters = ("rope_scaling", scaling) if is_replaced else ("rope_parameters", given or {})
    if not isinstance(parameters, Mapping):
        raise TypeError(f"{name}: expected a dict, got {type(parameters).__name__}")
    if nested := [one for one in _LAYER_TYPES if one in parameters]:
        refuse(name, "one rotary embedding for all layers", f"one for {', '.join(nested)}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        refuse(name, "rope_type 'default': scaled frequencies are not served", f"rope_type {kind!r}")
    # An object has resolved what its model then reads, in which a missing factor rotates whole heads.
    factor = read("partial_rotary_factor", _ROTARY_FACTORS[model_type] if read.is_mapping else 1.0)
    found = {"partial_rotary_factor": parameters.get("partial_rotary_factor", 1.0 if factor is None else factor)}
    if "rope_theta" in parameters:
        found["rope_theta"] = parameters["rope_theta"]
    else:
        found["rope_theta"] = read("rope_theta", 10_000.0) if read.is_mapping else read("rope_theta")
    for one, value in found.items():
        positive(one, value)
    return {one: float(value) for one, value in found.items()}


def _indexer(read: Reader, model_type: str) -> dict[str, Any]:
    """Fields of the indexer. Token-wise ones, which Transformers lacks, have vLLM's names."""
    if model_type == "qwen4_exp_text":
        names = {
            "index_n_heads": "indexer_n_heads", "index_kv_heads": "indexer_kv_heads", "index_head_dim": "indexer_head_dim",
            "index_topk": "indexer_budget", "index_ratio": "indexer_compress_ratio",
        }  # fmt: skip
        found = {ours: read(theirs, None) for ours, theirs in names.items()}
        for ours, value in found.items():
            if not value:
                refuse(names[ours], "a positive number: qwen4_exp without an indexer is not served", value)
        if found["index_kv_heads"] != 1:
            refuse("indexer_kv_heads", "1", found["index_kv_heads"])
        return found
    if not read("index_topk", None):
        return {}
    return {
        "index_topk": read("index_topk"),
        "index_n_heads": read("index_n_heads"),
        "index_kv_heads": read("index_kv_heads", None) or 1,
        "index_head_dim": read("index_head_dim"),
    }
