"""Who owns the blocks and slots of the caches: pools, live sequences and checkpoints, and the prefixes that are kept.

Bookkeeping alone: nothing here reads or writes a cache.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gdn.layers.host_arrays import refuse
from gdn.layers.pools import Pool


@dataclass(eq=False)
class CachedSequence:
    """Share of the caches that one sequence holds. Made, changed and freed by `CacheAllocator` alone.

    Attributes
    ----------
    slot : int
        Sequence slot, for the rings of raw indexer keys.
    state_slots : tuple of int
        1 + num_spec slots of the Gated DeltaNet states.
    blocks : list of int
        Blocks of tokens, in order: the sequence's block table.
    num_tokens : int
        Tokens that the blocks are for.
    num_cached_tokens : int
        Leading tokens of the prompt that a kept prefix supplied: they need no prefill.
    is_live : bool
        False after the sequence was freed.
    """

    slot: int
    state_slots: tuple[int, ...]
    blocks: list[int]
    num_tokens: int
    num_cached_tokens: int = 0
    is_live: bool = True


@dataclass(eq=False)
class Checkpoint:
    """A prefix of a sequence kept for reuse: the state after `num_tokens` tokens, and the blocks of these tokens.

    Attributes
    ----------
    slot : int
        State slot: what `checkpoint_slots` of the prefill names.
    num_tokens : int
        Length of the prefix, a multiple of 64.
    blocks : tuple of int
        Blocks of these tokens.
    is_live : bool
        False after the checkpoint was dropped.
    """

    slot: int
    num_tokens: int
    blocks: tuple[int, ...] = field(repr=False)
    is_live: bool = True


class Ledger:
    """Owners of blocks, state slots and sequence slots.

    Parameters
    ----------
    blocks, states, slots : Pool

    Attributes
    ----------
    kept : OrderedDict of bytes to Checkpoint
        Kept prefixes by their tokens, the longest unused one first.
    live : set of CachedSequence and Checkpoint
        All that own something.
    """

    def __init__(self, blocks: Pool, states: Pool, slots: Pool) -> None:
        self.blocks, self.states, self.slots = blocks, states, slots
        self.kept: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self.live: set[CachedSequence | Checkpoint] = set()

    def check_live(self, name: str, holder: CachedSequence | Checkpoint) -> None:
        """Raises ValueError, named after the argument, where a sequence or checkpoint was freed or is another allocator's."""
        if not holder.is_live:
            refuse(name, "one that was not freed", holder)
        if holder not in self.live:
            refuse(name, "one of this allocator", holder)

    def make_room(self, blocks: int, states: int, below: int | None = None) -> None:
        """Drops kept prefixes until so much is free; none where even dropping all would not do, or where none need go.

        below: the states must be slots below it, which have a ring; None = any.
        """
        free = self.states.num_free_below(below)
        if not self.kept or (blocks <= self.blocks.num_free and states <= free):
            return
        uses = Counter(block for kept in self.kept.values() for block in kept.blocks)
        reclaimable = sum(self.blocks.owners(block) == count for block, count in uses.items())
        of_states = sum(below is None or kept.slot < below for kept in self.kept.values())
        if blocks > self.blocks.num_free + reclaimable or states > free + of_states:
            return
        while blocks > self.blocks.num_free:
            self.drop_oldest()
        while states > self.states.num_free_below(below):
            self.drop(next(kept for kept in self.kept.values() if below is None or kept.slot < below))

    def must_copy(self, block: int, num_tokens: int) -> bool:
        """Whether another owner needs the rows of a block after `num_tokens` tokens of its sequence.

        Kept prefixes are dropped where no block is free for a copy: until one is free, or until nobody needs these rows.
        """
        if self.blocks.owners(block) == 1 or not self._others(block, num_tokens):
            return False
        needing = sum(kept.num_tokens > num_tokens and block in kept.blocks for kept in self.kept.values())
        if self._others(block, num_tokens) > needing:
            self.make_room(1, 0)
            return True
        while self._others(block, num_tokens) and not self.blocks.num_free:
            self.drop_oldest()
        return self._others(block, num_tokens) > 0

    def _others(self, block: int, num_tokens: int) -> int:
        """Owners of a block that need rows after `num_tokens` tokens, besides the one that asks. Checkpoints of fewer do not."""
        content = sum(isinstance(one, Checkpoint) and one.num_tokens <= num_tokens and block in one.blocks for one in self.live)
        return self.blocks.owners(block) - 1 - content

    def drop(self, checkpoint: Checkpoint) -> None:
        """Gives back what a checkpoint holds, kept or not."""
        for key, kept in self.kept.items():
            if kept is checkpoint:
                del self.kept[key]
                break
        checkpoint.is_live = False
        self.live.remove(checkpoint)
        self.blocks.release(checkpoint.blocks)
        self.states.release([checkpoint.slot])

    def drop_oldest(self) -> None:
        """Drops the kept prefix that was not used for the longest time."""
        self.drop(next(iter(self.kept.values())))

    @contextmanager
    def taken(self, pool: Pool, count: int, below: int | None = None) -> Iterator[list[int]]:
        """Ids that go back to the pool where the body fails. below: as for `Pool.take`."""
        ids = pool.take(count, below)
        try:
            yield ids
        except BaseException:
            pool.release(ids)
            raise

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """The ledger is what it was before where the body fails; the body therefore may not write to the caches."""
        pools = (self.blocks, self.states, self.slots)
        saved = [pool.saved() for pool in pools]
        kept, live = list(self.kept.items()), set(self.live)
        try:
            yield
        except BaseException:
            for pool, one in zip(pools, saved, strict=True):
                pool.restore(one)
            self.kept.clear()
            self.kept.update(kept)
            for holder in self.live ^ live:  # made, or dropped, by the body
                holder.is_live = holder in live
            self.live.clear()
            self.live.update(live)
            raise
