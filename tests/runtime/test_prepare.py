"""prepare: from switches, tables and a kernel module to something that launches; memoised, and forgotten on reload."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.device import H100
from gdn.problem import Problem, hint, size
from gdn.runtime import compiled, devices, env, registry, select, source, toolchain, tuned
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import Config, FakeProblem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def a_hopper(plain_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes the CPU an H100, the fake kernel both backends of the recurrent operator, and the folder of shipped tables empty."""
    fakes = {"tilelang": fake_kernel.__name__, "cute": fake_kernel.__name__}
    monkeypatch.setitem(registry.OPERATORS, "recurrent", dataclasses.replace(registry.OPERATORS["recurrent"], modules=fakes))
    monkeypatch.setattr(devices, "describe", lambda device: (H100, "NVIDIA H100 (SM90)"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    runtime.candidates.cache_clear()
    yield
    runtime.candidates.cache_clear()
    compiled.forget()


@pytest.fixture
def problem(tmp_path: Path) -> FakeProblem:
    return FakeProblem("bfloat16", 128, str(tmp_path / "journal"), 0.0, 100)


def store(
    folder: Path, backend: str, problem: FakeProblem, *entries: tuple[int, int, float], kernel_source: str | None = None
) -> None:
    """Entries are (num_tokens, tile, time_us)."""
    header = tuned.Header(device="h100", op="recurrent", backend=backend, runs={"2026-11-20": {}})
    kernel_source = kernel_source or source.source_hash(fake_kernel.__file__)
    rows = [
        tuned.Entry(
            sizes={"num_tokens": tokens},
            config={"tile": tile, "wide": False},
            time_us=time_us,
            date="2026-11-20",
            kernel_source=kernel_source,
        )
        for tokens, tile, time_us in entries
    ]
    group = tuned.Group(static=problem.static_fields(), entries=rows)
    tuned.write(tuned.table_path(folder, "h100", "recurrent", backend), tuned.Table(header=header, groups=[group]))


def test_prepare_and_launch(problem: FakeProblem):
    prepared = runtime.prepare(problem, CPU, None)
    assert (prepared.backend, prepared.config, prepared.workspace_bytes) == ("cute", Config(64, False), 6400)
    assert prepared.choice.config_source == "default"
    results: list[int] = []
    assert prepared.launch is not None
    prepared.launch(results, 3)
    assert results == [192, 1920]


def test_repeats_are_remembered(problem: FakeProblem):
    first = runtime.prepare(problem, CPU, None)
    assert runtime.prepare(dataclasses.replace(problem), CPU, None) is first
    before = compiled.compilations()
    other = runtime.prepare(problem.sizes_only(101), CPU, None)
    assert other is not first and other.workspace_bytes == 6464
    assert compiled.compilations() == before  # the same kernel
    assert runtime.prepare(problem, CPU, "tilelang").backend == "tilelang"
    assert runtime.prepare(problem, CPU, None) is first


def test_the_memory_of_decisions_is_bounded(problem: FakeProblem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime, "_MEMO_LIMIT", 8)
    env.reload()
    for num_tokens in range(64, 94):
        runtime.prepare(problem.sizes_only(num_tokens), CPU, None)
    assert len(runtime._memo) == 8
    assert runtime.prepare(problem.sizes_only(93), CPU, None) is runtime.prepare(problem.sizes_only(93), CPU, None)


def test_reload_changes_what_runs(problem: FakeProblem, switch: Callable[..., env.Switches], monkeypatch: pytest.MonkeyPatch):
    assert runtime.prepare(problem, CPU, None).backend == "cute"
    monkeypatch.setenv("VLLM_GDN_USE_BLADNN", "0")
    assert runtime.prepare(problem, CPU, None).backend == "cute"  # not read yet
    switch(VLLM_GDN_USE_BLADNN="0")
    assert runtime.prepare(problem, CPU, None).backend == "tilelang"
    switch(GDN_BACKEND_RECURRENT="reference")
    prepared = runtime.prepare(problem, CPU, None)
    assert (prepared.backend, prepared.launch, prepared.config) == ("reference", None, None)


def test_launches_go_to_the_tensors_device(problem: FakeProblem, monkeypatch: pytest.MonkeyPatch):
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        prepared = runtime.prepare(problem, torch.device("cuda", index), None)
        results: list[int] = []
        assert prepared.launch is not None
        prepared.launch(results, 1)
        assert results == [64, 640]
    assert entered == [1]
    assert runtime.prepare(problem, torch.device("cuda"), None) is runtime.prepare(problem, torch.device("cuda", 0), None)


def test_refusals_of_the_module(problem: FakeProblem):
    odd = dataclasses.replace(problem, head_dim=96)
    prepared = runtime.prepare(odd, CPU, None)
    assert prepared.backend == "reference"
    assert dict(prepared.choice.refusals)["cute"] == "requires head_dim 64 or 128, got 96"
    with pytest.raises(ValueError, match="by the argument., which requires head_dim 64 or 128, got 96"):
        runtime.prepare(odd, CPU, "cute")


def test_tables_decide(problem: FakeProblem, switch: Callable[..., env.Switches], tmp_path: Path):
    store(tuned.SHIPPED, "tilelang", problem, (1, 1, 5.0), (100, 2, 50.0))
    store(tuned.SHIPPED, "cute", problem, (1, 3, 7.0), (100, 4, 20.0))
    env.reload()
    small, large = runtime.prepare(problem.sizes_only(1), CPU, None), runtime.prepare(problem, CPU, None)
    assert (small.backend, small.config.tile) == ("tilelang", 1)
    assert (large.backend, large.config.tile) == ("cute", 4)
    assert small.choice.decided_by == large.choice.decided_by == "tuned table"
    assert runtime.prepare(problem, CPU, "tilelang").config.tile == 2
    far = runtime.prepare(problem.sizes_only(150), CPU, None)  # near enough for tiles, not for who is faster
    assert (far.backend, far.config.tile, far.choice.decided_by) == ("cute", 4, "built-in order")
    assert runtime.prepare(problem.sizes_only(10), CPU, None).choice.config_source == "default"  # near to neither
    switch(GDN_TUNED="off")
    assert runtime.prepare(problem, CPU, None).config == Config(64, False)


def test_own_tables_come_first_where_they_have_an_entry_near_enough(
    problem: FakeProblem, switch: Callable[..., env.Switches], tmp_path: Path
):
    store(tuned.SHIPPED, "cute", problem, (1, 3, 7.0), (100, 4, 20.0))
    store(tmp_path / "own", "cute", problem, (100, 8, 1.0))
    switch(GDN_TUNED_DIR=str(tmp_path / "own"))
    assert runtime.prepare(problem, CPU, None).config.tile == 8
    assert runtime.prepare(problem.sizes_only(1), CPU, None).config.tile == 3  # at a7eedda the own table hid the shipped one


def test_fields_of_the_compile_key_alone_do_not_veto_an_entry(problem: FakeProblem, tmp_path: Path):
    store(tuned.SHIPPED, "cute", problem, (100, 4, 20.0))
    env.reload()
    prepared = runtime.prepare(dataclasses.replace(problem, journal=str(tmp_path / "other")), CPU, None)
    assert (prepared.config.tile, prepared.choice.config_source) == (4, "table")
    assert "with another journal" in prepared.choice.notes[0]
    other = runtime.prepare(dataclasses.replace(problem, dtype="float16"), CPU, None)
    assert other.choice.config_source == "default"


def test_an_entry_that_does_not_fit_the_problem_is_passed_over(problem: FakeProblem, tmp_path: Path):
    """`fits` sees the problem of the call, not the one that was measured."""
    store(tuned.SHIPPED, "cute", problem, (100, 100, 20.0))
    env.reload()
    slow = dataclasses.replace(problem, seconds=fake_kernel.SMALL_TILES_S)
    assert runtime.prepare(slow, CPU, None).config == Config(64, False)
    assert runtime.prepare(problem, CPU, None).config.tile == 100


def test_a_field_that_does_not_say_whether_it_tunes_is_an_error():
    made = dataclasses.make_dataclass("Undecided", [("dtype", str), ("num_tokens", int, size())], bases=(Problem,), frozen=True)
    with pytest.raises(TypeError, match=r"Undecided: expected metadata=TUNES.*, got none on dtype"):
        made("bfloat16", 1).tune_key()


def test_stale_entries_serve_their_tiles_and_decide_nothing(
    problem: FakeProblem, switch: Callable[..., env.Switches], capsys: pytest.CaptureFixture[str]
):
    store(tuned.SHIPPED, "tilelang", problem, (100, 2, 5.0), kernel_source="of another day")
    store(tuned.SHIPPED, "cute", problem, (100, 4, 20.0))
    switch(GDN_LOG="info")
    prepared = runtime.prepare(problem, CPU, None)
    assert (prepared.backend, prepared.config.tile, prepared.choice.decided_by) == ("cute", 4, "built-in order")
    assert runtime.prepare(problem, CPU, "tilelang").config.tile == 2
    assert "recurrent.tilelang.json: tuned with another version of" in capsys.readouterr().err


def test_strict(problem: FakeProblem, switch: Callable[..., env.Switches]):
    switch(GDN_TUNED="strict")
    with pytest.raises(select.MissingTunedEntry):
        runtime.prepare(problem, CPU, None)
    store(tuned.SHIPPED, "cute", problem, (1, 200, 5.0))  # the kernel no longer takes this tile
    env.reload()
    with pytest.raises(select.MissingTunedEntry):
        runtime.prepare(problem, CPU, None)
    store(tuned.SHIPPED, "cute", problem, (1, 100, 5.0))
    env.reload()
    assert runtime.prepare(problem.sizes_only(1), CPU, None).config.tile == 100


@pytest.mark.parametrize("with_table", [False, True])
def test_batch_invariance(problem: FakeProblem, switch: Callable[..., env.Switches], with_table: bool):
    if with_table:
        store(tuned.SHIPPED, "tilelang", problem, (1, 1, 5.0), (8192, 2, 50.0))
        store(tuned.SHIPPED, "cute", problem, (1, 3, 1.0), (8192, 4, 60.0))
    sizes = (1, 16, 100, 100_000)
    env.reload()
    free = {p.config for p in (runtime.prepare(problem.sizes_only(n), CPU, None) for n in sizes)}
    assert len(free) == (3 if with_table else 2)
    switch(GDN_BATCH_INVARIANT="1")
    prepared = [runtime.prepare(problem.sizes_only(n), CPU, None) for n in sizes]
    assert {(p.backend, p.config.tile) for p in prepared} == {("tilelang", 2) if with_table else ("cute", 64)}
    assert [p.workspace_bytes for p in prepared] == [n * prepared[0].config.tile for n in sizes]  # of the real sizes


@dataclasses.dataclass(frozen=True)
class HintedProblem(FakeProblem):
    longest: int = hint()


def test_what_the_host_knows_needs_no_kernel_of_its_own(
    problem: FakeProblem, switch: Callable[..., env.Switches], monkeypatch: pytest.MonkeyPatch
):
    """A hint may choose a kernel that is in no cache: the one without the hint then serves. Elsewhere it is compiled."""
    hinted = HintedProblem(**dataclasses.asdict(problem), longest=90)
    default = fake_kernel.default_config

    def of_hint(problem: FakeProblem, device: Any) -> Config:
        return Config(77, True) if getattr(problem, "longest", 0) else default(problem, device)

    monkeypatch.setattr(fake_kernel, "default_config", of_hint)
    runtime.prepare(dataclasses.replace(hinted, longest=0), CPU)  # compiles, and keeps it
    assert fake_kernel.compilations(problem) == 1
    switch(GDN_COMPILE="off")
    compiled.forget()
    prepared = runtime.prepare(hinted, CPU)
    assert prepared.config == default(problem, H100) and fake_kernel.compilations(problem) == 1
    with pytest.raises(compiled.MissingKernel):
        runtime.prepare(hinted, CPU, "cute", config=Config(77, True))
    switch(GDN_COMPILE="auto")
    assert runtime.prepare(hinted, CPU).config == Config(77, True) and fake_kernel.compilations(problem) == 2


def test_a_given_config(problem: FakeProblem):
    prepared = runtime.prepare(problem, CPU, "cute", config=Config(5, False))
    assert (prepared.config, prepared.choice.config_source) == (Config(5, False), "argument")


def test_a_module_that_cannot_be_imported(
    problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    broken = {"tilelang": fake_kernel.__name__, "cute": "tests.runtime.not_there"}
    monkeypatch.setitem(registry.OPERATORS, "recurrent", dataclasses.replace(registry.OPERATORS["recurrent"], modules=broken))
    runtime.candidates.cache_clear()
    prepared = runtime.prepare(problem, CPU, None)
    assert prepared.backend == "tilelang"
    assert "requires tests.runtime.not_there to be importable" in dict(prepared.choice.refusals)["cute"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # even with GDN_LOG=off


def test_a_machine_that_cannot_compile_runs_what_is_cached(problem: FakeProblem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "missing", lambda backend: "requires nvcc, got none" if backend == "cute" else None)
    runtime.candidates.cache_clear()
    assert runtime.prepare(problem, CPU, None).backend == "tilelang"
    monkeypatch.setattr(toolchain, "missing", lambda backend: None)
    env.reload()
    runtime.prepare(problem, CPU, "cute")
    monkeypatch.setattr(toolchain, "missing", lambda backend: "requires nvcc, got none" if backend == "cute" else None)
    env.reload()
    assert runtime.prepare(problem, CPU, None).backend == "cute"


def test_explaining_notes_choices_and_compiles_nothing(problem: FakeProblem):
    before = compiled.compilations()
    with runtime.explaining() as asked:
        prepared = runtime.prepare(problem, CPU, "cute")
        runtime.prepare(problem, CPU, "reference")
    assert asked.answers[0][0].backend == "cute" and asked.answers[1][0].backend == "reference"
    assert [about for _, about in asked.answers] == [problem, problem]
    assert prepared.launch is not None
    prepared.launch("whatever", "comes")  # launches nothing
    assert compiled.compilations() == before and not Path(problem.journal).exists()
    assert runtime.prepare(problem, CPU, "cute").launch is not None  # afterwards as ever


def test_explaining_is_of_one_thread(problem: FakeProblem):
    found: list[Any] = []
    with runtime.explaining():
        thread = threading.Thread(target=lambda: found.append(runtime.prepare(problem, CPU, None)))
        thread.start()
        thread.join(60)
    assert found[0].backend == "cute"


def test_threads_share_one_compilation(problem: FakeProblem):
    problem = dataclasses.replace(problem, seconds=0.2)
    before = compiled.compilations()
    threads = [threading.Thread(target=runtime.prepare, args=(problem, CPU, None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert compiled.compilations() - before == 1
