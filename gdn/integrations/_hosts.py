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
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: str
    functions: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
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
)

_VLLM_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"

_VLLM_QSA = "vllm.models.qwen4_exp.nvidia.ops"
_VLLM_BUILDER = "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder"
_VLLM_BATCH = "vllm.v1.attention.backend.CommonAttentionMetadata"
VLLM_GRAPHS = "vllm.envs.compile_factors"
VLLM_SIZES = "vllm.platforms.interface.Platform._align_hybrid_block_size"
_VLLM_REPLAY = (
    VLLM_SIZES,
    *_under(_VLLM_LAYER, "get_state_shape", "get_kv_cache_spec"),
    *_under("vllm.model_executor.layers.mamba.abstract.MambaBase", "bind_kv_cache", "get_attn_backend"),
    *_under(_VLLM_BUILDER, "__init__", "build", "build_for_cudagraph_capture", "update_block_table"),
    "vllm.v1.attention.backends.gdn_attn.GDNAttentionBackend.get_builder_cls",
    f"{_VLLM_BATCH}.compute_num_computed_tokens",
    "vllm.model_executor.layers.mamba.mamba_utils.get_temporal_copy_spec",  # copies what is behind a window as a whole
)
_VLLM_REPLAY_CLASSES = {
    _VLLM_BATCH: ("num_reqs", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound"),
    "vllm.v1.kv_cache_interface.MambaSpec": ("dtypes", "num_speculative_blocks", "shapes"),
}
VLLM_REPLAY = (*_VLLM_REPLAY, *_VLLM_REPLAY_CLASSES)  # what only replay decode touches
VLLM = Host(
    name="vllm",
    package="vllm",
    distributions=("vllm",),
    tested="0.33.0",
    functions=(
        *_under(_VLLM_LAYER, "__init__", "forward_cuda", "_forward_core_fused_norm_packed"),
        *_under(_VLLM_LAYER, "_warmup_prefill_kernels", "split_ba"),
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.qwen_gdn_attention_core_fused_norm_packed",
        "vllm.model_executor.custom_op.PluggableLayer.register_oot",
        "vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first",
        "vllm.forward_context.get_forward_context",
        VLLM_GRAPHS,
        *_under(f"{_VLLM_QSA}.qsa_indexer", "qsa_select_paged_decode", "warmup_qsa_mqa_paged_decode"),
        *_under(f"{_VLLM_QSA}.qsa", "qsa_sparse_paged_attention", "warmup_qsa_sparse_paged_attention"),
        *_VLLM_REPLAY,
    ),
    replaced=(
        _VLLM_LAYER,
        VLLM_SIZES,
        *_under(_VLLM_QSA, "qsa_indexer.qsa_select_paged_decode", "qsa.qsa_sparse_paged_attention"),
    ),
    classes=MappingProxyType(
        {
            _VLLM_LAYER: (
                "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "gqa_interleaved_layout",
                "conv1d", "in_proj_qkvz", "in_proj_ba", "out_proj", "A_log", "dt_bias", "norm", "split_ba", "get_state_shape",
                "_checkpoint_alignment",
            ),
            "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata": (
                "num_prefills", "num_decodes", "num_decode_tokens", "num_actual_tokens", "checkpoint", "spec_query_start_loc",
                "spec_state_indices_tensor", "non_spec_state_indices_tensor", "spec_sequence_masks", "spec_token_indx",
                "non_spec_token_indx", "num_accepted_tokens", "prefill_query_start_loc", "prefill_state_indices",
                "prefill_has_initial_state",
            ),
            "vllm.model_executor.layers.mamba.checkpoint.MambaPrefillCheckpointMetadata": ("checkpoint_offsets", "state_indices"),
            **_VLLM_REPLAY_CLASSES,
        }
    ),
)  # fmt: skip

_SGLANG_LINEAR = "sglang.srt.layers.attention.linear"
_SGLANG_DISPATCHER = f"{_SGLANG_LINEAR}.gdn_backend.GDNKernelDispatcher"
SGLANG_BACKEND = f"{_SGLANG_LINEAR}.gdn_backend.GDNAttnBackend"
SGLANG_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SGLANG_KERNELS = (
    *_under(_SGLANG_DISPATCHER, "__init__", "decode", "packed_decode", "extend", "target_verify"),
    *_under(f"{_SGLANG_LINEAR}.kernels.kernel_backend.LinearAttnKernelBase", "decode", "extend", "target_verify"),
    *_under("sglang.srt.plugins.hook_registry.HookRegistry", "register", "apply_hooks"),
    "sglang.srt.runtime_context.get_exec",
)
SGLANG_CONVOLUTIONS = {  # where the backend holds a function -> where that is defined
    f"{_SGLANG_LINEAR}.gdn_backend.causal_conv1d_fn": "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn",
    f"{_SGLANG_LINEAR}.gdn_backend.causal_conv1d_update": "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
}
SGLANG = Host(
    name="sglang",
    package="sglang",
    distributions=("sglang",),
    tested="0.5.23",
    functions=(
        *SGLANG_KERNELS,
        *_under(SGLANG_BACKEND, "__init__", "forward_decode"),
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._track_mamba_state_decode",
        "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.mamba2_layer_cache",
        *SGLANG_CONVOLUTIONS.values(),
    ),
    replaced=(f"{_SGLANG_DISPATCHER}.__init__", *_under(SGLANG_BACKEND, "__init__", "forward_decode"), *SGLANG_CONVOLUTIONS),
    classes=MappingProxyType({
        _SGLANG_DISPATCHER: (
            "decode_kernel", "extend_kernel", "supports_packed_decode", "tree_verify_kernel", "verify_kernel",
            "verify_kernel_is_flashinfer",
        ),
        SGLANG_BACKEND: ("enable_mis", "kernel_dispatcher", "requires_contiguous_prefill_state"),
        SGLANG_RUNNER: ("dtype", "model", "req_to_token_pool"),
        "sglang.srt.layers.radix_linear_attention.RadixLinearAttention": (
            "A_log", "activation", "bias", "conv_weights", "dt_bias", "head_k_dim", "head_q_dim", "head_v_dim", "layer_id",
            "num_k_heads", "num_q_heads", "num_v_heads", "v_dim",
        ),
    }),
)  # fmt: skip


def modeling(kind: str) -> str:
    """Module of a model of Transformers."""
    return f"transformers.models.{kind}.modeling_{kind}"


def _functions(kind: str, prefix: str) -> tuple[str, ...]:
    """Functions of a modeling module with Gated DeltaNet layers."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")
    return _under(modeling(kind), *names, f"{prefix}GatedDeltaNet.forward", f"{prefix}RMSNormGated.forward")


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
_ATTENTION = (
    "head_dim", "scaling", "attention_dropout", "layer_idx", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm",
    "indexer",
)  # fmt: skip
_INDEXER = (
    "index_n_heads", "index_kv_heads", "index_head_dim", "compress_ratio", "block_topk", "layer_idx", "index_qk_proj",
    "q_layernorm", "k_layernorm",
)  # fmt: skip
_CACHE_LAYER = ("conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized")
_QWEN4 = modeling("qwen4_exp")

TRANSFORMERS = Host(
    name="transformers",
    package="transformers",
    distributions=("transformers",),
    tested="5.20 to 5.24",
    functions=(
        *(name for kind, prefix, _ in TRANSFORMERS_MODELS for name in _functions(kind, prefix)),
        *(f"{modeling(kind)}.{model}.forward" for kind, _, model in TRANSFORMERS_MODELS),
        "transformers.cache_utils.LinearAttentionLayer.lazy_initialization",
        *_under(_QWEN4, "Qwen4ExpTextAttention.forward", "Qwen4ExpTextQSAIndexer.forward", "apply_rotary_pos_emb"),
    ),
    classes=MappingProxyType(
        {
            f"{modeling(kind)}.{prefix}GatedDeltaNet": (*_LAYER, *(_TOGETHER if kind == "qwen3_next" else _APART))
            for kind, prefix, _ in TRANSFORMERS_MODELS
        }
        | {
            f"{modeling(kind)}.{prefix}RMSNormGated": ("weight", "variance_epsilon", "activation")
            for kind, prefix, _ in TRANSFORMERS_MODELS
        }
        | {
            f"{_QWEN4}.Qwen4ExpTextAttention": _ATTENTION, f"{_QWEN4}.Qwen4ExpTextQSAIndexer": _INDEXER,
            "transformers.cache_utils.LinearAttentionLayer": (*_CACHE_LAYER, "has_previous_state", "record_past"),
        }
    ),
)  # fmt: skip


HOSTS: dict[str, Host] = {host.name: host for host in (DEEPGEMM, FLA, FLASHINFER, SGLANG, TRANSFORMERS, VLLM)}
