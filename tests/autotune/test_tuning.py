"""The plan of a search, with a kernel that compiles nothing."""

from pathlib import Path

import pytest

from autotune import shapes, tables, tuning
from gdn.device import H100
from gdn.runtime import tuned
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, OTHER, SHAPE
from tests.autotune.fake_kernel import Config


@pytest.fixture
def plan() -> tuning.Plan:
    return tuning.plan(KERNEL, [SHAPE, OTHER], H100)


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


@pytest.mark.parametrize("count", [1, 2, 3, 8, 29])
def test_the_beginning_of_a_space_is_a_sample_of_it(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [Config(tile, True) for tile in range(1, count + 1)]
    monkeypatch.setattr(fake_kernel, "configs", lambda problem, device: every)
    first, *others = tuning.plan(KERNEL, [SHAPE], H100).configs[SHAPE.name]
    assert first == Config(fake_kernel.DEFAULT, False) and sorted(others, key=lambda one: one.tile) == every
    if count == 8:
        assert [one.tile for one in others] == [1, 5, 3, 7, 2, 6, 4, 8]
