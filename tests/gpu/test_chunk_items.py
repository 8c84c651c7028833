"""The chunk operator with more work than there is room for at a time: clusters take one work tile after the other."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_alone, check_replays, public
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, judge, run

pytestmark = pytest.mark.gpu

BACKEND = "cute"
RAGGED: dict[str, Any] = {
    "lengths": [65, 0, 1, 63, 64, 200, 0, 130, 321, 64, 0],
    "null_sequences": [4, 7],
    "padded_tokens": 70,
}


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("problem", cases.chunk_problems(), ids=cases.name)
def test_variants(
    problem: ChunkProblem, clusters: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=0, num_persistent_clusters=clusters)
    arguments = arguments_of(problem, device, **RAGGED)
    if problem.has_final_indices:
        arguments["final_state_indices"][3] = 0  # not stored
    check(arguments, by(BACKEND), monkeypatch)


def test_prefetch(device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=0, num_persistent_clusters=5, prefetch=2)
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("head_dim", [128, 64])
def test_checkpoints(head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=0, num_persistent_clusters=3)
    problem = chunk_problem(**cases.MAIN | {"head_k_dim": head_dim, "head_v_dim": head_dim}, has_mask=True, has_checkpoints=True)
    arguments = arguments_of(problem, device, **RAGGED)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("lengths", [[0], [0] * 9, [1] * 40, [64] * 7, [700, 0, 700], [3, 640]], ids=str)
def test_lengths(lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=0, num_persistent_clusters=3)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=70)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("count", [100, 300])
@pytest.mark.parametrize("heads", [(2, 4), (16, 32)], ids=str)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_who_works_on_it_changes_no_bit(
    head_dim: int, heads: tuple[int, int], count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    """300 sequences are more than are sorted. The fewer clusters, the more items a cluster takes."""
    rng = random.Random(count)
    lengths = [rng.choice((0, 64, 128, rng.randint(1, 300))) for _ in range(count)]
    sizes = {"num_q_heads": heads[0], "num_k_heads": heads[0], "num_v_heads": heads[1]}
    problem = replace(cases.MAIN_CHUNK, head_k_dim=head_dim, head_v_dim=head_dim, **sizes)
    arguments = arguments_of(problem, device, lengths=lengths, null_sequences=rng.sample(range(count), 7), padded_tokens=70)
    start = copied(arguments)
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for clusters in (66, 1, 7, 64, 66, 66):
        if clusters == 1 and count * heads[1] > 1000:
            continue  # one cluster for all of it takes long
        force(split_chunks=0, num_persistent_clusters=clusters)
        call = copied(start)
        call["out"] = torch.full_like(arguments["out"], torch.nan)
        o, pool = run(FUNCTION, call, BACKEND)
        assert pool is not None
        if first is None:
            first = (o, pool)
            if heads == (2, 4) and count == 100:
                judge(FUNCTION, call, (o, pool), start, monkeypatch)
        assert same_bits(o, first[0]) and same_bits(pool, first[1]), f"{clusters} clusters"


def test_a_sequence_is_the_same_alone(device: torch.device, force: Force) -> None:
    lengths = [64 * 9, 300, 1, 64, 0, 129]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=70)
    before = copied(arguments)
    force(split_chunks=0, num_persistent_clusters=2)
    results = run(FUNCTION, arguments, BACKEND)
    force(split_chunks=0)
    check_alone(before, results, by(BACKEND))


def test_graph_replay_with_other_lengths(device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """The deal is made from lengths that are on the device."""
    force(split_chunks=0, num_persistent_clusters=3)
    lengths = ([65, 0, 1, 363, 64, 200, 0, 130], [0, 700, 3, 0, 0, 0, 20, 100], [823, 0, 0, 0, 0, 0, 0, 0], [0] * 8)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths[0], null_sequences=[4])
    check_replays(arguments, public(BACKEND), lengths, monkeypatch)
