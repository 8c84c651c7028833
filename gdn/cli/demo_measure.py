"""Runs one demo call: what ran and why, the error against the reference, and the time against its floor.

The reference is asked in float64, and for the delta rule as the token recurrence, so that on a machine without a GPU,
where the operator is itself the float32 reference, the check still compares two different computations.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn import reference
from gdn.cli.demo_block import Call
from gdn.device import H100
from gdn.testing.compare import error as compare
from gdn.testing.oracle_logits import calc_diff
from gdn.testing.timing import Limits, copies_beyond_l2, time_us

_SCORES = ("mqa_logits", "paged_mqa_logits")
# Moved or re-encoded bytes: in float64 there would be nothing to compare with, and the reference alone says what is right.
_EXACT = ("fused_qkvzba_split_reshape_cat", "gather_indexer_cache", "prepare_indexer")
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
    error: float | None  # None: the call was the reference, and nothing else states what it should be
    limit: float

    @property
    def passed(self) -> bool:
        return self.error is None or self.error <= self.limit  # NaN fails


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _clone(call: Call) -> dict[str, Any]:
    """The call's arguments with private copies of what it mutates."""
    return {name: value.clone() if name in call.mutated else value for name, value in call.arguments.items()}


def _private(call: Call) -> dict[str, Any]:
    """The call's arguments with private copies of all dense tensors, so that calls in turn do not meet in the L2 cache."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and (value.is_contiguous() or name in call.mutated) else value
        for name, value in call.arguments.items()
    }


def _updated(call: Call, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What the call changes in place and does not return."""
    return [arguments[name] for name in call.mutated if name != "initial_state"]  # the state pool is returned


def _expected(call: Call, before: dict[str, Any]) -> list[torch.Tensor]:
    name, arguments = call.operator, dict(before)
    if name not in _EXACT:
        for key, value in arguments.items():
            if isinstance(value, torch.Tensor) and (value.dtype in _ROUNDED or key in ("q", "k")):
                arguments[key] = value.double()
    if name == "chunk_gated_delta_rule":
        name = "fused_recurrent_gated_delta_rule"
        mask, slots = arguments.pop("has_initial_state"), arguments.pop("state_indices")
        arguments["initial_state"][slots[~mask].long()] = 0
        arguments["ssm_state_indices"] = slots
    result = getattr(reference, name)(**arguments)
    return _tensors(result) + _updated(call, arguments)


def _topk_error(call: Call) -> float:
    """The share of rows whose selected scores are not those of torch.topk, or stand at a wrong or repeated index."""
    logits, k = call.arguments["logits"].float(), call.arguments["k"]
    starts, ends = call.arguments["row_starts"].long()[:, None], call.arguments["row_ends"].long()[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    masked = logits.masked_fill((columns < starts) | (columns >= ends), -torch.inf)
    masked = torch.nn.functional.pad(masked, (0, max(0, k - masked.shape[1])), value=-torch.inf)
    want = masked.topk(k, dim=-1).values
    index = call.result.long()
    found = masked.gather(1, (index + starts).clamp(0, masked.shape[1] - 1)).masked_fill(index < 0, -torch.inf)
    wrong = (found.sort(dim=-1, descending=True).values != want).any(dim=-1)
    ordered = torch.where(index < 0, torch.iinfo(torch.int64).max - torch.arange(k, device=index.device).flip(0), index)
    wrong |= (ordered.diff(dim=-1) <= 0).any(dim=-1)  # ascending, each index once, -1 last
    return float(wrong.double().mean())


def _score_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    masked = torch.isneginf(theirs)
    if not torch.equal(torch.isneginf(ours), masked):
        return float("inf")
    return calc_diff(ours.masked_fill(masked, 0), theirs.masked_fill(masked, 0))


def _error(call: Call, expected: list[torch.Tensor]) -> float:
    """The largest error over everything the call returned or updated."""
    got = _tensors(call.result) + _updated(call, call.arguments)
    if len(got) != len(expected):
        raise RuntimeError(f"{call.operator}: {len(got)} results, the reference has {len(expected)}")
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if call.operator in _SCORES:
            error = _score_error(ours, theirs)
        elif ours.element_size() == 1:  # FP8 values and cache bytes: the share that differs
            error = (ours.view(torch.uint8) != theirs.view(torch.uint8)).double().mean().item()
        else:
            if ours.shape[0] == 1:  # o [1, tokens, heads, V]: per head
                ours, theirs = ours[0].transpose(0, 1), theirs[0].transpose(0, 1)
            error = compare(ours, theirs, groups=1).l2  # per head, per token's row, or per slot of a pool
        worst = error if not error <= worst else worst  # keeps NaN
    return worst


def measure(call: Call, limits: Limits | None) -> Row:
    """Runs the call once for real (its pools change), checks it, then times it on copies where limits are given."""
    function = getattr(gdn, call.operator)
    choice = gdn.explain(call.operator, **call.arguments)
    before = _clone(call)
    call.run()
    error: float | None = None
    if call.operator == "topk_indices":
        error = _topk_error(call)
    elif choice.backend != "reference" or call.operator not in _EXACT:
        error = _error(call, _expected(call, before))
    elapsed = floor = None
    if limits is not None:
        copies = copies_beyond_l2(call.floor_bytes, H100.l2_bytes, most=32)
        sets = [_private(call) if copies > 1 else _clone(call) for _ in range(copies)]
        elapsed = time_us(*[functools.partial(function, **arguments) for arguments in sets])
        floor = limits.floor_us(call.floor_flops, call.floor_bytes, call.flops_dtype)
    return Row(call.phase, call.operator, choice.backend, choice.notes, elapsed, floor, error, call.limit)
