"""What `adapter_cost` measures: a call of every adapter for every kind of batch, at the sizes of a rank of Qwen3-Next-80B.

A host's own objects stand around the adapters as far as they cost time there: layers are modules, whose parameters are looked up
by `__getattr__`, and tensors of a step are views.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gdn.integrations import _sglang_step as sglang_step
from gdn.integrations import deepgemm, fla, flashinfer
from gdn.integrations._calls import Calls
from gdn.integrations._kept import ServedOf
from gdn.integrations._sglang_kernel import Serving, kernel_class
from gdn.integrations._vllm_layer import Layers, layer_class
from gdn.integrations._vllm_replay import Replay
from tests.integrations import vllm_engine

H, HV, K, V, WIDTH = 4, 8, 128, 128, 4  # a rank of Qwen3-Next-80B of four
CHANNELS = 2 * H * K + HV * V
ROWS, DRAFTS, LENGTH = 8, 3, 512  # sequences, drafts of each, tokens of a prompt
SLOTS = 64
Call = Callable[[], Any]


def nothing() -> None:
    """What is apart where the host calls nothing."""


@dataclass(frozen=True)
class Path:
    """A call of an adapter, with its tensors.

    apart: what it calls besides the operators and is not the adapter's; its time is left out. operators: how many it calls.
    views: tensors that the host's call has in another form than its operators take, or return: in a batch of one, in one tensor
    with others, as rows for two operators. Whoever calls the operators there makes them. is_step: a layer's step by a fused
    operator; else a function of another library, in which a single operator stands for its own.
    """

    what: str
    step: Call
    apart: Call = nothing
    operators: int = 1
    views: int = 0
    is_step: bool = True


def literal(function: Callable[..., Any], *positional: Any, **named: Any) -> Call:
    """function(..) with these arguments, written out as in a program: to spread a tuple or a dictionary takes longer."""
    space = {"function": function} | {f"_{place}": value for place, value in enumerate(positional)} | named
    arguments = [*(f"_{place}" for place in range(len(positional))), *(f"{name}={name}" for name in named)]
    exec(f"def make({', '.join(space)}):\n    return lambda: function({', '.join(arguments)})", made := {})
    call: Call = made["make"](**space)
    return call


def zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def int32(device: torch.device, values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


# --- vLLM -----------------------------------------------------------------------------------------------------------------------


class VllmLayer(nn.Module):
    """What the adapter reads of vLLM's layer; its class derives from this one."""

    def __init__(self, device: torch.device, interleaved: bool) -> None:
        super().__init__()
        layer = vllm_engine.layer((H, HV), (K, V), interleaved=interleaved, num_spec=DRAFTS)
        vars(self).update(vars(vllm_engine.as_module(layer).to(device)), prefix="layers.0", out_proj=None)
        norm: Any = self.norm
        norm.group_size, norm.norm_before_gate = None, True
        windows = zeros(device, SLOTS, WIDTH - 1 + DRAFTS, CHANNELS)
        self.kv_cache = (windows, zeros(device, SLOTS, HV, V, K, dtype=torch.float32))

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.bfloat16, torch.float32

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(part.shape[1:]) for part in self.kv_cache)


class _Constructed(VllmLayer):
    """vLLM's class, with the arguments of its constructor."""

    def __init__(self, config: Any, vllm_config: Any) -> None:
        super().__init__(config.device, config.interleaved)


def vllm_layer(device: torch.device, interleaved: bool) -> tuple[Any, Any]:
    """The adapter's layer, built as in an engine, and the engine's forward context, which holds the metadata of a step."""
    context = SimpleNamespace(attn_metadata=None)
    host = SimpleNamespace(QwenGatedDeltaNetAttention=_Constructed)
    layers = Layers(Calls(allow_reference=device.type == "cpu"), False, lambda text: None, Replay())
    made = layer_class(host, SimpleNamespace(get_forward_context=lambda: context), lambda: False, layers)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16), lora_config=None,
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_norm_quant=False), max_cudagraph_capture_size=64),
        kv_transfer_config=None, parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )  # fmt: skip
    return made(SimpleNamespace(device=device, interleaved=interleaved), vllm_config), context


def vllm_batches(device: torch.device) -> dict[str, SimpleNamespace]:
    """One token of each sequence, drafts, prompts, the same with checkpoints, and prompts behind rows of one token."""
    prompts = {"prompts": [LENGTH] * ROWS}
    kinds: dict[str, dict[str, Any]] = {
        "decode": {"decode": ROWS}, "drafts": {"drafts": [1 + DRAFTS] * ROWS, "columns": 1 + DRAFTS}, "prompts": prompts,
        "prompts, checkpoints": prompts | {"checkpoints": [0] * ROWS}, "decode + prompts": prompts | {"decode": ROWS},
    }  # fmt: skip
    with device:
        return {name: vllm_engine.batch(**given) for name, given in kinds.items()}


def vllm(device: torch.device) -> Iterator[Path]:
    """The method that vLLM's operator calls between the projections."""
    for interleaved in (False, True):
        layer, context = vllm_layer(device, interleaved)
        for name, metadata in vllm_batches(device).items():
            tokens = metadata.num_actual_tokens
            rows = (zeros(device, tokens, CHANNELS + HV * V), zeros(device, tokens, 2 * HV), zeros(device, tokens, HV * V))
            batch = {layer.prefix: metadata}

            def step(layer: Any = layer, context: Any = context, batch: Any = batch, rows: Any = rows) -> None:
                context.attn_metadata = batch
                layer._forward_core_fused_norm_packed(*rows)

            layout = "interleaved" if interleaved else "flat"
            both = "+" in name  # rows, gates and result of the prompts, out of tensors that the rows of decode begin
            yield Path(f"vLLM, {layout}, {name}", step, operators=1 + both, views=3 * both)


# --- SGLang ---------------------------------------------------------------------------------------------------------------------


def sglang(device: torch.device) -> Iterator[Path]:
    """The methods of the kernel object, and the whole step of its backend's decode."""
    calls = Calls(allow_reference=True)
    kernel = kernel_class(object)(None, Serving(calls))
    states = zeros(device, SLOTS, HV, V, K, dtype=torch.float32)
    weights = {"A_log": zeros(device, HV, dtype=torch.float32), "dt_bias": zeros(device, HV)}
    drafted = ROWS * (1 + DRAFTS)
    buffer = zeros(device, ROWS, 1 + DRAFTS, HV, V, K, dtype=torch.float32)

    def given(tokens: int) -> dict[str, Any]:
        offsets = int32(device, range(0, tokens + 1, tokens // ROWS))
        return {"ssm_states": states, "cache_indices": int32(device, range(ROWS)), "query_start_loc": offsets}

    def rows(tokens: int) -> tuple[Tensor, ...]:
        packed = zeros(device, tokens, CHANNELS)
        q, k, v = packed.split((H * K, H * K, HV * V), dim=1)
        heads = (q.view(1, tokens, H, K), k.view(1, tokens, H, K), v.view(1, tokens, HV, V))
        return (packed, *heads, zeros(device, tokens, HV), zeros(device, tokens, HV))

    packed, q, k, v, a, b = rows(ROWS)
    one = given(ROWS)
    yield Path("SGLang, decode", literal(kernel.decode, q, k, v, a, b, **weights, **one), views=2)  # a, b
    whole = {name: value for name, value in one.items() if name != "query_start_loc"}
    whole |= {"scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V}
    # q, k, v out of one tensor, in two calls, and a, b
    yield Path("SGLang, packed_decode", literal(kernel.packed_decode, packed, a, b, **weights, **whole), views=4)

    _, prompt_q, prompt_k, prompt_v, _, _ = rows(ROWS * LENGTH)
    prompts = given(ROWS * LENGTH)
    g, beta = (zeros(device, 1, ROWS * LENGTH, HV, dtype=torch.float32) for _ in range(2))
    yield Path("SGLang, extend", literal(kernel.extend, prompt_q, prompt_k, prompt_v, g, beta, **prompts))

    _, draft_q, draft_k, draft_v, draft_a, draft_b = rows(drafted)
    verify = {**given(drafted), "intermediate_states_buffer": buffer, "intermediate_state_indices": int32(device, range(ROWS))}
    yield Path(
        "SGLang, target_verify",
        literal(kernel.target_verify, q=draft_q, k=draft_k, v=draft_v, a=draft_a, b=draft_b, **weights, **verify),
        views=2,
    )
    yield from _sglang_steps(device, states, weights)


class SglangLayer(SimpleNamespace):
    """What the adapter reads of SGLang's layer."""


def _sglang_steps(device: torch.device, states: Tensor, weights: dict[str, Tensor]) -> Iterator[Path]:
    layer = SglangLayer(
        num_q_heads=H, num_k_heads=H, num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=V, v_dim=HV * V, bias=None,
        activation="silu", conv_weights=zeros(device, CHANNELS, WIDTH), **weights,
    )  # fmt: skip
    cache = SimpleNamespace(conv=[zeros(device, SLOTS, CHANNELS, WIDTH - 1)], temporal=states, replayssm_d=None)
    pair = (zeros(device, ROWS, CHANNELS + HV * V), zeros(device, ROWS, 2 * HV))
    rows, a, b = zeros(device, ROWS, CHANNELS), zeros(device, ROWS, HV), zeros(device, ROWS, HV)
    slots = int32(device, range(ROWS))

    known = ServedOf()

    def step(mixed_qkv: Any, a: Any, b: Any) -> Any:
        assert sglang_step.refusal(layer, cache, mixed_qkv, known=known(layer), allow_reference=True) is None
        return sglang_step.step(layer, cache, mixed_qkv, a, b, slots)

    yield Path("SGLang, whole step of rows", lambda: step(rows, a, b), views=1)  # the result
    yield Path("SGLang, whole step of projections", lambda: step(pair, None, None), views=2)  # and the norm's gate


# --- Transformers ---------------------------------------------------------------------------------------------------------------


class _Given(nn.Module):
    """A projection that returns the same rows again and again, so that no product is timed."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows


class _Same(nn.Module):
    """A layer that does nothing, to be called as the host calls its own."""

    def forward(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **others: Any) -> Tensor:
        return hidden_states


def enter(text_model: Any, **given: Any) -> None:
    """Begins a call of the model, whose hooks ask once what its layers need not ask again."""
    for hook in text_model._forward_pre_hooks.values():
        hook(text_model, (), given)


def transformers(device: torch.device) -> Iterator[Path]:
    """A layer of Qwen3-Next, as the layer around it calls it, with a static cache; its projections and the call itself apart."""
    from transformers.cache_utils import StaticCache
    from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

    from gdn.integrations.transformers import enable
    from tests.gpu.test_transformers import cache_name

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=K, linear_value_head_dim=V,
        layer_types=["linear_attention"], num_experts=0,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(False)
    layer: Any = model.model.layers[0].linear_attn
    same, projections = _Same(), {name: getattr(layer, name) for name in ("in_proj_qkvz", "in_proj_ba")}
    enable(model, strict=True, allow_reference=True)
    enter(model.model, input_ids=torch.zeros(ROWS, 1, dtype=torch.long, device=device))
    for name, length in (("decode", 1), ("prompts", LENGTH)):
        hidden = zeros(device, ROWS, length, 64)
        given = {one: _Given(projection(hidden.view(-1, 64))) for one, projection in projections.items()}
        given["out_proj"] = _Given(hidden.view(-1, 64))
        cache = StaticCache(config=config, max_cache_len=16)
        passed_on = {"use_cache": True, "output_router_logits": False}  # as the model does
        call = literal(layer, hidden_states=hidden, **{cache_name(layer): cache}, attention_mask=None, **passed_on)

        def step(given: Any = given, call: Call = call) -> Tensor:
            layer._modules.update(given)
            result: Tensor = call()
            return result

        def apart(given: Any = given, hidden: Tensor = hidden, cache: Any = cache) -> None:
            layer._modules.update(given)
            for module in given.values():
                module(hidden)
            same(hidden_states=hidden, cache=cache, attention_mask=None, use_cache=True, output_router_logits=False)

        step()  # the cache has a state from here on
        yield Path(f"Transformers, {name}", step, apart, views=2)  # tokens [B, T, hidden] as rows, and back


# --- functions ------------------------------------------------------------------------------------------------------------------


def functions(device: torch.device) -> Iterator[Path]:
    """FLA's, FlashInfer's and DeepGEMM's functions, by the arguments that engines pass."""
    yield from (replace(path, is_step=False) for path in (*_functions(device), *_deepgemm(device)))


def _functions(device: torch.device) -> Iterator[Path]:

    def heads(count: int, batch: int, length: int) -> Tensor:
        return zeros(device, batch, length, count, K)

    q, k, v = heads(H, 1, ROWS * LENGTH), heads(H, 1, ROWS * LENGTH), heads(HV, 1, ROWS * LENGTH)
    g, beta = (zeros(device, 1, ROWS * LENGTH, HV, dtype=torch.float32) for _ in range(2))
    state = zeros(device, ROWS, HV, V, K, dtype=torch.float32)
    offsets = int32(device, range(0, ROWS * LENGTH + 1, LENGTH))
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": offsets, "use_qk_l2norm_in_kernel": True}
    yield Path("FLA, chunk", literal(fla.chunk_gated_delta_rule, q, k, v, g=g, beta=beta, **options))
    one = (heads(H, ROWS, 1), heads(H, ROWS, 1), heads(HV, ROWS, 1))
    small = (zeros(device, ROWS, 1, HV, dtype=torch.float32), zeros(device, ROWS, 1, HV, dtype=torch.float32))
    given: dict[str, Any] = {"g": small[0], "beta": small[1], "initial_state": state, "output_final_state": True}
    yield Path("FLA, recurrent", literal(fla.fused_recurrent_gated_delta_rule, *one, **given, use_qk_l2norm_in_kernel=True))
    rows, gate, gain = zeros(device, ROWS * HV, V), zeros(device, ROWS * HV, V), zeros(device, V)
    yield Path("FLA, rms_norm_gated", lambda: fla.rms_norm_gated(rows, gate, gain, None))

    flat = (q[0], k[0], v[0])
    yield Path("FlashInfer, chunk", literal(flashinfer.chunk_gated_delta_rule, *flat, None, beta[0], **options), views=5)
    weights = {"A_log": zeros(device, HV, dtype=torch.float32), "dt_bias": zeros(device, HV, dtype=torch.float32)}
    raw = {"a": zeros(device, ROWS, 1, HV), "b": zeros(device, ROWS, 1, HV)}
    slots = int32(device, range(ROWS))
    pool = {"state": None, "initial_state": state, "initial_state_indices": slots}
    yield Path("FlashInfer, decode", literal(flashinfer.gated_delta_rule_decode_pretranspose, *one, **pool, **weights, **raw))
    yield Path("FlashInfer, decode, K first", literal(flashinfer.gated_delta_rule_decode, *one, state=state, **weights, **raw))
    drafts = (heads(H, ROWS, 1 + DRAFTS), heads(H, ROWS, 1 + DRAFTS), heads(HV, ROWS, 1 + DRAFTS))
    gates = {"a": zeros(device, ROWS, 1 + DRAFTS, HV), "b": zeros(device, ROWS, 1 + DRAFTS, HV)}
    kept = zeros(device, ROWS, 1 + DRAFTS, HV, V, K, dtype=torch.float32)
    verify: dict[str, Any] = {"initial_state": state, "initial_state_indices": slots, "intermediate_states_buffer": kept}
    yield Path("FlashInfer, mtp", literal(flashinfer.gated_delta_rule_mtp, *drafts, **verify, **weights, **gates))


def _deepgemm(device: torch.device) -> Iterator[Path]:
    heads, dim, keys, page = 32, 128, 1024, 64
    fp8 = torch.float8_e4m3fn
    q, kv = zeros(device, ROWS, heads, dim).to(fp8), (zeros(device, keys, dim).to(fp8), torch.ones(keys, device=device))
    weights, starts, ends = torch.zeros(ROWS, heads, device=device), int32(device, [0] * ROWS), int32(device, [keys] * ROWS)
    yield Path("DeepGEMM, mqa", lambda: deepgemm.fp8_fp4_mqa_logits((q, None), kv, weights, starts, ends, clean_logits=False))
    cache = torch.zeros(keys // page, page, 1, dim + 4, dtype=torch.uint8, device=device)
    lengths, table = int32(device, [keys // ROWS] * ROWS), int32(device, range(keys // page)).view(ROWS, -1)
    schedule = deepgemm.get_paged_mqa_logits_metadata(lengths, page, 132)
    rows = q.view(ROWS, 1, heads, dim)
    yield Path(
        "DeepGEMM, paged mqa",
        lambda: deepgemm.fp8_fp4_paged_mqa_logits((rows, None), cache, weights, lengths, table, schedule, keys // ROWS),
    )


def every(device: torch.device) -> Iterator[Path]:
    """All of them, those of Transformers where it is installed."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    for group in (vllm, sglang, *([transformers] if has_transformers else ()), functions):
        yield from group(device)
