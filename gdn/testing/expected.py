"""What an oracle says of an operator's call that has run: pairs of tensors and their expected content.

Each family's `oracle.py` has `EXPECTED`, the name of a public function -> a function of a call and its arguments from before.
The reference computes in float32; an oracle decodes rows, loops over sequences, or uses torch's own functions, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]


@dataclass
class Call:
    """One operator call that has run.

    Attributes
    ----------
    operator : str
        Name of the public function.
    before, after : dict of str to Any
        Arguments by name: copies from before of those that it updates, and the same arguments afterwards.
    result : Any
    """

    operator: str
    before: Arguments
    after: Arguments
    result: Any


class Pair(NamedTuple):
    """A tensor and its expected content; limit: largest accepted relative error of a row, 0 = every element is equal."""

    got: Tensor
    expected: Tensor
    limit: float


Pairs = list[Pair]


def once(x: Tensor) -> float:
    """Limit of a result that is rounded once to the dtype of x."""
    return 1e-5 if x.dtype == torch.float32 else 1e-2


def often(x: Tensor) -> float:
    """Limit of a result with several roundings to the dtype of x inside."""
    return 3 * once(x)


Expected = dict[str, Callable[[Call, Arguments], Pairs]]
