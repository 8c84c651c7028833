"""Index tensors of regular batches. A batch size recurs at every layer and step, so each is made once on a stream.

What is kept belongs to the stream that filled it: a call on another stream makes its own, so that none reads what is not there
yet. One that is dropped while a kernel still reads it leaves its memory to later work of the same stream.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gdn.runtime.streams import raw_stream

_MOST = 256  # bounds the memory where every prompt has another length
_Key = tuple[str, int, int, torch.device, torch.dtype]
_made: dict[tuple[_Key, int | None], Tensor] = {}


def slots(count: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """0, 1, .. count - 1: the slot of each row of a batch in tensors that hold this batch alone."""
    return _recurring(("slots", count, 0, device, dtype), lambda: torch.arange(count, dtype=dtype, device=device))


def offsets(count: int, length: int, device: torch.device) -> Tensor:
    """Offsets [count + 1] of `count` rows of `length` tokens each, at least one, as int32."""
    key = ("offsets", count, length, device, torch.int32)
    return _recurring(key, lambda: torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device))


def flags(count: int, value: bool, device: torch.device) -> Tensor:
    """`value` for each of `count` rows."""
    key = ("flags", count, int(value), device, torch.bool)
    return _recurring(key, lambda: torch.full((count,), value, dtype=torch.bool, device=device))


def _recurring(key: _Key, make: Callable[[], Tensor]) -> Tensor:
    if torch.compiler.is_compiling():  # part of the graph: a kept tensor would be one more input with its guards
        return make()
    device = key[3]
    stream = raw_stream(device.index) if device.type == "cuda" else None
    if stream is not None and torch.cuda.is_current_stream_capturing():
        return make()  # part of the graph: its memory belongs to it, and holds nothing before a replay
    found = _made.get((key, stream))
    if found is None:
        with torch.inference_mode(False):  # a kept tensor may be used outside of the inference mode that is on now
            found = make()
        if len(_made) >= _MOST:
            _made.clear()
        _made[key, stream] = found
    return found
