"""Modules of vLLM's names with as little in them as the adapter touches, so that its class is built and run as in an engine."""

from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import stand_in
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


@dataclass(frozen=True)
class MambaSpec:
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    num_speculative_blocks: int = 0

    @property
    def page_size_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


class GDNAttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.num_spec = vllm_config.num_spec

    def build(
        self,
        common_prefix_len: Any,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        fast_build: Any = False,
    ) -> Any:
        return common_attn_metadata.described  # what a test says

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        return blk_table  # what a test says

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


class GDNAttentionBackend:
    @staticmethod
    def get_builder_cls() -> Any:
        return GDNAttentionMetadataBuilder


class CommonAttentionMetadata:
    num_reqs = 0
    query_start_loc_cpu = seq_lens = seq_lens_cpu_upper_bound = None

    def compute_num_computed_tokens(self) -> Any:
        return self.seq_lens


class MambaBase:
    kv_cache: Any

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        pages, offset, states = kv_cache.squeeze((1, 2)), 0, []
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):  # type: ignore[attr-defined]
            size = prod(shape) * dtype.itemsize
            states.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(states)

    def get_attn_backend(self) -> Any:
        return GDNAttentionBackend


class Model:
    """The class of a model: it tells what its layers keep, from the configuration alone."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
        return vllm_config.shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> Any:
        return vllm_config.dtypes


class ModelOfKinds(Model):
    """One with layers of several kinds."""

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: Any) -> Any:
        return MambaSpec(vllm_config.shapes, vllm_config.dtypes), MambaSpec(((3, 8),), (torch.float32,))


class ModelRegistry:
    @staticmethod
    def resolve_model_cls(architecture: str, model_config: Any) -> Any:
        return model_config.model, architecture


class Platform:
    @classmethod
    def _align_hybrid_block_size(cls, vllm_config: Any, backend_cls: Any) -> None:
        model = ModelRegistry.resolve_model_cls("", vllm_config.model_config)[0]
        if hasattr(model, "get_mamba_specs_from_config"):
            vllm_config.page_size = max(one.page_size_bytes for one in model.get_mamba_specs_from_config(vllm_config))
            return
        shapes = model.get_mamba_state_shape_from_config(vllm_config)
        vllm_config.page_size = MambaSpec(shapes, model.get_mamba_state_dtype_from_config(vllm_config)).page_size_bytes


class CudaPlatform(Platform):
    """The platforms of devices have it from theirs."""


class QwenGatedDeltaNetAttention(PluggableLayer, MambaBase):
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
        self.shapes = tuple(tuple(pages.shape[1:]) for pages in self.kv_cache)
        self._checkpoint_alignment = None
        for name, value in vllm_config.changes.items():
            setattr(self, name, value)
        context.layers[prefix] = vllm_config.compilation_config.static_forward_context[prefix] = self
        vllm_config.shapes = self.get_state_shape()

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes  # type: ignore[no-any-return]

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes  # type: ignore[no-any-return]

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = MambaSpec(self.get_state_shape(), self.get_state_dtype())
        return replace(spec, num_speculative_blocks=self.num_spec)

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


def compile_factors() -> dict[str, object]:
    return {"VLLM_USE_AOT_COMPILE": True}


def is_conv_state_dim_first() -> bool:
    return context.dim_first  # type: ignore[no-any-return]


def get_temporal_copy_spec(state: Any, block_ids: Any, cur_block_idx: Any, num_accepted_tokens: Any) -> Any:
    raise NotImplementedError


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
    top = {
        "lora_config": None, "fuse_norm_quant": False, "mode": "none", "dtypes": (dtype, torch.float32),
        "kv_transfer_config": None, "pipeline_ranks": 1, "model": Model,
    }  # fmt: skip
    chosen = {name: changes.pop(name, default) for name, default in top.items()}
    return SimpleNamespace(
        quantised=quantised, dtypes=chosen["dtypes"], changes=changes, lora_config=chosen["lora_config"],
        kv_transfer_config=chosen["kv_transfer_config"], use_v2_model_runner=True,
        parallel_config=SimpleNamespace(pipeline_parallel_size=chosen["pipeline_ranks"]),
        model_config=SimpleNamespace(dtype=dtype, architecture="", model=chosen["model"]),
        cache_config=SimpleNamespace(mamba_cache_mode=chosen["mode"]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=32),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(fuse_norm_quant=chosen["fuse_norm_quant"]), max_cudagraph_capture_size=48,
            static_forward_context={},
        ),
    )  # fmt: skip


_library: list[Any] = []


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the modules where vLLM's are imported from; the switch that `enable` sets is taken back."""
    monkeypatch.setenv("GDN_VLLM", "0")
    monkeypatch.delenv("GDN_VLLM")
    names = {
        LAYER: {"QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention, "_encode_layer_name": lambda prefix: prefix,
                "qwen_gdn_attention_core_fused_norm_packed": qwen_gdn_attention_core_fused_norm_packed},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": op_registry_oot},
        "vllm.model_executor.layers.mamba.mamba_utils": {
            "is_conv_state_dim_first": is_conv_state_dim_first, "get_temporal_copy_spec": get_temporal_copy_spec,
        },
        "vllm.model_executor.layers.mamba.checkpoint": {"MambaPrefillCheckpointMetadata": MambaPrefillCheckpointMetadata},
        "vllm.v1.attention.backends.gdn_attn": {
            "GDNAttentionMetadata": GDNAttentionMetadata, "GDNAttentionMetadataBuilder": GDNAttentionMetadataBuilder,
            "GDNAttentionBackend": GDNAttentionBackend,
        },
        "vllm.v1.attention.backend": {"CommonAttentionMetadata": CommonAttentionMetadata},
        "vllm.v1.kv_cache_interface": {"MambaSpec": MambaSpec},
        "vllm.model_executor.layers.mamba.abstract": {"MambaBase": MambaBase},
        "vllm.model_executor.models": {"ModelRegistry": ModelRegistry},
        "vllm.platforms.interface": {"Platform": Platform},
        "vllm.forward_context": {"get_forward_context": get_forward_context},
        "vllm.envs": {"compile_factors": compile_factors},
    }  # fmt: skip
    stand_in.put(monkeypatch, names)
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
