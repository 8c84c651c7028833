"""Problems of the operators between the passes of context parallel, as a serving engine calls them (gdn.core.example)."""

from typing import Any

from gdn.core.example import same
from gdn.models import ModelShape
from gdn.ops.context.problem import ContextPartsProblem, ContextStartProblem, ContextTotalProblem


def context_parts(model: ModelShape, fp8: bool = False) -> ContextPartsProblem:
    """Two segments of that rank."""
    dtypes: dict[str, Any] = {"sum_dtype": "float32", **same("int32", "cu_seqlens_dtype", "index_dtype")}
    return ContextPartsProblem(**dtypes, has_segments=True, num_sequences=1, num_segments=2)


def context_total(model: ModelShape, fp8: bool = False) -> ContextTotalProblem:
    """The first rank's message, from a pool on."""
    flags = same(True, "is_first", "has_summaries", "has_mask")
    pool: dict[str, Any] = {"state_dtype": "float32", "index_dtype": "int32"}
    return ContextTotalProblem(**_composing(model), **flags, **pool, num_sequences=1, num_segments=2)


def context_start(model: ModelShape, fp8: bool = False) -> ContextStartProblem:
    """States of one of four ranks that all keep the final ones."""
    final: dict[str, Any] = {"final_dtype": "float32", "index_dtype": "int32", "final_index_dtype": None}
    sizes: dict[str, Any] = {"num_sequences": 1, "num_segments": 2, "num_ranks": 4}
    return ContextStartProblem(**_composing(model), has_segments=True, is_cut=True, ends_here=False, **final, **sizes)


def _composing(model: ModelShape) -> dict[str, Any]:
    dims = {"num_state_heads": model.num_v_heads, "head_k_dim": model.head_k_dim, "head_v_dim": model.head_v_dim}
    return {**dims, "sum_dtype": "float32", "state_v_first": True}
