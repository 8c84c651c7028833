"""Which form a chunk call takes where no form is asked for, and calls that launch both whole sequences and segments: which of the
two works, and that the other leaves everything alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import devices, explaining
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_repeats, check_replays, public
from tests.gpu.chunk_forms import FORMS, PROBLEMS, SEGMENT, take
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import Arguments, Results, copied, run
from tests.gpu.test_chunk_bits import are_same, fresh

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 127, 700, 128, 0, 257, 384]
LONGEST = max(LENGTHS)
RAGGED: dict[str, Any] = {"lengths": LENGTHS, "null_sequences": [6], "padded_tokens": 200}
# What whole sequences are computed by.
WHOLE = ("fours", "both", "ring", "clusters", "items-3", "tilelang-2", "tilelang-4")
each_form = pytest.mark.parametrize("form", WHOLE)
both_ways = pytest.mark.parametrize("longest", [100, 10**6], ids=["split", "whole"])


def cut_above(form: str, tokens: int, force: Force) -> None:
    """Calls with a sequence of more tokens are cut into segments, all others computed in this form."""
    take(form, force, split_chunks=SEGMENT, split_if_longest_exceeds=tokens)


def results(form: str, arguments: Arguments) -> Results:
    return run(FUNCTION, fresh(arguments), FORMS[form].backend)


@each_form
def test_the_longest_decides(form: str, device: torch.device, force: Force) -> None:
    """The bits of either way alone, which are not the same."""
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
    take(form, force)
    whole = results(form, arguments)
    force(split_chunks=SEGMENT)
    cut = results(form, arguments)
    assert not are_same(whole, cut)
    for longest, expected in ((1, cut), (LONGEST - 1, cut), (LONGEST, whole), (10**6, whole)):
        cut_above(form, longest, force)
        assert are_same(results(form, arguments), expected), longest


# TileLang's launches read lengths in one place for all problems: a pool, as in the other tests, and none.
VARIANTS = [(problem, "both" if problem.head_v_dim == 128 else "clusters") for problem in PROBLEMS]
VARIANTS += [(next(one for one, form in VARIANTS if form == "both" and not one.pooled), "tilelang-2")]
WITH_CHECKPOINTS = chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True)
VARIANTS += [(WITH_CHECKPOINTS, form) for form in ("both", "clusters", "tilelang-4")]


@both_ways
@pytest.mark.parametrize(("problem", "form"), VARIANTS, ids=[f"{form}-{cases.name(problem)}" for problem, form in VARIANTS])
def test_variants(
    problem: ChunkProblem, form: str, longest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    cut_above(form, longest, force)
    check(arguments_of(problem, device, **RAGGED), by(FORMS[form].backend), monkeypatch)


@pytest.mark.parametrize("form", ["clusters", "tilelang-2"])
@pytest.mark.parametrize("position", [0, 31, 32, 69])
def test_a_long_one_among_many(position: int, form: str, device: torch.device, force: Force) -> None:
    """More sequences than a warp has lanes."""
    lengths = [130] * 70
    lengths[position] = 300
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths)
    force(split_chunks=SEGMENT)
    cut = results(form, arguments)
    for longest, is_cut in ((299, True), (300, False)):
        cut_above(form, longest, force)
        assert are_same(results(form, arguments), cut) == is_cut


@each_form
def test_repeats_give_the_same_bits(form: str, device: torch.device, force: Force) -> None:
    for longest in (LONGEST - 1, LONGEST):
        cut_above(form, longest, force)
        check_repeats(arguments_of(cases.MAIN_CHUNK, device, **RAGGED), by(FORMS[form].backend))


@each_form
def test_graph_replay_with_other_lengths(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """One way in one replay, the other in the next."""
    cut_above(form, 400, force)
    lengths = ([65, 0, 1, 363, 64, 200, 0, 130], [0, 800, 3, 0, 0, 0, 20, 0], [400] + [0] * 7, [401] + [0] * 7, [0] * 8)
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED | {"lengths": lengths[0]})
    check_replays(arguments, public(FORMS[form].backend), lengths, monkeypatch)


# --- defaults ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("key_heads", [8, 4])
def test_many_short_sequences_share_key_heads(key_heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four or eight state heads a key head and all SMs busy two of them are computed by a cluster."""
    problem = replace(cases.MAIN_CHUNK, num_q_heads=key_heads, num_k_heads=key_heads, num_v_heads=32)
    arguments = arguments_of(problem, device, lengths=[93, 1, 64, 0, 130, 200, 17, 65] * 4, padded_tokens=70)
    with explaining() as asked:
        run(FUNCTION, copied(arguments), "cute")
    assert [choice.config.state_heads for choice, _ in asked.answers] == [2]
    check(arguments, by("cute"), monkeypatch)


@pytest.mark.parametrize("longest", [300, 100])
def test_equal_lengths_that_the_host_knows_share_key_heads(
    longest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200, with two state heads a key head; also where the number is wrong, and one sequence has nearly all tokens."""
    problem = replace(cases.MAIN_CHUNK, num_q_heads=4, num_k_heads=4, num_v_heads=8)
    lengths = [300] * 32 if longest == 300 else [*[3] * 16, 3200, *[0] * 15]
    arguments = arguments_of(problem, device, lengths=lengths)

    def call(given: Arguments) -> Results:
        return run(FUNCTION, given | {"max_seqlen": longest}, "cute")

    with explaining() as asked:
        call(copied(arguments))
    spec, _ = devices.describe(device)
    assert spec is not None
    assert [choice.config.state_heads for choice, _ in asked.answers] == [2 if spec.key.startswith("h200") else 1]
    check(arguments, call, monkeypatch)
