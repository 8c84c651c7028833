"""Builds the libraries of the chunk kernel of head dims 64 and 128."""

from typing import Any

import cutlass
import cutlass.cute as cute

from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem
from kernels_cute.chunk.four_sm.kernel import FourSmChunk
from kernels_cute.chunk.four_sm.shape import SCALED_PARTS
from kernels_cute.chunk.fused import FusedChunk
from kernels_cute.chunk.key_head.kernel import KeyHeadChunk
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.compose import SplitChunk
from kernels_cute.common import build
from kernels_cute.common.memory import fake


def host(spec: ChunkSpec, problem: ChunkProblem, config: Any) -> FusedChunk | SplitChunk | FourSmChunk | KeyHeadChunk:
    """What launches a variant."""
    if config.state_heads > 1:
        return KeyHeadChunk(spec)
    if config.num_four_sm_clusters:
        return FourSmChunk(spec, SCALED_PARTS[problem.dtype])
    return SplitChunk(spec) if spec.is_split else FusedChunk(spec)


def fake_params(problem: ChunkProblem, has_workspace: bool = False) -> ChunkParams:
    heads, dim = problem.num_state_heads, problem.head_k_dim
    num_tokens, columns = cute.sym_int(), cute.sym_int()
    pool_dtype = problem.state_dtype if problem.pooled else "float32"
    checkpoints = problem.has_checkpoints

    def tokens(count: int) -> Any:
        return fake(problem.dtype, 1, num_tokens, count, dim, last=1, align=16)

    def given(dtype: str | None, *shape: Any, last: int | None = None, present: Any = True) -> Any:
        return fake(dtype, *shape, last=last) if present and dtype is not None else None

    return ChunkParams(
        q=tokens(problem.num_q_heads),
        k=tokens(problem.num_k_heads),
        v=tokens(problem.num_v_heads),
        g=given(problem.gate_dtype, 1, num_tokens, heads),
        beta=given(problem.beta_dtype, 1, num_tokens, heads),
        A_log=given("float32", heads, last=1, present=problem.use_gate),
        dt_bias=given("float32", heads, last=1, present=problem.use_gate),
        initial_state=given(problem.state_dtype, cute.sym_int64(), heads, dim, dim, last=1, present=problem.has_initial_state),
        state_indices=given(problem.index_dtype, cute.sym_int()),
        has_initial_state=given("bool", cute.sym_int(), present=problem.has_mask),
        final_state=given(pool_dtype, cute.sym_int64(), heads, dim, dim, last=1, present=problem.has_final_state),
        final_state_indices=given(problem.index_dtype, cute.sym_int(), present=problem.has_final_indices),
        cu_seqlens=given(problem.cu_seqlens_dtype, cute.sym_int(), last=1),
        checkpoint_offsets=given("int32", cute.sym_int(), columns, last=1, present=checkpoints),
        checkpoint_slots=given(problem.checkpoint_index_dtype, cute.sym_int(), columns, last=1, present=checkpoints),
        checkpoint_states=given(problem.checkpoint_state_dtype, cute.sym_int64(), heads, dim, dim, last=1),
        out=tokens(heads),
        workspace=fake("uint8", cute.sym_int64(), last=1, align=256) if has_workspace else None,
        scale=cutlass.Float32(1.0),
        null_slot=cutlass.Int64(-1),
    )


def library(
    entry: str, problem: ChunkProblem, config: Any, spec: ChunkSpec, has_workspace: bool, scalars: tuple[int, ...]
) -> bytes:
    """scalars: the last arguments of a launch."""
    params = fake_params(problem, has_workspace)
    return build.library(entry, host(spec, problem, config).launch, *params, *map(cutlass.Int32, scalars))
