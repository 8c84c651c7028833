"""The TileLang chunk kernel in one launch, with clusters of two to four blocks: all of them serve all sizes."""

from typing import Any

import pytest
import torch

from gdn.ops.delta_rule.inputs import CASES, chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_alone, check_repeats, check_replays, public
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, run

pytestmark = pytest.mark.gpu

BACKEND = "tilelang"
RAGGED: dict[str, Any] = {
    "lengths": [65, 0, 1, 63, 64, 200, 0, 130, 321, 64, 0],
    "null_sequences": [4, 7],
    "padded_tokens": 70,
}
WIDE = [problem for problem in cases.chunk_problems() if problem.head_k_dim == 128]  # what the one launch serves


any_cluster = pytest.mark.parametrize("cluster", [2, 3, 4])


@any_cluster
@pytest.mark.parametrize("problem", WIDE, ids=cases.name)
def test_variants(
    problem: ChunkProblem, cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=0, cluster_size=cluster)
    arguments = arguments_of(problem, device, **RAGGED)
    if problem.has_final_indices:
        arguments["final_state_indices"][3] = 0  # not stored
    check(arguments, by(BACKEND), monkeypatch)


@any_cluster
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_checkpoints(index_dtype: str, cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=0, cluster_size=cluster)
    problem = chunk_problem(**cases.MAIN | {"index_dtype": index_dtype}, has_mask=True, has_checkpoints=True)
    check(arguments_of(problem, device, **RAGGED), by(BACKEND), monkeypatch)


@any_cluster
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_of_all_sizes(
    dtype: str, cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    """Neighbouring keys up to a thousandfold apart: where the inverse is rounded, norms are at its rows and at its columns."""
    force(split_chunks=0, cluster_size=cluster)
    problem = chunk_problem(**cases.MAIN | {"dtype": dtype}, has_mask=True)
    arguments = arguments_of(problem, device, **RAGGED)
    sizes = torch.logspace(-1.5, 1.5, 7, device=device)[torch.arange(arguments["k"].shape[1], device=device) % 7]
    arguments["k"].mul_(sizes[None, :, None, None])
    check(arguments, by(BACKEND), monkeypatch)


@any_cluster
@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: Any, cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=0, cluster_size=cluster)
    check(arguments_of(cases.MAIN_CHUNK, device, case=case, **RAGGED), by(BACKEND), monkeypatch)


@any_cluster
@pytest.mark.parametrize(
    "lengths", [[0], [0] * 9, [1] * 40, *([64 * n - 3] for n in (1, 2, 3, 4, 5, 7, 17, 33)), [700, 0, 700], [3, 640]], ids=str
)
def test_lengths(lengths: list[int], cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Few chunks and many: every buffer and barrier is used for the first time, again, and more often than there are phases."""
    force(split_chunks=0, cluster_size=cluster)
    check(arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=70), by(BACKEND), monkeypatch)


@any_cluster
def test_more_clusters_than_fit_at_a_time(
    cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=0, cluster_size=cluster)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[65] * 3 + [1] * 290 + [700] + [2] * 5)
    check(arguments, by(BACKEND), monkeypatch)


@any_cluster
def test_repeats(cluster: int, device: torch.device, force: Force) -> None:
    """Some chunks are partial: the inverse comes later than the product there."""
    force(split_chunks=0, cluster_size=cluster)
    check_repeats(arguments_of(cases.MAIN_CHUNK, device, lengths=[640, 129, 64, 700, 1, 63, 100] * 9), by(BACKEND))


@any_cluster
def test_a_sequence_is_the_same_alone(cluster: int, device: torch.device, force: Force) -> None:
    force(split_chunks=0, cluster_size=cluster)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[64 * 9, 300, 1, 64, 0, 129], padded_tokens=70)
    before = copied(arguments)
    check_alone(before, run(FUNCTION, arguments, BACKEND), by(BACKEND))


@any_cluster
def test_graph_replay_with_other_lengths(
    cluster: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=0, cluster_size=cluster)
    lengths = ([65, 0, 1, 363, 64, 200, 0, 130], [0, 700, 3, 0, 0, 0, 20, 100], [823, 0, 0, 0, 0, 0, 0, 0], [0] * 8)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths[0], null_sequences=[4])
    check_replays(arguments, public(BACKEND), lengths, monkeypatch)


@any_cluster
def test_a_checkpoint_is_the_state_of_a_shorter_call(cluster: int, device: torch.device, force: Force) -> None:
    force(split_chunks=0, cluster_size=cluster)
    problem = chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True)
    arguments = arguments_of(problem, device, lengths=[640], padded_tokens=0)
    arguments["checkpoint_offsets"] = torch.tensor([[192, 640]], dtype=torch.int32, device=device)
    shorter = copied(arguments)
    run(FUNCTION, arguments, BACKEND)
    slot, slots = int(arguments["state_indices"][0]), arguments["checkpoint_slots"][0].tolist()
    assert same_bits(arguments["initial_state"][slots[1]], arguments["initial_state"][slot])
    for name in ("q", "k", "v", "g", "beta"):
        shorter[name] = shorter[name][:, :192]
    shorter["cu_seqlens"] = torch.tensor([0, 192], dtype=arguments["cu_seqlens"].dtype, device=device)
    del shorter["out"]
    shorter["checkpoint_offsets"] = torch.zeros_like(arguments["checkpoint_offsets"])
    run(FUNCTION, shorter, BACKEND)
    assert same_bits(shorter["initial_state"][slot], arguments["initial_state"][slots[0]])
