"""What the demo's engine works on: its capacity, its streams, the rows of a step, and the result of a phase."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdn.layers import CachedSequence, Checkpoint
from gdn.layers.host_arrays import at_least


@dataclass(frozen=True)
class EngineSizes:
    """Capacity of an engine.

    Parameters
    ----------
    max_num_sequences, max_seq_len : int
        Sequences at a time, and tokens of one: at most the positions of the model.
    block_size : int
        Tokens of a cache block.
    num_blocks : int, optional
        Blocks of the caches; None = enough for all sequences at their longest.
    num_spec : int
        Largest number of drafts of a sequence; 0 = no speculation.
    num_checkpoints : int
        Prefixes kept for reuse; 0 = none.

    Raises
    ------
    TypeError, ValueError
        Named after the argument.
    """

    max_num_sequences: int
    max_seq_len: int
    block_size: int = 64
    num_blocks: int | None = None
    num_spec: int = 0
    num_checkpoints: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_sequences", "max_seq_len", "block_size"):
            at_least(name, getattr(self, name), 1)
        for name in ("num_spec", "num_checkpoints"):
            at_least(name, getattr(self, name), 0)
        if self.num_blocks is not None:
            at_least("num_blocks", self.num_blocks, 0)

    @property
    def blocks(self) -> int:
        """Blocks of the caches."""
        if self.num_blocks is not None:
            return self.num_blocks
        return self.max_num_sequences * -(-self.max_seq_len // self.block_size)


class StreamLostError(RuntimeError):
    """A step failed after its first launch: what the caches hold of its streams is not known, and they cannot go on."""


@dataclass(eq=False)
class Stream:
    """One sequence that the engine generates.

    Attributes
    ----------
    tokens : list of int
        Prompt and generated tokens. After the prefill the last one is not in the caches yet: the next step takes it.
    num_prompt_tokens, num_computed : int
        Tokens of the prompt; leading tokens that the caches and states hold.
    accepted : int
        Tokens of the last speculative step that were accepted: says which state slot is current.
    is_lost : bool
        Whether a step of the stream failed after its first launch. Such a stream can be finished, and nothing else.
    """

    cached: CachedSequence
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int
    accepted: int = 1
    is_lost: bool = False
    _table: tuple[list[int], NDArray[Any]] | None = None

    def table(self) -> NDArray[Any]:
        """Block table as an array; made anew where it changed."""
        if self._table is None or self._table[0] != self.cached.blocks:
            self._table = list(self.cached.blocks), np.array(self.cached.blocks, dtype=np.int64)
        return self._table[1]


@dataclass(frozen=True)
class Work:
    """Work of one stream in a step: its new tokens, and how many of them are drafts (-1: not a speculative row)."""

    stream: Stream
    tokens: list[int]
    drafts: int = -1
    checkpoint: Checkpoint | None = None

    @property
    def length(self) -> int:
        """Tokens of the sequence, the new ones included."""
        return self.stream.num_computed + len(self.tokens)

    @property
    def is_prompt(self) -> bool:
        """Whether the row works on its prompt."""
        return self.stream.num_computed < self.stream.num_prompt_tokens

    @property
    def num_logits(self) -> int:
        """Its last tokens that get logits: all of a speculative row, one of another."""
        return len(self.tokens) if self.drafts >= 0 else 1


@dataclass(frozen=True)
class Generated:
    """Result of one phase.

    Attributes
    ----------
    tokens : list of list of int
        New tokens of each stream.
    num_tokens : int
        Tokens that the phase is measured by: those of the prompts (of prefill), or the new ones.
    seconds : float
        Wall time, the device's work included; captures of graphs are not.
    """

    tokens: list[list[int]] = field(repr=False)
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all streams together."""
        return self.num_tokens / self.seconds if self.num_tokens else 0.0
