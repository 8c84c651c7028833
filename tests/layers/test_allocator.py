"""The allocator gives out everything once, takes everything back, and changes nothing where it fails."""

import copy
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gdn.layers import CacheAllocator, CachedSequence, CacheFullError, Checkpoint, HybridCaches
from tests.layers.small import small_config

BLOCK = 24  # shares no multiple with the 64 tokens of a checkpoint below 192
BLOCKS, SEQUENCES, NUM_SPEC, CHECKPOINTS, NULL_SLOT = 14, 4, 1, 2, 0
RATIO = 2  # tokens of an indexer key
STATE_SLOTS = SEQUENCES * (1 + NUM_SPEC) + CHECKPOINTS


def make_caches(**changes: Any) -> HybridCaches:
    sizes: dict[str, Any] = {"num_checkpoints": CHECKPOINTS, "num_spec": NUM_SPEC, "null_slot": NULL_SLOT, "dtype": torch.float32}
    return HybridCaches(small_config(index_ratio=RATIO), BLOCKS, BLOCK, SEQUENCES, **{**sizes, **changes})


def rows_of(sequence: CachedSequence, first: int = 0) -> torch.Tensor:
    positions = torch.arange(first, sequence.num_tokens)
    return torch.tensor(sequence.blocks, dtype=torch.long)[positions // BLOCK] * BLOCK + positions % BLOCK


def free_counts(allocator: CacheAllocator) -> tuple[int, int, int, int]:
    """Blocks, state slots and sequences that are free, and prefixes that are kept."""
    return allocator.num_free_blocks, allocator.num_free_state_slots, allocator.num_free_sequences, allocator.num_kept


def add_and_keep(allocator: CacheAllocator, prompt: list[int], *lengths: int) -> CachedSequence:
    """A sequence of the prompt, whose prefixes of these lengths are kept."""
    sequence = allocator.add_prompt(prompt)
    for length in lengths:
        allocator.keep(allocator.checkpoint(sequence, length), prompt[:length])
    return sequence


class Contents:
    """Writes to and reads from the caches what an engine would: a value per token, per state slot and per ring."""

    def __init__(self, caches: HybridCaches) -> None:
        self.caches = caches

    def write(self, sequence: CachedSequence, tokens: list[int], first: int) -> None:
        rows, values = rows_of(sequence, first), torch.tensor(tokens, dtype=torch.float32)
        for cache in self.caches.kv.kv[0]:
            cache.view(BLOCKS * BLOCK, -1)[rows] = values[first:, None]
        positions = torch.arange(first, sequence.num_tokens)
        whole = positions % RATIO == RATIO - 1
        self.caches.indexer.keys[0].view(BLOCKS * BLOCK // RATIO, -1)[rows[whole] // RATIO] = values[first:][whole, None]

    def read(self, sequence: CachedSequence) -> list[list[float]]:
        rows = rows_of(sequence)
        found = [cache.view(BLOCKS * BLOCK, -1)[rows, -1].tolist() for cache in self.caches.kv.kv[0]]
        groups = rows[RATIO - 1 :: RATIO] // RATIO
        return [*found, self.caches.indexer.keys[0].view(BLOCKS * BLOCK // RATIO, -1)[groups, -1].tolist()]

    def write_states(self, sequence: CachedSequence, values: list[int], ring: int) -> None:
        for slot, value in zip(sequence.state_slots, values, strict=True):
            self.caches.gdn.conv_states[0][slot] = value
            self.caches.gdn.ssm_states[0][slot] = value
        self.caches.indexer.rings[0][sequence.slot] = ring

    def read_states(self, sequence: CachedSequence) -> tuple[list[float], float]:
        found = []
        for slot in sequence.state_slots:
            conv, ssm = self.caches.gdn.conv_states[0][slot].unique(), self.caches.gdn.ssm_states[0][slot].unique()
            assert conv.numel() == ssm.numel() == 1 and conv == ssm
            found.append(float(conv))
        return found, float(self.caches.indexer.rings[0][sequence.slot].unique())


class AllocatorMachine(RuleBasedStateMachine):
    """Calls in any order against a model that keeps the contents of every sequence and checkpoint in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = make_caches()
        self.allocator = CacheAllocator(self.caches)
        self.contents = Contents(self.caches)
        self.live: list[tuple[CachedSequence, dict[str, Any]]] = []
        self.checkpoints: list[tuple[Checkpoint, list[int], int]] = []  # reserved or kept, prefix, state
        self.counter = 1

    def fresh(self) -> int:
        self.counter += 1
        return self.counter

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """The result; "full" where the cache was full, and then nothing may have changed."""
        before = free_counts(self.allocator)
        try:
            return call(*arguments)
        except CacheFullError as error:
            assert error.needed > error.free
            assert free_counts(self.allocator) == before
            return "full"

    def pick(self, data: st.DataObject) -> tuple[CachedSequence, dict[str, Any]]:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    def start(self, sequence: CachedSequence, tokens: list[int]) -> None:
        """Prefill of what is not cached."""
        states, ring = [self.fresh() for _ in sequence.state_slots], self.fresh()
        self.contents.write(sequence, tokens, sequence.num_cached_tokens)
        self.contents.write_states(sequence, states, ring)
        self.live.append((sequence, {"tokens": tokens, "states": states, "ring": ring}))

    @rule(prompt=st.integers(0, 1), length=st.integers(0, 5 * BLOCK))
    def add(self, prompt: int, length: int) -> None:
        sequence = self.attempt(self.allocator.add, length)
        if sequence != "full":
            assert sequence.num_cached_tokens == 0
            self.start(sequence, prompt_tokens(prompt, length))

    @rule(prompt=st.integers(0, 1), length=st.sampled_from([64, 65, 100, 128, 129, 193]))
    def add_prompt(self, prompt: int, length: int) -> None:
        tokens = prompt_tokens(prompt, length)
        kept = {tuple(prefix): state for one, prefix, state in self.checkpoints if one.is_live and self.is_kept(one)}
        sequence = self.attempt(self.allocator.add_prompt, tokens)
        if sequence == "full":
            return
        cached = sequence.num_cached_tokens
        hits = [len(prefix) for prefix in kept if len(prefix) < length and list(prefix) == tokens[: len(prefix)]]
        assert cached in (0, max(hits, default=0))
        if cached:
            found = [row[: cached // (RATIO if groups else 1)] for groups, row in enumerate_reads(self.contents.read(sequence))]
            assert found == [tokens[:cached], tokens[:cached], tokens[RATIO - 1 : cached : RATIO]]
            state = self.caches.gdn.ssm_states[0][sequence.state_slots[0]].unique().tolist()
            window = self.caches.gdn.conv_states[0][sequence.state_slots[0]].unique().tolist()
            assert state == window == [kept[tuple(tokens[:cached])]]
        self.start(sequence, tokens)

    @rule(prompts=st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 65, 100, 129])), max_size=3))
    def add_prompts(self, prompts: list[tuple[int, int]]) -> None:
        tokens = [prompt_tokens(*prompt) for prompt in prompts]
        sequences = self.attempt(self.allocator.add_prompts, tokens)
        for sequence, prompt in zip(sequences, tokens, strict=True) if sequences != "full" else ():
            self.start(sequence, prompt)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 2 * BLOCK))
    def extend(self, data: st.DataObject, count: int) -> None:
        sequence, model = self.pick(data)
        if self.attempt(self.allocator.extend, sequence, count) != "full":
            first = len(model["tokens"])
            model["tokens"] = model["tokens"] + [self.fresh() for _ in range(count)]
            self.contents.write(sequence, model["tokens"], first)
            model["states"], model["ring"] = [self.fresh() for _ in sequence.state_slots], self.fresh()
            self.contents.write_states(sequence, model["states"], model["ring"])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, BLOCK + 2))
    def truncate(self, data: st.DataObject, count: int) -> None:
        sequence, model = self.pick(data)
        left = max(0, sequence.num_tokens - count)
        cut = sequence.blocks[left // BLOCK] if left % BLOCK else None
        if self.attempt(self.allocator.truncate, sequence, left) != "full":
            model["tokens"] = model["tokens"][:left]
            return
        kept = [one for one, _, _ in self.checkpoints if one.is_live and self.is_kept(one)]
        others = [one for one, _ in self.live if one is not sequence]
        others += [one for one, _, _ in self.checkpoints if one.is_live and one.num_tokens > left and one not in kept]
        assert any(cut in one.blocks for one in others), "a prefix was in the way, and not dropped"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence, model = self.pick(data)
        child = self.attempt(self.allocator.fork, sequence)
        if child != "full":
            self.live.append((child, dict(model)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        sequence, _ = self.live.pop(place)
        self.allocator.free(sequence)
        with pytest.raises(ValueError, match="sequence: expected one that was not freed"):
            self.allocator.free(sequence)

    def is_kept(self, checkpoint: Checkpoint) -> bool:
        return any(checkpoint is one for one in self.allocator._owned.kept.values())

    @precondition(lambda self: any(sequence.num_tokens >= 64 for sequence, _ in self.live))
    @rule(data=st.data(), keep=st.booleans())
    def checkpoint(self, data: st.DataObject, keep: bool) -> None:
        sequence, model = data.draw(st.sampled_from([one for one in self.live if one[0].num_tokens >= 64]))
        count = 64 * data.draw(st.integers(1, sequence.num_tokens // 64))
        checkpoint = self.attempt(self.allocator.checkpoint, sequence, count)
        if checkpoint == "full":
            return
        state = self.fresh()
        self.caches.gdn.ssm_states[0][checkpoint.slot] = state
        self.caches.gdn.conv_states[0][checkpoint.slot] = state
        prefix = model["tokens"][:count]
        if keep:
            self.allocator.keep(checkpoint, prefix)
        self.checkpoints.append((checkpoint, prefix, state))

    @precondition(lambda self: any(one.is_live for one, _, _ in self.checkpoints))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        checkpoint = data.draw(st.sampled_from([one for one, _, _ in self.checkpoints if one.is_live]))
        self.allocator.drop(checkpoint)
        assert not checkpoint.is_live

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        sequences, held = [one for one, _ in self.live], [one for one, _, _ in self.checkpoints if one.is_live]
        slots = [slot for one in sequences for slot in one.state_slots] + [one.slot for one in held]
        assert len(set(slots)) == len(slots) and all(NULL_SLOT < slot <= STATE_SLOTS for slot in slots)
        assert len(slots) + self.allocator.num_free_state_slots == STATE_SLOTS
        rings = [one.slot for one in sequences]
        assert len(set(rings)) == len(rings) and len(rings) + self.allocator.num_free_sequences == SEQUENCES
        blocks = Counter(block for one in [*sequences, *held] for block in one.blocks)
        assert len(blocks) + self.allocator.num_free_blocks == BLOCKS
        assert all(self.allocator._owned.blocks.owners(block) == count for block, count in blocks.items())

    @invariant()
    def everybody_reads_what_was_written(self) -> None:
        for sequence, model in self.live:
            tokens = model["tokens"]
            assert sequence.num_tokens == len(tokens) and len(sequence.blocks) == -(-len(tokens) // BLOCK)
            assert self.contents.read(sequence) == [tokens, tokens, tokens[RATIO - 1 :: RATIO]]
            assert self.contents.read_states(sequence) == (model["states"], model["ring"])

    def teardown(self) -> None:
        """All memory comes back, in whatever order it was taken."""
        for sequence, _ in self.live:
            self.allocator.free(sequence)
        self.allocator.drop_all_kept()
        for checkpoint, _, _ in self.checkpoints:
            if checkpoint.is_live:
                self.allocator.drop(checkpoint)
        assert free_counts(self.allocator) == (BLOCKS, STATE_SLOTS, SEQUENCES, 0)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def prompt_tokens(prompt: int, length: int) -> list[int]:
    """Two prompts that share their first 64 tokens."""
    return [-1 - position - (1000 * prompt if position >= 64 else 0) for position in range(length)]


def enumerate_reads(reads: list[list[float]]) -> list[tuple[bool, list[float]]]:
    """Each list with whether it counts groups of tokens."""
    return [(place == 2, row) for place, row in enumerate(reads)]


@pytest.fixture
def allocator() -> CacheAllocator:
    return CacheAllocator(make_caches())


def fill(allocator: CacheAllocator) -> list[CachedSequence]:
    """Sequences of one, two, ... blocks until something runs out."""
    sequences: list[CachedSequence] = []
    with pytest.raises(CacheFullError):
        while True:
            sequences.append(allocator.add(BLOCK * (len(sequences) + 1)))
    return sequences


def test_filled_freed_and_refilled_in_another_order_gives_the_same_ids(allocator: CacheAllocator) -> None:
    first = fill(allocator)
    assert len(first) == SEQUENCES
    held = [(one.slot, one.state_slots, tuple(one.blocks)) for one in first]
    for one in (first[2], first[0], first[3], first[1]):
        allocator.free(one)
    assert [(one.slot, one.state_slots, tuple(one.blocks)) for one in fill(allocator)] == held


def test_the_last_block_and_the_last_slot_are_given_out(allocator: CacheAllocator) -> None:
    sequence = allocator.add(BLOCKS * BLOCK)
    assert sorted(sequence.blocks) == list(range(BLOCKS)) and allocator.num_free_blocks == 0
    with pytest.raises(CacheFullError, match="the cache is full: 1 blocks needed, 0 free") as caught:
        allocator.extend(sequence, 1)
    assert (caught.value.resource, caught.value.needed, caught.value.free) == ("blocks", 1, 0)
    told = pickle.loads(pickle.dumps(caught.value))
    assert (str(told), told.resource, told.needed, told.free) == (str(caught.value), "blocks", 1, 0)
    assert sequence.num_tokens == BLOCKS * BLOCK
    others = [allocator.add(0) for _ in range(SEQUENCES - 1)]
    assert {slot for one in [sequence, *others] for slot in one.state_slots} == set(range(1, 1 + 2 * SEQUENCES))
    with pytest.raises(CacheFullError) as caught:
        allocator.add(0)
    assert caught.value.resource == "sequence slots"


@pytest.mark.parametrize("method", ["copy_block", "copy_slot", "copy_ring"])
def test_a_failed_copy_gives_back_what_was_taken(allocator: CacheAllocator, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    sequence = allocator.add(BLOCK + 1)
    before = free_counts(allocator)
    caches = allocator.caches
    owner = {"copy_block": caches, "copy_slot": caches.gdn, "copy_ring": caches.indexer}[method]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        allocator.fork(sequence)
    assert free_counts(allocator) == before
    monkeypatch.undo()
    assert allocator.fork(sequence).blocks[0] == sequence.blocks[0]


def test_kept_prefixes_make_room_the_longest_unused_first(allocator: CacheAllocator) -> None:
    prompts = [prompt_tokens(0, 70), [5] * 70]
    for prompt in prompts:
        allocator.free(add_and_keep(allocator, prompt, 64))
    assert (allocator.num_kept, allocator.num_free_blocks) == (2, BLOCKS - 6)
    used = allocator.add_prompt(prompts[0])
    assert used.num_cached_tokens == 64 and allocator.num_free_blocks == BLOCKS - 7
    allocator.add((BLOCKS - 4) * BLOCK)
    assert allocator.num_kept == 1
    with pytest.raises(CacheFullError):  # not even without the other prefix, which therefore stays
        allocator.add(2 * BLOCK)
    assert allocator.num_kept == 1
    allocator.free(used)
    assert allocator.add_prompt(prompts[0]).num_cached_tokens == 64


def test_a_prefix_that_is_in_its_own_way_is_dropped() -> None:
    """The prompt is computed from its start where there is no room for a copy of the prefix's last block."""
    config = small_config(index_ratio=RATIO)
    caches = HybridCaches(config, 3, BLOCK, 1, num_checkpoints=1, dtype=torch.float32)
    allocator = CacheAllocator(caches)
    prompt = list(range(65))
    allocator.free(add_and_keep(allocator, prompt, 64))
    again = allocator.add_prompt(prompt)
    assert (again.num_cached_tokens, allocator.num_kept, len(again.blocks)) == (0, 0, 3)


def test_keeping_a_prefix_twice_drops_the_second(allocator: CacheAllocator) -> None:
    prompt = list(range(64))
    first, second = (allocator.add(64) for _ in range(2))
    checkpoints = [allocator.checkpoint(one, 64) for one in (first, second)]
    allocator.keep(checkpoints[0], prompt)
    with pytest.raises(ValueError, match="checkpoint: expected one that is not kept yet"):
        allocator.keep(checkpoints[0], prompt)
    allocator.keep(checkpoints[1], prompt)
    assert (checkpoints[0].is_live, checkpoints[1].is_live, allocator.num_kept) == (True, False, 1)
    with pytest.raises(ValueError, match="checkpoint: expected one that was not freed"):
        allocator.drop(checkpoints[1])


@pytest.mark.parametrize("count", [0, 63, 32, 128])
def test_checkpoints_are_at_multiples_of_64_within_the_sequence(allocator: CacheAllocator, count: int) -> None:
    sequence = allocator.add(127)
    with pytest.raises(ValueError, match="num_tokens: expected"):
        allocator.checkpoint(sequence, count)
    assert allocator.num_free_state_slots == STATE_SLOTS - 2


@pytest.mark.parametrize("holder", ["fork", "checkpoint"])
def test_truncating_into_a_shared_block_copies_it(allocator: CacheAllocator, holder: str) -> None:
    """Rejected drafts whose rows a fork, or a kept prefix, needs stay as they are when new tokens come in their place."""
    contents, tokens = Contents(allocator.caches), list(range(192))  # 192: whole blocks
    sequence = allocator.add(192)
    contents.write(sequence, tokens, 0)
    other = allocator.fork(sequence) if holder == "fork" else allocator.checkpoint(sequence, 192)
    allocator.truncate(sequence, 190)
    allocator.extend(sequence, 2)
    contents.write(sequence, [*tokens[:190], -1, -2], 190)
    if holder == "checkpoint":
        allocator.keep(other, tokens)
        other = allocator.add_prompt([*tokens, 0])
        assert other.num_cached_tokens == 192
        allocator.truncate(other, 192)
    assert contents.read(other)[0] == tokens
    assert contents.read(sequence)[0] == [*tokens[:190], -1, -2]
    assert sequence.blocks[:-1] == list(other.blocks[:-1]) and sequence.blocks[-1] != other.blocks[-1]


def test_no_prefix_is_dropped_where_that_would_not_make_room() -> None:
    caches = HybridCaches(small_config(), BLOCKS, BLOCK, 2, num_checkpoints=1, dtype=torch.float32)
    allocator = CacheAllocator(caches)
    prompt = list(range(64))
    sequence = add_and_keep(allocator, prompt, 64)
    reserved = allocator.checkpoint(sequence, 64)  # the third and last slot, neither kept nor dropped
    assert (allocator.num_free_state_slots, allocator.num_kept) == (0, 1)
    with pytest.raises(CacheFullError):
        allocator.add((BLOCKS - 2) * BLOCK)  # too many blocks, whatever happens to the prefix
    assert allocator.num_kept == 1
    last = allocator.checkpoint(sequence, 64)  # takes the prefix's slot
    assert allocator.num_kept == 0
    with pytest.raises(CacheFullError) as caught:
        allocator.add(0)
    assert (caught.value.resource, caught.value.free) == ("state slots", 0)
    allocator.drop(last)
    allocator.drop(reserved)
    assert allocator.num_free_state_slots == 2


@pytest.mark.parametrize("num_prefixes", [1, 2])
def test_a_prefix_that_alone_needs_a_cut_block_is_dropped(num_prefixes: int) -> None:
    """Full caches: the copy of the cut block has no room, and without the prefixes that need it there is no need for one."""
    caches = HybridCaches(small_config(), 8, BLOCK, 2, num_checkpoints=2, dtype=torch.float32)
    allocator = CacheAllocator(caches)
    prompt = list(range(192))  # 8 blocks
    sequence = add_and_keep(allocator, prompt, *(64, 192)[-num_prefixes:])
    assert allocator.num_free_blocks == 0
    allocator.truncate(sequence, 190)
    assert (allocator.num_kept, sequence.num_tokens, len(sequence.blocks)) == (0, 190, 8)
    allocator.extend(sequence, 2)


def test_a_checkpoint_does_not_need_the_rows_after_its_own() -> None:
    """A prompt that goes on in the block where its prefix ends gives up drafts there: without a copy, though nothing is free."""
    allocator = CacheAllocator(HybridCaches(small_config(), 3, BLOCK, 1, num_checkpoints=1, dtype=torch.float32))
    prompt = list(range(65))
    sequence = add_and_keep(allocator, prompt, 64)
    blocks = list(sequence.blocks)
    allocator.extend(sequence, 4)
    allocator.truncate(sequence, 66)
    assert (sequence.blocks, allocator.num_kept, allocator.num_free_blocks) == (blocks, 1, 0)


@pytest.mark.parametrize("holder", ["fork", "reserved"])
def test_a_cut_block_that_others_need_is_refused_and_nothing_dropped(holder: str) -> None:
    """No prefix goes where that would not help: a fork, or a checkpoint that is not offered yet, needs the block too."""
    allocator = CacheAllocator(HybridCaches(small_config(), 8, BLOCK, 2, num_checkpoints=2, dtype=torch.float32))
    prompt = list(range(192))
    sequence = add_and_keep(allocator, prompt, 192)
    _ = allocator.fork(sequence) if holder == "fork" else allocator.checkpoint(sequence, 192)
    with pytest.raises(CacheFullError):
        allocator.truncate(sequence, 190)
    assert (allocator.num_kept, sequence.num_tokens, len(sequence.blocks)) == (1, 192, 8)


def test_all_prompts_or_none(allocator: CacheAllocator) -> None:
    """A kept prefix that one prompt takes the place of stays where the next prompt finds no room."""
    prompt = prompt_tokens(0, 65)
    allocator.free(add_and_keep(allocator, prompt, 64))
    before = free_counts(allocator)
    with pytest.raises(CacheFullError):
        allocator.add_prompts([[1] * (BLOCK * (BLOCKS - 1)), [2] * (2 * BLOCK)])
    assert free_counts(allocator) == before
    assert allocator.add_prompt(prompt).num_cached_tokens == 64
    assert allocator.add_prompts([]) == []


def test_a_prefix_may_be_too_long(allocator: CacheAllocator) -> None:
    """Of the prefixes of a prompt, the longest that is not longer than asked for is taken."""
    prompt = prompt_tokens(0, 130)
    allocator.free(add_and_keep(allocator, prompt, 64, 128))
    for most, cached in ((None, 128), (128, 128), (127, 64), (63, 0), (0, 0)):
        again = allocator.add_prompt(prompt, most)
        assert again.num_cached_tokens == cached
        allocator.free(again)
    with pytest.raises(ValueError, match="most_cached: expected 1 numbers, one for each prompt, got 2"):
        allocator.add_prompts([prompt], [1, 2])


def test_no_sequence_is_longer_than_the_positions_of_the_model() -> None:
    config = small_config(max_position_embeddings=30)
    allocator = CacheAllocator(HybridCaches(config, BLOCKS, BLOCK, 2, num_checkpoints=1, dtype=torch.float32))
    sequence = allocator.add(30)
    for name, call in {
        "num_tokens": lambda: allocator.add(31), "prompt": lambda: allocator.add_prompt([1] * 31),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}: expected at most 30 tokens of a sequence .*, got 31"):
            call()
    other = allocator.add(1)
    with pytest.raises(ValueError, match=r"num_tokens: expected at most 30 tokens .* got 31"):
        allocator.extend_all([other, sequence], [1, 1])
    assert (sequence.num_tokens, other.num_tokens, allocator.num_free_blocks) == (30, 1, BLOCKS - 3)


@pytest.mark.parametrize("token", [1.0, True, "1", None, torch.tensor(1.0), torch.tensor([1]), 2**70])
def test_tokens_are_integers(allocator: CacheAllocator, token: Any) -> None:
    sequence = allocator.add(64)
    reserved = allocator.checkpoint(sequence, 64)
    for name, call in {
        "prompt": lambda: allocator.add_prompt([0, token]),
        "prefix": lambda: allocator.keep(reserved, [0] * 63 + [token]),
    }.items():  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=rf"^{name}\[\d+\]: expected"):
            call()
    assert (allocator.num_free_sequences, allocator.num_kept) == (SEQUENCES - 1, 0)


def test_integers_of_numpy_and_torch_are_tokens(allocator: CacheAllocator) -> None:
    """The same prefix, however its tokens are given."""
    tokens = list(range(64))
    sequence = allocator.add_prompt(torch.arange(65))
    allocator.keep(allocator.checkpoint(sequence, 64), np.arange(64, dtype=np.uint8))
    for given in (tokens, np.arange(64), torch.arange(64, dtype=torch.int16), list(np.arange(64)), list(torch.arange(64))):
        again = allocator.add_prompt([*given, 7])
        assert again.num_cached_tokens == 64
        allocator.free(again)
    for flags in (np.ones(65, bool), torch.ones(65, dtype=torch.bool)):
        with pytest.raises(TypeError, match=r"prompt: expected integers, got (torch\.)?bool"):
            allocator.add_prompt(flags)


def test_sequences_of_another_allocator_are_refused(allocator: CacheAllocator) -> None:
    other = CacheAllocator(make_caches())
    sequence = other.add(70)
    reserved = other.checkpoint(sequence, 64)
    before = (allocator.num_free_blocks, other.num_free_blocks)
    for call in (
        lambda: allocator.fork(sequence), lambda: allocator.free(sequence), lambda: allocator.extend(sequence, 1),
        lambda: allocator.truncate(sequence, 1), lambda: allocator.checkpoint(sequence, 64), lambda: allocator.drop(reserved),
        lambda: other.free(copy.deepcopy(sequence)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="(sequence|checkpoint): expected one of this allocator"):
            call()
    assert (allocator.num_free_blocks, other.num_free_blocks) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself(allocator: CacheAllocator, copied: Any) -> None:
    """The copy's sequences hold what the original's hold; a fork and a kept prefix of it read the copy's memory."""
    contents, tokens = Contents(allocator.caches), prompt_tokens(0, 70)
    sequence = allocator.add_prompt(tokens)
    contents.write(sequence, tokens, 0)
    contents.write_states(sequence, [3, 4], 5)
    reserved = allocator.checkpoint(sequence, 64)
    allocator.keep(reserved, tokens[:64])
    twin, own = copied((allocator, sequence))
    fork, of_twin = twin.fork(own), Contents(twin.caches)
    of_twin.write(own, [9] * 70, 0)
    of_twin.write_states(own, [6, 7], 8)
    assert of_twin.read(fork)[:2] == [[9] * 48 + tokens[48:]] * 2  # 48 rows are in shared blocks
    assert of_twin.read_states(fork) == ([3, 4], 5) and of_twin.read_states(own) == ([6, 7], 8)
    assert contents.read(sequence)[0] == tokens and contents.read_states(sequence) == ([3, 4], 5)
    assert twin.add_prompt(tokens).num_cached_tokens == 64
    assert (twin.num_free_sequences, allocator.num_free_sequences) == (SEQUENCES - 3, SEQUENCES - 1)


@pytest.mark.parametrize("count", ["1", 1.5, None, True])
def test_numbers_of_tokens_are_ints(allocator: CacheAllocator, count: Any) -> None:
    sequence = allocator.add(3)
    for call in (allocator.add, lambda one: allocator.extend(sequence, one), lambda one: allocator.truncate(sequence, one)):
        with pytest.raises(TypeError, match=f"num_tokens: expected an int, got {type(count).__name__}"):
            call(count)
