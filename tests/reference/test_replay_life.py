"""The life of a slot: a random script of all that may happen to it, against one recurrence per sequence.

Slots are reused by several sequences, checkpoints are taken and hit, sequences are forked, preempted, swapped out and sent away.
"""

import pytest
import torch

from tests.replay_walk import Sequence, Shape, Walk, error_of, state_error

LIVE, SAVED = 4, 4  # slots with a ring, and slots for checkpoints alone


class Script:
    """Sequences on the slots of a walk, and checkpoints: copies of a sequence in slots without a ring."""

    def __init__(self, seed: int, *, forgets: bool = False) -> None:
        """forgets: a prompt chunk does not set the count of its slot."""
        most = 1 + seed % 3
        shape = Shape((1, 1, 2), 6, 4, torch.float64, most=most, fold_every=3 + seed % 5, fold_phase=seed % 3)
        shape.slots, shape.ring_slots = LIVE + SAVED, LIVE
        self.walk, self.forgets = Walk(shape, seed), forgets
        self.live: list[Sequence] = []
        self.saved: list[Sequence] = []

    def run(self, steps: int) -> set[str]:
        """Names of the events that happened. Every output and every checkpoint is judged."""
        events = (
            self.start, self.chunk, self.decode, self.decode, self.decode, self.tree, self.checkpoint, self.hit, self.fork,
            self.preempt, self.swap, self.finish, self.idle,
        )  # fmt: skip
        seen = set()
        for _ in range(steps):
            event = events[self.walk.draw(len(events))]
            if event():
                seen.add(event.__name__)
        for one in list(self.live):
            self._end(one)
        return seen

    def _any(self) -> Sequence | None:
        return self.live[self.walk.draw(len(self.live))] if self.live else None

    def _free(self, slots: range, used: list[Sequence]) -> int | None:
        return next((slot for slot in slots if slot not in [one.slot for one in used]), None)

    def _end(self, one: Sequence) -> None:
        if one.outputs:
            assert error_of(one) < 1e-9
        self.live.remove(one)

    def start(self) -> bool:
        """First prompt chunk in a recycled slot."""
        slot = self._free(range(LIVE), self.live)
        if slot is None:
            return False
        one = Sequence(slot, torch.zeros(2, 6, 4).double())
        self.walk.prefill(one, 1 + self.walk.draw(5), is_first=True, is_counted=not self.forgets)
        self.live.append(one)
        return True

    def chunk(self) -> bool:
        """Prompt tokens after decode: the state first gets all entries."""
        one = self._any()
        if one is None:
            return False
        self.walk.fold([one])
        self.walk.prefill(one, 1 + self.walk.draw(4))
        return True

    def decode(self) -> bool:
        if not self.live:
            return False
        self.walk.decode(self.live, self.walk.draw_lengths(len(self.live)), padded=self.walk.draw(2))
        return True

    def tree(self) -> bool:
        if not self.live or self.walk.shape.most == 1:
            return False
        lengths = self.walk.draw_lengths(len(self.live))
        self.walk.decode(self.live, lengths, parents=self.walk.draw_trees(lengths))
        return True

    def checkpoint(self) -> bool:
        """While decoding: the folded state goes to a slot without a ring."""
        one, slot = self._any(), LIVE + self.walk.draw(SAVED)
        if one is None:
            return False
        self.saved = [other for other in self.saved if other.slot != slot]
        before = self.walk.pool[one.slot].clone(), self.walk.state_tokens[one.slot].clone()
        self.walk.fold([one], into=[slot])
        assert torch.equal(before[0], self.walk.pool[one.slot]) and before[1] == self.walk.state_tokens[one.slot]
        copy = Sequence(slot, one.truth.clone(), one.case, one.tokens)
        assert state_error(self.walk, copy) < 1e-9 and int(self.walk.state_tokens[slot]) == one.tokens
        self.saved.append(copy)
        return True

    def hit(self) -> bool:
        """A sequence starts from a checkpoint: state and count are copied, and it may go straight to decode."""
        slot = self._free(range(LIVE), self.live)
        if slot is None or not self.saved:
            return False
        source = self.saved[self.walk.draw(len(self.saved))]
        self.walk.pool[slot] = self.walk.pool[source.slot]
        self.walk.state_tokens[slot] = self.walk.state_tokens[source.slot]
        accepted = 1 + self.walk.draw(self.walk.shape.most)  # anything in 1..Tmax
        self.live.append(Sequence(slot, source.truth.clone(), source.case, source.tokens, accepted))
        return True

    def fork(self) -> bool:
        one, slot = self._any(), self._free(range(LIVE), self.live)
        if one is None or slot is None:
            return False
        self.live.append(self.walk.fork(one, slot))
        return True

    def preempt(self) -> bool:
        """With recompute: nothing happens to the slot, and the prompt is prefilled again into another one."""
        one = self._any()
        if one is None:
            return False
        self._end(one)
        return self.start()

    def swap(self) -> bool:
        """Swapped out or sent to another machine: folded, and the state goes elsewhere with its count."""
        one = self._any()
        if one is None:
            return False
        self.walk.fold([one])
        assert state_error(self.walk, one) < 1e-9
        state = self.walk.pool[one.slot].clone()
        self.walk.pool[one.slot] = torch.nan
        self.walk.pool[one.slot], self.walk.state_tokens[one.slot] = state, one.tokens
        return True

    def finish(self) -> bool:
        if len(self.live) < 2:
            return False
        self._end(self.live[0])
        return True

    def idle(self) -> bool:
        """A step without tokens touches nothing; the accepted count still refers to the last call with some."""
        if not self.live:
            return False
        before = [x.clone() for x in (self.walk.pool, self.walk.ring, self.walk.state_tokens)]
        self.walk.decode(self.live, [0] * len(self.live))
        after = (self.walk.pool, self.walk.ring, self.walk.state_tokens)
        assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(before, after, strict=True))
        return True


def test_everything_that_may_happen_to_a_slot() -> None:
    seen = set()
    for seed in range(5):
        seen |= Script(seed).run(60)
    assert seen == {
        "start", "chunk", "decode", "tree", "checkpoint", "hit", "fork", "preempt", "swap", "finish", "idle",
    }  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_scripts(seed: int) -> None:
    Script(seed).run(300)


def test_a_forgotten_count_shows() -> None:
    """A prompt that does not set state_tokens of its slot: entries of the slot's last owner count as live."""
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(5):
            Script(seed, forgets=True).run(60)

    errors = []
    for is_counted in (True, False):
        walk = Walk(Shape((1, 1, 2), 6, 4, torch.float64))
        owner = walk.start(1, prompt=1)
        for _ in range(6):
            walk.decode([owner])
        one = Sequence(1, torch.zeros(2, 6, 4).double())
        walk.prefill(one, 7, is_first=True, is_counted=is_counted)
        walk.decode([one])
        errors.append(error_of(one))
    assert errors[0] < 1e-12 and errors[1] > 1e-3
