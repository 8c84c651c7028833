"""A default device "cuda" and a default dtype of the caller change nothing in kernels, models and the engine: bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.cli.demo.engine import Stream
from tests.gpu import calls, test_streams
from tests.gpu.delta_rule import backends
from tests.gpu.small_models import FORMS
from tests.gpu.test_demo_engine import PROMPTS, make_engine, recording, tokens_of
from tests.gpu.twins import are_same, outcome, twin
from tests.ops.defaults import defaults

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float64)
# Name -> function, operator in the registry, arguments.
CALLS: dict[str, tuple[str, str, Callable[[torch.device], dict[str, Any]]]] = {
    **{name: (call.function, call.op, call.make) for name, call in calls.CALLS.items()},
    **{f"{name}, constants": call for name, call in test_streams.CALLS.items()},
    **test_streams.MORE,
}
EVERY = [(name, backend) for name, (_, op, _) in CALLS.items() for backend in backends(op)]


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_operators(name: str, backend: str, device: torch.device) -> None:
    function, _, make = CALLS[name]
    arguments, operator = make(device), getattr(gdn, function)
    wanted = outcome(operator, twin(arguments), backend=backend)
    for dtype in DTYPES:
        copies = [twin(arguments) for _ in range(2)]
        with defaults("cuda", dtype):
            for own in copies:  # the second call takes the plan of the first
                assert are_same(outcome(operator, own, backend=backend), wanted)


def steps(device: torch.device, form: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens and logits of prompts, a step of drafts and captured decode steps."""
    engine = make_engine(device, form, num_spec=3)
    with recording(engine) as logits:
        engine.prefill(tokens_of(PROMPTS, 0))
        engine.verify(tokens_of((3,) * len(PROMPTS), 1))
        engine.decode(4)
    streams: list[Stream] = engine.streams
    return [stream.tokens for stream in streams], logits


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_the_engine(form: str, device: torch.device) -> None:
    tokens, logits = steps(device, form)
    for dtype in DTYPES:
        with defaults("cuda", dtype):
            found = steps(device, form)
        assert found[0] == tokens and are_same(found[1], logits)
