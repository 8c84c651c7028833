"""Rows of a pool that a call starts from, and the rows that it leaves: on the device, without a wait."""

import torch
from torch import Tensor

from gdn.ops.context import reference


class Slots:
    """Locations of a call's sequences in a pool.

    Parameters
    ----------
    indices : Tensor [>= N] or None
        Slot of each sequence; None = 0, 1, 2, ...
    has_initial_state : Tensor [>= N] of bool or None
        False = the sequence starts from zero.
    null_slot, count : int
        Largest slot that means padding; N.
    device : torch.device

    Attributes
    ----------
    private : Tensor [N] of int32
        Slot of each sequence in a pool of N rows that is this call's own; -1 = padding.
    is_live : Tensor [N] of bool
        Which sequences are not padding.
    """

    def __init__(
        self, indices: Tensor | None, has_initial_state: Tensor | None, null_slot: int, count: int, device: torch.device
    ) -> None:
        own = torch.arange(count, dtype=torch.int32, device=device)
        self.indices: Tensor = (own if indices is None else indices[:count]).long()
        self.null_slot = null_slot
        self.is_live = live(indices, null_slot, count, device)
        self.private = own if indices is None else torch.where(self.is_live, own, -1)
        self.is_continued = self.is_live
        if has_initial_state is not None:
            self.is_continued = self.is_live & has_initial_state[:count]

    def start(self, pool: Tensor | None, into: Tensor) -> None:
        """Fills `into` [N, ...] with the sequences' rows of the pool, zeros where they start from zero."""
        reference.start(pool, self.indices, self.is_continued, into)

    def store(self, rows: Tensor, pool: Tensor, has_tokens: Tensor) -> None:
        """Writes rows [N, ...] to the pool, but those of padding and of sequences without tokens."""
        reference.store(rows, pool, self.indices, self.is_live & has_tokens, self.null_slot)


def live(indices: Tensor | None, null_slot: int, count: int, device: torch.device) -> Tensor:
    """Mask [N] of the sequences that are not padding."""
    return torch.ones(count, dtype=torch.bool, device=device) if indices is None else indices[:count] > null_slot
