"""The chunk operator's bits, in every form: from run to run, in a batch or alone, whoever works on it, and in replayed graphs."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, PER_TOKEN, arguments_of, by, check_alone, check_repeats, check_replays, public
from tests.gpu.chunk_forms import (
    DEFAULTS,
    FORMS,
    FOUR_SM,
    HEAD_DIM_STATES,
    ONE_LAUNCH,
    OWN_STATES,
    PLAIN,
    TILELANG_SEGMENTS,
    of_head_dim,
    take,
)
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import Arguments, Results, backends, copied, judge, run

pytestmark = pytest.mark.gpu

MAIN = cases.MAIN_CHUNK
HEADS = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32}
WITH_64 = {"head_k_dim": 64, "head_v_dim": 64}


def fresh(arguments: Arguments) -> Arguments:
    return copied(arguments) | {"out": torch.full_like(arguments["out"], torch.nan)}


def are_same(found: Results, expected: Results) -> bool:
    assert found[1] is not None and expected[1] is not None
    return same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


REPEATS: list[tuple[str, ChunkProblem, dict[str, Any], int]] = [
    *((form, MAIN, PLAIN, 20) for form in DEFAULTS),
    *(("cute", of_head_dim(dim, **HEAD_DIM_STATES[0]), PLAIN, 5) for dim in (60, 100, 192)),
    ("key-head-66", replace(MAIN, **HEADS), {"lengths": [1000, 64, 129, 700, 2000, 1]}, 20),
    # Some chunks are partial: the inverse comes later than the product there.
    *((form, MAIN, {"lengths": [640, 129, 64, 700, 1, 63, 100] * 9}, 20) for form in ONE_LAUNCH),
    *(("segments-2", replace(MAIN, **dims), FORMS["segments-2"].ragged, 20) for dims in ({}, WITH_64)),
    ("tilelang-segments-2", MAIN, TILELANG_SEGMENTS, 20),
]


@pytest.mark.parametrize(
    ("form", "problem", "options", "count"), REPEATS, ids=[f"{form}-{problem.head_k_dim}" for form, problem, _, _ in REPEATS]
)
def test_repeats_give_the_same_bits(
    form: str, problem: ChunkProblem, options: dict[str, Any], count: int, device: torch.device, force: Force
) -> None:
    of = take(form, force)
    check_repeats(arguments_of(problem, device, **options), by(of.backend), count)


def test_forms_of_four_sm_give_the_same_bits(device: torch.device, force: Force) -> None:
    lengths = [4096, 1, 4095, 70, 64, 700, 0, 1300]
    arguments = arguments_of(MAIN, device, lengths=lengths, padded_tokens=200)
    first: Results | None = None
    for form in FOUR_SM:
        take(form, force)
        for _ in range(20):
            found = run(FUNCTION, fresh(arguments), "cute")
            first = first or found
            assert are_same(found, first)


# --- who works on it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", backends("chunk"))
def test_places_in_the_batch(backend: str, device: torch.device) -> None:
    """Each sequence has the same bits, whatever the order of the lengths."""
    problem = chunk_problem(head_k_dim=128, head_v_dim=128, dtype="bfloat16", state_v_first=True)
    lengths = [70, 0, 640, 1, 640, 64, 333]
    inputs = chunk_inputs(problem, device, lengths=lengths)
    o, states = run(FUNCTION, inputs, backend)
    assert states is not None
    for order in ([2, 4, 6, 0, 5, 3, 1], [1, 3, 5, 0, 6, 4, 2], [4, 1, 0, 6, 3, 2, 5]):
        parts = [torch.arange(sum(lengths[:n]), sum(lengths[: n + 1]), device=device) for n in order]
        tokens = torch.cat(parts)
        moved = inputs | {name: inputs[name][:, tokens] for name in PER_TOKEN}
        moved["initial_state"] = inputs["initial_state"][order]
        ends = torch.tensor([lengths[n] for n in order]).cumsum(0)
        moved["cu_seqlens"] = torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device)
        assert are_same(run(FUNCTION, moved, backend), (o[:, tokens], states[order]))


WORKERS = [
    *(("items-1", dim, heads, count) for dim in (128, 64) for heads in ((2, 4), (16, 32)) for count in (100, 300)),
    ("key-head-1", 128, (16, 32), 100),
]


@pytest.mark.parametrize(("form", "head_dim", "heads", "count"), WORKERS, ids=str)
def test_who_works_on_it_changes_no_bit(
    form: str,
    head_dim: int,
    heads: tuple[int, int],
    count: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force: Force,
) -> None:
    """300 sequences are more than are sorted. The fewer clusters, the more work tiles a cluster takes."""
    rng = random.Random(count)
    lengths = [rng.choice((0, 64, 128, rng.randint(1, 300))) for _ in range(count)]
    sizes = {"num_q_heads": heads[0], "num_k_heads": heads[0], "num_v_heads": heads[1]}
    problem = replace(MAIN, head_k_dim=head_dim, head_v_dim=head_dim, **sizes)
    start = arguments_of(problem, device, lengths=lengths, null_sequences=rng.sample(range(count), 7), padded_tokens=70)
    first: Results | None = None
    for clusters in (66, 1, 7, 64, 66, 66):
        if clusters == 1 and count * heads[1] > 1000:
            continue  # one cluster for all of it takes long
        take(form, force, num_persistent_clusters=clusters)
        call = fresh(start)
        found = run(FUNCTION, call, "cute")
        if first is None:
            first = found
            if heads == (2, 4) and count == 100:
                judge(FUNCTION, call, found, start, monkeypatch)
        assert are_same(found, first), f"{clusters} clusters"


def test_one_segment_is_the_whole_sequence(device: torch.device, force: Force) -> None:
    """The same bits as without segments, whether or not a call could hold two; D = 64, where both run the same chain."""
    problem = chunk_problem(**cases.MAIN | WITH_64, has_mask=True)
    arguments = arguments_of(problem, device, lengths=[640, 0, 3, 577], null_sequences=[2], padded_tokens=70)
    results = []
    for segment in (0, 10, 1000):
        take("tilelang-segments-2", force, split_chunks=segment)
        results.append(run(FUNCTION, fresh(arguments), "tilelang"))
    assert all(are_same(found, results[0]) for found in results[1:])


# --- a sequence alone --------------------------------------------------------------------------------------------------

LENGTHS = [64 * 9, 300, 1, 64, 0, 129]
ALONE: list[tuple[str, str, ChunkProblem, dict[str, Any]]] = [  # of the batch, of the sequence alone
    ("items-1", "clusters", MAIN, {"lengths": LENGTHS, "padded_tokens": 70}),
    *((form, form, MAIN, {"lengths": LENGTHS, "padded_tokens": 70}) for form in ONE_LAUNCH),
    ("tilelang-segments-2", "tilelang-segments-2", OWN_STATES, TILELANG_SEGMENTS | {"padded_tokens": 0}),
]


@pytest.mark.parametrize(("together", "apart", "problem", "options"), ALONE, ids=[row[0] for row in ALONE])
def test_a_sequence_is_the_same_alone(
    together: str, apart: str, problem: ChunkProblem, options: dict[str, Any], device: torch.device, force: Force
) -> None:
    arguments = arguments_of(problem, device, **options)
    before = copied(arguments)
    of = take(together, force, **({"num_persistent_clusters": 2} if together == "items-1" else {}))
    results = run(FUNCTION, arguments, of.backend)
    take(apart, force)
    check_alone(before, results, by(of.backend))


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    monkeypatch.setenv("GDN_TUNED", "off")
    env.reload()
    yield
    monkeypatch.undo()
    env.reload()


@pytest.mark.parametrize("backend", ["cute", "tilelang"])
def test_batch_invariance(backend: str, device: torch.device, invariant: None) -> None:
    """A sequence alone and inside a batch: the same bits, and the batch holds sequences of several segments."""
    problem = replace(MAIN, num_tokens=1, num_sequences=1)
    tokens = 64 * runtime.prepare(problem, device, backend).config.split_chunks
    assert tokens > 0
    lengths = [2 * tokens + 70, 300, tokens, 0, tokens + 1]
    arguments = arguments_of(MAIN, device, lengths=lengths, padded_tokens=200)
    before = copied(arguments)
    check_alone(before, run(FUNCTION, arguments, backend), by(backend))


# --- graphs and streams ------------------------------------------------------------------------------------------------

RAGGED = [65, 0, 1, 363, 64, 200, 0, 130]
NOTHING = [0] * 8
OF_PLAIN = (PLAIN["lengths"], [0, 500, 3, 0, 0, 0, 20, 0], NOTHING)
OF_823 = (RAGGED, [0, 700, 3, 0, 0, 0, 20, 100], [823, 0, 0, 0, 0, 0, 0, 0], NOTHING)
OF_1023 = (RAGGED, [0, 800, 3, 0, 0, 0, 20, 0], [1023, 0, 0, 0, 0, 0, 0, 0], NOTHING)
OF_SEGMENTS = ([650, 0, 1, 63, 0, 256], [0, 128, 300, 0, 129, 400], [1000, 0, 0, 0, 0, 0], [0] * 6)
REPLAYS: list[tuple[str, ChunkProblem, Sequence[list[int]], dict[str, Any]]] = [
    *((form, MAIN, OF_PLAIN, {"null_sequences": [4]}) for form in DEFAULTS),
    *(("cute", of_head_dim(dim, **HEAD_DIM_STATES[0]), OF_PLAIN, {"null_sequences": [4]}) for dim in (60, 100, 132)),
    *((form, MAIN, OF_823, {"null_sequences": [4]}) for form in ("items-3", *ONE_LAUNCH)),
    *((form, MAIN, OF_1023, {"null_sequences": [6], "padded_tokens": 200}) for form in ("segments-2", *FOUR_SM)),
    ("tilelang-segments-2", MAIN, OF_SEGMENTS, {"null_sequences": [4], "padded_tokens": 70}),
]


@pytest.mark.parametrize(
    ("form", "problem", "lengths", "options"), REPLAYS, ids=[f"{form}-{problem.head_k_dim}" for form, problem, _, _ in REPLAYS]
)
def test_graph_replay_with_other_lengths(
    form: str,
    problem: ChunkProblem,
    lengths: Sequence[list[int]],
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force: Force,
) -> None:
    """What is planned from lengths is planned on the device."""
    of = take(form, force)
    check_replays(arguments_of(problem, device, lengths=lengths[0], **options), public(of.backend), lengths, monkeypatch)


@pytest.mark.parametrize("form", FOUR_SM)
def test_streams_share_the_gpu(form: str, device: torch.device, force: Force) -> None:
    """Calls that fill the GPU alone, on several streams at once; a workspace that another call has left."""
    take(form, force)
    problem = replace(MAIN, **HEADS)
    calls = [arguments_of(problem, device, lengths=lengths, padded_tokens=200) for lengths in ([1500], [700, 1, 900], [64, 2000])]
    expected = [run(FUNCTION, fresh(call), "cute") for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        arguments = [fresh(call) for call in calls]
        torch.cuda.synchronize()
        found = []
        for stream, call in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(FUNCTION, call, "cute"))
        torch.cuda.synchronize()
        assert all(are_same(one, other) for one, other in zip(found, expected, strict=True))
