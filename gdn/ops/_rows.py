"""Rows for the kernels of the steps: last dim contiguous, addresses and strides multiples of an access."""

import logging

import torch

from gdn.runtime import log

Tensor = torch.Tensor

ACCESS_BYTES = 16  # the widest load or store


def is_aligned(x: Tensor, size: int = ACCESS_BYTES) -> bool:
    """Whether the last dim is contiguous and every row starts at a multiple of `size` bytes."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 or x.data_ptr() % size:
        return False
    element = x.element_size()
    # Strides of dims with one entry are never used.
    return all(x.shape[i] <= 1 or x.stride(i) * element % size == 0 for i in range(x.dim() - 1))


def aligned(name: str, x: Tensor, size: int = ACCESS_BYTES) -> Tensor:
    """x, or where its rows do not start at multiples of `size` bytes a contiguous copy, logged once."""
    if is_aligned(x, size):
        return x
    log.once(
        f"{name}: copied, because its rows are not contiguous or do not start at multiples of {size} bytes "
        f"(shape {list(x.shape)}, strides {x.stride()})",
        logging.WARNING,
        key=("copied", name),
    )
    return x.clone(memory_format=torch.contiguous_format)


def constant(x: Tensor) -> Tensor:
    """A weight or bias: contiguous, its address a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ACCESS_BYTES else x


def target(out: Tensor) -> Tensor:
    """What a kernel writes in place of out: out itself where its rows are aligned, else a tensor to copy back from."""
    return out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
