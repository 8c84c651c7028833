"""Deals the sequences of a step to the forms of attention, and says what each token row is.

What `AttentionMetadata` does not hold (an engine's own metadata may lack it) is computed on the device, layer by layer.

Three forms:

    "paged"     few new tokens, or lengths that only the device knows: every row scores and reads the pages of its sequence
    "ragged"    prefill: indexer keys of the run are gathered to rows, and each query scores its range of them
    "dense"     prefill of a sequence shorter than the threshold: it attends to all positions, and nothing is scored

Adjacent sequences of one form are a run: one call of each operator.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.core.modes import is_empty
from gdn.ops.attention.sparse_attention import MOST_DECODE_TOKENS as MOST_DECODE_TOKENS


@dataclass(frozen=True)
class Run:
    """Adjacent sequences that one call of each operator serves. Both ranges are [start, stop)."""

    form: str
    sequences: slice
    tokens: slice
    max_query_len: int
    max_seq_len: int
    seq_lens: tuple[int, ...] | None  # on the host; None in a paged run
    query_lens: tuple[int, ...] | None

    @property
    def drafts(self) -> int | None:
        """New tokens of every sequence where the host knows that all have as many; else None."""
        if self.query_lens is None:
            return None
        count = self.max_query_len
        return count if count > 0 and all(length == count for length in self.query_lens) else None


def deal(metadata: Any, num_tokens: int, dense_below: int) -> tuple[Run, ...]:
    """Runs of a step, in order of the sequences.

    Parameters
    ----------
    metadata : AttentionMetadata
        Without lengths on the host, and in decode, all rows are one paged run: nothing is read back from the device.
    num_tokens : int
        Rows of the step, padding included. Padding after the last sequence belongs to a paged run alone.
    dense_below : int
        Sequences shorter than this (cached and new tokens) attend densely, unless they are decoded.
    """
    lengths, queries = metadata.seq_lens_host, metadata.query_lens_host
    if lengths is None or queries is None or metadata.max_query_len <= MOST_DECODE_TOKENS:
        sequences = slice(0, metadata.block_tables.shape[0])
        bounds = metadata.max_query_len, metadata.max_seq_len
        return (Run("paged", sequences, slice(0, num_tokens), *bounds, seq_lens=None, query_lens=queries),)
    return _runs(tuple(lengths), tuple(queries), dense_below)


@functools.lru_cache(maxsize=64)  # the layers of a step ask for the same
def _runs(lengths: tuple[int, ...], queries: tuple[int, ...], dense_below: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    first = token = 0
    while first < len(lengths):
        form = _form(lengths[first], queries[first], dense_below)
        last = first + 1
        while last < len(lengths) and _form(lengths[last], queries[last], dense_below) == form:
            last += 1
        part = slice(first, last)
        stop = token + sum(queries[part])
        bounds = max(queries[part]), max(lengths[part])
        runs.append(Run(form, part, slice(token, stop), *bounds, seq_lens=lengths[part], query_lens=queries[part]))
        first, token = last, stop
    return tuple(run for run in runs if run.tokens.stop > run.tokens.start)


def _form(length: int, queries: int, dense_below: int) -> str:
    if queries <= MOST_DECODE_TOKENS:
        return "paged"
    return "dense" if length < dense_below else "ragged"


def token_sequences(metadata: Any, num_tokens: int) -> Tensor:
    """Sequence of each token row, int64 [num_tokens]; padding after the last sequence has the last one."""
    given: Tensor | None = getattr(metadata, "token_sequences", None)
    if given is not None:
        return given
    ends = metadata.query_start_loc[1:]
    rows = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, rows, right=True).clamp_(max=max(0, ends.shape[0] - 1))


def visible_keys(metadata: Any, positions: Tensor, ratio: int) -> Tensor:
    """Indexer keys that each token row sees, int32 [tokens]: whole groups of `ratio` tokens up to its own; 0 for padding."""
    given: Tensor | None = getattr(metadata, "visible_keys", None)
    if given is not None and metadata.index_ratio == ratio:
        return given
    counts = torch.where(metadata.slot_mapping < 0, 0, positions + 1)
    return (counts if ratio == 1 else counts // ratio).int()


def compressed_slots(metadata: Any, ratio: int) -> tuple[Tensor, Tensor]:
    """Slot of each token row in the rings of raw keys, and row of its group in the indexer's pages; negative = padding."""
    ring_slots, group_slots = getattr(metadata, "ring_slots", None), getattr(metadata, "group_slots", None)
    if ring_slots is not None and group_slots is not None and metadata.index_ratio == ratio:
        return ring_slots, group_slots
    slots = metadata.slot_mapping
    if is_empty(metadata.sequence_slots.shape[0]):  # all rows are padding
        return torch.full_like(slots, -1, dtype=metadata.sequence_slots.dtype), torch.full_like(slots, -1)
    sequences = token_sequences(metadata, slots.shape[0])
    return torch.where(slots < 0, -1, metadata.sequence_slots[sequences]), slots.div(ratio, rounding_mode="floor")
