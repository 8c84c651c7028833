"""Projections that are columns of one or two tensors, as the separate ones that the kernels read: views, made in the launch."""

from gdn.ops.layer_step.problem import GdnDecodeParams, GdnDecodeProblem
from kernels_cute.common.memory import columns, heads_of


def flat_views(problem: GdnDecodeProblem, params: GdnDecodeParams) -> GdnDecodeParams:
    """Return the arguments with z, b and a as views of merged or concatenated rows. Rows may go on beyond q, k and v."""
    p, rows = problem, params.mixed_qkv
    if not (p.merged or p.concatenated):
        return params
    values, z = p.num_v_heads * p.head_v_dim, None
    if p.has_norm:
        z = heads_of(rows, p.dim, p.num_v_heads, p.head_v_dim)
    gates, first = (params.b, 0) if p.merged else (rows, p.dim + values)
    b, a = (columns(gates, first + half * p.num_v_heads, p.num_v_heads) for half in range(2))
    return params._replace(z=z, b=b, a=a)
