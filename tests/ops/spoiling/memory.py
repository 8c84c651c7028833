"""Places of tensors in memory: views of one buffer, overlaps, copies that keep the layout, and snapshots of whole storages."""

import math
from collections.abc import Iterable

import torch

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes
FILL = 0xA5  # of the bytes between


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def side_by_side(*tensors: Tensor, lead: int = 1, extra: int = 0) -> Tensor | tuple[Tensor, ...]:
    """Copies of tensors in the rows of one buffer, each row at a multiple of 16 bytes; one tensor for one.

    A row is what the first `lead` dims choose; all tensors have equally many. extra: bytes at the end of each row.
    """
    rows = math.prod(tensors[0].shape[:lead])
    sizes = [math.prod(x.shape[lead:]) * x.element_size() for x in tensors]
    if rows == 0 or 0 in sizes:
        copies = tuple(x.clone() for x in tensors)
        return copies if len(copies) > 1 else copies[0]
    buffer = torch.full((rows, sum(map(_rounded_up, sizes)) + _rounded_up(extra)), FILL, dtype=torch.uint8)
    views, start = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        view = buffer[:, start : start + size].view(x.dtype).view(x.shape)
        view.copy_(x)
        views.append(view)
        start += _rounded_up(size)
    return tuple(views) if len(views) > 1 else views[0]


def overlapping(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous copies in one buffer, the second at the last multiple of 16 bytes that is still inside the first."""
    size = first.numel() * first.element_size()
    start = (size - 1) // ALIGNMENT * ALIGNMENT
    buffer = torch.full((max(size, start + second.numel() * second.element_size()),), FILL, dtype=torch.uint8)
    left, right = (
        buffer[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape) for at, x in ((0, first), (start, second))
    )
    right.copy_(second)
    left.copy_(first)
    return left, right


def adjacent(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous copies in one buffer, the second from the first multiple of 16 bytes after the first."""
    size = first.numel() * first.element_size()
    start = _rounded_up(size)
    buffer = torch.full((start + second.numel() * second.element_size(),), FILL, dtype=torch.uint8)
    views = []
    for at, x in ((0, first), (start, second)):
        view = buffer[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        views.append(view.copy_(x))
    return views[0], views[1]


def shifted(tensor: Tensor) -> Tensor:
    """A contiguous copy that starts one element after a multiple of 16 bytes."""
    buffer = torch.zeros(tensor.numel() + ALIGNMENT, dtype=tensor.dtype)
    return buffer[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: Tensor, lead: int) -> Tensor:
    """A copy whose rows are one element further apart than they are long."""
    rows, inner = math.prod(tensor.shape[:lead]), math.prod(tensor.shape[lead:])
    view = torch.zeros(rows, inner + 1, dtype=tensor.dtype)[:, :inner].view(tensor.shape)
    return view.copy_(tensor)


def last_strided(tensor: Tensor) -> Tensor:
    """A copy whose last two dims are swapped in memory (1-D: every second element of a buffer)."""
    if tensor.dim() > 1 and tensor.shape[-2] > 1:
        return tensor.mT.clone(memory_format=torch.contiguous_format).mT
    view = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
    return view.copy_(tensor)


def squeezed_rows(tensor: Tensor, step: int) -> Tensor:
    """The same shape over less memory: neighbours along the first dim start `step` elements apart, and overlap."""
    contiguous = tensor.clone(memory_format=torch.contiguous_format)
    return contiguous.as_strided(tensor.shape, (step, *contiguous.stride()[1:]))


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def on_storage(tensor: Tensor, data: Tensor) -> Tensor:
    """The view that `tensor` is of its storage, of other bytes."""
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(data.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_plain(tensor: Tensor) -> bool:
    """Whether there are bytes to look at."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


class Snapshot:
    """The bytes of all storages under some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # address -> live bytes, their copy
        for tensor in tensors:
            if is_plain(tensor) and tensor.untyped_storage().nbytes():
                address = tensor.untyped_storage().data_ptr()
                if address not in self.before:
                    with torch.no_grad():
                        live = storage_bytes(tensor.detach())
                        self.before[address] = live, live.clone()

    def is_kept(self) -> bool:
        return all(torch.equal(live, copy) for live, copy in self.before.values())

    def copied(self, tensor: Tensor) -> Tensor:
        """The tensor as it was."""
        if tensor.untyped_storage().data_ptr() not in self.before:
            return tensor
        return on_storage(tensor, self.before[tensor.untyped_storage().data_ptr()][1])

    def is_kept_but(self, tensor: Tensor, mask: Tensor) -> None:
        """Notes the elements that may have changed: later `is_kept` takes them as they are now."""
        if tensor.untyped_storage().data_ptr() in self.before and tensor.numel():
            old = self.copied(tensor)
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
            now = tensor.detach().view(bits)
            old.view(bits).copy_(torch.where(mask, now, old.view(bits)))


def duplicated(tensors: dict[int, Tensor], cache: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """A copy with the layout of `tensor`; tensors of one storage get one copy of it. tensors, cache: of this session."""
    if id(tensor) in tensors:
        return tensors[id(tensor)]
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in cache:
        cache[storage.data_ptr()] = storage_bytes(tensor.detach()).clone()
    tensors[id(tensor)] = on_storage(tensor, cache[storage.data_ptr()])
    return tensors[id(tensor)]
