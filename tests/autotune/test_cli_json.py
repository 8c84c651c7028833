"""`python -m autotune ... --json`: one JSON document on stdout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune import cli, tables, tuning
from gdn.device import H100
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, SHAPE, FakeGpu

RUNNER = CliRunner()


def run(*command: str, status: int = 0) -> Any:
    done = RUNNER.invoke(cli.app, [*command, "--json"])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)  # nothing else is there


def winner() -> tuning.Winner:
    return tuning.Winner(SHAPE, fake_kernel.Config(7, True), 49.0, 0.004, None)


def test_show(tmp_path: Path) -> None:
    path = tables.write_winners(tmp_path, H100, KERNEL, [winner()], {"torch": "2"})
    (table,) = run("show", "chunk", "--folder", str(tmp_path))
    assert table["path"] == str(path) and table["header"]["device"] == "h100"
    (group,) = table["groups"]
    assert group["entries"][0]["time_us"] == 49.0 and group["entries"][0]["config"] == {"tile": 7, "split": True}
    assert run("show", "topk", "--folder", str(tmp_path)) == []
    assert {table["header"]["op"] for table in run("show", "chunk_gated_delta_rule")} == {"chunk"}  # the shipped ones


@pytest.mark.usefixtures("two_candidates")
def test_tune_compiling_only() -> None:
    data = run("tune", "chunk", "--shapes", "16/32 4096", "--compile-only", "--workers", "1", status=1)
    assert (data["op"], data["device"], data["complete"]) == ("chunk", "h100", False)
    (kernel,) = data["kernels"]
    assert (kernel["backend"], kernel["candidates"], kernel["winners"], kernel["table"]) == ("tilelang", 3, [], None)
    (dropped,) = kernel["dropped"]
    assert dropped["config"]["tile"] == fake_kernel.RAISES and "tile does not divide" in dropped["why"]


def test_tune(gpu: Callable[[FakeGpu], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu(fake := FakeGpu())
    monkeypatch.setattr(tuning, "kernels", lambda op, backend: [KERNEL])
    out = tmp_path / "tables"
    data = run("tune", "chunk", "--shapes", "16/", "--out", str(out), "--journals", str(tmp_path / "journals"))
    assert data["complete"] and (data["op"], data["workload"], data["left_out"]) == ("chunk", None, [])
    (kernel,) = data["kernels"]
    assert kernel["not_served"] == {"16/64 8192": "requires fewer than 64 value heads, got 64"}
    found = {one["shape"]: one for one in kernel["winners"]}["16/32 4096"]
    assert found["config"] == {"tile": fake_kernel.FASTEST, "split": False} and found["error"] == 0.004
    assert found["gain"] == pytest.approx(1 - 49 / 90, abs=0.01) and found["default_us"] == pytest.approx(90, rel=0.01)
    assert (kernel["dropped"], kernel["left"], fake.is_closed) == ([], 0, True)
    assert Path(kernel["table"]).is_file() and out in Path(kernel["table"]).parents


def test_what_follows_json_prints_on_stdout_again(tmp_path: Path) -> None:
    run("show", "--folder", str(tmp_path))
    assert "No tuned table" in RUNNER.invoke(cli.app, ["show", "--folder", str(tmp_path)]).stdout


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "chunk.cute.json").write_text("{")
    done = RUNNER.invoke(cli.app, ["show", "--folder", str(tmp_path)])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and "chunk.cute.json: not a tuned table" in done.stderr
