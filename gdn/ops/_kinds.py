"""Kinds of arguments, by their annotations: what a value must be before an operator looks at it."""

import math
import typing
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any

import torch

from gdn.ops._checks import bad_type, bad_value, check_layout


@dataclass(frozen=True)
class Kind:
    """The type that an annotation asks for, and whether None does too."""

    type: Any  # torch.Tensor, bool, int, float, str or torch.dtype
    is_optional: bool

    @property
    def is_tensor(self) -> bool:
        return self.type is torch.Tensor

    @property
    def is_typed(self) -> bool:
        """Whether values of other types can equal one of this kind: 1, 1.0 and True do."""
        return self.type in (bool, int, float)

    def key(self, value: Any) -> tuple[Any, ...]:
        """A flag as the memo keys it."""
        return (value, type(value)) if self.is_typed else (value,)

    def check(self, name: str, value: Any) -> Any:
        """The value, numbers as Python's own. Raises TypeError or ValueError by name."""
        if value is None and self.is_optional:
            return None
        if self.type is torch.Tensor:
            check_layout(name, value)
            return value
        return _CHECKS[self.type](name, value)


def kind_of(annotation: Any) -> Kind:
    """The kind of an annotation `X` or `X | None`."""
    arguments = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = [one for one in arguments if one is not NoneType]
    if len(types) != 1 or types[0] not in (torch.Tensor, *_CHECKS):
        raise TypeError(f"expected an annotation of one kind, got {annotation}")
    return Kind(types[0], NoneType in arguments)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        bad_type(name, "a bool", type(value).__name__)
    return value


def _int(name: str, value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        bad_type(name, "an int", type(value).__name__)
    return int(value)


def _float(name: str, value: Any) -> Any:
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value
    if isinstance(value, bool | Fraction) or not isinstance(value, Real):
        bad_type(name, "a number", type(value).__name__)
    try:
        number = float(value)
    except OverflowError:  # an int that no float holds
        number = math.inf
    if not math.isfinite(number):
        bad_value(name, "a finite number", number)
    return number


def _str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        bad_type(name, "a str", type(value).__name__)
    return value


def _dtype(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        bad_type(name, "a torch.dtype", type(value).__name__)
    return value


_CHECKS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: _str, torch.dtype: _dtype}
