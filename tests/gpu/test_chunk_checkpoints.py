"""States after a prefix of a call, written to slots of their own, against the float64 oracle."""

from typing import Any

import pytest
import torch

from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of, by, check
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import backends, copied, run

pytestmark = pytest.mark.gpu

BACKENDS = backends("chunk")
# Two checkpoints each, where there are tokens enough.
RAGGED: dict[str, Any] = {"lengths": [0, 63, 64, 65, 128, 700, 64, 257, 384], "null_sequences": [6]}
PROBLEMS = [
    chunk_problem(**cases.MAIN, has_mask=True, has_checkpoints=True),
    chunk_problem(
        **cases.MAIN | {"index_dtype": "int64", "dtype": "float16", "state_v_first": False}, state_dtype="bfloat16",
        has_final_indices=True, has_checkpoints=True,
    ),
    chunk_problem(**cases.MAIN | {"head_k_dim": 64, "head_v_dim": 64}, has_checkpoints=True),
    # With segments the variant that lacked the most registers.
    chunk_problem(
        **cases.MAIN | {"num_q_heads": 8, "num_v_heads": 2, "head_k_dim": 64, "head_v_dim": 64, "index_dtype": "int64"},
        beta_dtype="bfloat16", use_beta_sigmoid=True, has_mask=True, has_final_indices=True, has_checkpoints=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("problem", PROBLEMS, ids=cases.name)
def test_variants(
    problem: ChunkProblem, segment: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=segment)
    arguments = arguments_of(problem, device, **RAGGED)
    check(arguments, by(backend), monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_is_the_state_of_a_shorter_call(backend: str, device: torch.device, force: Force) -> None:
    force(split_chunks=0)
    arguments = arguments_of(PROBLEMS[0], device, lengths=[640], padded_tokens=0)
    arguments["checkpoint_offsets"] = torch.tensor([[192, 640]], dtype=torch.int32, device=device)
    start = copied(arguments)
    run(FUNCTION, arguments, backend)
    pool, slots = arguments["initial_state"], arguments["checkpoint_slots"][0].tolist()
    slot = int(arguments["state_indices"][0])
    assert same_bits(pool[slots[1]], pool[slot])  # all of the call's tokens
    shorter = copied(start)
    for name in ("q", "k", "v", "g", "beta"):
        shorter[name] = shorter[name][:, :192]
    shorter["cu_seqlens"] = torch.tensor([0, 192], dtype=arguments["cu_seqlens"].dtype, device=device)
    del shorter["out"]
    shorter["checkpoint_offsets"] = torch.zeros_like(arguments["checkpoint_offsets"])
    run(FUNCTION, shorter, backend)
    assert same_bits(shorter["initial_state"][slot], pool[slots[0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_ask_for_nothing(backend: str, device: torch.device, force: Force) -> None:
    force(split_chunks=0)
    arguments = arguments_of(PROBLEMS[0], device, lengths=[100, 128], padded_tokens=0)
    offsets = [[0, 128], [0, 192]]  # none, beyond the sequence; none, beyond the sequence
    arguments["checkpoint_offsets"] = torch.tensor(offsets, dtype=torch.int32, device=device)
    before = copied(arguments)
    run(FUNCTION, arguments, backend)
    for slot in arguments["checkpoint_slots"].flatten().tolist():
        assert same_bits(arguments["initial_state"][slot], before["initial_state"][slot])
