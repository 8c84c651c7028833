"""`python -m autotune` on a machine without a GPU."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune import cli, shapes, tables, tune_command, tuning
from benchmarks import cli as benchmarks_cli
from gdn.device import H100
from gdn.runtime import registry, tuned
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, OTHER, SHAPE, FakeGpu

RUNNER = CliRunner()
OLD_NAMES = ["bench", "layers", "ranks", "context", "accuracy", "selection"]  # of commands that are in benchmarks


def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_help_lists_the_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "autotune", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("tune", "choice", "show"))
    assert not any(f" {command} " in done.stdout for command in OLD_NAMES)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["chunk", "--peer", "FLA", "--json", "figures.json"]], ids=len)
@pytest.mark.parametrize("old", OLD_NAMES)
def test_a_command_that_measures_names_the_new_one(old: str, arguments: list[str]) -> None:
    done = RUNNER.invoke(cli.app, [old, *arguments])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    new = "ops" if old == "bench" else old
    assert f"`python -m autotune {old}` is now `python -m benchmarks {new}`" in line
    assert new in {command.name or command.callback.__name__ for command in benchmarks_cli.app.registered_commands}


def test_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch)
    done = RUNNER.invoke(cli.app, ["tune", "chunk"])
    assert done.exit_code == 2
    assert "SM90" in done.output


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["show", "chunky"], "op: expected one of chunk"),
        (["show", "--folder", "/nowhere/tables"], "folder: expected a folder of tables, got /nowhere/tables"),
        (["tune", "chunk", "--limit", "0"], "Invalid value for '--limit'"),
        (["dance"], "No such command 'dance'"),
        (["tune", "chunks"], "expected one of chunk, recurrent"),
        (["tune", "chunk", "--shapes", "nowhere"], "expected part of one of"),
        (["tune", "chunk", "--backend", "cuda", "--compile-only"], "expected one of cute, tilelang"),
        (["tune", "chunk", "--shapes", "published", "--compile-only"], "expected part of one of"),
        (["tune"], "op: expected one of chunk, recurrent"),
        (["tune", "--workload", "gpt-7"], "workload: expected one of qwen3-next-80b, qwen3.5-35b"),
        (["tune", "--workload", "tiny", "--shapes", "nowhere", "--compile-only"], "shapes: expected part of the name of one of"),
        (["tune", "--workload", "nowhere/config.json"], "or a config.json, got 'nowhere/config.json'"),
        (["tune", "chunk", "--workload", "tiny"], "workload: expected without an operator"),
        (["tune", "--workload", "tiny", "--stale"], "workload: expected without an operator, --restamp, --prune and --stale"),
        (["tune", "chunk", "--tp", "2"], "tp, num_spec: expected with --workload"),
        (["tune", "chunk", "--num-spec", "2"], "tp, num_spec: expected with --workload"),
        (["tune", "--workload", "tiny", "--tp", "0"], "Invalid value for '--tp'"),
        (["tune", "--workload", "tiny", "--tp", "5"], "expected"),
        (["tune", "--workload", "tiny", "--backend", "cuda", "--compile-only"], "backend: expected one of tilelang, cute"),
        (["tune", "chunk", "--search"], "search: expected with --stale"),
        (["tune", "--restamp", "--backend", "cuda"], "backend: expected one of tilelang, cute, got 'cuda'"),
    ],
)
def test_an_error_is_one_line_on_stderr(command: list[str], expected: str) -> None:
    done = RUNNER.invoke(cli.app, command)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and expected in line


def test_compile_only_needs_no_gpu(two_candidates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch)
    done = RUNNER.invoke(cli.app, ["tune", "chunk", "--shapes", "16/32 4096", "--compile-only", "--workers", "1"])
    assert done.exit_code == 1, done.output  # a candidate was dropped
    output = " ".join(done.output.split())
    assert "2 of 3 compiled" in output
    assert "tile does not divide" in output
    assert len(list(two_candidates.glob("chunk.tilelang/*/manifest.json"))) == 2


def test_show_prints_a_table(tmp_path: Path, cache: Path) -> None:
    winner = tuning.Winner(SHAPE, fake_kernel.Config(7, True), 49.0, 0.004, None)
    tables.write_winners(tmp_path / "tables", H100, KERNEL, [winner], {"torch": "2"})
    done = RUNNER.invoke(cli.app, ["show", "--folder", str(tmp_path / "tables")], terminal_width=200)
    assert done.exit_code == 0
    assert "chunk.tilelang on h100" in done.output and "49.0" in done.output
    (tmp_path / "empty").mkdir()
    empty = RUNNER.invoke(cli.app, ["show", "--folder", str(tmp_path / "empty")])
    assert empty.exit_code == 0 and "No tuned table" in empty.output


def test_shapes_are_of_operators_with_kernels_and_unique() -> None:
    for op in shapes.operators():
        assert registry.operator(op).modules
        found = shapes.shapes(op, measured=True, tuned=True)
        assert len({shape.name for shape in found}) == len(found)
        tunable = shapes.shapes(op, tuned=True)
        assert len({shape.problem for shape in tunable}) == len(tunable)  # the key of a table's entry
        for shape in found:
            assert shape.op == op
            if shape.lengths:
                sizes = shape.problem.sizes()
                if op != "fold_states":  # whose lengths are tokens of earlier calls
                    assert sum(shape.lengths) == sizes.get("num_tokens", sizes.get("num_rows"))
                assert len(shape.lengths) == sizes.get("num_sequences", len(shape.lengths))


def test_the_published_table_has_27_shapes() -> None:
    assert len(shapes.shapes("chunk", "published", measured=True)) == 27
    assert not any("published" in shape.name for shape in shapes.shapes("chunk"))


@pytest.fixture
def stale_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """Table of the fake kernel: two entries of another source."""
    monkeypatch.setattr(tuning, "kernels", lambda op, backend: [KERNEL])
    winners = [tuning.Winner(shape, fake_kernel.Config(7, True), 49.0, 0.004, None) for shape in (SHAPE, OTHER)]
    path = tables.write_winners(tmp_path / "tables", H100, KERNEL, winners, {"torch": "2"})
    table = tuned.read(path)
    for group in table.groups:
        group.entries[0].kernel_source = "of another day"
    tuned.write(path, table)
    return path


@pytest.mark.parametrize("is_named", [True, False], ids=["--out", "GDN_TUNED_DIR"])
def test_restamp_and_prune_need_no_gpu(
    is_named: bool, stale_table: Path, monkeypatch: pytest.MonkeyPatch, switch: Callable[..., object]
) -> None:
    _without_gpu(monkeypatch)
    folder = str(stale_table.parent.parent)
    where = ["--out", folder] if is_named else []
    if not is_named:
        switch(GDN_TUNED_DIR=folder)
    table = tuned.read(stale_table)
    table.groups[1].entries[0].config = {"tile": fake_kernel.DEFAULT, "split": False}
    tuned.write(stale_table, table)
    done = RUNNER.invoke(cli.app, ["tune", "chunk", "--restamp", "--prune", *where, "--workers", "1"])
    assert done.exit_code == 1, done.output  # the fake kernel has no machine code to compare
    output = " ".join(done.output.split())
    assert "0 of 2 entries restamped, 2 stale" in output and "its machine code was not recorded" in output
    assert "1 entries that repeat the default dropped" in output
    assert tuned.read(stale_table).num_entries() == 1
    done = RUNNER.invoke(cli.app, ["tune", "chunk", "--stale", *where])
    assert done.exit_code == 2 and "SM90" in done.output


def _us(shape: shapes.Shape, config: fake_kernel.Config) -> float:
    """The stored tiles take 60 us, the default 50."""
    return {fake_kernel.DEFAULT: 50.0, fake_kernel.FASTEST: 49.0}.get(config.tile, 60.0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that times the default and one other configuration, which compile as ever."""
    monkeypatch.setattr(tune_command, "device_spec", lambda: H100)
    monkeypatch.setattr(tune_command, "_versions", lambda backend: {"torch": "3"})
    monkeypatch.setattr(tune_command, "Device", lambda spec: FakeGpu(_us))
    good = [fake_kernel.Config(tile, False) for tile in (fake_kernel.DEFAULT, fake_kernel.FASTEST)]
    monkeypatch.setattr(fake_kernel, "configs", lambda problem, device: good)


@pytest.mark.cover
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("search", "left"), [([], []), (["--search"], [fake_kernel.FASTEST])])
def test_stale_entries_are_timed_against_the_default(
    search: list[str], left: list[int], stale_table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stored tiles lose against the default, and their entry goes; a search finds others that win."""
    monkeypatch.setattr(tuned, "SHIPPED", stale_table.parent.parent)
    options = ["--stale", *search, "--shapes", "16/32", "--journals", str(tmp_path / "journals"), "--workers", "1"]
    done = RUNNER.invoke(cli.app, ["tune", "chunk", *options])
    assert done.exit_code == 0, done.output
    entries = {group.static["num_k_heads"]: group.entries[0] for group in tuned.read(stale_table).groups}
    assert [entries[16].config["tile"]] == left if left else 16 not in entries
    assert all(entries[16].kernel_source != "of another day" for _ in left)
    assert entries[4].kernel_source == "of another day"  # which --shapes left out
