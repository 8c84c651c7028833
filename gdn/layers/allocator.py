"""One allocator over all caches of a hybrid model: sequences, forks, and prefixes kept for reuse."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from gdn.layers.caches import HybridCaches
from gdn.layers.host_arrays import as_tokens, at_least, refuse
from gdn.layers.ledger import CachedSequence as CachedSequence
from gdn.layers.ledger import Checkpoint as Checkpoint
from gdn.layers.ledger import Ledger
from gdn.layers.metadata import CHECKPOINT_MULTIPLE
from gdn.layers.pools import CacheFullError as CacheFullError
from gdn.layers.pools import Pool


class CacheAllocator:
    """Owner of all blocks and slots of `HybridCaches`.

    A block that is full may have several owners; a sequence writes to the rows of its own alone. Every method either does all
    that it says or raises and changes nothing; where a copy on the device fails, kept prefixes may be dropped all the same. Where
    room is short, kept prefixes are dropped, the longest unused one first. Single-threaded.

    A copy, or a pickle, of an allocator has caches of its own. Sequences and checkpoints belong to the allocator that made them:
    they are copied together with it, in one object, or are not taken by the copy.

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
        # Slots of sequences must be below it: those that have a ring. None = any.
        self._below = caches.gdn.num_rings if caches.gdn.has_replay else None
        self._owned = Ledger(
            Pool("blocks", 0, caches.kv.num_blocks),
            Pool("state slots", caches.gdn.null_slot + 1, caches.gdn.num_slots),
            Pool("sequence slots", 0, caches.max_num_sequences),
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return self._owned.blocks.num_free

    @property
    def num_free_state_slots(self) -> int:
        """State slots without an owner."""
        return self._owned.states.num_free

    @property
    def num_free_sequences(self) -> int:
        """Sequence slots without an owner."""
        return self._owned.slots.num_free

    @property
    def num_kept(self) -> int:
        """Prefixes that are kept for reuse."""
        return len(self._owned.kept)

    def add(self, num_tokens: int) -> CachedSequence:
        """New sequence with room for `num_tokens` tokens.

        Its slots hold whatever their last owner left: prefill starts from zeros with `has_initial_state` False.

        Raises
        ------
        CacheFullError
            Nothing was taken then.
        ValueError
            The model has no position for the last token.
        """
        at_least("num_tokens", num_tokens, 0)
        self._check_length("num_tokens", num_tokens)
        with self._owned.unchanged_on_failure():
            return self._add(num_tokens, None)

    def add_prompt(self, prompt: Sequence[int], most_cached: int | None = None) -> CachedSequence:
        """New sequence with room for a prompt, which starts from the longest kept prefix of it.

        The first `num_cached_tokens` tokens of the result are in the caches; at least one token of the prompt is not, so that
        there are logits to compute. The state after the prefix is in the first of its state slots.

        Parameters
        ----------
        prompt : sequence of int
            Tokens.
        most_cached : int, optional
            Longest prefix that is taken, where the caller needs the logits of later tokens; 0 = none.

        Raises
        ------
        CacheFullError
            Nothing was taken then.
        TypeError, ValueError
            Named after the argument: a token that is no integer, a prompt that is longer than the positions of the model.
        """
        return self.add_prompts([prompt], None if most_cached is None else [most_cached])[0]

    def add_prompts(self, prompts: Sequence[Sequence[int]], most_cached: Sequence[int] | None = None) -> list[CachedSequence]:
        """A new sequence for each of several prompts, as by `add_prompt`: for all of them or for none.

        Raises
        ------
        CacheFullError
            Nothing was taken and no kept prefix dropped then.
        TypeError, ValueError
            As `add_prompt`.
        """
        if most_cached is not None and len(most_cached) != len(prompts):
            refuse("most_cached", f"{len(prompts)} numbers, one for each prompt", f"{len(most_cached)}")
        given = []
        for prompt in prompts:
            tokens = np.array(as_tokens("prompt", prompt), dtype=np.int64)
            self._check_length("prompt", len(tokens))
            given.append(tokens)
        limits = [len(tokens) - 1 for tokens in given]
        for place, most in enumerate(most_cached or ()):
            at_least("most_cached", most, 0)
            limits[place] = min(limits[place], most)
        with self._owned.unchanged_on_failure():
            taken = [self._add_prompt(tokens, most) for tokens, most in zip(given, limits, strict=True)]
        sequences = [sequence for sequence, _ in taken]
        try:
            # After all bookkeeping, in its order: a later prompt may have taken what an earlier one's prefix still held.
            for sequence, checkpoint in taken:
                if checkpoint is not None:
                    self._copy_prefix(checkpoint, sequence)
        except BaseException:
            for sequence in sequences:
                self.free(sequence)
            raise
        return sequences

    def extend(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Makes room for `num_tokens` more tokens of a sequence.

        Raises
        ------
        CacheFullError
            The sequence is as it was then.
        ValueError
            The model has no position for its last token.
        """
        self.extend_all([sequence], [num_tokens])

    def extend_all(self, sequences: Sequence[CachedSequence], num_tokens: Sequence[int]) -> None:
        """Makes room for more tokens of several sequences: of all of them or of none.

        Raises
        ------
        CacheFullError
            All sequences are as they were then.
        ValueError
            The model has no position for a sequence's last token.
        """
        if len(set(sequences)) != len(sequences):
            refuse("sequences", "each sequence once", f"{len(sequences)} sequences, {len(set(sequences))} different")
        missing = []
        for sequence, count in zip(sequences, num_tokens, strict=True):
            self._owned.check_live("sequence", sequence)
            at_least("num_tokens", count, 0)
            self._check_length("num_tokens", sequence.num_tokens + count)
            missing.append(self._blocks_of(sequence.num_tokens + count) - len(sequence.blocks))
        self._owned.make_room(sum(missing), 0)
        taken = iter(self._owned.blocks.take(sum(missing)))
        for sequence, count, blocks in zip(sequences, num_tokens, missing, strict=True):
            sequence.blocks += [next(taken) for _ in range(blocks)]
            sequence.num_tokens += count

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Gives back the blocks after the first `num_tokens` tokens, for example after drafts were rejected.

        The last block is copied where another owner still needs its dropped rows: a sequence that shares the block, or a
        checkpoint of more tokens. Where no block is free for the copy, kept prefixes are dropped until one is, or until none of
        them needs these rows. What `extend` added goes back without a copy.

        Raises
        ------
        CacheFullError
            There is no block for that copy; the sequence is as it was then.
        """
        self._owned.check_live("sequence", sequence)
        at_least("num_tokens", num_tokens, 0)
        if num_tokens > sequence.num_tokens:
            refuse("num_tokens", f"at most {sequence.num_tokens}, the sequence's tokens", num_tokens)
        kept = self._blocks_of(num_tokens)
        is_cut = num_tokens < sequence.num_tokens and num_tokens % self.block_size != 0
        if is_cut and self._owned.must_copy(last := sequence.blocks[kept - 1], num_tokens):
            with self._owned.taken(self._owned.blocks, 1) as (own,):
                self.caches.copy_block(last, own)
            sequence.blocks[kept - 1] = own
            self._owned.blocks.release([last])
        self._owned.blocks.release(sequence.blocks[kept:])
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
        self._owned.check_live("sequence", sequence)
        gdn, full = self.caches.gdn, sequence.num_tokens // self.block_size
        rest = sequence.blocks[full:]
        with ExitStack() as stack:
            (slot,) = stack.enter_context(self._owned.taken(self._owned.slots, 1))
            self._owned.make_room(len(rest), gdn.slots_per_sequence, self._below)
            own = stack.enter_context(self._owned.taken(self._owned.blocks, len(rest)))
            states = stack.enter_context(self._owned.taken(self._owned.states, gdn.slots_per_sequence, self._below))
            for source, target in zip(rest, own, strict=True):
                self.caches.copy_block(source, target)
            for source, target in zip(sequence.state_slots, states, strict=True):
                gdn.copy_slot(source, target)
            self.caches.indexer.copy_ring(sequence.slot, slot)
        shared = sequence.blocks[:full]
        self._owned.blocks.share(shared)
        copy = CachedSequence(slot, tuple(states), [*shared, *own], sequence.num_tokens, sequence.num_cached_tokens)
        self._owned.live.add(copy)
        return copy

    def free(self, sequence: CachedSequence) -> None:
        """Gives back all that a sequence holds; kept prefixes of it stay."""
        self._owned.check_live("sequence", sequence)
        sequence.is_live = False
        self._owned.live.remove(sequence)
        self._owned.blocks.release(sequence.blocks)
        self._owned.states.release(sequence.state_slots)
        self._owned.slots.release([sequence.slot])
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
        self._owned.check_live("sequence", sequence)
        ratio = self.caches.indexer.ratio
        at_least("num_tokens", num_tokens, 0)
        if num_tokens < 1 or num_tokens % CHECKPOINT_MULTIPLE or num_tokens % ratio:
            refuse("num_tokens", f"a positive multiple of {CHECKPOINT_MULTIPLE} (and of index_ratio {ratio})", num_tokens)
        if num_tokens > sequence.num_tokens:
            refuse("num_tokens", f"at most {sequence.num_tokens}, the sequence's tokens", num_tokens)
        self._owned.make_room(0, 1)
        slot = self._owned.states.take(1)[0] if self._below is None else self._owned.states.take_last()
        blocks = tuple(sequence.blocks[: self._blocks_of(num_tokens)])
        self._owned.blocks.share(blocks)
        checkpoint = Checkpoint(slot, num_tokens, blocks)
        self._owned.live.add(checkpoint)
        return checkpoint

    def keep(self, checkpoint: Checkpoint, prefix: Sequence[int]) -> None:
        """Offers a checkpoint, whose state is written by now, to prompts that begin with `prefix`.

        Where that prefix is kept already, the checkpoint is dropped.
        """
        self._owned.check_live("checkpoint", checkpoint)
        tokens = as_tokens("prefix", prefix)
        if len(tokens) != checkpoint.num_tokens:
            refuse("prefix", f"{checkpoint.num_tokens} tokens, the checkpoint's", f"{len(tokens)} tokens")
        if any(checkpoint is kept for kept in self._owned.kept.values()):
            refuse("checkpoint", "one that is not kept yet", checkpoint)
        key = np.array(tokens, dtype=np.int64).tobytes()
        if key in self._owned.kept:
            self._owned.kept.move_to_end(key)
            self._owned.drop(checkpoint)
        else:
            self._owned.kept[key] = checkpoint

    def drop(self, checkpoint: Checkpoint) -> None:
        """Gives back what a checkpoint holds, kept or not."""
        self._owned.check_live("checkpoint", checkpoint)
        self._owned.drop(checkpoint)

    def drop_all_kept(self) -> None:
        """Gives back all kept prefixes."""
        while self._owned.kept:
            self._owned.drop_oldest()

    def _add_prompt(self, prompt: NDArray[np.int64], most_cached: int) -> tuple[CachedSequence, Checkpoint | None]:
        """The bookkeeping of one prompt: its sequence, and the checkpoint that it starts from."""
        key = None
        for length in sorted({kept.num_tokens for kept in self._owned.kept.values()}, reverse=True):
            if length <= most_cached and (tried := prompt[:length].tobytes()) in self._owned.kept:
                key = tried
                break
        if key is None:
            return self._add(len(prompt), None), None
        checkpoint = self._owned.kept.pop(key)  # out of reach of what makes room
        try:
            with self._owned.unchanged_on_failure():
                return self._add(len(prompt), checkpoint), checkpoint
        except CacheFullError:  # perhaps there is room without the prefix
            pass
        finally:
            self._owned.kept[key] = checkpoint
        return self._add(len(prompt), None), None

    def _add(self, num_tokens: int, checkpoint: Checkpoint | None) -> CachedSequence:
        """The bookkeeping of a new sequence. The caller restores it where this fails."""
        gdn = self.caches.gdn
        cached = 0 if checkpoint is None else checkpoint.num_tokens
        shared = () if checkpoint is None else checkpoint.blocks[: cached // self.block_size]
        missing = self._blocks_of(num_tokens) - len(shared)
        (slot,) = self._owned.slots.take(1)
        self._owned.make_room(missing, gdn.slots_per_sequence, self._below)
        own, states = self._owned.blocks.take(missing), self._owned.states.take(gdn.slots_per_sequence, self._below)
        self._owned.blocks.share(shared)
        sequence = CachedSequence(slot, tuple(states), [*shared, *own], num_tokens, cached)
        self._owned.live.add(sequence)
        return sequence

    def _copy_prefix(self, checkpoint: Checkpoint, sequence: CachedSequence) -> None:
        """The state of a checkpoint, and its last block where that is not full, for a sequence that starts from it."""
        full = checkpoint.num_tokens // self.block_size
        if checkpoint.num_tokens % self.block_size:
            self.caches.copy_block(checkpoint.blocks[-1], sequence.blocks[full])
        self.caches.gdn.copy_slot(checkpoint.slot, sequence.state_slots[0])

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_length(self, name: str, num_tokens: int) -> None:
        most = self.caches.max_seq_len
        if num_tokens > most:
            refuse(name, f"at most {most} tokens of a sequence (max_position_embeddings)", num_tokens)
