"""The calls of all ranks in one process, one after the other; what they exchange is handed over here.

A rank's call runs up to its first exchange, which keeps what the rank sends and ends the call. Once every rank has sent, all run
again, this time with what was sent, up to the next exchange, and at last to the end. So ranks run the code that they run in
processes of their own, on one device, and a call must make the tensors that it writes anew.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from gdn.distributed import chunk, conv
from gdn.distributed.group import Ranks
from gdn.layers import parallel

Result = TypeVar("Result")


class Place:
    """A rank's number among `ranks`, in place of a process group."""

    def __init__(self, rank: int, ranks: int, received: list[Tensor]) -> None:
        self._rank, self._ranks, self.received = rank, ranks, list(received)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


class _Sent(Exception):
    """Ends a call at an exchange whose other messages are not there yet."""

    def __init__(self, part: Tensor) -> None:
        self.part = part


class _Ranks(Ranks):
    def __init__(self, group: Place, name: str = "group") -> None:
        self.group, self.name = group, name
        self.rank, self.size = group.rank(), group.size()

    def agree(self, *_: Any) -> None:
        pass  # it is an exchange too, which a GPU does not make

    def agree_on_padding(self, *_: Any) -> None:
        pass

    def gather(self, part: Tensor) -> Tensor:
        if not self.group.received:
            raise _Sent(part.clone())
        return self.group.received.pop(0)


@contextmanager
def _handing_over() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (chunk, conv, parallel):
            stack.enter_context(mock.patch.object(module, "Ranks", _Ranks))
        yield


def in_turn(call: Callable[[Any], Result], size: int, exchanges: int = 1) -> list[Result]:
    """Results of `call(group)` of each of `size` ranks, which makes this number of exchanges."""
    received: list[Tensor] = []
    with _handing_over():
        for _ in range(exchanges):
            sent = []
            for rank in range(size):
                try:
                    call(Place(rank, size, received))
                except _Sent as message:
                    sent.append(message.part)
            assert len(sent) == size, f"{len(sent)} of {size} ranks make exchange {len(received)}"
            received.append(torch.stack(sent))
        return [call(Place(rank, size, received)) for rank in range(size)]
