"""Constants on the device that are kept between calls: offsets of equal lengths, zeros.

One rule holds for device memory that outlives a call: it belongs to the stream that filled it. A constant is filled on the
stream of its first call, and only calls on that stream get it. They come after it in stream order, so no call makes an event or
waits for one. A constant may fall out of the cache while a kernel still reads it: torch gives its memory to later work of the
same stream only.

Nothing that a kernel writes is kept. Workspaces, counters and copies are allocated in each call, on its stream.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from gdn.core.modes import has_memory
from gdn.runtime.streams import raw_stream


def even_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """[batch + 1] int32: 0, length, 2 * length, ..."""
    return _kept(_build_offsets, device, batch, length)


def zeros(count: int, device: torch.device) -> Tensor:
    """[count] float32."""
    return _kept(_build_zeros, device, count)


def row_indices(count: int, device: torch.device) -> Tensor:
    """[count] int32: 0, 1, 2, ..."""
    return even_offsets(count, 1, device)[:count]


def _kept(build: Any, device: torch.device, *sizes: int) -> Tensor:
    """A constant of these sizes that belongs to the current stream of the device.

    During graph capture it is built as part of the graph: memory that belongs to a graph, with contents that exist only after a
    replay, must not reach other calls. A tensor without memory is never kept.
    """
    is_cuda = device.type == "cuda"
    if not has_memory() or (is_cuda and torch.cuda.is_current_stream_capturing()):
        return build.__wrapped__(device, None, *sizes)  # type: ignore[no-any-return]
    return build(device, raw_stream(device.index) if is_cuda else None, *sizes)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _build_offsets(device: torch.device, stream: int | None, batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


@functools.lru_cache(maxsize=64)
def _build_zeros(device: torch.device, stream: int | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)
