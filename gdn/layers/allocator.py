"""One allocator over all caches of a hybrid model: sequences, forks, and prefixes kept for reuse."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from gdn.layers.caches import HybridCaches
from gdn.layers.host_arrays import at_least, refuse
from gdn.layers.metadata import CHECKPOINT_MULTIPLE
from gdn.layers.pools import CacheFullError as CacheFullError
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


class CacheAllocator:
    """Owner of all blocks and slots of `HybridCaches`.

    A block that is full may have several owners; a sequence writes to the rows of its own alone. Every method either does all
    that it says or raises and changes nothing; where room is short, kept prefixes are dropped, the longest unused one first.
    Single-threaded.

    Parameters
    ----------
    caches : HybridCaches
        Caches to deal out; copies of blocks and states run on their device, on the current stream.

    Examples
    --------
    >>> import torch
    >>> from gdn.layers import CacheAllocator, HybridCaches, HybridConfig
    >>> config = HybridConfig(
    ...     vocab_size=8, hidden_size=8, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
    ...     num_attention_heads=1, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=1,
    ...     linear_key_head_dim=4, linear_value_head_dim=4,
    ... )
    >>> allocator = CacheAllocator(HybridCaches(config, num_blocks=4, block_size=16, max_num_sequences=2))
    >>> sequence = allocator.add(20)
    >>> sequence.blocks, sequence.state_slots, allocator.num_free_blocks
    ([0, 1], (0,), 2)
    >>> allocator.extend(sequence, 13)
    >>> sequence.blocks
    [0, 1, 2]
    """

    def __init__(self, caches: HybridCaches) -> None:
        self.caches = caches
        self.block_size = caches.kv.block_size
        self._blocks = Pool("blocks", 0, caches.kv.num_blocks)
        self._states = Pool("state slots", caches.gdn.null_slot + 1, caches.gdn.num_slots)
        self._slots = Pool("sequence slots", 0, caches.max_num_sequences)
        self._kept: OrderedDict[bytes, Checkpoint] = OrderedDict()  # the longest unused first

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return self._blocks.num_free

    @property
    def num_free_state_slots(self) -> int:
        """State slots without an owner."""
        return self._states.num_free

    @property
    def num_free_sequences(self) -> int:
        """Sequence slots without an owner."""
        return self._slots.num_free

    @property
    def num_kept(self) -> int:
        """Prefixes that are kept for reuse."""
        return len(self._kept)

    def add(self, num_tokens: int) -> CachedSequence:
        """New sequence with room for `num_tokens` tokens.

        Its slots hold whatever their last owner left: prefill starts from zeros with `has_initial_state` False.

        Raises
        ------
        CacheFullError
            Nothing was taken then.
        """
        at_least("num_tokens", num_tokens, 0)
        return self._add(num_tokens, None)

    def add_prompt(self, prompt: Sequence[int]) -> CachedSequence:
        """New sequence with room for a prompt, which starts from the longest kept prefix of it.

        The first `num_cached_tokens` tokens of the result are in the caches; at least one token of the prompt is not, so that
        there are logits to compute. The state after the prefix is in the first of its state slots.

        Raises
        ------
        CacheFullError
            Nothing was taken then.
        """
        key = None
        for length in sorted({kept.num_tokens for kept in self._kept.values()}, reverse=True):
            if length < len(prompt) and (tried := prefix_key(prompt[:length])) in self._kept:
                key = tried
                break
        if key is None:
            return self._add(len(prompt), None)
        checkpoint = self._kept.pop(key)  # out of reach of what makes room
        try:
            return self._add(len(prompt), checkpoint)
        except CacheFullError:  # perhaps there is room without the prefix
            pass
        finally:
            self._kept[key] = checkpoint
        return self._add(len(prompt), None)

    def extend(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Makes room for `num_tokens` more tokens of a sequence.

        Raises
        ------
        CacheFullError
            The sequence is as it was then.
        """
        self.extend_all([sequence], [num_tokens])

    def extend_all(self, sequences: Sequence[CachedSequence], num_tokens: Sequence[int]) -> None:
        """Makes room for more tokens of several sequences: of all of them or of none.

        Raises
        ------
        CacheFullError
            All sequences are as they were then.
        """
        if len(set(sequences)) != len(sequences):
            refuse("sequences", "each sequence once", f"{len(sequences)} sequences, {len(set(sequences))} different")
        missing = []
        for sequence, count in zip(sequences, num_tokens, strict=True):
            self._check_live("sequence", sequence)
            at_least("num_tokens", count, 0)
            missing.append(self._blocks_of(sequence.num_tokens + count) - len(sequence.blocks))
        self._make_room(sum(missing), 0)
        taken = iter(self._blocks.take(sum(missing)))
        for sequence, count, blocks in zip(sequences, num_tokens, missing, strict=True):
            sequence.blocks += [next(taken) for _ in range(blocks)]
            sequence.num_tokens += count

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Gives back the blocks after the first `num_tokens` tokens, for example after drafts were rejected.

        The last block is copied where another owner still needs its dropped rows.

        Raises
        ------
        CacheFullError
            There is no block for that copy; the sequence is as it was then.
        """
        self._check_live("sequence", sequence)
        at_least("num_tokens", num_tokens, 0)
        if num_tokens > sequence.num_tokens:
            refuse("num_tokens", f"at most {sequence.num_tokens}, the sequence's tokens", num_tokens)
        kept = self._blocks_of(num_tokens)
        is_cut = num_tokens < sequence.num_tokens and num_tokens % self.block_size != 0
        if is_cut and self._blocks.owners(sequence.blocks[kept - 1]) > 1:
            last = sequence.blocks[kept - 1]
            self._make_room(1, 0)
            with self._taken(self._blocks, 1) as (own,):
                self.caches.copy_block(last, own)
            sequence.blocks[kept - 1] = own
            self._blocks.release([last])
        self._blocks.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        sequence.num_tokens = num_tokens

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """New sequence that continues where another is now: full blocks are shared, the last one and the states are copied.

        All tokens of the sequence are in the caches (the caller's duty). The copy has the same contents in all its state slots:
        it goes on with the other's number of accepted tokens.

        Raises
        ------
        CacheFullError
            Nothing was taken then.
        """
        self._check_live("sequence", sequence)
        gdn, full = self.caches.gdn, sequence.num_tokens // self.block_size
        rest = sequence.blocks[full:]
        with ExitStack() as stack:
            (slot,) = stack.enter_context(self._taken(self._slots, 1))
            self._make_room(len(rest), gdn.slots_per_sequence)
            own = stack.enter_context(self._taken(self._blocks, len(rest)))
            states = stack.enter_context(self._taken(self._states, gdn.slots_per_sequence))
            for source, target in zip(rest, own, strict=True):
                self.caches.copy_block(source, target)
            for source, target in zip(sequence.state_slots, states, strict=True):
                gdn.copy_slot(source, target)
            self.caches.indexer.copy_ring(sequence.slot, slot)
        shared = sequence.blocks[:full]
        self._blocks.share(shared)
        return CachedSequence(slot, tuple(states), [*shared, *own], sequence.num_tokens, sequence.num_cached_tokens)

    def free(self, sequence: CachedSequence) -> None:
        """Gives back all that a sequence holds; kept prefixes of it stay."""
        self._check_live("sequence", sequence)
        sequence.is_live = False
        self._blocks.release(sequence.blocks)
        self._states.release(sequence.state_slots)
        self._slots.release([sequence.slot])
        sequence.blocks, sequence.num_tokens = [], 0

    def checkpoint(self, sequence: CachedSequence, num_tokens: int) -> Checkpoint:
        """Reserves a state slot for the state of a sequence after its first `num_tokens` tokens.

        The caller passes the slot to the prefill of these tokens (`checkpoint_slots` of `GDNMetadataBuilder.build`), then
        calls `keep`, or `drop` where the prefill was not done.

        Raises
        ------
        CacheFullError
            Nothing was taken then.
        ValueError
            `num_tokens` is no positive multiple of 64 (and of the indexer's ratio), or the sequence is shorter.
        """
        self._check_live("sequence", sequence)
        ratio = self.caches.indexer.ratio
        at_least("num_tokens", num_tokens, 0)
        if num_tokens < 1 or num_tokens % CHECKPOINT_MULTIPLE or num_tokens % ratio:
            refuse("num_tokens", f"a positive multiple of {CHECKPOINT_MULTIPLE} (and of index_ratio {ratio})", num_tokens)
        if num_tokens > sequence.num_tokens:
            refuse("num_tokens", f"at most {sequence.num_tokens}, the sequence's tokens", num_tokens)
        self._make_room(0, 1)
        (slot,) = self._states.take(1)
        blocks = tuple(sequence.blocks[: self._blocks_of(num_tokens)])
        self._blocks.share(blocks)
        return Checkpoint(slot, num_tokens, blocks)

    def keep(self, checkpoint: Checkpoint, prefix: Sequence[int]) -> None:
        """Offers a checkpoint, whose state is written by now, to prompts that begin with `prefix`.

        Where that prefix is kept already, the checkpoint is dropped.
        """
        self._check_live("checkpoint", checkpoint)
        if len(prefix) != checkpoint.num_tokens:
            refuse("prefix", f"{checkpoint.num_tokens} tokens, the checkpoint's", f"{len(prefix)} tokens")
        if any(checkpoint is kept for kept in self._kept.values()):
            refuse("checkpoint", "one that is not kept yet", checkpoint)
        key = prefix_key(prefix)
        if key in self._kept:
            self._kept.move_to_end(key)
            self._drop(checkpoint)
        else:
            self._kept[key] = checkpoint

    def drop(self, checkpoint: Checkpoint) -> None:
        """Gives back what a checkpoint holds, kept or not."""
        self._check_live("checkpoint", checkpoint)
        for key, kept in self._kept.items():
            if kept is checkpoint:
                del self._kept[key]
                break
        self._drop(checkpoint)

    def drop_all_kept(self) -> None:
        """Gives back all kept prefixes."""
        while self._kept:
            self._drop(self._kept.popitem(last=False)[1])

    def _add(self, num_tokens: int, checkpoint: Checkpoint | None) -> CachedSequence:
        gdn = self.caches.gdn
        cached = 0 if checkpoint is None else checkpoint.num_tokens
        shared = () if checkpoint is None else checkpoint.blocks[: cached // self.block_size]
        missing = self._blocks_of(num_tokens) - len(shared)
        with ExitStack() as stack:
            (slot,) = stack.enter_context(self._taken(self._slots, 1))
            self._make_room(missing, gdn.slots_per_sequence)
            own = stack.enter_context(self._taken(self._blocks, missing))
            states = stack.enter_context(self._taken(self._states, gdn.slots_per_sequence))
            if checkpoint is not None:
                if cached % self.block_size:
                    self.caches.copy_block(checkpoint.blocks[-1], own[0])
                gdn.copy_slot(checkpoint.slot, states[0])
        self._blocks.share(shared)
        return CachedSequence(slot, tuple(states), [*shared, *own], num_tokens, cached)

    def _make_room(self, blocks: int, states: int) -> None:
        """Drops kept prefixes until so much is free; none where even dropping all would not do, or where none need go."""
        if not self._kept or (blocks <= self._blocks.num_free and states <= self._states.num_free):
            return
        uses = Counter(block for kept in self._kept.values() for block in kept.blocks)
        reclaimable = sum(self._blocks.owners(block) == count for block, count in uses.items())
        if blocks > self._blocks.num_free + reclaimable or states > self._states.num_free + len(self._kept):
            return
        while blocks > self._blocks.num_free or states > self._states.num_free:
            self._drop(self._kept.popitem(last=False)[1])

    def _drop(self, checkpoint: Checkpoint) -> None:
        checkpoint.is_live = False
        self._blocks.release(checkpoint.blocks)
        self._states.release([checkpoint.slot])

    @contextmanager
    def _taken(self, pool: Pool, count: int) -> Iterator[list[int]]:
        """Ids that go back to the pool where the body fails."""
        ids = pool.take(count)
        try:
            yield ids
        except BaseException:
            pool.release(ids)
            raise

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_live(self, name: str, holder: CachedSequence | Checkpoint) -> None:
        if not holder.is_live:
            refuse(name, "one that was not freed", holder)


def prefix_key(tokens: Sequence[int]) -> bytes:
    """Key of a prefix: its token ids."""
    return np.asarray(tokens, dtype=np.int64).tobytes()
