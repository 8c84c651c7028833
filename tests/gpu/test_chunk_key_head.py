"""The chunk operator with two state heads of a key head a cluster, against the float64 oracle."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn.ops.delta_rule.inputs import CASES, chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import explaining
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_repeats
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, run

pytestmark = pytest.mark.gpu

BACKEND = "cute"
FORM = {"split_chunks": 0, "prefetch": 0, "stages": 2, "state_heads": 2}
RAGGED: dict[str, Any] = {
    "lengths": [65, 0, 1, 63, 64, 200, 0, 130, 321, 64, 0],
    "null_sequences": [4, 7],
    "padded_tokens": 70,
}


def shares_keys(problem: ChunkProblem) -> bool:
    groups = [problem.num_state_heads // heads for heads in (problem.num_q_heads, problem.num_k_heads)]
    return problem.head_v_dim == 128 and all(group % 2 == 0 for group in groups)


PROBLEMS = [problem for problem in cases.chunk_problems() if shares_keys(problem)]


@pytest.mark.parametrize("clusters", [1, 3, 66])
@pytest.mark.parametrize("problem", PROBLEMS, ids=cases.name)
def test_variants(
    problem: ChunkProblem, clusters: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(**FORM, num_persistent_clusters=clusters)
    arguments = arguments_of(problem, device, **RAGGED)
    if problem.has_final_indices:
        arguments["final_state_indices"][3] = 0  # not stored
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("lengths", [[0], [0] * 9, [1] * 40, [64] * 7, [700, 0, 700], [3, 640], [2000], [93] * 64], ids=str)
def test_lengths(lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**FORM, num_persistent_clusters=3)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=70)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**FORM, num_persistent_clusters=3)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[700, 65, 300], case=case)
    check(arguments, by(BACKEND), monkeypatch)


@pytest.mark.parametrize("key_heads", [8, 4])
def test_default_of_many_short_sequences(key_heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No form is asked for: with four or eight state heads a key head and all SMs busy it is the one that runs."""
    problem = replace(cases.MAIN_CHUNK, num_q_heads=key_heads, num_k_heads=key_heads, num_v_heads=32)
    arguments = arguments_of(problem, device, lengths=[93, 1, 64, 0, 130, 200, 17, 65] * 4, padded_tokens=70)
    with explaining() as asked:
        run(FUNCTION, copied(arguments), BACKEND)
    assert [choice.config.state_heads for choice, _ in asked.answers] == [2]
    check(arguments, by(BACKEND), monkeypatch)


def test_prefetch(device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**FORM | {"prefetch": 2}, num_persistent_clusters=5)
    check(arguments_of(cases.MAIN_CHUNK, device, **RAGGED), by(BACKEND), monkeypatch)


@pytest.mark.parametrize("heads", [4, 8])
def test_checkpoints(heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**FORM, num_persistent_clusters=3)
    problem = chunk_problem(**cases.MAIN | {"num_v_heads": heads}, has_mask=True, has_checkpoints=True)
    check(arguments_of(problem, device, **RAGGED), by(BACKEND), monkeypatch)


def test_repeats(device: torch.device, force: Force) -> None:
    force(**FORM, num_persistent_clusters=66)
    problem = replace(cases.MAIN_CHUNK, num_q_heads=16, num_k_heads=16, num_v_heads=32)
    check_repeats(arguments_of(problem, device, lengths=[1000, 64, 129, 700, 2000, 1]), by(BACKEND))


def test_who_works_on_it_changes_no_bit(device: torch.device, force: Force) -> None:
    rng = random.Random(0)
    lengths = [rng.choice((0, 64, 128, rng.randint(1, 300))) for _ in range(100)]
    problem = replace(cases.MAIN_CHUNK, num_q_heads=16, num_k_heads=16, num_v_heads=32)
    start = copied(arguments_of(problem, device, lengths=lengths, null_sequences=rng.sample(range(100), 7), padded_tokens=70))
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for clusters in (66, 7, 64, 66):
        force(**FORM, num_persistent_clusters=clusters)
        call = copied(start)
        call["out"] = torch.full_like(call["out"], torch.nan)
        o, pool = run(FUNCTION, call, BACKEND)
        assert pool is not None
        first = (o, pool) if first is None else first
        assert same_bits(o, first[0]) and same_bits(pool, first[1])
