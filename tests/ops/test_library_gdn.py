"""torch.library: the GDN operators inside torch.compile, with their effects on pools."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.testing.compare import same_bits
from tests.ops.library_calls import BY_TOKENS, seeded

Arguments = dict[str, Any]

CHUNK: list[dict[str, Any]] = [
    {},
    {"has_final_state": False, "has_initial_state": False, "gate_dtype": None},
    {"index_dtype": "int32", "has_mask": True, "has_checkpoints": True, "use_gate": True},
]
RECURRENT: list[dict[str, Any]] = [
    {"state_v_first": True},
    {"index_dtype": "int64", "write_every_token": True, "has_accepted": True},
]


def twins(arguments: Arguments) -> tuple[Arguments, Arguments]:
    """The same arguments twice, with tensors of their own."""
    return arguments, {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def same_results(function: Any, arguments: Arguments, backend: str) -> None:
    """Compiled as eager: results, effects on arguments, and which result is which argument."""
    eager, traced = twins(arguments)
    expected = function(**eager)
    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True, backend=backend)(**traced)
    if isinstance(expected, torch.Tensor):
        expected, got = (expected,), (got,)
    for want, have in zip(expected, got, strict=True):
        if want is None:
            assert have is None
            continue
        assert same_bits(have, want)
        assert [name for name, x in eager.items() if x is want] == [name for name, x in traced.items() if x is have]
    for name, x in eager.items():
        if isinstance(x, torch.Tensor):
            assert same_bits(traced[name], x), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("fields", CHUNK)
def test_chunk(fields: dict[str, Any], has_out: bool, backend: str) -> None:
    arguments = chunk_inputs(chunk_problem(**fields), lengths=[65, 0, 3])
    if has_out:
        arguments["out"] = torch.zeros(1, 68, 4, 16)
    same_results(gdn.chunk_gated_delta_rule, arguments, backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("extra", [{}, {"inplace_final_state": True}, {"output_final_state": False}])
@pytest.mark.parametrize("fields", RECURRENT)
def test_recurrent(fields: dict[str, Any], extra: Arguments, backend: str) -> None:
    arguments = {**recurrent_inputs(recurrent_problem(**fields), lengths=[2, 0, 3]), **extra}
    same_results(gdn.fused_recurrent_gated_delta_rule, arguments, backend)


def test_a_norm_without_a_residual() -> None:
    """The sum is x itself."""
    arguments = BY_TOKENS["add_rms_norm"](5) | {"residual": None, "layer_scale": None}
    same_results(gdn.add_rms_norm, arguments, "aot_eager")


FORMS: dict[str, Callable[[Arguments], bool]] = {
    "causal_conv1d_update": lambda given: "num_accepted_tokens" in given,
    "fused_gdn_decode": lambda given: "num_accepted_tokens" in given,
    "sparse_attention": lambda given: given.get("return_lse", False),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_are_not_the_plain_one(name: str) -> None:
    calls = (seeded(name, seed).arguments for seed in range(100))
    same_results(getattr(gdn, name), next(filter(FORMS[name], calls)), "aot_eager")


def of_schema(arguments: Arguments, is_pooled: bool) -> Arguments:
    """Arguments of the registered operator: a pool is written, and opcheck compares with ==."""
    if is_pooled:
        arguments["initial_state_written"] = arguments["initial_state"].nan_to_num_()
        arguments["initial_state"] = None
    return arguments


@pytest.mark.parametrize("fields", CHUNK)
def test_opcheck_chunk(fields: dict[str, Any]) -> None:
    problem = chunk_problem(**fields)
    arguments = chunk_inputs(problem, lengths=[65, 0, 3])
    torch.library.opcheck(torch.ops.gdn.chunk_gated_delta_rule.default, (), of_schema(arguments, problem.pooled))


@pytest.mark.parametrize("fields", RECURRENT)
def test_opcheck_recurrent(fields: dict[str, Any]) -> None:
    problem = recurrent_problem(**fields)
    arguments = recurrent_inputs(problem, lengths=[2, 0, 3])
    torch.library.opcheck(torch.ops.gdn.fused_recurrent_gated_delta_rule.default, (), of_schema(arguments, problem.pooled))
