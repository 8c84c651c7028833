"""The sample family: rows times a gain. One operator, whose example is next to its record."""

from gdn.core.example import BF16, TOKENS
from gdn.models import ModelShape
from gdn.ops.sample.problem import SampleScaleProblem
from gdn.runtime.registry import Family, Operator, modules

_SAMPLE = Family("gdn.ops.sample.cases", "tests.ops.test_sample_scale", "gdn.ops.sample", "tests.ops.test_sample_scale")
OPERATORS = (
    Operator("sample_scale", _SAMPLE, ("sample_scale",), modules("sample", "cute")),
)  # fmt: skip


def sample_scale(model: ModelShape, fp8: bool = False) -> SampleScaleProblem:
    """Rows of a prompt."""
    return SampleScaleProblem(model.hidden_size, BF16, BF16, num_tokens=TOKENS)
