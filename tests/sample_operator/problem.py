"""`sample_scale`: out = factor * x."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, size


class SampleScaleParams(NamedTuple):
    """Arguments of a launch."""

    x: Any  # [tokens, dim]
    out: Any  # [tokens, dim]
    factor: float


@dataclass(frozen=True)
class SampleScaleProblem(Problem):
    """Compile key, tune key and sizes."""

    op: ClassVar[str] = "sample_scale"

    dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    out_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return self.num_tokens * self.dim * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.out_dtype])
