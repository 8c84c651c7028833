"""Logits are those of one pass, however a prompt is cut into chunks, decode steps and verified drafts."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gdn.layers.config import HybridConfig
from gdn.layers.model import HybridModel
from tests.layers import hf
from tests.layers.hf import TOLERANCE, error, model_of
from tests.layers.serving import Server

LENGTH = 200
NUM_SPEC = 3
AT_ONCE = 10  # sequences of a batch, each with a split of its own


@dataclass
class Plan:
    """Steps of one sequence: new tokens, whether they are speculative, and how many of them stay."""

    steps: list[tuple[list[int], bool, int]]


def plan(tokens: list[int], split: int, seed: int, num_spec: int) -> Plan:
    """`split` tokens first, then chunks, then single tokens (without speculation) or tokens with drafts, some of them wrong."""
    draw = random.Random(seed)
    steps, done = [(tokens[:split], False, split)], split
    while done < len(tokens) and draw.random() < 0.6:
        count = min(draw.choice((1, 2, 3, 17, 63, 64, 65)), len(tokens) - done)
        steps.append((tokens[done : done + count], False, count))
        done += count
    while done < len(tokens):
        drafts = min(draw.randint(0, num_spec), len(tokens) - done - 1)
        right = draw.randint(0, drafts)
        wrong = [(token + 1) % 131 for token in tokens[done + 1 + right : done + 1 + drafts]]
        steps.append((tokens[done : done + 1 + right] + wrong, num_spec > 0, 1 + right))
        done += 1 + right
    return Plan(steps)


def run(model: HybridModel, config: HybridConfig, splits: list[int], num_spec: int, seed: int, is_packaged: bool = False) -> None:
    """Runs one batch, a sequence for every split, and compares each with its one pass."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(config.vocab_size, (LENGTH,), generator=generator).tolist() for _ in splits]
    whole = Server(model, config, len(splits), LENGTH, seed=seed).step(prompts)
    plans = [plan(prompt, split, seed + i, num_spec) for i, (prompt, split) in enumerate(zip(prompts, splits, strict=True))]
    server = Server(model, config, len(splits), LENGTH + NUM_SPEC, num_spec=num_spec, seed=seed + 1, is_packaged=is_packaged)
    found: list[list[Any]] = [[] for _ in splits]
    for number in range(max(len(one.steps) for one in plans)):
        now = [one.steps[number] if number < len(one.steps) else ([], False, 0) for one in plans]
        rows, drafted, keep = (list(part) for part in zip(*now, strict=True))
        logits = server.step(rows, drafted=drafted, keep=keep, padding=0 if is_packaged else number % 3)
        for parts, new, kept in zip(found, logits, keep, strict=True):
            parts.append(new[:kept])
    errors = [error(torch.cat(parts), wanted) for parts, wanted in zip(found, whole, strict=True)]
    assert max(errors) <= TOLERANCE, dict(zip(splits, errors, strict=True))


@pytest.fixture(scope="module")
def hybrid() -> tuple[HybridModel, HybridConfig]:
    return model_of(hf.build("qwen3_5", 5))


EVERY = [list(range(first, min(first + AT_ONCE, LENGTH + 1))) for first in range(1, LENGTH + 1, AT_ONCE)]


@pytest.mark.parametrize(
    ("splits", "is_packaged"),
    [
        ([1, 3, 64, 65, 150, 199], False),
        ([1, 63, 180], True),
        *(pytest.param(splits, False, marks=pytest.mark.cover) for splits in EVERY),
    ],
)
@pytest.mark.parametrize("num_spec", [0, NUM_SPEC])
def test_every_split_equals_one_pass(
    hybrid: tuple[HybridModel, HybridConfig], num_spec: int, splits: list[int], is_packaged: bool
) -> None:
    run(*hybrid, splits, num_spec, seed=splits[1], is_packaged=is_packaged)


SOME = [pytest.param(list(range(first, first + 40, 7)), marks=pytest.mark.cover) for first in range(1, LENGTH, 40)]


@pytest.mark.parametrize("splits", [[1, 61, 197], *SOME])
def test_splits_with_experts_and_an_indexer(splits: list[int]) -> None:
    run(*model_of(hf.build("qwen4_exp", 5)), splits, NUM_SPEC, seed=splits[1], is_packaged=True)
