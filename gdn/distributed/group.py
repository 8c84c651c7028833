"""The ranks of a process group: checks before anything is sent, and the exchanges."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gdn.ops._call import inference, reads_values, without_autocast
from gdn.ops._check import bad_type, bad_value

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the second name is deprecated where the first is

Function = TypeVar("Function", bound=Callable[..., Any])


def without_modes(function: Function) -> Function:
    """A function that records no gradient and that autocast does not change, as the operators; tensors of inference mode are
    written in it."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with inference([*arguments, *options.values()]), without_autocast():
            return function(*arguments, **options)

    return run  # type: ignore[return-value]


class Ranks:
    """This process among those of a group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        ``torch.distributed.group.WORLD`` for all processes. Its time-out is that of the exchanges: a rank that dies or never
        calls makes the others raise.
    name : str
        Argument that errors name.

    Attributes
    ----------
    rank, size : int
        Number of this process in the group, and of its processes.
    """

    def __init__(self, group: Any, name: str = "group") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            bad_value(name, "a process group, after torch.distributed.init_process_group", "no initialised torch.distributed")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            bad_value(name, "a group that this process belongs to", "one that it does not belong to")
        if not isinstance(group, dist.ProcessGroup):
            bad_type(name, "a torch.distributed.ProcessGroup", type(group).__name__)
        self.group, self.name = group, name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def number(self, argument: str, rank: int | None) -> int | None:
        """A rank's number from 0 on; negative ones count from the last rank. None stays None."""
        if rank is None:
            return None
        if isinstance(rank, bool) or not isinstance(rank, int):
            bad_type(argument, "an int or None", type(rank).__name__)
        if not -self.size <= rank < self.size:
            bad_value(argument, f"{-self.size} to {self.size - 1}, or None, in a group of {self.size}", rank)
        return rank % self.size

    def agree(self, device: torch.device, **values: int) -> None:
        """Raises ValueError on every rank where they differ in a value: on the CPU, and with GDN_VALIDATE=1."""
        if self.size == 1 or not reads_values(device):
            return
        rows = self.gather(torch.tensor(list(values.values()), dtype=torch.int64, device=device)).t().tolist()
        for name, row in zip(values, rows, strict=True):
            if len(set(row)) > 1:
                bad_value(self.name, f"ranks whose calls have the same {name}", f"{row}, by rank")

    def gather(self, part: Tensor) -> Tensor:
        """[ranks, ...]: the tensor of every rank, all of one shape and dtype."""
        if self.size == 1:
            return part[None]
        gathered = part.new_empty(self.size, *part.shape)
        _all_gather(gathered.view(-1), part.contiguous().view(-1), group=self.group)
        return gathered

    def gather_rows(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The rows of all ranks one after the other. counts: rows of each rank, known on every host."""
        if self.size == 1:
            return rows
        longest = max(counts)
        padded = rows
        if rows.shape[0] < longest:
            padded = rows.new_zeros(longest, *rows.shape[1:])
            padded[: rows.shape[0]] = rows
        gathered = self.gather(padded)
        if all(count == longest for count in counts):
            return gathered.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
