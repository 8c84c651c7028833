"""Copies of a call's arguments, and everything that a call left: for tests that compare two calls bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdn.testing.compare import same_bits
from tests.gpu.delta_rule import Arguments

Tensor = torch.Tensor


def whole(x: Tensor) -> Tensor:
    """The memory that a view lies in."""
    x = x.detach()
    return torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def copy_of(x: Tensor) -> Tensor:
    """The same view of a copy of all the memory that it lies in."""
    return torch.as_strided(whole(x).clone(), x.shape, x.stride(), x.storage_offset())


def twin(arguments: Arguments) -> Arguments:
    """The arguments with tensors of their own, their strides and what surrounds them kept."""
    return {name: _twin(x) for name, x in arguments.items()}


def _twin(x: Any) -> Any:
    if isinstance(x, tuple):  # keys and values
        return tuple(_twin(one) for one in x)
    return copy_of(x) if isinstance(x, Tensor) else x


def outcome(function: Callable[..., Any], arguments: Arguments, **options: Any) -> list[Tensor]:
    """The results of a call, and the memory of every argument after it."""
    found = function(**arguments, **options)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    assert not any(x.requires_grad for x in results if all(x is not given for given in arguments.values()))
    return [x.detach().clone() for x in results] + [whole(x) for x in arguments.values() if isinstance(x, Tensor)]


def are_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(same_bits(one, other) for one, other in zip(first, second, strict=True))


def check_repeats(function: Callable[..., Any], arguments: Arguments, **options: Any) -> None:
    """No block reads what another one writes: twenty runs have the same bits."""
    first = outcome(function, twin(arguments), **options)
    for _ in range(19):
        assert are_same(outcome(function, twin(arguments), **options), first)
