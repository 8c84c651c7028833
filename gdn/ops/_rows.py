"""Rows for the kernels of the steps: last dim contiguous, addresses and strides multiples of an access."""

import logging

import torch

from gdn.ops._modes import address, is_tracing
from gdn.runtime import log

Tensor = torch.Tensor

ACCESS_BYTES = 16  # the widest load or store


def is_aligned(x: Tensor, size: int = ACCESS_BYTES) -> bool:
    """Whether the last dim is contiguous and every row starts at a multiple of `size` bytes."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 or address(x) % size:
        return False
    element = x.element_size()
    # Strides of dims with one entry are never used.
    return all(x.shape[i] <= 1 or x.stride(i) * element % size == 0 for i in range(x.dim() - 1))


def aligned(name: str, x: Tensor, size: int = ACCESS_BYTES) -> Tensor:
    """x, or where its rows do not start at multiples of `size` bytes a contiguous copy, logged once."""
    if is_aligned(x, size):
        return x
    return copied(name, x, f"its rows are not contiguous or do not start at multiples of {size} bytes")


def contiguous_last(name: str, x: Tensor) -> Tensor:
    """x, or where its last dimension is not contiguous a contiguous copy, logged once."""
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    return copied(name, x, "its last dimension is not contiguous")


def contiguous(name: str, x: Tensor) -> Tensor:
    """x, or where it is not contiguous as a whole or its address no multiple of 16 bytes a copy, logged once."""
    if x.is_contiguous() and address(x) % ACCESS_BYTES == 0:
        return x
    return copied(name, x, "it is not contiguous or its address is no multiple of 16 bytes")


def copied(name: str, x: Tensor, why: str) -> Tensor:
    """A contiguous copy, logged once; not while a compiler traces, since no kernel may run in the end."""
    if not is_tracing():
        log.once(
            f"{name}: copied, because {why} (shape {list(x.shape)}, strides {x.stride()})", logging.WARNING, key=("copied", name)
        )
    return x.clone(memory_format=torch.contiguous_format)


def constant(x: Tensor) -> Tensor:
    """A weight or bias: contiguous, its address a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if address(x) % ACCESS_BYTES else x


def target(out: Tensor) -> Tensor:
    """What a kernel writes in place of out: out itself where its rows are aligned, else a tensor to copy back from."""
    return out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
