"""Tensor parallelism: every rank of a group computes its heads and widths of a layer, and the outputs are summed.
Context parallelism: every rank computes its rows of a step with prompts, and keeps what later tokens read of all rows.

Tensor-parallel: a layer takes the whole model's configuration and holds the share of its rank. Two sums a decoder layer: after
the output projection of the mixer, and after the MLP. Everything else is whole on every rank and gives the same bits there.
"""

import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn.distributed import Ranks
from gdn.layers.config import HybridConfig
from gdn.layers.host_arrays import refuse


class TensorParallel:
    """The ranks that share a layer.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Group of the ranks, which this process is in; None = one rank.

    Attributes
    ----------
    size, rank : int
        Ranks of the group, and this process's number in it.

    Raises
    ------
    TypeError
        Where the group is something else, such as what `new_group` returns to a process outside of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        given: object = group
        if given is not None and not isinstance(given, dist.ProcessGroup):
            expected = "a torch.distributed.ProcessGroup that this process is in, or None"
            raise TypeError(f"tp_group: expected {expected}, got {type(group).__name__}")
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    def __deepcopy__(self, memo: Any) -> "TensorParallel":
        return self  # a copy of a layer has the same ranks; a group cannot be copied

    def share(self, config: HybridConfig) -> HybridConfig:
        """Sizes of this rank; ValueError, named after the field, where the ranks do not divide a number of heads or a width."""
        return config.per_rank(self.size) if self.size > 1 else config

    def sum(self, part: Tensor) -> Tensor:
        """Sum of the ranks' tensors, in place of this rank's; on a GPU in the order of the current stream, without a wait."""
        if self.size > 1:
            dist.all_reduce(part, group=self.group)
        return part

    def agree(self, choice: Tensor) -> Tensor:
        """The first rank's tensor, in place of this rank's."""
        if self.size > 1:
            dist.broadcast(choice, group_src=0, group=self.group)
        return choice


@dataclass(frozen=True)
class ContextParts:
    """Layout of a step's packed rows on the context-parallel ranks: all have the first ones, and each the next of the others.

    Parameters
    ----------
    stops : tuple of int
        Row after the last one of each rank. The last rank has padding too.
    rank : int
        Rank that the metadata are of.
    shared_rows, shared_sequences : int
        First rows and sequences, those of decode, which every rank computes: less work than an exchange of their states.
    """

    stops: tuple[int, ...]
    rank: int
    shared_rows: int = 0
    shared_sequences: int = 0

    def bounds(self, rank: int, total: int) -> tuple[int, int]:
        """First row of a rank's own part and the row after its last, of `total` rows with padding."""
        first = self.stops[rank - 1] if rank else self.shared_rows
        return first, total if rank == len(self.stops) - 1 else self.stops[rank]

    def take(self, rows: Tensor, rank: int) -> Tensor:
        """Rows of a rank, of all of a step."""
        first, stop = self.bounds(rank, rows.shape[0])
        if first == self.shared_rows:
            return rows[:stop]
        return torch.cat([rows[: self.shared_rows], rows[first:stop]]) if self.shared_rows else rows[first:stop]


@dataclass(frozen=True)
class DealtRows:
    """Query rows of a step that are dealt over context-parallel ranks, and this rank's.

    Parameters
    ----------
    metadata : AttentionMetadata
        This rank's rows: every block of adjacent rows as a sequence of its own, which ends with its last row.
    rows : Tensor [own rows] of int64
        Places of this rank's rows in the step.
    order : Tensor [tokens] of int64
        Place of each row of the step among those of all ranks, one rank after the other.
    counts : tuple of int
        Rows of each rank.
    rank : int
        Rank that `metadata` and `rows` are of.
    """

    metadata: Any
    rows: Tensor
    order: Tensor
    counts: tuple[int, ...]
    rank: int


class ContextParallel:
    """The ranks that share the rows of a prefill step.

    Every rank runs every step, with caches of its own that hold the same (`HybridModel`). Where the metadata of a step has
    `parts`, a rank computes the rows of its part, and the states of sequences are stored on every rank.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Group of the ranks, which this process is in; None = one rank.

    Attributes
    ----------
    size, rank : int
        Ranks of the group, and this process's number in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = None if group is None else Ranks(group, "cp_group")
        self.size, self.rank = (1, 0) if self.ranks is None else (self.ranks.size, self.ranks.rank)

    def __deepcopy__(self, memo: Any) -> "ContextParallel":
        return self

    @property
    def group(self) -> Any:
        return None if self.ranks is None else self.ranks.group

    def parts(self, metadata: Any, argument: str, rows: Tensor, *, own: bool) -> ContextParts | None:
        """Parts of a step's rows; None = each rank computes all.

        ValueError where they are another rank's or of other ranks, or where the argument has other rows than this rank's (own)
        or fewer than all ranks' (not own). All ranks get here, and none goes on where one raises (`Ranks.agree`).
        """
        parts: ContextParts | None = getattr(metadata, "parts", None)
        if parts is None and self.ranks is None:
            return None
        with self.refusing(rows):
            if parts is not None:
                self._check_place("parted", len(parts.stops), parts.rank)
                count, found = parts.shared_rows if own else parts.stops[-1], rows.shape[0]
                if own:
                    first, stop = parts.bounds(self.rank, parts.stops[-1])
                    count += stop - first
                whose, may_have_padding = "this rank's" if own else "those of all ranks", not own or self.rank == self.size - 1
                if found < count or (found > count and not may_have_padding):
                    refuse(argument, f"{'at least ' if may_have_padding else ''}{count} rows ({whose})", found)
        self._agree("parted", () if parts is None else parts.stops, rows)
        return parts

    def dealt(self, metadata: Any, hidden_states: Tensor) -> DealtRows | None:
        """Query rows of attention by rank; None = each rank computes all. Raises as `parts`; hidden_states: rows of all ranks."""
        dealt: DealtRows | None = getattr(metadata, "dealt", None)
        if dealt is None and self.ranks is None:
            return None
        with self.refusing(hidden_states):
            if dealt is not None:
                self._check_place("dealt", len(dealt.counts), dealt.rank)
                if hidden_states.shape[0] != sum(dealt.counts):
                    refuse("hidden_states", f"{sum(dealt.counts)} rows (those of all ranks)", hidden_states.shape[0])
        self._agree("dealt", () if dealt is None else dealt.counts, hidden_states)
        return dealt

    def _check_place(self, what: str, size: int, rank: int) -> None:
        """Raises ValueError where metadata are those of another rank."""
        if size != self.size:
            refuse("metadata", f"rows {what} over {self.size} ranks (cp_group's)", f"over {size}")
        if rank != self.rank:
            refuse("metadata", f"rows {what} for rank {self.rank} (this one, of cp_group)", f"for rank {rank}")

    def _agree(self, what: str, numbers: tuple[int, ...], rows: Tensor) -> None:
        if self.ranks is not None:
            self.ranks.agree(rows.device, {f"{what} rows (a checksum of them)": zlib.crc32(repr(numbers).encode())})

    def refusing(self, rows: Tensor) -> AbstractContextManager[None]:
        """Guards checks of a rank's arguments, as `Ranks.refusing` does."""
        return nullcontext() if self.ranks is None else self.ranks.refusing(rows)

    def agree(self, choice: Tensor) -> Tensor:
        """The first rank's tensor, in place of this rank's."""
        if self.size > 1:
            dist.broadcast(choice, group_src=0, group=self.group)
        return choice

    def own(self, rows: Tensor, parts: ContextParts | None) -> Tensor:
        """This rank's rows of all."""
        return rows if parts is None else parts.take(rows, self.rank)

    def whole(self, rows: Tensor, parts: ContextParts | None, total: int) -> Tensor:
        """All rows of this rank's; one exchange. total: rows of the step, padding included."""
        if parts is None or self.ranks is None:
            return rows
        bounds = [parts.bounds(rank, total) for rank in range(self.size)]
        shared = rows[: parts.shared_rows]
        counts = tuple(stop - first for first, stop in bounds)
        gathered = self.ranks.gather_rows(rows[parts.shared_rows :], counts, "hidden_states")
        return torch.cat([shared, gathered]) if parts.shared_rows else gathered
