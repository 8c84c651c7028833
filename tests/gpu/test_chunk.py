"""The chunk operator on the GPU, every backend, against the float64 oracle."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import CASES, chunk_inputs, chunk_problem, recurrent_inputs
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check, check_repeats, check_replays, public
from tests.gpu.delta_rule import backends, copied, judge, run

pytestmark = pytest.mark.gpu

RAGGED: dict[str, Any] = {"lengths": [65, 0, 1, 63, 64, 200, 0, 130], "null_sequences": [4]}
BACKENDS = backends("chunk")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", cases.chunk_problems(), ids=cases.name)
def test_variants(problem: ChunkProblem, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(problem, device, **RAGGED)
    if problem.has_final_indices:
        arguments["final_state_indices"][3] = 0  # not stored
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: Any, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, case=case, **RAGGED)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[0], [1], [63], [64], [65], [128], [0, 0, 3], [1] * 40, [700]], ids=str)
def test_lengths(lengths: list[int], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [255, 256, 257, 300])
def test_many_sequences(count: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts around the number that a block ranks by length (256); sequences of equal lengths, and the longest ones last."""
    lengths = [n % 4 for n in range(count - 3)] + [65, 300, 65]
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=lengths)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
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
        moved = inputs | {name: inputs[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}
        moved["initial_state"] = inputs["initial_state"][order]
        ends = torch.tensor([lengths[n] for n in order]).cumsum(0)
        moved["cu_seqlens"] = torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device)
        its_o, its_states = run(FUNCTION, moved, backend)
        assert its_states is not None
        assert same_bits(its_o, o[:, tokens]) and same_bits(its_states, states[order])


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_give_the_same_bits(backend: str, device: torch.device) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
    check_repeats(arguments, by(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replay_with_other_lengths(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
    lengths = (RAGGED["lengths"], [0, 500, 3, 0, 0, 0, 20, 0], [0] * 8)
    check_replays(arguments, public(backend), lengths, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decode_backend", backends("recurrent"))
def test_prefill_then_decode_is_one_long_prefill(
    backend: str, decode_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[203], padded_tokens=0)
    whole = copied(arguments)
    pool, pieces = arguments["initial_state"], []
    for start, end in ((0, 100), (100, 200), (200, 201), (201, 203)):
        piece = {name: arguments[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        piece |= {"use_qk_l2norm_in_kernel": True, "state_v_first": True, "null_slot": 0, "initial_state": pool}
        if end - start > 2:
            o, _ = gdn.chunk_gated_delta_rule(**piece, state_indices=arguments["state_indices"], backend=backend)
        else:
            o, _ = gdn.fused_recurrent_gated_delta_rule(
                **piece, ssm_state_indices=arguments["state_indices"], backend=decode_backend
            )
        pieces.append(o)
    judge(FUNCTION, arguments, (torch.cat(pieces, dim=1), pool), whole, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_beyond_31_bits(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose last slot starts beyond 2**31 elements."""
    arguments = arguments_of(cases.MAIN_CHUNK, device, lengths=[70, 3], slot_gap=0)
    small = arguments["initial_state"]
    stride = (2**31 // (small.shape[0] - 1) + 4) // 4 * 4
    buffer = torch.empty(stride * (small.shape[0] - 1) + small[0].numel(), dtype=small.dtype, device=device)
    pool = buffer.as_strided(small.shape, (stride, *small.stride()[1:]))
    pool.copy_(small)
    last = small.shape[0] - 1
    assert last * stride >= 2**31
    arguments["state_indices"][0] = last
    pool[last] = pool[int(arguments["state_indices"][1])]
    before = dict(arguments, initial_state=pool.clone())
    results = gdn.chunk_gated_delta_rule(**{**arguments, "initial_state": pool}, backend=backend)
    close = pool.clone()
    del pool, buffer
    judge(FUNCTION, {**arguments, "initial_state": close}, (results[0], None), before, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_rows(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, T] without cu_seqlens, and address and strides that kernels cannot take."""
    packed = chunk_inputs(cases.MAIN_CHUNK, device, lengths=[70, 70, 70])
    batch: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "state_v_first": True, "output_final_state": True}
    batch |= {name: packed[name].unflatten(1, (3, 70)).squeeze(0) for name in ("q", "k", "v", "g", "beta")}
    batch["state_indices"], batch["has_initial_state"] = packed["state_indices"], packed["has_initial_state"]
    buffer = torch.empty(batch["q"].numel() + 1, dtype=torch.bfloat16, device=device)
    batch["q"] = buffer[1:].view(batch["q"].shape).copy_(batch["q"])
    batch["k"] = torch.cat([batch["k"], batch["k"]], dim=1)[:, :70]
    batch["initial_state"] = packed["initial_state"]
    check(batch, by(backend), monkeypatch)


def test_inputs_are_left_alone(device: torch.device) -> None:
    for backend in BACKENDS:
        arguments = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)
        kept = {k: x.clone() for k, x in arguments.items() if isinstance(x, torch.Tensor) and k not in ("out", "initial_state")}
        run(FUNCTION, arguments, backend)
        for name, x in kept.items():
            assert same_bits(arguments[name], x), name


def test_the_decode_inputs_are_made_for_the_same_pool(device: torch.device) -> None:
    """Guards the sharing of one pool between the two operators above: same layout, same dtype."""
    chunk_pool = arguments_of(cases.MAIN_CHUNK, device, **RAGGED)["initial_state"]
    decode_pool = recurrent_inputs(cases.MAIN_RECURRENT, device, lengths=[1])["initial_state"]
    assert chunk_pool.shape[1:] == decode_pool.shape[1:] and chunk_pool.dtype == decode_pool.dtype
