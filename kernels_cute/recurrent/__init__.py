"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g): the steps of `common.delta_rule`.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.problems.RecurrentParams` has the contract of each.

A block owns (sequence, state head, block_v columns of V). Data flow of the form with a prefetch of the next token's inputs and of
the one without (`single_token`), places of the state, choice of tiles: DESIGN.md.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64

from gdn import recurrent_tiles
from gdn.problems import RecurrentParams, RecurrentProblem
from gdn.recurrent_tiles import TUNED_WITHIN, Config, configs, default_config, fits, refusal
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.recurrent.kernel import Recurrent
from kernels_cute.recurrent.tokens import Spec

__all__ = [
    "TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "suits", "workspace_bytes",
]  # fmt: skip

launch, workspace_bytes = build.launch, build.no_workspace


def suits(problem: RecurrentProblem, config: Config) -> bool:
    """Whether tiles tuned at other sizes are a choice here: without a prefetch each further token waits for its loads, which the
    stores of the state cover K first."""
    is_covered = not problem.state_v_first and problem.write_every_token
    return config.prefetch_next_token or recurrent_tiles.is_single(problem) or is_covered


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    p, K, V, heads, num_tokens = problem, problem.head_k_dim, problem.head_v_dim, problem.num_state_heads, cute.sym_int()
    inner = (V, K) if p.state_v_first else (K, V)
    columns = [None] * (2 if p.write_every_token else 1)
    rows = ((p.num_q_heads, K), (p.num_k_heads, K), (p.num_v_heads, V), (heads, V))
    q, k, v, out = [fake(p.dtype, 1, num_tokens, *row, last=1) for row in rows]
    g, beta = [fake(dtype, 1, num_tokens, heads) for dtype in (p.gate_dtype, p.beta_dtype)]
    A_log, dt_bias = [fake("float32" if p.use_gate else None, heads, last=1) for _ in range(2)]
    states = (p.state_dtype if recurrent_tiles.has_pool(p) else None, "float32" if recurrent_tiles.writes_new_state(p) else None)
    initial_state, final_state = [fake(dtype, cute.sym_int64(), heads, *inner, last=(inner[1], 1)) for dtype in states]
    indices, final_indices = [fake(p.index_dtype if there else None, *columns) for there in (p.pooled, p.has_final_indices)]
    accepted, cu_seqlens = fake("int32" if p.has_accepted else None, None), fake(p.cu_seqlens_dtype, None, last=1)
    parent_token = fake("int32" if p.has_parent else None, num_tokens, last=1)
    rounding_seed = fake("int64" if p.has_rounding else None, 1, last=1)
    pool = (initial_state, indices, accepted, final_state, final_indices)
    scalars = (Float32(1.0), Int64(-1))
    kept = fake(p.intermediate_dtype, cute.sym_int64(), cute.sym_int64(), heads, *inner, last=(inner[1], 1))
    kept_rows = fake(p.index_dtype if p.intermediate_dtype else None, None)
    given = (q, k, v, g, beta, A_log, dt_bias, *pool, cu_seqlens, parent_token, rounding_seed, kept, kept_rows, out, *scalars)
    fakes = RecurrentParams(*given)
    return build.one_entry("recurrent", Recurrent(Spec(problem, config)), fakes)
