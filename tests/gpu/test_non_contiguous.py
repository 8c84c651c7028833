"""Arguments whose last dimension is not contiguous, as transposed views: results of contiguous ones, and one warning."""

import logging
from typing import Any

import pytest
import torch

import gdn
from tests.gpu.calls import CALLS
from tests.gpu.delta_rule import Arguments
from tests.gpu.test_steps import Case, Maker, decode
from tests.gpu.twins import are_same, outcome, twin

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
TURNED = {  # what may come so
    "chunk": ("q", "k", "v"),
    "recurrent": ("q", "k", "v"),
    "decode": ("mixed_qkv", "z"),
    "conv": ("x",),
    "update": ("x",),
    "norm, float32": ("x", "z"),
    "split": ("mixed_qkvz", "mixed_ba"),
    "mqa, fp8": ("q", "k", "weights"),
    "mqa, bfloat16": ("q", "k", "weights"),
    "paged": ("q", "weights"),
    "topk": ("logits",),
    "sparse decode": ("q", "gate"),
    "sparse prefill": ("q", "gate"),
    "prepare": ("q", "k"),
    "quantize": ("x",),
}
CASES = [(name, argument, backend) for name, names in TURNED.items() for argument in names for backend in CALLS[name].backends]


def turned(x: Tensor, dim: int | None = None) -> Tensor:
    """The same values; `dim` is the one that is contiguous, by default the last other one that has more than one entry."""
    dim = max(i for i in range(x.dim() - 1) if x.shape[i] > 1) if dim is None else dim
    found = x.transpose(dim, -1).contiguous().transpose(dim, -1)
    assert found.stride(-1) != 1
    return found


def contiguous(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    return arguments | {name: arguments[name].contiguous() for name in names}


def copies(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The names of the arguments that warnings say were copied."""
    found = [record for record in caplog.records if record.name == "gdn" and ": copied, because" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage().partition(":")[0] for record in found]


def check(function: Any, arguments: Arguments, changes: Arguments, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Repeated calls with other tensors warn no more."""
    for time in range(3):
        expected = outcome(function, twin(arguments), backend=backend)
        assert time > 0 or copies(caplog) == []
        found = outcome(function, twin(arguments | changes), backend=backend)
        count = len(found) - sum(isinstance(x, Tensor) for x in arguments.values())
        # Inputs lie in memory in another order; what is written is the same.
        written = [x for name, x in zip(_tensors(arguments), expected[count:], strict=True) if name not in changes]
        left = [x for name, x in zip(_tensors(arguments), found[count:], strict=True) if name not in changes]
        assert are_same(found[:count] + left, expected[:count] + written)
    assert sorted(copies(caplog)) == sorted(changes)


def _tensors(arguments: Arguments) -> list[str]:
    return [name for name, x in arguments.items() if isinstance(x, Tensor)]


@pytest.mark.parametrize(("name", "argument", "backend"), CASES)
def test_one_argument(name: str, argument: str, backend: str, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    call = CALLS[name]
    arguments = contiguous(call.make(device), TURNED[name])
    changes = {argument: turned(arguments[argument])}
    with caplog.at_level(logging.WARNING, logger="gdn"):
        check(getattr(gdn, call.function), arguments, changes, backend, caplog)


@pytest.mark.parametrize(("name", "backend"), sorted({(name, backend) for name, _, backend in CASES}))
def test_all_of_them(name: str, backend: str, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens are the contiguous dimension too, as a model hands in [B, H, T, D] or [B, D, T] turned."""
    call = CALLS[name]
    arguments = contiguous(call.make(device), TURNED[name])
    changes = {one: turned(arguments[one], 1 if arguments[one].dim() == 4 else 0) for one in TURNED[name]}
    with caplog.at_level(logging.WARNING, logger="gdn"):
        check(getattr(gdn, call.function), arguments, changes, backend, caplog)


@pytest.mark.parametrize("backend", CALLS["update"].backends)
def test_three_dimensions_are_taken_by_their_strides(
    backend: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """x as [B, dim, T] needs no copy of the caller's making, whichever dimension is contiguous: no warning."""
    case = Case(lengths=(4,) * 6, padding=0, strided=False)
    arguments = decode(case, device) | {"query_start_loc": None, "out": None}
    flat = arguments["x"].view(6, 4, case.dim)
    with caplog.at_level(logging.WARNING, logger="gdn"):
        given = [twin(arguments | {"x": x}) for x in (flat.mT.contiguous(), flat.mT)]
        found = [outcome(gdn.causal_conv1d_update, one, backend=backend) for one in given]
    assert are_same(found[0][:1], found[1][:1])
    assert are_same(found[0][2:], found[1][2:])  # x comes first
    assert copies(caplog) == []


@pytest.mark.parametrize("backend", CALLS["conv"].backends)
def test_rows_of_another_tensor_are_no_copy(backend: str, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """A row stride alone is none of the warning's business."""
    make = Maker(Case(lengths=(50,), padding=0), device)
    x, filters = make.tokens(), make.filter()
    assert not x.is_contiguous() and x.stride(-1) == 1
    with caplog.at_level(logging.WARNING, logger="gdn"):
        found = gdn.causal_conv1d_fn(x, **filters, backend=backend)
        assert are_same([found], [gdn.causal_conv1d_fn(x.contiguous(), **filters, backend=backend)])
    assert copies(caplog) == []
