"""Calls with a ring under torch.library's checks, in compiled and exported programs, and in inference mode."""

from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.ops.library_calls import compiled, copied, of_schema
from tests.ops.test_replay_args import CALLS, Arguments

Tensor = torch.Tensor


def outcome(function: Any, given: Arguments) -> list[Tensor]:
    """Results, and every tensor argument afterwards."""
    found = function(**given)
    results = [] if found is None else list(found) if isinstance(found, tuple) else [found]
    return [x for x in (*results, *given.values()) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, given = of_schema(name, CALLS[name]())
    torch.library.opcheck(operator, (), given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if form == "inference" or name == "fold_states" else pytest.mark.cover)
        for name in CALLS
        for form in ("inference", "compiled", "exported")
    ],
)
def test_the_same_outcome(name: str, form: str) -> None:
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
        got = outcome(compiled(Program()), own)
    else:
        got = outcome(torch.export.export(Program(), (), tensors).module(), own)
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))
