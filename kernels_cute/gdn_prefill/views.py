"""Arguments of the three kernels as tensors inside those of a prefill step."""

from typing import Any

import cutlass.cute as cute

from gdn.ops.delta_rule.problem import ChunkParams
from gdn.ops.layer_step.problem import Conv1dParams, GdnPrefillParams, GdnPrefillProblem
from kernels_cute.common.memory import CUTE_DTYPES, columns, heads_of
from kernels_cute.gdn_prefill.parts import kept_states, kept_windows


def rows_view(problem: GdnPrefillProblem, address: Any, tokens: Any) -> Any:
    """The convolution's rows [tokens, dim] at an address of the workspace."""
    first = cute.make_ptr(CUTE_DTYPES[problem.dtype], address, cute.AddressSpace.gmem, assumed_align=256)
    return cute.make_tensor(first, cute.make_layout((tokens, problem.dim), stride=(problem.dim, 1)))


def conv_views(problem: GdnPrefillProblem, p: GdnPrefillParams, rows: Any) -> Conv1dParams:
    """rows: the convolution's output [tokens, dim]."""
    return Conv1dParams(
        p.mixed_qkv, p.conv_weight, p.conv_bias, p.conv_states, p.cu_seqlens, p.state_indices, p.has_initial_state,
        *kept_windows(problem, p), rows, p.null_slot,
    )  # fmt: skip


def chunk_views(problem: GdnPrefillProblem, p: GdnPrefillParams, first: Any, tokens: Any) -> ChunkParams:
    """q, k and v as slices of the rows at `first`; without the batch dimension, as kernels take them."""
    dim = problem.dim
    (H, HV), (K, V) = (problem.num_k_heads, problem.num_v_heads), (problem.head_k_dim, problem.head_v_dim)

    def heads(start: int, count: int, size: int) -> Any:
        return cute.make_tensor(first + start, cute.make_layout((tokens, count, size), stride=(dim, size, 1)))

    a, b = p.a, p.b
    if problem.merged:
        b, a = (columns(p.b, half * HV, HV) for half in range(2))
    elif problem.interleaved:
        a, b = _gates(p.b, H, HV // H)
    return ChunkParams(
        heads(0, H, K), heads(H * K, H, K), heads(2 * H * K, HV, V), a, b, p.A_log, p.dt_bias, p.ssm_state,
        p.state_indices, p.has_initial_state, p.ssm_state, None, p.cu_seqlens, *kept_states(problem, p),
        p.out, None, p.scale, p.null_slot,
    )  # fmt: skip


def norm_z(problem: GdnPrefillProblem, p: GdnPrefillParams, tokens: Any) -> Any:
    """[tokens, HV, V], or [tokens, (r, H), V] of interleaved rows."""
    if problem.merged:
        return heads_of(p.mixed_qkv, problem.dim, problem.num_v_heads, problem.head_v_dim)
    if not problem.interleaved:
        return p.z
    ratio, K, V = problem.num_v_heads // problem.num_k_heads, problem.head_k_dim, problem.head_v_dim
    group = 2 * (K + ratio * V)  # columns of a key head's q, k, v and z
    layout = cute.make_layout((tokens, (ratio, problem.num_k_heads), V), stride=(p.mixed_qkv.stride[0], (V, group), 1))
    return cute.make_tensor(p.mixed_qkv.iterator + (2 * K + ratio * V), layout)


def _gates(rows: Any, groups: int, ratio: int) -> tuple[Any, Any]:
    """a and b [tokens, (heads of a group, groups)] of interleaved rows [b | a] of each group."""
    token, step = rows.stride
    layout = cute.make_layout((rows.shape[0], (ratio, groups)), stride=(token, (step, 2 * ratio * step)))
    return cute.make_tensor(rows.iterator + ratio * step, layout), cute.make_tensor(rows.iterator, layout)
