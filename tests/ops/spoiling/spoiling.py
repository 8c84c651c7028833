"""Spoilings, and the registry of all of them.

Each spoiling turns a good call and one of its arguments into the call to make, where it applies. It says nothing about what
must happen: that is the table's part. It knows two things that the judge needs: which arguments an error may name (a size
that two tensors share may be held against either), and which call an accepted one must equal (the good call, unless the
spoiling gives another model).
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.ops.spoiling.call import Call

Tensor = torch.Tensor


@dataclass
class Spoiled:
    call: Call
    names: set[str] = field(default_factory=set)  # arguments that an error may name besides the spoilt one
    model: Call | None = None  # the call whose results an accepted one must have; None = the good one
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    is_exact: bool = True  # results equal bit for bit; else within the rounding of a sum in another order


Spoiling = Callable[[Call, str, random.Random], Spoiled | None]  # None: does not apply to this call
SPOILINGS: dict[str, Spoiling] = {}


def spoiling(name: str) -> Callable[[Spoiling], Spoiling]:
    def register(function: Spoiling) -> Spoiling:
        if name in SPOILINGS:
            raise ValueError(f"two spoilings are named {name!r}")
        SPOILINGS[name] = function
        return function

    return register


def leading(call: Call) -> str:
    """The tensor that the others are compared with in dtype, device and size: the first that is no index."""
    names = [path for path, x in call.tensors().items() if x.is_floating_point() and path in call.dims]
    return names[0] if names else next(iter(call.dims))


def family(call: Call, path: str) -> set[str]:
    """Arguments that a wrong dtype or device of this one may be held against."""
    return set(call.dims) if path == leading(call) else {path, leading(call)}


def put(call: Call, path: str, value: Any, **rest: Any) -> Spoiled:
    return Spoiled(call.with_values({path: value}), **rest)


@dataclass(frozen=True)
class Instead:
    """A value to put in a tensor's place; None is one too."""

    value: Any


def on_tensor(name: str, *, is_layout: bool = False) -> Callable[[Callable[[Tensor], Any]], Spoiling]:
    """Registers a spoiling that replaces a tensor by something made of it (None: does not apply).

    is_layout: the values stay, and torch may sum them in another order."""

    def register(make: Callable[[Tensor], Any]) -> Spoiling:
        @spoiling(name)
        def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
            tensor = call.get(path)
            if not isinstance(tensor, Tensor):
                return None
            value = make(tensor)
            if isinstance(value, Instead):
                return put(call, path, value.value)
            return None if value is None else put(call, path, value, is_exact=not is_layout)

        return spoil

    return register


def as_bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: torch joins no FP8 on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def lead_dims(call: Call, path: str) -> int:
    """Leading dims that count rows."""
    return 2 if call.dims[path][:2] in (("B", "T"), ("B", "next")) else 1
