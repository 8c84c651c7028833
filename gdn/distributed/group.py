"""The ranks of a process group: checks before anything is sent, and the exchanges."""

import contextlib
import functools
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gdn.core.call import inference, reads_values, without_autocast
from gdn.core.check import bad_type, bad_value

_MOST_VALUES = 30  # of an agreement, whose size is the same for all calls
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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

    def agree(self, device: torch.device, values: Mapping[str, int | float | torch.dtype]) -> None:
        """Raises ValueError on every rank where they differ in a value, or one of them has refused its arguments.

        It comes before every exchange, on the CPU always and on a GPU with GDN_VALIDATE=1, unless a graph is captured. It is an
        exchange by itself: the variable must be set on all ranks or on none.
        """
        if self.size == 1 or not reads_values(device):
            return
        numbers = [_as_int(value) for value in values.values()]
        rows = self._tell(device, [1, zlib.crc32(" ".join(values).encode()), *numbers])
        refusing = [rank for rank, row in enumerate(rows) if not row[0]]
        if refusing:
            bad_value(self.name, "ranks that all accept their arguments", f"an error on rank {', '.join(map(str, refusing))}")
        if len({row[1] for row in rows}) > 1:
            bad_value(self.name, "ranks that make the same call", f"another one on rank {self.rank} than on some others")
        for place, (name, value) in enumerate(values.items(), 2):
            found = [row[place] for row in rows]
            if len(set(found)) > 1:
                shown = [_from_int(number, type(value)) for number in found]
                bad_value(self.name, f"ranks whose calls have the same {name}", f"{shown}, by rank")

    @contextlib.contextmanager
    def refusing(self, *tensors: object) -> Iterator[None]:
        """Guards the checks of a rank's own arguments: where they raise, the other ranks' next `agree` raises too.

        So no rank waits for one that has refused its call, where `agree` runs at all. tensors: arguments, for their device.
        """
        try:
            yield
        except Exception:
            device = next((x.device for x in tensors if isinstance(x, Tensor)), None)
            if self.size > 1 and device is not None and reads_values(device):
                with contextlib.suppress(Exception):  # the error of the arguments is the one to raise
                    self._tell(device, [])
            raise

    def agree_on_padding(self, argument: str, is_live: Tensor) -> None:
        """Raises ValueError on every rank where a sequence is padding on some alone, wherever `agree` runs.

        is_live: which sequences [N] are not padding on this rank.
        """
        if self.size == 1 or not reads_values(is_live.device):
            return
        live = self.gather(is_live.long())
        differs = (live != live[0]).any(0).nonzero().flatten().tolist()
        if differs:
            ranks = (live[:, differs[0]] == 0).nonzero().flatten().tolist()
            expected = "a sequence to be padding on all ranks or on none"
            bad_value(argument, expected, f"sequence {differs[0]}, which is padding on rank {', '.join(map(str, ranks))} alone")

    def _tell(self, device: torch.device, numbers: list[int]) -> list[list[int]]:
        """The numbers of every rank, zeros after the last. No numbers: this rank refuses its call."""
        assert len(numbers) <= 2 + _MOST_VALUES, "all messages have one size"
        message = torch.tensor(numbers + [0] * (2 + _MOST_VALUES - len(numbers)), dtype=torch.int64, device=device)
        rows: list[list[int]] = self.gather(message).tolist()
        return rows

    def gather(self, part: Tensor) -> Tensor:
        """[ranks, ...]: the tensor of every rank, all of one shape and dtype."""
        if self.size == 1:
            return part[None]
        flat = part if part.dim() == 1 and part.is_contiguous() else part.contiguous().view(-1)
        gathered = flat.new_empty(self.size * flat.shape[0])
        _all_gather(gathered, flat, group=self.group)
        return gathered.view(self.size, *part.shape)

    def gather_rows(self, rows: Tensor, counts: tuple[int, ...], argument: str = "rows") -> Tensor:
        """The rows of all ranks one after the other.

        counts: rows of each rank, known on every host; argument: what an error calls the rows.
        """
        if self.size == 1:
            return rows
        with self.refusing(rows):
            if rows.shape[0] != counts[self.rank]:
                bad_value(argument, f"{counts[self.rank]} rows of this rank alone", rows.shape[0])
        checksum, width = zlib.crc32(repr(counts).encode()), rows[:0].flatten(1).shape[1]
        self.agree(rows.device, {"rows by rank (a checksum)": checksum, "numbers in a row": width, "dtype": rows.dtype})
        longest = max(counts)
        padded = rows
        if rows.shape[0] < longest:
            padded = rows.new_zeros(longest, *rows.shape[1:])
            padded[: rows.shape[0]] = rows
        gathered = self.gather(padded)
        if all(count == longest for count in counts):
            return gathered.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _as_int(value: int | float | torch.dtype) -> int:
    """A number or a dtype as an integer of 64 bits, equal for equal values alone."""
    if isinstance(value, torch.dtype):
        return _DTYPES.index(value)
    found: int = struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)
    return found


def _from_int(number: int, kind: type) -> object:
    """The value of which `_as_int` made this number."""
    if kind is torch.dtype:
        return _DTYPES[number]
    return struct.unpack("d", struct.pack("q", number))[0] if kind is float else kind(number)
