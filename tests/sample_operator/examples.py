"""The sample operator's problem on a model's shapes."""

from gdn.models import ModelShape
from tests.sample_operator.problem import SampleScaleProblem


def sample_scale(model: ModelShape, fp8: bool = False) -> SampleScaleProblem:
    """Rows of a prompt."""
    return SampleScaleProblem(model.hidden_size, "bfloat16", "float32", num_tokens=8192)
