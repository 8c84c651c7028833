"""Modes of a call: executed, traced by a compiler for its shapes, or explained.

While a call is traced or explained its tensors are torch's FakeTensors: they have metadata and no memory. The operator then
runs unchanged, except that nothing is launched. In an explained call each FakeTensor remembers the caller's tensor, so that
checks of addresses still work.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from gdn.runtime import is_explaining

_tracing: ContextVar[bool] = ContextVar("gdn_tracing", default=False)
_REAL = "_gdn_real"  # attribute of a FakeTensor that holds the caller's tensor


def has_memory() -> bool:
    """Whether the tensors of this call can be read and written."""
    return not (_tracing.get() or is_explaining())


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Makes operators in this context and thread return results of the right shapes and launch nothing."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def is_tracing() -> bool:
    return _tracing.get()


def is_fake(value: Any) -> bool:
    """Whether a tensor has metadata only."""
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


def lack_memory(values: Sequence[Any]) -> bool:
    """Whether a call only asks for shapes: one of its tensors is a FakeTensor, or all are on the meta device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(isinstance(x, FakeTensor) for x in tensors) or (bool(tensors) and all(x.is_meta for x in tensors))


def faked(values: dict[str, Any]) -> tuple[dict[str, Any], FakeTensorMode]:
    """The same arguments with FakeTensors in place of tensors, and the mode in which they may be used."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and not is_fake(value):
            fake = mode.from_tensor(value, static_shapes=True)
            setattr(fake, _REAL, value)
            value = fake
        found[name] = value
    return found, mode


def real(tensor: Tensor) -> Tensor | None:
    """The tensor with memory; None while tracing."""
    if type(tensor) is Tensor and not tensor.is_meta:  # of nearly all calls, without a further frame
        return tensor
    return getattr(tensor, _REAL, None) if is_fake(tensor) else tensor


def last_value(tensor: Tensor) -> int | None:
    """Last integer of a tensor, read back to the host; None while tracing."""
    found = real(tensor)
    if found is None:
        return None
    with unset_fake_temporarily():
        return int(found[-1])


def address(tensor: Tensor) -> int:
    """Address of a tensor. Unknown while tracing: then 0, which is aligned."""
    found = real(tensor)
    return 0 if found is None else found.data_ptr()


def place(tensor: Tensor) -> int | None:
    """Address of a tensor; None where a compiler does not know it.

    While tracing, views of one tensor lie in a range of addresses of its own, which no other tensor reaches.
    """
    found = real(tensor)
    if found is not None:
        return found.data_ptr()
    offset = tensor.storage_offset()
    if not all(isinstance(number, int) for number in (offset, *tensor.shape, *tensor.stride())):
        return None
    storage: int = tensor.untyped_storage()._cdata
    return (storage << 64) + int(offset) * tensor.element_size()


def is_empty(*sizes: int) -> bool:
    """Whether one of the sizes is known to be 0. A size that a compiler keeps symbolic is unknown."""
    return any(isinstance(size, int) and size == 0 for size in sizes)
