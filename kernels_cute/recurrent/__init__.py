"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g):

    u = beta * (v - a * S^T k)
    o = a * S^T q + u * (k . q)            equal to S_new^T q, and needs no second pass over S
    S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products
and u, never the registers of q and k.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.problems.RecurrentParams` has the contract of each.

A block owns (sequence, state head, block_v columns of V). `threads_per_column` threads share the K entries of `v_per_thread`
columns each, so a dot product is log2(threads_per_column) shuffles; nothing passes through shared memory but the sums of K-first
states, whose columns are shared by several warps (`state_sums`). A thread's part of the state is loaded at once and every byte of
it moves once each way, past L1 and out of L2 first. q, k, v and the gates of the next token are loaded while the current one is
computed; those of the first token before the state's slot is even known. For single tokens there is a form without this prefetch:
`single_token`.
"""

from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from gdn.problems import RecurrentParams, RecurrentProblem
from gdn.recurrent_tiles import (
    TUNED_WITHIN,
    Config,
    configs,
    default_config,
    fits,
    has_pool,
    is_single,
    refusal,
    writes_new_state,
)
from kernels_cute.common.memory import CUTE_DTYPES, fake
from kernels_cute.recurrent.kernel import Recurrent
from kernels_cute.recurrent.spec import Spec

__all__ = [
    "TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "suits", "workspace_bytes",
]  # fmt: skip


ENTRY = "recurrent"


def suits(problem: RecurrentProblem, config: Config) -> bool:
    """Whether tiles tuned at other sizes are a choice here: without a prefetch each further token waits for its loads, which the
    stores of the state cover K first."""
    return config.prefetch_next_token or is_single(problem) or not problem.state_v_first and problem.write_every_token


def workspace_bytes(problem: RecurrentProblem, config: Config) -> int:
    return 0


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {ENTRY: build.library(ENTRY, Recurrent(Spec(problem, config)), *_fakes(problem))}


def launch(compiled: Any, params: RecurrentParams) -> None:
    compiled.functions[ENTRY](*params)


def _fakes(problem: RecurrentProblem) -> RecurrentParams:
    """Tensors and scalars to compile for; None for tensors that the problem leaves out."""
    K, V, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    num_tokens = cute.sym_int()

    def rows(heads: int, dim: int) -> Any:
        return fake(problem.dtype, 1, num_tokens, heads, dim, last=1)

    def gate(dtype: str | None) -> Any:
        return None if dtype is None else fake(dtype, 1, num_tokens, heads)

    def state(dtype: str) -> Any:
        inner = (V, K) if problem.state_v_first else (K, V)
        strides = (cute.sym_int64(), cute.sym_int64(), inner[1], 1)
        return make_fake_tensor(CUTE_DTYPES[dtype], (cute.sym_int64(), heads, *inner), stride=strides)

    def indices() -> Any:
        shape = (cute.sym_int(), cute.sym_int()) if problem.write_every_token else (cute.sym_int(),)
        return fake(str(problem.index_dtype), *shape)

    return RecurrentParams(
        q=rows(problem.num_q_heads, K),
        k=rows(problem.num_k_heads, K),
        v=rows(problem.num_v_heads, V),
        g=gate(problem.gate_dtype),
        beta=gate(problem.beta_dtype),
        A_log=fake("float32", heads, last=1) if problem.use_gate else None,
        dt_bias=fake("float32", heads, last=1) if problem.use_gate else None,
        initial_state=state(problem.state_dtype) if has_pool(problem) else None,
        state_indices=indices() if problem.pooled else None,
        num_accepted_tokens=fake("int32", cute.sym_int()) if problem.has_accepted else None,
        final_state=state("float32") if writes_new_state(problem) else None,
        final_state_indices=indices() if problem.has_final_indices else None,
        cu_seqlens=fake(problem.cu_seqlens_dtype, cute.sym_int(), last=1),
        parent_token=fake("int32", num_tokens, last=1) if problem.has_parent else None,
        rounding_seed=fake("int64", 1, last=1) if problem.has_rounding else None,
        out=rows(heads, V),
        scale=cutlass.Float32(1.0),
        null_slot=cutlass.Int64(-1),
    )
