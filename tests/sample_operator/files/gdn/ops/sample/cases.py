"""The sample operator for the tuner and the benchmarks."""

from collections.abc import Sequence
from functools import partial

from gdn.core import tunable as base
from gdn.ops.sample.problem import SampleScaleParams, SampleScaleProblem


def _scale(make: base.Maker, problem: SampleScaleProblem, lengths: Sequence[int]) -> base.Work:
    x = make.normal(problem.num_tokens, problem.dim, dtype=problem.dtype)
    arguments = {"x": x, "weight": make.normal(problem.dim, dtype=problem.weight_dtype), "factor": 3.0}
    out = make.poisoned(problem.num_tokens, problem.dim, dtype=problem.dtype)
    return base.Work("sample_scale", arguments, base.params_of(SampleScaleParams, arguments, out=out), (out,))


def _rows(num_tokens: int) -> base.Shape:
    return base.Shape(f"{num_tokens} rows", base.example("sample_scale", num_tokens=num_tokens))


sample_scale = base.Tunable(
    partial(base.StepCase, _scale, verdict="close"),
    shapes=(_rows(128), _rows(8192)),
    small=lambda shape: base.resized(shape, num_tokens=3),
)
