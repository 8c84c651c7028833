"""What each adapter touches of its host. Data alone: nothing here imports a host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Host:
    """A host library.

    functions are dotted names of the functions and methods that an adapter replaces or calls, by the module that defines them;
    classes maps a class to the attributes that the adapter reads. tested is the version range in words, for messages only.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: str
    functions: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


FLA = Host(
    name="fla",
    package="fla",
    distributions=("fla-core", "flash-linear-attention"),
    tested="0.6.0",
    functions=(
        *_under("fla.ops.gated_delta_rule", "chunk.chunk_gated_delta_rule", "fused_recurrent.fused_recurrent_gated_delta_rule"),
    ),
)


def _modeling(kind: str, prefix: str) -> tuple[str, ...]:
    """Functions of a modeling module with Gated DeltaNet layers."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")
    methods = (f"{prefix}GatedDeltaNet.forward", f"{prefix}RMSNormGated.forward")
    return _under(f"transformers.models.{kind}.modeling_{kind}", *names, *methods)


TRANSFORMERS_MODELS = (  # folder of the model, prefix of its layers' classes, class of its text model
    ("qwen3_next", "Qwen3Next", "Qwen3NextModel"),
    ("qwen3_5", "Qwen3_5", "Qwen3_5TextModel"),
    ("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextModel"),
    ("qwen4_exp", "Qwen4ExpText", "Qwen4ExpTextModel"),
)
_LAYER = (
    "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "layer_idx", "activation", "conv1d", "dt_bias",
    "A_log", "norm", "out_proj",
)  # fmt: skip
_APART, _TOGETHER = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
_CACHE_LAYER = ("conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized")
_QWEN4 = "transformers.models.qwen4_exp.modeling_qwen4_exp"

TRANSFORMERS = Host(
    name="transformers",
    package="transformers",
    distributions=("transformers",),
    tested="5.20 to 5.24",
    functions=(
        *(name for kind, prefix, _ in TRANSFORMERS_MODELS for name in _modeling(kind, prefix)),
        *(f"transformers.models.{kind}.modeling_{kind}.{model}.forward" for kind, _, model in TRANSFORMERS_MODELS),
        "transformers.cache_utils.LinearAttentionLayer.lazy_initialization",
        *_under(_QWEN4, "Qwen4ExpTextAttention.forward", "Qwen4ExpTextQSAIndexer.forward", "apply_rotary_pos_emb"),
    ),
    classes=MappingProxyType(
        {
            f"transformers.models.{kind}.modeling_{kind}.{prefix}GatedDeltaNet": (
                *_LAYER,
                *(_TOGETHER if kind == "qwen3_next" else _APART),
            )
            for kind, prefix, _ in TRANSFORMERS_MODELS
        }
        | {
            f"transformers.models.{kind}.modeling_{kind}.{prefix}RMSNormGated": ("weight", "variance_epsilon", "activation")
            for kind, prefix, _ in TRANSFORMERS_MODELS
        }
        | {
            f"{_QWEN4}.Qwen4ExpTextAttention": (
                "head_dim",
                "scaling",
                "attention_dropout",
                "layer_idx",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "q_norm",
                "k_norm",
                "indexer",
            ),
            f"{_QWEN4}.Qwen4ExpTextQSAIndexer": (
                "index_n_heads",
                "index_kv_heads",
                "index_head_dim",
                "compress_ratio",
                "block_topk",
                "layer_idx",
                "index_qk_proj",
                "q_layernorm",
                "k_layernorm",
            ),
        }  # fmt: skip
        | {"transformers.cache_utils.LinearAttentionLayer": (*_CACHE_LAYER, "has_previous_state", "record_past")}
    ),
)

HOSTS: dict[str, Host] = {host.name: host for host in (FLA, TRANSFORMERS)}
