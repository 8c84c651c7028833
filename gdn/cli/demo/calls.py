"""Calls of public operators that a model makes: every one checked against an independent computation, the first ones timed."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import gdn
from gdn.cli.demo.expected import pairs
from gdn.cli.demo.floors import floor_us
from gdn.device import H100
from gdn.runtime import Choice, explaining, registry
from gdn.testing.compare import error as compare
from gdn.testing.expected import Call, Pair
from gdn.testing.timing import Limits, copies_beyond_l2, time_us

Handler = Callable[[str, Callable[..., Any], dict[str, Any]], Any]

_FUNCTIONS = sorted({name for operator in registry.OPERATORS.values() for name in operator.functions})
# Arguments that operators update in place.
_WRITTEN = ("out", "initial_state", "conv_states", "conv_state", "ssm_state", "cache", "v_cache", "ring", "state_tokens")


@contextlib.contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """Replaces every call of an operator as `gdn.<name>` by handler(name, the operator, arguments by name).

    `gdn.layers` calls every operator in this way, so the handler sees all calls of a model, and of the parts of composed
    operators none.
    """
    true = {name: getattr(gdn, name) for name in _FUNCTIONS}

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return handler(name, function, dict(bound.arguments))

        return call

    for name, function in true.items():
        setattr(gdn, name, wrapped(name, function))
    try:
        yield
    finally:
        for name, function in true.items():
            setattr(gdn, name, function)


def on_reference() -> contextlib.AbstractContextManager[None]:
    """Runs every operator on the reference, whatever the switches say."""
    return intercepting(lambda name, function, arguments: function(**{**arguments, "backend": "reference"}))


@dataclass(frozen=True)
class Row:
    """One checked call: a candidate for a line of the demo's table."""

    phase: str
    operator: str
    backend: str
    notes: tuple[str, ...]  # reasons why a preferred backend did not run
    time_us: float | None
    floor_us: float | None
    error: float  # of the result or updated tensor that is nearest to its limit
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # NaN fails


@dataclass
class Checker:
    """Handler that runs each call, checks everything that it returned or updated, and times each phase's first of an operator.

    Attributes
    ----------
    limits : Limits or None
        Measured rates of the device; None = nothing is timed.
    phase : str
        Name of the model's phase, set by the caller.
    rows : list of Row
        The calls so far.
    on_row : callable
        Called after every call.
    """

    limits: Limits | None
    phase: str = ""
    rows: list[Row] = field(default_factory=list)
    on_row: Callable[[Row], None] = lambda row: None

    def __call__(self, name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with explaining() as asked:
            function(**arguments)
        parts = asked.answers
        before = _private(arguments, _WRITTEN)
        result = function(**arguments)
        call = Call(name, before, arguments, result)
        error, limit = worst(pairs(call))
        time = floor = None
        is_first = not any((row.phase, row.operator) == (self.phase, name) for row in self.rows)
        if self.limits is not None and is_first:
            floor = floor_us(call, [problem for _, problem in parts], self.limits)
            time = _time(function, before, round(floor * self.limits.copy_gbps * 1e3))
        choices: list[Choice] = [choice for choice, _ in parts]
        backend = "+".join(dict.fromkeys(choice.backend for choice in choices))
        notes = tuple(dict.fromkeys(note for choice in choices for note in choice.notes))
        row = Row(self.phase, name, backend, notes, time, floor, error, limit)
        self.rows.append(row)
        self.on_row(row)
        return result


def worst(found: list[Pair]) -> tuple[float, float]:
    """Error and limit of the pair whose error is the largest share of its limit; NaN is infinite."""
    return max(((_error(pair), pair.limit) for pair in found), key=_share)


def _share(one: tuple[float, float]) -> float:
    """Share of its limit that an error is."""
    error, limit = one
    return error / limit if limit else error and float("inf")


def _error(pair: Pair) -> float:
    """1 where one of the elements that must be equal differs, or where shapes do; else the error of the worst row."""
    got, expected = pair.got, pair.expected
    if got.shape != expected.shape:
        return float("inf")
    if pair.limit == 0:
        return float(not torch.equal(got, expected))
    return compare(got, expected, groups=1).l2


def _time(function: Callable[..., Any], arguments: dict[str, Any], num_bytes: int) -> float:
    """Microseconds of one call; where it is small, cycling through copies of its tensors, so that none is in the L2 cache."""
    copies = copies_beyond_l2(num_bytes, H100.l2_bytes, most=32)
    names = tuple(arguments) if copies > 1 else _WRITTEN
    return time_us(*[functools.partial(function, **_private(arguments, names)) for _ in range(copies)])


def _private(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments with copies of some of them."""
    return {name: _copy(value) if name in names else value for name, value in arguments.items()}


def _copy(value: Any) -> Any:
    """A tensor of the same layout, gaps included; both tensors of a pair."""
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    if not torch.is_tensor(value) or 0 in value.stride():
        return value
    if value.dtype == torch.float8_e4m3fn:  # it has no copies of its own everywhere
        return _copy(value.view(torch.uint8)).view(value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
