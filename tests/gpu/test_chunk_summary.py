"""Summaries of sequences against the reference in float64, and composed ones against the chunk operator."""

from typing import Any

import pytest
import torch

import gdn
from gdn.models import QWEN3_NEXT_80B
from gdn.ops.delta_rule.inputs import CASES, summary_inputs
from gdn.ops.delta_rule.problem import ChunkSummaryProblem
from gdn.runtime import registry
from gdn.testing import compare
from tests.gpu.delta_rule import Arguments
from tests.references import reference

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 63, 64, 65, 700, 0, 130]
ERROR = 1e-2
PLAIN: dict[str, Any] = {"gate_dtype": "float32", "beta_dtype": "float32", "use_gate": False, "use_beta_sigmoid": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "raw gates": {},
    "K first": {**PLAIN, "state_v_first": False},
    "64": {**PLAIN, "head_k_dim": 64, "head_v_dim": 64, "cu_seqlens_dtype": "int64"},
    "more query heads": {**PLAIN, "num_k_heads": 2, "num_v_heads": 2, "num_state_heads": 6},
    "neither gate nor beta nor norm": {**PLAIN, "gate_dtype": None, "beta_dtype": None, "use_k_l2norm": False},
    "float16": {**PLAIN, "dtype": "float16"},
}


def problem_of(**changes: Any) -> ChunkSummaryProblem:
    example: Any = registry.operator("chunk_summary").example(QWEN3_NEXT_80B, fp8=False)
    few = {"num_k_heads": 2, "num_v_heads": 4, "num_state_heads": 4, "num_sequences": len(LENGTHS), "num_tokens": sum(LENGTHS)}
    return ChunkSummaryProblem(**{**vars(example), **few, **changes})


def make(problem: ChunkSummaryProblem, device: torch.device, **options: Any) -> Arguments:
    """Strided, with rows of NaN after the last sequence."""
    return summary_inputs(problem, device, **{"lengths": LENGTHS, "strided": True, "padded_tokens": 7, **options})


def check(arguments: Arguments, is_mild: bool = False) -> None:
    """is_mild: P is large enough to be compared by itself."""
    h, P = gdn.chunk_summary(**arguments, backend="cute")
    wide = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    wide = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in wide.items()}
    exact = [x.to(h.device) for x in reference.chunk_summary(**wide)]
    v_first = arguments["state_v_first"]
    states = (compare.after_summary(a, b, v_first) for a, b in ((h, P), exact))
    assert compare.error(*states, groups=2).l2 < ERROR
    assert compare.error(h, exact[0], groups=2).l2 < ERROR
    if is_mild:
        assert compare.error(P, exact[1], groups=2).l2 < ERROR
    empty = (arguments["cu_seqlens"].diff() == 0).nonzero().flatten()
    assert not h[empty].any() and bool((P[empty] == torch.eye(P.shape[-1], device=P.device)).all())
    for _ in range(5):
        assert all(compare.same_bits(x, y) for x, y in zip(gdn.chunk_summary(**arguments, backend="cute"), (h, P), strict=True))


@pytest.mark.parametrize("name", list(VARIANTS))
def test_variants(name: str, device: torch.device) -> None:
    check(make(problem_of(**VARIANTS[name]), device))


@pytest.mark.parametrize("case", CASES)
def test_inputs(case: Any, device: torch.device) -> None:
    check(make(problem_of(**PLAIN), device, case=case), is_mild=case == "no_decay")


def test_parts_compose(device: torch.device) -> None:
    """A sequence in three parts has the state that the chunk operator leaves."""
    problem = problem_of(num_k_heads=16, num_v_heads=32, num_state_heads=32)
    whole = make(problem, device, lengths=[3000], padded_tokens=0)
    o, state = gdn.chunk_gated_delta_rule(**whole, output_final_state=True, backend="cute")
    offsets = torch.tensor([0, 1024, 2900, 3000], dtype=torch.int32, device=device)
    h, P = gdn.chunk_summary(**whole | {"cu_seqlens": offsets}, backend="cute")
    assert state is not None
    found = h[0]
    for part in (1, 2):
        found = torch.baddbmm(h[part], found, P[part])
    assert compare.error(found[None], state, groups=2).l2 < ERROR
