"""torch.library: the GDN operators inside torch.compile, with their effects on pools."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from tests.ops.library_calls import BY_TOKENS, as_tuple, check_same, compiled, copied, of_schema, seeded

Arguments = dict[str, Any]

NAMES = {"chunk": "chunk_gated_delta_rule", "recurrent": "fused_recurrent_gated_delta_rule"}
# Form of a problem, by the operator.
FORMS_OF_RULES: list[tuple[str, dict[str, Any]]] = [
    ("chunk", {}),
    ("chunk", {"has_final_state": False, "has_initial_state": False, "gate_dtype": None}),
    ("chunk", {"index_dtype": "int32", "has_mask": True, "has_checkpoints": True, "use_gate": True}),
    ("recurrent", {"state_v_first": True}),
    ("recurrent", {"index_dtype": "int64", "write_every_token": True, "has_accepted": True}),
]
EXTRAS: dict[str, list[Arguments]] = {
    "chunk": [{}, {"out": torch.zeros(1, 68, 4, 16)}],
    "recurrent": [{}, {"inplace_final_state": True}, {"output_final_state": False}],
}


def rule_of(op: str, fields: dict[str, Any]) -> Arguments:
    if op == "chunk":
        return chunk_inputs(chunk_problem(**fields), lengths=[65, 0, 3])
    return recurrent_inputs(recurrent_problem(**fields), lengths=[2, 0, 3])


def same_results(function: Any, arguments: Arguments, backend: str) -> None:
    """Compiled as eager: results, effects on arguments, and which result is which argument."""
    eager, traced = arguments, copied(arguments)
    expected = function(**eager)
    got = compiled(function, backend)(**traced)
    check_same(got, traced, expected, eager)
    for want, have in zip(as_tuple(expected), as_tuple(got), strict=True):
        if want is not None:
            assert [name for name, x in eager.items() if x is want] == [name for name, x in traced.items() if x is have]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("op", "fields", "extra"), [(op, fields, extra) for op, fields in FORMS_OF_RULES for extra in EXTRAS[op]]
)
def test_rules(op: str, fields: dict[str, Any], extra: Arguments, backend: str) -> None:
    same_results(getattr(gdn, NAMES[op]), rule_of(op, fields) | copied(extra), backend)


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


@pytest.mark.parametrize(("op", "fields"), FORMS_OF_RULES)
def test_opcheck(op: str, fields: dict[str, Any]) -> None:
    """It compares with ==, which NaN is not: slots that nobody has hold it."""
    arguments = rule_of(op, fields)
    if arguments.get("initial_state") is not None:
        arguments["initial_state"].nan_to_num_()
    operator, given = of_schema(NAMES[op], arguments)
    torch.library.opcheck(operator, (), given)
