"""The TileLang chunk kernel with sequences cut into segments of a few chunks, against the float64 oracle."""

import dataclasses
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.device import H100
from gdn.problems import ChunkProblem
from gdn.testing.compare import same_bits
from gdn.testing.inputs import CASES, chunk_inputs, chunk_problem, chunk_tensors
from tests.gpu import cases
from tests.gpu.delta_rule import Results, copied, judge

pytestmark = pytest.mark.gpu

FUNCTION = "chunk_gated_delta_rule"
SEGMENT = 2  # chunks
# Around the borders of segments of 128 tokens: nothing, one token, one segment and a token less or more, several.
LENGTHS = [0, 1, 127, 128, 129, 0, 255, 256, 257, 70, 640, 1, 900]
_PLAIN = {"head_k_dim": 128, "head_v_dim": 128, "dtype": "bfloat16"}
PROBLEMS = {
    "pool": cases.MAIN_CHUNK,
    "bfloat16 pool, K first": chunk_problem(
        **_PLAIN, index_dtype="int64", state_dtype="bfloat16", has_final_indices=True, cu_seqlens_dtype="int64",
        gate_dtype="bfloat16", use_gate=True, beta_dtype="bfloat16", use_beta_sigmoid=True,
    ),
    "float16, no start": chunk_problem(**{**_PLAIN, "dtype": "float16"}, num_v_heads=6, has_initial_state=False),
    "own states, mask": chunk_problem(**_PLAIN, has_mask=True, state_v_first=True, state_dtype="bfloat16", use_qk_l2norm=False),
    "64, GQA": chunk_problem(
        head_k_dim=64, head_v_dim=64, dtype="float16", num_q_heads=4, num_v_heads=2, gate_dtype=None, beta_dtype=None,
    ),
    "64, outputs alone": chunk_problem(
        head_k_dim=64, head_v_dim=64, dtype="bfloat16", has_final_state=False, state_v_first=True,
    ),
}  # fmt: skip


class Call:
    """A launch with segments of so many chunks (0: whole sequences), its workspace full of NaN."""

    def __init__(self, problem: ChunkProblem, arguments: dict[str, Any], segment: int) -> None:
        module = runtime.candidates("chunk")["tilelang"].module
        tokens, sequences = arguments["q"].shape[1], arguments["cu_seqlens"].shape[0] - 1
        problem = dataclasses.replace(problem, num_tokens=tokens, num_sequences=sequences)
        config = dataclasses.replace(module.default_config(problem, H100), segment=segment)
        device = arguments["q"].device
        self.prepared = runtime.prepare(problem, device, "tilelang", config=config)
        workspace = torch.full((self.prepared.workspace_bytes,), 255, dtype=torch.uint8, device=device)
        self.tensors = chunk_tensors(problem, arguments, workspace)

    def __call__(self) -> Results:
        assert self.prepared.launch is not None
        self.prepared.launch(*self.tensors)
        return self.tensors[15][None], self.tensors[10]


def arguments_of(problem: ChunkProblem, device: torch.device, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"lengths": LENGTHS, "strided": True, "padded_tokens": 70}
    if problem.pooled:
        options |= {"slot_gap": 24, "null_sequences": [4, 8], "null_slot": 0}
    return chunk_inputs(problem, device, **{**options, **changes})


@pytest.mark.parametrize("segment", [1, SEGMENT, 3, 7])
@pytest.mark.parametrize("name", PROBLEMS)
def test_ragged(name: str, segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(PROBLEMS[name], device)
    before = copied(arguments)
    judge(FUNCTION, arguments, Call(PROBLEMS[name], arguments, segment)(), before, monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, case=case, lengths=[1500, 100, 129], null_sequences=[])
    before = copied(arguments)
    judge(FUNCTION, arguments, Call(cases.MAIN_CHUNK, arguments, SEGMENT)(), before, monkeypatch)


@pytest.mark.parametrize("count", [17, 33])
def test_many_segments(count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[64 * count - 3], null_sequences=[])
    before = copied(arguments)
    judge(FUNCTION, arguments, Call(cases.MAIN_CHUNK, arguments, 1)(), before, monkeypatch)


def test_repeats_give_the_same_bits(device: torch.device) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device)
    first: Results | None = None
    for _ in range(20):
        call = copied(arguments)
        o, pool = Call(cases.MAIN_CHUNK, call, SEGMENT)()
        assert pool is not None
        first = (o, pool) if first is None else first
        assert first[1] is not None and same_bits(o, first[0]) and same_bits(pool, first[1])


def test_one_segment_is_the_whole_sequence(device: torch.device) -> None:
    """The same bits as without segments, whether or not a call could hold two."""
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[640, 0, 3, 577], null_sequences=[2])
    results = []
    for segment in (0, 10, 1000):
        call = copied(arguments)
        results.append(Call(cases.MAIN_CHUNK, call, segment)())
    for o, pool in results[1:]:
        assert pool is not None and results[0][1] is not None
        assert same_bits(o, results[0][0]) and same_bits(pool, results[0][1])


def test_alone_or_in_a_batch(device: torch.device) -> None:
    """A sequence's bits depend on nothing but itself."""
    problem = PROBLEMS["own states, mask"]
    arguments = arguments_of(problem, device, padded_tokens=0)
    o, states = Call(problem, arguments, SEGMENT)()
    assert states is not None
    offsets = arguments["cu_seqlens"].tolist()
    for n in (4, 7, 10, 12):
        begin, end = offsets[n], offsets[n + 1]
        alone = arguments | {name: arguments[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        alone["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        alone["initial_state"] = arguments["initial_state"][n : n + 1]
        alone["has_initial_state"] = arguments["has_initial_state"][n : n + 1]
        its_o, its_state = Call(problem, alone, SEGMENT)()
        assert its_state is not None
        assert same_bits(its_o[0], o[0, begin:end]) and same_bits(its_state[0], states[n])


def test_graph_replay_with_other_lengths(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[650, 0, 1, 63, 0, 256], null_sequences=[4])
    arguments["initial_state"].nan_to_num_(0.1)
    start = copied(arguments)
    Call(cases.MAIN_CHUNK, copied(arguments), SEGMENT)()  # compiles and loads outside the capture
    call = Call(cases.MAIN_CHUNK, arguments, SEGMENT)
    out = call.tensors[15]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for lengths in ([650, 0, 1, 63, 0, 256], [0, 128, 300, 0, 129, 400], [1000, 0, 0, 0, 0, 0], [0] * 6):
        arguments["cu_seqlens"].copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        for name in ("q", "k", "v", "g", "beta"):  # rows that were padding may be tokens now
            arguments[name].copy_(torch.nan_to_num(arguments[name], nan=-0.01))
        arguments["initial_state"].copy_(start["initial_state"])
        out.fill_(torch.nan)
        before = copied(arguments)
        before["cu_seqlens"] = arguments["cu_seqlens"].clone()
        graph.replay()
        torch.cuda.synchronize()
        judge(FUNCTION, arguments, results, before, monkeypatch)
