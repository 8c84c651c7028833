"""Variants that an operator's kernels must compile for: axes of dtypes, layouts and flags, and the problem of each row."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdn.models import QWEN3_NEXT_80B
from gdn.problem import Problem
from gdn.runtime import registry
from tests.compile import pairwise
from tests.compile.expectations import Expectation

Axes = Mapping[str, Sequence[Any]]
Row = pairwise.Row
Variant = tuple[Problem, Any]  # a problem and its configuration, None = the analytic default


@dataclass(frozen=True)
class Variants:
    """An operator for the compile tests. Its module of `tests.compile.variants` holds it under the operator's name.

    Axes that only make sense together (which state tensors there are) are one axis of whole combinations, so that almost every
    row is a call that the public operators accept.
    """

    axes: Axes
    problem: Callable[[Row], Problem | None]  # None where the public operator would not make it
    expectation: Callable[[Any, str, Collection[str]], Expectation]  # of a problem, by backend and entries
    config_axes: Mapping[str, Axes] = dataclasses.field(default_factory=dict)  # by module: fields that choose among its kernels
    is_config: Callable[[Row], bool] = lambda row: True  # whether a row's fields of config_axes make sense together
    config: Callable[[Any, Row], Any] = lambda default, changes: dataclasses.replace(default, **changes)
    cost: Callable[[Row], float] = lambda row: 1.0  # compile time of a row, relative to the other rows


def of(op: str) -> Variants:
    """The variants of an operator."""
    found: Variants = registry.operator(op).described("variants")
    return found


def example(op: str, **changes: Any) -> Any:
    """The operator's problem on QWEN3_NEXT_80B in FP8, with other fields."""
    problem: Any = registry.operator(op).example(QWEN3_NEXT_80B, fp8=True)
    return dataclasses.replace(problem, **changes)


def problem_of(op: str, fields: Row) -> Problem:
    """That problem with these fields."""
    problem: Problem = example(op, **fields)
    return problem


def always(expectation: Expectation) -> Callable[[Any, str, Collection[str]], Expectation]:
    """What all problems of an operator are expected to compile to."""
    return lambda problem, backend, entries: expectation


def spread(row: Row, **parts: Sequence[str]) -> Row:
    """Fields of a problem: an axis of whole combinations gives those that `parts` names for it, any other the one of its name."""
    fields: Row = {}
    for axis, value in row.items():
        fields |= zip(parts[axis], value, strict=True) if axis in parts else {axis: value}
    return fields


def without(row: Row, *axes: str) -> Row:
    return {axis: value for axis, value in row.items() if axis not in axes}


# Fields of axes that several operators have.
HEAD_DIMS = ("head_k_dim", "head_v_dim")
HEADS = ("num_heads", "num_kv_heads")
LAYER_HEADS = ("num_k_heads", "num_v_heads")
CONVOLUTION_POOLS = [("bfloat16", True), ("bfloat16", False), ("float32", True), ("float32", False)]  # dtype, channels contiguous
