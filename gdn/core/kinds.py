"""Kinds of arguments, from their annotations: the type that a value must have before an operator uses it."""

import functools
import math
import operator
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union

import torch

from gdn.core import check
from gdn.core.check import bad_type, bad_value


@dataclass(frozen=True)
class Kind:
    """Type that an annotation asks for, and whether None is allowed."""

    type: Any  # torch.Tensor, bool, int, float, str, torch.dtype, or tuple: numbers on the host
    is_optional: bool

    def key_source(self, name: str) -> str:
        """Python source of the memo's key of the flag `name`, for the generated wrapper.

        Equal values of different types (1, 1.0 and True) have different keys. Numbers on the host are the same in a tuple and a
        list; the set of their types has one member in every call that is recorded.
        """
        if self.type is bool:
            return f"{name} is False or type({name})"
        if self.type is tuple:
            return f"(tuple({name}), *set(map(type, {name}))) if type({name}) in (tuple, list) else ({name}, type({name}))"
        return f"{name}, type({name})" if self.type in (int, float) else name

    def check_type(self, name: str, value: Any) -> None:
        """Raises TypeError, naming the argument, for a value of another type. Traceable by a compiler."""
        if value is None and self.is_optional:
            return
        if self.type is torch.Tensor:
            check.layout(name, value)
            return
        is_one, expected = _TYPES[self.type]
        if not is_one(value):
            bad_type(name, expected, type(value).__name__)

    def check(self, name: str, value: Any) -> Any:
        """Returns the value, numbers as Python numbers. Raises TypeError or ValueError, naming the argument."""
        self.check_type(name, value)
        if value is None or isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        if self.type is int:
            return int(value)
        if self.type is tuple:
            return tuple(map(int, value))
        return _finite(name, value) if self.type is float else value


def kind_of(annotation: Any) -> Kind:
    """Kind of an annotation `X` or `X | None`."""
    annotation = without_words(annotation)
    arguments = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = [tuple if one == Sequence[int] else one for one in arguments if one is not NoneType]
    if len(types) != 1 or types[0] not in (torch.Tensor, *_TYPES):
        raise TypeError(f"expected an annotation of one kind, got {annotation}")
    return Kind(types[0], NoneType in arguments)


def without_words(annotation: Any) -> Any:
    """The annotation with `str` for a Literal, whose words the operator itself checks: schemas and kinds know types only."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        (kind,) = {type(word) for word in typing.get_args(annotation)}
        return kind
    if origin is Union:  # Literal[...] | None is one, and X | None of plain types is not
        return functools.reduce(operator.or_, map(without_words, typing.get_args(annotation)))
    return annotation


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:  # an int too large for a float
        number = math.inf
    if not math.isfinite(number):
        bad_value(name, "a finite number", number)
    return number


def _is(*types: type, but: tuple[type, ...] = ()) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, but)


def _are_ints(value: Any) -> bool:
    if not isinstance(value, tuple | list):
        return False
    return {*map(type, value)} <= {int} or all(_TYPES[int][0](one) for one in value)  # slow: an abstract class


# Type, except tensors -> whether a value has it, and the name of the type in errors.
_TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (_is(bool), "a bool"),
    int: (_is(torch.SymInt, Integral, but=(bool,)), "an int"),
    float: (_is(torch.SymFloat, torch.SymInt, Real, but=(bool, Fraction)), "a number"),
    str: (_is(str), "a str"),
    torch.dtype: (_is(torch.dtype), "a torch.dtype"),
    tuple: (_are_ints, "a tuple or list of int"),
}
