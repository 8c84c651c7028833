"""The sample operator for the tuner and the benchmark."""

from dataclasses import replace
from typing import Any

import torch

from gdn.core.tunable import Call, Shape, Tunable, WrongResult, example, launch_of
from gdn.runtime import Prepared
from tests.sample_operator.problem import SampleScaleParams, SampleScaleProblem


class SampleScaleCase:
    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        problem: Any = shape.problem
        x = torch.randn(problem.num_tokens, problem.dim, device=device).to(getattr(torch, problem.dtype))
        self._params = SampleScaleParams(x, x.new_empty(x.shape, dtype=getattr(torch, problem.out_dtype)), 3.0)

    def check(self, prepared: Prepared) -> float:
        launch_of(prepared, self._params)()
        if not torch.equal(self._params.out, self._params.x.to(self._params.out.dtype) * 3.0):
            raise WrongResult("out is not 3 x")
        return 0.0

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, self._params)]

    def public_calls(self, backend: str | None) -> list[Call]:
        return [lambda: self._params.x * self._params.factor]


def _shape(num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} rows", example("sample_scale", num_tokens=num_tokens))


def _small(shape: Shape) -> Shape:
    assert isinstance(shape.problem, SampleScaleProblem)
    return replace(shape, problem=replace(shape.problem, num_tokens=3))


sample_scale = Tunable(SampleScaleCase, (_shape(128), _shape(8192)), small=_small)
