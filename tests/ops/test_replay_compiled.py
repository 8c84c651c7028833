"""Calls with a ring under torch.library's checks, in compiled and exported programs, and in inference mode."""

from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.ops.library_calls import of_schema
from tests.ops.test_replay_args import CALLS, Arguments

Tensor = torch.Tensor


def copied(given: Arguments) -> Arguments:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}


def outcome(function: Any, given: Arguments) -> list[Tensor]:
    """Results, and every tensor argument afterwards."""
    found = function(**given)
    results = [] if found is None else list(found) if isinstance(found, tuple) else [found]
    return [x for x in (*results, *given.values()) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, given = of_schema(name, CALLS[name]())
    torch.library.opcheck(operator, (), given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("form", ["compiled", "exported"])
def test_the_same_outcome(form: str) -> None:
    check_outcome("fold_states", form)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_outcome_in_inference_mode(name: str) -> None:
    check_outcome(name, "inference")


@pytest.mark.cover
@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "fused_gdn_decode"])
@pytest.mark.parametrize("form", ["compiled", "exported"])
def test_the_same_outcome_of_a_decode_call(name: str, form: str) -> None:
    check_outcome(name, form)


def check_outcome(name: str, form: str) -> None:
    given, function = CALLS[name](), getattr(gdn, name)
    want = outcome(function, copied(given))
    flags = {key: x for key, x in given.items() if not isinstance(x, Tensor)}
    tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}

    class Program(torch.nn.Module):
        def forward(self, **tensors: Tensor) -> Any:
            return function(**tensors, **flags)

    own = copied(tensors)
    if form == "inference":
        with torch.inference_mode():
            got = outcome(Program(), own)
    elif form == "compiled":
        torch._dynamo.reset()
        got = outcome(torch.compile(Program(), backend="aot_eager", fullgraph=True), own)
    else:
        got = outcome(torch.export.export(Program(), (), tensors).module(), own)
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))
