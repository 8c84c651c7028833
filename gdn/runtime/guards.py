"""Whether tensors have the type, dtype, device, shape and strides of others, and views, at the cost of one call each.

Guards and views are those of torch's compiler, in C++. They are private: where torch lacks them, Python does the same.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Guard = Callable[..., bool]

PRIVATE: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


# (tensor, size, strides, elements) -> a view that begins that many elements after the tensor does.
view_of: Callable[..., Tensor] = getattr(
    PRIVATE,
    "_reinterpret_tensor",
    lambda tensor, size, stride, offset=0: torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset),
)


@functools.cache
def maker() -> Callable[[Sequence[Tensor]], Guard]:
    """Maker of guards: torch's own, if it exists and passes a self-test, else the one in Python.

    A guard is True where each tensor has the metadata of its model and no two tensors are the same object.
    """

    def of_torch(tensors: Sequence[Tensor]) -> Guard:
        guard: Guard = PRIVATE.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return guard

    try:
        with torch.inference_mode(False):
            first, second, third = (torch.empty(2, 3, device="cpu") for _ in range(3))  # on the CPU: a graph may be capturing
            guard = of_torch([first, second])
            others = (third[:1], third.half(), torch.empty(3, 2, device="cpu").T, third.to("meta"), [1.0], None, first)
            is_trusted = guard(first, third) and not any(guard(first, other) for other in others)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        is_trusted = False
    return of_torch if is_trusted else in_python


def in_python(tensors: Sequence[Tensor]) -> Guard:
    def metadata(tensor: Tensor) -> tuple[Any, ...]:
        strides = tensor.stride() if tensor.layout is torch.strided else None  # sparse tensors have none
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, strides

    wanted = [metadata(tensor) for tensor in tensors]

    def guard(*found: Any) -> bool:
        if not all(isinstance(one, Tensor) for one in found) or len(set(map(id, found))) < len(found):
            return False
        return wanted == [metadata(one) for one in found]

    return guard
