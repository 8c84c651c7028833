"""What the composing kernels serve, and their configuration."""

from dataclasses import dataclass
from typing import Any

from kernels_cute.common.choice import FLOAT_DTYPES, INDEX_DTYPES, unserved

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Config:
    """Configuration without fields: the tiles follow from the head dims."""


def refusal(problem: Any) -> str | None:
    """Reason why the composing kernels do not serve a problem."""
    if problem.sum_dtype != "float32":
        return f"requires summaries of float32, got {problem.sum_dtype}"
    for name in ("head_k_dim", "head_v_dim"):
        if getattr(problem, name) not in HEAD_DIMS:
            return f"requires {name} of 64 or 128, got {getattr(problem, name)}"
    states = [getattr(problem, name, None) for name in ("state_dtype", "final_dtype")]
    indices = {name: getattr(problem, name, None) for name in ("index_dtype", "final_index_dtype")}
    pools = {"a state": next((dtype for dtype in states if dtype is not None), None)}
    return unserved({FLOAT_DTYPES[:2]: pools, INDEX_DTYPES: indices})
