"""Spoilings of how torch marks tensors, and of what the whole call runs in."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.spoiling import (
    SPOILINGS,
    Spoiled,
    put,
    spoiling,
)

Tensor = torch.Tensor


def _marked(name: str, mark: Callable[[Tensor], Tensor], *, floats_only: bool) -> None:
    def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
        tensor = call.get(path)
        if not isinstance(tensor, Tensor) or (floats_only and not tensor.is_floating_point()):
            return None
        value = mark(tensor)
        return put(call, path, value, is_exact=value.stride() == tensor.stride())  # else torch may sum in another order

    SPOILINGS[name] = spoil


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _result_of_a_graph(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.detach().requires_grad_().clone()


def _parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x.detach())


def _inference_tensor(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone(memory_format=torch.contiguous_format)


_marked("requires grad, a leaf", _leaf, floats_only=True)
_marked("requires grad, computed", _result_of_a_graph, floats_only=True)
_marked("an nn.Parameter", _parameter, floats_only=True)
_marked("an inference tensor", _inference_tensor, floats_only=False)


@spoiling("nothing")
def _nothing(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call)


@spoiling("inside autocast to bfloat16")
def _autocast(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call, around=lambda: torch.autocast("cpu", torch.bfloat16))


@spoiling("inside autocast to float16")
def _autocast_half(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call, around=lambda: torch.autocast("cpu", torch.float16))


@spoiling("inside inference_mode")
def _inference_mode(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call, around=torch.inference_mode)


@spoiling("inside inference_mode, with its tensors")
def _inference_tensors(call: Call, path: str, _: random.Random) -> Spoiled:
    with torch.inference_mode():
        values = {path: x.clone(memory_format=torch.preserve_format) for path, x in call.tensors().items()}
    return Spoiled(call.with_values(values), around=torch.inference_mode, is_exact=False)


@spoiling("every float tensor requires grad")
def _all_grad(call: Call, path: str, _: random.Random) -> Spoiled:
    floats = {path: x for path, x in call.tensors().items() if x.is_floating_point()}
    return Spoiled(call.with_values({path: _result_of_a_graph(x) for path, x in floats.items()}), is_exact=False)


@spoiling("torch's default dtype is float64")
def _default_dtype(call: Call, path: str, _: random.Random) -> Spoiled:
    @contextlib.contextmanager
    def around() -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return Spoiled(call, around=around)
