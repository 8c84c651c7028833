"""The chunk operator with sequences cut into segments, against the float64 oracle."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.ops.delta_rule.inputs import CASES
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import env
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_alone, check_repeats, check_replays, public
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, run

pytestmark = pytest.mark.gpu

BACKENDS = ["cute", "tilelang"]  # those that split sequences
CUTE = ["cute"]  # test_chunk_segments.py has the like for TileLang, whose kernels compile long
SEGMENT = 2  # chunks, so 128 tokens
# Around the borders of segments.
RAGGED: dict[str, Any] = {
    "lengths": [0, 1, 127, 128, 129, 64, 256, 700, 0, 257, 384],
    "null_sequences": [6],
    "padded_tokens": 200,
}


@pytest.mark.parametrize("backend", CUTE)
@pytest.mark.parametrize("problem", cases.chunk_problems(), ids=cases.name)
def test_variants(
    problem: ChunkProblem, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=SEGMENT)
    arguments = arguments_of(problem, device, **RAGGED)
    if problem.has_final_indices:
        arguments["final_state_indices"][7] = 0  # not stored
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("segment", [1, 3, 16])
def test_segment_lengths(segment: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    force(split_chunks=segment)
    lengths = [1500, 64 * segment, 64 * segment + 1, 0, 5]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=200)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[0], [1], [128], [129], [1280], [0, 0, 300], [130] * 70], ids=str)
def test_lengths(lengths: list[int], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Tokens may follow the last sequence: the last slot may or may not be used."""
    force(split_chunks=SEGMENT)
    for padded_tokens in (0, 128):
        arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=padded_tokens)
        check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", CUTE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hard_inputs(
    case: Any, dtype: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=SEGMENT)
    problem = replace(cases.MAIN_CHUNK, dtype=dtype)
    arguments = arguments_of(problem, device, case=case, **RAGGED)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_lasts(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Little decay and weak updates: what a segment starts from comes through all segments before it."""
    force(split_chunks=SEGMENT)
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[4096], padded_tokens=200)
    arguments["beta"].mul_(0.004)
    arguments["g"].mul_(1e-5)
    arguments["has_initial_state"].fill_(True)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("segment", [0, SEGMENT])
def test_prefetch(segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Configurations that calls with many chunks a block compile."""
    force(split_chunks=segment, prefetch=2)
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
    check(arguments, by("cute"), monkeypatch)


@pytest.mark.parametrize("backend", CUTE)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_repeats_give_the_same_bits(head_dim: int, backend: str, device: torch.device, force: Force) -> None:
    force(split_chunks=SEGMENT)
    problem = replace(cases.MAIN_CHUNK, head_k_dim=head_dim, head_v_dim=head_dim)
    arguments = arguments_of(problem, device, **RAGGED)
    check_repeats(arguments, by(backend))


@pytest.mark.parametrize("backend", CUTE)
def test_graph_replay_with_other_lengths(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=SEGMENT)
    lengths = ([65, 0, 1, 363, 64, 200, 0, 130], [0, 800, 3, 0, 0, 0, 20, 0], [1023, 0, 0, 0, 0, 0, 0, 0], [0] * 8)
    options = {"lengths": lengths[0], "null_sequences": [6], "padded_tokens": 200}
    check_replays(arguments_of(cases.MAIN_CHUNK, device, **options), public(backend), lengths, monkeypatch)


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    monkeypatch.setenv("GDN_TUNED", "off")
    env.reload()
    yield
    monkeypatch.undo()
    env.reload()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariance(backend: str, device: torch.device, invariant: None) -> None:
    """A sequence alone and inside a batch: the same bits, and the batch holds sequences of several segments."""
    problem = replace(cases.MAIN_CHUNK, num_tokens=1, num_sequences=1)
    tokens = 64 * runtime.prepare(problem, device, backend).config.split_chunks
    assert tokens > 0
    lengths = [2 * tokens + 70, 300, tokens, 0, tokens + 1]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths, padded_tokens=200)
    before = copied(arguments)
    check_alone(before, run(FUNCTION, arguments, backend), by(backend))
