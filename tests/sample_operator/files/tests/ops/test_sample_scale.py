"""The sample operator: its calls, what its arguments may be, its variants to compile, and tests of its own."""

from collections.abc import Collection

import pytest
import torch

import gdn
from gdn import runtime
from gdn.ops.sample.problem import SampleScaleParams, SampleScaleProblem
from gdn.runtime import Choice, Prepared
from tests.compile.expectations import NO_REUSE, Expectation
from tests.compile.variants.base import Variants, example
from tests.described import Described
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.kinds import PARAMETER, ROWS, but


def _make(draw: Draw) -> Call:
    call = Call("sample_scale")
    tokens, dim = draw.tokens(0, 1, 3, 5), draw.size(12, 8, 16, served=64)
    call.give("x", draw.rows(draw.floats(tokens, dim, dtype=draw.any_float()), lead=1), "T D")
    call.give("weight", draw.floats(dim, dtype=draw.any_float()), "D")
    if draw.maybe():
        call.arguments["factor"] = draw.pick(2.0, 1, 0.5)
    return call


# Any number of dims: two more are no error.
CALLS = {"sample_scale": Described(_make, (("x", None),), {"x": but(ROWS, "two dims more"), "weight": PARAMETER})}


def _code(problem: SampleScaleProblem, backend: str, entries: Collection[str]) -> Expectation:
    return Expectation({"LDG": 2, "STG": 1}, none_of=NO_REUSE)


sample_scale = Variants(
    {
        "dim": [2048, 4096, 5120, 40],
        "dtype": ["bfloat16", "float16"],
        "weight_dtype": ["float32", "bfloat16"],
        "num_tokens": [8, 8192],
    },
    lambda row: example("sample_scale", **row),
    _code,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 16, generator=generator).to(dtype), torch.randn(16, generator=generator)
    exact = 0.5 * x.double() * weight.double()
    found = gdn.sample_scale(x, weight, 0.5)
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all())


def test_a_kernel_gets_rows_and_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[SampleScaleParams] = []
    kernel = Prepared("cute", None, 0, launched.append, Choice("sample_scale", "cute"))
    monkeypatch.setattr(runtime, "prepare", lambda *_: kernel)
    x, weight = torch.ones(2, 3, 8, dtype=torch.bfloat16), torch.ones(8)
    found = gdn.sample_scale(x, weight, 2.0)
    (params,) = launched
    assert params.x.shape == params.out.shape == (6, 8) and params.factor == 2.0
    assert params.out.data_ptr() == found.data_ptr() and found.shape == x.shape
