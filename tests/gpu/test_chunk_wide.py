"""The chunk operator with four SMs for a sequence and head, against the float64 oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import CASES, chunk_inputs, chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, judge, run

pytestmark = pytest.mark.gpu

FUNCTION = "chunk_gated_delta_rule"
BACKEND = "cute"
FOUR_SM = {"stages": 3, "split_chunks": 0, "prefetch": 0, "num_persistent_clusters": 0}
# Most sequences and heads in clusters of four, and next to them: all in fours, and more of them than run at once; some in
# either form; as many in fours as the GPU has room for; one alone in a four.
FORMS = {"fours": (1, 1), "both": (7, 1000), "full": (30, 1000), "ring": (1, 1000)}
# 0 to 6 chunks and some: no chunk, and each set's first chunk, is the last one somewhere.
LENGTHS = [0, 1, 63, 64, 65, 128, 129, 192, 200, 256, 257, 0, 320, 384, 700]
NULL_SEQUENCES = [6]
each_form = pytest.mark.parametrize("form", FORMS)
PROBLEMS = [problem for problem in cases.chunk_problems() if problem.head_v_dim == 128]


def wide(form: str, **changes: int) -> dict[str, Any]:
    clusters, groups = FORMS[form]
    return FOUR_SM | {"num_four_sm_clusters": clusters, "max_l2_ring_groups": groups} | changes


def arguments_of(problem: ChunkProblem, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Ragged, strided, padded; with a pool: a null slot, gaps and NaN around every state."""
    options: dict[str, Any] = {"lengths": LENGTHS, "strided": True, "padded_tokens": 200}
    if problem.pooled:
        options |= {"slot_gap": 24, "null_sequences": NULL_SEQUENCES, "null_slot": 0}
    arguments = chunk_inputs(problem, device, **{**options, **changes})
    v = arguments["v"]
    shape = (1, v.shape[1], problem.num_state_heads, problem.head_v_dim)
    arguments["out"] = torch.full(shape, torch.nan, dtype=v.dtype, device=device)
    return arguments


@each_form
@pytest.mark.parametrize("problem", PROBLEMS, ids=cases.name)
def test_variants(problem: ChunkProblem, form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**wide(form))
    arguments = arguments_of(problem, device)
    if problem.has_final_indices:
        arguments["final_state_indices"][7] = 0  # not stored
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@pytest.mark.parametrize("lengths", [[0], [1], [64], [65], [640], [1300], [0, 0, 300], [130] * 70, [*range(1, 200, 3)]], ids=str)
@pytest.mark.parametrize("options", [{"stages": 2, "prefetch": 0}, {"stages": 3, "prefetch": 2}], ids=str)
@each_form
def test_lengths(
    lengths: list[int],
    options: dict[str, int],
    form: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force: Force,
) -> None:
    force(**wide(form, **options))
    for padded_tokens in (0, 128):
        arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, null_sequences=[], padded_tokens=padded_tokens)
        before = copied(arguments)
        judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hard_inputs(case: Any, dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**wide("both"))
    arguments = arguments_of(replace(cases.MAIN_CHUNK, dtype=dtype), device, case=case)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@each_form
def test_checkpoints(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**wide(form))
    arguments = arguments_of(chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True), device)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


def test_repeats_and_forms_give_the_same_bits(device: torch.device, force: Force) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[4096, 1, 4095, 70, 64, 700, 0, 1300], null_sequences=[])
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for form in FORMS:
        force(**wide(form))
        for _ in range(20):
            call = copied(arguments)
            call["out"] = torch.full_like(arguments["out"], torch.nan)
            o, pool = run(FUNCTION, call, BACKEND)
            assert pool is not None
            first = (o, pool) if first is None else first
            assert same_bits(o, first[0]) and same_bits(pool, first[1])


@pytest.mark.parametrize("heads", [30, 31, 33, 34, 66])
def test_as_many_as_run_at_once_and_more(heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """The clusters are those that the plan gives, and tokens are enough that both launches run at the same time."""
    force(**FOUR_SM | {"num_four_sm_clusters": 30, "max_l2_ring_groups": 3})
    problem = replace(cases.MAIN_CHUNK, num_q_heads=1, num_k_heads=1, num_v_heads=heads)
    arguments = arguments_of(problem, device, lengths=[2500], null_sequences=[])
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@each_form
def test_streams_share_the_gpu(form: str, device: torch.device, force: Force) -> None:
    """Calls that fill the GPU alone, on several streams at once; a workspace that another call has left."""
    force(**wide(form))
    problem = replace(cases.MAIN_CHUNK, num_q_heads=16, num_k_heads=16, num_v_heads=32)
    calls = [arguments_of(problem, device, lengths=lengths, null_sequences=[]) for lengths in ([1500], [700, 1, 900], [64, 2000])]

    def fresh(call: dict[str, Any]) -> dict[str, Any]:
        return copied(call) | {"out": torch.full_like(call["out"], torch.nan)}

    expected = [run(FUNCTION, fresh(call), BACKEND) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        arguments = [fresh(call) for call in calls]
        torch.cuda.synchronize()
        found = []
        for stream, call in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(FUNCTION, call, BACKEND))
        torch.cuda.synchronize()
        for (o, pool), (expected_o, expected_pool) in zip(found, expected, strict=True):
            assert pool is not None and expected_pool is not None
            assert same_bits(o, expected_o) and same_bits(pool, expected_pool)


@each_form
def test_graph_replay_with_other_lengths(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**wide(form))
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[65, 0, 1, 363, 64, 200, 0, 130])
    arguments["initial_state"].nan_to_num_(0.1)
    start = copied(arguments)
    run(FUNCTION, copied(arguments), BACKEND)  # compiles and loads outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gdn.chunk_gated_delta_rule(**arguments, backend=BACKEND)
    for lengths in ([65, 0, 1, 363, 64, 200, 0, 130], [0, 800, 3, 0, 0, 0, 20, 0], [1023, 0, 0, 0, 0, 0, 0, 0], [0] * 8):
        arguments["cu_seqlens"].copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        for name in ("q", "k", "v", "g", "beta"):  # rows that were padding may be tokens now
            arguments[name].copy_(torch.nan_to_num(arguments[name], nan=-0.01))
        arguments["initial_state"].copy_(start["initial_state"])
        arguments["out"].fill_(torch.nan)
        before = copied(arguments)
        before["cu_seqlens"] = arguments["cu_seqlens"].clone()
        graph.replay()
        torch.cuda.synchronize()
        judge(FUNCTION, arguments, results, before, monkeypatch)
