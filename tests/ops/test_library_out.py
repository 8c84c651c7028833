"""`out` with gaps between its rows, given to a compiled call or made in it: the bits of an eager call, and the gaps as before."""

import inspect
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.ops.library_calls import BY_TOKENS, as_tuple, check_same, compiled

NAMES = [name for name in BY_TOKENS if "out" in inspect.signature(getattr(gdn, name)).parameters]
TOKENS, GAP = 6, 16
POISON = 7  # of the elements between the rows


def expected(name: str, arguments: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = as_tuple(getattr(gdn, name)(**arguments))[0]
    return result


def buffer_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.full((*rows.shape[:-1], rows.shape[-1] + GAP), POISON, dtype=rows.dtype)


def check(buffer: torch.Tensor, want: torch.Tensor) -> None:
    width = want.shape[-1]
    assert same_bits(buffer[..., :width], want)
    assert bool((buffer[..., width:] == POISON).all())


@pytest.mark.parametrize("name", NAMES)
def test_given(name: str) -> None:
    plain, given = BY_TOKENS[name](TOKENS), BY_TOKENS[name](TOKENS)
    want = expected(name, plain)
    buffer = buffer_of(want)
    out = buffer[..., : want.shape[-1]]
    assert as_tuple(compiled(getattr(gdn, name))(**given, out=out))[0] is out
    check(buffer, want)
    check_same((), given, (), plain)  # pools are written as by an eager call


@pytest.mark.parametrize(
    ("name", "backend"), [("topk_indices", "aot_eager"), ("causal_conv1d_fn", "inductor"), ("attention", "aot_eager")]
)
def test_made_in_the_graph(name: str, backend: str) -> None:
    want = expected(name, BY_TOKENS[name](TOKENS))

    def step(buffer: torch.Tensor, **arguments: Any) -> torch.Tensor:
        rows = buffer[..., : want.shape[-1]]
        getattr(gdn, name)(**arguments, out=rows)
        return rows + 1

    buffer = buffer_of(want)
    assert same_bits(compiled(step, backend)(buffer, **BY_TOKENS[name](TOKENS)), want + 1)
    check(buffer, want)


def test_the_registered_operator_takes_either_name() -> None:
    logits = torch.randn(3, 9)
    want = gdn.topk_indices(logits, 4)
    for name in ("out", "out_written"):
        out = torch.zeros_like(want)
        torch.ops.gdn.topk_indices(logits, 4, **{name: out})
        assert same_bits(out, want)
