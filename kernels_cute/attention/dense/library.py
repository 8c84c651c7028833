"""Builds the library of dense prefill."""

from typing import Any

import cutlass

from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from kernels_cute.attention.dense.kernel import AttendDensely
from kernels_cute.attention.dense.tiles import DenseTiles
from kernels_cute.common.build import library
from kernels_cute.common.memory import fake


def _arguments(problem: AttentionPrefillProblem) -> AttentionPrefillParams:
    p, heads, dim = problem, problem.num_heads, problem.head_dim
    caches = [fake(p.dtype, None, p.block_size, p.num_kv_heads, dim, last=1, align=16) for _ in range(2)]
    return AttentionPrefillParams(
        fake(p.dtype, None, heads, dim, last=(dim, 1), align=16),
        *caches,
        block_tables=fake("int32", None, None, last=1),
        query_start_loc=fake("int32", None, last=1),
        seq_lens=fake("int32", None, last=1),
        gate=fake(p.dtype if p.has_gate else None, None, heads, dim, last=1, align=16),
        out=fake(p.dtype, None, heads, dim, last=1),
        lse=fake("float32", None, heads, last=1),
        scale=cutlass.Float32(1.0),
    )


def library_of(name: str, problem: AttentionPrefillProblem, config: Any) -> dict[str, bytes]:
    return {name: library(name, AttendDensely(DenseTiles(problem, config)), *_arguments(problem))}
