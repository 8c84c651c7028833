"""Runs and judges a delta-rule operator in GPU tests: against the float64 oracle, allowing what torch itself would lose."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule import reference
from gdn.ops.delta_rule.oracle import DeltaRuleResult, oracle_of
from gdn.runtime import registry
from gdn.testing.compare import Error, error, same_bits, token_error

Arguments = dict[str, Any]
Results = tuple[torch.Tensor, torch.Tensor | None]


def backends(op: str) -> list[str]:
    """The kernel backends that the registry has for an operator."""
    return list(registry.operator(op).modules)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty is full of NaN inside, so that results and workspace that are never written show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def copied(arguments: Arguments) -> Arguments:
    """The same arguments with a pool of their own, strides and the NaN between slots kept."""
    result = dict(arguments)
    state = arguments.get("initial_state")
    if state is not None:
        empty = torch.empty(0, dtype=state.dtype, device=state.device)
        storage = state.untyped_storage().clone()
        result["initial_state"] = empty.set_(storage, state.storage_offset(), state.shape, state.stride())
    return result


def run(function: str, arguments: Arguments, backend: str) -> Results:
    """The public operator with everything that it may write full of NaN."""
    with poisoned_memory():
        result: Results = getattr(gdn, function)(**arguments, backend=backend)
    return result


def rounded_chunk(dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The chunk form as plain torch would do it in `dtype`: every matmul operand rounded, sums in float32."""

    def r(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(x.dtype)

    def chunk(
        state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay = reference._decay_between(g)  # of strong decays too
        q, k = r(q), r(k)
        identity = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
        strict_lower = (beta[:, :, None] * (k @ k.mT)).tril(-1)
        inverse = torch.linalg.solve_triangular(
            identity + strict_lower, identity.expand_as(strict_lower), upper=False, unitriangular=True
        )
        grow = g.cumsum(-1).exp()[:, :, None]
        w = r(v - grow * (k @ r(state)))
        v_new = r(inverse * decay * beta[:, None, :]) @ w
        o = grow * (q @ r(state)) + r(decay * (q @ k.mT)) @ r(v_new)
        return o, grow[:, -1:] * state + k.mT @ r(decay[:, -1, :, None] * v_new)

    return chunk


def torch_results(function: str, arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> Results:
    """Result of plain torch on the same device from inputs of the same dtype."""
    with monkeypatch.context() as patch:
        if function == "chunk_gated_delta_rule":
            patch.setattr(reference, "_chunk", rounded_chunk(arguments["q"].dtype))
        result: Results = getattr(reference, function)(**arguments)
    return result


def judge(
    function: str, arguments: Arguments, results: Results, before: Arguments, monkeypatch: pytest.MonkeyPatch
) -> DeltaRuleResult:
    """results: of a call with `arguments`; `before`: copied(arguments) from before the call.

    o, and every state that had to be written, per head and sequence: at most twice the error that torch makes in the same
    dtype (and a floor of one rounding, where torch happens to be exact). Everything else of a pool: the same bits.
    """
    expected = oracle_of(before)
    mine = copied(before)
    mine.pop("out", None)  # holds the results that are judged
    torch_o, torch_state = torch_results(function, mine, monkeypatch)
    o, state = results
    is_chunk = function == "chunk_gated_delta_rule"
    step = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[o.dtype]
    floor = step if is_chunk else 2e-5
    _within(token_error(o, expected.o, expected.offsets), token_error(torch_o, expected.o, expected.offsets), floor, "o")
    _zero_where_padding(o, expected)

    indices = before.get("state_indices", before.get("ssm_state_indices"))
    pool = arguments["initial_state"] if indices is not None else None
    if pool is None:
        assert (state is None) == (torch_state is None)
        if state is not None and torch_state is not None and expected.state is not None:
            _within(error(state, expected.state, 2), error(torch_state, expected.state, 2), floor, "final_state")
        return expected
    assert expected.state is not None and (state is None or state is pool)
    written = sorted(expected.written_slots)
    if written:
        found = error(pool[written], expected.state[written], 2)
        _within(found, error(mine["initial_state"][written], expected.state[written], 2), floor, "pool")
    others = [slot for slot in range(pool.shape[0]) if slot not in expected.written_slots]
    original = before["initial_state"]
    assert same_bits(pool[others], original[others]), "a slot that nobody owns was written"
    inner = pool[0].numel()
    if pool.shape[0] > 1 and pool.stride(0) > inner:
        gaps, original_gaps = (
            x.as_strided((x.shape[0] - 1, x.stride(0) - inner), (x.stride(0), 1), x.storage_offset() + inner)
            for x in (pool, original)
        )
        assert same_bits(gaps, original_gaps), "the space between two slots was written"
    return expected


def _within(found: Error, of_torch: Error, floor: float, what: str) -> None:
    l2, peak = 2 * of_torch.l2 + floor, 2 * of_torch.peak + 2 * floor
    assert math.isfinite(l2) and math.isfinite(peak), f"{what}: torch gives no number: {of_torch}"
    assert found.within(l2, peak), f"{what}: {found}, allowed l2 {l2:.3g} and peak {peak:.3g} (torch: {of_torch})"


def _zero_where_padding(o: torch.Tensor, expected: DeltaRuleResult) -> None:
    rows = o.flatten(0, 1)
    for n, is_live in enumerate(expected.live):
        if not is_live:
            assert bool((rows[expected.offsets[n] : expected.offsets[n + 1]] == 0).all()), f"padding sequence {n}"
