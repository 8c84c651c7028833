"""The command line: `gdn env`, `gdn explain`, `gdn doctor`."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn.cli import app, doctor, explain
from gdn.problems import ChunkProblem
from gdn.runtime import compiled, env, registry, toolchain, tuned

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


def test_an_unknown_command():
    assert gdn("dance").exit_code == 2


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


def test_env_refuses_a_bad_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDN_LOG", "loud")
    monkeypatch.setattr(sys, "argv", ["gdn", "env"])
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 2


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
        result = gdn("explain", op.functions[0], "--device", "h100", "--backend", backend)
        assert result.exit_code == 0, result.output
        assert f"{op.name}: {backend}, by the argument" in result.output and "tiles (" in result.output
    assert compiled.compilations() == before


def test_explain_without_a_gpu():
    result = gdn("explain", "chunk", "--device", "cpu")
    assert result.exit_code == 0 and "chunk: reference, by no SM90 (Hopper) GPU" in result.output
    result = gdn("explain", "indexer_topk", "--device", "cpu")
    assert "mqa_logits: reference" in result.output and "topk: reference, by no SM90 (Hopper) GPU" in result.output


def test_explain_hands_an_order_for_the_whole_to_its_parts(switch: Callable[..., env.Switches]):
    switch(GDN_BACKEND_INDEXER_TOPK="cute")
    result = gdn("explain", "indexer_topk", "--device", "h100")
    assert "mqa_logits: cute, by the argument" in result.output and "topk: cute, by the argument" in result.output
    result = gdn("explain", "indexer_topk", "--device", "h100", "--backend", "reference")
    assert "mqa_logits: reference" in result.output and "topk: reference, by the argument" in result.output
    assert gdn("explain", "topk", "--backend", "cute", "--device", "cpu").exit_code == 2


def test_explain_takes_fields_models_and_ranks():
    result = gdn("explain", "chunk", "head_k_dim=48", "--device", "h200", "--tp", "4")
    assert result.exit_code == 0 and "chunk: reference" in result.output and "requires" in result.output
    assert "num_v_heads=8" in result.output and "head_k_dim=48" in result.output
    assert "num_k_heads=2" in gdn("explain", "chunk", "--model", "tiny", "--device", "cpu").output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["chunk", "--backend", "cute", "--device", "cpu"], "'cute' was ordered for chunk"),
        (["chunky"], "op: expected one of chunk"),
        (["chunk", "heads=3"], "expected name=value with a name of num_q_heads"),
        (["chunk", "num_q_heads=many"], "num_q_heads: expected a whole number"),
        (["chunk", "dtype=bf16"], "dtype: expected one of float64"),
        (["chunk", "state_v_first=perhaps"], "state_v_first: expected true or false"),
        (["chunk", "--tp", "3"], "tp: expected a divisor"),
        (["chunk", "--model", "none"], "expected one of"),
        (["chunk", "--device", "b200"], "expected auto, h100, h200 or cpu"),
    ],
)
def test_explain_refuses(arguments: list[str], word: str):
    result = gdn("explain", *arguments)
    assert result.exit_code == 2
    assert word.split()[0] in flat(result.output) and flat(word) in flat(result.output)


def test_fields_are_parsed_by_type():
    problem = explain.example("chunk", explain.MODELS["tiny"], fp8=False)
    assert isinstance(problem, ChunkProblem)
    changed = explain.override(problem, ["gate_dtype=none", "state_v_first=1", "num_tokens=7", "state_dtype=bfloat16"])
    assert isinstance(changed, ChunkProblem)
    assert (changed.gate_dtype, changed.state_v_first, changed.num_tokens, changed.state_dtype) == (None, True, 7, "bfloat16")
    with pytest.raises(ValueError, match="state_dtype: expected one of"):
        explain.override(problem, ["state_dtype=none"])


def levels() -> dict[str, str]:
    return {finding.subject: finding.level for finding in doctor.diagnose()}


def test_doctor_on_this_machine():
    result = gdn("doctor")
    found = levels()
    for subject in ("python", "torch", "tilelang", "cute", "tvm-ffi", "nvcc", "host compiler", "switches", "kernel cache"):
        assert subject in found and subject in result.output
    assert (result.exit_code == 0) == ("fail" not in found.values())


def test_doctor_without_nvcc_says_what_still_works(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    (finding,) = [finding for finding in doctor.diagnose() if finding.subject == "nvcc"]
    assert finding.level == "note" and "tilelang[nvcc]" in finding.text and "CuTe backend works" in finding.text


def test_doctor_fails_where_something_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(toolchain, "host_compiler", lambda: None)
    found = levels()
    assert (found["kernel cache"], found["host compiler"]) == ("fail", "fail")
    result = gdn("doctor")
    assert result.exit_code == 1 and "Something is missing" in result.output
    monkeypatch.setenv("GDN_TUNED", "maybe")
    assert levels()["switches"] == "fail"


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
