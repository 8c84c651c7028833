"""Builds the library of ragged logits."""

from typing import Any

import cutlass

from gdn.ops.indexer.problem import MqaLogitsParams, MqaLogitsProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.mqa_logits.kernel import RaggedLogits
from kernels_cute.mqa_logits.tiles import RaggedTiles


def _fakes(problem: MqaLogitsProblem) -> MqaLogitsParams:
    """Fake tensors and numbers of a launch."""
    p, dtype, dim = problem, problem.dtype, problem.head_dim
    # Contiguous by contract: the strides are not read, and left open because those of extent-1 modes may be anything.
    q, k = [fake(dtype, None, heads, dim, last=1, align=16) for heads in (p.num_heads, p.num_kv_heads)]
    k_scale = fake("float32" if p.has_k_scale else None, None, p.num_kv_heads)
    weights, out = fake(p.weights_dtype, None, p.num_heads, last=1), fake(p.out_dtype, None, None, last=1)
    bounds, scalars = [fake("int32", None) for _ in range(2)], (cutlass.Float32(1.0), cutlass.Int32(0))
    return MqaLogitsParams(q, k, k_scale, weights, *bounds, out, *scalars)


def library(entry: str, problem: MqaLogitsProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(entry, RaggedLogits(RaggedTiles(problem, config)), _fakes(problem))
