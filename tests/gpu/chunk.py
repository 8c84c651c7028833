"""Parts that the tests of the chunk operator share: its arguments, and checks that hold for every form of its kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu.delta_rule import Arguments, Results, copied, judge, run

FUNCTION = "chunk_gated_delta_rule"
PER_TOKEN = ("q", "k", "v", "g", "beta")
PER_SEQUENCE = ("state_indices", "has_initial_state")

Call = Callable[[Arguments], Results]


def arguments_of(problem: ChunkProblem, device: torch.device, **changes: Any) -> Arguments:
    """Strided, with tokens beyond the last sequence and `out` full of NaN; with a pool: null slots (of `null_sequences`), gaps
    and NaN around every state. changes: of chunk_inputs; lengths are among them.
    """
    options: dict[str, Any] = {"strided": True, "padded_tokens": 7}
    if problem.pooled:
        options |= {"slot_gap": 24, "null_slot": 0}
    else:
        changes = {name: value for name, value in changes.items() if name != "null_sequences"}
    arguments = chunk_inputs(problem, device, **{**options, **changes})
    v = arguments["v"]
    shape = (1, v.shape[1], problem.num_state_heads, problem.head_v_dim)
    arguments["out"] = torch.full(shape, torch.nan, dtype=v.dtype, device=device)
    return arguments


def by(backend: str) -> Call:
    """The public operator."""
    return lambda arguments: run(FUNCTION, arguments, backend)


def check(arguments: Arguments, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call against the oracle."""
    before = copied(arguments)
    judge(FUNCTION, arguments, call(arguments), before, monkeypatch)


def check_repeats(arguments: Arguments, call: Call, count: int = 20) -> None:
    """The same bits every time."""
    first: Results | None = None
    for _ in range(count):
        again = copied(arguments)
        again["out"] = torch.full_like(arguments["out"], torch.nan)
        o, pool = call(again)
        assert pool is not None
        first = (o, pool) if first is None else first
        assert first[1] is not None and same_bits(o, first[0]) and same_bits(pool, first[1])


def check_replays(
    arguments: Arguments,
    capture: Callable[[Arguments], Callable[[], Results]],
    lengths: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured call replayed with other lengths of its sequences. capture: what is captured, of given arguments."""
    arguments["initial_state"].nan_to_num_(0.1)
    start = copied(arguments)
    capture(copied(arguments))()  # compiles and loads outside the capture
    call = capture(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for its_lengths in lengths:
        offsets = torch.tensor([0, *torch.tensor(its_lengths).cumsum(0).tolist()])
        arguments["cu_seqlens"].copy_(offsets)
        for name in PER_TOKEN:  # rows that were padding may be tokens now
            arguments[name].copy_(torch.nan_to_num(arguments[name], nan=-0.01))
        arguments["initial_state"].copy_(start["initial_state"])
        results[0].fill_(torch.nan)
        before = copied(arguments)
        before["cu_seqlens"] = arguments["cu_seqlens"].clone()
        graph.replay()
        torch.cuda.synchronize()
        judge(FUNCTION, arguments, results, before, monkeypatch)


def public(backend: str) -> Callable[[Arguments], Callable[[], Results]]:
    """The public operator for check_replays."""

    def capture(arguments: Arguments) -> Callable[[], Results]:
        def call() -> Results:
            results: Results = gdn.chunk_gated_delta_rule(**arguments, backend=backend)
            return results

        return call

    return capture


def check_alone(before: Arguments, results: Results, call: Call) -> None:
    """Every sequence of a batch, called alone: the same bits as in `results`. before: the batch's arguments, untouched."""
    o, pool = results
    assert pool is not None
    offsets = before["cu_seqlens"].tolist()
    for n, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        alone = copied(before)
        alone |= {name: before[name][:, begin:end] for name in PER_TOKEN}
        alone |= {name: before[name][n : n + 1] for name in PER_SEQUENCE if name in before}
        alone["cu_seqlens"] = torch.tensor([0, end - begin], dtype=before["cu_seqlens"].dtype, device=o.device)
        alone.pop("out", None)
        if "state_indices" not in before:
            alone["initial_state"] = before["initial_state"][n : n + 1]
        its_o, its_pool = call(alone)
        assert its_pool is not None
        slot, its_slot = (int(before["state_indices"][n]),) * 2 if "state_indices" in before else (n, 0)
        assert same_bits(o[:, begin:end], its_o) and same_bits(pool[slot], its_pool[its_slot]), f"sequence {n}"
