"""Modes that the references share: they run without autograd and autocast, and compare indices as Python ints."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

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


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of sums: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def listed(x: torch.Tensor | None) -> Any:
    """Values of a tensor as (nested lists of) Python numbers."""
    return None if x is None else x.tolist()


def ranges(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """(first token, end) of every sequence from offsets [N + 1]; a length below zero counts as empty."""
    bounds = offsets.tolist()
    return [(start, max(start, end)) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
