"""Index tensors of regular batches. A batch size recurs at every layer and step, so each is made once."""

from collections.abc import Callable

import torch
from torch import Tensor

_MOST = 256  # bounds the memory where every prompt has another length
_Key = tuple[str, int, int, torch.device, torch.dtype]
_made: dict[_Key, Tensor] = {}


def slots(count: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """0, 1, .. count - 1: the slot of each row of a batch in tensors that hold this batch alone."""
    return _recurring(("slots", count, 0, device, dtype), lambda: torch.arange(count, dtype=dtype, device=device))


def offsets(count: int, length: int, device: torch.device) -> Tensor:
    """Offsets [count + 1] of `count` rows of `length` tokens each, as int32."""
    key = ("offsets", count, length, device, torch.int32)
    return _recurring(key, lambda: torch.arange(count + 1, dtype=torch.int32, device=device) * length)


def flags(count: int, value: bool, device: torch.device) -> Tensor:
    """`value` for each of `count` rows."""
    key = ("flags", count, int(value), device, torch.bool)
    return _recurring(key, lambda: torch.full((count,), value, dtype=torch.bool, device=device))


def _recurring(key: _Key, make: Callable[[], Tensor]) -> Tensor:
    if torch.compiler.is_compiling():  # part of the graph: a kept tensor would be one more input with its guards
        return make()
    found = _made.get(key)
    if found is None:
        with torch.inference_mode(False):  # a kept tensor may be used outside of the inference mode that is on now
            found = make()
        if key[3].type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found  # its memory belongs to the graph, and it holds nothing before a replay
        if len(_made) >= _MOST:
            _made.clear()
        _made[key] = found
    return found
