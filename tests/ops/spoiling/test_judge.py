"""The judge sees what it is there to see: operators that misbehave are found out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from tests.ops.spoiling.calls import good_call
from tests.ops.spoiling.judge import Wrong, check, spoilt
from tests.ops.spoiling.table import Row, rows

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATOR = "rms_norm_gated"
genuine = gdn.rms_norm_gated


def _row(argument: str, spoiling: str) -> Row:
    return next(row for row in rows(OPERATOR, argument) if row.spoiling == spoiling)


def _finds(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Any], argument: str, spoiling: str, message: str) -> None:
    row = _row(argument, spoiling)
    seed = next(seed for seed in range(100) if (found := spoilt(row, seed)) and found[0].get("x").numel())
    monkeypatch.setattr(gdn, OPERATOR, fake)
    with pytest.raises(Wrong, match=message):
        check(row, seed)


def _refusing(
    message: str, kind: type[Exception] = ValueError, *, first: Callable[..., Any] = lambda **_: None
) -> Callable[..., Any]:
    def fake(**arguments: Any) -> Any:
        first(**arguments)
        raise kind(message)

    return fake


def _accepting(then: Callable[..., Any]) -> Callable[..., Any]:
    """The good call's result, and then something more."""

    def fake(**arguments: Any) -> Any:
        plain = {name: x.detach().contiguous() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        return then(genuine(**plain), **arguments)

    return fake


def _double_z(**arguments: Any) -> None:
    arguments["z"].mul_(2)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (_refusing("z: expected 0 or more", TypeError), "TypeError instead"),
        (_refusing("z: expected 0 or more", RuntimeError), "RuntimeError instead"),
        (_refusing("shapes do not match"), "does not name"),
        (_refusing("eps: expected z"), "does not name"),
        (_refusing("z: wrong"), "of another form"),
        (_refusing("z: expected shape [3], got a tensor"), "of another form"),
        (_refusing("z: expected shape [3], got shape [2]", first=_double_z), "a tensor was changed before"),
        (lambda **arguments: None, "accepted"),
    ],
)
def test_a_wrong_refusal_is_found(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Any], message: str) -> None:
    _finds(monkeypatch, fake, "z", "one shorter", message)


def _changed_input(result: Any, **arguments: Any) -> Any:
    with torch.no_grad():
        arguments["weight"].mul_(2)
    return result


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda result, **_: result + 1, "differs from the good call"),
        (lambda result, **_: result.double(), "expected torch"),
        (lambda result, **_: (result, None), "the result is tuple"),
        (lambda result, **_: result.clone().requires_grad_(), "requires grad"),
        (_changed_input, "more was written"),
    ],
)
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, then: Callable[..., Any], message: str) -> None:
    row = _row("*", "nothing")
    seed = next(seed for seed in range(100) if good_call(OPERATOR, seed).get("x").numel())
    assert check(row, seed)  # the genuine one holds
    fake = _accepting(then)
    found = spoilt(row, seed)
    assert found is not None
    calls = iter([genuine, fake])  # the model's call first
    monkeypatch.setattr(gdn, OPERATOR, lambda **arguments: next(calls)(**arguments))
    with pytest.raises(Wrong, match=message):
        check(row, seed)


def test_a_silent_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _accepting(lambda result, **_: result)
    _finds(monkeypatch, fake, "x", "last dim not contiguous", "0 warnings name x")
