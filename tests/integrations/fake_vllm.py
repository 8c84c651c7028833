"""Modules of vLLM's names with as little in them as the adapter touches, so that its class is built and run as in an engine."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.vllm_engine import CHANNELS, HV, H, Host, K, V

Tensor = torch.Tensor
HIDDEN = 24
LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

op_registry_oot: dict[str, type] = {}
context = SimpleNamespace(attn_metadata=None, layers={})


class PluggableLayer:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
        def decorator(layer_cls: Any) -> Any:
            assert name is not None and name not in op_registry_oot
            op_registry_oot[name] = layer_cls
            return layer_cls

        return decorator if _decorated_layer_cls is None else decorator(_decorated_layer_cls)


class Linear:
    """A projection as the host's are: it returns a pair, and may keep its weight in whatever form."""

    def __init__(self, rows: int, columns: int, quantised: bool) -> None:
        self.weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5
        self.quant_method = type("AWQLinearMethod" if quantised else "UnquantizedLinearMethod", (), {})()

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class QwenGatedDeltaNetAttention(PluggableLayer):
    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        host: Host = config.host
        self.__dict__.update(vars(host.layer))
        self.prefix, self.gqa_interleaved_layout, self.num_spec = prefix, gqa_interleaved_layout, host.num_spec
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = H, HV, K, V
        self.key_dim, self.value_dim = H * K, HV * V
        self.conv1d, self.A_log, self.dt_bias = host.layer.conv1d, host.layer.A_log, host.layer.dt_bias
        self.norm = SimpleNamespace(group_size=None, norm_before_gate=True, **vars(host.layer.norm))
        self.in_proj_qkvz = Linear(CHANNELS + HV * V, HIDDEN, vllm_config.quantised)
        self.in_proj_ba = Linear(2 * HV, HIDDEN, False)
        self.out_proj = Linear(HIDDEN, HV * V, vllm_config.quantised)
        self.dtypes = vllm_config.dtypes
        self._checkpoint_alignment = None
        for name, value in vllm_config.changes.items():
            setattr(self, name, value)
        context.layers[prefix] = self

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes  # type: ignore[no-any-return]

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(pages.shape[1:]) for pages in self.kv_cache)  # type: ignore[attr-defined]

    def split_ba(self, ba: Tensor) -> Any:
        return ba.chunk(2, dim=-1)

    def forward_cuda(self, hidden_states: Tensor) -> Tensor:
        return torch.full_like(hidden_states, 7)  # the host's own result

    def _warmup_prefill_kernels(self, qkv_or_qkvz: Tensor, v_dim: int) -> None:
        self.is_warm = True

    def _forward_core_fused_norm_packed(self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
        if context.attn_metadata is None:
            self._warmup_prefill_kernels(mixed_qkvz, 0)
            return
        core_attn_out.fill_(7)


def qwen_gdn_attention_core_fused_norm_packed(mixed_qkvz: Any, ba: Any, core_attn_out: Any, layer_name: Any) -> None:
    context.layers[layer_name]._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)


def is_conv_state_dim_first() -> bool:
    return context.dim_first  # type: ignore[no-any-return]


def get_forward_context() -> Any:
    return context


class GDNAttentionMetadata:
    num_prefills = num_decodes = num_decode_tokens = num_actual_tokens = 0
    checkpoint = spec_query_start_loc = spec_state_indices_tensor = non_spec_state_indices_tensor = None
    spec_sequence_masks = spec_token_indx = non_spec_token_indx = num_accepted_tokens = None
    prefill_query_start_loc = prefill_state_indices = prefill_has_initial_state = None


class MambaPrefillCheckpointMetadata:
    checkpoint_offsets = state_indices = None


def config(*, quantised: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> SimpleNamespace:
    """A VllmConfig. changes: attributes of the layer, or of the configuration by the names below."""
    top = {"lora_config": None, "fuse_norm_quant": False, "mode": "none", "dtypes": (dtype, torch.float32)}
    chosen = {name: changes.pop(name, default) for name, default in top.items()}
    return SimpleNamespace(
        quantised=quantised, dtypes=chosen["dtypes"], changes=changes, lora_config=chosen["lora_config"],
        model_config=SimpleNamespace(dtype=dtype), cache_config=SimpleNamespace(mamba_cache_mode=chosen["mode"]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=32),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(fuse_norm_quant=chosen["fuse_norm_quant"]), max_cudagraph_capture_size=48
        ),
    )  # fmt: skip


_library: list[Any] = []


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the modules where vLLM's are imported from."""
    names = {
        LAYER: {"QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention, "_encode_layer_name": lambda prefix: prefix,
                "qwen_gdn_attention_core_fused_norm_packed": qwen_gdn_attention_core_fused_norm_packed},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": op_registry_oot},
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": is_conv_state_dim_first},
        "vllm.model_executor.layers.mamba.checkpoint": {"MambaPrefillCheckpointMetadata": MambaPrefillCheckpointMetadata},
        "vllm.v1.attention.backends.gdn_attn": {"GDNAttentionMetadata": GDNAttentionMetadata},
        "vllm.forward_context": {"get_forward_context": get_forward_context},
    }  # fmt: skip
    for full, content in names.items():
        parts = full.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
            if length > 1:
                setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], sys.modules[name])
        for name, value in content.items():
            setattr(sys.modules[full], name, value)
    op_registry_oot.clear()
    context.layers.clear()
    context.attn_metadata, context.dim_first = None, False
    if not _library:
        library = torch.library.Library("vllm", "FRAGMENT")
        library.define("qwen_gdn_attention_core_fused_norm_packed(Tensor q, Tensor b, Tensor(a!) core, str layer_name) -> ()")
        library.impl(
            "qwen_gdn_attention_core_fused_norm_packed", qwen_gdn_attention_core_fused_norm_packed, "CompositeExplicitAutograd"
        )
        _library.append(library)
