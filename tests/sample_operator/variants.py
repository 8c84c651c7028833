"""The sample operator for the compile tests."""

from collections.abc import Collection

from tests.compile.expectations import Expectation
from tests.compile.variants.base import Variants, example
from tests.sample_operator.problem import SampleScaleProblem


def _code(problem: SampleScaleProblem, backend: str, entries: Collection[str]) -> Expectation:
    return Expectation({"LDG": 1})


sample_scale = Variants(
    {"dim": [128, 2048, 4096], "dtype": ["bfloat16", "float16"], "out_dtype": ["float32", "bfloat16"], "num_tokens": [8, 8192]},
    lambda row: example("sample_scale", **row),
    _code,
)
