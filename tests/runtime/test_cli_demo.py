"""`gdn demo` without a GPU: it says what it runs, and finds what is wrong in any operator's result or in the model."""

import dataclasses
import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gdn
from gdn.cli import app
from gdn.cli.demo import calls as demo_calls
from gdn.cli.demo import command as demo_command
from gdn.cli.demo import expected as demo_expected
from gdn.cli.demo import run as demo_run
from gdn.cli.demo.floors import floor_us
from gdn.core.call import operator_named
from gdn.layers import HybridConfig, HybridModel, RMSNorm
from gdn.layers.loading import to_transformers
from gdn.layers.named import NAMED, first_layers
from gdn.models import QWEN3_NEXT_80B
from gdn.ops.delta_rule.inputs import summary_inputs
from gdn.runtime import env, is_explaining, registry
from gdn.testing.timing import Limits
from tests.references import reference

TINY = dataclasses.replace(first_layers(NAMED["tiny"], 2), layer_types=("linear_attention", "full_attention"))
COMPRESSED = dataclasses.replace(TINY, index_ratio=4, residual="hyper", hc_count=2, hc_lowrank=8)
# What each form runs in a phase.
PREFILL = {
    "fused_gdn_prefill", "prepare_indexer", "gather_indexer_cache", "indexer_topk",
    "paged_indexer_topk", "sparse_attention", "attention",
}  # fmt: skip
DECODE = {"fused_gdn_decode", "prepare_indexer", "paged_indexer_topk", "sparse_attention"}
GROUPS = {"compress_indexer_keys"}
OPERATORS = sorted(PREFILL | DECODE | GROUPS | {"add_rms_norm"})


def run(*options: str) -> Any:
    return CliRunner().invoke(
        app.app, ["demo", "--model", "tiny", "--device", "cpu", "--steps", "2", *options], env={"COLUMNS": "200"}
    )


def report(config: HybridConfig = TINY, **changes: Any) -> demo_run.Report:
    plan = demo_run.Plan("small", config, (37, 70, 2, 20), steps=2, drafts=2, device=torch.device("cpu"))
    return demo_run.run(dataclasses.replace(plan, **changes), None)


def wrong(found: demo_run.Report) -> set[str]:
    """Operators of rows, and phases, that did not pass."""
    return {row.operator for row in found.rows if not row.passed} | {one.phase for one in found.deviations if not one.passed}


@pytest.mark.parametrize("fp8", ["0", "1"], ids=["float32", "fp8"])
def test_it_says_what_it_runs(switch: Callable[..., env.Switches], fp8: str) -> None:
    switch(VLLM_QSA_USE_FP8_INDEXER=fp8)
    result = run()
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "tiny, random weights, float32; hidden size 128" in text
    assert "4 layers: 3 of Gated DeltaNet, 1 of attention; 8 experts of width 64, 2 for a token" in text
    assert "2 q and k heads of 64, 4 v heads of 64, convolution of width 4, float32 states" in text
    assert f"top 32, cache and logits in {'FP8' if fp8 == '1' else 'float32'}" in text
    assert "prefill: 5 prompts of 37, 129, 64, 2, 20 tokens in one ragged batch" in text
    assert "2 steps of up to 3 drafts for each sequence; decode: 2 steps of one token" in text
    assert "KiB a token" in text and "tokens per second" in text
    assert "84 calls (reference 83, torch 1), each checked against an independent computation in float64" in text
    assert "and the logits of 31 positions against the reference model, 0 wrong" in text


def test_the_tiny_model_takes_less_than_20_seconds() -> None:
    """CPU time of this process, which a busy machine does not lengthen."""
    threads, before = torch.get_num_threads(), time.process_time()
    try:
        result = CliRunner().invoke(app.app, ["demo", "--device", "cpu"])
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    assert time.process_time() - before < 20


def test_on_a_cpu_every_step_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decode and speculative step of the plan has its calls checked."""
    taken: dict[str, int] = {"decode": 0, "verify": 0}
    for phase in taken:
        true = getattr(demo_run.Engine, phase)

        def step(engine: Any, given: Any, phase: str = phase, true: Any = true) -> Any:
            if engine.on_logits is None:  # not yet measured
                taken[phase] += given if isinstance(given, int) else 1
            return true(engine, given)

        monkeypatch.setattr(demo_run.Engine, phase, step)
    assert report(steps=5).passed
    assert taken == {"decode": 5, "verify": demo_run.VERIFIED}


@pytest.mark.parametrize(("config", "groups"), [(TINY, set()), (COMPRESSED, GROUPS)], ids=["token-wise", "compressed"])
def test_the_operators_of_each_phase(config: HybridConfig, groups: set[str]) -> None:
    """A model of compressed keys compresses them; its residual streams are not normed by an operator."""
    found = report(config)
    assert found.passed, wrong(found)
    norms = {"add_rms_norm"} if config is TINY else set()
    phases = {phase: {row.operator for row in found.rows if row.phase == phase} for phase in demo_run.PHASES}
    assert phases == {"prefill": PREFILL | groups | norms, "verify": DECODE | groups | norms, "decode": DECODE | groups | norms}
    assert all(row.backend == ("torch" if row.operator == "attention" else "reference") for row in found.rows)
    assert [speed.phase for speed in found.speeds] == [one.phase for one in found.deviations] == list(demo_run.PHASES)
    context_parallel = {"causal_conv1d_fn", "chunk_gated_delta_rule", "chunk_summary", "rms_norm_gated"}
    assert set(demo_expected.EXPECTED) == {*OPERATORS, *context_parallel, "fold_states"}
    verify, decode = found.speeds[1:]
    assert decode.tokens == 8 and 8 < verify.tokens < 24  # some drafts are accepted, and some are not


@pytest.mark.parametrize(
    ("config", "fp8"),
    [
        pytest.param(TINY, "0", id="token-wise-bf16"), pytest.param(COMPRESSED, "1", id="compressed-fp8"),
        pytest.param(TINY, "1", id="token-wise-fp8", marks=pytest.mark.cover),
        pytest.param(COMPRESSED, "0", id="compressed-bf16", marks=pytest.mark.cover),
    ],
)  # fmt: skip
def test_what_a_gpu_runs(
    switch: Callable[..., env.Switches], monkeypatch: pytest.MonkeyPatch, config: HybridConfig, fp8: str
) -> None:
    """bfloat16 with times, here of a clock that runs every call once: they change nothing, and every operator has a floor."""
    switch(VLLM_QSA_USE_FP8_INDEXER=fp8)
    timed = []

    def run_once(*calls: Callable[[], object]) -> float:
        timed.append(len(calls))
        for call in calls[:2]:
            call()
        return 1e6

    monkeypatch.setattr(demo_calls, "time_us", run_once)
    monkeypatch.setattr(demo_run.Plan, "dtype", torch.bfloat16)
    plan = demo_run.Plan("small", config, (37, 70, 2, 20), steps=2, drafts=2, device=torch.device("cpu"))
    found = demo_run.run(plan, Limits(copy_gbps=1e3, bf16_tflops=1.0, fp8_tflops=2.0))
    assert found.passed, wrong(found)
    rows = [row for row in found.rows if row.time_us is not None]
    assert len(rows) == len(timed) == len({(row.phase, row.operator) for row in found.rows})
    assert min(timed) > 1  # such small calls are timed on copies
    assert all(row.floor_us is not None and 0 < row.floor_us < 1e4 for row in rows)
    assert all(one.same_dtype.largest > 1e-3 and one.limit.median > 1e-3 for one in found.deviations)


def test_floors_count_what_is_visible() -> None:
    """Two tokens at the end of a sequence of 5 and one at the end of 3 see 4 + 5 + 3 positions."""
    q, caches = torch.zeros(3, 2, 4), (torch.zeros(4, 4, 1, 4),) * 2
    given = {"q": q, "kv_cache": caches, "query_start_loc": torch.tensor([0, 2, 3]), "seq_lens": torch.tensor([5, 3])}
    given["gate"] = None
    calls = {
        "attention": demo_expected.Call("attention", given, given, q),
        "sparse_attention": demo_expected.Call(
            "sparse_attention", given | {"topk_indices": torch.tensor([[0, 1], [2, -1], [0, -1]]), "gate": q}, given, q
        ),
    }
    slow_memory = Limits(copy_gbps=1e-3, bf16_tflops=1e9, fp8_tflops=1e9)  # a byte per microsecond
    rows = {"attention": 8 * 32, "sparse_attention": 4 * 32 + 6 * 8 + q.numel() * 4}
    for name, call in calls.items():
        assert floor_us(call, [], slow_memory) == pytest.approx(2 * q.numel() * 4 + rows[name])
    slow_products = Limits(copy_gbps=1e9, bf16_tflops=1e-6, fp8_tflops=1e-6)  # a product per microsecond
    assert floor_us(calls["attention"], [], slow_products) == pytest.approx(4 * 12 * 2 * 4)
    assert floor_us(calls["sparse_attention"], [], slow_products) == pytest.approx(4 * 4 * 2 * 4)


def test_every_call_is_compared_with_something_that_is_not_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected results are computed with the reference and the operators out of reach."""
    true_pairs, compared = demo_expected.pairs, []

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the reference was asked what the reference should give")

    def pairs(call: demo_expected.Call) -> demo_expected.Pairs:
        compared.append(call.operator)
        with monkeypatch.context() as patch:
            for name, function in vars(reference).items():
                patch.setattr(sys.modules[function.__module__], function.__name__, forbidden)
                patch.setattr(operator_named(name), "reference", forbidden)
            for operator in OPERATORS:
                patch.setattr(gdn, operator, forbidden)
            found = true_pairs(call)
        assert found and any(pair.got.numel() for pair in found)
        assert all(pair.got.shape == pair.expected.shape for pair in found)
        return found

    monkeypatch.setattr(demo_calls, "pairs", pairs)
    found = report()
    assert compared == [row.operator for row in found.rows] and found.passed
    rounded = {row.operator for row in found.rows if row.error > 0}
    assert {"fused_gdn_prefill", "fused_gdn_decode", "sparse_attention"} <= rounded


def spoil(value: torch.Tensor) -> None:
    """Makes one element wrong."""
    middle = tuple(size // 2 for size in value.shape)
    if value.element_size() == 1:
        value = value.view(torch.uint8)
    value[middle] = value[middle] + 64 if not value.is_floating_point() else 1e3


def spoiling(monkeypatch: pytest.MonkeyPatch, operator: str, which: int | str) -> None:
    """Puts a wrong element into the operator's result number `which`, or into what it writes to the argument `which`."""
    true = getattr(gdn, operator)

    @functools.wraps(true)
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = true(*args, **kwargs)
        if is_explaining():
            return result
        if isinstance(which, str):
            spoil(inspect.signature(true).bind(*args, **kwargs).arguments[which])
        elif isinstance(result, tuple):
            spoil(result[which])
        else:
            spoil(result)
        return result

    monkeypatch.setattr(gdn, operator, spoiled)


RESULTS = [(name, 0) for name in OPERATORS if name != "compress_indexer_keys"]
WRITTEN = [
    ("fused_gdn_prefill", "conv_states"), ("fused_gdn_prefill", "ssm_state"), ("fused_gdn_decode", "conv_state"),
    ("fused_gdn_decode", "ssm_state"), ("prepare_indexer", "cache"), ("prepare_indexer", "v_cache"),
    ("compress_indexer_keys", "ring"), ("compress_indexer_keys", "cache"),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "which"), [*RESULTS, ("add_rms_norm", 1), *WRITTEN])
def test_a_wrong_element_of_any_result_is_found(monkeypatch: pytest.MonkeyPatch, operator: str, which: int | str) -> None:
    """The first call of the operator shows it: what follows from it is not computed."""

    class Found(Exception):
        pass

    config = COMPRESSED if operator in GROUPS else TINY
    plan = demo_run.Plan("small", config, (37, 70, 2, 20), steps=2, drafts=2, device=torch.device("cpu"))
    spoiling(monkeypatch, operator, which)

    def stop(row: demo_calls.Row) -> None:
        if row.operator == operator:
            raise Found(row)

    with pytest.raises(Found) as found:
        demo_run.run(plan, None, stop)
    assert not found.value.args[0].passed


@pytest.mark.parametrize("which", [None, 0, 1])
def test_a_wrong_summary_is_found(which: int | None) -> None:
    heads = {"num_k_heads": 2, "num_v_heads": 4, "num_state_heads": 4, "head_k_dim": 16, "head_v_dim": 16}
    sizes = {"dtype": "float32", "num_tokens": 107, "num_sequences": 2}
    example: Any = registry.operator("chunk_summary").example(QWEN3_NEXT_80B, fp8=False)
    given = summary_inputs(dataclasses.replace(example, **heads, **sizes), lengths=(37, 70))
    before = dict(given)
    result = tuple(x.clone() for x in gdn.chunk_summary(**given))
    if which is not None:
        result[which][1, 1, 2, 3] += 1
    error, limit = demo_calls.worst(demo_expected.pairs(demo_expected.Call("chunk_summary", before, given, result)))
    assert (error <= limit) == (which is None)


def test_a_wrong_fp8_key_is_found(switch: Callable[..., env.Switches], monkeypatch: pytest.MonkeyPatch) -> None:
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    assert report().passed
    spoiling(monkeypatch, "gather_indexer_cache", 1)
    assert "gather_indexer_cache" in wrong(report())


def test_a_wrong_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator is right, and what is between them is not: in decode alone, a thousandth of the residual is lost."""
    true = RMSNorm.add

    def lossy(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, layer_scale: torch.Tensor | None = None) -> Any:
        return true(norm, x, residual if residual is None or len(x) > 4 else residual * 0.999, layer_scale)

    monkeypatch.setattr(RMSNorm, "add", lossy)
    assert wrong(report()) == {"decode"}


def test_a_wrong_result_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(monkeypatch, "fused_gdn_prefill", 0)
    result = run("--layers", "1")
    assert result.exit_code == 1, result.output
    lines = [line for line in result.output.splitlines() if "WRONG" in line]
    assert [line.split()[0] for line in lines][0] == "fused_gdn_prefill" and ", 0 wrong" not in result.output


def test_logits_of_nan_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    true = HybridModel.compute_logits

    def broken(model: HybridModel, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = true(model, hidden_states)
        return logits.fill_(torch.nan) if len(logits) == 4 else logits

    monkeypatch.setattr(HybridModel, "compute_logits", broken)
    assert "decode" in wrong(report())


def test_json() -> None:
    result = run("--json", "--layers", "1")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert (data["model"], data["layers"], data["dtype"], data["passed"]) == ("tiny", 1, "float32", True)
    assert not data["captured"]
    assert {row["operator"] for row in data["calls"]} == {
        "fused_gdn_prefill", "add_rms_norm", "fused_gdn_decode",
    }  # fmt: skip
    assert all(one["tokens_per_second"] > 0 for one in data["phases"])
    assert all(one["error"]["largest"] <= one["limit"]["largest"] for one in data["deviations"])


def test_a_checkpoint(tmp_path: Path) -> None:
    """The first of its layers, or all; tensors without a place end the run with their names."""
    from safetensors.torch import save_file
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    plan = demo_run.Plan("x", HybridConfig.from_transformers(config), (2,), 1, 1, torch.device("cpu"))
    model = demo_run.make_model(plan)
    config.save_pretrained(tmp_path)
    tensors = {name: one.contiguous() for name, one in to_transformers(model.state_dict(), plan.config).items()}
    save_file({**tensors, "mtp.fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    options = ("demo", "--checkpoint", str(tmp_path), "--device", "cpu", "--steps", "1")
    result = CliRunner().invoke(app.app, options, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert f"weights of {tmp_path}" in " ".join(result.output.split()) and "4 layers: 3 of Gated DeltaNet" in result.output
    loaded = demo_run.make_model(dataclasses.replace(plan, checkpoint=tmp_path))
    again = to_transformers(loaded.state_dict(), plan.config)
    assert again.keys() == tensors.keys() and all(torch.equal(one, tensors[name]) for name, one in again.items())
    save_file({**tensors, "model.layers.0.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    result = CliRunner().invoke(app.app, options)
    assert result.exit_code != 0 and "layers.0.extra" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "9"), "layers: expected 1 to 8, got 9"),
        (("--steps", "5000"), "which the model's positions allow"),
        (("--checkpoint", "."), "expected none with --checkpoint"),
    ],
)
def test_bad_options_are_named(options: tuple[str, ...], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2 or result.exception is not None
    assert message in " ".join(result.output.replace("│", " ").split()) or message in str(result.exception)


@pytest.mark.parametrize("name", NAMED)
def test_the_defaults_on_a_gpu_fit_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    plan = demo_command._plan(name, None, None, 1, "auto", None, 3, 0)
    assert plan.device.type == "cuda"
    assert plan.sizes.max_seq_len <= plan.config.max_position_embeddings
    assert (max(plan.lengths) > 1000) == (name != "tiny")


@pytest.mark.parametrize(("phase", "backend", "can"), [
    ("prefill", "reference", True), ("decode", "cute", True), ("decode", "reference", False), ("verify", "cute+reference", False),
])  # fmt: skip
def test_what_the_reference_runs_is_not_captured(phase: str, backend: str, can: bool) -> None:
    assert demo_run.can_capture([demo_calls.Row(phase, "conv", backend, (), None, None, 0.0, 1.0)]) == can


def test_eager() -> None:
    result = run("--eager", "--layers", "1")
    assert result.exit_code == 0, result.output
    assert "no CUDA graphs" in result.output
