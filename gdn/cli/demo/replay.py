"""Decode by replay and without, side by side: bytes of a sequence, and times of steps."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gdn.cli.demo.drafts import random_drafts, with_wrong
from gdn.cli.demo.engine import Engine, EngineSizes
from gdn.core.check import dtype_name
from gdn.layers import GDNStateCache, HybridModel

_PROMPT = 40  # tokens of a prompt
_BLOCK_SIZE = 64
_WARM = 3  # steps before those that are timed
_ACCEPTED = (1, 2, 3, 4, 4)  # tokens of 4, of one sequence after the other: a mean of 2.8


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of a sequence's states and windows in all layers: with replay, and without."""

    drafts: int
    state_dtype: str
    with_replay: int
    without: int

    @property
    def share(self) -> float:
        return self.with_replay / self.without


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a decode step of a batch: with replay, and without."""

    batch: int
    tokens: int  # of a sequence in a step
    with_replay: float
    without: float
    accepted: float  # mean tokens of a sequence that a step with replay accepts

    @property
    def ratio(self) -> float:
        return self.without / self.with_replay


def sequence_bytes(config: Any, drafts: int, dtype: torch.dtype) -> list[SequenceBytes]:
    """Of a sequence without drafts and with, in both dtypes of states. No memory is taken.

    config: a `gdn.layers.HybridConfig`, of the rank.
    """
    found = []
    for num_spec in (0, drafts):
        for state in (torch.float32, torch.bfloat16) if config.num_linear_layers else ():
            options: dict[str, Any] = {"num_spec": num_spec, "dtype": dtype, "state_dtype": state, "device": "meta"}
            ours, theirs = (GDNStateCache(config, 1, replay=replay, **options).bytes_per_sequence for replay in (True, False))
            found.append(SequenceBytes(num_spec, dtype_name(state), ours, theirs))
    return found


def step_times(model: HybridModel, batch: int, drafts: int, steps: int, *, use_graphs: bool, seed: int) -> list[StepTimes]:
    """Steps of one token and of drafts, of `batch` sequences of one length, with replay and without.

    Drafts are what the model generates without them, up to a wrong one, so that a known number is accepted, unless the two ways
    round differently.
    """
    draw, count = random.Random(seed), _WARM + steps
    prompts = [random_drafts(draw, model.config.vocab_size, _PROMPT) for _ in range(batch)]
    longest = _PROMPT + count * (1 + drafts) + 1 + drafts
    times: dict[tuple[int, bool], float] = {}
    known: list[list[int]] = []
    for replay in (False, True):
        with _running(model, EngineSizes(batch, longest, _BLOCK_SIZE), replay, use_graphs) as engine:
            engine.prefill(prompts)
            engine.decode(_WARM)
            times[1, replay] = engine.decode(steps).seconds / steps * 1e3
            if not known:
                engine.decode((count - 1) * (1 + drafts) - steps)
                known = [stream.tokens for stream in engine.streams]
    accepted = {1: 1.0}
    for replay in (False, True):
        with _running(model, EngineSizes(batch, longest, _BLOCK_SIZE, num_spec=drafts), replay, use_graphs) as engine:
            engine.prefill(prompts)
            made = [engine.verify(_drafts(engine, known, turn)) for turn in range(count)][_WARM:]
            times[1 + drafts, replay] = sum(one.seconds for one in made) / steps * 1e3
            accepted[1 + drafts] = sum(one.num_tokens for one in made) / steps / batch
    return [StepTimes(batch, n, times[n, True], times[n, False], accepted[n]) for n in (1, 1 + drafts)]


@contextmanager
def _running(model: HybridModel, sizes: EngineSizes, replay: bool, use_graphs: bool) -> Iterator[Engine]:
    """An engine whose sequences and graphs are gone after the block."""
    engine = Engine(model, sizes, use_graphs=use_graphs, replay=replay)
    try:
        yield engine
    finally:
        engine.finish()
        engine.drop_graphs()


def _drafts(engine: Engine, known: Sequence[Sequence[int]], turn: int) -> list[list[int]]:
    """What each stream generates next, with a wrong token where no more are to be accepted."""
    found, most, vocab_size = [], engine.sizes.num_spec, engine.model.config.vocab_size
    for n, (stream, tokens) in enumerate(zip(engine.streams, known, strict=True)):
        own = list(tokens[len(stream.tokens) : len(stream.tokens) + most])
        own += [0] * (most - len(own))
        wrong = max(1, _ACCEPTED[(n + turn) % len(_ACCEPTED)] * (1 + most) // 4) - 1
        found.append(with_wrong(own, wrong, vocab_size))
    return found
