"""Builds the libraries of sparse attention of prefill."""

from typing import Any

import cutlass

from gdn.ops.attention.problem import SparsePrefillParams, SparsePrefillProblem
from kernels_cute.attention.prefill.kernel import Attend, Unions
from kernels_cute.attention.prefill.tiles import PrefillTiles
from kernels_cute.common.build import library
from kernels_cute.common.memory import fake


def _arguments(problem: SparsePrefillProblem) -> tuple[Any, ...]:
    """Fake tensors and scalars to compile for: Params, the first tile of a launch, and how many it has."""
    p, heads, dim = problem, problem.num_heads, problem.head_dim
    caches = [fake(p.dtype, None, p.block_size, p.num_kv_heads, dim, last=1, align=16) for _ in range(2)]
    params = SparsePrefillParams(
        fake(p.dtype, None, heads, dim, last=(dim, 1), align=16),
        *caches,
        topk_indices=fake(p.index_dtype, None, None, last=1),
        block_tables=fake("int32", None, None, last=1),
        query_start_loc=fake("int32", None, last=1),
        seq_lens=fake("int32", None, last=1),
        topk_length=fake("int32" if p.has_topk_length else None, None, last=1),
        gate=fake(p.dtype if p.has_gate else None, None, heads, dim, last=1, align=16),
        out=fake(p.dtype, None, heads, dim, last=1),
        lse=fake("float32", None, heads, last=1),
        workspace=fake("uint8", None, last=1, align=16),
        scale=cutlass.Float32(1.0),
    )
    return (*params, cutlass.Int32(0), cutlass.Int32(1))


def libraries(problem: SparsePrefillProblem, config: Any, unions: str, attend: str) -> dict[str, bytes]:
    """unions, attend: names of the two entries."""
    tiles, arguments = PrefillTiles(problem, config), _arguments(problem)
    return {name: library(name, kernel(tiles), *arguments) for name, kernel in ((unions, Unions), (attend, Attend))}
