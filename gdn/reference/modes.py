"""Modes of torch that must not affect the reference: autograd and autocast."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Tensor = torch.Tensor

P = ParamSpec("P")
R = TypeVar("R")


def inference_only(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a public reference function without autograd and without autocast; its signature stays the same.

    Without autograd, inputs and pools may require grad: results are detached, and a pool is never part of a graph. Without
    autocast, products have the dtype that the function computes in (a float32 product would become bfloat16 or float16).
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        with torch.no_grad():
            if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
                return function(*args, **kwargs)
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)

    return wrapper
