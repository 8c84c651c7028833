"""The chunk operator with head dims that its kernel computes as another, against the float64 oracle."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_repeats, check_replays, public
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, judge, run

pytestmark = pytest.mark.gpu

RAGGED: dict[str, Any] = {"lengths": [65, 0, 1, 63, 64, 200, 0, 130], "null_sequences": [4]}
BACKEND = "cute"
HEAD_DIMS = [4, 12, 36, 60, 68, 100, 124, 132, 192, 256]
STATES: list[dict[str, Any]] = [
    {"index_dtype": "int32", "has_mask": True, "state_v_first": True},
    {"has_initial_state": False, "has_final_state": False, "dtype": "float16"},
    {"index_dtype": "int64", "state_dtype": "bfloat16", "has_final_indices": True, "has_mask": True, "use_qk_l2norm": False},
    {"has_mask": True, "state_dtype": "bfloat16", "state_v_first": True, "gate_dtype": "bfloat16", "use_gate": True},
    {"has_initial_state": False, "gate_dtype": None, "cu_seqlens_dtype": "int64", "num_q_heads": 4, "num_v_heads": 2},
    {"index_dtype": "int32", "state_v_first": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True, "num_v_heads": 6},
]
VARIANTS = [(dim, STATES[(i + shift) % 6]) for i, dim in enumerate(HEAD_DIMS) for shift in (0, 2, 3)]


def problem_of(dim: int, **fields: Any) -> ChunkProblem:
    return chunk_problem(**{"dtype": "bfloat16", "head_k_dim": dim, "head_v_dim": dim, **fields})


@pytest.mark.parametrize(("dim", "fields"), VARIANTS)
def test_variants(dim: int, fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(problem_of(dim, **fields), device, **RAGGED)
    if "final_state_indices" in arguments:
        arguments["final_state_indices"][3] = 0  # not stored
    if "state_indices" not in arguments:
        arguments["null_slot"] = 0  # names no sequence
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("dim", [60, 100])
def test_checkpoints(dim: int, segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=segment)
    problem = problem_of(dim, index_dtype="int32", has_mask=True, has_checkpoints=True, state_dtype="bfloat16")
    arguments = arguments_of(problem, device, lengths=[0, 63, 64, 65, 128, 700, 64, 257], null_sequences=[6])
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("case", ["correlated_99", "large_norm", "zero_norm", "total_decay"])
@pytest.mark.parametrize("dim", [60, 100])
def test_hard_inputs(dim: int, case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(problem_of(dim, **STATES[0]), device, case=case, **RAGGED)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("lengths", [[0], [1], [63], [0, 0, 3], [1] * 40])
@pytest.mark.parametrize("dim", [60, 132])
def test_lengths(dim: int, lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(problem_of(dim, **STATES[0]), device, lengths=lengths)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("dim", [60, 100, 192])
def test_repeats_give_the_same_bits(dim: int, device: torch.device) -> None:
    arguments = arguments_of(problem_of(dim, **STATES[0]), device, **RAGGED)
    check_repeats(arguments, by(BACKEND), 5)


@pytest.mark.parametrize("dim", [60, 100, 132])
def test_graph_replay_with_other_lengths(dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(problem_of(dim, **STATES[0]), device, **RAGGED)
    lengths = (RAGGED["lengths"], [0, 500, 3, 0, 0, 0, 20, 0], [0] * 8)
    check_replays(arguments, public(BACKEND), lengths, monkeypatch)


@pytest.mark.parametrize("dim", [60, 100])
def test_batch_rows_and_views(dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, T] without cu_seqlens, a tensor whose address kernels cannot take, and one whose rows are 4 bytes off."""
    packed = arguments_of(problem_of(dim, has_initial_state=False), device, lengths=[70, 70, 70], padded_tokens=0)
    batch: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    batch |= {name: packed[name].unflatten(1, (3, 70)).squeeze(0) for name in ("q", "k", "v", "g", "beta")}
    buffer = torch.empty(batch["q"].numel() + 1, dtype=torch.bfloat16, device=device)
    batch["q"] = buffer[1:].view(batch["q"].shape).copy_(batch["q"])
    rows = torch.empty(3, 70, 2 * dim + 2, dtype=torch.bfloat16, device=device)
    batch["k"] = rows[..., : 2 * dim].unflatten(-1, (2, dim)).copy_(batch["k"])
    batch["initial_state"] = None
    check(batch, by(BACKEND), monkeypatch)


def test_checkpoints_of_large_head_dims_take_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(192, index_dtype="int32", has_checkpoints=True)
    arguments = arguments_of(problem, device, lengths=[130, 3])
    answer = gdn.explain(FUNCTION, **arguments)
    assert answer.backend == "reference" and "checkpoints" in dict(answer.refusals)["cute"]
    before = copied(arguments)
    results = gdn.chunk_gated_delta_rule(**arguments)
    judge(FUNCTION, arguments, results, before, monkeypatch)


def test_inputs_are_left_alone(device: torch.device) -> None:
    for dim in (60, 132):
        arguments = arguments_of(problem_of(dim, **STATES[0]), device, **RAGGED)
        kept = {k: x.clone() for k, x in arguments.items() if isinstance(x, torch.Tensor) and k not in ("out", "initial_state")}
        run(FUNCTION, arguments, BACKEND)
        for name, x in kept.items():
            assert same_bits(arguments[name], x), name


def test_the_cover_runs_every_state_on_both_kernels() -> None:
    """Guards the choice of variants above."""
    for is_recurrent in (False, True):
        kinds = {str(fields) for dim, fields in VARIANTS if (dim > 128) == is_recurrent}
        assert len(kinds) == len(STATES)
