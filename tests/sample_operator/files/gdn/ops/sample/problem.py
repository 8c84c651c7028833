"""`sample_scale`: out = factor * x * weight."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, size


class SampleScaleParams(NamedTuple):
    """Arguments of a launch."""

    x: Tensor  # [L, D], any stride of the rows
    weight: Tensor  # [D]
    out: Tensor  # [L, D], contiguous
    factor: float


@dataclass(frozen=True)
class SampleScaleProblem(Problem, op="sample_scale"):
    """Compile key, tune key and sizes."""

    dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    weight_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return 2 * self.num_tokens * self.dim * DTYPE_BYTES[self.dtype] + self.dim * DTYPE_BYTES[self.weight_dtype]
