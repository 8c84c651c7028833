"""Refusals that all adapters share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations import _calls


def tokens(device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    place = torch.device(device)
    return SimpleNamespace(device=place, is_cuda=place.type == "cuda", is_cpu=False, dtype=dtype, requires_grad=False)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_is_sm90", lambda index: index == 0)
    assert _calls.unserved(tokens("cuda:0")) is None
    assert _calls.unserved(tokens("cuda:1")) == "the GPU is not SM90"
    for dtype in (torch.float32, torch.float64):
        assert _calls.unserved(tokens("cuda:0", dtype)) == f"the tokens are {str(dtype)[6:]}, which has no kernel"


def test_other_devices() -> None:
    assert _calls.unserved(torch.zeros(1)) == "the tokens are on cpu"
    assert _calls.unserved(torch.zeros(1), allow_reference=True) is None
    assert _calls.unserved(torch.zeros(1, device="meta"), allow_reference=True) == "the tokens are on meta"


def test_gradients() -> None:
    reason = "autograd needs gradients, which this project does not record"
    plain, wanted = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert _calls.unserved(wanted, allow_reference=True) == reason
    assert _calls.unserved(plain, (None, wanted), allow_reference=True) == reason
    assert _calls.unserved(plain, (None, plain), allow_reference=True) is None
    with torch.no_grad():
        assert _calls.unserved(wanted, (wanted,), allow_reference=True) is None


def test_states() -> None:
    assert _calls.unserved_state(None) is None
    assert all(_calls.unserved_state(torch.zeros(1, dtype=dtype)) is None for dtype in (torch.float32, torch.bfloat16))
    assert _calls.unserved_state(torch.zeros(1, dtype=torch.float16)) == "the states are float16"


def test_a_compiled_call_is_not_counted() -> None:
    calls = _calls.Calls()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    taken = _calls.serve_or_leave(calls, double, lambda x, allow_reference: None, lambda x: x * 3)
    compiled = torch.compile(taken, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls.served == 0 and taken(torch.ones(1)) == 3 and calls.served == 1
