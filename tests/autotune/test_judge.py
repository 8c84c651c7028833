"""The verdict on a candidate, by drawn times: what is faster is found, what is not seldom seems so."""

import math
import random
import statistics

import pytest

from autotune import judge

DRAWS = 1000
NOISE = 0.01  # of each time; a GPU's is a third of it
CANDIDATES = 40


def _kept(gain: float, seed: int, candidates: int = 1, noise: float = NOISE) -> bool:
    """Whether any of some candidates of this true gain is kept, in a drifting clock."""
    drawn = random.Random(seed)
    kept = False
    for _ in range(candidates):
        clock = [1 + 0.05 * math.sin(n / 5) for n in range(judge.ROUNDS)]
        default = [100 * drift * drawn.gauss(1, noise) for drift in clock]
        times = [100 * (1 - gain) * drift * drawn.gauss(1, noise) for drift in clock]
        kept = kept or judge.compare(times, default, CANDIDATES).is_kept
    return kept


def test_a_gain_of_3_percent_is_kept() -> None:
    assert sum(_kept(0.03, seed) for seed in range(DRAWS)) > 0.95 * DRAWS


@pytest.mark.parametrize("noise", [0.003, NOISE, 0.03, 0.1])
def test_no_gain_is_kept_in_fewer_than_1_of_20_shapes(noise: float) -> None:
    """Each of 1000 shapes has 4 finalists, none of which is faster."""
    assert sum(_kept(0.0, seed, candidates=4, noise=noise) for seed in range(DRAWS)) < 0.05 * DRAWS


def test_without_the_interval_noise_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge.Comparison, "is_kept", property(lambda found: found.gain >= judge.LEAST_GAIN))
    assert sum(_kept(0.0, seed, candidates=4, noise=0.03) for seed in range(DRAWS)) > 0.3 * DRAWS


def test_half_a_percent_is_not_kept() -> None:
    assert sum(_kept(0.005, seed) for seed in range(DRAWS)) < 0.05 * DRAWS


@pytest.mark.parametrize(("gain", "kept"), [(0.0099, False), (0.0101, True), (-0.03, False)])
def test_without_noise_the_least_gain_decides(gain: float, kept: bool) -> None:
    found = judge.compare([100 * (1 - gain)] * judge.ROUNDS, [100.0] * judge.ROUNDS, CANDIDATES)
    assert found.is_kept == kept and found.gain == pytest.approx(gain)


def test_a_large_gain_in_a_third_of_the_rounds_is_not_kept() -> None:
    """The mean would be 10 % faster; most rounds were not."""
    times = [70.0 if n % 3 == 0 else 100.5 for n in range(judge.ROUNDS)]
    assert statistics.mean(times) < 91
    assert not judge.compare(times, [100.0] * judge.ROUNDS, 1).is_kept


@pytest.mark.parametrize("count", [10, 31, 100])
@pytest.mark.parametrize("candidates", [1, 10, 1000])
def test_the_interval_is_the_sign_tests(count: int, candidates: int) -> None:
    """Of equal signs at least so few of one sign that chance makes them with at most 5 % over all candidates."""
    outside = judge._outside(count, judge.MISTAKEN / candidates)

    def tail(most: int) -> float:
        return 2 * sum(math.comb(count, n) for n in range(most + 1)) / 2**count

    assert not outside or tail(outside - 1) <= judge.MISTAKEN / candidates
    assert tail(outside) > judge.MISTAKEN / candidates
    drawn = [random.Random(1).gauss(1, 0.1) for _ in range(count)]
    found = judge.compare(drawn, [1.0] * count, candidates)
    expected = (sorted(drawn)[outside - 1], sorted(drawn)[-outside]) if outside else (0.0, math.inf)
    assert (found.low, found.high) == expected


def test_too_few_rounds_decide_nothing() -> None:
    assert not judge.compare([50.0] * 4, [100.0] * 4, 1).is_kept
