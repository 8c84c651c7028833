"""vLLM's Gated DeltaNet layer with the part between its projections on gdn's kernels, as a subclass that vLLM builds itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gdn.integrations import _vllm_parts, _vllm_replay
from gdn.integrations._calls import Calls, short_name, unserved_device
from gdn.integrations._vllm_pages import Page
from gdn.integrations._vllm_replay import Replay
from gdn.integrations._vllm_replay_step import step_of
from gdn.integrations._vllm_step import Step
from gdn.integrations._vllm_warm_up import Limits, unserved_replay, warm_up

Tensor = torch.Tensor
HALVES = (torch.bfloat16, torch.float16)
CHECKPOINT_ALIGNMENT = 64  # tokens: where a prefill can store its state


@dataclass(frozen=True)
class LayerFacts:
    """What decides whether a layer is served. Sizes are of one rank."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    token_dtype: torch.dtype
    conv_dtype: torch.dtype
    state_dtype: torch.dtype
    activation: str | None = "silu"
    gate_activation: str = "silu"
    norm_group_size: int | None = None
    norm_before_gate: bool = True
    has_lora: bool = False
    fuses_norm_and_quantisation: bool = False
    stores_checkpoints: bool = False  # the prefix cache keeps states from inside prompts


def refusal(facts: LayerFacts, allow_reference: bool = False) -> str | None:
    """Why a layer is left to the host; None where it is served.

    Parameters
    ----------
    facts : LayerFacts
    allow_reference : bool
        Serve float32 tokens too, which have no kernel.
    """
    if facts.token_dtype not in HALVES and not (allow_reference and facts.token_dtype == torch.float32):
        return f"its tokens are {short_name(facts.token_dtype)}"
    if facts.conv_dtype != facts.token_dtype:
        return f"its windows are {short_name(facts.conv_dtype)}, its tokens {short_name(facts.token_dtype)}"
    if facts.state_dtype not in (torch.float32, torch.bfloat16):
        return f"its states are {short_name(facts.state_dtype)}"
    if facts.num_v_heads % facts.num_k_heads:
        return f"its {facts.num_v_heads} value heads are no multiple of {facts.num_k_heads} key heads"
    K, V = facts.head_k_dim, facts.head_v_dim
    channels = 2 * facts.num_k_heads * K + facts.num_v_heads * V
    if (reason := _vllm_parts.refusal(K, V, channels, facts.stores_checkpoints)) is not None:
        return reason
    if facts.activation not in ("silu", "swish", None):
        return f"its activation is {facts.activation}"
    if facts.gate_activation not in ("silu", "swish", "sigmoid"):
        return f"the activation of its gate is {facts.gate_activation}"
    if facts.norm_group_size is not None or not facts.norm_before_gate:
        return "its norm is in groups" if facts.norm_group_size is not None else "its norm comes after the gate"
    if facts.has_lora:
        return "LoRA parts its projections"
    if facts.fuses_norm_and_quantisation:
        return "the host fuses its norm with the quantisation of the output projection"
    return None


def facts_of(layer: Any, vllm_config: Any) -> LayerFacts:
    """The facts of a layer that the host has built."""
    conv_dtype, state_dtype = layer.get_state_dtype()[:2]
    passes = vllm_config.compilation_config.pass_config
    return LayerFacts(
        num_k_heads=layer.num_k_heads // layer.tp_size,
        num_v_heads=layer.num_v_heads // layer.tp_size,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        token_dtype=vllm_config.model_config.dtype,
        conv_dtype=conv_dtype,
        state_dtype=state_dtype,
        activation=layer.activation,
        gate_activation=layer.norm.activation,
        norm_group_size=layer.norm.group_size,
        norm_before_gate=layer.norm.norm_before_gate,
        has_lora=vllm_config.lora_config is not None,
        fuses_norm_and_quantisation=bool(passes.fuse_norm_quant) and _is_quantised(layer.out_proj),
        stores_checkpoints=vllm_config.cache_config.mamba_cache_mode == "align",
    )


def _is_quantised(linear: Any) -> bool:
    method = getattr(linear, "quant_method", None)
    return method is not None and type(method).__name__ != "UnquantizedLinearMethod"


_NAMED = 4  # layers that the line at start-up names for a reason


class Layers:
    """What became of the layers that the host built since the adapter was enabled."""

    def __init__(self, calls: Calls, strict: bool, told: Callable[[str], None], replay: Replay) -> None:
        self.calls, self.strict, self._told, self._was_told = calls, strict, told, False
        self.replay = replay
        self._left: dict[str, list[str]] = {}  # reason -> layers
        self._decode: dict[str, int] = {}  # how served layers decode -> their number

    def decide(self, prefix: str, reason: str | None) -> None:
        """Counts a layer; with strict, one that is not served is an error."""
        self.calls.serves(reason)
        if reason is None:
            return
        self._left.setdefault(reason, []).append(prefix)
        if self.strict:
            raise RuntimeError(f"gdn.integrations.vllm, strict: {prefix} would be left to the host: {reason}")

    def decodes(self, how: str) -> None:
        """Counts a served layer, which decodes this way."""
        self._decode[how] = self._decode.get(how, 0) + 1

    def tell(self, warm_up_s: float | None = None) -> None:
        """Says once, when all layers are there, how many are served, which are not and why."""
        if self._was_told or (warm_up_s is None and self.calls.served):  # a served layer will say it, with the time
            return
        self._was_told = True
        took = "" if warm_up_s is None else f", ready in {warm_up_s:.1f} s"
        left = "".join(f"; {len(names)} left to the host: {reason} ({_some(names)})" for reason, names in self._left.items())
        decode = "".join(f"; {how}" if len(self._decode) == 1 else f"; {n}: {how}" for how, n in self._decode.items())
        self._told(f"{self.calls.served} Gated DeltaNet layers run on gdn's kernels{took}{decode}{left}")


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def layer_class(host: Any, forward_context: Any, conv_dim_first: Callable[[], bool], layers: Layers) -> type:
    """The subclass.

    Parameters
    ----------
    host : module
        qwen_gdn_linear_attn of vLLM.
    forward_context : module
        vllm.forward_context.
    conv_dim_first : callable
        Whether pages hold windows with channels first.
    layers : Layers
        Is told of every layer.
    """

    class GatedDeltaNet(host.QwenGatedDeltaNetAttention):  # type: ignore[misc]
        _gdn_page: Page | None = None  # of a layer that decodes by replay

        def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, vllm_config, *args, **kwargs)
            allow_reference = layers.calls.allow_reference
            reason = unserved_device(self.dt_bias.device, allow_reference)  # a machine may have GPUs of several kinds
            self._gdn_refusal = reason or refusal(facts_of(self, vllm_config), allow_reference)
            layers.decide(self.prefix, self._gdn_refusal)
            if self._gdn_refusal is not None:
                return
            self._gdn_step, self._gdn_page = _step(self, vllm_config, conv_dim_first(), layers)
            scheduler = vllm_config.scheduler_config
            captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0  # rows, some of them padding
            self._gdn_limits = Limits(scheduler.max_num_batched_tokens, max(scheduler.max_num_seqs, captured))
            if vllm_config.cache_config.mamba_cache_mode == "align":
                self._checkpoint_alignment = CHECKPOINT_ALIGNMENT  # the prefill stores states at any multiple

        def get_state_shape(self) -> Any:
            return super().get_state_shape() if self._gdn_page is None else self._gdn_page.shapes

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            spec = super().get_kv_cache_spec(vllm_config)
            return spec if self._gdn_page is None else replace(spec, num_speculative_blocks=0)

        def get_attn_backend(self) -> Any:
            return super().get_attn_backend() if self._gdn_page is None else layers.replay.backend

        def forward_cuda(self, hidden_states: Tensor) -> Tensor:
            if self._gdn_refusal is not None:
                result: Tensor = super().forward_cuda(hidden_states)
                return result
            qkvz, _ = self.in_proj_qkvz(hidden_states)
            ba, _ = self.in_proj_ba(hidden_states)
            # The step writes every row, those of padding too: zeros here would take 20 us of 8192 tokens.
            core = qkvz.new_empty(len(hidden_states), self.value_dim // self.tp_size)
            torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed(
                qkvz, ba, core, layer_name=host._encode_layer_name(self.prefix)
            )
            output: Tensor = self.out_proj(core)[0]
            return output

        def _warmup_prefill_kernels(self, qkv_or_qkvz: Tensor, v_dim: int) -> None:
            # The host's own steps call it in the dry run, whichever of them a refused layer takes.
            layers.tell()
            super()._warmup_prefill_kernels(qkv_or_qkvz, v_dim)

        def _forward_core_fused_norm_packed(self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
            if self._gdn_refusal is not None:
                super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)
                return
            batches = forward_context.get_forward_context().attn_metadata
            metadata = batches.get(self.prefix) if isinstance(batches, dict) else None
            if metadata is None:  # the host measures its memory, all layers are there
                core_attn_out.zero_()
                begin = time.perf_counter()
                warm_up(self, self._gdn_step, mixed_qkvz, ba, self._gdn_limits)
                layers.tell(time.perf_counter() - begin)
                return
            self._gdn_step(mixed_qkvz, ba, core_attn_out, metadata)

    return GatedDeltaNet


def _step(layer: Any, vllm_config: Any, conv_dim_first: bool, layers: Layers) -> tuple[Step, Page | None]:
    """The step of a served layer, and its page where it decodes by replay."""
    facts = _vllm_replay.replay_facts(layer, vllm_config, has_host=layers.replay.backend is not None)
    page, reason = None, _vllm_replay.refusal(facts)
    if reason is None:
        page = _vllm_replay.page_of_layer(layer)
        phase = _vllm_replay.fold_phase(layer.prefix, page.fold_every)
        step = step_of(layer, conv_dim_first=conv_dim_first, page=page, fold_phase=phase)
        if not layers.calls.allow_reference:
            reason = unserved_replay(layer, step, vllm_config.model_config.dtype)
    if page is None or reason is not None:
        page, step = None, step_of(layer, conv_dim_first=conv_dim_first)
    layers.decodes(_vllm_replay.told(facts, page, reason))
    return step, page
