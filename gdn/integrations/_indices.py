"""Index tensors of regular batches. A batch size recurs at every layer and step, so each is made once on a stream.

What is kept belongs to the stream that filled it: a call on another stream makes its own, so that none reads what is not there
yet. One that is dropped while a kernel still reads it leaves its memory to later work of the same stream.
"""

from typing import Any

import torch
from torch import Tensor

from gdn.runtime.streams import raw_stream

_MOST = 256  # bounds the memory where every prompt has another length
_made: dict[tuple[Any, ...], Any] = {}
_rows: dict[tuple[Any, ...], Tensor] = {}
_INT32, _BOOL = torch.int32, torch.bool


def rows(count: int, device: torch.device) -> Tensor:
    """0, 1, .. count - 1 as int32, for the rows of a batch. Never dropped: there are as many as batch sizes."""
    if torch.compiler.is_compiling():
        return _make("slots", count, 0, device, _INT32)  # type: ignore[no-any-return]
    index: Any = device.index
    key = (count, device if index is None else index, None if index is None else raw_stream(index))
    found = _rows.get(key)
    if found is None:
        if index is not None and torch.cuda.is_current_stream_capturing():
            return _make("slots", count, 0, device, _INT32)  # type: ignore[no-any-return]
        with torch.inference_mode(False):  # it may be used outside of the inference mode that is on now
            found = _rows[key] = _make("slots", count, 0, device, _INT32)
    return found


def slots(count: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """0, 1, .. count - 1: the slot of each row in tensors that hold these rows alone."""
    return _recurring("slots", count, 0, device, dtype)  # type: ignore[no-any-return]


def offsets(count: int, length: int, device: torch.device) -> Tensor:
    """Offsets [count + 1] of `count` rows of `length` tokens each, at least one, as int32."""
    return _recurring("offsets", count, length, device, _INT32)  # type: ignore[no-any-return]


def flags(count: int, value: bool, device: torch.device) -> Tensor:
    """`value` for each of `count` rows."""
    return _recurring("flags", count, int(value), device, _BOOL)  # type: ignore[no-any-return]


def prompts(count: int, length: int, value: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, offsets and flags of `count` rows of `length` tokens each."""
    return _recurring("prompts", count, length, device, _BOOL if value else _INT32)  # type: ignore[no-any-return]


def _make(name: str, count: int, number: int, device: torch.device, dtype: torch.dtype) -> Any:
    if name == "slots":
        return torch.arange(count, dtype=dtype, device=device)
    if name == "offsets":
        return torch.arange(0, count * number + 1, number, dtype=dtype, device=device)
    if name == "flags":
        return torch.full((count,), bool(number), dtype=dtype, device=device)
    return (
        torch.arange(count, dtype=_INT32, device=device),
        torch.arange(0, count * number + 1, number, dtype=_INT32, device=device),
        torch.full((count,), dtype is _BOOL, dtype=_BOOL, device=device),
    )


def _recurring(name: str, count: int, number: int, device: torch.device, dtype: torch.dtype) -> Any:
    if torch.compiler.is_compiling():  # part of the graph: a kept tensor would be one more input with its guards
        return _make(name, count, number, device, dtype)
    place: Any = device.index  # hashed sooner than the device; None on the CPU
    stream = None
    if place is None:
        place = device
    else:
        stream = raw_stream(place)
        if torch.cuda.is_current_stream_capturing():
            # Part of the graph: its memory belongs to it, and holds nothing before a replay.
            return _make(name, count, number, device, dtype)
    key = (name, count, number, place, dtype, stream)
    found = _made.get(key)
    if found is None:
        with torch.inference_mode(False):  # a kept tensor may be used outside of the inference mode that is on now
            found = _make(name, count, number, device, dtype)
        if len(_made) >= _MOST:
            _made.clear()
        _made[key] = found
    return found
