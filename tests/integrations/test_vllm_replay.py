"""Replay decode on vLLM's pages, in batches as vLLM describes them, against a float64 recurrence of every sequence."""

import itertools

import pytest
import torch

from tests.integrations.vllm_engine import WIDTH
from tests.integrations.vllm_replay import CLOSE, Engine, ReplayHost, Row, Running

LAYOUTS = [  # drafts, interleaved, dim_first
    pytest.param(*one, marks=() if one in ((0, True, False), (3, False, True)) else pytest.mark.cover)
    for one in itertools.product((0, 2, 3), (False, True), (False, True))
]


class Life:
    """Draws what happens to sequences, a step after the other."""

    def __init__(self, engine: Engine, most: int = 5) -> None:
        self.engine, self.host, self.most = engine, engine.host, most
        self.prompts: dict[int, int] = {}  # block -> tokens of its prompt that are to come
        self.running: list[Running] = []
        self.kinds: set[str] = set()

    def step(self) -> None:
        random, num_spec = self.host.random, self.host.num_spec
        self._leave()
        if len(self.running) < self.most and (not self.running or random.random() < 0.3):
            own = self.engine.new()
            self.running.append(own)
            self.prompts[own.block] = random.choice([1, 2, 5, 9, 40, 70])
        decoding, prompts = [], []
        for own in self.running:
            if left := self.prompts.get(own.block, 0):
                chunk = left if random.random() < 0.5 else random.randint(1, left)
                self.prompts[own.block] = left - chunk
                prompts.append(Row(own, chunk))
                continue
            if random.random() < 0.15:
                continue  # no room for it in this step
            decoding.append(Row(own, 1) if not num_spec else self._drafted(own))
        if num_spec == 0:
            # One token of a prompt that goes on is a decode row to the host; those come first.
            rows = sorted(decoding + prompts, key=lambda row: row.tokens > 1 or not row.own.computed)
        else:
            rows = decoding + prompts
            if decoding and prompts:
                random.shuffle(rows)
            elif prompts:
                rows.sort(key=lambda row: row.tokens > 1 or not row.own.computed)
        if rows:
            padded = random.choice([0, 2]) if not prompts else 0
            self.kinds.add(f"{'drafts' if num_spec else 'decode'} {bool(decoding)} prompts {bool(prompts)} padded {padded}")
            self.engine.run(rows, padded)

    def _drafted(self, own: Running) -> Row:
        drafts = self.host.random.randint(0, self.host.num_spec)
        return Row(own, 1 + drafts, drafts)

    def _leave(self) -> None:
        """Some end, and some are preempted: they come back in another block, where all of their tokens are computed again."""
        random = self.host.random
        for own in list(self.running):
            if self.prompts.get(own.block) or random.random() > 0.06:
                continue
            self.running.remove(own)
            self.engine.end(own)
            if random.random() < 0.5:
                self.kinds.add("preempted")
                self.running.append(self._resumed(own))

    def _resumed(self, own: Running) -> Running:
        """Its tokens again, in two chunks, beside nobody."""
        again, history, engine = self.engine.new(), own.history, self.engine
        cut = 1 + self.host.random.randrange(own.computed)
        for begin, end in ((0, cut), (cut, own.computed)):
            if end > begin:
                part = (history[0][begin:end], history[1][begin:end])
                engine.run([Row(again, end - begin)], again={again.block: part})
        assert (again.state - own.state).abs().max() < 1e-12
        return again


@pytest.mark.parametrize(("num_spec", "interleaved", "dim_first"), LAYOUTS)
def test_a_long_run(num_spec: int, interleaved: bool, dim_first: bool) -> None:
    host = ReplayHost(20 + num_spec, num_spec=num_spec, interleaved=interleaved, dim_first=dim_first)
    host.free = host.free[:7]  # taken over again soon
    life = Life(Engine(host))
    for n in range(110):
        life.step()
        if n % 10 == 9:
            life.engine.check_states([own for own in life.running if own.computed])
            assert life.engine.worst < CLOSE
    kinds = "".join(sorted(life.kinds))
    for kind in ("True prompts False padded 2", "True prompts True", "False prompts True", "preempted"):
        assert kind in kinds, kinds
    assert max(own.computed for own in life.running) > host.page.fold_every


def test_a_prompt_after_decode_folds_first() -> None:
    """A new turn: the prompt goes on from tokens that are entries of the ring, and from a window that drafts left further on."""
    host = ReplayHost(3, num_spec=3, interleaved=True, dim_first=False)
    engine = Engine(host)
    own, other = engine.new(), engine.new()
    engine.run([Row(own, 6), Row(other, 70)])
    for tokens in (4, 4, 2):
        engine.run([Row(own, tokens, tokens - 1), Row(other, 4, 3)])
    while own.accepted == 1:
        engine.run([Row(own, 4, 3), Row(other, 1, 0)])
    engine.run([Row(other, 2, 1), Row(own, 5)])
    engine.run([Row(own, 3, 2), Row(other, 1, 0)])
    engine.check_states([own, other])
    assert engine.worst < CLOSE


def test_bfloat16_states() -> None:
    """The pages hold both dtypes; a state is rounded once in a fold."""
    host = ReplayHost(4, num_spec=2, interleaved=False, dim_first=False, state_dtype=torch.bfloat16)
    engine = Engine(host)
    own = [engine.new() for _ in range(3)]
    engine.run([Row(one, tokens) for one, tokens in zip(own, (5, 1, 66), strict=True)])
    for _ in range(20):
        engine.run([Row(one, 3, 2) for one in own])
    assert CLOSE < engine.worst < 0.2


@pytest.mark.parametrize("num_spec", [0, 2])
def test_values_wider_than_keys(num_spec: int) -> None:
    """The fused decode step, and prompts by one operator after the other."""
    host = ReplayHost(9, num_spec=num_spec, interleaved=True, dim_first=num_spec > 0, dims=(32, 64))
    life = Life(Engine(host), most=3)
    for _ in range(30):
        life.step()
    life.engine.check_states([own for own in life.running if own.computed])
    assert life.engine.worst < CLOSE


@pytest.mark.parametrize("omitted", ["counts", "folds"])
def test_an_omission_is_seen(omitted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs above would notice a block whose count is another's, and a prompt that goes on from an older state."""
    host = ReplayHost(5, num_spec=0, interleaved=False, dim_first=False)
    engine = Engine(host)
    engine.views.state_tokens.zero_()  # a block that nobody had
    first = engine.new()
    engine.run([Row(first, 3)])
    build = engine.build

    def without(rows: list[Row], padded: int) -> object:
        metadata = build(rows, padded)
        prompts = metadata.gdn_replay.prompts
        if prompts is not None:
            nothing = {"written": prompts.written[:0], "tokens": prompts.tokens[:0]} if omitted == "counts" else {"fold": None}
            prompts = prompts._replace(**nothing)
            metadata.gdn_replay = metadata.gdn_replay._replace(prompts=prompts)
        return metadata

    engine.build = without
    for _ in range(5):
        engine.run([Row(first, 1)])
    assert engine.worst < CLOSE
    if omitted == "folds":
        engine.run([Row(first, 4)])
    else:
        engine.end(first)
        host.free = [first.block]
        again = engine.new()
        engine.run([Row(again, 9)])
        engine.run([Row(again, 1)])
    assert not engine.worst < 1e-3  # nor is NaN


# --- the prefix cache: blocks are copied from one to the next, and a block that is left is another sequence's start -------------


def test_blocks_that_are_left_are_prefixes() -> None:
    """Decode over borders of blocks: the host copies both parts of a block, and the ring and the count with them."""
    size, host = 16, ReplayHost(6, num_spec=0, interleaved=True, dim_first=False)
    engine, left = Engine(host), {}

    def copy(source: int, target: int) -> None:
        for pages in host.layer.kv_cache:
            pages[target] = pages[source]

    def run(own: Running, tokens: int) -> None:
        """As the host: a step that ends in another block begins with a copy of the last one, which stays as it is."""
        before, after = (own.computed - 1) // size, (own.computed + tokens - 1) // size
        if own.computed and before != after:
            source, own.block = own.block, host.free.pop()
            copy(source, own.block)
            if own.computed % size == 0:
                left[source] = (own.computed, own.state, own.window, own.history)
        engine.run([Row(own, tokens)])

    own = engine.new()
    run(own, 16)
    for _ in range(40):
        run(own, 1)
    assert len(left) == 3 and [tokens for tokens, *_ in left.values()] == [16, 32, 48]
    for tokens in (1, 5):  # what follows a hit may be one token, a decode row, or more
        for source, (computed, state, window, history) in list(left.items()):
            hit = Running(host.free.pop(), computed, 1, history, state, window)
            copy(source, hit.block)
            run(hit, tokens)
            for _ in range(3):
                run(hit, 1)
    assert engine.worst < CLOSE


def test_states_from_inside_prompts() -> None:
    """A checkpoint's block gets the tokens that its state contains, and its ring is empty."""
    host = ReplayHost(7, num_spec=0, interleaved=False, dim_first=False)
    engine = Engine(host)
    first, second = engine.new(), engine.new()
    engine.run([Row(first, 3)])
    kept = host.free.pop()
    engine.stand_in.checkpoint = [(0, 0), (64, kept)]
    engine.run([Row(first, 1), Row(second, 90)])
    qkvz, ba = (x[:64] for x in second.history)
    _, states, line = host.recurrence(qkvz, ba, *host.nothing())
    hit = Running(kept, 64, 1, (qkvz, ba), states[-1], line[-(WIDTH - 1) :])
    assert int(engine.views.state_tokens[kept]) == 64 and int(engine.views.state_tokens[second.block]) == 90
    for rows in ([Row(hit, 1), Row(first, 1)], [Row(second, 1), Row(hit, 7)]):
        engine.run(rows)
    engine.check_states([first, second, hit])
    assert engine.worst < CLOSE
