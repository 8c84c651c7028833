"""Calls of the chunk kernels that launch both whole sequences and segments: which of the two works, and that the other leaves
everything alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import devices
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import arguments_of, by, check, check_repeats, check_replays, public
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import Arguments, Results, copied

pytestmark = pytest.mark.gpu

SEGMENT = 2  # chunks, so 128 tokens
LENGTHS = [0, 1, 127, 700, 128, 0, 257, 384]
LONGEST = max(LENGTHS)
RAGGED: dict[str, Any] = {"lengths": LENGTHS, "null_sequences": [6], "padded_tokens": 200}
FOUR_SM = {"stages": 3, "prefetch": 0, "num_persistent_clusters": 0}
# What whole sequences are computed by. CuTe: four SMs a head, in clusters of four, next to pairs too, or nearly all in pairs; two
# SMs, one cluster per work tile or persistent clusters. TileLang: one launch, two or four SMs a head.
WHOLE: dict[str, dict[str, Any]] = {
    "fours": FOUR_SM | {"num_four_sm_clusters": 1, "max_l2_ring_groups": 1},
    "both": FOUR_SM | {"num_four_sm_clusters": 7, "max_l2_ring_groups": 1000},
    "ring": FOUR_SM | {"num_four_sm_clusters": 1, "max_l2_ring_groups": 1000},
    "clusters": {},
    "items": {"num_persistent_clusters": 3},
    "tilelang-2": {"cluster_size": 2},
    "tilelang-4": {"cluster_size": 4},
}
each_form = pytest.mark.parametrize("form", WHOLE)


def backend_of(form: str) -> str:
    return "tilelang" if form.startswith("tilelang") else "cute"


def fresh(arguments: Arguments) -> Arguments:
    return copied(arguments) | {"out": torch.full_like(arguments["out"], torch.nan)}


def results(form: str, arguments: Arguments) -> Results:
    return by(backend_of(form))(fresh(arguments))


def are_same(found: Results, expected: Results) -> bool:
    assert found[1] is not None and expected[1] is not None
    return same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_form
def test_the_longest_decides(form: str, device: torch.device, force: Force) -> None:
    """The bits of either way alone, which are not the same."""
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
    force(**WHOLE[form], split_chunks=0)
    whole = results(form, arguments)
    force(split_chunks=SEGMENT)
    cut = results(form, arguments)
    assert not are_same(whole, cut)
    for longest, expected in ((1, cut), (LONGEST - 1, cut), (LONGEST, whole), (10**6, whole)):
        force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=longest)
        assert are_same(results(form, arguments), expected), longest


# TileLang's launches read lengths in one place for all problems: a pool, as in the other tests, and none.
VARIANTS = [(problem, "both" if problem.head_v_dim == 128 else "clusters") for problem in cases.chunk_problems()]
VARIANTS += [(next(one for one, form in VARIANTS if form == "both" and not one.pooled), "tilelang-2")]


@pytest.mark.parametrize("longest", [100, 10**6], ids=["split", "whole"])
@pytest.mark.parametrize(("problem", "form"), VARIANTS, ids=[f"{form}-{cases.name(problem)}" for problem, form in VARIANTS])
def test_variants(
    problem: ChunkProblem, form: str, longest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=longest)
    check(arguments_of(problem, device, **RAGGED), by(backend_of(form)), monkeypatch)


@pytest.mark.parametrize("longest", [100, 10**6], ids=["split", "whole"])
@pytest.mark.parametrize("form", ["both", "clusters", "tilelang-4"])
def test_checkpoints(form: str, longest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=longest)
    problem = chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True)
    check(arguments_of(problem, device, **RAGGED), by(backend_of(form)), monkeypatch)


@pytest.mark.parametrize("form", ["clusters", "tilelang-2"])
@pytest.mark.parametrize("position", [0, 31, 32, 69])
def test_a_long_one_among_many(position: int, form: str, device: torch.device, force: Force) -> None:
    """More sequences than a warp has lanes."""
    lengths = [130] * 70
    lengths[position] = 300
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths)
    force(split_chunks=SEGMENT)
    cut = results(form, arguments)
    force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=299)
    assert are_same(results(form, arguments), cut)
    force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=300)
    assert not are_same(results(form, arguments), cut)


@each_form
def test_repeats_give_the_same_bits(form: str, device: torch.device, force: Force) -> None:
    for longest in (LONGEST - 1, LONGEST):
        force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=longest)
        check_repeats(arguments_of(cases.MAIN_CHUNK, device, **RAGGED), by(backend_of(form)))


@each_form
def test_graph_replay_with_other_lengths(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """One way in one replay, the other in the next."""
    force(**WHOLE[form], split_chunks=SEGMENT, split_if_longest_exceeds=400)
    lengths = ([65, 0, 1, 363, 64, 200, 0, 130], [0, 800, 3, 0, 0, 0, 20, 0], [400] + [0] * 7, [401] + [0] * 7, [0] * 8)
    options = {"lengths": lengths[0], "null_sequences": [6], "padded_tokens": 200}
    check_replays(arguments_of(cases.MAIN_CHUNK, device, **options), public(backend_of(form)), lengths, monkeypatch)


@pytest.mark.parametrize("backend", ["cute", "tilelang"])
@pytest.mark.parametrize("lengths", [[1024] * 4, [3000, 40, 1000, 56]], ids=str)
def test_the_default_serves_few_sequences(
    lengths: list[int], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(cases.MAIN_CHUNK, num_q_heads=4, num_k_heads=4, num_v_heads=8)
    spec, _ = devices.describe(device)
    assert spec is not None
    sized = replace(problem, num_tokens=16384, num_sequences=4)
    config = runtime.candidates("chunk")[backend].module.default_config(sized, spec)
    assert config.split_if_longest_exceeds > 0 and config.split_chunks > 0
    check(arguments_of(problem, device, lengths=lengths), by(backend), monkeypatch)
