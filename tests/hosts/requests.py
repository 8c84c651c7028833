"""The requests that both sides are given, and what a side answered, as files."""

import gzip
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COUNT, SHORTEST, LONGEST, NEW = 64, 10, 3000, 32
_EDGES = (63, 64, 65, 128, 129, 512, 1024)  # lengths about chunks of 64 tokens


def prompts(vocabulary: int, seed: int = 0, count: int = COUNT, longest: int = LONGEST) -> list[list[int]]:
    """Token ids of prompts, whose lengths are evenly spread on a logarithmic scale.

    Every second one repeats a passage, so that drafts by n-grams are proposed from it.
    """
    drawn = random.Random(seed)
    edges = [length for length in _EDGES if SHORTEST <= length <= longest][: max(0, count - 2)]
    rest = count - len(edges)
    lengths = [round(SHORTEST * (longest / SHORTEST) ** (place / max(1, rest - 1))) for place in range(rest)] + edges
    drawn.shuffle(lengths)
    found = []
    for place, length in enumerate(lengths):
        if place % 2:
            passage = [drawn.randrange(vocabulary) for _ in range(drawn.randint(3, 40))]
            found.append((passage * (length // len(passage) + 1))[:length])
        else:
            found.append([drawn.randrange(vocabulary) for _ in range(length)])
    return found


@dataclass
class Answers:
    """What a host answered to all requests of a variant.

    Attributes
    ----------
    prompt_logprobs : list of list of float
        Of every prompt token but the first.
    tokens, logprobs : list of list
        The new tokens, and the log-probability of each.
    cached : list of int
        Prompt tokens that came from the prefix cache.
    again : dict, optional
        tokens, logprobs and cached of a second round of the same requests.
    facts : dict
        Whatever is worth printing: seconds, counts.
    """

    prompt_logprobs: list[list[float]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    again: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Side:
    """One side, off or on, of one model: its answers by variant."""

    model: str
    plug: str
    digest: str  # of the checkpoint
    prompts: list[list[int]]
    variants: dict[str, Answers] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # variant -> error

    def save(self, path: Path) -> None:
        with gzip.open(path, "wt") as file:
            json.dump(asdict(self), file)

    @staticmethod
    def load(path: Path) -> "Side":
        with gzip.open(path, "rt") as file:
            content = json.load(file)
        content["variants"] = {name: Answers(**answers) for name, answers in content["variants"].items()}
        return Side(**content)
