"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g):

    u = beta * (v - a * S^T k)
    o = a * S^T q + u * (k . q)            equal to S_new^T q, and needs no second pass over S
    S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products
and u, never the registers of q and k.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.problems.RecurrentProblem` is the contract.

A block owns (sequence, state head, block_v columns of V). `lanes` threads share the K entries of `rows` columns each, so a
dot product is log2(lanes) shuffles; nothing passes through shared memory but the sums of K-first states, whose columns are
shared by several warps (`_state_sums`). A thread's part of the state is loaded at once (rows * K / lanes values in flight) and
every byte of it moves once each way, past L1 and out of L2 first. q, k, v and the gates of the next token are loaded while the
current one is computed; those of the first token before the state's slot is even known. For single tokens there is a form
without a token ahead: `_recurrent_in_turn`.
"""

from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from gdn.problems import RecurrentProblem
from gdn.recurrent_tiles import (
    TUNED_WITHIN,
    Config,
    configs,
    default_config,
    fits,
    is_single,
    reads_pool,
    refusal,
    writes_new_state,
)
from kernels_cute.common.memory import CUTE_DTYPES, fake
from kernels_cute.recurrent.kernel import Recurrent
from kernels_cute.recurrent.spec import Spec

__all__ = [
    "TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "suits", "workspace_bytes",
]  # fmt: skip


def suits(problem: RecurrentProblem, config: Config) -> bool:
    """Whether tiles tuned at other sizes are a choice here: without a token ahead each further token waits for its loads, which
    K first the stores of the state cover."""
    return config.prefetch_next_token or is_single(problem) or not problem.state_v_first and problem.write_every_token


def workspace_bytes(problem: RecurrentProblem, config: Config) -> int:
    return 0


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {"recurrent": build.library("recurrent", Recurrent(Spec(problem, config)), *_arguments(problem))}


def launch(
    compiled: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    final_state: Any,
    final_state_indices: Any,
    cu_seqlens: Any,
    parent_token: Any,
    rounding_seed: Any,
    out: Any,
    scale: float,
    null_slot: int,
) -> None:
    problem: RecurrentProblem = compiled.problem
    absent = cu_seqlens  # stands in for every tensor that the problem's flags leave out
    pool = initial_state if problem.has_initial_state else final_state
    compiled.functions["recurrent"](
        q,
        k,
        v,
        absent if problem.gate_dtype is None else g,
        absent if problem.beta_dtype is None else beta,
        A_log if problem.use_gate else absent,
        dt_bias if problem.use_gate else absent,
        pool if reads_pool(problem) else absent,
        state_indices if problem.pooled else absent,
        num_accepted_tokens if problem.has_accepted else absent,
        final_state if writes_new_state(problem) else absent,
        final_state_indices if problem.has_final_indices else absent,
        cu_seqlens,
        parent_token if problem.has_parent else absent,
        rounding_seed if problem.has_rounding else absent,
        out,
        scale,
        null_slot,
    )


def _arguments(problem: RecurrentProblem) -> list[Any]:
    """Fake tensors and scalars in the order of the compiled function."""
    K, V, HS = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    num_tokens, num_offsets = cute.sym_int(), cute.sym_int()

    def offsets() -> Any:
        return fake(problem.cu_seqlens_dtype, num_offsets, last=1)

    def per_head() -> Any:
        return fake("float32", HS, last=1) if problem.use_gate else offsets()

    def gate(dtype: str | None) -> Any:
        return offsets() if dtype is None else fake(dtype, 1, num_tokens, HS)

    def state(dtype: str) -> Any:
        inner = (V, K) if problem.state_v_first else (K, V)
        strides = (cute.sym_int64(), cute.sym_int64(), inner[1], 1)
        return make_fake_tensor(CUTE_DTYPES[dtype], (cute.sym_int64(), HS, *inner), stride=strides)

    def indices(present: bool) -> Any:
        if not present:
            return offsets()
        shape = (cute.sym_int(), cute.sym_int()) if problem.write_every_token else (cute.sym_int(),)
        return fake(str(problem.index_dtype), *shape)

    return [
        fake(problem.dtype, 1, num_tokens, problem.num_q_heads, K, last=1),
        fake(problem.dtype, 1, num_tokens, problem.num_k_heads, K, last=1),
        fake(problem.dtype, 1, num_tokens, problem.num_v_heads, V, last=1),
        gate(problem.gate_dtype),
        gate(problem.beta_dtype),
        per_head(),
        per_head(),
        state(problem.state_dtype) if reads_pool(problem) else offsets(),
        indices(problem.pooled),
        fake("int32", cute.sym_int()) if problem.has_accepted else offsets(),
        state("float32") if writes_new_state(problem) else offsets(),
        indices(problem.has_final_indices),
        offsets(),
        fake("int32", num_tokens, last=1) if problem.has_parent else offsets(),
        fake("int64", 1, last=1) if problem.has_rounding else offsets(),
        fake(problem.dtype, 1, num_tokens, HS, V, last=1),
        cutlass.Float32(1.0),
        cutlass.Int64(-1),
    ]
