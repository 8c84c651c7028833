"""A call of a public operator as data, and the random choices that make one from a seed."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import gdn
from tests.ops.spoiling.memory import side_by_side

Tensor = torch.Tensor
_ENTRY = re.compile(r"^(\w+)\[(\d+)\]$")


@dataclass
class Call:
    """Keyword arguments of an operator, and what the spoilings must know of them.

    A path names an argument, or one entry of a pair ("kv_cache[0]").
    dims: per path of a tensor, its dimensions. Equal names are equal sizes; "N+" is at least N, and "~" is free.
    ties: per name of a dimension, the flags that fix its size.
    sizes: per name, the size that "+" compares with.
    alone: paths of tensors whose dtype and number of dimensions nothing else fixes.
    """

    operator: str
    arguments: dict[str, Any] = field(default_factory=dict)
    dims: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ties: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()
    seed: int = 0

    def give(self, path: str, value: Tensor | None, dims: str) -> None:
        """Adds a tensor argument with its dimensions; None leaves it out."""
        if value is None:
            return
        self.dims[path] = tuple(dims.split())
        entry = _ENTRY.match(path)
        if entry:
            self.arguments.setdefault(entry[1], ())
            self.arguments[entry[1]] += (value,)
        else:
            self.arguments[path] = value

    def get(self, path: str) -> Any:
        entry = _ENTRY.match(path)
        if not entry:
            return self.arguments.get(path)
        pair = self.arguments.get(entry[1])
        return pair[int(entry[2])] if isinstance(pair, tuple) else None

    def changed(self, **values: Any) -> "Call":
        return self.with_values(values)

    def with_values(self, values: dict[str, Any]) -> "Call":
        """The call with other values at some paths."""
        arguments = dict(self.arguments)
        for path, value in values.items():
            entry = _ENTRY.match(path)
            if entry:
                pair = list(arguments[entry[1]])
                pair[int(entry[2])] = value
                arguments[entry[1]] = tuple(pair)
            else:
                arguments[path] = value
        return Call(self.operator, arguments, self.dims, self.ties, self.sizes, self.alone, self.seed)

    def tensors(self) -> dict[str, Tensor]:
        """Path -> tensor, entries of pairs included."""
        return dict(_tensors(self.arguments))

    def run(self) -> Any:
        return getattr(gdn, self.operator)(**self.arguments)

    def index(self, path: str) -> list[Any]:
        """The values of an index tensor as (nested) lists."""
        return self.get(path).tolist()


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple | list):
            yield from ((f"{name}[{i}]", entry) for i, entry in enumerate(value) if isinstance(entry, Tensor))


class Draw:
    """Random choices of a good call. A maker names the plain option first: the plain form of its call takes that one."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def tokens(self, *options: int) -> int:
        """The number of tokens of a call, or of rows that count as tokens."""
        return self.random.choice(options)

    def size(self, *options: int, served: int) -> int:
        """A size that kernels restrict. served: one that they take, of a plain call that asks for it."""
        return self.random.choice(options)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def any_float(self) -> torch.dtype:
        return self.pick(torch.float32, torch.bfloat16, torch.float16)

    def indices(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """int32 or int64, sometimes as every second element of a larger tensor."""
        tensor = torch.tensor(values, dtype=dtype or self.pick(torch.int32, torch.int64))
        if tensor.dim() and self.maybe(0.3):
            spread = torch.full((*tensor.shape, 2), 7, dtype=tensor.dtype)
            spread[..., 0] = tensor
            return spread[..., 0]
        return tensor

    def rows(self, tensor: Tensor, lead: int) -> Tensor:
        """A tensor, sometimes a slice of a wider buffer: rows (the first `lead` dims) with something else between them."""
        return side_by_side(tensor, lead=lead, extra=self.pick(16, 64)) if self.maybe(0.4) else tensor

    def pool(self, tensor: Tensor) -> Tensor:
        """A pool, sometimes slots of a larger page, or a part of a larger pool."""
        kind = self.random.random()
        if kind < 0.3:
            return side_by_side(tensor, lead=1, extra=self.pick(16, 256))
        if kind < 0.5:
            larger = torch.cat([tensor[:1], tensor, tensor[:1]])
            part = larger[1:-1]
            return part if part.data_ptr() % 16 == 0 else tensor
        return tensor

    def distinct(self, count: int, below: int, start: int = 0) -> list[int]:
        return self.random.sample(range(start, below), count)

    def offsets(self, lengths: Sequence[int]) -> list[int]:
        total, bounds = 0, [0]
        for length in lengths:
            total += length
            bounds.append(total)
        return bounds

    def lengths(self, most: int, sequences: int = 4) -> list[int]:
        """Tokens of each sequence, some without any, one at least with."""
        lengths = [self.random.choice((0, 1, 1, 2, most)) for _ in range(self.random.randint(1, sequences))]
        lengths[self.random.randrange(len(lengths))] = self.random.randint(1, most)
        return lengths

    def tables(self, lengths: Sequence[int], page_size: int, pages: int, columns: int) -> Tensor:
        """Block tables: a page for each page_size rows of a sequence; what no row is in may be anything."""
        table = [
            [
                self.random.randrange(pages) if column * page_size < length else self.pick(-1, 0, 10**6)
                for column in range(columns)
            ]
            for length in lengths
        ]
        return self.rows(torch.tensor(table, dtype=torch.int32).reshape(len(lengths), columns), lead=1)
