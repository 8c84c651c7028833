"""The TileLang chunk kernel with sequences cut into segments of a few chunks, against the float64 oracle."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.inputs import CASES, chunk_problem, chunk_tensors
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, check, check_alone, check_repeats, check_replays
from tests.gpu.delta_rule import Arguments, Results, copied, run

pytestmark = pytest.mark.gpu

SEGMENT = 2  # chunks
# Around the borders of segments of 128 tokens: nothing, one token, one segment and a token less or more, several.
RAGGED: dict[str, Any] = {
    "lengths": [0, 1, 127, 128, 129, 0, 255, 256, 257, 70, 640, 1, 900],
    "null_sequences": [4, 8],
    "padded_tokens": 70,
}
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
    """A launch with segments of this many chunks (0: whole sequences), its workspace full of NaN."""

    def __init__(self, problem: ChunkProblem, arguments: dict[str, Any], segment: int) -> None:
        module = runtime.candidates("chunk")["tilelang"].module
        tokens, sequences = arguments["q"].shape[1], arguments["cu_seqlens"].shape[0] - 1
        problem = dataclasses.replace(problem, num_tokens=tokens, num_sequences=sequences)
        config = dataclasses.replace(
            module.default_config(problem, H100), split_chunks=segment, cluster_size=2, split_if_longest_exceeds=0
        )
        device = arguments["q"].device
        self.prepared = runtime.prepare(problem, device, "tilelang", config=config)
        workspace = torch.full((self.prepared.workspace_bytes,), 255, dtype=torch.uint8, device=device)
        self.params = chunk_tensors(problem, arguments, workspace)

    def __call__(self) -> Results:
        assert self.prepared.launch is not None
        self.prepared.launch(self.params)
        return self.params.out, self.params.final_state


def segmented(problem: ChunkProblem, segment: int) -> Callable[[Arguments], Results]:
    """The call with segments; without a token the operator answers, and launches nothing."""

    def call(arguments: Arguments) -> Results:
        return Call(problem, arguments, segment)() if arguments["q"].shape[1] else run(FUNCTION, arguments, "tilelang")

    return call


@pytest.mark.parametrize("segment", [1, SEGMENT, 3, 7])
@pytest.mark.parametrize("name", PROBLEMS)
def test_ragged(name: str, segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(arguments_of(PROBLEMS[name], device, **RAGGED), segmented(PROBLEMS[name], segment), monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, case=case, lengths=[1500, 100, 129], padded_tokens=70)
    check(arguments, segmented(cases.MAIN_CHUNK, SEGMENT), monkeypatch)


@pytest.mark.parametrize("count", [17, 33])
def test_many_segments(count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[64 * count - 3], padded_tokens=70)
    check(arguments, segmented(cases.MAIN_CHUNK, 1), monkeypatch)


def test_repeats_give_the_same_bits(device: torch.device) -> None:
    check_repeats(arguments_of(cases.MAIN_CHUNK, device, **RAGGED), segmented(cases.MAIN_CHUNK, SEGMENT))


def test_one_segment_is_the_whole_sequence(device: torch.device) -> None:
    """The same bits as without segments, whether or not a call could hold two; D = 64, where both run the same chain."""
    problem = chunk_problem(**cases.MAIN | {"head_k_dim": 64, "head_v_dim": 64}, has_mask=True)
    arguments = arguments_of(problem, device, lengths=[640, 0, 3, 577], null_sequences=[2], padded_tokens=70)
    results = []
    for segment in (0, 10, 1000):
        call = copied(arguments)
        results.append(Call(problem, call, segment)())
    for o, pool in results[1:]:
        assert pool is not None and results[0][1] is not None
        assert same_bits(o, results[0][0]) and same_bits(pool, results[0][1])


def test_alone_or_in_a_batch(device: torch.device) -> None:
    """A sequence's bits depend on nothing but itself."""
    problem = PROBLEMS["own states, mask"]
    arguments = arguments_of(problem, device, **RAGGED | {"padded_tokens": 0})
    before = copied(arguments)
    check_alone(before, Call(problem, arguments, SEGMENT)(), segmented(problem, SEGMENT))


def test_graph_replay_with_other_lengths(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = ([650, 0, 1, 63, 0, 256], [0, 128, 300, 0, 129, 400], [1000, 0, 0, 0, 0, 0], [0] * 6)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths[0], null_sequences=[4], padded_tokens=70)
    check_replays(arguments, lambda its: Call(cases.MAIN_CHUNK, its, SEGMENT), lengths, monkeypatch)
