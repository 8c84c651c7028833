"""States after a prefix of a call, written to slots of their own, against the float64 oracle."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, PER_TOKEN, arguments_of, by, check
from tests.gpu.chunk_forms import FORMS, FOUR_SM, IN_SEGMENTS, ONE_LAUNCH, of_head_dim, take
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import copied, run

pytestmark = pytest.mark.gpu

# Two checkpoints each, where there are tokens enough.
RAGGED: dict[str, Any] = {"lengths": [0, 63, 64, 65, 128, 700, 64, 257, 384], "null_sequences": [6]}


def problem_of(**changes: Any) -> ChunkProblem:
    return chunk_problem(**cases.MAIN | {"has_checkpoints": True} | changes)


def _dims(dim: int) -> dict[str, int]:
    return {"head_k_dim": dim, "head_v_dim": dim}


MAIN = problem_of(has_mask=True)
WITH_64 = problem_of(**_dims(64))
PROBLEMS = [
    MAIN,
    problem_of(index_dtype="int64", dtype="float16", state_v_first=False, state_dtype="bfloat16", has_final_indices=True),
    WITH_64,
    # With segments the variant that lacked the most registers.
    problem_of(
        num_q_heads=8, num_v_heads=2, index_dtype="int64", beta_dtype="bfloat16", use_beta_sigmoid=True, has_mask=True,
        has_final_indices=True, **_dims(64),
    ),
]  # fmt: skip
PADDED = {"index_dtype": "int32", "has_mask": True, "has_checkpoints": True, "state_dtype": "bfloat16"}
WHOLE = ("clusters", "tilelang-2")
VARIANTS: list[tuple[str, ChunkProblem, dict[str, Any]]] = [
    *((form, problem, RAGGED) for form in (*WHOLE, *IN_SEGMENTS) for problem in PROBLEMS),
    *((form, of_head_dim(dim, **PADDED), RAGGED) for form in ("clusters", "segments-2") for dim in (60, 100)),
    *(("items-3", problem_of(has_mask=True, **_dims(dim)), FORMS["items-3"].ragged) for dim in (128, 64)),
    *(("key-head-3", problem_of(has_mask=True, num_v_heads=heads), FORMS["key-head-3"].ragged) for heads in (4, 8)),
    *(
        (form, problem_of(has_mask=True, index_dtype=dtype), FORMS[form].ragged)
        for form in ONE_LAUNCH
        for dtype in ("int32", "int64")
    ),
    *((form, MAIN, FORMS[form].ragged) for form in FOUR_SM),
]


@pytest.mark.parametrize(
    ("form", "problem", "options"), VARIANTS, ids=[f"{form}-{cases.name(problem)}" for form, problem, _ in VARIANTS]
)
def test_variants(
    form: str,
    problem: ChunkProblem,
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force: Force,
) -> None:
    of = take(form, force)
    check(arguments_of(problem, device, **options), by(of.backend), monkeypatch)


@pytest.mark.parametrize("form", ["clusters", *ONE_LAUNCH])
def test_a_checkpoint_is_the_state_of_a_shorter_call(form: str, device: torch.device, force: Force) -> None:
    backend = take(form, force).backend
    arguments = arguments_of(MAIN, device, lengths=[640], padded_tokens=0)
    arguments["checkpoint_offsets"] = torch.tensor([[192, 640]], dtype=torch.int32, device=device)
    shorter = copied(arguments)
    run(FUNCTION, arguments, backend)
    pool, slots = arguments["initial_state"], arguments["checkpoint_slots"][0].tolist()
    slot = int(arguments["state_indices"][0])
    assert same_bits(pool[slots[1]], pool[slot])  # all of the call's tokens
    for name in PER_TOKEN:
        shorter[name] = shorter[name][:, :192]
    shorter["cu_seqlens"] = torch.tensor([0, 192], dtype=arguments["cu_seqlens"].dtype, device=device)
    del shorter["out"]
    shorter["checkpoint_offsets"] = torch.zeros_like(arguments["checkpoint_offsets"])
    run(FUNCTION, shorter, backend)
    assert same_bits(shorter["initial_state"][slot], pool[slots[0]])


@pytest.mark.parametrize("form", WHOLE)
def test_offsets_that_ask_for_nothing(form: str, device: torch.device, force: Force) -> None:
    backend = take(form, force).backend
    arguments = arguments_of(MAIN, device, lengths=[100, 128], padded_tokens=0)
    offsets = [[0, 128], [0, 192]]  # none, beyond the sequence; none, beyond the sequence
    arguments["checkpoint_offsets"] = torch.tensor(offsets, dtype=torch.int32, device=device)
    before = copied(arguments)
    run(FUNCTION, arguments, backend)
    for slot in arguments["checkpoint_slots"].flatten().tolist():
        assert same_bits(arguments["initial_state"][slot], before["initial_state"][slot])


def test_large_head_dims_take_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(of_head_dim(192, index_dtype="int32", has_checkpoints=True), device, lengths=[130, 3])
    answer = gdn.explain(FUNCTION, **arguments)
    assert answer.backend == "reference" and "checkpoints" in dict(answer.refusals)["cute"]
    check(arguments, lambda its: gdn.chunk_gated_delta_rule(**its), monkeypatch)
