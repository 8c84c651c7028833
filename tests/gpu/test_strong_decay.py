"""Log decays from -1e3 to -inf, in the same chunk as ordinary ones, against the float64 token recurrence.

Every state head has a strength and every sequence a pattern of its own, so that one call has all pairs of them: errors are
judged per head and sequence. The problems and forms are those of the other tests, whose kernels are compiled for them anyway.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_problem, recurrent_problem
from gdn.ops.delta_rule.problem import RecurrentProblem
from tests.gpu import (
    cases,
    chunk,
    chunk_forms,
    test_chunk_checkpoints,
    test_gdn_decode,
    test_recurrent,
    test_recurrent_tree,
)
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.twins import twin

pytestmark = pytest.mark.gpu

STRENGTHS = (-1e3, -1e4, -1e6, -torch.inf)  # of the state heads, cyclically
PATTERNS = {  # of the sequences, cyclically: which tokens forget
    "every third": lambda t: t % 3 == 1,
    "one of a chunk": lambda t: t % 64 == 20,
    "first of a chunk": lambda t: t % 64 == 0,
    "last of a chunk": lambda t: t % 64 == 63,
    "every token": lambda t: t >= 0,
    "in the middle": lambda t: t == len(t) // 2,
    "two in turn": lambda t: (t % 50 == 7) | (t % 50 == 8),
}
# Sequences of several segments of two chunks, too; each of the first seven patterns has tokens, and some have them twice.
LENGTHS = [200, 300, 65, 257, 70, 384, 130, 64, 1, 0, 129]
RAGGED: dict[str, Any] = {"lengths": LENGTHS, "padded_tokens": 70, "null_sequences": [7]}
SEGMENT = chunk_forms.SEGMENT


def forgetful(g: torch.Tensor, offsets: torch.Tensor, is_raw: bool = False) -> None:
    """Puts the strengths into g [1, T, heads], a log decay (or a raw gate, whose softplus is itself)."""
    patterns = list(PATTERNS.values())
    strengths = torch.tensor(STRENGTHS, device=g.device).to(g.dtype) * (-1 if is_raw else 1)
    strengths = strengths[torch.arange(g.shape[2], device=g.device) % len(STRENGTHS)]
    bounds = offsets.tolist()
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        tokens = torch.arange(end - start, device=g.device)
        forgets = patterns[n % len(patterns)](tokens)
        g[0, start:end] = torch.where(forgets[:, None], strengths, g[0, start:end])


def check_chunk(arguments: Arguments, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful(arguments["g"], arguments["cu_seqlens"], bool(arguments.get("use_gate_in_kernel")))
    chunk.check(arguments, chunk.by(backend), monkeypatch)


# What computes whole sequences, sequences in segments, and one or the other by the lengths.
WHOLE = ("clusters", "items-3", "fours", "both", "ring", "tilelang-2", "tilelang-4")
FORMS: list[tuple[str, dict[str, int]]] = [
    *((form, {}) for form in (*WHOLE, *chunk_forms.IN_SEGMENTS)),
    *(
        (form, {"split_chunks": SEGMENT, "split_if_longest_exceeds": tokens})
        for form in ("both", "clusters", "tilelang-4")
        for tokens in (100, 10**6)  # all are cut, or none
    ),
]


@pytest.mark.parametrize(("form", "changes"), FORMS, ids=str)
def test_chunk(form: str, changes: dict[str, int], device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Final states and checkpoints are judged as o is."""
    backend = chunk_forms.take(form, force, **changes).backend
    problem = chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True)
    check_chunk(chunk.arguments_of(problem, device, **RAGGED), backend, monkeypatch)


def test_chunk_of_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True)
    check_chunk(chunk.arguments_of(problem, device, **RAGGED), "reference", monkeypatch)


@pytest.mark.parametrize("backend", backends("chunk"))
@pytest.mark.parametrize("segment", [0, SEGMENT])
def test_chunk_of_64(segment: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=segment)
    problem = test_chunk_checkpoints.WITH_64
    assert problem.head_k_dim == 64
    check_chunk(chunk.arguments_of(problem, device, **RAGGED), backend, monkeypatch)


@pytest.mark.parametrize("segment", [0, SEGMENT])
@pytest.mark.parametrize("dim", [60, 100])
def test_chunk_of_padded_dims(
    dim: int, segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=segment)
    fields = {"index_dtype": "int32", "has_mask": True, "has_checkpoints": True, "state_dtype": "bfloat16"}
    problem = chunk_forms.of_head_dim(dim, **fields)
    check_chunk(chunk.arguments_of(problem, device, **RAGGED), "cute", monkeypatch)


def test_chunk_of_large_dims(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed token by token."""
    problem = chunk_forms.of_head_dim(132, **chunk_forms.HEAD_DIM_STATES[0])
    check_chunk(chunk.arguments_of(problem, device, **RAGGED), "cute", monkeypatch)


RAW = next(problem for problem in chunk_forms.WIDE if problem.use_gate and problem.dtype == "bfloat16")


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("cute", {"split_chunks": 0, "num_persistent_clusters": 3}),
        ("tilelang", {"split_chunks": 0, "cluster_size": 2}),
        ("tilelang", {"split_chunks": 2}),
        ("reference", {}),
    ],
    ids=str,
)
def test_chunk_of_raw_gates(
    backend: str, fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    """softplus(a) is a where a is large, and inf where a is."""
    if fields:
        force(**fields)
    check_chunk(chunk.arguments_of(RAW, device, **RAGGED), backend, monkeypatch)


def check_recurrent(arguments: Arguments, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful(arguments["g"], arguments["cu_seqlens"], bool(arguments.get("use_gate_in_kernel")))
    test_recurrent.check(arguments, backend, monkeypatch)


# Every pattern of a few tokens: from two of a sequence on an ordinary decay comes before a strong one, and after it.
STEPS: dict[str, Any] = {"lengths": [4, 3, 2, 1, 4, 4, 9, 1], "null_sequences": [3]}
RECURRENT = {"pool": cases.MAIN_RECURRENT, "drafts": cases.MAIN_SPECULATIVE}


@test_recurrent.LAYOUTS
@pytest.mark.parametrize("backend", [*backends("recurrent"), "reference"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states(name: str, backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem: RecurrentProblem = replace(RECURRENT[name], state_v_first=v_first)
    check_recurrent(test_recurrent.arguments_of(problem, device, **STEPS), backend, monkeypatch)


@test_recurrent.LAYOUTS
@pytest.mark.parametrize("backend", [*backends("recurrent"), "reference"])
def test_recurrent_tree_states(backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = recurrent_problem(**{**cases.MAIN, **test_recurrent_tree.TREE, "state_v_first": v_first})
    arguments = test_recurrent_tree.arguments_of(problem, "random", device, **STEPS)
    check_recurrent(arguments, backend, monkeypatch)


@pytest.mark.parametrize("problem", [test_recurrent.MAIN, test_recurrent.DRAFTS], ids=["pool", "drafts"])
def test_recurrent_of_raw_gates(problem: RecurrentProblem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    test_recurrent.force(monkeypatch, 0)
    check_recurrent(test_recurrent.arguments_of(problem, device, **STEPS), "cute", monkeypatch)


DECODES = {
    "ragged": test_gdn_decode.Case(),
    "a token each": test_gdn_decode.Case(lengths=(1,) * 9, offsets_dtype=None),
    "drafts": test_gdn_decode.Case(spec=7),
}


@test_recurrent.LAYOUTS
@pytest.mark.parametrize("backend", [*backends("gdn_decode"), "reference"])
@pytest.mark.parametrize("name", DECODES)
def test_fused_decode(name: str, backend: str, v_first: bool, device: torch.device) -> None:
    """Decay is strong through a, whose softplus is itself where it is large: by A_log, not all heads decay by the same."""
    case = replace(DECODES[name], v_first=v_first)
    if backend == "reference":  # it rounds what one step hands to the next to the dtype of its inputs
        case = replace(case, **dict.fromkeys(("dtype", "other_dtype", "weight_dtype", "conv_dtype"), torch.float32))
    arguments, ignored = test_gdn_decode.make(case, device)
    forgetful(arguments["a"][None], torch.tensor(case.starts()), is_raw=True)
    arguments["a"][ignored] = torch.nan
    before = twin(arguments)
    gdn.fused_gdn_decode(**arguments, backend=backend)
    test_gdn_decode.judge(case, before, arguments, ignored)
