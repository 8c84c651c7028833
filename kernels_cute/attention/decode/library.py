"""Builds the library of sparse attention of decode."""

from typing import Any

import cutlass

from gdn.ops.attention.problem import SparseDecodeParams, SparseDecodeProblem
from kernels_cute.attention.decode.kernel import SparseDecode
from kernels_cute.attention.decode.spec import Spec
from kernels_cute.common import build
from kernels_cute.common.memory import fake


def _fakes(problem: SparseDecodeProblem) -> Any:
    """Fake tensors and numbers of a launch."""
    p = problem
    k_cache, v_cache = (fake(p.dtype, None, p.block_size, p.num_kv_heads, p.head_dim, last=1, align=16) for _ in range(2))
    topk_length = fake("int32" if p.has_topk_length else None, None)
    return SparseDecodeParams(
        # Contiguous by contract: the strides are not read, and left open because those of extent-1 modes may be anything.
        fake(p.dtype, None, p.num_heads, p.head_dim, last=1, align=16), k_cache, v_cache,
        fake(p.index_dtype, None, None, last=1), fake("int32", None, None, last=1), fake("int32", None), fake("int32", None),
        topk_length, fake(p.dtype if p.has_gate else None, None, p.num_heads, p.head_dim, last=1, align=16),
        fake(p.dtype, None, p.num_heads, p.head_dim, last=1), fake("float32", None, p.num_heads), None, cutlass.Float32(1.0),
    )  # fmt: skip


def library(entry: str, problem: SparseDecodeProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(entry, SparseDecode(Spec(problem, config)), _fakes(problem))
