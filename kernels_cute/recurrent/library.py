"""Builds the library of the recurrent kernel."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.delta_rule import tiles as recurrent_tiles
from gdn.ops.delta_rule.problem import RecurrentParams, RecurrentProblem
from gdn.ops.delta_rule.tiles import Config
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.recurrent.kernel import Recurrent
from kernels_cute.recurrent.tokens import Spec


def library(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
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
    has_ring = p.ring_rows is not None
    ring_states = fake("float32" if has_ring else None, cute.sym_int64(), p.ring_rows, cute.sym_int64(), last=1)
    ring = (ring_states, *[fake("int32" if has_ring else None, size) for size in (cute.sym_int64(), None)])
    tokens, kept = (q, k, v, g, beta, A_log, dt_bias), (kept, kept_rows)
    scalars = (*scalars, Int32(0) if has_ring else None)
    given = (*tokens, *pool, cu_seqlens, parent_token, rounding_seed, *kept, *ring, out, *scalars)
    fakes = RecurrentParams(*given)
    return build.one_entry("recurrent", Recurrent(Spec(problem, config)), fakes)
