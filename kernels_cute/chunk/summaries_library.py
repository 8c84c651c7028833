"""Builds the library of the summaries of sequences."""

from typing import Any

import cutlass.cute as cute

from gdn.ops.delta_rule.problem import ChunkSummaryParams, ChunkSummaryProblem
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.parts import PartSummaries
from kernels_cute.common import build
from kernels_cute.common.memory import fake


def _fakes(problem: ChunkSummaryProblem) -> ChunkSummaryParams:
    heads, dim, num_tokens, sequences = problem.num_state_heads, problem.head_k_dim, cute.sym_int(), cute.sym_int64()

    def tokens(count: int) -> Any:
        return fake(problem.dtype, 1, num_tokens, count, dim, last=1, align=16)

    def matrices() -> Any:
        return fake("float32", sequences, heads, dim, dim, last=1)

    constants = "float32" if problem.use_gate else None
    return ChunkSummaryParams(
        k=tokens(problem.num_k_heads),
        v=tokens(problem.num_v_heads),
        g=fake(problem.gate_dtype, 1, num_tokens, heads),
        beta=fake(problem.beta_dtype, 1, num_tokens, heads),
        A_log=fake(constants, heads, last=1),
        dt_bias=fake(constants, heads, last=1),
        cu_seqlens=fake(problem.cu_seqlens_dtype, cute.sym_int(), last=1),
        h=matrices(),
        P=matrices(),
    )


def library(entry: str, problem: ChunkSummaryProblem, spec: ChunkSpec) -> dict[str, bytes]:
    return build.one_entry(entry, PartSummaries(spec).launch, _fakes(problem))
