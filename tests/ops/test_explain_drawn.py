"""gdn.explain of drawn calls, whole, emptied and spoilt: an answer, or the error that the call itself raises."""

import random
from typing import Any

import pytest
import torch

import gdn
from gdn.runtime import registry
from tests.ops.spoiling.calls import OPERATORS, cover_from, good_call
from tests.ops.spoiling.judge import draw, spoilt

NAMES = sorted(OPERATORS)


def emptied(arguments: dict[str, Any], dims: dict[str, tuple[str, ...]], name: str) -> dict[str, Any]:
    """The arguments with nothing along one dimension."""
    found = dict(arguments)
    for path, names in dims.items():
        if isinstance(found.get(path), torch.Tensor):
            for place, own in enumerate(names[: found[path].dim()]):
                if own.rstrip("+") == name:
                    found[path] = found[path].narrow(place, 0, 0)
    return found


def explain(name: str, arguments: dict[str, Any]) -> None:
    try:
        answer = gdn.explain(name, **arguments)
    except (TypeError, ValueError) as error:
        assert type(error) in (TypeError, ValueError), type(error)
        assert str(error).strip()
        return
    assert answer.function in (name, *registry.operator(name).functions)
    assert answer.backend and answer.decided_by and str(answer)


def explain_drawn(seed: int) -> None:
    """A good call, the same without anything along some dimension, and a spoilt one."""
    source = random.Random(seed)
    call = good_call(source.choice(NAMES), seed)
    answer = gdn.explain(call.operator, **call.arguments)
    assert answer.backend and answer.decided_by and str(answer)
    names = sorted({own.rstrip("+") for dims in call.dims.values() for own in dims} - {"~"})
    explain(call.operator, emptied(call.arguments, call.dims, source.choice(names)) if names else call.arguments)
    row = draw(seed)
    found = spoilt(row, seed)
    assert found is not None
    _, spoiled = found
    with spoiled.around():
        explain(row.operator, spoiled.call.arguments)


@pytest.mark.parametrize("first", cover_from(300, range(0, 5000, 100)))
def test_drawn_calls(first: int) -> None:
    for seed in range(first, first + 100):
        explain_drawn(seed)
