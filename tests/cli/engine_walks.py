"""Random walks over the calls of an engine whose caches are nearly full, with exceptions at chosen places.

A walk is replayed by its seed: python -m tests.cli.engine_walks SEED ...
"""

import copy
import functools
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from gdn.cli.demo.calls import intercepting
from gdn.cli.demo.engine import Engine, EngineSizes, Stream, StreamLostError
from gdn.layers import CacheFullError, HybridModel
from gdn.layers.random_weights import fill_randomly
from tests.layers.serving import Server
from tests.layers.small import small_config

TOLERANCE = 2e-5  # of the largest logit, float32
VOCAB, BLOCK, LONGEST, MOST_STREAMS = 61, 24, 200, 4
FOLDS = ("before gdn.fold_states", "after gdn.fold_states")  # places that every third walk comes to once
FORMS: tuple[dict[str, Any], ...] = ({}, {"index_ratio": 2}, {"index_topk": 0})


class Injected(BaseException):
    """The failure that a walk injects: none that the engine, or the caches, take for one of their own."""


class Places:
    """Counts the places where a call of the engine can fail, and fails at one of them.

    Places are the beginnings of everything that takes blocks or slots, and the beginnings and ends of all operators, of the
    model's parts, of copies in the caches, and of the making of tensors and metadata.

    Attributes
    ----------
    passed : Counter of str
        Places that calls came to, by name.
    hit : Counter of str
        Places that failed, by name.
    has_launched : bool
        Whether an operator has begun in this call.
    """

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()
        self.arm(None)

    def arm(self, target: int | str | None) -> None:
        """Fails at this place of the next call, by number or by name; None = nowhere."""
        self.count, self.target, self.has_launched = 0, target, False

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Nothing fails, and nothing counts, in the body."""
        saved = self.count, self.target, self.has_launched
        self.arm(None)
        yield
        self.count, self.target, self.has_launched = saved

    def come_to(self, name: str) -> None:
        self.passed[name] += 1
        self.count += 1
        if self.target in (self.count - 1, name):
            self.target = None
            self.hit[name] += 1
            raise Injected(name)

    def wrap(self, owner: Any, method: str, *, takes: bool = False) -> None:
        """Makes the beginning and the end of a method of an object places. takes: it takes something, and fails before alone."""
        call, name = getattr(owner, method), f"{type(owner).__name__}.{method}"

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.come_to(f"before {name}")
            result = call(*args, **kwargs)
            if not takes:
                self.come_to(f"after {name}")
            return result

        setattr(owner, method, wrapped)

    def operator(self, name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Handler of `intercepting`."""
        self.come_to(f"before gdn.{name}")
        self.has_launched = True
        result = function(**arguments)
        self.come_to(f"after gdn.{name}")
        return result

    def watch(self, engine: Engine) -> None:
        """Wraps what the engine calls, but for what gives back."""
        allocator, caches, model = engine.allocator, engine.caches, engine.model
        for method in ("add_prompts", "extend_all", "fork", "checkpoint", "keep", "truncate"):
            self.wrap(allocator, method, takes=True)
        for pool in (allocator._owned.blocks, allocator._owned.states, allocator._owned.slots):
            self.wrap(pool, "take", takes=True)
        for owner, methods in {
            caches: ("copy_block",), caches.gdn: ("copy_slot",), caches.indexer: ("copy_ring",), engine._fixed: ("get",),
            engine: ("_to_device", "_metadata"), model: ("forward", "compute_logits", "greedy_tokens"),
        }.items():  # fmt: skip
            for method in methods:
                self.wrap(owner, method)


@functools.cache
def models() -> list[HybridModel]:
    """A model of each form, with weights."""
    made = []
    for seed, form in enumerate(FORMS):
        changes = {"intermediate_size": 16, "vocab_size": VOCAB, "max_position_embeddings": LONGEST, **form}
        model = HybridModel(small_config(**changes), dtype=torch.float32)
        fill_randomly(model, seed)
        made.append(model)
    return made


class Walk:
    """One walk, and what is known of the streams without the engine's caches: the logits that a fresh pass gives.

    Parameters
    ----------
    seed : int
        Of all choices; every other walk decodes by replay.
    num_calls : int
        Calls of the engine.
    """

    def __init__(self, seed: int, num_calls: int = 24) -> None:
        self.draw, self.num_calls = random.Random(seed), num_calls
        draw = self.draw
        self.model = copy.copy(draw.choice(models()))  # whose methods are wrapped for this walk alone
        sizes = EngineSizes(
            MOST_STREAMS, LONGEST, BLOCK, num_blocks=draw.choice([9, 14, 19, 24]), num_spec=draw.choice([0, 1, 3]),
            num_checkpoints=draw.choice([0, 1, 3, 3]),
        )  # fmt: skip
        self.engine = Engine(self.model, sizes, use_graphs=draw.random() < 0.4, replay=seed % 2 == 1)
        self.places = Places()
        self.chunk: int | None = None
        self.seen: dict[Stream, list[tuple[int, Tensor]]] = {}  # number of tokens, and the logits after them
        self.finished: list[tuple[list[int], list[tuple[int, Tensor]]]] = []
        self.head = [draw.randrange(VOCAB) for _ in range(LONGEST)]  # every prompt begins with a part of it

    def run(self) -> Places:
        """Runs the walk; returns its places."""
        self.places.watch(self.engine)
        self.engine.on_logits = self.record
        calls = [self.prefill, self.decode, self.verify, self.fork] * 2 + [self.score, self.finish, self.misuse]
        with intercepting(self.places.operator):
            for _ in range(self.num_calls):
                self.attempt(self.draw.choice(calls))
            self.end()
        return self.places

    def record(self, streams: list[Stream], rows: list[int], logits: Tensor) -> None:
        """Handler of `on_logits`: keeps the logits, and sees that calls of the engine are refused meanwhile."""
        self.places.come_to("before on_logits")
        with refused(RuntimeError, "expected no call of the engine"):
            self.engine.finish()
        for stream, part in zip(streams, logits.clone().split(rows), strict=True):
            length, prompt = stream.num_computed, stream.num_prompt_tokens
            if length >= prompt:
                self.seen.setdefault(stream, []).extend((length + 1 + place, row) for place, row in enumerate(part))
            elif self.chunk is None or length + self.chunk >= prompt:
                self.seen.setdefault(stream, []).append((prompt, part[0]))
        self.places.come_to("after on_logits")

    def attempt(self, call: Callable[[], None]) -> None:
        """One call, which may fail at a random place; then everything is as it was, or the streams of the step are lost."""
        draw, before, was_lost = self.draw, self.state(), any(stream.is_lost for stream in self.engine.streams)
        numbers = draw.randrange(4), draw.randrange(60), int(draw.expovariate(1 / 15))
        self.places.arm(draw.choice([None, None, None, self.seldom(), draw.choice(FOLDS), *numbers]))
        try:
            call()
        except CacheFullError:
            assert self.state() == before, "a full cache changed something"
        except StreamLostError:
            assert was_lost and self.state() == before
        except Injected:
            self.after_failure(call, before)
        self.places.arm(None)
        self.check_accounts()
        self.seen = {stream: rows for stream, rows in self.seen.items() if stream in self.engine.streams and not stream.is_lost}
        for stream, rows in self.seen.items():
            rows[:] = [(length, row) for length, row in rows if length <= stream.num_computed]  # not those of rejected drafts
        if any(stream.is_lost for stream in self.engine.streams):
            self.check_lost()

    def seldom(self) -> str | None:
        """Name of a place, the likelier the fewer calls of this walk came to it: by number it would hardly ever fail."""
        places = sorted(self.places.passed.items())
        return self.draw.choices([name for name, _ in places], [1 / count for _, count in places])[0] if places else None

    def after_failure(self, call: Callable[[], None], before: Any) -> None:
        """Checks an injected failure: the step's streams are lost where an operator had begun, and no other ones."""
        streams = self.engine.streams
        lost = [stream for stream in streams if stream.is_lost]
        if call in (self.decode, self.verify):
            assert len(lost) in (0, len(streams)), "some streams of the step are lost, and others are not"
            assert lost or not self.places.has_launched, "a step had begun, and its streams are not lost"
        if not lost or call not in (self.decode, self.verify):
            assert self.state()[0] == before[0], "a failure changed a stream that was not in the step"

    def state(self) -> Any:
        """All that a call which changes nothing leaves as it is."""
        allocator, streams = self.engine.allocator, []
        for one in self.engine.streams:
            cached = (one.cached.slot, one.cached.state_slots, list(one.cached.blocks), one.cached.num_tokens, one.cached.is_live)
            streams.append((id(one), list(one.tokens), one.num_computed, one.accepted, one.is_lost, cached))
        free = allocator.num_free_blocks, allocator.num_free_state_slots, allocator.num_free_sequences
        return streams, free, list(allocator._owned.kept)

    def check_accounts(self) -> None:
        """Everything has the owners that it should have; nothing is lost, shared by mistake, or held by nobody."""
        engine, owned = self.engine, self.engine.allocator._owned
        sequences, kept = [stream.cached for stream in engine.streams], list(owned.kept.values())
        assert owned.live == {*sequences, *kept} and all(one.is_live for one in owned.live)
        blocks = Counter(block for one in owned.live for block in one.blocks)
        assert blocks == owned.blocks._owners and len(blocks) + owned.blocks.num_free == engine.sizes.blocks
        slots = [slot for one in sequences for slot in one.state_slots] + [one.slot for one in kept]
        assert len(set(slots)) == len(slots) and len(slots) + owned.states.num_free == engine.caches.gdn.num_slots
        assert len({one.slot for one in sequences}) == len(sequences) == MOST_STREAMS - owned.slots.num_free
        for stream in engine.streams:
            assert stream.is_lost or stream.cached.num_tokens == stream.num_computed == len(stream.tokens) - 1

    def check_lost(self) -> None:
        """Using a lost stream raises; then it is finished, or stays a while."""
        lost = [stream for stream in self.engine.streams if stream.is_lost]
        before = self.state()
        for use in (lambda: self.engine.decode(1), self.verify, lambda: self.engine.fork(lost[0])):
            with refused(StreamLostError, "lost"):
                use()
        assert self.state() == before
        if self.draw.random() < 0.7:
            for stream in lost:
                self.engine.finish(stream)

    def fresh_pass(self, sequences: list[list[int]]) -> list[Tensor]:
        """Logits [length, vocab] of each sequence, from caches of their own with metadata stated plainly."""
        return Server(self.model, self.model.config, len(sequences), max(map(len, sequences))).step(sequences)

    def check_logits(self) -> None:
        """The logits of all steps are those of a fresh pass over the tokens, of finished streams too."""
        found = self.finished + [(stream.tokens[: stream.num_computed], rows) for stream, rows in self.seen.items()]
        if not found:
            return
        for (_, rows), whole in zip(found, self.fresh_pass([tokens for tokens, _ in found]), strict=True):
            for length, row in rows:
                error = float((row - whole[length - 1]).abs().max() / whole.abs().max())
                assert error <= TOLERANCE, f"logits after {length} tokens: error {error}"

    def end(self) -> None:
        """All streams that are left go on, without failures; then everything is given back."""
        for stream in [stream for stream in self.engine.streams if stream.is_lost]:
            self.engine.finish(stream)
        for call in (self.decode, self.verify, self.decode):
            self.attempt_undisturbed(call)
        self.check_logits()
        self.engine.finish()
        self.engine.allocator.drop_all_kept()
        assert self.state()[:2] == ([], self.capacity())

    def attempt_undisturbed(self, call: Callable[[], None]) -> None:
        self.places.arm(None)
        with suppress(CacheFullError):
            call()
        for stream, rows in self.seen.items():
            rows[:] = [(length, row) for length, row in rows if length <= stream.num_computed]

    def capacity(self) -> tuple[int, int, int]:
        return self.engine.sizes.blocks, self.engine.caches.gdn.num_slots, MOST_STREAMS

    def prompt(self) -> list[int]:
        """A prompt that begins as others do."""
        draw = self.draw
        length = draw.choice([1, draw.randint(2, 30), draw.randint(65, 90), 65, 65, draw.randint(65, 140), 129])
        common = draw.choice([length, length, length, draw.randint(0, length)])
        return self.head[:common] + [draw.randrange(VOCAB) for _ in range(length - common)]

    def prefill(self) -> None:
        self.chunk = self.draw.choice([None, 64])
        prompts = [self.prompt() for _ in range(self.draw.choice([0, 1, 1, 1, 2, 2]))]
        self.engine.prefill(prompts, self.chunk)

    def decode(self) -> None:
        self.engine.decode(self.draw.choice([0, 1, 1, 2, 3]))

    def verify(self) -> None:
        """Drafts of which the first ones are right, or none, as a fresh pass says."""
        engine, most, draw = self.engine, self.engine.sizes.num_spec, self.draw
        streams = engine.streams
        drafts = [[draw.randrange(VOCAB) for _ in range(draw.randint(0, most))] for _ in streams]
        if streams and most and draw.random() < 0.5:
            with self.places.unwatched():
                for place, whole in enumerate(self.fresh_pass([stream.tokens for stream in streams])):
                    drafts[place][:1] = [int(whole[-1].argmax())][: len(drafts[place])]
        if not most and not any(stream.is_lost for stream in streams):
            with refused(ValueError, "drafts: expected at most 0"):
                engine.verify(drafts)
            return
        engine.verify(drafts)

    def fork(self) -> None:
        if self.engine.streams:
            self.engine.fork(self.draw.choice(self.engine.streams))

    def finish(self) -> None:
        if self.engine.streams:
            stream = self.draw.choice(self.engine.streams)
            if not stream.is_lost:
                self.finished.append((stream.tokens[: stream.num_computed], self.seen.get(stream, [])))
            self.engine.finish(stream)
            with refused(ValueError, "stream: expected a live stream"):
                self.engine.fork(stream)

    def score(self) -> None:
        """Scores next to live streams, from a kept prefix where there is one."""
        sequences = [self.prompt() for _ in range(self.draw.randint(0, 2))]
        starts = [self.draw.choice([len(tokens) - 1, self.draw.randrange(len(tokens))]) for tokens in sequences]
        for tokens, start, rows in zip(sequences, starts, self.engine.score(sequences, starts), strict=True):
            assert rows.shape == (len(tokens) - start, VOCAB)
            self.finished.append((tokens, [(start + 1 + place, row) for place, row in enumerate(rows)]))

    def misuse(self) -> None:
        """Bad input is refused, and changes nothing."""
        engine, before = self.engine, self.state()
        self.places.arm(None)
        uses: list[Callable[[], Any]] = [
            lambda: engine.prefill([[1, 2], [1.0]]), lambda: engine.prefill([[3], [VOCAB]]), lambda: engine.prefill([[True]]),
            lambda: engine.prefill([[1], []]), lambda: engine.prefill([[1] * (LONGEST + 1)]), lambda: engine.score([[1]], [1]),
            lambda: engine.score([[1]], []), lambda: engine.verify([[1]] * (len(engine.streams) + 1)),
            lambda: engine.decode(LONGEST), lambda: engine.decode(2, [[1]]), lambda: engine.decode(1.0),
            lambda: engine.fork(Stream(engine.allocator, [], 0, 0)), lambda: engine.prefill([[1]], chunk=32),
        ]  # fmt: skip
        try:
            self.draw.choice(uses)()
        except (ValueError, TypeError):
            assert self.state() == before
        except StreamLostError:
            assert self.state() == before
        else:
            assert not engine.streams  # nothing to decode


@contextmanager
def refused(error: type[BaseException] | tuple[type[BaseException], ...], words: str) -> Iterator[None]:
    """As `pytest.raises`; words: a pattern in the message."""
    try:
        yield
    except error as raised:
        assert re.search(words, str(raised)), raised
    else:
        raise AssertionError(f"expected {error}: {words}")


def run(seeds: Iterable[int]) -> tuple[set[str], Counter[str]]:
    """Runs walks, and names the seed of one that finds a fault; returns the places that calls came to, and those that failed."""
    known: set[str] = set()
    hit: Counter[str] = Counter()
    for seed in seeds:
        try:
            places = Walk(seed).run()
        except BaseException as error:
            raise AssertionError(f"walk {seed}: {error!r}; replay it with python -m tests.cli.engine_walks {seed}") from error
        known |= places.passed.keys()
        hit += places.hit
    return known, hit


if __name__ == "__main__":
    for name, count in sorted(run(map(int, sys.argv[1:]))[1].items()):
        print(f"{count:5} failed {name}")
