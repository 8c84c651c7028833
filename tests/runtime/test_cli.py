"""The command line: `gdn env`, `gdn explain`, `gdn doctor`."""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gdn as gdn_package
from gdn.cli import app, doctor, explain_arguments
from gdn.models import MODELS
from gdn.ops.delta_rule import examples
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import cache_folder, compiled, env, registry, toolchain, tuned

KERNELS = [op for op in registry.OPERATORS.values() if op.modules and op.functions]


def gdn(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, list(arguments))


def flat(text: str) -> str:
    """Output without the table's lines and line breaks."""
    return " ".join("".join(" " if char in "│┃├┤┡┩" else char for char in text).split())


def test_help_names_every_command():
    result = gdn("--help")
    assert result.exit_code == 0
    for command in ("demo", "env", "explain", "doctor"):
        assert command in result.output


def test_without_arguments_the_help():
    assert gdn().exit_code == 0 and gdn().output == gdn("--help").output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["dance"], "No such command 'dance'"),
        (["env", "--colour"], "No such option: --colour"),
        (["demo", "--tp", "x"], "Invalid value for '--tp'"),
        (["demo", "--tp", "3"], "num_attention_heads: expected a multiple of 3 ranks, got 4"),
        (["demo", "--model", "none"], "expected one of qwen3-next-80b, qwen3.5-35b, qwen3.8-flash-next, tiny, got 'none'"),
        (["demo", "--device", "tpu"], "expected auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_a_wrong_call_is_one_line_on_stderr(arguments: list[str], word: str):
    result = gdn(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and word in line


def test_env_prints_every_switch_with_value_and_source(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDN_BACKEND_CHUNK", "cute")
    monkeypatch.setenv("VLLM_GDN_USE_BLADNN", "yes")
    result = gdn("env")
    assert result.exit_code == 0
    text = flat(result.output)
    for name in env.DECLARATIONS:
        assert name in result.output  # whole, at any width
    assert "GDN_BACKEND_CHUNK" in text and "cute (environment)" in text and "1 (environment)" in text
    assert "16384 (default)" in text and "unset (default)" in text
    assert "VLLM_GDN_DECODE_KERNEL" in text


def test_env_says_what_has_no_effect(monkeypatch: pytest.MonkeyPatch):
    name = "sparse_attention_prefill"
    monkeypatch.setitem(registry.OPERATORS, name, dataclasses.replace(registry.OPERATORS[name], modules={}))
    text = flat(gdn("env").output)
    reasons = {name: env.no_effect(name) for name in env.DECLARATIONS}
    assert reasons["VLLM_QSA_PREFILL_ATTN_BACKEND"] is not None and reasons["GDN_BACKEND"] is None
    assert text.count("no effect yet: ") == sum(reason is not None for reason in reasons.values())
    for reason in filter(None, reasons.values()):
        assert reason in text


def test_env_refuses_a_bad_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDN_LOG", "loud")
    for command in (["env"], ["env", "--json"], ["explain", "chunk"], ["demo", "--model", "tiny"]):
        monkeypatch.setattr(env, "_current", None)
        result = gdn(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "error: GDN_LOG: expected off, info, debug, got 'loud'\n"


def test_a_fault_of_the_program_is_no_error_of_the_user(monkeypatch: pytest.MonkeyPatch):
    """IndexError and KeyError are LookupErrors, and must not pass for a missing table entry."""

    def broken() -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(env, "reload", broken)
    assert isinstance(gdn("env").exception, IndexError)


def test_env_in_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GDN_TUNED_DIR", str(tmp_path))
    data = json.loads(gdn("env", "--json").stdout)
    switches = {switch["name"]: switch for switch in data["switches"]}
    assert list(switches) == list(env.DECLARATIONS)
    own = switches["GDN_TUNED_DIR"]
    assert (own["value"], own["default"], own["source"]) == (str(tmp_path), None, "environment")
    for name, switch in switches.items():
        assert switch["effect"] and switch["takes"] and switch["no_effect"] == env.no_effect(name)


def test_the_version():
    result = gdn("--version")
    assert (result.exit_code, result.stdout) == (0, f"gdn-kernels {gdn_package.__version__}\n")


@pytest.mark.cover
def test_a_process_of_its_own_fails_in_one_line(tmp_path: Path):
    """One line on stderr, and no traceback, where a user calls the command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(env.PREFIXES)}

    def errors(*command: str, **switches: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, timeout=120, env=environment | switches
        )
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.splitlines()

    missing, operators = tmp_path / "none", "chunk, recurrent, mqa_logits, paged_mqa_logits"
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(errors, "gdn", "explain", "chunky"),
            pool.submit(errors, "gdn", "env", GDN_TUNED="maybe"),
            pool.submit(errors, "autotune", "show", "--folder", str(missing)),
            pool.submit(errors, "benchmarks.host_cost", "conv1d"),
            pool.submit(errors, "benchmarks.crossing", CUDA_VISIBLE_DEVICES=""),
        ]
    unknown, *others = [one.result() for one in found]
    assert unknown[0].startswith("error: op: expected one of chunk")
    assert others == [
        ["error: GDN_TUNED: expected auto, strict, off, got 'maybe'"],
        [f"error: folder: expected a folder of tables, got {missing}"],
        [f"error: op: expected one of {operators}, got 'conv1d'"],
        ["error: This needs a Hopper (SM90) GPU, and torch sees none."],
    ]


def test_python_m_gdn_is_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["gdn", "env"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("gdn", run_name="__main__")
    assert caught.value.code in (0, None)
    assert "GDN_BACKEND_MQA_LOGITS" in capsys.readouterr().out


@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_explain_on_an_h100(op: registry.Operator):
    before = compiled.compilations()
    for backend in op.modules:
        result = gdn("explain", op.name, "--device", "h100", "--backend", backend)
        assert result.exit_code == 0, result.output
        assert f"{op.name}: {backend}, decided by: the argument" in result.output and "tiles (" in result.output
    assert compiled.compilations() == before


def test_explain_without_a_gpu():
    result = gdn("explain", "chunk", "--device", "cpu")
    assert result.exit_code == 0 and "chunk: reference, decided by: no SM90 (Hopper) GPU" in result.output
    result = gdn("explain", "indexer_topk", "--device", "cpu")
    assert "mqa_logits: reference" in result.output and "topk: reference, decided by: no SM90 (Hopper) GPU" in result.output


def test_explain_hands_an_order_for_the_whole_to_its_parts(switch: Callable[..., env.Switches]):
    switch(GDN_BACKEND_INDEXER_TOPK="cute")
    result = gdn("explain", "indexer_topk", "--device", "h100")
    assert "mqa_logits: cute, decided by: GDN_BACKEND_INDEXER_TOPK=cute" in result.output
    assert "topk: cute, decided by: the only kernel" in result.output  # an order for a kernel is one for the logits
    result = gdn("explain", "indexer_topk", "--device", "h100", "--backend", "reference")
    assert "mqa_logits: reference" in result.output and "topk: reference, decided by: the argument" in result.output
    assert gdn("explain", "topk", "--backend", "cute", "--device", "cpu").exit_code == 2


@pytest.mark.parametrize("name", ["indexer_topk", "paged_indexer_topk"])
def test_the_switch_of_a_combined_operator_is_reported_as_the_switch_it_is(switch: Callable[..., env.Switches], name: str):
    variable = f"GDN_BACKEND_{name.upper()}"
    scores, selection = registry.OPERATORS[name].composed_of
    switch(**{variable: "cute", f"GDN_BACKEND_{scores.upper()}": "tilelang"})
    parts = json.loads(gdn("explain", name, "--device", "h100", "--json").stdout)["parts"]
    assert [(part["op"], part["backend"]) for part in parts] == [(scores, "cute"), (selection, "cute")]
    assert (parts[0]["decided_by"], parts[1]["decided_by"]) == (f"{variable}=cute", "the only kernel")
    assert parts[0]["switches"] == [f"{variable}=cute", f"GDN_BACKEND_{scores.upper()}=tilelang"]
    assert parts[0]["notes"][0] == f"{variable}=cute (cute) overrides GDN_BACKEND_{scores.upper()}=tilelang (tilelang)"
    refused = gdn("explain", name, "--device", "cpu")
    assert refused.exit_code == 2
    assert f"expected a backend that can run {scores}, got 'cute' (by {variable}=cute)" in refused.stderr
    switch(**{variable: "reference"})
    parts = json.loads(gdn("explain", name, "--device", "h100", "--json").stdout)["parts"]
    assert [(part["backend"], part["decided_by"]) for part in parts] == [("reference", f"{variable}=reference")] * 2
    by_argument = json.loads(gdn("explain", name, "--device", "h100", "--json", "--backend", "tilelang").stdout)["parts"]
    assert (by_argument[0]["backend"], by_argument[0]["decided_by"]) == ("tilelang", "the argument")


def test_explain_derives_the_selection_from_the_logits(switch: Callable[..., env.Switches]):
    """The parts are those of one call: same rows, same columns, and as many rows at a time as the workspace holds."""

    def problems(*arguments: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        data = json.loads(gdn("explain", *arguments, "--device", "h100", "--json").stdout)
        return data["parts"][0]["problem"], data["parts"][1]["problem"], data["parts"][0]["notes"]

    scores, selection, _ = problems("indexer_topk", "num_queries=300", "num_keys=5000", "num_columns=5000", "k=77")
    assert (scores["num_queries"], scores["num_columns"], scores["clean"]) == (300, 5000, False)
    assert (selection["num_rows"], selection["num_columns"], selection["k"], selection["starts_dtype"]) == (
        300,
        5000,
        77,
        "int32",
    )
    scores, selection, _ = problems("paged_indexer_topk", "batch=3", "next_n=4")
    assert (selection["num_rows"], selection["num_columns"]) == (12, scores["max_context_len"])
    assert selection["starts_dtype"] is None
    switch(VLLM_SPARSE_INDEXER_MAX_LOGITS_MB="0")
    scores, selection, notes = problems("paged_indexer_topk", "batch=3", "next_n=4")
    assert (scores["batch"], selection["num_rows"]) == (1, 4)
    assert "4 of 12 rows at a time (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=0)" in notes
    switch(VLLM_SPARSE_INDEXER_MAX_LOGITS_MB="64")
    scores, selection, notes = problems("indexer_topk")
    assert (scores["num_queries"], selection["num_rows"]) == (512, 512)
    scores, selection, notes = problems("indexer_topk", "num_columns=2048")
    assert scores["num_queries"] == 0 and selection["num_rows"] == 4096 and notes[-1].startswith("not launched")


PUBLIC = sorted(name for name in gdn_package.__all__ if not name.startswith("_"))


@pytest.mark.parametrize("options", [(), ("--model", "tiny"), ("--model", "qwen3-next-80b", "--json")], ids=["", "tiny", "80b"])
@pytest.mark.parametrize("device", ["cpu", "h100", "h200"])
def test_every_name_is_explained_or_refused_in_one_line(device: str, options: tuple[str, ...]):
    for name in sorted({*registry.OPERATORS, *PUBLIC}):
        result = gdn("explain", name, "--device", device, *options)
        known = name in registry.OPERATORS or any(name in op.functions for op in registry.OPERATORS.values())
        assert result.exit_code == (0 if known else 2), (name, result.output)
        if known:
            operator = registry.operator(name)
            assert all(part in result.stdout for part in operator.composed_of or (operator.name,))
        else:
            assert result.stderr.startswith("error: op: expected one of") and len(result.stderr.splitlines()) == 1


def test_explain_in_json_says_what_explain_says():
    data = json.loads(gdn("explain", "chunk", "--device", "h100", "--json", "num_tokens=77").stdout)
    assert (data["function"], data["op"], data["device"], data["parts"]) == ("chunk_gated_delta_rule", "chunk", "h100", [])
    assert data["problem"]["num_tokens"] == 77 and data["problem"]["op"] == "chunk"
    text = gdn("explain", "chunk", "--device", "h100", "num_tokens=77").output
    assert f"chunk: {data['backend']}, decided by: {data['decided_by']}" in text
    assert data["config"] and all(f"{name}={value}" in text for name, value in data["config"].items())
    on_cpu = json.loads(gdn("explain", "chunk", "--device", "cpu", "--json").stdout)
    assert (on_cpu["backend"], on_cpu["config"], on_cpu["device"]) == ("reference", None, None)
    assert set(on_cpu["refusals"]) == {"cute", "tilelang"}


def test_explain_takes_fp8_from_the_switch_or_the_functions_name(switch: Callable[..., env.Switches]):
    def problem(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(gdn("explain", name, "--device", "cpu", "--json").stdout)["problem"]
        return found

    assert problem("mqa_logits")["dtype"] == "bfloat16" and problem("prepare_indexer")["q_out_dtype"] == "bfloat16"
    assert problem("fp8_mqa_logits")["dtype"] == problem("fp8_paged_mqa_logits")["dtype"] == "float8_e4m3fn"
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    assert problem("mqa_logits")["dtype"] == problem("prepare_indexer")["q_out_dtype"] == "float8_e4m3fn"


def test_a_missing_table_entry_is_an_error_of_one_line(switch: Callable[..., env.Switches]):
    switch(GDN_TUNED="strict")
    result = gdn("explain", "chunk", "num_v_heads=176", "--device", "h100", "--backend", "cute")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: chunk: GDN_TUNED=strict") and len(result.stderr.splitlines()) == 1


def test_explain_tells_the_phases_of_a_function_apart(switch: Callable[..., env.Switches]):
    switch(VLLM_QSA_PREFILL_ATTN_BACKEND="cute")
    found = json.loads(gdn("explain", "sparse_attention", "--json").stdout)
    assert found["op"] == "sparse_attention"
    assert [(part["op"], part["switches"]) for part in found["parts"]] == [
        ("sparse_attention_prefill", ["VLLM_QSA_PREFILL_ATTN_BACKEND=cute"]),
        ("sparse_attention_decode", []),
    ]
    assert "sparse_attention_decode: " not in gdn("explain", "sparse_attention_prefill").output


def test_explain_of_attention_is_of_all_positions():
    """The faster kernel may be another one there than over selected positions."""
    found = json.loads(gdn("explain", "attention", "num_tokens=1", "num_sequences=1", "--device", "h100", "--json").stdout)
    decode, prefill = found["parts"]
    assert (found["function"], found["op"], decode["op"], decode["backend"]) == (
        "attention", "attention", "sparse_attention_decode", "tilelang",
    )  # fmt: skip
    assert decode["problem"]["dense"] and decode["problem"]["index_dtype"] is None
    assert (prefill["op"], prefill["backend"]) == ("attention_prefill", "cute")
    assert any("run on torch" in note for note in prefill["notes"])
    first, _ = json.loads(gdn("explain", "attention", "--device", "h100", "--json").stdout)["parts"]
    assert first["backend"] == "cute"


def test_explain_of_attention_by_a_backend_without_a_kernel_of_prefill():
    found = json.loads(gdn("explain", "attention", "--device", "h100", "--backend", "tilelang", "--json").stdout)
    assert (found["op"], found["backend"], found["parts"]) == ("sparse_attention_decode", "tilelang", [])
    assert any("run on torch" in note for note in found["notes"])


def test_explain_takes_fields_models_and_ranks():
    result = gdn("explain", "chunk", "head_k_dim=48", "--device", "h200", "--tp", "4")
    assert result.exit_code == 0 and "chunk: reference" in result.output and "requires" in result.output
    assert "num_v_heads=8" in result.output and "head_k_dim=48" in result.output
    assert "num_k_heads=2" in gdn("explain", "chunk", "--model", "tiny", "--device", "cpu").output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["chunk", "--backend", "cute", "--device", "cpu"], "expected a backend that can run chunk, got 'cute'"),
        (["chunky"], "op: expected one of chunk"),
        (["chunk", "heads=3"], "expected name=value with a name of num_q_heads"),
        (["chunk", "num_q_heads=many"], "num_q_heads: expected a whole number"),
        (["chunk", "dtype=bf16"], "dtype: expected one of float64"),
        (["chunk", "state_v_first=perhaps"], "state_v_first: expected true or false"),
        (["chunk", "--tp", "3"], "tp: expected a divisor"),
        (["chunk", "--model", "none"], "expected one of"),
        (["chunk", "--device", "b200"], "expected auto, h100, h200 or cpu"),
        (["indexer_topk", "--device", "b200"], "expected auto, h100, h200 or cpu"),
        (["indexer_topk", "heads=3"], "expected name=value with a name of num_heads"),
        (["sparse_attention", "heads=3"], "expected name=value with a name of num_heads"),
        (["topk", "--backend", "cuda"], "backend: expected 'tilelang', 'cute', 'reference' or None"),
        (["chunk", "--tp", "many"], "Invalid value for '--tp'"),
        ([], "Missing argument 'op'"),
    ],
)
def test_explain_refuses(arguments: list[str], word: str):
    result = gdn("explain", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and word in line


def test_fields_are_parsed_by_type():
    problem = examples.chunk(MODELS["tiny"])
    assert isinstance(problem, ChunkProblem)
    (changed,), _ = explain_arguments.taken(
        [problem], ["gate_dtype=none", "state_v_first=0", "num_tokens=7", "state_dtype=bfloat16"]
    )
    assert isinstance(changed, ChunkProblem)
    assert (changed.gate_dtype, changed.state_v_first, changed.num_tokens, changed.state_dtype) == (None, False, 7, "bfloat16")
    with pytest.raises(ValueError, match="state_dtype: expected one of"):
        explain_arguments.taken([problem], ["state_dtype=none"])


def levels() -> dict[str, str]:
    return {finding.subject: finding.level for finding in doctor.diagnose()}


def test_doctor_on_this_machine():
    result = gdn("doctor")
    found = levels()
    subjects = ("python", "torch", "tilelang", "cute", "tvm-ffi", "nvcc", "host compiler", "switches", "replay decode")
    for subject in (*subjects, "kernel cache"):
        assert subject in found and subject in result.output
    assert {"hosts", "transformers"} & found.keys()
    assert (result.exit_code == 0) == ("fail" not in found.values())


def test_doctor_sums_up_and_says_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """One line for all tables in order; a stale one keeps its own."""
    ok, stale = (doctor.Finding("tuned tables", level, f"table {n}") for n, level in enumerate(("ok", "warn")))
    gpu, missing = doctor.Finding("GPU 0", "ok", "NVIDIA H100 80GB HBM3, SM90"), doctor.Finding("GPU", "note", "none")
    outputs = []
    for findings in ([gpu, ok, stale, ok], [missing, ok]):
        monkeypatch.setattr(doctor, "diagnose", lambda findings=findings: findings)
        outputs.append(flat(gdn("doctor").output))
    assert "2 current ones" in outputs[0] and "table 1" in outputs[0] and outputs[0].endswith("Ready.")
    assert "table 0" in outputs[1] and "Ready, without a Hopper GPU: every call runs on the plain-torch reference" in outputs[1]


def test_explain_says_how_to_ask_about_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device h100" in gdn("explain", "chunk").output
    for options in (("--device", "h100"), ("--device", "cpu"), ("--json",)):
        assert "--device h100" not in gdn("explain", "chunk", *options).output


def test_doctor_in_json(monkeypatch: pytest.MonkeyPatch):
    result = gdn("doctor", "--json")
    data = json.loads(result.stdout)
    assert data["ready"] == (result.exit_code == 0)
    assert {finding["subject"]: finding["level"] for finding in data["findings"]} == levels()
    monkeypatch.setattr(toolchain, "host_compiler", lambda: None)
    broken = gdn("doctor", "--json")
    assert broken.exit_code == 1 and json.loads(broken.stdout)["ready"] is False


def test_doctor_warns_of_a_folder_of_tables_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def finding(folder: Path) -> tuple[str, str]:
        monkeypatch.setenv("GDN_TUNED_DIR", str(folder))
        (found,) = [finding for finding in doctor.diagnose() if finding.subject == "GDN_TUNED_DIR"]
        return found.level, found.text

    assert finding(tmp_path / "none") == ("warn", f"{tmp_path / 'none'} does not exist: it is not searched for tables")
    assert gdn("doctor").exit_code == 0  # kernels run with the shipped tables
    (tmp_path / "file").write_text("")
    assert finding(tmp_path / "file") == ("warn", f"{tmp_path / 'file'} is not a folder: it is not searched for tables")
    assert finding(tmp_path)[0] == "note"


def test_doctor_without_nvcc_says_what_still_works(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    (finding,) = [finding for finding in doctor.diagnose() if finding.subject == "nvcc"]
    assert finding.level == "note" and "tilelang[nvcc]" in finding.text and "CuTe backend works" in finding.text


def test_doctor_fails_where_something_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "host_compiler", lambda: None)
    assert levels()["host compiler"] == "fail"
    result = gdn("doctor")
    assert result.exit_code == 1 and "Something is missing" in result.output
    monkeypatch.setenv("GDN_TUNED", "maybe")
    assert levels()["switches"] == "fail"


def test_doctor_warns_of_a_cache_that_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def finding(folder: Path) -> doctor.Finding:
        monkeypatch.setenv("GDN_CACHE_DIR", str(folder))
        return next(finding for finding in doctor.diagnose() if finding.subject == "kernel cache")

    (tmp_path / "file").write_text("")
    unwritable = finding(tmp_path / "file")
    assert unwritable.level == "warn" and "not writable" in unwritable.text and "GDN_CACHE_DIR" in unwritable.text
    entry = tmp_path / "cache" / "chunk.cute" / "0123"
    cache_folder.make_private(entry)
    cache_folder.write_private(entry / "manifest.json", b"{}")
    found = finding(tmp_path / "cache")
    assert (found.level, found.text) == ("ok", f"{tmp_path / 'cache'}, 1 kernels")
    entry.chmod(0o777)
    refused = finding(tmp_path / "cache")
    assert refused.level == "warn" and f"{entry} may be written by its group or others" in refused.text
    assert gdn("doctor").exit_code == 0


def test_doctor_fails_on_a_broken_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tuned.table_path(tmp_path, "h100", "chunk", "tilelang")
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    monkeypatch.setenv("GDN_TUNED_DIR", str(tmp_path))
    assert levels()["GDN_TUNED_DIR"] == "fail"


def test_doctor_names_a_dsl_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tilelang", None)  # importing it raises ImportError
    (finding,) = [finding for finding in doctor.diagnose() if finding.subject == "tilelang"]
    assert finding.level == "fail" and "install tilelang" in finding.text


def test_where_nvcc_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.nvcc() == tool
    tool.chmod(0o644)
    assert toolchain.nvcc() is None
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tool.parent))
    assert toolchain.nvcc() == tool
    assert toolchain.missing("cute") == "requires the host compiler cc to link kernels, got none on PATH"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0", "GDN_REPLAY=0: off in every cache"),
        ("1", "GDN_REPLAY=1: on in every cache"),
        (
            "auto",
            "GDN_REPLAY=auto: on with drafts, and in caches of 128 value heads or more over all their sequences; "
            "off for head dims other than 64 or 128",
        ),
    ],
)
def test_doctor_names_the_replay_setting(value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_REPLAY", value)
    monkeypatch.setattr("gdn.ops.delta_rule.crossing.REPLAY_HEADS", 128)
    (finding,) = [finding for finding in doctor.diagnose() if finding.subject == "replay decode"]
    assert (finding.level, finding.text) == ("ok", text)
