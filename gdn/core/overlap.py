"""Shared elements of tensors: a written tensor must not overlap another argument."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

_MAX_WORK = 100_000  # steps of numpy's exact solver; layouts that need more count as overlapping


def span_bytes(tensor: Tensor) -> int:
    """Number of bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def meeting(spans: Iterable[tuple[int, int, bool, int]]) -> list[tuple[int, int]]:
    """Pairs of tensors whose addresses meet, the first of each pair written, in order. Only these can share an element.

    spans: of each tensor the address, the end, whether it is written, and its number.
    """
    met: list[tuple[int, int]] = []
    before: list[tuple[int, int, bool, int]] = []
    end = written_end = 0  # the last end of a tensor, and of a written one, that begins earlier
    for span in sorted(spans):
        start, last, is_written, number = span
        if start == last:
            continue
        if start < (end if is_written else written_end):
            for _, other_last, other_is_written, other in before:
                if start < other_last:
                    met += [(number, other)] if is_written else []
                    met += [(other, number)] if other_is_written else []
        before.append(span)
        end = max(end, last)
        if is_written:
            written_end = max(written_end, last)
    return sorted(met)


class _Layout:
    """Strided tensor in numpy's form: address (above 0), shape and strides. Its memory is never read."""

    def __init__(self, tensor: Tensor, address: int) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (address, True),
        }


def shares_element(first: Tensor, second: Tensor, first_address: int, second_address: int) -> bool:
    """Whether two tensors of one device, at these addresses, share a byte. Exact for strided views of one buffer."""
    lower = first if first_address <= second_address else second  # the span of the other does not matter
    if span_bytes(lower) <= abs(second_address - first_address) or 0 in (first.numel(), second.numel()):
        return False
    try:
        base = min(first_address, second_address) - 1  # a tensor without memory may be at 0, which numpy takes for none
        a, b = (np.asarray(_Layout(x, at - base)) for x, at in ((first, first_address), (second, second_address)))
        return bool(np.shares_memory(a, b, max_work=_MAX_WORK))  # type: ignore[arg-type]  # the stub knows only two values
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory. Exact for nested dimensions (slices and transposes of a buffer).

    Where a compiler keeps sizes or strides symbolic, only a stride of 0 counts.
    """
    if type(tensor) is Tensor and tensor.is_contiguous():
        return False
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    if type(tensor) is not Tensor and not all(isinstance(one, int) for dim in dims for one in dim):
        return any(isinstance(stride, int) and stride == 0 and not isinstance(size, int) for stride, size in dims)
    if tensor.numel() <= 1:
        return False
    reach = 1  # elements spanned by the dimensions so far
    for stride, size in sorted(dims):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False
