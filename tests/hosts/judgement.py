"""Pure judgements of a host's log-probabilities and tokens, with the adapter off and on, against exact ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORST = 1.1  # error with the adapter on, over the host's own
NONSENSE = 0.1  # of the host's own: the judge has another model than the host, or the host is broken; small models have 0.02


@dataclass(frozen=True)
class Errors:
    """Of log-probabilities: root mean square, largest, and how many there were."""

    rms: float
    largest: float
    count: int


def errors(found: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> Errors:
    """Differences of all requests together; ValueError where the numbers of tokens differ or a value is not finite."""
    differences: list[float] = []
    for place, (one, other) in enumerate(zip(found, exact, strict=True)):
        if len(one) != len(other):
            raise ValueError(f"request {place}: expected {len(other)} log-probabilities, got {len(one)}")
        differences += [a - b for a, b in zip(one, other, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("log-probabilities: expected finite numbers, got others")
    squares = math.fsum(one * one for one in differences)
    count = len(differences)
    return Errors(math.sqrt(squares / count), max(map(abs, differences)), count)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs; None where both are equal."""
    if len(one) != len(other):
        raise ValueError(f"tokens: expected {len(one)} on both sides, got {len(other)}")
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


@dataclass(frozen=True)
class Difference:
    """Where two texts part: request, place, and how far the exact logit of the worse of the two tokens is below the best."""

    request: int
    place: int
    gap: float


def differences(
    one: Sequence[Sequence[int]], other: Sequence[Sequence[int]], logits: Sequence[Mapping[tuple[int, ...], Tensor]]
) -> list[Difference]:
    """First differences of all requests.

    logits: per request, text -> exact logits [new tokens, vocabulary], with every text of `one`. Where both tokens are within a
    gap of the best logit, so are the two best logits.
    """
    found = []
    for request, (a, b) in enumerate(zip(one, other, strict=True)):
        place = first_difference(a, b)
        if place is not None:
            row = logits[request][tuple(a)][place]
            found.append(Difference(request, place, float(row.max() - torch.minimum(row[a[place]], row[b[place]]))))
    return found


@dataclass(frozen=True)
class Verdict:
    """Of one variant of one model.

    Attributes
    ----------
    prompt_off, prompt_on : Errors
        Of the log-probabilities of prompt tokens.
    output_off, output_on : Errors
        Of new tokens, each side over its own text.
    parted : list of Difference
        Where the texts of off and on part; with the prefix cache also where those of both rounds with the adapter on do.
    allowed : float
        Twice the host's largest error.
    missing : list of str
        What the variant is about and did not happen.
    """

    prompt_off: Errors
    prompt_on: Errors
    output_off: Errors
    output_on: Errors
    parted: list[Difference]
    allowed: float
    missing: list[str]

    @property
    def ratio(self) -> float:
        return self.prompt_on.rms / self.prompt_off.rms

    @property
    def complaints(self) -> list[str]:
        """What does not hold; none is a pass."""
        found = list(self.missing)
        if not self.prompt_off.rms <= NONSENSE:
            found.append(f"the host's own error is {self.prompt_off.rms:.3f}, more than {NONSENSE}: nothing is judged")
        if not self.ratio <= WORST:
            found.append(f"prompt errors {self.ratio:.3f} times the host's")
        far = [one for one in self.parted if not one.gap <= self.allowed]
        if far:
            worst = max(far, key=lambda one: one.gap)
            found.append(
                f"{len(far)} texts part where it is no tie: request {worst.request}, token {worst.place}, {worst.gap:.4f} apart"
            )
        return found
