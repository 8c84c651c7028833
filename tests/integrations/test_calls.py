"""Refusals that all adapters share."""

import functools
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


def test_devices_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_is_sm90", lambda index: index == 0)
    found = [_calls.unserved_device(torch.device(one)) for one in ("cuda:0", "cuda:1", "cpu", "meta")]
    assert found == [None, "the GPU is not SM90", "its parameters are on cpu", None]
    assert _calls.unserved_device(torch.device("cpu"), allow_reference=True) is None
    assert _calls.unserved_device(torch.device("cuda:1"), allow_reference=True) == "the GPU is not SM90"


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

    def triple(x: torch.Tensor, *, bias: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        return x * 3

    ask = _calls.asking(lambda bias, others: "a bias" if bias is not None or others else None, triple)
    taken = _calls.serve_or_leave(calls, double, ask, triple)
    compiled = torch.compile(taken, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls.served == 0 and taken(torch.ones(1)) == 3 and calls.served == 1


def test_a_refusal_is_asked_for_what_it_reads() -> None:
    def serve(a: int, b: int = 2, *, c: int = 3, **others: Any) -> None: ...

    def refusal(c: int, a: int, allow_reference: bool, others: dict[str, Any], named: bool = True) -> str:
        return f"{a} {c} {others} {allow_reference} {named}"

    assert _calls.asking(refusal, serve)(1, 5, d=4) == "1 3 {'d': 4} False True"
    ask = _calls.asking(functools.partial(refusal, named=False), serve)
    assert ask(b=1, c=7, a=0, allow_reference=True) == "0 7 {} True False"
    with pytest.raises(TypeError, match=r"serve\(\) missing 1 required positional argument: 'a'"):
        ask()
