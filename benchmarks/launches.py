"""Kernels that a call launches, in order, each with the bytes that it must move, and ready to be launched again alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gdn import runtime
from gdn.problem import Problem
from gdn.runtime import Prepared, env
from gdn.testing.timing import Limits

PROJECTIONS = ("linear", "mm", "addmm")  # torch's names of a product with a weight
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "detach")


@dataclass(frozen=True)
class Launch:
    """One kernel of an operator, or one operation of torch.

    Attributes
    ----------
    name, backend : str
        Operator of the registry and its backend; or torch's name and "torch".
    flops, num_bytes, dtype : int, int, str
        Least work, as the benchmark counts it; of torch's operations the bytes of all tensors.
    call : callable
        Launches it again, on the same tensors.
    """

    name: str
    backend: str
    flops: int
    num_bytes: int
    dtype: str
    call: Callable[[], object]

    @property
    def is_projection(self) -> bool:
        """Whether it is a product with a weight."""
        return self.backend == "torch" and self.name in PROJECTIONS

    def floor_us(self, limits: Limits) -> float:
        """Least time on a device with these limits."""
        return limits.floor_us(self.flops, self.num_bytes, self.dtype)


def record(call: Callable[[], object]) -> list[Launch]:
    """Runs a call twice and returns what it launched the second time: constants and plans are made by then.

    Raises
    ------
    ValueError
        Where an operator has no kernel here and would run its reference.
    """
    found: list[Launch] = []
    true = runtime.prepare

    def prepare(problem: Problem, *rest: Any) -> Prepared:
        prepared = true(problem, *rest)
        if prepared.launch is None:
            raise ValueError(f"{problem.op}: no kernel serves it here: {prepared.choice}")
        launch, fields = prepared.launch, problem.static_fields()

        def told(*params: Any) -> None:
            again = partial(launch, *params)
            work = (problem.flops(), problem.bytes_moved(), str(fields.get("dtype", "float32")))
            found.append(Launch(problem.op, prepared.backend, *work, again))
            again()

        return replace(prepared, launch=told)

    env.reload()  # forgets the plans of repeated calls, which do not come through `prepare`
    try:
        with mock.patch.object(runtime, "prepare", prepare), _Operations(found):
            call()
            found.clear()
            call()
    finally:
        env.reload()  # forgets the plans that tell
    return found


class _Operations(TorchDispatchMode):
    """Adds torch's operations that launch a kernel: all but views and new tensors."""

    def __init__(self, found: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        again = partial(func, *args, **(kwargs or {}))
        result = again()
        name = func.name().partition("::")[2].partition(".")[0]
        tensors = [*_tensors(args), *_tensors((kwargs or {}).values()), *_tensors((result,))]
        if tensors and not func.is_view and name not in _NO_KERNEL:
            num_bytes = sum(one.numel() * one.element_size() for one in tensors)
            self._found.append(Launch(name, "torch", 0, num_bytes, "float32", again))
        return result


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
