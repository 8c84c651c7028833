"""Whether a candidate is faster than the default, by times that were taken in turns.

Each round of the comparison times the default and the candidate one after the other, so that a drifting clock touches both
alike; the ratio of the two is one draw. The interval around the median of the draws is that of the sign test, which asks
nothing of their distribution. It is wide enough that among all candidates of a shape hardly one seems faster by chance.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 31
LEAST_GAIN = 0.01  # share of the default's time
MISTAKEN = 0.05  # bound of the probability that any candidate of a shape that is no faster seems faster


@dataclass(frozen=True)
class Comparison:
    """A candidate against the default: the candidate's time over the default's."""

    ratio: float  # median
    low: float  # the interval
    high: float

    @property
    def gain(self) -> float:
        """Share of the default's time that the candidate saves."""
        return 1 - self.ratio

    @property
    def is_kept(self) -> bool:
        return self.high < 1 and self.gain >= LEAST_GAIN


def compare(times: Sequence[float], default: Sequence[float], num_candidates: int) -> Comparison:
    """Judges times of the same rounds. num_candidates: of the shape; each of them could win by chance (Bonferroni)."""
    ratios = sorted(time / other for time, other in zip(times, default, strict=True))
    outside = _outside(len(ratios), MISTAKEN / max(1, num_candidates))
    low, high = (ratios[outside - 1], ratios[-outside]) if outside else (0.0, math.inf)
    return Comparison(statistics.median(ratios), low, high)


def _outside(count: int, mistaken: float) -> int:
    """How many draws from each end bound the interval of the median; 0 where they are too few for any."""
    outside, tail = 0, 0.0
    while outside < count // 2:
        tail += 2 * math.comb(count, outside) / 2**count
        if tail > mistaken:
            break
        outside += 1
    return outside
