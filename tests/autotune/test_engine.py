"""The search on a device that is not there: order, budget, interrupts, failures, and what the same command then does."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune import compiling, engine, shapes, summary, tables, tuning
from autotune.compiling import Compiler
from autotune.journal import DROPPED, TIMED, Journal, Record
from autotune.shapes import Shape
from autotune.workers import Outcome
from gdn.device import H100
from gdn.runtime import tuned
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, OTHER, SHAPE, FakeGpu, compile_at_once
from tests.autotune.fake_kernel import Config

LATER = shapes.shapes("chunk", "16/32 1024")[0]
TILES = (1, 3, 7, 5, 4, 8, 6)  # in the order in which they are tried
FAST, FASTEST, DEFAULT = (Config(tile, False) for tile in (fake_kernel.FAST, fake_kernel.FASTEST, fake_kernel.DEFAULT))

Step = Callable[[str, Shape, Any], str | None]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.workers, "run", compile_at_once)


@pytest.fixture
def search(tmp_path: Path) -> Callable[..., list[engine.Job]]:
    """Runs the search of the fake kernel as one command would, on the journal of the commands before."""

    def run(gpu: FakeGpu, *wanted: Shape, deadline: float = math.inf, **options: Any) -> list[engine.Job]:
        plan = tuning.plan(KERNEL, wanted or [SHAPE], H100, **options)
        jobs = engine.jobs([(plan, Journal(tmp_path / "journal.jsonl", KERNEL.source))])
        work = engine.visits(jobs)
        with Compiler(engine.wanted(work), 1, 60) as compiler:
            engine.run(work, compiler, gpu, deadline)
        return jobs

    return run


Search = Callable[..., list[engine.Job]]


def _at(what: str, config: Any, event: BaseException | str) -> Step:
    """Something that happens the first time that a configuration is asked for."""
    left = [event]

    def happens(asked: str, shape: Shape, one: Any) -> str | None:
        if (asked, one) == (what, config) and left:
            found = left.pop()
            if isinstance(found, BaseException):
                raise found
            return found
        return None

    return happens


def _winner(jobs: list[engine.Job]) -> tuning.Winner:
    winner = jobs[0].winner()
    assert winner is not None
    return winner


# --- what wins -------------------------------------------------------------------------------------------------------


def test_the_fastest_beside_the_default_wins(search: Search) -> None:
    gpu = FakeGpu()
    winner = _winner(search(gpu))
    assert [config.tile for config in gpu.measured()] == list(TILES)
    assert (winner.config, winner.error) == (FASTEST, 0.004)
    assert winner.time_us == pytest.approx(49, rel=0.01) and winner.default_us == pytest.approx(90, rel=0.01)
    assert winner.gain == pytest.approx(1 - 49 / 90, abs=0.01)
    assert {config for what, _, config in gpu.asked if what == "compare"} == {FAST, FASTEST}  # the others are not near


@pytest.mark.parametrize(("fast_us", "kept"), [(89.55, DEFAULT), (88.0, FAST), (93.0, DEFAULT)])
def test_a_gain_below_1_percent_leaves_the_default(search: Search, fast_us: float, kept: Config) -> None:
    winner = _winner(search(FakeGpu(lambda shape, config: fast_us if config == FAST else 90.0)))
    assert winner.config == kept and (winner.gain is None) == (kept == DEFAULT)
    assert winner.default_us == pytest.approx(90, rel=0.01)


def test_what_seemed_fast_alone_is_judged_beside_the_default(search: Search) -> None:
    """Its first time was in another clock."""
    gpu = FakeGpu()
    told = gpu.measure
    gpu.measure = lambda kernel, shape, config: (  # type: ignore[method-assign]
        Outcome(0, (0.004, 10.0), None, 0.0) if config.tile == fake_kernel.WRONG else told(kernel, shape, config)
    )
    assert _winner(search(gpu)).config == FASTEST  # it takes 120 us beside the default


def test_without_a_default_that_runs_the_fastest_is_kept(search: Search) -> None:
    winner = _winner(search(FakeGpu(happens=_at("measure", DEFAULT, "RuntimeError: no"))))
    assert (winner.config, winner.default_us, winner.gain) == (FASTEST, None, None)


def test_what_spills_is_compared_with_and_never_kept(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run the default, so its time is the one to beat; a table names nothing that spills."""
    spilling = {DEFAULT: "kernel spills: 3 local loads and stores, 8 bytes of stack", FASTEST: "kernel spills: 9"}

    def compile_all(function: Any, tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        for index, (_, _, config) in enumerate(tasks):
            yield Outcome(index, spilling.get(config), None, 0.0)

    monkeypatch.setattr(compiling.workers, "run", compile_all)
    (job,) = search(FakeGpu())
    winner = _winner([job])
    assert (winner.config, winner.default_us) == (FAST, pytest.approx(90, rel=0.01)) and winner.gain is not None
    assert job.record(FASTEST) == Record(DROPPED, why="kernel spills: 9")
    dropped = summary.report(job.plan, [job])["dropped"]
    assert [one["config"] for one in dropped if "spills" in one["why"]] == [FASTEST]
    assert summary.report(job.plan, [])["dropped"] == [{"config": FASTEST, "why": "kernel spills: 9"}]


@pytest.mark.parametrize("what", ["measure", "compare"])
def test_failures_alone_and_beside_the_default_cost_their_candidate_alone(search: Search, what: str) -> None:
    (job,) = search(FakeGpu(happens=_at(what, FASTEST, "worker process died (SIGSEGV)")))
    assert job.record(FASTEST) == Record(DROPPED, why="worker process died (SIGSEGV)")
    assert _winner([job]).config == FAST and not job.left() and not job.is_due()


# --- when ------------------------------------------------------------------------------------------------------------


def test_every_operators_most_common_size_comes_first(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "VISIT", 4)
    gpu = FakeGpu()
    jobs = search(gpu, SHAPE, LATER, OTHER)
    assert [(job.shape.name, job.rank) for job in jobs] == [(SHAPE.name, 0), (LATER.name, 1), (OTHER.name, 0)]
    visited = [name for what, name, _ in gpu.asked if what == "measure"]
    assert visited == [
        one.name for one, count in ((SHAPE, 4), (OTHER, 4), (SHAPE, 3), (OTHER, 3), (LATER, 7)) for _ in range(count)
    ]
    judged = [n for n, (what, *_) in enumerate(gpu.asked) if what == "compare"]
    assert judged[0] == 4  # a verdict after the first visit, from which a later one goes on


def test_timing_starts_while_others_compile(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def run(function: object, tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        for index in range(len(tasks)):
            begin = time.monotonic()
            while index == 7 and len(gpu.measured()) < 7:  # the other shape's first
                assert time.monotonic() - begin < 30, "nothing was timed before all was compiled"
                time.sleep(0.01)
            yield Outcome(index, None, None, 0.0)

    monkeypatch.setattr(compiling.workers, "run", run)
    search(gpu, SHAPE, OTHER)
    assert len(gpu.measured()) == 14


def test_what_hangs_in_its_compiler_holds_nothing_else_up(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def run(function: object, tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        hanging = next(index for index, (_, _, config) in enumerate(tasks) if config.tile == fake_kernel.HANGS)
        for index in (one for one in range(len(tasks)) if one != hanging):
            yield Outcome(index, None, None, 0.0)
        begin = time.monotonic()
        while len(gpu.measured()) < 6:
            assert time.monotonic() - begin < 10, "the others waited for it"
            time.sleep(0.01)
        yield Outcome(hanging, None, "took longer than 300 s", 300.0)

    monkeypatch.setattr(compiling.workers, "run", run)
    (job,) = search(gpu)
    assert fake_kernel.HANGS not in [config.tile for config in gpu.measured()]
    assert job.record(Config(fake_kernel.HANGS, False)) == Record(DROPPED, why="took longer than 300 s")
    assert _winner([job]).config == FASTEST


def test_what_was_not_compiled_is_left_for_the_next_command(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a compiler did not start: the candidate has nothing to do with it."""

    def run(function: object, tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        for index, (_, _, config) in enumerate(tasks):
            yield Outcome(index, None, None, 0.0) if config != FASTEST else Outcome(index, None, "no", 0.0, started=False)

    monkeypatch.setattr(compiling.workers, "run", run)
    (job,) = search(FakeGpu())
    assert job.left() == [FASTEST] and _winner([job]).config == FAST
    monkeypatch.setattr(compiling.workers, "run", compile_at_once)
    gpu = FakeGpu()
    assert _winner(search(gpu)).config == FASTEST and gpu.measured() == [FASTEST]


# --- and again -------------------------------------------------------------------------------------------------------


def test_what_is_done_is_not_done_again(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _winner(search(FakeGpu()))
    again = FakeGpu()

    def nothing(function: object, tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        assert not tasks
        yield from ()

    monkeypatch.setattr(compiling.workers, "run", nothing)
    assert _winner(search(again)) == first and again.asked == []


@pytest.mark.parametrize("steps", range(1, 16))
def test_a_budget_that_ends_loses_nothing(search: Search, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A clock that counts what runs: the budget ends after so many measurements of the 14."""
    first, second = FakeGpu(), FakeGpu()
    monkeypatch.setattr(engine.time, "monotonic", lambda: float(len(first.measured())))
    search(first, SHAPE, OTHER, deadline=float(steps))
    monkeypatch.undo()
    monkeypatch.setattr(compiling.workers, "run", compile_at_once)
    assert len(first.measured()) == min(steps, 14)
    jobs = search(second, SHAPE, OTHER)
    both = [(name, config) for gpu in (first, second) for what, name, config in gpu.asked if what == "measure"]
    assert len(both) == len(set(both)) == 14  # each once
    assert all(_winner([job]).config == FASTEST for job in jobs)


_PHASES = [*(("measure", Config(tile, False)) for tile in TILES), ("compare", FAST), ("compare", FASTEST)]


@pytest.mark.parametrize(("what", "config"), _PHASES)
@pytest.mark.parametrize("event", [KeyboardInterrupt(), OSError("no device")], ids=["interrupt", "device"])
def test_an_interrupt_at_any_point_loses_nothing(search: Search, what: str, config: Config, event: BaseException) -> None:
    first, second = FakeGpu(happens=_at(what, config, event)), FakeGpu()
    with pytest.raises(type(event)):
        search(first)
    winner = _winner(search(second))
    assert winner.config == FASTEST
    tried = [one for gpu in (first, second) for one in gpu.measured()]
    again = [config] if what == "measure" else []  # that was cut off
    assert sorted(one.tile for one in tried) == sorted([*TILES, *(one.tile for one in again)])


def test_a_candidate_is_tried_again_after_any_number_of_interrupts(search: Search) -> None:
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            search(FakeGpu(happens=_at("measure", FASTEST, KeyboardInterrupt())))
    assert _winner(search(FakeGpu())).config == FASTEST


def test_an_interrupt_while_candidates_compile_loses_nothing(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(compiler: Compiler, seconds: float) -> bool:
        raise KeyboardInterrupt

    def never(function: object, tasks: object, *, stopped: Any, **_: Any) -> Iterator[Outcome]:
        stopped.wait(30)
        yield from ()

    with monkeypatch.context() as patched:
        patched.setattr(compiling.workers, "run", never)
        patched.setattr(Compiler, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(FakeGpu())
    gpu = FakeGpu()
    assert _winner(search(gpu)).config == FASTEST and len(gpu.measured()) == 7


def test_the_tables_own_tiles_are_tried_before_a_verdict(
    search: Search, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch: Callable[..., Any]
) -> None:
    """A verdict on the default alone would drop an entry that was found in a longer search."""
    switch(GDN_CACHE_DIR=str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "tables")
    tables.write_winners(tmp_path / "tables", H100, KERNEL, [tuning.Winner(SHAPE, FASTEST, 49.0, 0.004, None)], {})
    gpu = FakeGpu()
    monkeypatch.setattr(engine.time, "monotonic", lambda: float(len(gpu.measured())))
    (job,) = search(gpu, deadline=1.0)
    assert gpu.measured() == [DEFAULT] and job.winner() is None
    monkeypatch.undo()
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "tables")
    monkeypatch.setattr(compiling.workers, "run", compile_at_once)
    second = FakeGpu()
    assert _winner(search(second)).config == FASTEST and second.measured()[0] == FASTEST


def test_a_verdict_on_fewer_is_given_anew(search: Search) -> None:
    sampled = _winner(search(FakeGpu(), limit=3))
    assert sampled.config == DEFAULT  # none of the others in the sample is faster
    gpu = FakeGpu()
    assert _winner(search(gpu)).config == FASTEST and len(gpu.measured()) == 4
    (job,) = search(FakeGpu())
    assert sum(record is not None and record.state == TIMED for record in map(job.record, job.configs)) == 7
