"""`gdn compile` and what it builds: a model's kernels, each once; and a process that serves them imports no DSL."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gdn
from gdn import served
from gdn.cli import app
from gdn.device import H100
from gdn.layers.named import NAMED
from gdn.models import QWEN3_NEXT_80B
from gdn.ops.layer_step import examples
from gdn.runtime import bundle, compiled, env, reach
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import Config, FakeProblem
from tests.runtime.processes import ROOT, python


def of_model(name: str, tp: int = 1, **options: Any) -> list[Any]:
    return served.of_config(NAMED[name].per_rank(tp), **options)


def test_the_calls_of_a_model() -> None:
    problems = of_model("qwen3-next-80b", tp=4, num_spec=2)
    by_op: dict[str, list[Any]] = {}
    for problem in problems:
        by_op.setdefault(problem.op, []).append(problem)
    decode = by_op["gdn_decode"]
    # vLLM and Transformers, the own layers, SGLang.
    layouts = {(p.interleaved, p.merged, p.concatenated) for p in decode}
    assert layouts == {(True, False, False), (False, True, False), (False, False, True), (False, False, False)}
    assert {(p.num_k_heads, p.num_v_heads) for p in decode} == {(4, 8)}
    assert {p.has_accepted for p in decode} == {False, True}
    assert {p.has_checkpoints for p in by_op["gdn_prefill"]} == {False, True}
    assert {p.next_n for p in by_op["paged_mqa_logits"]} == set(range(1, 9))
    assert {"topk", "prepare_indexer", "sparse_attention_decode", "add_rms_norm"} <= by_op.keys()
    # Without an indexer, with hyper-connections, and without Gated DeltaNet.
    own = {"hosts": ("layers",)}
    attention = {"prepare_indexer", "sparse_attention_decode", "attention_prefill"}
    expected = {"gdn_decode", "fold_states", "gdn_prefill", "add_rms_norm"} | attention
    assert {p.op for p in of_model("qwen3.5-35b", **own)} == expected
    assert "add_rms_norm" not in {p.op for p in of_model("qwen3.8-flash-next", **own)}
    assert "compress_indexer_keys" in {p.op for p in of_model("qwen3.8-flash-next", **own)}
    only_full = dataclasses.replace(NAMED["tiny"], num_hidden_layers=1, layer_types=("full_attention",))
    assert "gdn_decode" not in {p.op for p in served.of_config(only_full)}


def test_kernels_are_each_listed_once_and_hold_those_of_sizes_between() -> None:
    problems = of_model("qwen3-next-80b", tp=2, num_spec=1)
    decode = next(p for p in problems if p.op == "gdn_decode" and p.cu_seqlens_dtype is None)
    prefill = next(p for p in problems if p.op == "gdn_prefill")
    alike = {one.static_key() for one in (decode, prefill)}
    listed = reach.kernels([p for p in problems if p.static_key() in alike], H100)
    found = {kernel.key for kernel in listed}
    assert len(found) == len(listed)
    sizes = [dataclasses.replace(decode, num_tokens=n, num_sequences=n) for n in (1, 5, 17, 77, 130, 250, 400)]
    # The last ones lie in ranges that no size of the list does.
    tokens = ((333, 1), (2049, 5), (8192, 33), (8256, 5), (3900, 2), (5000, 1), (3900, 1), (6900, 1), (4271, 2))
    sizes += [dataclasses.replace(prefill, num_tokens=t, num_sequences=n) for t, n in tokens]
    for size in sizes:
        for kernel in reach.kernels([size], H100):
            assert kernel.key in found, (kernel.problem, kernel.config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nothing"), "model: expected one of qwen3-next-80b.*got 'nothing'"),
        (("--model", "qwen3-next-80b", "--tp", "3"), "expected a multiple of 3 ranks, got 16"),
        (("--model", "tiny", "--num-spec", "-1"), "num_spec: expected a number of drafts >= 0, got -1"),
        (("--model", "tiny", "--state-dtype", "half"), "state_dtype: expected auto, float32, bfloat16, both, got 'half'"),
        (
            ("--model", "tiny", "--host", "layers,nobody"),
            "host: expected layers, vllm, sglang, transformers or all, got 'nobody'",
        ),
        (("--model", "tiny", "--block-size", "0"), "block_size: expected a number of tokens >= 1, got 0"),
        (("--model", "tiny", "--replay", "yes"), "replay: expected auto, 0, 1, got 'yes'"),
        (("--model", "tiny", "--device", "a100"), "device: expected h100 or h200, got 'a100'"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app.app, ["compile", *arguments, "-o", str(tmp_path / "folder")])
    assert ran.exit_code == 2
    line = ran.stderr.strip()
    assert "\n" not in line
    with pytest.raises(ValueError, match=message):
        raise ValueError(line)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("content", "message"), [("{", "which is no JSON"), ("[]", "which holds a list")])
def test_a_file_that_is_no_configuration_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    ran = CliRunner().invoke(app.app, ["compile", "--model", str(path), "-o", str(tmp_path / "folder")])
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (2, 1)
    assert "model: expected a config.json" in ran.stderr and message in ran.stderr


def test_a_wrong_entry_of_a_configuration_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3_next", "hidden_size": "x"}')
    ran = CliRunner().invoke(app.app, ["compile", "--model", str(path), "-o", str(tmp_path / "folder")])
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (2, 1)
    assert "config.json': hidden_size: expected an int, got str" in ran.stderr


def test_warmup_names_a_bad_argument_and_does_nothing_without_a_gpu() -> None:
    config = NAMED["tiny"]
    with pytest.raises(TypeError, match="config: expected a gdn.layers.HybridConfig, got dict"):
        gdn.warmup({})
    with pytest.raises(ValueError, match="num_spec: expected a number of drafts >= 0, got -1"):
        gdn.warmup(config, num_spec=-1)
    with pytest.raises(ValueError, match="state_dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        gdn.warmup(config, state_dtype=torch.float16)
    with pytest.raises(ValueError, match="block_size: expected a number of tokens >= 1, got 0"):
        gdn.warmup(config, block_size=0)
    with pytest.raises(TypeError, match="replay: expected a bool or None, got str"):
        gdn.warmup(config, replay="1")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        assert gdn.warmup(config) == gdn.warmup(config, replay=True) == 0


def test_calls_of_operators_are_known_at_all_sizes() -> None:
    """They are not run, and kinds of calls that are compiled once count once."""
    rows, windows, weight = torch.zeros(3, 64), torch.full((3, 64, 3), 7.0), torch.zeros(64, 4)
    problems = served.of_calls([lambda: gdn.causal_conv1d_update(rows, windows, weight)] * 2)
    assert (windows == 7).all() and len({problem.static_key() for problem in problems}) == 1
    assert {(problem.num_tokens, problem.num_sequences) for problem in problems} >= {(1, 1), (4, 1), (512, 512)}  # type: ignore[attr-defined]
    prompts = served.of_calls([lambda: gdn.causal_conv1d_fn(rows, weight)])
    assert {problem.num_tokens for problem in prompts} >= {16, 131072}  # type: ignore[attr-defined]


def test_calls_of_sequences_without_tokens_are_known_at_all_sizes() -> None:
    """fold_states has sequences and layers alone."""
    counts, states = torch.zeros(4, dtype=torch.int32), torch.full((2, 4, 2, 8, 8), 7.0)
    slots, ring = torch.tensor([1, 2], dtype=torch.int32), torch.zeros(2, 4, 6, 36)

    def call() -> None:
        gdn.fold_states(states, slots, ring, counts, slots, num_k_heads=2, fold_every=3)

    problems = served.of_calls([call])
    assert {(problem.num_layers, problem.num_sequences) for problem in problems} >= {(2, 1), (2, 512)}  # type: ignore[attr-defined]
    assert len(set(problems)) == len(problems) and (states == 7).all()


SERVE = """
import sys, importlib
from gdn import served
from gdn.ops.layer_step import examples
from gdn.device import H100
from gdn.models import QWEN3_NEXT_80B
from gdn.runtime import compiled, reach, source, toolchain
toolchain.missing = lambda backend: None
source._module = lambda *a: (_ for _ in ()).throw(AssertionError("a source was parsed"))
(kernel,) = reach.kernels([examples.gating(QWEN3_NEXT_80B)], H100)
place = compiled.ensure(kernel.op, kernel.backend, importlib.import_module(kernel.module), kernel.problem, kernel.config)
assert set(compiled.libraries_of(place)) == {"gating"}
assert not {name.partition(".")[0] for name in sys.modules} & {"tilelang", "cutlass", "tvm"}
print(compiled.compilations())
"""


@pytest.mark.cover
def test_a_folder_of_a_kernel_serves_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    wanted = reach.kernels([examples.gating(QWEN3_NEXT_80B)], H100)
    told: list[str] = []
    reach.build(tmp_path / "built", wanted, "gdn compile", 1, lambda kernel: told.append(kernel.op))
    assert told == ["gating"]
    (tmp_path / "built").rename(tmp_path / "moved")
    content = json.loads((tmp_path / "moved" / bundle.NAME).read_text())
    assert str(tmp_path) not in json.dumps(content) and content["versions"] == compiled.bundle_versions()
    assert python(SERVE, GDN_CACHE_DIR=str(tmp_path / "moved"), GDN_COMPILE="off").stdout == "0\n"
    monkeypatch.setenv("GDN_COMPILE", "off")
    env.reload()
    compiled.forget()
    with pytest.raises(compiled.MissingKernel):
        reach.load(wanted)  # another cache, without the kernel


def fake(tmp_path: Path, head_dim: int = 128, seconds: float = 0.0) -> FakeProblem:
    return FakeProblem("bfloat16", head_dim, str(tmp_path / "journal"), seconds, 1)


def fake_kernels(problem: FakeProblem, *configs: Config) -> list[reach.Kernel]:
    """Kernels of C in the place of CuTe's: they need cc alone."""
    return [reach.Kernel("recurrent", "cute", fake_kernel.__name__, problem, config) for config in configs]


@pytest.mark.cover
def test_a_build_goes_on_where_another_one_stopped(tmp_path: Path) -> None:
    """Also where two processes build into one folder at once: each kernel is compiled once."""
    folder, problem = tmp_path / "folder", fake(tmp_path)
    wanted = fake_kernels(problem, Config(1, False), Config(2, False))
    broken = fake_kernels(fake(tmp_path, head_dim=64), Config(4, True))
    with pytest.raises(compiled.CompileError, match="the compiler gave up"):
        reach.build(folder, wanted + broken, "gdn compile", 1)
    assert not (folder / bundle.NAME).exists()
    more = fake_kernels(problem, Config(8, False), Config(16, False))
    with ThreadPoolExecutor(2) as pool:
        for build in [pool.submit(reach.build, folder, wanted + more, "gdn compile", 1) for _ in range(2)]:
            build.result()
    assert sorted(Path(problem.journal).read_text().splitlines()) == sorted(
        str(kernel.config) for kernel in wanted + broken + more
    )
    found = bundle.find(folder, compiled.bundle_versions())
    assert found is not None
    for kernel in wanted + more:
        place = found.place(kernel.key, kernel.backend, kernel.module)
        assert place is not None and compiled.is_whole(place)


BUILD = """
import sys
from pathlib import Path
from gdn.runtime import reach
from tests.runtime.test_reach import Config, fake, fake_kernels
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wanted = fake_kernels(fake(folder, seconds=60.0), Config(1, False), Config(2, False))
    reach.build(folder / "folder", wanted, "gdn compile", 2)
"""


@pytest.mark.cover
def test_workers_end_with_a_build_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "build.py"
    script.write_text(BUILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], cwd=ROOT, env=environment, start_new_session=True)
    try:
        journal = tmp_path / "journal"
        wait_for(lambda: journal.exists() and len(journal.read_text().splitlines()) == 2)
        process.kill()
        process.wait(30)

        def is_empty() -> bool:
            """Whether nobody is left in the session of the build."""
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return True
            return False

        wait_for(is_empty)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float = 50.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
