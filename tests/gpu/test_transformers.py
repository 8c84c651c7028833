"""The adapter for Transformers on the GPU: four layers with the shapes of Qwen3-Next-80B, bfloat16, against the host's own code.

Errors are judged by the host in float32, with the same weights, and without experts: which expert rounding selects is not ours.
Speeds are of the model with experts; they are printed (`-s`) with whether FLA, which the host then uses, is installed.
"""

import importlib.util
import inspect
import logging
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn.integrations._transformers import qsa
from gdn.integrations.transformers import enable
from gdn.runtime import log

pytest.importorskip("transformers", minversion="5.20")

pytestmark = pytest.mark.gpu

SHAPES = {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 16384,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
WORST = 1.1  # our error against float32, over the host's own in bfloat16
ROUNDS = 7


def build(device: torch.device, num_experts: int) -> Any:
    from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

    return fill(Qwen3NextForCausalLM, Qwen3NextConfig(**SHAPES, **EXPERTS, num_experts=num_experts), device)


def fill(model_type: Any, config: Any, device: torch.device) -> Any:
    """A bfloat16 model with seeded weights, and decays of 0.9 to 0.999 a token."""
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = model_type(config).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 0.1).log())
            elif name.endswith("dt_bias"):
                parameter.fill_(0.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.02)
    return model


def build_sparse(device: torch.device) -> Any:
    """Qwen4Exp: attention with an indexer in the last of four layers."""
    from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        **(SHAPES | {"max_position_embeddings": 40960}), **EXPERTS, num_experts=16, hc_count=2, hc_lowrank=64, indexer_n_heads=16,
        indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    return fill(Qwen4ExpForCausalLM, config, device)


def cache_name(module: Any) -> str:
    """What this version calls the cache in the forward of a model or layer."""
    names = inspect.signature(type(module).forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def static(model: Any, length: int) -> Any:
    from transformers.cache_utils import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def logits(model: Any, ids: torch.Tensor, steps: int = 8) -> torch.Tensor:
    """Of a prompt, and of decode steps that follow it."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    name, length = cache_name(model), ids.shape[1] - steps
    with torch.inference_mode():
        found = [model(ids[:, :length], **{name: cache}).logits]
        found += [model(ids[:, place : place + 1], **{name: cache}).logits for place in range(length, ids.shape[1])]
    return torch.cat(found, dim=1).float()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def tokens(device: torch.device, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(SHAPES["vocab_size"], (batch, length), generator=generator).to(device)


def test_error_against_float32(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model = build(device, 0)
    ids = tokens(device, 3, 700)
    host = logits(model, ids)
    log._told.clear()
    with caplog.at_level(logging.DEBUG, "gdn"), enable(model, strict=True) as handle:
        ours = logits(model, ids)
        points = [one for one in handle.report().points if "linear_attn" in one.path]
        assert [(one.served, dict(one.left)) for one in points] == [(9, {})] * 3
    assert "copied" not in caplog.text, "windows and projections serve as they are"
    exact = logits(model.float(), ids)
    error, of_host = relative_error(ours, exact), relative_error(host, exact)
    print(f"\nerror {error:.2e}, the host's own {of_host:.2e}")
    assert error <= WORST * of_host


def test_packed_rows_are_the_sequences_alone(device: torch.device) -> None:
    model, lengths = build(device, 0), (100, 1, 333, 64)
    ids = tokens(device, 1, sum(lengths))
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    with torch.inference_mode():
        with enable(model, strict=True):
            alone = torch.cat([model(one, use_cache=False).logits for one in ids.split(lengths, dim=1)], dim=1)
            given = model(ids, position_ids=positions, cu_seq_lens_q=offsets, use_cache=False).logits
            derived = model(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(given, derived)
    assert relative_error(given.float(), alone.float()) <= 2e-2  # attention and projections of another shape round otherwise


def test_compiled_decode_with_a_static_cache(device: torch.device) -> None:
    model = build(device, 0)
    name = cache_name(model)
    ids = tokens(device, 2, 72)
    try:
        with torch.inference_mode(), enable(model, strict=True):

            def run(decode: Callable[..., Any]) -> torch.Tensor:
                cache = static(model, 128)
                found = [model(ids[:, :64], **{name: cache}).logits]
                for place in range(64, 72):
                    positions = torch.full((2, 1), place, device=device)
                    found.append(decode(ids[:, place : place + 1], position_ids=positions, **{name: cache}).logits.clone())
                return torch.cat(found, dim=1).float()

            wanted = run(model)
            assert relative_error(run(torch.compile(model, fullgraph=True)), wanted) <= 2e-2
    finally:
        torch._dynamo.reset()


def test_captured_calls_of_a_layer(device: torch.device) -> None:
    """Two graphs, of which the second is replayed first: neither uses index tensors that the other makes."""
    model = build(device, 0)
    linear = model.model.layers[0].linear_attn
    name, shape = cache_name(linear), {"device": device, "dtype": torch.bfloat16}
    prompt, hidden = torch.randn(2, 64, SHAPES["hidden_size"], **shape), torch.randn(8, 2, 1, SHAPES["hidden_size"], **shape)
    with torch.inference_mode(), enable(model, strict=True):

        def begun() -> Any:
            cache = static(model, 128)
            linear(prompt, **{name: cache})
            for tokens in hidden[:6]:  # after some of them, they are no longer asked
                linear(tokens, **{name: cache})
            return cache

        cache = begun()
        wanted = [linear(hidden[number], **{name: cache}).clone() for number in (7, 6)]
        cache, captured = begun(), []
        for number in (6, 7):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured.append((graph, linear(hidden[number], **{name: cache})))
        for (graph, found), exact in zip(reversed(captured), wanted, strict=True):
            graph.replay()
            assert torch.equal(found, exact)


def milliseconds(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Median time of a call on the device, after two that are not counted; `before` is not timed."""
    times = []
    for _ in range(ROUNDS + 2):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def _fla() -> str:
    return "with FLA" if importlib.util.find_spec("fla") else "torch's own path, FLA is not installed"


def test_timing_of_a_prefill(device: torch.device, much_memory: None) -> None:
    model, ids = build(device, 512), tokens(device, 1, 8192)

    def prefill() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    with torch.inference_mode():
        plain = milliseconds(prefill)
        with enable(model, strict=True):
            ours = milliseconds(prefill)
    print(f"\nprefill of 8192 tokens: host {plain:.2f} ms ({_fla()}), gdn {ours:.2f} ms, {plain / ours:.2f} times")
    assert ours <= plain
    if "torch" in _fla():
        assert plain / ours >= 1.5


def test_timing_of_decode_steps(device: torch.device, much_memory: None) -> None:
    model, ids, batch = build(device, 512), tokens(device, 32, 64), 32
    name, linear = cache_name(model), model.model.layers[1].linear_attn
    layer_name = cache_name(linear)
    hidden = torch.randn(batch, 1, 2048, device=device, dtype=torch.bfloat16)

    def times() -> tuple[float, float]:
        cache = static(model, 2048)
        model(ids, **{name: cache})
        layer = milliseconds(lambda: [linear(hidden, **{layer_name: cache}) for _ in range(20)]) / 20
        return layer, milliseconds(lambda: model(ids[:, :1], **{name: cache}))

    with torch.inference_mode():
        plain = times()
        with enable(model, strict=True):
            ours = times()
    for what, host, us in zip(("GDN layer", "model"), plain, ours, strict=True):
        print(f"\ndecode at batch 32, {what}: host {host:.3f} ms ({_fla()}), gdn {us:.3f} ms, {host / us:.2f} times")
        assert us <= host
    assert plain[0] / ours[0] >= 1.5


def test_attention_with_an_indexer(device: torch.device) -> None:
    """One layer on the inputs that the host gives it, with fewer tokens than its budget, so that rounding selects none."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    model = build_sparse(device)
    attention, ids = model.model.layers[3].self_attn, tokens(device, 2, 600)
    kept: dict[str, Any] = {}

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        kept.update(dict(zip(names, args, strict=False)) | kwargs, output=output[0].float())

    hook = attention.register_forward_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        model(ids, use_cache=False)
        hook.remove()
        hidden, positions, mask = (kept[name] for name in ("hidden_states", "position_embeddings", "attention_mask"))
        ours = qsa.step(attention, modeling.apply_rotary_pos_emb, hidden, positions, mask, None)[0].float()
        exact = attention.float()(hidden.float(), tuple(one.float() for one in positions), mask)[0]
    error, of_host = relative_error(ours, exact), relative_error(kept["output"], exact)
    print(f"\nerror {error:.2e}, the host's own {of_host:.2e}")
    assert error <= WORST * of_host


def test_timing_of_a_long_prefill_with_an_indexer(device: torch.device, much_memory: None) -> None:
    """The host loops over the queries in Python, so it runs once on 2048 and once on 4096 tokens. The kernels have to prefill
    32768 in less time than it takes for 4096."""
    model = build_sparse(device)
    with torch.inference_mode():
        for length in (2048, 4096):
            ids = tokens(device, 1, length)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            model(ids, use_cache=True, logits_to_keep=1)
            end.record()
            torch.cuda.synchronize()
            host = start.elapsed_time(end)
            ours = served_prefill_ms(model, ids)
            print(f"\nprefill of {length} tokens with an indexer: host {host:.0f} ms ({_fla()}), gdn {ours:.1f} ms")
            assert ours <= host
        ours = served_prefill_ms(model, tokens(device, 1, 32768))
        print(f"\nprefill of 32768 tokens with an indexer: gdn {ours:.1f} ms")
        assert ours <= host


def served_prefill_ms(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with enable(model, strict=True) as handle:
        ms = milliseconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
        assert all(not one.left and one.served for one in handle.report().points if "position_ids" not in one.path)
    return ms
