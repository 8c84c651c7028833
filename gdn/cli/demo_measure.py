"""Runs one demo call: what ran and why, the error against the reference, and the time against its floor."""

from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn import reference
from gdn.cli.demo_block import Call
from gdn.testing.compare import error as compare
from gdn.testing.oracle_logits import calc_diff
from gdn.testing.timing import Limits, time_us

# Operators whose reference is the slower but independent statement of the same maths: the token recurrence.
_ORACLE = {"chunk_gated_delta_rule": "fused_recurrent_gated_delta_rule"}
_SCORES = ("mqa_logits", "paged_mqa_logits")
_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Row:
    """One line of the demo's table."""

    phase: str
    operator: str
    backend: str
    notes: tuple[str, ...]  # preferred, but refused or missing: why something else ran
    time_us: float | None
    floor_us: float | None
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # NaN fails


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _clone(call: Call) -> dict[str, Any]:
    """The call's arguments with private copies of what it mutates."""
    return {name: value.clone() if name in call.mutated else value for name, value in call.arguments.items()}


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in _ROUNDED else value


def _expected(call: Call, before: dict[str, Any]) -> list[torch.Tensor]:
    """Result and mutated arguments by the reference: float64 for the delta rule, whose order of sums differs most."""
    name = _ORACLE.get(call.operator, call.operator)
    arguments = dict(before)
    if "gated_delta_rule" in name:
        arguments = {key: _to_float64(value) for key, value in arguments.items()}
    if name != call.operator:
        mask = arguments.pop("has_initial_state")
        slots = arguments.pop("state_indices")
        arguments["initial_state"][slots[~mask].long()] = 0
        arguments["ssm_state_indices"] = slots
    result = getattr(reference, name)(**arguments)
    return _tensors(result) + [arguments[key] for key in call.mutated if key != "initial_state"]


def _error(call: Call, expected: list[torch.Tensor]) -> float:
    """The largest error over everything the call returned or updated."""
    got = _tensors(call.result) + [call.arguments[key] for key in call.mutated if key != "initial_state"]
    assert len(got) == len(expected), f"{call.operator}: {len(got)} results, the reference has {len(expected)}"
    worst = 0.0
    for ours, theirs in zip(got, expected):
        if call.operator in _SCORES:
            masked = torch.isneginf(theirs)
            if not torch.equal(torch.isneginf(ours), masked):
                return float("inf")
            error = calc_diff(ours.masked_fill(masked, 0), theirs.masked_fill(masked, 0))
        elif not ours.is_floating_point() or ours.dtype == torch.float8_e4m3fn:
            error = (ours.view(torch.uint8) != theirs.view(torch.uint8)).double().mean().item()
        else:
            if ours.shape[0] == 1:  # o [1, tokens, heads, V]: per head
                ours, theirs = ours[0].transpose(0, 1), theirs[0].transpose(0, 1)
            error = compare(ours, theirs, groups=1).l2  # per head, per token's row, or per slot of a pool
        worst = error if not error <= worst else worst  # keeps NaN
    return worst


def measure(call: Call, limits: Limits | None) -> Row:
    """Runs the call once for real (its pools change), checks it, then times it on copies where a GPU is there."""
    function = getattr(gdn, call.operator)
    choice = gdn.explain(call.operator, **call.arguments)
    before = _clone(call)
    call.run()
    error = _error(call, _expected(call, before))
    elapsed = floor = None
    if limits is not None:
        scratch = _clone(call)
        elapsed = time_us(lambda: function(**scratch))
        floor = limits.floor_us(call.floor_flops, call.floor_bytes, call.flops_dtype)
    return Row(
        call.phase, call.operator, choice.backend, tuple(choice.notes), elapsed, floor, error, call.limit
    )
