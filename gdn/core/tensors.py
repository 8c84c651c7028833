"""Copies and dtypes that every operator needs.

Copies are made after a kernel has been chosen; the reference takes the tensors of the caller.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn.core.check import dtype_name
from gdn.core.modes import address, has_memory
from gdn.runtime import log

ALIGNMENT = 16  # bytes: the widest load or store of a thread, and the unit of bulk copies
EXPANDED = "it repeats the same memory (a stride of 0), which descriptors of bulk tensor copies do not take"


def dtypes_of(**tensors: Tensor | None) -> dict[str, Any]:
    """Fields `<name>_dtype` of a problem; None where a tensor is left out."""
    return {f"{name}_dtype": None if x is None else dtype_name(x.dtype) for name, x in tensors.items()}


def given_of(**tensors: Tensor | None) -> dict[str, Any]:
    """Fields `has_<name>` of a problem: whether a tensor is given."""
    return {f"has_{name}": x is not None for name, x in tensors.items()}


def as_int32(x: Tensor) -> Tensor:
    """x in int32, saturated: a value that does not fit int32 stays outside of every range."""
    return x if x.dtype == torch.int32 else x.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def contiguous_int32(x: Tensor) -> Tensor:
    return as_int32(x).contiguous()


def as_int64(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def common_dtype(*indices: Tensor | None) -> torch.dtype:
    """Dtype in which all slots of a call are compared: int64 where one of them is int64."""
    return torch.int64 if any(x is not None and x.dtype == torch.int64 for x in indices) else torch.int32


def is_aligned(x: Tensor, size: int = ALIGNMENT) -> bool:
    """Whether the last dimension is contiguous and every row starts at a multiple of `size` bytes."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 or address(x) % size:
        return False
    element = x.element_size()
    # Strides of dimensions with one entry are never used.
    return all(x.shape[i] <= 1 or x.stride(i) * element % size == 0 for i in range(x.dim() - 1))


def aligned(name: str, x: Tensor, size: int = ALIGNMENT) -> Tensor:
    """x, or a copy whose rows are aligned, logged once, where its rows do not start at multiples of `size` bytes."""
    if is_aligned(x, size):
        return x
    log_copy(name, x, f"its rows are not contiguous or do not start at multiples of {size} bytes")
    gap = -x.shape[-1] % (size // x.element_size())  # after a row that has no multiple of `size` bytes
    return x.new_empty((*x.shape[:-1], x.shape[-1] + gap))[..., : x.shape[-1]].copy_(x)


def described(name: str, x: Tensor) -> Tensor:
    """x as the descriptor of a bulk tensor copy takes it, which has the strides of all dimensions but the last.

    x: with rows aligned as by `aligned`. A copy, logged once, where entries of a dimension share memory, as after `expand`. A
    view where a dimension of one entry has a stride of 0 or of no multiple of 16 bytes: nothing uses it, but descriptors refuse
    it. Rows of no multiple of 16 bytes are read in other ways.
    """
    unit = ALIGNMENT // x.element_size()
    if not has_memory() or x.shape[-1] % unit:
        return x
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        return copied(name, x, EXPANDED)
    fitting = [
        x.shape[-1] if size == 1 and (stride == 0 or stride % unit) else stride
        for size, stride in zip(sizes, strides, strict=True)
    ]
    return x if fitting == [*strides] else x.as_strided(x.shape, (*fitting, x.stride(-1)))


def contiguous_last(name: str, x: Tensor) -> Tensor:
    """x, or a contiguous copy, logged once, where its last dimension is not contiguous."""
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    return copied(name, x, "its last dimension is not contiguous")


def contiguous(name: str, x: Tensor) -> Tensor:
    """x, or a copy, logged once, where it is not contiguous as a whole or its address is not a multiple of 16 bytes."""
    if x.is_contiguous() and address(x) % ALIGNMENT == 0:
        return x
    return copied(name, x, "it is not contiguous or its address is not a multiple of 16 bytes")


def copied(name: str, x: Tensor, why: str) -> Tensor:
    """A contiguous copy, logged once."""
    log_copy(name, x, why)
    return x.clone(memory_format=torch.contiguous_format)


def log_copy(name: str, x: Tensor, why: str) -> None:
    """Warns once that an argument is copied; never where a call is traced or explained: nothing is copied then."""
    if has_memory():
        message = f"{name}: copied, because {why} (shape {list(x.shape)}, strides {x.stride()})"
        log.once(message, logging.WARNING, key=("copied", name))


def optional(function: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    """function(x), or None where the argument was left out."""
    return None if x is None else function(x)


def constant(x: Tensor) -> Tensor:
    """A weight, bias or state that is only read: contiguous, with an address that is a multiple of 16 bytes.

    Copied silently where it is not: it is small, or new in every call.
    """
    x = x.contiguous()
    return x.clone() if address(x) % ALIGNMENT else x


def target(out: Tensor) -> Tensor:
    """The tensor that a kernel writes for `out`: itself where its rows are aligned, else a new one to copy from."""
    return out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
