"""The plain form of a maker's call: for a number of tokens and a dtype always the same."""

from collections.abc import Sequence
from typing import Any

import torch

from gdn.runtime import registry
from tests import described
from tests.ops.spoiling.call import Draw

Tensor = torch.Tensor


class Plain(Draw):
    """Takes the first of all options and what is given in half of the calls or more, in contiguous tensors of one dtype."""

    def __init__(self, tokens: int, dtype: torch.dtype, *, is_served: bool = False, seed: int = 0) -> None:
        """is_served: in sizes that kernels take, instead of small ones. seed: of the values."""
        super().__init__(seed)
        self._tokens, self._dtype, self._is_served = tokens, dtype, is_served

    def pick(self, *options: Any) -> Any:
        return options[0]

    def maybe(self, probability: float = 0.5) -> bool:
        return probability >= 0.5

    def any_float(self) -> torch.dtype:
        return self._dtype

    def indices(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype or torch.int32)

    def rows(self, tensor: Tensor, lead: int) -> Tensor:
        return tensor

    def pool(self, tensor: Tensor) -> Tensor:
        return tensor

    def distinct(self, count: int, below: int, start: int = 0) -> list[int]:
        return list(range(start, start + count))

    def tokens(self, *options: int) -> int:
        return self._tokens

    def size(self, *options: int, served: int) -> int:
        return served if self._is_served else options[0]

    def lengths(self, most: int, sequences: int = 4) -> Sequence[int]:
        return [self._tokens - 2, 2]


def call(function: str, tokens: int, dtype: torch.dtype, *, is_served: bool = False, seed: int = 0) -> dict[str, Any]:
    """Arguments of a public function, without `out`."""
    arguments = described.every()[function].make(Plain(tokens, dtype, is_served=is_served, seed=seed)).arguments
    return {name: value for name, value in arguments.items() if name != "out"}


def on_device(op: str, device: torch.device, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Arguments of an operator's first public function in bfloat16, on a device whose kernels take them."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    arguments = call(registry.operator(op).functions[0], tokens, torch.bfloat16, is_served=True, seed=seed)
    return {name: tuple(map(moved, x)) if isinstance(x, tuple) else moved(x) for name, x in arguments.items()}
