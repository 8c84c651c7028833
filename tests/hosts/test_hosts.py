"""Parts of the measurements that need no GPU: the checkpoint, the requests, the judgements, and reading of what was measured."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn
from tests.hosts import (
    adapter_cost,
    adapter_paths,
    engines,
    float32,
    judge_values,
    sides,
    transformers_speed,
    vllm_life,
    vllm_speed,
)
from tests.hosts.judgement import differences, errors, first_difference
from tests.hosts.requests import Answers, Side, prompts
from tests.hosts.vllm_checkpoint import DIGEST, HEADS, digest, shapes, tensors, write, write_heads

COMMON = {
    "dtype": "bfloat16", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": COMMON | EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    "qwen3_5": COMMON | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
}


def source(folder: Path, kind: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("another checkpoint's")
    return folder


# --- the checkpoint -------------------------------------------------------------------------------------------------------------


@pytest.mark.cover
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_finds_every_tensor_and_no_other(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "target"
    written = write(source(tmp_path / "source", kind), folder)
    assert (folder / DIGEST).read_text() == written
    assert (folder / "tokenizer.json").exists()
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    values = tensors(MODELS[kind], 0)
    linear = model.model.layers[0].linear_attn
    for name in ("A_log", "dt_bias"):
        assert torch.equal(getattr(linear, name), values[f"model.layers.0.linear_attn.{name}"].float())
    assert torch.equal(model.lm_head.weight, values["lm_head.weight"].float())
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.inference_mode():
        assert torch.equal(float32.Exact(folder).logits([text, text[::-1]])[0], model(torch.tensor([text, text[::-1]])).logits[0])
    with pytest.raises(RuntimeError, match="imported yet, got transformers.models.qwen3"):
        float32.forbid_kernels()
    if kind == "qwen3_next":
        second = model.model.layers[1].mlp.experts.down_proj[3]
        assert torch.equal(second, values["model.layers.1.mlp.experts.3.down_proj.weight"].float())


def test_a_checkpoint_is_told_by_its_digest() -> None:
    first = tensors(MODELS["qwen3_5"], 0)
    assert set(first) == {name for name, _ in shapes(MODELS["qwen3_5"])}
    assert {name: tuple(value.shape) for name, value in first.items()} == dict(shapes(MODELS["qwen3_5"]))
    assert digest(first) == digest(tensors(MODELS["qwen3_5"], 0)) != digest(tensors(MODELS["qwen3_5"], 1))


@pytest.mark.parametrize("hidden", [512, 1024])
def test_decays_are_a_tenth_to_a_thousandth(hidden: int) -> None:
    """With inputs of mean square 1, as norms give them."""
    config = MODELS["qwen3_5"] | {"hidden_size": hidden, "linear_num_value_heads": 64}
    values, start = tensors(config, 0), "model.layers.0.linear_attn."
    inputs = torch.randn(256, hidden, generator=torch.Generator().manual_seed(1))
    a = inputs @ values[f"{start}in_proj_a.weight"].float().T
    steps = torch.nn.functional.softplus(a + values[f"{start}dt_bias"].float())
    decays = torch.exp(-values[f"{start}A_log"].exp() * steps)
    assert float(((decays >= 0.9) & (decays <= 0.999)).float().mean()) >= 0.98
    assert 0.9 <= decays.min() + 0.03 and decays.max() <= 0.9995
    assert decays.mean(0).min() < 0.96 and decays.mean(0).max() > 0.99, "heads differ"


def test_norms_are_about_one_and_weights_small() -> None:
    values = tensors(MODELS["qwen3_next"], 0)
    assert values["model.layers.0.linear_attn.norm.weight"].float().mean().item() == pytest.approx(1, abs=0.02)
    assert values["model.norm.weight"].float().mean().item() == pytest.approx(0, abs=0.02)  # added to 1
    assert values["lm_head.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)


def test_a_copy_with_more_heads(tmp_path: Path) -> None:
    write_heads(source(tmp_path / "source", "qwen3_5"), tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config == MODELS["qwen3_5"] | HEADS
    assert not list((tmp_path / "heads").glob("*index*"))


# --- requests -------------------------------------------------------------------------------------------------------------------


def test_prompts_span_the_lengths() -> None:
    found = prompts(512)
    lengths = [len(prompt) for prompt in found]
    assert len(found) == 64 and min(lengths) == 10 and max(lengths) == 3000
    assert {64, 65, 128, 1024} <= set(lengths)
    assert found == prompts(512) != prompts(512, seed=1)
    assert all(0 <= token < 512 for prompt in found for token in prompt)


def test_requests_of_a_life_share_prefixes() -> None:
    found = vllm_life.requests(512)
    assert len(found) == vllm_life.REQUESTS and max(len(prompt) for prompt, _ in found) <= 3000
    begins = [tuple(prompt[:10]) for prompt, _ in found]
    assert len(set(begins)) < len(begins) - 20


def test_a_side_is_read_as_it_was_saved(tmp_path: Path) -> None:
    answers = Answers(
        [[-1.5]], [[3, 4]], [[-0.5, -0.25]], [0], {"tokens": [[3, 4]], "logprobs": [], "cached": [1]}, {"seconds": 1}
    )
    side = Side("model", "on", "abc", [[1, 2]], {"eager": answers}, {"spec": "RuntimeError: no"})
    side.save(tmp_path / "side.json.gz")
    assert Side.load(tmp_path / "side.json.gz") == side


# --- the judge ------------------------------------------------------------------------------------------------------------------


def test_errors_are_of_all_tokens() -> None:
    found = errors([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.0]])
    assert found.rms == pytest.approx(0.5 / math.sqrt(3)) and found.largest == 0.5 and found.count == 3
    with pytest.raises(ValueError, match="request 0: expected 2"):
        errors([[-1.0]], [[-1.0, -2.0]])
    with pytest.raises(ValueError, match="finite"):
        errors([[math.nan]], [[-1.0]])


def test_first_differences_and_their_gaps() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 0, 0]) == 1
    rows = torch.tensor([[0.0, 1.0, 2.0], [0.5, 0.7, 0.0]])
    found = differences([[2, 1]], [[2, 0]], [{(2, 1): rows}])
    assert [(one.request, one.place) for one in found] == [(0, 1)]
    assert found[0].gap == pytest.approx(0.2)


class Model:
    """Exact logits: a seeded table, by the last token."""

    def __init__(self) -> None:
        self.table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def __call__(self, texts: list[list[int]]) -> Tensor:
        return self.table[torch.tensor(texts)]

    def side(self, plug: str, asked: list[list[int]], noise: float, seed: int) -> Side:
        """Greedy answers of a host with this error."""
        generator = torch.Generator().manual_seed(seed)

        def logprobs(token: int) -> Tensor:
            return torch.log_softmax(self.table[token] + noise * torch.randn(8, generator=generator), dim=0)

        answers = Answers([], [], [], [0] * len(asked), facts={"accepted": 1})
        for prompt in asked:
            answers.prompt_logprobs.append([float(logprobs(a)[b]) for a, b in zip(prompt, prompt[1:], strict=False)])
            tokens, found = [prompt[-1]], []
            for _ in range(6):
                row = logprobs(tokens[-1])
                tokens.append(int(row.argmax()))
                found.append(float(row.max()))
            answers.tokens.append(tokens[1:])
            answers.logprobs.append(found)
        return Side("model", plug, "abc", asked, {"eager": answers})


@pytest.fixture
def asked() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 8, (length,), generator=generator).tolist() for length in (10, 40, 200, 400)]


def test_equal_errors_pass_and_a_worse_side_fails(asked: list[list[int]]) -> None:
    model, told = Model(), []
    off = model.side("off", asked, 0.05, 1)
    assert judge_values.judge_sides(off, model.side("on", asked, 0.05, 2), model, told.append)
    assert "ratio" in told[1] and told[1].endswith("ok")
    assert not judge_values.judge_sides(off, model.side("on", asked, 0.07, 2), model, told.append)
    assert "times the host's" in told[4]


def test_a_token_that_is_no_tie_fails(asked: list[list[int]]) -> None:
    model, told = Model(), []
    off, on = (model.side(plug, asked, 0.001, 1) for plug in ("off", "on"))
    on.variants["eager"].tokens[2][3] = int(model.table[off.variants["eager"].tokens[2][2]].argmin())
    on.variants["eager"].logprobs[2] = off.variants["eager"].logprobs[2]
    assert not judge_values.judge_sides(off, on, model, told.append)
    assert "1 texts part where it is no tie: request 2, token 3" in told[1]


def test_what_a_variant_is_about_must_have_happened(asked: list[list[int]]) -> None:
    model, told = Model(), []
    off, on = (model.side(plug, asked, 0.001, 1) for plug in ("off", "on"))
    for side in (off, on):
        side.variants = {"spec": side.variants["eager"]}
    on.variants["spec"].facts = {"accepted": 0}
    on.variants["spec"].again = {"tokens": on.variants["spec"].tokens, "cached": [0] * len(asked)}
    assert not judge_values.judge_sides(off, on, model, told.append)
    assert "no prompt was found in the prefix cache; no draft was accepted" in told[1]
    on.failed["tp"] = "RuntimeError: one GPU"
    assert not judge_values.judge_sides(off, on, model, told.append)


def test_a_host_with_another_model_is_not_judged(asked: list[list[int]]) -> None:
    model, told = Model(), []
    off, on = (model.side(plug, asked, 0.5, 1) for plug in ("off", "on"))
    assert not judge_values.judge_sides(off, on, model, told.append)
    assert "the host's own error is" in told[1]


def test_sides_of_two_checkpoints_are_not_compared(asked: list[list[int]]) -> None:
    model = Model()
    off, on = (model.side(plug, asked, 0.001, 1) for plug in ("off", "on"))
    on.digest = "other"
    with pytest.raises(ValueError, match="digest: expected the same"):
        judge_values.judge_sides(off, on, model)


# --- processes ------------------------------------------------------------------------------------------------------------------


def test_the_environment_of_a_side() -> None:
    assert sides.environment("off", base={})["GDN_VLLM"] == "0"
    on = sides.environment("on", "1", {"A": "b"})
    assert (on["GDN_VLLM"], on["CUDA_VISIBLE_DEVICES"], on["A"], on["NCCL_NVLS_ENABLE"]) == ("strict", "1", "b", "0")
    assert "GDN_REPLAY" not in on and sides.environment("on", base={}, replay=True)["GDN_REPLAY"] == "1"


def test_jobs_run_at_once_and_end_at_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "ends.py").write_text("print('## ended')")
    (tmp_path / "fails.py").write_text("raise SystemExit('this is why')")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    jobs = [sides.Job(name, name, [], environment, tmp_path / f"{name}.log") for name in ("ends", "fails", "hangs")]
    assert sides.run(jobs, limit=1.0) == {"ends": 0, "fails": 1, "hangs": -9}
    sides.tell_marked(jobs[0])
    assert "this is why" in (told := capsys.readouterr().out) and "ends ## ended" in told


def job_of(log: Path, plug: str, text: str, *, replay: bool = False) -> sides.Job:
    """A job that has told this."""
    log.write_text(text)
    return sides.Job(log.name, "", [], sides.environment(plug, base={}, replay=replay), log)


def test_a_side_without_a_served_layer_is_named(tmp_path: Path) -> None:
    jobs = []
    for name, plug, text in (
        ("off", "off", ""),
        ("on", "on", "gdn INFO: vllm: 3 Gated DeltaNet layers run on gdn's kernels, ready in 2.0 s"),
        ("none", "on", "gdn INFO: vllm: 0 Gated DeltaNet layers run on gdn's kernels; 3 left to the host: float16"),
        ("silent", "on", "the plugin was not found"),
    ):
        jobs.append(job_of(tmp_path / name, plug, text))
    assert sides.unserved(jobs) == ["none", "silent"]


def test_a_side_that_does_not_replay_is_named(tmp_path: Path) -> None:
    line, jobs = "gdn INFO: vllm: 3 Gated DeltaNet layers run on gdn's kernels, ready in 2.0 s; decode ", []
    for name, plug, replay, text in (
        ("off", "off", True, ""),
        ("not asked", "on", False, f"{line}without replay: GDN_REPLAY=0"),
        ("on", "on", True, f"{line}by replay: a ring of 22 rows"),
        ("refused", "on", True, f"{line}without replay: a KV connector moves the parts of a block that it knows"),
    ):
        jobs.append(job_of(tmp_path / name, plug, text, replay=replay))
    assert sides.unreplayed(jobs) == ["refused"] and sides.unserved(jobs) == []


def test_variants_have_the_options_of_their_name() -> None:
    common = engines.common(Path("/m"), state="float32", backend="triton")
    for name, options in engines.VARIANTS.items():
        assert options and not set(options) & {"model", "mamba_ssm_cache_dtype"}, name
    assert common["mamba_ssm_cache_dtype"] == "float32" and common["enable_prefix_caching"] is False


class Entry:
    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


def test_log_probabilities_are_those_of_the_tokens() -> None:
    assert engines._of([3, 1], [{3: Entry(-1.0), 2: Entry(-0.5)}, {1: Entry(-2.0)}]) == [-1.0, -2.0]


# --- a life ---------------------------------------------------------------------------------------------------------------------

LIFE: dict[str, Any] = {
    "done": 170, "aborted": 30, "cached tokens": 640, "wrong lengths": 0, "preemptions": 3, "free blocks": [149, 149],
    "same texts": [16, 16], "kernels while serving": {"compiled": 0, "in memory": 0}, "jit": ["a triton kernel"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"done": 169}, "169 requests done"),
        ({"preemptions": 0}, "nothing was preempted"),
        ({"cached tokens": 0}, "no cached tokens"),
        ({"free blocks": [149, 148]}, "148 at the end"),
        ({"same texts": [15, 16]}, "15 of 16 prompts"),
        ({"kernels while serving": {"compiled": 0, "in memory": 2}}, "kernels of gdn in memory while serving: 2"),
        ({"jit": ["a triton kernel", "a CuTe kernel"]}, "compiled while serving: a CuTe kernel"),
    ],
)
def test_complaints_about_a_life(change: dict[str, Any], complaint: str | None) -> None:
    found = vllm_life.complaints(LIFE | change, ["a triton kernel"])
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]
    if complaint == "no cached tokens":
        assert not vllm_life.complaints(LIFE | change, ["a triton kernel"], has_cache=False)


# --- times ----------------------------------------------------------------------------------------------------------------------

PRINTED = """gdn: vllm: 3 Gated DeltaNet layers run on gdn's kernels, ready in 4.2 s
## next-bf16_off: started in 91 s
-- next-bf16_off prefill: GDN part of a layer 858.3 us (median of 12; last [858.1, 859.0])
      1.234 ms     12 x    102.83 us  nvjet
-- next-bf16_off short prompts: GDN part of a layer 2990.0 us (median of 6; last [1.0])
-- next-bf16_off decode64: GDN part of a layer nan us (median of 0; last [])
   end to end, next-bf16_off, prefill 16 x 8192: 1.2345 s (of [1.2, 1.3])
   end to end, next-bf16_off, 8 x 8192 in, 64 out: 0.9000 s (of [0.9])
"""


def test_what_the_script_prints_is_read() -> None:
    found = vllm_speed.printed(PRINTED)
    assert math.isnan(found.pop("decode64"))
    assert found.pop("warm-up") == 4.2
    assert found == {
        "start": 91,
        "prefill": 858.3,
        "short prompts": 2990,
        "prefill 16 x 8192": 1.2345,
        "8 x 8192 in, 64 out": 0.9,
    }


def test_the_gpu_time_of_a_step() -> None:
    step = [["nvjet_a", 0, 2.0], ["gdn_decode", 0, 5.0], ["nvjet_b", 0, 2.0], ["softmax", 0, 1.0], ["nvjet_a", 0, 2.0]]
    step += [["gdn_decode", 0, 5.0], ["nvjet_b", 0, 2.0]]
    assert vllm_speed.step_time(step * 5, layers=2) == 19.0
    assert math.isnan(vllm_speed.step_time([]))


def test_a_table_says_what_fails() -> None:
    off = {"prefill": 858.0, "short prompts": 2990.0, "mixed": 1010.0, "decode64": 61.0, "decode256": 215.0, "start": 90.0}
    on = {"prefill": 282.0, "short prompts": 820.0, "mixed": 330.0, "decode64": 54.0, "decode256": 211.0, "warm-up": 4.0}
    assert [row[0] for row in vllm_speed.rows("next-f32", off, on) if row[4] == "ok"] == [
        "prefill", "short prompts", "mixed", "decode64", "warm-up",
    ]  # fmt: skip
    text, holds = vllm_speed.table({"next-f32": {"off": off, "on": on}})
    assert not holds and "decode256" in [line for line in text.splitlines() if line.endswith("FAILS")][0]
    assert vllm_speed.table({"next-f32": {"off": off, "on": on | {"decode256": 210.0}}})[1]
    for seconds in (10.5, math.nan):  # too long; the adapter said nothing
        assert not vllm_speed.table({"next-f32": {"off": off, "on": on | {"decode256": 210.0, "warm-up": seconds}}})[1]
    assert not vllm_speed.table({"next-f32": {"off": off}})[1], "a side that is missing does not hold"


def run_speed(monkeypatch: pytest.MonkeyPatch, script: Path, case: str) -> dict[str, dict[str, float]]:
    """Figures of one case that are measured by this script, next to which everything is written."""
    folder = str(script.parent)
    monkeypatch.setattr(
        sys, "argv", ["speed", "run", "--script", str(script), "--cases", case, "--out", folder, "--scratch", folder]
    )
    monkeypatch.setenv("VLLM_MODELS", folder)
    vllm_speed.main()
    found: dict[str, dict[str, float]] = json.loads((script.parent / f"speed_{case}.json").read_text())[case]
    return found


def test_a_case_with_replay_counts_only_where_layers_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    for line, is_there in ((PRINTED, False), (PRINTED.replace("4.2 s", "4.2 s; decode by replay: a ring of 22 rows"), True)):
        script.write_text(f"import os\nprint({line!r})\nassert os.environ['GDN_REPLAY'] == '1'")
        found = run_speed(monkeypatch, script, "next-replay-f32")
        assert ("prefill" in found["on"]) is is_there and found["off"]["prefill"] == 858.3
        assert ("no layer decodes by replay" in capsys.readouterr().out) is not is_there


def test_a_script_that_fails_leaves_its_figures_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nprint({PRINTED!r})\nsys.exit('why' if os.environ['GDN_VLLM'] == 'strict' else 0)")
    assert run_speed(monkeypatch, script, "next-bf16")["off"]["prefill"] == 858.3
    monkeypatch.setattr(sys, "argv", ["speed", "table", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        vllm_speed.main()
    assert left.value.code == 1


TRANSFORMERS = {
    "error": {"plain": 1e-2, "enabled": 1.05e-2},
    "prefill 8192, tokens/s": {"plain": 1000.0, "enabled": 1600.0},
    "decode 32, GDN layer, ms": {"plain": 0.3, "enabled": 0.15},
    "decode 32, model, ms": {"plain": 3.0, "enabled": 2.9},
}


def test_the_table_of_transformers() -> None:
    assert transformers_speed.table(TRANSFORMERS, None)[1]
    assert transformers_speed.table(TRANSFORMERS, TRANSFORMERS)[1]
    slower = TRANSFORMERS | {"decode 32, model, ms": {"plain": 2.8, "enabled": 2.9}}
    text, holds = transformers_speed.table(TRANSFORMERS, slower)
    assert not holds and "slower than with FLA" in text
    worse = TRANSFORMERS | {"error": {"plain": 1e-2, "enabled": 1.2e-2}}
    assert "1.200 times plain's" in transformers_speed.table(worse, None)[0]
    assert not transformers_speed.table(TRANSFORMERS | {"prefill 8192, tokens/s": {"plain": 1e3, "enabled": 1.4e3}}, None)[1]


def added(path: adapter_paths.Path, device: torch.device) -> adapter_cost.Added:
    timed = adapter_cost.Timed.of(path)
    timed.run(20, device)
    return timed.added(adapter_cost.Pace(alone_us=0.6, beside_us=0.5))


def test_what_an_adapter_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, Any] = {}
    exec(compile("def fused_gdn_decode(x, *, y=3): return x", "<gdn.fused_gdn_decode>", "exec"), space)
    monkeypatch.setattr(gdn, "fused_gdn_decode", space["fused_gdn_decode"])
    cpu = torch.device("cpu")
    path = adapter_paths.Path("decode", lambda: (sum(range(2000)), gdn.fused_gdn_decode(1)))
    found = added(path, cpu)
    for step, more, without in zip(found.step, found.us, found.without, strict=True):
        assert step > more > without > 0
    assert not found.holds and found.row().startswith("decode ") and found.row().endswith("more than allowed")
    apart = added(adapter_paths.Path("decode", path.step, apart=lambda: sum(range(2000))), cpu)
    assert apart.us[0] < found.us[0] / 2
    pace = adapter_cost.Pace(alone_us=0.6, beside_us=0.5)
    measured = adapter_cost.Added(adapter_paths.Path("decode", path.step, views=2), (9.9, 9.9), (4.0, 4.0), pace)
    assert measured.views_us == 1.0 and measured.holds
    assert not dataclasses.replace(measured, pace=adapter_cost.Pace(alone_us=0.6, beside_us=0.4)).holds
    for alone_us, most_us in ((0.3, 5.0), (0.6, 5.0), (0.9, 7.5)):  # a faster machine than the documented one is allowed no less
        assert adapter_cost.Pace(alone_us, 0.5).most_us == pytest.approx(most_us)
    assert dataclasses.replace(found, path=dataclasses.replace(path, is_step=False)).holds
    with pytest.raises(ValueError, match="twice: expected 1 calls of operators, got 2"):  # a step is one call of the operator
        added(adapter_paths.Path("twice", lambda: [gdn.fused_gdn_decode(x) for x in (1, 2)]), cpu)
    both = adapter_cost.calls_of(lambda: [gdn.fused_gdn_decode(x, y=4) for x in (1, 2)])
    assert [call() for call in both] == [1, 2]
