"""Rows of a pool that a call starts from, and the rows that it leaves: on the device, without a wait."""

import torch
from torch import Tensor


class Slots:
    """Where the sequences of a call live in a pool.

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
        self.is_live = torch.ones(count, dtype=torch.bool, device=device) if indices is None else self.indices > null_slot
        self.private = own if indices is None else torch.where(self.is_live, own, -1)
        self.is_continued = self.is_live
        if has_initial_state is not None:
            self.is_continued = self.is_live & has_initial_state[:count]

    def start(self, pool: Tensor | None, into: Tensor) -> None:
        """Fills `into` [N, ...] with the sequences' rows of the pool, zeros where they start from zero."""
        if pool is None or not pool.shape[0]:
            into.zero_()
            return
        into.copy_(pool.index_select(0, torch.where(self.is_continued, self.indices, 0)))
        into.masked_fill_(~self.is_continued.view(-1, *[1] * (into.dim() - 1)), 0)

    def store(self, rows: Tensor, pool: Tensor, has_tokens: Tensor, final_indices: Tensor | None = None) -> None:
        """Writes rows [N, ...] to the pool, but those of padding and of sequences without tokens.

        A row that is not written goes where a written one goes, with the same contents, so that nothing depends on the order;
        where no row is written, slot 0 gets its own bits.
        """
        count = rows.shape[0]
        if not count or not pool.shape[0]:
            return
        target = self.indices if final_indices is None else final_indices[:count].long()
        is_written = self.is_live & has_tokens & (target > self.null_slot)
        shape = [1] * rows.dim()
        if count == 1:
            target = torch.where(is_written, target, 0)
            contents = torch.where(is_written.view(shape), rows.to(pool.dtype), pool.index_select(0, target))
            pool.index_copy_(0, target, contents)
            return
        place = torch.where(is_written, torch.arange(count, device=rows.device), is_written.int().argmax())
        target = torch.where(is_written.any(), target[place], 0)
        contents = rows.to(pool.dtype).index_select(0, place)
        pool.index_copy_(0, target, torch.where(is_written.any().view(shape), contents, pool[:1]))
