"""What each adapter touches of its host. Data alone: nothing here imports a host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Host:
    """A host library.

    functions are dotted names of the functions and methods that an adapter replaces or calls, by the module that defines them;
    replaced are those that `enable` replaces without further options (empty: all of them);
    classes maps a class to the attributes that the adapter reads. tested is the version range in words, for messages only.
    bindings: C++ file, relative to the folder of the package's sources, that binds functions which no Python file defines.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: str
    functions: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    bindings: str | None = None


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


FLA = Host(
    name="fla",
    package="fla",
    distributions=("fla-core", "flash-linear-attention"),
    tested="0.6.0",
    functions=(
        *_under("fla.ops.gated_delta_rule", "chunk.chunk_gated_delta_rule", "fused_recurrent.fused_recurrent_gated_delta_rule"),
        *_under("fla.backends", "register", "BaseBackend.verify", "BaseBackend.is_available", "BaseBackend.is_enabled"),
        *_under(
            "fla.modules", "causal_conv1d.ops.causal_conv1d", "norm.fused_norm_gate.rms_norm_gated"
        ),  # to import, not patched
    ),
    replaced=("fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",),
    classes=MappingProxyType({"fla.backends.BaseBackend": ("backend_type", "package_name", "priority")}),
)

FLASHINFER = Host(
    name="flashinfer",
    package="flashinfer",
    distributions=("flashinfer-python",),
    tested="0.7.2.post1",
    functions=(
        "flashinfer.gdn_prefill.chunk_gated_delta_rule",
        *_under(
            "flashinfer.gdn_decode",
            "gated_delta_rule_decode_pretranspose",
            "gated_delta_rule_decode",
            "gated_delta_rule_mtp",
        ),
    ),
)

_MQA_LOGITS = _under("deep_gemm", "fp8_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits")
DEEPGEMM = Host(
    name="deepgemm",
    package="deep_gemm",
    distributions=("deep_gemm", "sgl-deep-gemm"),
    tested="2.6.1",
    functions=(*_MQA_LOGITS, "deep_gemm.get_paged_mqa_logits_metadata"),
    replaced=_MQA_LOGITS,
    bindings="csrc/apis/attention.hpp",
)

_VLLM_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"
_VLLM_METHODS = _under(_VLLM_LAYER, "__init__", "forward_cuda", "_forward_core_fused_norm_packed", "_warmup_prefill_kernels")
_VLLM_METADATA = "vllm.v1.attention.backends.gdn_attn"
VLLM = Host(
    name="vllm",
    package="vllm",
    distributions=("vllm",),
    tested="0.33.0",
    functions=(
        *_VLLM_METHODS,
        f"{_VLLM_LAYER}.split_ba",
        "vllm.model_executor.custom_op.PluggableLayer.register_oot",
    ),
    replaced=_VLLM_METHODS,
    classes=MappingProxyType({
        _VLLM_LAYER: (
            "A_log", "conv1d", "dt_bias", "gqa_interleaved_layout", "head_k_dim", "head_v_dim", "in_proj_ba",
            "in_proj_qkvz", "norm", "num_k_heads", "num_v_heads", "out_proj",
        ),
        f"{_VLLM_METADATA}.GDNAttentionMetadata": (
            "checkpoint", "non_spec_state_indices_tensor", "non_spec_token_indx", "num_accepted_tokens", "num_actual_tokens",
            "num_decode_tokens", "num_decodes", "num_prefills", "num_spec_decodes", "prefill_has_initial_state",
            "prefill_query_start_loc", "prefill_state_indices", "spec_query_start_loc", "spec_sequence_masks",
            "spec_state_indices_tensor", "spec_token_indx",
        ),
    }),
)  # fmt: skip

_SGLANG_LINEAR = "sglang.srt.layers.attention.linear"
_SGLANG_DISPATCHER = f"{_SGLANG_LINEAR}.gdn_backend.GDNKernelDispatcher"
SGLANG = Host(
    name="sglang",
    package="sglang",
    distributions=("sglang",),
    tested="0.5.23",
    functions=(
        *_under(_SGLANG_DISPATCHER, "__init__", "decode", "packed_decode", "extend", "target_verify"),
        *_under(f"{_SGLANG_LINEAR}.kernels.kernel_backend.LinearAttnKernelBase", "decode", "extend", "target_verify"),
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
    ),
    replaced=(f"{_SGLANG_DISPATCHER}.__init__",),
    classes=MappingProxyType({
        _SGLANG_DISPATCHER: (
            "decode_kernel", "extend_kernel", "supports_packed_decode", "tree_verify_kernel", "verify_kernel",
            "verify_kernel_is_flashinfer",
        ),
    }),
)  # fmt: skip

_FAMILIES = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen4_exp": "Qwen4ExpText"}
TRANSFORMERS_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
# Modeling module -> prefix of its classes' names.
TRANSFORMERS_MODULES = {f"transformers.models.{name}.modeling_{name}": prefix for name, prefix in _FAMILIES.items()}
_MODULES = tuple(TRANSFORMERS_MODULES.items())
_TRANSFORMERS_REPLACED = tuple(
    f"{module}.{name}" for module, prefix in _MODULES for name in (*TRANSFORMERS_FUNCTIONS, f"{prefix}RMSNormGated.forward")
)
_TRANSFORMERS_LAYER = (
    "A_log", "activation", "conv1d", "conv_dim", "conv_kernel_size", "dt_bias", "head_k_dim", "head_v_dim", "layer_idx", "norm",
    "num_k_heads", "num_v_heads", "out_proj",
)  # fmt: skip
_PROJECTIONS = ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z")
TRANSFORMERS_CACHE = "transformers.cache_utils.LinearAttentionCacheLayerMixin"
TRANSFORMERS_INITIALIZATION = "transformers.cache_utils.LinearAttentionLayer.lazy_initialization"
TRANSFORMERS = Host(
    name="transformers",
    package="transformers",
    distributions=("transformers",),
    tested="5.20 to 5.24",
    functions=(
        *_TRANSFORMERS_REPLACED,
        *(f"{module}.{prefix}GatedDeltaNet.forward" for module, prefix in TRANSFORMERS_MODULES.items()),
        *(f"{module}.apply_mask_to_padding_states" for module in TRANSFORMERS_MODULES),
        TRANSFORMERS_INITIALIZATION,
    ),
    replaced=_TRANSFORMERS_REPLACED,
    classes=MappingProxyType({
        **{f"{module}.{prefix}RMSNormGated": ("activation", "variance_epsilon", "weight") for module, prefix in _MODULES},
        **{
            f"{module}.{prefix}GatedDeltaNet": (
                *_TRANSFORMERS_LAYER, *(("in_proj_ba", "in_proj_qkvz") if prefix == "Qwen3Next" else _PROJECTIONS),
            )
            for module, prefix in _MODULES
        },
        TRANSFORMERS_CACHE: (
            "conv_states", "has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "record_past",
            "recurrent_states",
        ),
    }),
)  # fmt: skip

HOSTS: dict[str, Host] = {host.name: host for host in (DEEPGEMM, FLA, FLASHINFER, SGLANG, TRANSFORMERS, VLLM)}
