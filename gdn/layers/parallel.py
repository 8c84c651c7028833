"""Tensor parallelism: every rank of a group computes its heads and widths of a layer, and the outputs are summed.

A layer that has a group takes the whole model's configuration and holds the share of its rank. Two sums a decoder layer: after
the output projection of the mixer, and after the MLP. Everything else is whole on every rank and gives the same bits there.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from gdn.layers.config import HybridConfig


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
