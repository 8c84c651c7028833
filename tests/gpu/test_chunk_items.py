"""The chunk operator with more work than there is room for at a time: clusters take item after item."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.problems import ChunkProblem
from gdn.testing.compare import same_bits
from gdn.testing.inputs import chunk_inputs, chunk_problem
from tests.gpu import cases
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, judge, run

pytestmark = pytest.mark.gpu

FUNCTION = "chunk_gated_delta_rule"
BACKEND = "cute"
LENGTHS = [65, 0, 1, 63, 64, 200, 0, 130, 321, 64, 0]
NULL_SEQUENCES = [4, 7]


def arguments_of(problem: ChunkProblem, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Ragged, strided, padded; with a pool: null slots, gaps and NaN around every state."""
    options: dict[str, Any] = {"lengths": LENGTHS, "strided": True, "padded_tokens": 70}
    if problem.pooled:
        options |= {"slot_gap": 24, "null_sequences": NULL_SEQUENCES, "null_slot": 0}
    arguments = chunk_inputs(problem, device, **{**options, **changes})
    v = arguments["v"]
    shape = (1, v.shape[1], problem.num_state_heads, problem.head_v_dim)
    arguments["out"] = torch.full(shape, torch.nan, dtype=v.dtype, device=device)
    return arguments


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("problem", cases.chunk_problems(), ids=cases.name)
def test_variants(
    problem: ChunkProblem, places: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(segment=0, places=places)
    arguments = arguments_of(problem, device)
    if problem.has_final_indices:
        arguments["final_state_indices"][3] = 0  # not stored
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@pytest.mark.parametrize("fields", [{"paired": False}, {"stages": 2}, {"prefetch": 2}], ids=str)
def test_configurations(fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(segment=0, places=5, **fields)
    arguments = arguments_of(cases.MAIN_CHUNK, device)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@pytest.mark.parametrize("head_dim", [128, 64])
def test_checkpoints(head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(segment=0, places=3)
    problem = chunk_problem(**cases.MAIN | {"head_k_dim": head_dim, "head_v_dim": head_dim}, has_mask=True, has_checkpoints=True)
    arguments = arguments_of(problem, device)
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@pytest.mark.parametrize("lengths", [[0], [0] * 9, [1] * 40, [64] * 7, [700, 0, 700], [3, 640]], ids=str)
def test_lengths(lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(segment=0, places=3)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, null_sequences=[])
    before = copied(arguments)
    judge(FUNCTION, arguments, run(FUNCTION, arguments, BACKEND), before, monkeypatch)


@pytest.mark.parametrize("count", [100, 300])
@pytest.mark.parametrize("heads", [(2, 4), (16, 32)], ids=str)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_who_works_on_it_changes_no_bit(
    head_dim: int, heads: tuple[int, int], count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    """300 sequences are more than are sorted. The fewer places, the more items a cluster takes."""
    rng = random.Random(count)
    lengths = [rng.choice((0, 64, 128, rng.randint(1, 300))) for _ in range(count)]
    sizes = {"num_q_heads": heads[0], "num_k_heads": heads[0], "num_v_heads": heads[1]}
    problem = replace(cases.MAIN_CHUNK, head_k_dim=head_dim, head_v_dim=head_dim, **sizes)
    arguments = arguments_of(problem, device, lengths=lengths, null_sequences=rng.sample(range(count), 7))
    start = copied(arguments)
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for places in (66, 1, 7, 64, 66, 66):
        if places == 1 and count * heads[1] > 1000:
            continue  # one cluster for all of it takes long
        force(segment=0, places=places)
        call = copied(start)
        call["out"] = torch.full_like(arguments["out"], torch.nan)
        o, pool = run(FUNCTION, call, BACKEND)
        assert pool is not None
        if first is None:
            first = (o, pool)
            if heads == (2, 4) and count == 100:
                judge(FUNCTION, call, (o, pool), start, monkeypatch)
        assert same_bits(o, first[0]) and same_bits(pool, first[1]), f"{places} places"


def test_a_sequence_is_the_same_alone(device: torch.device, force: Force) -> None:
    lengths = [64 * 9, 300, 1, 64, 0, 129]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, null_sequences=[])
    before = copied(arguments)
    force(segment=0, places=2)
    o, pool = run(FUNCTION, arguments, BACKEND)
    assert pool is not None
    offsets = arguments["cu_seqlens"].tolist()
    force(segment=0)
    for n, length in enumerate(lengths):
        alone = copied(before)
        rows = slice(offsets[n], offsets[n + 1])
        alone |= {name: before[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        alone |= {name: before[name][n : n + 1] for name in ("state_indices", "has_initial_state")}
        alone["cu_seqlens"] = torch.tensor([0, length], dtype=before["cu_seqlens"].dtype, device=device)
        del alone["out"]
        alone_o, alone_pool = run(FUNCTION, alone, BACKEND)
        assert alone_pool is not None
        slot = int(before["state_indices"][n])
        assert same_bits(o[:, rows], alone_o) and same_bits(pool[slot], alone_pool[slot]), f"sequence {n}"


def test_graph_replay_with_other_lengths(device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """The deal is made from lengths that stand on the device."""
    force(segment=0, places=3)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[65, 0, 1, 363, 64, 200, 0, 130], null_sequences=[4])
    arguments["initial_state"].nan_to_num_(0.1)
    start = copied(arguments)
    run(FUNCTION, copied(arguments), BACKEND)  # compiles and loads outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gdn.chunk_gated_delta_rule(**arguments, backend=BACKEND)
    for lengths in ([65, 0, 1, 363, 64, 200, 0, 130], [0, 700, 3, 0, 0, 0, 20, 100], [823, 0, 0, 0, 0, 0, 0, 0], [0] * 8):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        arguments["cu_seqlens"].copy_(offsets)
        for name in ("q", "k", "v", "g", "beta"):  # rows that were padding may be tokens now
            arguments[name].copy_(torch.nan_to_num(arguments[name], nan=-0.01))
        arguments["initial_state"].copy_(start["initial_state"])
        arguments["out"].fill_(torch.nan)
        before = copied(arguments)
        before["cu_seqlens"] = arguments["cu_seqlens"].clone()
        graph.replay()
        torch.cuda.synchronize()
        judge(FUNCTION, arguments, results, before, monkeypatch)
