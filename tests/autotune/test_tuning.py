"""Search, journal and tables, with a kernel that compiles nothing and a GPU that is not there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune import shapes, tables, tuning
from autotune.cases import WrongResult
from autotune.journal import DROPPED, TIMED, Journal, Record
from gdn.device import H100
from gdn.runtime import tuned
from tests.autotune import fake_kernel
from tests.autotune.fake_kernel import Config

KERNEL = tuning.Kernel("chunk", "tilelang", "tests.autotune.fake_kernel")
SHAPE, OTHER = shapes.shapes("chunk", "16/32 4096")[0], shapes.shapes("chunk", "4/8 8192")[0]


class FakeRunner:
    """Times by table; counts what it is asked."""

    def __init__(self, lost_at: int | None = None, loss: BaseException | None = None) -> None:
        self.checked: list[int] = []
        self.lost_at, self.loss = lost_at, loss or tuning.DeviceLost("illegal address")

    def check(self, shape: shapes.Shape, config: Any) -> float:
        self.checked.append(config.tile)
        if config.tile == self.lost_at:
            raise self.loss
        if config.tile == fake_kernel.WRONG:
            raise WrongResult("output error 3e-1")
        return 0.004

    def time_us(self, shape: shapes.Shape, config: Any) -> float:
        return {fake_kernel.FAST: 50.0, fake_kernel.FASTEST: 51.0}.get(config.tile, 90.0)

    default_next_to = 88.0  # us of the default, timed next to the finalists

    def interleaved_us(self, shape: shapes.Shape, configs: Sequence[Any]) -> list[float]:
        # Only side by side does the truly fastest win.
        times = {fake_kernel.FAST: 50.5, fake_kernel.FASTEST: 49.0, fake_kernel.DEFAULT: self.default_next_to}
        return [times[config.tile] for config in configs]


@pytest.fixture
def cache(tmp_path: Path, switch: Callable[..., Any]) -> Path:
    switch(GDN_CACHE_DIR=str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan() -> tuning.Plan:
    return tuning.plan(KERNEL, [SHAPE, OTHER], H100)


def _journal(tmp_path: Path, source: str = "s") -> Journal:
    return Journal(tmp_path / "journal.jsonl", source)


def _find(journal: Journal, tile: int) -> Record | None:
    return journal.find(SHAPE.problem.static_key(), SHAPE.problem.sizes(), {"tile": tile, "split": False})


def test_plan_puts_the_default_first_and_each_compilation_once(plan: tuning.Plan) -> None:
    twice = tuning.plan(KERNEL, [SHAPE, shapes.shapes("chunk", "16/32 1024")[0], OTHER], H100)
    assert plan.configs[SHAPE.name][0] == Config(fake_kernel.DEFAULT, False)
    assert len(plan.configs[SHAPE.name]) == 7  # the default is one of configs(), and not listed twice
    assert len(twice.candidates) == len(plan.candidates) == 14


def test_plan_samples_a_large_space_and_starts_with_every_default() -> None:
    made = tuning.plan(KERNEL, [SHAPE, OTHER], H100, limit=3)
    tiles = [config.tile for config in made.configs[SHAPE.name]]
    assert tiles == [fake_kernel.DEFAULT, fake_kernel.CRASHES, fake_kernel.WRONG]
    assert [config.tile for _, config in made.candidates] == [tile for tile in tiles for _ in range(2)]
    assert len(tuning.plan(KERNEL, [SHAPE], H100, limit=1).candidates) == 1


def test_plan_keeps_what_ships_in_the_sample(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = Config(fake_kernel.FASTEST, False)  # of the space, but for the default
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    tables.write_winners(tmp_path, H100, KERNEL, [tuning.Winner(SHAPE, last, 49.0, error=0.004, default_us=None)], {})
    sampled = tuning.plan(KERNEL, [SHAPE, OTHER], H100, limit=3)
    assert last not in sampled.configs[OTHER.name]
    assert sampled.configs[SHAPE.name][1] == last and len(sampled.configs[SHAPE.name]) == 3
    assert len(tuning.plan(KERNEL, [SHAPE], H100).configs[SHAPE.name]) == 7
    assert len(tuning.plan(KERNEL, [SHAPE], H100, limit=1).configs[SHAPE.name]) == 1
    stored = tuning.plan(KERNEL, [SHAPE, OTHER], H100, stored_only=True)
    assert stored.configs == {
        SHAPE.name: [Config(fake_kernel.DEFAULT, False), last],
        OTHER.name: [Config(fake_kernel.DEFAULT, False)],
    }


def test_plan_says_who_is_refused() -> None:
    refused = shapes.shapes("chunk", "16/64")[0]
    made = tuning.plan(KERNEL, [refused], H100)
    assert made.refusals == {refused.name: "requires fewer than 64 value heads, got 64"}
    assert not made.candidates


@pytest.mark.cover  # one of them hangs for as long as it may
def test_bad_compilations_lose_only_themselves(cache: Path) -> None:
    made = tuning.plan(KERNEL, [SHAPE], H100)
    tuning.compile_all(made, num_workers=2, timeout_s=10)
    failures = {config.tile: candidate.failure for (_, config), candidate in made.candidates.items()}
    assert failures[fake_kernel.CRASHES] == "worker process died (SIGSEGV)"
    assert failures[fake_kernel.HANGS] == "took longer than 10 s"
    assert "tile does not divide" in str(failures[fake_kernel.RAISES])
    good = (fake_kernel.WRONG, fake_kernel.FAST, fake_kernel.FASTEST, fake_kernel.DEFAULT)
    assert all(failures[tile] is None for tile in good)
    assert len(list(cache.glob("chunk.tilelang/*/manifest.json"))) == len(good)


@dataclass(frozen=True)
class LaunchConfig(Config):
    steps: int = field(default=0, metadata={"compiled": bool})  # a scalar of the launch


def test_scalars_of_the_launch_are_not_compiled_for(cache: Path) -> None:
    configs = [LaunchConfig(tile, False, steps) for tile in (fake_kernel.RAISES, fake_kernel.FAST) for steps in (0, 3, 4, 5)]
    static = SHAPE.problem.static_key()
    made = tuning.Plan(KERNEL, candidates={(static, config): tuning.Candidate(SHAPE.problem, config) for config in configs})
    done: list[Any] = []
    tuning.compile_all(made, num_workers=2, timeout_s=10, on_done=lambda candidate: done.append(candidate.config))
    assert len(done) == len(configs) and set(done) == set(configs)
    assert [made.candidates[static, config].failure is None for config in configs] == [False] * 4 + [True] * 4
    assert len(list(cache.glob("chunk.tilelang/*/manifest.json"))) == 2


def test_search_times_the_finalists_again_and_drops_wrong_results(plan: tuning.Plan, tmp_path: Path) -> None:
    plan.candidates[SHAPE.problem.static_key(), Config(fake_kernel.CRASHES, False)].failure = "worker process died (SIGSEGV)"
    journal, runner = _journal(tmp_path), FakeRunner()
    winner = tuning.search(plan, SHAPE, runner, journal)
    assert winner is not None
    assert (winner.config, winner.time_us, winner.default_us) == (Config(fake_kernel.FASTEST, False), 49.0, 88.0)
    assert fake_kernel.CRASHES not in runner.checked
    assert _find(journal, fake_kernel.CRASHES) == Record(DROPPED, why="worker process died (SIGSEGV)")
    assert _find(journal, fake_kernel.WRONG) == Record(DROPPED, why="WrongResult: output error 3e-1")
    assert _find(journal, fake_kernel.FAST) == Record(TIMED, time_us=50.0, error=0.004)


@pytest.mark.parametrize(("next_to", "tile"), [(49.1, fake_kernel.DEFAULT), (50.0, fake_kernel.FASTEST)])
def test_the_default_is_timed_beside_the_finalists_and_gives_way_to_more_than_noise(
    plan: tuning.Plan, tmp_path: Path, next_to: float, tile: int
) -> None:
    plan.candidates[SHAPE.problem.static_key(), Config(fake_kernel.CRASHES, False)].failure = "worker process died (SIGSEGV)"
    runner = FakeRunner()
    runner.default_next_to = next_to
    winner = tuning.search(plan, SHAPE, runner, _journal(tmp_path))
    assert winner is not None and (winner.config.tile, winner.default_us) == (tile, next_to)


def test_an_interrupted_search_resumes(plan: tuning.Plan, tmp_path: Path) -> None:
    first = FakeRunner(lost_at=fake_kernel.FAST)
    with pytest.raises(tuning.DeviceLost):
        tuning.search(plan, SHAPE, first, _journal(tmp_path))
    assert first.checked[-1] == fake_kernel.FAST
    second = FakeRunner()
    resumed = _journal(tmp_path)
    winner = tuning.search(plan, SHAPE, second, resumed)
    assert second.checked == [fake_kernel.FASTEST]  # neither what was done nor what broke the device runs again
    assert winner is not None and winner.config.tile == fake_kernel.FASTEST
    assert _find(resumed, fake_kernel.FAST) == Record(DROPPED, why="illegal address")


def test_a_candidate_that_an_interrupt_cut_off_is_tried_again(plan: tuning.Plan, tmp_path: Path) -> None:
    first = FakeRunner(lost_at=fake_kernel.FAST, loss=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuning.search(plan, SHAPE, first, _journal(tmp_path))
    assert _find(_journal(tmp_path), fake_kernel.FAST) is None
    second = FakeRunner()
    winner = tuning.search(plan, SHAPE, second, _journal(tmp_path))
    assert second.checked == [fake_kernel.FAST, fake_kernel.FASTEST]  # it, and what was left
    assert winner is not None and winner.config.tile == fake_kernel.FASTEST


def test_a_spent_budget_stops_the_search(plan: tuning.Plan, tmp_path: Path) -> None:
    runner = FakeRunner()
    assert tuning.search(plan, SHAPE, runner, _journal(tmp_path), deadline=0.0) is None
    assert runner.checked == []
