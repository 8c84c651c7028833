"""The chunk operator with sequences cut into segments, against the float64 oracle."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.problems import ChunkProblem
from gdn.runtime import env
from gdn.testing.compare import same_bits
from gdn.testing.inputs import CASES, chunk_inputs
from tests.gpu import cases
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, judge, run

pytestmark = pytest.mark.gpu

BACKENDS = ["cute", "tilelang"]  # those whose Config has `segment`
CUTE = ["cute"]  # test_chunk_segments.py has the like for TileLang, whose kernels compile long
FUNCTION = "chunk_gated_delta_rule"
SEGMENT = 2  # chunks, so 128 tokens
LENGTHS = [0, 1, 127, 128, 129, 64, 256, 700, 0, 257, 384]
NULL_SEQUENCES = [6]
def arguments_of(problem: ChunkProblem, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Ragged around the borders of segments, strided, padded; with a pool: a null slot, gaps and NaN around every state."""
    options: dict[str, Any] = {"lengths": LENGTHS, "strided": True, "padded_tokens": 200}
    if problem.pooled:
        options |= {"slot_gap": 24, "null_sequences": NULL_SEQUENCES, "null_slot": 0}
    arguments = chunk_inputs(problem, device, **{**options, **changes})
    v = arguments["v"]
    shape = (1, v.shape[1], problem.num_state_heads, problem.head_v_dim)
    arguments["out"] = torch.full(shape, torch.nan, dtype=v.dtype, device=device)
    return arguments


@pytest.mark.parametrize("backend", CUTE)
@pytest.mark.parametrize("problem", cases.chunk_problems(), ids=cases.name)
def test_variants(
    problem: ChunkProblem, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(segment=SEGMENT)
    arguments = arguments_of(problem, device)
    if problem.has_final_indices:
        arguments["final_state_indices"][7] = 0  # not stored
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, backend), before, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("segment", [1, 3, 16])
def test_segment_lengths(segment: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(segment=segment)
    lengths = [1500, 64 * segment, 64 * segment + 1, 0, 5]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, null_sequences=[])
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, backend), before, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[0], [1], [128], [129], [1280], [0, 0, 300], [130] * 70], ids=str)
def test_lengths(lengths: list[int], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """With and without tokens beyond the last sequence: the last slot may or may not be used."""
    force(segment=SEGMENT)
    for padded_tokens in (0, 128):
        options = {"lengths": lengths, "null_sequences": [], "padded_tokens": padded_tokens}
        arguments = arguments_of(cases.MAIN_CHUNK, device, **options)
        before = copied(arguments)
        judge(FUNCTION, arguments, run(FUNCTION, arguments, backend), before, monkeypatch)


@pytest.mark.parametrize("backend", CUTE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hard_inputs(
    case: Any, dtype: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(segment=SEGMENT)
    problem = replace(cases.MAIN_CHUNK, dtype=dtype)
    arguments = arguments_of(problem, device, case=case)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, backend), before, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_lasts(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Little decay and weak updates: what a segment starts from comes through all segments before it."""
    force(segment=SEGMENT)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[4096], null_sequences=[])
    arguments["beta"].mul_(0.004)
    arguments["g"].mul_(1e-5)
    arguments["has_initial_state"].fill_(True)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, backend), before, monkeypatch)


@pytest.mark.parametrize("segment", [0, SEGMENT])
def test_prefetch(segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """What calls with many chunks a block compile."""
    force(segment=segment, prefetch=2)
    arguments = arguments_of(cases.MAIN_CHUNK, device)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, "cute"), before, monkeypatch)


@pytest.mark.parametrize("backend", CUTE)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_repeats_give_the_same_bits(head_dim: int, backend: str, device: torch.device, force: Force) -> None:
    force(segment=SEGMENT)
    problem = replace(cases.MAIN_CHUNK, head_k_dim=head_dim, head_v_dim=head_dim)
    arguments = arguments_of(problem, device)
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for _ in range(20):
        call = copied(arguments)
        call["out"] = torch.full_like(arguments["out"], torch.nan)
        o, pool = run(FUNCTION, call, backend)
        assert pool is not None
        first = (o, pool) if first is None else first
        assert same_bits(o, first[0]) and same_bits(pool, first[1])


@pytest.mark.parametrize("backend", CUTE)
def test_graph_replay_with_other_lengths(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(segment=SEGMENT)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[65, 0, 1, 363, 64, 200, 0, 130])
    arguments["initial_state"].nan_to_num_(0.1)
    start = copied(arguments)
    run(FUNCTION, copied(arguments), backend)  # compiles and loads outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gdn.chunk_gated_delta_rule(**arguments, backend=backend)
    for lengths in ([65, 0, 1, 363, 64, 200, 0, 130], [0, 800, 3, 0, 0, 0, 20, 0], [1023, 0, 0, 0, 0, 0, 0, 0], [0] * 8):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        arguments["cu_seqlens"].copy_(offsets)
        for name in ("q", "k", "v", "g", "beta"):  # rows that were padding may be tokens now
            arguments[name].copy_(torch.nan_to_num(arguments[name], nan=-0.01))
        arguments["initial_state"].copy_(start["initial_state"])
        arguments["out"].fill_(torch.nan)
        before = copied(arguments)
        before["cu_seqlens"] = arguments["cu_seqlens"].clone()
        graph.replay()
        torch.cuda.synchronize()
        judge(FUNCTION, arguments, results, before, monkeypatch)


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    monkeypatch.setenv("GDN_TUNED", "off")
    env.reload()
    yield
    monkeypatch.undo()
    env.reload()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariance(backend: str, device: torch.device, invariant: None) -> None:
    """A sequence alone and inside a batch: the same bits, and the batch holds sequences of several segments."""
    problem = replace(cases.MAIN_CHUNK, num_tokens=1, num_sequences=1)
    tokens = 64 * runtime.prepare(problem, device, backend).config.segment
    assert tokens > 0
    lengths = [2 * tokens + 70, 300, tokens, 0, tokens + 1]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, null_sequences=[])
    before = copied(arguments)
    o, pool = run(FUNCTION, arguments, backend)
    assert pool is not None
    offsets = arguments["cu_seqlens"].tolist()
    for n, length in enumerate(lengths):
        alone = copied(before)
        rows = slice(offsets[n], offsets[n + 1])
        alone |= {name: before[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        alone |= {name: before[name][n : n + 1] for name in ("state_indices", "has_initial_state")}
        alone["cu_seqlens"] = torch.tensor([0, length], dtype=before["cu_seqlens"].dtype, device=device)
        del alone["out"]
        alone_o, alone_pool = run(FUNCTION, alone, backend)
        assert alone_pool is not None
        slot = int(before["state_indices"][n])
        assert same_bits(o[:, rows], alone_o) and same_bits(pool[slot], alone_pool[slot]), f"sequence {n}"
