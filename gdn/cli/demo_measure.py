"""Measurement of one demo call: its backend, its error against an independent computation, its time against the floor."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn.cli.demo_block import Call
from gdn.cli.demo_expected import pairs
from gdn.device import H100
from gdn.testing.compare import error as compare
from gdn.testing.oracle_logits import calc_diff
from gdn.testing.timing import Limits, copies_beyond_l2, time_us

_SCORES = ("mqa_logits", "paged_mqa_logits")


@dataclass(frozen=True)
class Row:
    """One line of the demo's table."""

    phase: str
    operator: str
    backend: str
    notes: tuple[str, ...]  # reasons why a preferred backend did not run
    time_us: float | None
    floor_us: float | None
    error: float  # the largest over all tensors that the call returned or updated
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # NaN fails


def _private(call: Call, dense: bool) -> dict[str, Any]:
    """The call's arguments, with private copies of those that it mutates; dense: of all dense tensors too.

    With the dense ones, calls in turn find no data in the L2 cache.
    """
    return {
        name: value.clone() if name in call.mutated or (dense and torch.is_tensor(value) and value.is_contiguous()) else value
        for name, value in call.arguments.items()
    }


def _error(got: torch.Tensor, expected: torch.Tensor, is_score: bool) -> float:
    """Error of a result: 0 or 1 for indices and bytes, calc_diff for scores with equal masks, else that of the worst row."""
    if got.shape != expected.shape:
        raise RuntimeError(f"shape {list(got.shape)}, expected {list(expected.shape)}")
    if not got.is_floating_point():
        return float(not torch.equal(got, expected))
    if not is_score:
        return compare(got, expected, groups=1).l2
    hidden = torch.isneginf(expected)
    if not torch.equal(torch.isneginf(got), hidden):
        return float("inf")
    return calc_diff(got.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))


def measure(call: Call, limits: Limits | None) -> Row:
    """Runs the call once on its own pools, which change, checks it, and times it on copies where limits are given."""
    function = getattr(gdn, call.operator)
    choice = gdn.explain(call.operator, **call.arguments)
    parts = getattr(choice, "parts", ()) or (choice,)  # a composed operator has parts
    before = _private(call, dense=False)
    call.run()
    errors = [_error(got, expected, call.operator in _SCORES) for got, expected in pairs(call, before)]
    error = max(errors, key=lambda error: error if error == error else float("inf"))  # NaN is the worst
    elapsed = floor = None
    if limits is not None:
        copies = copies_beyond_l2(call.floor_bytes, H100.l2_bytes, most=32)
        sets = [_private(call, dense=copies > 1) for _ in range(copies)]
        elapsed = time_us(*[functools.partial(function, **arguments) for arguments in sets])
        floor = limits.floor_us(call.floor_flops, call.floor_bytes, call.flops_dtype)
    backend = "+".join(dict.fromkeys(part.backend for part in parts))
    notes = tuple(note for part in parts for note in part.notes)
    return Row(call.phase, call.operator, backend, notes, elapsed, floor, error, call.limit)
