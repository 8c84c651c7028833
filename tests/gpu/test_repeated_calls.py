"""Repeated calls of every operator, which launch by a plan: the bits of a call that takes the ordinary path."""

import pytest
import torch

import gdn
from gdn.runtime import env
from tests.gpu import calls, test_streams
from tests.gpu.twins import are_same, outcome, twin

pytestmark = pytest.mark.gpu


MADE = {name: (call.function, call.make) for name, call in calls.CALLS.items()}
MADE |= {name: (function, make) for name, (function, _, make) in test_streams.MORE.items()}


@pytest.mark.parametrize(("name", "backend"), test_streams.REST)
def test_a_repeated_call_has_the_bits_of_a_first_one(name: str, backend: str, device: torch.device) -> None:
    function, arguments = getattr(gdn, MADE[name][0]), MADE[name][1](device)
    first, second, third = (twin(arguments) for _ in range(3))
    outcome(function, first, backend=backend)
    repeated = outcome(function, second, backend=backend)
    env.reload()  # drops all plans
    assert are_same(repeated, outcome(function, third, backend=backend))
