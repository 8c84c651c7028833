"""Repeated calls of every operator, which launch by a plan: the bits of a call that takes the ordinary path."""

import pytest
import torch

import gdn
from gdn.runtime import env
from tests.gpu import calls
from tests.gpu.twins import are_same, outcome, twin

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "backend"), [one for one in calls.every_call() if one[1] != "reference"])
def test_a_repeated_call_has_the_bits_of_a_first_one(name: str, backend: str, device: torch.device) -> None:
    call = calls.CALLS[name]
    function, arguments = getattr(gdn, call.function), call.make(device)
    first, second, third = (twin(arguments) for _ in range(3))
    outcome(function, first, backend=backend)
    repeated = outcome(function, second, backend=backend)
    env.reload()  # drops all plans
    assert are_same(repeated, outcome(function, third, backend=backend))
